"""HIP's runtime, which is AMD's driver, too. It has run on an emulator, not on an AMD GPU.

It differs from CUDA as follows (AMD's sources, ROCclr and ``hipamd``, 2023 to 2026):

* A stream write is a kernel of one lane, after a packet that releases the stream's earlier work. It needs a free place
  on the GPU, which workers that wait for it must leave: `tilestream.plan.policy.cdna.workers_beside_producers`.
* A stream wait is such a kernel, too, unless the word is signal memory (``hipMallocSignalMemory``), for which the
  command processor waits. It compares ``word & mask`` and the value as unsigned numbers, not cyclically.
* Under capture both would run immediately instead of becoming part of the graph, so they are refused.
* Copies of more than 16 KiB go through the SDMA engines, smaller ones by a kernel.
* A device has one context, and a thread begins with device 0; torch's device guard selects another.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from tilestream.runtime.driver.base import WHOLE_WORD, WRITE_ARGUMENTS, Driver

_NAME = "libamdhip64.so"
_GTE = 0
_NO_BRANCHES = "branches of a graph are CUDA's; in a HIP graph the kernel makes the copies: copies='kernel'"
_MAPS = Path("/proc/self/maps")


@functools.cache
def library() -> str:
    """The file of HIP's runtime: the copy that torch has loaded, or else its name.

    A second copy in the process would be another runtime, without torch's streams.
    """
    try:
        return loaded(_MAPS.read_text(encoding="utf-8").splitlines()) or _NAME
    except OSError:
        return _NAME


def loaded(maps: Iterable[str]) -> str:
    """The file of HIP's runtime in the lines of ``/proc/self/maps``; empty if it is not loaded."""
    files = (line.split(maxsplit=5)[5] for line in maps if _NAME in line)
    return next((file for file in files if Path(file).name.startswith(_NAME)), "")


class Hip(Driver):
    """HIP's runtime."""

    FUNCTIONS: ClassVar = {
        "create": "hipStreamCreateWithFlags",
        "write": "hipStreamWriteValue32",
        "copy_in": "hipMemcpyHtoDAsync",
        "copy_out": "hipMemcpyDtoHAsync",
        "copy_across": "hipMemcpyDtoDAsync",
        "capture": "hipStreamGetCaptureInfo_v2",
        "capture_mode": "hipThreadExchangeStreamCaptureMode",
        "create_event": "hipEventCreateWithFlags",
        "destroy_event": "hipEventDestroy",
        "record_event": "hipEventRecord",
        "wait_event": "hipStreamWaitEvent",
        "query_event": "hipEventQuery",
        "synchronize_event": "hipEventSynchronize",
    }

    def error_name(self, code: int) -> str:
        """See `Driver`."""
        said = []
        for name in ("hipGetErrorName", "hipGetErrorString"):
            function = self._find(name, (ctypes.c_int,))
            function.restype = ctypes.c_char_p  # type: ignore[attr-defined]
            text: object = function(code)
            said.append(text.decode() if isinstance(text, bytes) else "")
        return f"{said[0]} ({said[1]})" if all(said) else f"code {code}"

    def bind_context(self) -> None:
        """Nothing to do: all threads share the device's context."""

    def stream_write(self, stream: int, address: int, value: int) -> None:
        """Not under capture."""
        self._refuse_capture(stream, "the stream write")
        super().stream_write(stream, address, value)

    def stream_wait(self, stream: int, address: int, value: int) -> None:
        """By a comparison of unsigned numbers; not under capture."""
        self._refuse_capture(stream, "the stream wait")
        wait = self._find("hipStreamWaitValue32", (*WRITE_ARGUMENTS, ctypes.c_uint32))
        code = wait(stream, address, value & WHOLE_WORD, _GTE, WHOLE_WORD)
        if code:
            raise self._failed(code, "refused the stream wait")

    def _refuse_capture(self, stream: int, what: str) -> None:
        status = ctypes.c_int()
        arguments = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        code = self._find("hipStreamIsCapturing", arguments)(stream, ctypes.byref(status))
        if code or status.value:
            raise RuntimeError(f"{what} is not captured: HIP makes it at once, and not in the graph; issue it eagerly")

    def map_host_memory(self, address: int, size: int) -> int:
        """Never called: only CUDA has symmetric memory (`tilestream.distributed.symmetric.why_not`)."""
        raise NotImplementedError("words that ranks share are CUDA's")

    def captured_nodes(self, stream: int) -> tuple[int, ...]:
        """Never called: what would be behind them is not captured."""
        raise NotImplementedError(_NO_BRANCHES)

    def follow_nodes(self, stream: int, nodes: Sequence[int], alone: bool) -> None:
        """As `captured_nodes`."""
        raise NotImplementedError(_NO_BRANCHES)

    def call_when_gone(self, stream: int, function: int, argument: int) -> None:
        """As `captured_nodes`."""
        raise NotImplementedError(_NO_BRANCHES)

    def context_id(self) -> int:
        """See `Driver`: a device has one context."""
        return 0

    def context_sms(self) -> int:
        """See `Driver`: the context has all SMs."""
        return 0
