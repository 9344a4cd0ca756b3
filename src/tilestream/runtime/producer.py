"""A native thread that issues copies and their signals once the host has what decides them: csrc/producer.h.

A Python thread would wait for the GIL, which the caller holds while it launches what reads the copies.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from tilestream.runtime import driver
from tilestream.runtime.extension import library

#: Of csrc/producer.cpp.
_VERSION = 1
#: The longest native wait in seconds: between two, Python handles signals, such as an interrupt.
_LONGEST_WAIT = 0.05
#: What the driver did, by the number of the operation that it refused.
_REFUSALS = (
    "does not say whether an event has come", "refused the copy to the device", "refused the stream write",
    "recorded no event",
)  # fmt: skip


class End(IntEnum):
    """What a job came to. The numbers are those of csrc/producer.h."""

    ISSUED = 0
    STOPPED = 1  # by `Producer.stop`
    BAD_ENDS = 2  # an end falls or is negative
    REFUSED = 3  # by the driver
    LOST = 4  # in a forked child, which does not have the thread


class Job(NamedTuple):
    """Copies of experts that have rows, most rows first, each followed by its signal.

    Addresses and handles must stay valid until the job has ended. The current device is that of the streams.
    """

    copied: int  # handle of the event behind the copy of `ends`, and behind the work that the copies must follow
    ends: int  # address of ``int32[experts]`` in host memory: where each expert's rows end
    experts: int
    size: int  # bytes of an expert
    to: int
    source: int
    words: int  # address of ``int32[experts]``, the signals
    epoch: int
    stream: int
    landed: int  # handle of an event that is recorded behind the last signal
    #: Handles of events behind the launches that read earlier epochs' signals, where `copied` is not behind them. If
    #: the job fails, the words of experts that do not come become ``-epoch`` behind all these.
    readers: Sequence[int] = ()


class Outcome(NamedTuple):
    """The end of a job."""

    end: End
    #: The number of experts whose copies and signals were issued.
    experts: int
    error: str  # the driver's, if `end` is `REFUSED`
    cpu_seconds: float


class Producer:
    """The thread, which lives as long as this object. It does one job at a time.

    Raises
    ------
    RuntimeError
        If there is no extension, its driver lacks a function, or no thread can be started.
    """

    def __init__(self) -> None:
        found = library()
        if found is None:
            raise RuntimeError("producer: there is no native extension")
        if not hasattr(found, "tilestream_producer_make"):
            raise RuntimeError("producer: the native extension is older: python -m tilestream_tools.native_build")
        self._library = found
        for name, result, arguments in (
            ("make", ctypes.c_void_p, (ctypes.c_void_p,)),
            ("start", ctypes.c_char_p, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
            ("wait", ctypes.c_int32, (ctypes.c_void_p, ctypes.c_int64)),
            ("is_busy", ctypes.c_int32, (ctypes.c_void_p,)),
            ("result", None, (ctypes.c_void_p, ctypes.c_void_p)),
            ("wake", None, (ctypes.c_void_p,)),
            ("stop", None, (ctypes.c_void_p,)),
            ("free", None, (ctypes.c_void_p,)),
        ):  # fmt: skip
            function = getattr(self._library, f"tilestream_producer_{name}")
            function.restype, function.argtypes = result, arguments
        why = ctypes.c_char_p()
        self._handle: int | None = self._library.tilestream_producer_make(ctypes.addressof(why))
        if self._handle is None:
            raise RuntimeError((why.value or b"").decode())

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None and not sys.is_finalizing():
            self._library.tilestream_producer_free(self._handle)

    def wake(self) -> None:
        """Wake the thread, which sleeps between jobs, because a job follows at once."""
        self._library.tilestream_producer_wake(self._handle)

    def start(self, job: Job) -> None:
        """Begin a job. The thread of the caller has the context of the job's device.

        Raises
        ------
        RuntimeError
            If the extension refuses the job; nothing is issued.
        """
        *fixed, readers = job
        integers = (_VERSION, *fixed, *readers)
        why = self._library.tilestream_producer_start(
            self._handle, (ctypes.c_int64 * len(integers))(*integers), len(integers)
        )
        if why is not None:
            raise RuntimeError(why.decode())

    @property
    def is_busy(self) -> bool:
        """Whether a job is under way."""
        return bool(self._library.tilestream_producer_is_busy(self._handle))

    def stop(self) -> None:
        """Have the job end before its next expert, or while it still waits for the offsets."""
        self._library.tilestream_producer_stop(self._handle)

    def wait(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds for the job's end, without the GIL; whether it has ended."""
        end = math.inf if timeout is None else time.perf_counter() + timeout
        while self.is_busy:
            left = end - time.perf_counter()
            if left <= 0:
                return False
            self._library.tilestream_producer_wait(self._handle, math.ceil(1e9 * min(left, _LONGEST_WAIT)))
        return True

    def outcome(self) -> Outcome:
        """The end of the last job, which is not under way any more."""
        words = (ctypes.c_int64 * 5)()
        self._library.tilestream_producer_result(self._handle, words)
        end, experts, operation, code, nanoseconds = words
        error = f"the driver {_REFUSALS[operation]}: {driver.error_name(code)}" if end == End.REFUSED else ""
        return Outcome(End(end), experts, error, nanoseconds / 1e9)
