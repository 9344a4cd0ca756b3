"""The functions that CUDA's driver and HIP's runtime share under different names."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

#: A function of the library by its name and the types of its arguments.
Find = Callable[[str, tuple[type, ...]], Callable[..., int]]

WRITE_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint)
WHOLE_WORD = 0xFFFFFFFF
_CREATE_ARGUMENTS = (ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint)
_COPY_ARGUMENTS = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
#: A stream that does not synchronise with the legacy default stream.
_NON_BLOCKING = 1
_CAPTURING = 1
#: `cudaStreamCaptureModeRelaxed`, and HIP's.
RELAXED = 2
#: A new event has no timing, which would cost the stream more.
_NO_TIMING = 2
#: Both drivers' code for an event that is not complete.
_NOT_READY = 600
_EVENT = (ctypes.c_void_p,)


class Driver(ABC):
    """A GPU's driver: the functions of `tilestream.runtime.driver`, whose docstrings hold for these methods.

    Parameters
    ----------
    find
        Looks up a function of the driver's library.
    """

    #: Names in the library of the functions that both drivers have.
    FUNCTIONS: ClassVar[Mapping[str, str]]

    def __init__(self, find: Find) -> None:
        self._find = find

    def _failed(self, code: int, how: str, hint: str = "") -> RuntimeError:
        return RuntimeError(f"the driver {how}: {self.error_name(code)}{hint}")

    @abstractmethod
    def error_name(self, code: int) -> str:
        """``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""

    @abstractmethod
    def bind_context(self) -> None:
        """Make the device's context current in this thread."""

    def create_stream(self) -> int:
        """The handle of a new stream."""
        self.bind_context()
        handle = ctypes.c_void_p()
        code = self._find(self.FUNCTIONS["create"], _CREATE_ARGUMENTS)(ctypes.byref(handle), _NON_BLOCKING)
        if code or not handle.value:
            raise self._failed(code, "made no stream")
        return handle.value

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """With the default flags, so that the driver fences before it writes."""
        self.bind_context()
        code = self._find(self.FUNCTIONS["write"], WRITE_ARGUMENTS)(stream, address, value & WHOLE_WORD, 0)
        if code:
            hint = "; signal the chunks from a kernel of your own, through signals= of your own"
            raise self._failed(code, "refused the stream write", hint)

    @abstractmethod
    def stream_wait(self, stream: int, address: int, value: int) -> None:
        """Hold the stream until the word is at least ``value``."""

    def copy_in(self, stream: int, to: int, source: int, size: int) -> None:
        """From pinned memory to the device."""
        code = self._find(self.FUNCTIONS["copy_in"], _COPY_ARGUMENTS)(to, source, size, stream)
        if code:
            raise self._failed(code, "refused the copy to the device")

    def copy_out(self, stream: int, to: int, source: int, size: int) -> None:
        """From the device to pinned memory."""
        code = self._find(self.FUNCTIONS["copy_out"], _COPY_ARGUMENTS)(to, source, size, stream)
        if code:
            raise self._failed(code, "refused the copy from the device")

    def copy_across(self, stream: int, to: int, source: int, size: int) -> None:
        """Between GPUs."""
        code = self._find(self.FUNCTIONS["copy_across"], _COPY_ARGUMENTS)(to, source, size, stream)
        if code:
            raise self._failed(code, "refused the copy between devices")

    def create_event(self) -> int:
        """The handle of a new event, without timing."""
        self.bind_context()
        handle = ctypes.c_void_p()
        code = self._find(self.FUNCTIONS["create_event"], _CREATE_ARGUMENTS)(ctypes.byref(handle), _NO_TIMING)
        if code or not handle.value:
            raise self._failed(code, "made no event")
        return handle.value

    def destroy_event(self, event: int) -> None:
        """Free an event, which may be pending."""
        self._find(self.FUNCTIONS["destroy_event"], _EVENT)(event)

    def record_event(self, stream: int, event: int) -> None:
        """Record the event after all work issued so far."""
        self.bind_context()
        code = self._find(self.FUNCTIONS["record_event"], (ctypes.c_void_p, ctypes.c_void_p))(event, stream)
        if code:
            raise self._failed(code, "recorded no event")

    def wait_event(self, stream: int, event: int) -> None:
        """Hold the stream until the event is complete."""
        self.bind_context()
        code = self._find(self.FUNCTIONS["wait_event"], (*_EVENT, ctypes.c_void_p, ctypes.c_uint))(stream, event, 0)
        if code:
            raise self._failed(code, "refused the wait for an event")

    def has_come(self, event: int) -> bool:
        """Whether the event is complete."""
        self.bind_context()
        code = self._find(self.FUNCTIONS["query_event"], _EVENT)(event)
        if code not in (0, _NOT_READY):
            raise self._failed(code, "does not say whether an event has come")
        return not code

    def await_event(self, event: int) -> None:
        """Wait on the host until the event is complete."""
        self.bind_context()
        code = self._find(self.FUNCTIONS["synchronize_event"], _EVENT)(event)
        if code:
            raise self._failed(code, "did not wait for an event")

    @abstractmethod
    def map_host_memory(self, address: int, size: int) -> int:
        """The GPUs' address of pages of this process's memory."""

    def capture_id(self, stream: int) -> int:
        """The number of the capture that the stream is in; 0: none."""
        status, number = ctypes.c_int(), ctypes.c_ulonglong()
        code = self._find(self.FUNCTIONS["capture"], (ctypes.c_void_p,) * 6)(
            stream, ctypes.addressof(status), ctypes.addressof(number), None, None, None
        )
        if code:
            raise self._failed(code, "does not say what is captured")
        return number.value if status.value == _CAPTURING else 0

    def relax_captures(self) -> None:
        """See `tilestream.runtime.driver`."""
        self.exchange_capture_mode(RELAXED)

    def exchange_capture_mode(self, mode: int) -> int:
        """Set this thread's mode of captures; the mode before."""
        word = ctypes.c_int(mode)
        code = self._find(self.FUNCTIONS["capture_mode"], (ctypes.c_void_p,))(ctypes.addressof(word))
        if code:
            raise self._failed(code, "keeps this thread from asking about events")
        return word.value

    @abstractmethod
    def captured_nodes(self, stream: int) -> tuple[int, ...]:
        """The nodes that the stream's next work will follow, in the graph into which it is captured."""

    @abstractmethod
    def follow_nodes(self, stream: int, nodes: Sequence[int], alone: bool) -> None:
        """Have the stream's next work come behind ``nodes``; ``alone``: and behind no others."""

    @abstractmethod
    def call_when_gone(self, stream: int, function: int, argument: int) -> None:
        """Have a C function called when the graph that the stream is captured into is gone."""

    @abstractmethod
    def context_id(self) -> int:
        """The number of the thread's current context; 0 if contexts have no numbers."""

    @abstractmethod
    def context_sms(self) -> int:
        """The number of SMs of the thread's current context; 0 if the driver does not report it."""
