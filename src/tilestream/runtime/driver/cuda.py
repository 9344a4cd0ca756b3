"""CUDA's driver, by its own library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import torch

from tilestream.runtime.driver.base import WHOLE_WORD, WRITE_ARGUMENTS, Driver

_POINTER = ctypes.POINTER(ctypes.c_void_p)
_REGISTER_ARGUMENTS = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
#: Flags of `cuMemHostRegister`: for every context, with a device address.
_PORTABLE, _MAPPED = 1, 2
#: Flags of `cuUserObjectCreate` and `cuGraphRetainUserObject`: no wait for the destructor; the graph takes it over.
_NO_DESTRUCTOR_SYNC, _MOVE = 1, 1
#: CUdevResource, with space to spare: its type, 92 bytes internal to the driver, and for SMs their number.
_RESOURCE_WORDS, _RESOURCE_SM, _SM_COUNT = 128, 1, 24


class Cuda(Driver):
    """CUDA's driver."""

    FUNCTIONS: ClassVar = {
        "create": "cuStreamCreate",
        "write": "cuStreamWriteValue32_v2",
        "copy_in": "cuMemcpyHtoDAsync_v2",
        "copy_out": "cuMemcpyDtoHAsync_v2",
        "copy_across": "cuMemcpyDtoDAsync_v2",
        "capture": "cuStreamGetCaptureInfo_v2",
        "capture_mode": "cuThreadExchangeStreamCaptureMode",
        "create_event": "cuEventCreate",
        "destroy_event": "cuEventDestroy_v2",
        "record_event": "cuEventRecord",
        "wait_event": "cuStreamWaitEvent",
        "query_event": "cuEventQuery",
        "synchronize_event": "cuEventSynchronize",
    }

    def error_name(self, code: int) -> str:
        """See `Driver`."""
        said = []
        for function in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            self._find(function, (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)))(code, ctypes.byref(text))
            said.append("" if text.value is None else text.value.decode())
        return f"{said[0]} ({said[1]})" if all(said) else f"code {code}"

    def bind_context(self) -> None:
        """See `Driver`."""
        if not self._context():
            torch.cuda.cudart().cudaMemGetInfo(torch.cuda.current_device())

    def _context(self) -> int:
        context = ctypes.c_void_p()
        code = self._find("cuCtxGetCurrent", (_POINTER,))(ctypes.byref(context))
        return 0 if code else context.value or 0

    def stream_wait(self, stream: int, address: int, value: int) -> None:
        """By a cyclic comparison."""
        self.bind_context()
        code = self._find("cuStreamWaitValue32_v2", WRITE_ARGUMENTS)(stream, address, value & WHOLE_WORD, 0)
        if code:
            raise self._failed(code, "refused the stream wait")

    def map_host_memory(self, address: int, size: int) -> int:
        """By registering it."""
        self.bind_context()
        code = self._find("cuMemHostRegister_v2", _REGISTER_ARGUMENTS)(address, size, _PORTABLE | _MAPPED)
        there = ctypes.c_void_p()
        arguments = (_POINTER, ctypes.c_void_p, ctypes.c_uint)
        code = code or self._find("cuMemHostGetDevicePointer_v2", arguments)(ctypes.byref(there), address, 0)
        if code or not there.value:
            raise self._failed(code, "does not map the host's memory")
        return there.value

    def _capture(self, stream: int) -> tuple[int, tuple[int, ...]]:
        """The graph into which the stream is captured, and the nodes that its next work will follow."""
        status, graph, nodes, count = ctypes.c_int(), ctypes.c_void_p(), _POINTER(), ctypes.c_size_t()
        code = self._find(self.FUNCTIONS["capture"], (ctypes.c_void_p,) * 6)(
            stream, ctypes.addressof(status), None, ctypes.addressof(graph), ctypes.addressof(nodes),
            ctypes.addressof(count),
        )  # fmt: skip
        if code or not graph.value:
            raise self._failed(code, "does not say what is captured")
        return graph.value, tuple(nodes[i] or 0 for i in range(count.value))

    def captured_nodes(self, stream: int) -> tuple[int, ...]:
        """See `Driver`."""
        return self._capture(stream)[1]

    def follow_nodes(self, stream: int, nodes: Sequence[int], alone: bool) -> None:
        """See `Driver`."""
        distinct = tuple(dict.fromkeys(nodes))
        follow = self._find(
            "cuStreamUpdateCaptureDependencies", (ctypes.c_void_p, _POINTER, ctypes.c_size_t, ctypes.c_uint)
        )
        code = follow(stream, (ctypes.c_void_p * len(distinct))(*distinct), len(distinct), int(alone))
        if code:
            raise self._failed(code, "refused another order in the graph that is captured")

    def call_when_gone(self, stream: int, function: int, argument: int) -> None:
        """By an object that the graph, and what is instantiated of it, retain."""
        made, graph = ctypes.c_void_p(), self._capture(stream)[0]
        create = self._find("cuUserObjectCreate", (_POINTER, *(ctypes.c_void_p,) * 2, *(ctypes.c_uint,) * 2))
        code = create(ctypes.byref(made), argument, function, 1, _NO_DESTRUCTOR_SYNC)
        retain = self._find("cuGraphRetainUserObject", (*(ctypes.c_void_p,) * 2, *(ctypes.c_uint,) * 2))
        code = code or retain(graph, made, 1, _MOVE)
        if code:
            raise self._failed(code, "does not say when a graph is gone")

    def context_id(self) -> int:
        """See `Driver`: a green context has a number of its own."""
        number = ctypes.c_ulonglong()
        try:
            self._find("cuCtxGetId", (ctypes.c_void_p, ctypes.POINTER(ctypes.c_ulonglong)))(None, ctypes.byref(number))
        except (OSError, AttributeError):  # no driver, or one without context numbers
            return 0
        return number.value

    def context_sms(self) -> int:
        """See `Driver`: a green context has a part of the device's SMs."""
        resource = (ctypes.c_uint32 * _RESOURCE_WORDS)()
        arguments = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
        try:
            context = self._context()  # cuCtxGetDevResource does not default to the current context
            if not context:
                return 0
            code = self._find("cuCtxGetDevResource", arguments)(context, ctypes.addressof(resource), _RESOURCE_SM)
        except (OSError, AttributeError):
            return 0
        return 0 if code else resource[_SM_COUNT]
