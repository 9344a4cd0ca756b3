"""Calls on the meta device whose kernels are compiled, for a GPU that need not be here: what `tilestream warm` does.

The public ops bring such a call to canonical form as any other, and torch's dispatcher shows it here. A launch is made
of it as on that GPU, and called: it compiles what it would launch, under the same keys of Triton's cache.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from tilestream.core.device import DeviceProperties
from tilestream.launch import compiling
from tilestream.ops import attention_library, library


class _Ahead(TorchDispatchMode):
    """Compiles what calls on the meta device would launch on a device."""

    def __init__(self, device: DeviceProperties) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        if op in (library.gemm_op, library.gemm_arriving_op) and made.numel():
            library.compile_ahead(args, made, self._device, op is library.gemm_arriving_op)
        elif op in (attention_library.attention_op, attention_library.attention_arriving_op) and made[0].numel():
            arriving = op is attention_library.attention_arriving_op
            attention_library.compile_ahead(args, made, self._device, arriving)
        return made


@contextlib.contextmanager
def ahead(device: DeviceProperties) -> Iterator[None]:
    """In this block and thread, the ops' calls on the meta device compile their kernels for ``device``.

    Calls with ``arrival=`` compile the kernels of an arrival whose copies others make. Those that write into a given
    tensor compile nothing: a contiguous ``out=`` has the kernels of a call without it.

    Parameters
    ----------
    device
        A GPU's properties: `tilestream.core.gpu_specs.named`, or this machine's.
    """
    with compiling.ahead(device.arch), _Ahead(device):
        yield
