"""Ways to take a part of the device away while a ``with`` block measures on the rest.

`Neighbour`
    Another kernel holds SMs; the measured kernels are not told.
`GreenContext`
    The driver gives the block a context with fewer SMs, and reports their number.
`CuMask`
    HIP gives the block a stream with fewer compute units.
`BusyCores`
    Busy processes on cores of their own: the CPU's form of `Neighbour`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from tilestream.core.device import DeviceProperties
from tilestream.runtime.driver import error_name, hip_function, stream_write
from tilestream.runtime.streams import lend_to


class Taker(Protocol):
    """Takes units of the device away: SMs, cores."""

    #: What a record calls it.
    name: str
    #: Units of the device.
    units: int
    #: Whether what is taken is shared with the block: then more than the units left may be had.
    shares: bool
    #: Whether a plan that is made inside the block knows what is left.
    tells: bool

    def left(self, count: int) -> int:
        """Units that a block with ``count`` less will have."""

    def taking(self, count: int) -> contextlib.AbstractContextManager[int]:
        """A block with ``count`` units less; it is told how many are left.

        Raises
        ------
        ValueError
            If the device has not so many, and one that is left.
        RuntimeError
            If they were not taken, or not for the whole of the block.
        """


def refuse_count(units: int, count: int) -> None:
    """Raise unless ``count`` of ``units`` can be taken, and one is left."""
    if not 0 <= count < units:
        raise ValueError(f"{count} taken of {units}: from 0 to {units - 1} can be, so that one is left to measure on")


class Neighbour:
    """A kernel on a stream of its own that holds SMs: see `tilestream_tools.sweep.sm_hog`.

    Everything that the block launches must have been launched before: a module that is loaded, memory that is taken
    from the driver or given back, and a synchronisation of the device all wait for the neighbour, until its deadline.

    Parameters
    ----------
    device
        `tilestream.runtime.properties.cuda_properties` of the current device.
    deadline
        Seconds after which the neighbour leaves by itself; a block that lasts as long fails.
    """

    name, shares, tells = "neighbour", False, False
    #: Seconds in which a kernel that was launched on an idle device has begun.
    START_SECONDS = 5.0

    def __init__(self, device: DeviceProperties, deadline: float = 30.0) -> None:
        from tilestream_tools.sweep.sm_hog import PIECE

        if os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
            raise ValueError(
                "CUDA_LAUNCH_BLOCKING is set: the launch of a neighbour would return when it has left; unset it"
            )
        self.units, self._pieces, self._deadline = device.workers, device.shared // PIECE, deadline
        #: The SMs that it holds, or held last.
        self.held: frozenset[int] = frozenset()
        here = torch.device("cuda", torch.cuda.current_device())
        self._hold, self._copy = lend_to(self, here), lend_to(self, here)
        self._words, self._clocks, self._there = _memory(self.units, here)
        with self.taking(1):  # loads the module
            pass

    def left(self, count: int) -> int:
        """As `Taker.left`."""
        refuse_count(self.units, count)
        return self.units - count

    @contextlib.contextmanager
    def taking(self, count: int) -> Iterator[int]:
        """As `Taker.taking`; each SM is one that the kernel says that it holds."""
        refuse_count(self.units, count)
        if not count:
            yield self.units
            return
        self._launch(count)
        try:
            self.held = self._wait(count)
            if len(self.held) != count:
                raise RuntimeError(
                    f"the neighbour holds {len(self.held)} SMs, not {count}: something else runs on this GPU"
                )
            yield self.units - count
        finally:
            stream_write(self._copy.cuda_stream, self._words.data_ptr(), 1)
            self._hold.synchronize()
        left = self._read()[1][:count]
        if (left != 1).any():
            raise RuntimeError(
                f"the neighbour left after its deadline of {self._deadline:g} s, before the block ended: what the "
                "block measured counts for nothing; measure less at a time, or give it longer"
            )

    def _launch(self, count: int) -> None:
        from tilestream_tools.sweep.sm_hog import hold

        words, units = self._words, self.units
        torch.cuda.current_stream().synchronize()  # on an idle device it begins at once
        with torch.cuda.stream(self._hold):
            words.zero_()
            self._clocks.zero_()
            self._hold.synchronize()  # what is read from now on is what this launch reports
            hold[(count,)](
                words[:1], words[1 : 1 + units], words[1 + units :], self._clocks, int(1e9 * self._deadline),
                self._pieces, num_warps=4,
            )  # fmt: skip

    def _wait(self, count: int) -> frozenset[int]:
        """The SMs that are held, once all have reported."""
        limit = time.monotonic() + self.START_SECONDS
        while True:
            held = self._read()[0][:count]
            if (held > 0).all() or time.monotonic() > limit:
                return frozenset((held[held > 0] - 1).tolist())
            time.sleep(1e-4)

    def _read(self) -> torch.Tensor:
        """What the CTAs reported, and why they left; by a copy engine, which needs no SM."""
        with torch.cuda.stream(self._copy):
            self._there.copy_(self._words[1:].view(2, -1), non_blocking=True)
        self._copy.synchronize()
        return self._there


def _memory(units: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The stop word, then what each CTA reports and why it left; their clocks; and a copy of the words that they write.

    The copy is in host memory that a copy engine reaches.
    """
    words = torch.zeros(1 + 2 * units, dtype=torch.int32, device=device)
    clocks = torch.zeros(units, dtype=torch.int64, device=device)
    return words, clocks, torch.zeros(2, units, dtype=torch.int32, pin_memory=True)


class GreenContext:
    """Green contexts of the current device, as torch makes them."""

    name, shares, tells = "green", False, True

    def __init__(self, device: DeviceProperties) -> None:
        self.units = device.workers
        #: One for each number: what was compiled or taken from the driver in one is used in it again.
        self._contexts: dict[int, Any] = {}

    def left(self, count: int) -> int:
        """As `Taker.left`."""
        with self.taking(count) as left:
            return left

    @contextlib.contextmanager
    def taking(self, count: int) -> Iterator[int]:
        """As `Taker.taking`. The driver rounds up to what it can split SMs by; what is left is what it says."""
        refuse_count(self.units, count)
        if not count:
            yield self.units
            return
        from torch.cuda.green_contexts import GreenContext as Context

        from tilestream.runtime.properties import context_units

        torch.cuda.synchronize()
        if count not in self._contexts:
            self._contexts[count] = Context.create(num_sms=self.units - count, device_id=torch.cuda.current_device())
        context = self._contexts[count]
        context.set_context()
        try:
            left = context_units(torch.cuda.current_device())
            if not left:
                raise RuntimeError(f"a green context of {self.units - count} SMs was asked for, and has all of them")
            yield left
            torch.cuda.current_stream().synchronize()
        finally:
            context.pop_context()


def mask_words(left: int) -> list[int]:
    """A mask of the first ``left`` compute units, 32 a word.

    The bits go round the dies (bit i is a unit of die i modulo their number), and within one round the shader engines:
    so each die, and each engine, has as many units, or one more.
    """
    mask = (1 << left) - 1
    return [mask >> at & 0xFFFFFFFF for at in range(0, left, 32)]


class CuMask:
    """Streams of HIP's whose kernels run on a part of the compute units, of each die as many. Plans are not told."""

    name, shares, tells = "cu_mask", False, False

    def __init__(self, device: DeviceProperties) -> None:
        if torch.version.hip is None:
            raise ValueError("CU masks are HIP's, and this torch is built for CUDA: take green contexts (--by green)")
        self.units = device.workers
        self._streams: dict[int, torch.cuda.Stream] = {}

    def left(self, count: int) -> int:
        """As `Taker.left`."""
        refuse_count(self.units, count)
        return self.units - count

    @contextlib.contextmanager
    def taking(self, count: int) -> Iterator[int]:
        """As `Taker.taking`."""
        left = self.left(count)
        if not count:
            yield left
            return
        torch.cuda.synchronize()
        if count not in self._streams:
            self._streams[count] = torch.cuda.ExternalStream(_masked_stream(left))
        with torch.cuda.stream(self._streams[count]):
            yield left
        self._streams[count].synchronize()


def _masked_stream(left: int) -> int:
    words, stream = mask_words(left), ctypes.c_void_p()
    create = hip_function(
        "hipExtStreamCreateWithCUMask",
        ctypes.POINTER(ctypes.c_void_p),
        ctypes.c_uint32,
        ctypes.POINTER(ctypes.c_uint32),
    )
    code = create(ctypes.byref(stream), len(words), (ctypes.c_uint32 * len(words))(*words))
    if code or not stream.value:
        raise RuntimeError(f"HIP made no stream with {left} compute units: {error_name(code)}")
    return stream.value


#: A process that never rests, until its parent ends it or is gone, or its time is over.
_BUSY = """
import os, sys, time
core, seconds = int(sys.argv[1]), float(sys.argv[2])
os.sched_setaffinity(0, {core})
parent, end = os.getppid(), time.monotonic() + seconds
print("busy", flush=True)
while time.monotonic() < end and os.getppid() == parent:
    sum(range(20000))
"""


class BusyCores:
    """Processes that never rest, each on a core of its own. A core is shared, not held: the system takes turns."""

    name, shares, tells = "busy", True, False

    def __init__(self, device: DeviceProperties, deadline: float = 120.0) -> None:
        self.units, self._deadline = device.workers, deadline

    def left(self, count: int) -> int:
        """As `Taker.left`."""
        refuse_count(self.units, count)
        return self.units - count

    @contextlib.contextmanager
    def taking(self, count: int) -> Iterator[int]:
        """As `Taker.taking`."""
        refuse_count(self.units, count)
        cores = sorted(os.sched_getaffinity(0))[-count:] if count else []
        busy: list[subprocess.Popen[str]] = []
        begin = time.monotonic()
        try:
            for core in cores:
                command = [sys.executable, "-c", _BUSY, str(core), str(self._deadline)]
                busy.append(subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True))
            for process in busy:
                assert process.stdout is not None
                if process.stdout.readline() != "busy\n":
                    raise RuntimeError(f"a neighbour on the CPU did not start; it ended with {process.wait()}")
            yield self.units - count
            if any(process.poll() is not None for process in busy) or time.monotonic() - begin > self._deadline:
                raise RuntimeError(f"a neighbour on the CPU ended before the block did, after {self._deadline:g} s")
        finally:
            for process in busy:
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


def taker(name: str, device: DeviceProperties) -> Taker:
    """The one that a record calls ``name``."""
    known: dict[str, type[Neighbour] | type[GreenContext] | type[CuMask] | type[BusyCores]] = {
        "neighbour": Neighbour, "green": GreenContext, "cu_mask": CuMask, "busy": BusyCores,
    }  # fmt: skip
    return known[name](device)
