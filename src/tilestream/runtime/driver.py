"""What this package asks of a GPU's driver itself: a write to memory in a stream's order, without an SM."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

_Write = Callable[[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint], int]


@functools.cache
def _stream_write() -> tuple[str, _Write]:
    """``cuStreamWriteValue32`` or its HIP twin, and its name."""
    hip = torch.version.hip is not None
    library, name = ("libamdhip64.so", "hipStreamWriteValue32") if hip else ("libcuda.so.1", "cuStreamWriteValue32_v2")
    function = getattr(ctypes.CDLL(library), name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint]
    return name, function


def stream_write(stream: int, address: int, value: int) -> None:
    """Write a 32-bit word once all that ``stream`` has been given so far is done and visible.

    The default flags: the driver fences before it writes, so whoever acquires the word sees, for one, a copy that came
    before it in the stream. No kernel is launched: it goes through where every SM is taken (invariant 10).

    Parameters
    ----------
    stream
        The handle of a stream of the current device.
    address
        Of a word in that device's memory.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    name, write = _stream_write()
    word = ctypes.c_uint32(value & 0xFFFFFFFF)
    code = write(ctypes.c_void_p(stream), ctypes.c_void_p(address), word, ctypes.c_uint(0))
    if code:
        raise RuntimeError(
            f"{name} failed with code {code}: this device or driver has no stream memory operations; signal the chunks "
            "from a kernel of your own, through signals= of your own"
        )
