"""CUDA's driver, by its own library: see `tilestream.runtime.driver.Driver`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

WRITE_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint)
COPY_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_CONTEXT_ARGUMENTS = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_ulonglong))
_REGISTER_ARGUMENTS = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
_POINTER_ARGUMENTS = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p, ctypes.c_uint)
#: For every context, and with an address on the device.
_PORTABLE, _MAPPED = 1, 2
CREATE_ARGUMENTS = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)
#: A stream that the legacy default stream does not wait for, nor it for that.
NON_BLOCKING = 1
#: CUdevResource, and more than enough of it: its type, 92 bytes of the driver's own, and for SMs their number.
_RESOURCE_WORDS, _RESOURCE_SM, _SM_COUNT = 128, 1, 24

#: A function of the library by its name and the types of its arguments.
Find = Callable[[str, tuple[type, ...]], Callable[..., int]]


class Cuda:
    """CUDA's driver.

    Parameters
    ----------
    find
        How its functions are looked up.
    """

    def __init__(self, find: Find) -> None:
        self._find = find

    def error_name(self, code: int) -> str:
        """``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""
        said = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            self._find(function, (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)))(code, ctypes.byref(text))
            said.append("" if text.value is None else text.value.decode())
        return f"{said[0]} ({said[1]})" if all(said) else f"code {code}"

    def bind_context(self) -> None:
        """A fresh thread has no context until CUDA's runtime was used in it."""
        context = ctypes.c_void_p()
        self._find("cuCtxGetCurrent", (ctypes.POINTER(ctypes.c_void_p),))(ctypes.byref(context))
        if not context.value:
            torch.cuda.cudart().cudaMemGetInfo(torch.cuda.current_device())

    def create_stream(self) -> int:
        """A stream of the current device."""
        self.bind_context()
        handle = ctypes.c_void_p()
        code = self._find("cuStreamCreate", CREATE_ARGUMENTS)(ctypes.byref(handle), NON_BLOCKING)
        if code or not handle.value:
            raise RuntimeError(f"the driver made no stream: code {code}")
        return handle.value

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """With the default flags: the driver fences before it writes.

        So a reader that acquires the word sees, for one, a copy that came before it in the stream.
        """
        self.bind_context()
        code = self._find("cuStreamWriteValue32_v2", WRITE_ARGUMENTS)(stream, address, value & 0xFFFFFFFF, 0)
        if code:
            raise RuntimeError(
                f"the driver's stream write failed with code {code}: this device has no stream memory operations; "
                "signal the chunks from a kernel of your own, through signals= of your own"
            )

    def stream_wait(self, stream: int, address: int, value: int) -> None:
        """At least, cyclically."""
        self.bind_context()
        code = self._find("cuStreamWaitValue32_v2", WRITE_ARGUMENTS)(stream, address, value & 0xFFFFFFFF, 0)
        if code:
            raise RuntimeError(f"the driver's stream wait failed: {self.error_name(code)}")

    def copy_in(self, stream: int, to: int, source: int, size: int) -> None:
        """From pinned memory."""
        code = self._find("cuMemcpyHtoDAsync_v2", COPY_ARGUMENTS)(to, source, size, stream)
        if code:
            raise RuntimeError(f"the driver's copy to the device failed with code {code}")

    def copy_across(self, stream: int, to: int, source: int, size: int) -> None:
        """Between GPUs."""
        code = self._find("cuMemcpyDtoDAsync_v2", COPY_ARGUMENTS)(to, source, size, stream)
        if code:
            raise RuntimeError(f"the driver's copy between devices failed: {self.error_name(code)}")

    def map_host_memory(self, address: int, size: int) -> int:
        """By registering it."""
        self.bind_context()
        code = self._find("cuMemHostRegister_v2", _REGISTER_ARGUMENTS)(address, size, _PORTABLE | _MAPPED)
        there = ctypes.c_void_p()
        code = code or self._find("cuMemHostGetDevicePointer_v2", _POINTER_ARGUMENTS)(ctypes.byref(there), address, 0)
        if code or not there.value:
            raise RuntimeError(f"the driver does not map the host's memory: {self.error_name(code)}")
        return there.value

    def capture_id(self, stream: int) -> int:
        """Of the capture that ``stream`` is in."""
        status, number = ctypes.c_int(), ctypes.c_ulonglong()
        code = self._find("cuStreamGetCaptureInfo_v2", (ctypes.c_void_p,) * 6)(
            stream, ctypes.addressof(status), ctypes.addressof(number), None, None, None
        )
        if code:
            raise RuntimeError(f"the driver does not say what is captured: code {code}")
        return number.value if status.value == 1 else 0

    def context_id(self) -> int:
        """A green context has one of its own."""
        number = ctypes.c_ulonglong()
        try:
            self._find("cuCtxGetId", _CONTEXT_ARGUMENTS)(None, ctypes.byref(number))
        except (OSError, AttributeError):  # no driver, or one that knows of one context only
            return 0
        return number.value

    def context_sms(self) -> int:
        """A green context has a part of the device's."""
        resource, context = (ctypes.c_uint32 * _RESOURCE_WORDS)(), ctypes.c_void_p()
        arguments = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        try:
            code = self._find("cuCtxGetCurrent", (ctypes.POINTER(ctypes.c_void_p),))(ctypes.byref(context))
            if code or not context.value:
                return 0
            # Of no context, unlike `cuCtxGetId`, this says nothing: not "the current one".
            code = self._find("cuCtxGetDevResource", arguments)(context.value, ctypes.addressof(resource), _RESOURCE_SM)
        except (OSError, AttributeError):
            return 0
        return 0 if code else resource[_SM_COUNT]
