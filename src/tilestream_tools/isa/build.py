"""Compiling a kernel for a GPU that is not present, through the kernel's own launch path.

Triton's driver is replaced, **for this process and for good**, by one that knows only a target. So this runs in a
process of its own (``python -m tilestream_tools.isa``, the compile gates of the tests), never in one that launches.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("TRITON_DUMP_PTXAS_LOG", "1")

import triton
from triton.backends.compiler import GPUTarget

TARGETS = {
    **{f"sm_{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 89, 100, 103, 110, 120)},
    "sm_90a": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


class Pointer:
    """A device tensor without the device.

    Parameters
    ----------
    address
        What Triton sees of its alignment.
    """

    def __init__(self, dtype: str, address: int = 0) -> None:
        self.dtype, self._address = _Dtype(dtype), address

    def data_ptr(self) -> int:
        """Its address."""
        return self._address

    def ptr_range(self) -> int:
        """Bytes that it has: not known, so that offsets are not taken to be small."""
        return 0


class _Dtype(str):
    def __str__(self) -> str:
        return f"torch.{str.__str__(self)}"


class NoGpu:
    """As much of a driver as a launch needs that stops after compiling."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)
    is_active = staticmethod(lambda: True)

    def get_current_target(self) -> GPUTarget:
        """What is compiled for."""
        return self._target


@contextlib.contextmanager
def caught() -> Iterator[list[str]]:
    """What ptxas, a child of this process, prints: one string, once the block has ended."""
    said: list[str] = []
    with tempfile.TemporaryFile(mode="w+") as file:
        keep = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            with contextlib.redirect_stdout(file):
                yield said
        finally:
            os.dup2(keep, 1)
            os.close(keep)
            file.seek(0)
            said.append(file.read())


def build(kernel: Any, filled: Sequence[Any], options: dict[str, Any], arch: str) -> tuple[Any, str]:
    """A kernel, compiled for ``arch``, and what the assembler said.

    Parameters
    ----------
    kernel
        A ``triton.jit`` or ``gluon.jit`` function.
    filled, options
        Its arguments, as for a launch, with `Pointer` for tensors; and how it is compiled.
    """
    with caught() as said:
        made = warm_up(kernel, filled, options, arch)
        if hasattr(made, "result"):
            made = made.result()
    return made, said[0]


def warm_up(kernel: Any, filled: Sequence[Any], options: dict[str, Any], arch: str) -> Any:
    """What Triton returns of a launch that ends when the kernel is compiled for ``arch``: see `build`."""
    triton.runtime.driver.set_active(NoGpu(TARGETS[arch]))
    kernel.device_caches.clear()  # Triton takes a device's target to be for ever
    return kernel.run(*filled, grid=(1,), warmup=True, **options)
