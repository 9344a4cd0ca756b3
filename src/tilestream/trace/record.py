"""Recording which worker did which tile when.

Off by default, and free when off: a launch checks once for a recorder. `record` turns it on for the calls inside its
``with`` block, in this thread and what it awaits. On a GPU a traced variant of the kernel is launched then, which
writes each work item's worker, SM and times; the block reads them at its end.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tilestream.core.forks import free_in_child

SpanKind = Literal["tile", "part", "reduce", "wait"]


class Span(NamedTuple):
    """What a worker did from ``begin`` to ``end`` (seconds, `time.perf_counter`).

    Attributes
    ----------
    worker
        Which worker, from 0.
    kind
        ``tile``: a whole tile; ``part``: a part of a tile's K range (stream-K); ``reduce``: adding up a tile's parts;
        ``wait``: waiting at the gate.
    batch, pm, pn
        The tile.
    k_begin, k_end
        Its range of K steps.
    chunk
        The chunk it waited for, or the last one the tile needed; -1 without arrival.
    operand
        0 where that chunk is one of A's rows, 1 where it is one of B's columns.
    unit
        GPUs: the SM; -1 where the device does not say.
    """

    worker: int
    kind: SpanKind
    begin: float
    end: float
    batch: int
    pm: int
    pn: int
    k_begin: int
    k_end: int
    chunk: int = -1
    operand: int = 0
    unit: int = -1


@dataclass
class LaunchTrace:
    """The record of one launch.

    Attributes
    ----------
    op
        The operation.
    label
        The plan in a line.
    workers
        Number of workers.
    tiles
        Tiles in the schedule.
    begin, end
        When the launch began and ended; ``end`` is 0 while it runs.
    arrivals
        For each operand (0: A's rows, 1: B's columns) that arrives: when each chunk was signalled, None where unknown.
    started
        For each operand that arrives: when its producer began (`Stream.started`), if the caller has entered it.
    """

    op: str
    label: str
    workers: int
    tiles: int
    begin: float
    end: float = 0.0
    arrivals: dict[int, tuple[float | None, ...]] = field(default_factory=dict)
    by_worker: list[list[Span]] = field(default_factory=list)
    started: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # One list a worker, which only that worker appends to: no lock.
        self.by_worker = [[] for _ in range(self.workers)]

    @property
    def spans(self) -> list[Span]:
        """All spans, in order of their beginnings."""
        return sorted((span for spans in self.by_worker for span in spans), key=lambda span: span.begin)

    @property
    def tiles_done(self) -> int:
        """Tiles finished so far; may be read while the launch runs."""
        return sum(span.kind in ("tile", "reduce") for spans in self.by_worker for span in tuple(spans))

    @property
    def waited(self) -> float:
        """Seconds all workers together spent at the gate."""
        return sum(span.end - span.begin for span in self.spans if span.kind == "wait")


class Zero(NamedTuple):
    """The first launch's begin by two clocks: the host's, in seconds, and a device's, in nanoseconds.

    One zero for all launches keeps their distances on the device exact; their place on the host's clock is as exact as
    the first launch's begin.
    """

    host: float
    device: int

    def seconds(self, when: int) -> float:
        """A device's time by the host's clock. Subtracted first: nanoseconds have more digits than a float."""
        return self.host + 1e-9 * (when - self.device)


@dataclass
class Recorder:
    """What a ``with record() as recorder`` block saw: its launches, in order; those on GPUs once it has ended."""

    launches: list[LaunchTrace] = field(default_factory=list)
    zeros: dict[Hashable, Zero] = field(default_factory=dict)  # for each device: see `Zero`
    _later: list[Callable[[], None]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=lambda: free_in_child(threading.Lock()))

    def begin(self, op: str, label: str, workers: int, tiles: int) -> LaunchTrace:
        """A new launch's record."""
        launch = LaunchTrace(op, label, workers, tiles, time.perf_counter())
        with self._lock:
            self.launches.append(launch)
        return launch

    def later(self, read: Callable[[], None]) -> None:
        """Call ``read`` when the block ends."""
        with self._lock:
            self._later.append(read)

    def finish(self) -> None:
        """Read the launches on GPUs."""
        while self._later:
            self._later.pop(0)()


_current: ContextVar[Recorder | None] = ContextVar("tilestream_recorder", default=None)


def current() -> Recorder | None:
    """The recorder of the calling context, if there is one."""
    return _current.get()


@contextlib.contextmanager
def record() -> Iterator[Recorder]:
    """Record the launches of this block.

    The block's end waits for the launches on GPUs and reads them. Launches captured into a graph run later, and are not
    recorded; a warning says so.

    Examples
    --------
    >>> with ts.trace.record() as recorder:  # doctest: +SKIP
    ...     ts.matmul(a, b)
    >>> recorder.launches[0].tiles_done  # doctest: +SKIP
    64
    """
    recorder = Recorder()
    token = _current.set(recorder)
    try:
        yield recorder
    finally:
        _current.reset(token)
        recorder.finish()
