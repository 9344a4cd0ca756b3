"""HIP's runtime, which is AMD's driver too: see `tilestream.runtime.driver.Driver`. Never run: no AMD GPU was at hand.

What is different from CUDA, and what this package makes of it (AMD's sources, ROCclr and ``hipamd``, 2023 to 2026):

* A stream write is a kernel of one lane, behind a packet that releases what the stream has done. It needs a place on
  the GPU, which workers that wait for it must not hold: `tilestream.plan.policy.cdna.workers_beside_producers`.
* A stream wait is one too, unless the word is signal memory (``hipMallocSignalMemory``) and the command processor
  waits. It compares ``word & mask`` and the value as unsigned numbers, not cyclically.
* Copies of more than 16 KiB go through the SDMA engines, smaller ones by a kernel.
* There is one context a device, and a thread begins with device 0: torch's device guard is what matters.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from pathlib import Path

from tilestream.runtime.driver.cuda import COPY_ARGUMENTS, CREATE_ARGUMENTS, NON_BLOCKING, WRITE_ARGUMENTS, Find

_NAME = "libamdhip64.so"
_WAIT_ARGUMENTS = (*WRITE_ARGUMENTS, ctypes.c_uint32)
_GTE, _WHOLE_WORD = 0, 0xFFFFFFFF
_MAPS = Path("/proc/self/maps")


@functools.cache
def library() -> str:
    """The file of HIP's runtime: the one that torch has loaded, which may be torch's own copy; else by its name.

    A second copy in the process would be another runtime, which knows nothing of torch's streams.
    """
    try:
        return loaded(_MAPS.read_text(encoding="utf-8").splitlines()) or _NAME
    except OSError:
        return _NAME


def loaded(maps: Iterable[str]) -> str:
    """The file of HIP's runtime among the lines of ``/proc/self/maps``; empty where it is not."""
    files = (line.split(maxsplit=5)[5] for line in maps if _NAME in line)
    return next((file for file in files if Path(file).name.startswith(_NAME)), "")


class Hip:
    """HIP's runtime.

    Parameters
    ----------
    find
        How its functions are looked up.
    """

    def __init__(self, find: Find) -> None:
        self._find = find

    def error_name(self, code: int) -> str:
        """``hipErrorInvalidValue (invalid argument)``."""
        said = []
        for name in ("hipGetErrorName", "hipGetErrorString"):
            function = self._find(name, (ctypes.c_int,))
            function.restype = ctypes.c_char_p  # type: ignore[attr-defined]
            text: object = function(code)
            said.append(text.decode() if isinstance(text, bytes) else "")
        return f"{said[0]} ({said[1]})" if all(said) else f"code {code}"

    def bind_context(self) -> None:
        """A device has one context, which any thread can use."""

    def create_stream(self) -> int:
        """A stream of the current device."""
        handle = ctypes.c_void_p()
        code = self._find("hipStreamCreateWithFlags", CREATE_ARGUMENTS)(ctypes.byref(handle), NON_BLOCKING)
        if code or not handle.value:
            raise RuntimeError(f"the driver made no stream: {self.error_name(code)}")
        return handle.value

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """By a kernel of one lane."""
        code = self._find("hipStreamWriteValue32", WRITE_ARGUMENTS)(stream, address, value & _WHOLE_WORD, 0)
        if code:
            raise RuntimeError(
                f"the driver's stream write failed: {self.error_name(code)}; signal the chunks from a kernel of your "
                "own, through signals= of your own"
            )

    def stream_wait(self, stream: int, address: int, value: int) -> None:
        """At least, as unsigned numbers."""
        wait = self._find("hipStreamWaitValue32", _WAIT_ARGUMENTS)
        code = wait(stream, address, value & _WHOLE_WORD, _GTE, _WHOLE_WORD)
        if code:
            raise RuntimeError(f"the driver's stream wait failed: {self.error_name(code)}")

    def copy_in(self, stream: int, to: int, source: int, size: int) -> None:
        """From pinned memory."""
        code = self._find("hipMemcpyHtoDAsync", COPY_ARGUMENTS)(to, source, size, stream)
        if code:
            raise RuntimeError(f"the driver's copy to the device failed: {self.error_name(code)}")

    def copy_across(self, stream: int, to: int, source: int, size: int) -> None:
        """Between GPUs."""
        code = self._find("hipMemcpyDtoDAsync", COPY_ARGUMENTS)(to, source, size, stream)
        if code:
            raise RuntimeError(f"the driver's copy between devices failed: {self.error_name(code)}")

    def map_host_memory(self, address: int, size: int) -> int:
        """Never called: symmetric memory is CUDA's (`tilestream.distributed.symmetric.why_not`)."""
        raise NotImplementedError("words that ranks share are CUDA's")

    def capture_id(self, stream: int) -> int:
        """Of the capture that ``stream`` is in."""
        status, number = ctypes.c_int(), ctypes.c_ulonglong()
        code = self._find("hipStreamGetCaptureInfo_v2", (ctypes.c_void_p,) * 6)(
            stream, ctypes.addressof(status), ctypes.addressof(number), None, None, None
        )
        if code:
            raise RuntimeError(f"the driver does not say what is captured: {self.error_name(code)}")
        return number.value if status.value == 1 else 0

    def context_id(self) -> int:
        """There are no others."""
        return 0

    def context_sms(self) -> int:
        """All of them."""
        return 0
