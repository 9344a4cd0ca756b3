"""Records the workers' tiles and times.

Recording is off by default, and then costs a launch one check for a recorder. `record` turns it on for the calls inside
its ``with`` block, in this thread and the tasks that it awaits. On a GPU it launches a traced variant of the kernel,
which writes each work item's worker, SM and times. The end of the block reads them; of launches that the block captures
into CUDA graphs, `Recorder.replayed` does.
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
    """A worker's activity from ``begin`` to ``end`` (seconds, `time.perf_counter`).

    Attributes
    ----------
    worker
        The worker's index, from 0.
    kind
        ``tile``: a whole tile; ``part``: a part of a tile's K range (stream-K); ``reduce``: adding up a tile's parts;
        ``wait``: waiting at the gate.
    batch, pm, pn
        The tile. Of rows by source ``batch`` is the source, and ``pm`` counts its row tiles, group by group.
    k_begin, k_end
        Its range of K steps.
    chunk
        The chunk that it waited for, or the last chunk that the tile needed; -1 without arrival. Of rows by source it
        is the word of its group's rows: ``source * (groups + 1) + 1 + group``.
    operand
        0 if ``chunk`` is a chunk of A's rows, 1 if it is one of B's columns.
    unit
        The SM on GPUs; -1 if the device does not give it.
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
        Number of tiles in the schedule.
    begin, end
        The times of the launch's begin and end; ``end`` is 0 while it runs.
    arrivals
        The time of each chunk's signal, None if unknown, for each operand that arrives (0: A's rows, 1: B's columns).
    started
        The time at which the producer began (`Stream.started`), for each operand that arrives, if the caller set it.
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
        # Each worker appends to its own list only, so there is no lock.
        self.by_worker = [[] for _ in range(self.workers)]

    @property
    def spans(self) -> list[Span]:
        """All spans, sorted by ``begin``."""
        return sorted((span for spans in self.by_worker for span in spans), key=lambda span: span.begin)

    @property
    def tiles_done(self) -> int:
        """The number of finished tiles. It may be read while the launch runs."""
        return sum(span.kind in ("tile", "reduce") for spans in self.by_worker for span in tuple(spans))

    @property
    def waited(self) -> float:
        """The sum of all workers' seconds at the gate."""
        return sum(span.end - span.begin for span in self.spans if span.kind == "wait")


class Zero(NamedTuple):
    """The begin of the first launch on two clocks: the host's, in seconds, and a device's, in nanoseconds.

    All launches share one zero, so that their distances on the device are exact. Their place on the host's clock is as
    exact as that of the first launch's begin.
    """

    host: float
    device: int

    def seconds(self, when: int) -> float:
        """A device's time on the host's clock. It is subtracted as an integer, because a float has fewer digits."""
        return self.host + 1e-9 * (when - self.device)


@dataclass
class Recorder:
    """The launches of a ``with record() as recorder`` block, in order. Those on GPUs are read when it ends.

    Launches that the block captures into CUDA graphs are read by `replayed`.
    """

    launches: list[LaunchTrace] = field(default_factory=list)
    zeros: dict[Hashable, Zero] = field(default_factory=dict)  # for each device: see `Zero`
    _later: list[Callable[[], None]] = field(default_factory=list)
    _captured: list[Callable[[], LaunchTrace]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=lambda: free_in_child(threading.Lock()))

    def begin(self, op: str, label: str, workers: int, tiles: int) -> LaunchTrace:
        """Add the record of a new launch, and return it."""
        launch = LaunchTrace(op, label, workers, tiles, time.perf_counter())
        with self._lock:
            self.launches.append(launch)
        return launch

    def later(self, read: Callable[[], None]) -> None:
        """Call ``read`` when the block ends."""
        with self._lock:
            self._later.append(read)

    def captured(self, read: Callable[[], LaunchTrace]) -> None:
        """Have ``read`` called by `replayed`, for a launch that is captured."""
        with self._lock:
            self._captured.append(read)

    def replayed(self) -> list[LaunchTrace]:
        """Read the last replay of each captured launch, in the order of the capture.

        It waits for all work of their devices. A launch that was not replayed yet has no spans. Issue no replay in
        another thread meanwhile: it would overwrite what is being read.

        Distances between the launches of a device are exact, those of eager launches in the same block included. A
        block without eager launches takes the end of the first launch that is read for the time of that reading.
        """
        return [read() for read in tuple(self._captured)]

    def finish(self) -> None:
        """Read the launches on GPUs."""
        while self._later:
            self._later.pop(0)()


_current: ContextVar[Recorder | None] = ContextVar("tilestream_recorder", default=None)


def current() -> Recorder | None:
    """The recorder of the calling context; None if there is none."""
    return _current.get()


@contextlib.contextmanager
def record() -> Iterator[Recorder]:
    """Record the launches of this block.

    The end of the block waits for the launches on GPUs and reads them.

    A launch that the block captures into a CUDA graph is recorded by each replay, for as long as the graph exists: the
    graph holds the traced kernel and the memory that it writes, whether or not the recorder still exists.
    `Recorder.replayed` reads the last replay.

    Examples
    --------
    >>> with ts.trace.record() as recorder:  # doctest: +SKIP
    ...     ts.matmul(a, b)
    >>> recorder.launches[0].tiles_done  # doctest: +SKIP
    64
    >>> with ts.trace.record() as recorder, torch.cuda.graph(graph):  # doctest: +SKIP
    ...     ts.matmul(a, b)
    >>> graph.replay()  # doctest: +SKIP
    >>> recorder.replayed()[0].tiles_done  # doctest: +SKIP
    64
    """
    recorder = Recorder()
    token = _current.set(recorder)
    try:
        yield recorder
    finally:
        _current.reset(token)
        recorder.finish()
