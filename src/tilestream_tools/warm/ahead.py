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
        if op is library.gemm_op and made.numel():
            library.compile_ahead(args, made, self._device)
        elif op is attention_library.attention_op and made[0].numel():
            attention_library.compile_ahead(args, made, self._device)
        return made


@contextlib.contextmanager
def ahead(device: DeviceProperties) -> Iterator[None]:
    """In this block and thread, the ops' calls on the meta device compile their kernels for ``device``.

    Calls that an arrival is part of, and those that write into a given tensor, compile nothing: the former are other
    kernels, the latter the kernels of calls without ``out=``, where ``out`` is contiguous.

    Parameters
    ----------
    device
        A GPU's properties: `tilestream.core.gpu_specs.named`, or this machine's.
    """
    with compiling.ahead(device.arch), _Ahead(device):
        yield
