"""A fault, the place where it happens, and how one is run."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tilestream as ts
from error_rule import Maths, check
from streaming import threads_at_work

TESTS = Path(__file__).parents[1]
#: How a call ends that gives what torch gives.
RIGHT = "right"
#: Seconds of a deadline that is to pass, and of one that is not.
SHORT, LONG = 0.3, 60.0
#: Seconds beyond a fault's bound until a test fails: a machine may be slow, a call that waits for ever is slower.
SLACK = 300.0


class Fault(NamedTuple):
    """A row of the table.

    Attributes
    ----------
    part, name, does
        Where it belongs, what it is called, what is done.
    ends
        `RIGHT`, or a regular expression of the exception's type and message.
    within
        The seconds that the call may wait: its deadline, or 0 if it ends without waiting.
    where
        ``cpu``, ``cuda`` or both.
    on_gpus
        ``ends`` and ``within`` on GPUs, where they are others.
    do
        Makes the fault. It may return how the call ended, where that happened in another process.
    """

    part: str
    name: str
    does: str
    ends: str
    within: float
    where: tuple[str, ...]
    is_slow: bool
    on_gpus: tuple[str, float] | None
    do: Callable[[Place], str | None]

    def on(self, device: str) -> Fault:
        """The row as it is on ``device``."""
        if device != "cuda" or self.on_gpus is None:
            return self
        ends, within = self.on_gpus
        return self._replace(ends=ends, within=within)


class Outcome(NamedTuple):
    """How a fault ended, after how many seconds; what is wrong: nothing, if all is as the row says."""

    ended: str
    seconds: float
    wrong: str


TABLE: list[Fault] = []


def fault(
    part: str, name: str, does: str, ends: str = RIGHT, *, within: float = 0.0, where: tuple[str, ...] = ("cpu",),
    is_slow: bool = False, on_gpus: tuple[str, float] | None = None,
) -> Callable[[Callable[[Place], str | None]], Callable[[Place], str | None]]:  # fmt: skip
    """A function that makes a fault becomes a row of `TABLE`."""

    def add(do: Callable[[Place], str | None]) -> Callable[[Place], str | None]:
        TABLE.append(Fault(part, name, does, ends, within, where, is_slow, on_gpus, do))
        return do

    return add


class Feed:
    """A tensor of NaN that is filled with ``source`` chunk by chunk; on a GPU `feeds.Feed` is the same."""

    def __init__(self, arrival: ts.Arrival, source: torch.Tensor) -> None:
        self.arrival, self.source = arrival, source
        self.tensor = torch.full_like(source, float("nan"))

    def copy(self, *chunks: int) -> None:
        """Copy chunks, and signal none."""
        for chunk in chunks:
            begin, end = self.arrival.chunks(self.source.shape[0]).range_of(chunk)
            self.tensor[begin:end] = self.source[begin:end]

    def signal(self, *chunks: int) -> None:
        for chunk in chunks:
            self.arrival.signal(chunk)

    def __call__(self, *chunks: int) -> Feed:
        """Copy and signal chunks."""
        for chunk in chunks:
            self.copy(chunk)
            self.signal(chunk)
        return self

    def again(self) -> None:
        """The next epoch, with nothing there."""
        self.arrival.advance()
        self.tensor.fill_(float("nan"))


@dataclass
class Place:
    """Where a fault is made: operands of a device, and a clock.

    Attributes
    ----------
    device
        ``cpu`` or ``cuda``.
    folder
        Of the fault alone.
    patch
        Undone before the next call.
    ranks
        Of this device (`fault_table.ranks`).
    next
        The next call; `again` if a fault names none.
    """

    device: str
    folder: Path
    patch: pytest.MonkeyPatch
    ranks: Any
    next: Callable[[], object] | None = None
    _clock: list[float] = field(default_factory=list)

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def chunk(self) -> int:
        """Rows of a chunk; the input has four."""
        return 128 if self.is_gpu else 16

    @property
    def k(self) -> int:
        return 256 if self.is_gpu else 24

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_gpu else torch.float32

    def source(self) -> torch.Tensor:
        """Four chunks of rows, in the host's memory."""
        made = torch.randn(4 * self.chunk, self.k).to(self.dtype)
        return made.pin_memory() if self.is_gpu else made

    def weight(self) -> torch.Tensor:
        return torch.randn(self.k, 64).to(self.device, self.dtype)

    def feed(self) -> Any:
        """Four chunks, none of which has arrived."""
        arrival = ts.Arrival.uniform(self.chunk, 4, device=self.device if self.is_gpu else None)
        if self.is_gpu:
            from feeds import Feed as GpuFeed

            return GpuFeed(arrival, self.source())
        return Feed(arrival, self.source())

    def begin(self) -> None:
        """The clock begins here; the last call counts."""
        self._clock[:] = [time.monotonic()]

    def end(self) -> None:
        """The call has ended."""
        self._clock[1:] = [time.monotonic()]

    def took(self, seconds: float) -> None:
        """The call took so long, in another process."""
        self._clock[:] = [0.0, seconds]

    @property
    def seconds(self) -> float:
        return self._clock[1] - self._clock[0]

    def call(self, feed: Any, during: Callable[[], object] = lambda: None, *, deadline: float = LONG) -> None:
        """Multiply rows while ``during`` brings them; raises what the call raises, or checks its result.

        On the CPU ``during`` runs in a thread beside the call, on a GPU behind the launch.
        """
        b = self.weight()
        if self.is_gpu:
            torch.cuda.synchronize()
            self.begin()
            try:
                out = ts.matmul(feed.tensor, b, arrival=feed.arrival, deadline=deadline)
                during()
                torch.cuda.synchronize()
                ts.check()
            finally:
                self.end()
        else:
            with beside(during):
                self.begin()
                try:
                    out = ts.matmul(feed.tensor, b, arrival=feed.arrival, deadline=deadline, workers=2)
                finally:
                    self.end()
        check(out, Maths(feed.source.to(self.device), b))

    def again(self) -> None:
        """A call that is as any other: its chunks come while it waits."""
        feed = self.feed()
        self.call(feed, lambda: feed(0, 1, 2, 3))

    def stream(self, source: Any, *, deadline: float = LONG, want: torch.Tensor | None = None, **how: Any) -> None:
        """Multiply what `tilestream.stream_in` brings; ``want``: the rows that are meant."""
        self.begin()
        try:
            with ts.stream_in(source, device=self.device, **how) as x:
                b = torch.randn(x.tensor.shape[-1], 64).to(self.device, x.tensor.dtype)
                try:
                    out = ts.matmul(x, b, deadline=deadline)
                    if self.is_gpu:
                        torch.cuda.synchronize()
                        ts.check()
                finally:
                    self.end()
        except BaseException:
            self.end()
            raise
        if want is not None:
            check(out, Maths(want.to(self.device), b))


@contextlib.contextmanager
def beside(task: Callable[[], object]) -> Iterator[None]:
    """A block beside which a thread does ``task``; raises what it raised."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            task()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(LONG)
        assert not thread.is_alive(), "what happens beside the call has not ended"
        if errors:
            raise errors[0]


def run(row: Fault, place: Place) -> Outcome:
    """Make a fault, then the next call."""
    threads, files = threads_at_work(), _descriptors()
    place.begin()
    try:
        said = row.do(place) or RIGHT
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        place.patch.undo()
    if len(place._clock) < 2:
        place.end()
    seconds, wrong = place.seconds, []
    if not re.match(row.ends + ("$" if row.ends == RIGHT else ""), said, re.DOTALL):
        wrong.append(f"it ended otherwise: {said}")
    if seconds > row.within + SLACK:
        wrong.append(f"it took {seconds:.1f} s")
    try:
        (place.next or place.again)()
    except BaseException as error:
        wrong.append(f"the next call: {type(error).__name__}: {error}")
    wrong += _left(threads, files)
    return Outcome(said, seconds, "; ".join(wrong))


def params(device: str) -> Iterator[Any]:
    """The rows of a device, as parameters of a test."""
    for row in TABLE:
        if device in row.where:
            marks = [pytest.mark.slow] if row.is_slow else []
            yield pytest.param(row, id=f"{row.part}: {row.name}", marks=marks)


def _descriptors() -> set[str]:
    """Open files, by what they lead to; empty where that cannot be asked."""
    found = set()
    with contextlib.suppress(OSError):
        for one in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(str(one.readlink()))
    return {one for one in found if one.startswith("/") and not one.startswith(("/dev/", "/proc/"))}


def _left(threads: set[threading.Thread], files: set[str]) -> list[str]:
    """Threads left at work and files left open by a fault, once what ends by itself has had its time."""
    end = time.monotonic() + SLACK
    while True:
        alive = [one.name for one in threads_at_work() - threads if one.name.startswith("tilestream-")]
        if not alive or time.monotonic() > end:
            break
        time.sleep(0.01)
    opened = [one for one in _descriptors() - files if "fault" in one]
    return [f"threads are left: {alive}"] * bool(alive) + [f"files are left open: {opened}"] * bool(opened)


def use_folders(*names: str) -> None:
    """Make the helpers of other folders of tests importable."""
    for name in names:
        if (path := str(TESTS / name)) not in sys.path:
            sys.path.append(path)
