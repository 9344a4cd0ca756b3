"""Persistent workers: a launch performs the operations of `core.loop.work` on counters, signals and tiles.

::

    caller:   open the workspace, start the workers, sleep until all have left
    worker:   for each turn of work(): perform its operations, until it returns None
    caller:   write NaN into tiles that were not computed, then raise the first error

No worker spins: at the gate it sleeps on the signals' bell, at most until the launch's deadline (invariant 5). A worker
whose wait expires, whose producer has failed, or that raises, sets the abort word and rings all bells. Then all workers
leave, the caller raises, and no thread is at work. The threads stay for the next launch: see `workers`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from tilestream.arrival.flat import Awaited
from tilestream.arrival.signals import Outcome
from tilestream.core.errors import ArrivalTimeout, TilestreamError, tile_name
from tilestream.core.gate import Needs, Wait, chunks_of
from tilestream.core.grid import WorkItem
from tilestream.core.loop import Compute, Count, Operation, Poll, Reduce, WorkerState, work
from tilestream.core.schedule import Peek, Ready, Schedule, Take
from tilestream.launch.cpu.publish import Publisher
from tilestream.launch.cpu.threads import Pinning
from tilestream.launch.cpu.workers import Crew
from tilestream.runtime import shutdown
from tilestream.runtime.workspace import Workspace
from tilestream.trace.record import LaunchTrace, Recorder, Span, SpanKind


class Body(Protocol):
    """A kernel's work on an item: load, math and epilogue."""

    def compute(self, item: WorkItem) -> None:
        """Compute the tile with its epilogue; if ``item.parts > 1``, the partial result into slot ``item.slot``."""

    def reduce(self, item: WorkItem, slots: Sequence[int]) -> None:
        """Add the partial results of ``item``'s tile, in the order of ``slots``, then apply the epilogue."""

    def poison(self, item: WorkItem) -> None:
        """Write NaN into a tile that will not be computed."""


class CpuLaunch:
    """One launch, which its workers share.

    Parameters
    ----------
    op
        The operation's name, for messages.
    schedule, gate, body
        The parts. Without arrival ``gate`` is None, and no gate code runs.
    awaited
        The signals of what arrives; None if all is there.
    threads
        Intra-op threads of each worker.
    publisher
        Is called for each complete tile; None if no chunk of the output is signalled.
    """

    def __init__(
        self, op: str, schedule: Schedule, gate: Needs | None, body: Body, workspace: Workspace, *,
        awaited: Awaited | None = None, threads: int = 1, publisher: Publisher | None = None,
        recorder: Recorder | None = None, label: str = "",
    ) -> None:  # fmt: skip
        self._publisher = publisher
        self._op, self._schedule, self._gate, self._body = op, schedule, gate, body
        self._workspace, self._incoming = workspace, (None, None) if awaited is None else awaited.operands
        self._waited = [0.0] * schedule.workers  # by worker: seconds of waits for several queues without a result
        self._chunks = chunks_of(schedule, gate) if gate is not None and schedule.split == "chunks" else ()
        self._seconds, self._deadline = 0.0 if awaited is None else awaited.deadline, 0.0
        self._threads = threads
        # No more workers are started than there are items: these do all items (invariant 1).
        self._count = min(schedule.workers, max(1, schedule.full_tiles + schedule.num_shares))
        self._pinning = Pinning(self._count)
        self._crew: Crew | None = None
        self._abort = threading.Event()
        self._error: BaseException | None = None
        self._timeout: tuple[int, Wait, float] | None = None
        self._lock = threading.Lock()
        self._done = bytearray(schedule.grid.tiles)
        self._trace: LaunchTrace | None = None
        if recorder is not None:
            self._trace = recorder.begin(op, label, schedule.workers, schedule.grid.tiles)

    def run(self) -> None:
        """Start the workers, wait until all have left, and raise what went wrong.

        Raises
        ------
        ArrivalTimeout
            If a chunk did not arrive in time.
        BaseException
            The error of a producer or of a worker.
        """
        shutdown.register(self)
        self._workspace.open(self._schedule)
        self._deadline = time.perf_counter() + self._seconds
        try:
            if self._schedule.workers == 1 and self._threads == torch.get_num_threads():
                self._worker(0)
            else:
                self._run_workers()
        finally:
            if self._abort.is_set() or self._error is not None:
                self._poison()
            self._finish_trace()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame: the cycle would keep the operands alive
        if self._timeout is not None:
            worker, wait, waited = self._timeout
            argument = "weight_arrival" if wait.operand else "arrival"
            raise ArrivalTimeout(
                self._op, worker, wait.chunk, self._first_not_taken(), waited, self._seconds, argument=argument
            )
        if self._abort.is_set():
            raise TilestreamError(f"{self._op}: stopped, because the interpreter exits; what was not computed is NaN")
        if not all(self._done):  # impossible by invariant 1, Coverage; it must never pass for a result
            self._poison()
            raise AssertionError(f"{self._op}: all workers have left, and {self._first_not_taken()} was not computed")

    def _run_workers(self) -> None:
        crew = self._crew = Crew(self._thread, self._count)
        try:
            with self._pinning.starting():
                crew.start()
            crew.wait()
        except BaseException:  # an interrupt, or no more threads: no worker may remain
            self._close(crew)
            raise

    def _close(self, crew: Crew) -> None:
        """Keep further workers from beginning, and wait until all have left. Interrupts are ignored."""
        while True:
            try:
                self._stop()
                crew.close()  # they leave after their present tile
                return
            except KeyboardInterrupt:
                continue  # the launch is ending already

    def stop_at_exit(self, timeout: float) -> None:
        """See `tilestream.runtime.shutdown`."""
        self._stop()
        if self._crew is not None:
            self._crew.wait_for_begun(timeout)

    def _thread(self, me: int) -> None:
        try:
            self._pinning.pin(self._threads)
        except BaseException as error:
            self._stop(error)
        else:
            self._worker(me)

    def _worker(self, me: int) -> None:
        # A thread starts with autograd on. Inference mode also allows writing a result that is an inference tensor.
        try:
            with torch.inference_mode():
                state: WorkerState | None = WorkerState()
                while state is not None:
                    turn = work(self._schedule, self._gate, me, state)
                    try:
                        operation = next(turn)
                        while True:
                            operation = turn.send(self._perform(me, operation))
                    except StopIteration as end:
                        state = end.value
        except BaseException as error:
            self._stop(error)

    def _perform(self, me: int, operation: Operation) -> int:
        if isinstance(operation, Poll):
            return self._abort.is_set()
        if isinstance(operation, Take):
            return self._workspace.counters[operation.queue].add(self._workspace.bases[operation.queue])
        if isinstance(operation, Peek):
            return self._workspace.counters[operation.queue].peek(self._workspace.bases[operation.queue])
        if isinstance(operation, Ready):
            return self._ready(me, operation)
        if isinstance(operation, Wait):
            return self._wait(me, operation)
        item = operation.item
        begin = time.perf_counter() if self._trace is not None else 0.0
        if isinstance(operation, Compute):
            self._body.compute(item)
            if item.parts == 1:
                self._finished(item)
            self._span(me, "tile" if item.parts == 1 else "part", begin, item)
            return 0
        if isinstance(operation, Count):
            return self._workspace.count(item.tile, item.parts)
        assert isinstance(operation, Reduce)
        # A tile's contributors are neighbouring shares, so their slots are neighbours, too, in K order.
        first = item.slot - item.part
        self._body.reduce(item, range(first, first + item.parts))
        self._finished(item)
        self._span(me, "reduce", begin, item)
        return 0

    def _finished(self, item: WorkItem) -> None:
        """The tile is there."""
        self._done[item.tile] = 1
        if self._publisher is not None:
            self._publisher.stored(item)

    # Waiting and ending --------------------------------------------------------------------------------------------

    def _ready(self, me: int, ready: Ready) -> int:
        """The first ready queue. If the wait ends otherwise, the gate of the next item finds out why."""
        signals, epoch = next(incoming for incoming in self._incoming if incoming is not None)
        queues = [queue for queue in range(self._schedule.queues) if ready.queues >> queue & 1]
        begin = time.perf_counter()
        outcome, found = signals.wait_any(
            [self._chunks[queue] for queue in queues], epoch, self._deadline, self._abort.is_set
        )
        if outcome is not Outcome.ARRIVED:
            self._waited[me] = time.perf_counter() - begin
            return -1
        if self._trace is not None:
            item, _ = self._schedule.ticket(queues[found], 0)
            self._span(me, "wait", begin, item)
        return queues[found]

    def _wait(self, me: int, wait: Wait) -> int:
        incoming = self._incoming[wait.operand]
        assert incoming is not None, "the gate waits for an operand that does not arrive"
        signals, epoch = incoming
        begin = time.perf_counter()
        outcome = signals.wait(wait.chunk, epoch, self._deadline, self._abort.is_set)
        if self._trace is not None and outcome is not Outcome.OVER:
            self._span(me, "wait", begin, wait.item, wait)
        if outcome is Outcome.ARRIVED:
            return 1
        if outcome is Outcome.EXPIRED:
            with self._lock:
                if self._timeout is None:
                    self._timeout = (me, wait, time.perf_counter() - begin + self._waited[me])
            self._stop()
        elif outcome is Outcome.FAILED:
            with self._lock:
                if self._error is None:
                    self._error = signals.failure(epoch)
            self._stop()
        return 0

    def _stop(self, error: BaseException | None = None) -> None:
        """End the launch for all workers. The first error is kept."""
        with self._lock:
            if self._error is None:
                self._error = error
        self._abort.set()
        for incoming in self._incoming:
            if incoming is not None:
                incoming[0].ring()

    def _poison(self) -> None:
        with torch.inference_mode():
            seen: set[int] = set()
            for item in self._schedule.items():
                if not self._done[item.tile] and item.tile not in seen:
                    seen.add(item.tile)
                    self._body.poison(item)

    def _first_not_taken(self) -> str:
        for item in self._schedule.items():
            if not self._done[item.tile]:
                batch = item.batch if self._schedule.grid.batch > 1 else None
                return tile_name(item.tile, item.pm, item.pn, batch)
        return "none"

    # Tracing -------------------------------------------------------------------------------------------------------

    def _span(self, me: int, kind: SpanKind, begin: float, item: WorkItem, wait: Wait | None = None) -> None:
        if self._trace is None:
            return
        if wait is None and self._gate is not None:
            needs = self._gate.needs(item)
            wait = needs[-1] if needs else None
        chunk, operand = (wait.chunk, wait.operand) if wait is not None else (-1, 0)
        self._trace.by_worker[me].append(
            Span(
                me, kind, begin, time.perf_counter(), item.batch, item.pm, item.pn, item.k_begin, item.k_end, chunk,
                operand,
            )
        )  # fmt: skip

    def _finish_trace(self) -> None:
        if self._trace is not None:
            self._trace.end = time.perf_counter()
            self._trace.arrivals = {
                operand: incoming[0].times for operand, incoming in enumerate(self._incoming) if incoming is not None
            }
