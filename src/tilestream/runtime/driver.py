"""What this package asks of a GPU's driver itself: a stream of its own, and copies and writes in a stream's order."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch

_WRITE_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint)
_COPY_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_CREATE_ARGUMENTS = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)
#: A stream that the legacy default stream does not wait for, nor it for that: the same number in CUDA and HIP.
_NON_BLOCKING = 1


@functools.cache
def _function(cuda: str, hip: str, arguments: tuple[type, ...]) -> Callable[..., int]:
    """A function of the driver, by its name in CUDA's and in HIP's."""
    library, name = ("libcuda.so.1", cuda) if torch.version.hip is None else ("libamdhip64.so", hip)
    function: Callable[..., int] = getattr(ctypes.CDLL(library), name)
    function.argtypes = arguments  # type: ignore[attr-defined]
    return function


def cuda_function(name: str, *arguments: type) -> Callable[..., int]:
    """A function of CUDA's driver, which is called without the GIL and returns a code: see `error_name`."""
    return _function(name, "", arguments)


def error_name(code: int) -> str:
    """What CUDA's driver calls an error, and says of it: ``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""
    said = []
    for function in ("cuGetErrorName", "cuGetErrorString"):
        text = ctypes.c_char_p()
        cuda_function(function, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))(code, ctypes.byref(text))
        said.append("" if text.value is None else text.value.decode())
    return f"{said[0]} ({said[1]})" if all(said) else f"code {code}"


def bind_context() -> None:
    """Make the device's context this thread's own: a fresh thread has none until CUDA's runtime was used in it."""
    if torch.version.hip is not None:
        return
    context = ctypes.c_void_p()
    _function("cuCtxGetCurrent", "", (ctypes.POINTER(ctypes.c_void_p),))(ctypes.byref(context))
    if not context.value:
        torch.cuda.cudart().cudaMemGetInfo(torch.cuda.current_device())


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
    bind_context()
    write = _function("cuStreamWriteValue32_v2", "hipStreamWriteValue32", _WRITE_ARGUMENTS)
    code = write(stream, address, value & 0xFFFFFFFF, 0)
    if code:
        raise RuntimeError(
            f"the driver's stream write failed with code {code}: this device has no stream memory operations; signal "
            "the chunks from a kernel of your own, through signals= of your own"
        )


def stream_wait(stream: int, address: int, value: int) -> None:
    """Hold ``stream`` until the 32-bit word at ``address`` is at least ``value``, cyclically; no SM is held.

    For words that a peer GPU writes with `stream_write`: what came before that write in its stream is visible then.
    It has no bound: whoever issues it has a watchdog that can write the word.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    bind_context()
    code = _function("cuStreamWaitValue32_v2", "", _WRITE_ARGUMENTS)(stream, address, value & 0xFFFFFFFF, 0)
    if code:
        raise RuntimeError(f"the driver's stream wait failed: {error_name(code)}")


def copy_across(stream: int, to: int, source: int, size: int) -> None:
    """Copy ``size`` bytes between memories of GPUs that this process has mapped, in a stream's order.

    By a copy engine where one of them is another GPU's: no SM is needed.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    code = _function("cuMemcpyDtoDAsync_v2", "hipMemcpyDtoDAsync", _COPY_ARGUMENTS)(to, source, size, stream)
    if code:
        raise RuntimeError(f"the driver's copy between devices failed: {error_name(code)}")


def copy_in(stream: int, to: int, source: int, size: int) -> None:
    """Copy ``size`` bytes from pinned memory at ``source`` to ``to`` on the current device, in a stream's order.

    A fifth of what it costs the host to have torch do it. Both must live until the stream is past it.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    code = _function("cuMemcpyHtoDAsync_v2", "hipMemcpyHtoDAsync", _COPY_ARGUMENTS)(to, source, size, stream)
    if code:
        raise RuntimeError(f"the driver's copy to the device failed with code {code}")


def capture_id(stream: int) -> int:
    """A number that is another for each capture; 0 where ``stream`` is in none."""
    get = _function("cuStreamGetCaptureInfo_v2", "hipStreamGetCaptureInfo_v2", (ctypes.c_void_p,) * 6)
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    code = get(stream, ctypes.addressof(status), ctypes.addressof(number), None, None, None)
    if code:
        raise RuntimeError(f"the driver does not say what is captured: code {code}")
    return number.value if status.value == 1 else 0


def create_stream() -> int:
    """The handle of a new stream of the current device, which the default stream does not wait for.

    Raises
    ------
    RuntimeError
        If the driver refuses.
    """
    bind_context()
    create = _function("cuStreamCreate", "hipStreamCreateWithFlags", _CREATE_ARGUMENTS)
    handle = ctypes.c_void_p()
    code = create(ctypes.byref(handle), _NON_BLOCKING)
    if code or not handle.value:
        raise RuntimeError(f"the driver made no stream: code {code}")
    return handle.value
