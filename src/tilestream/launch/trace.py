"""The trace of a launch on a GPU: its log in device memory, and the spans made from it.

A captured launch's log is memory of its graph, which each replay zeroes, writes and copies to the host. The graph keeps
the copy alive, so a replay may come long after the recorder's end.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from tilestream.core.schedule import SourceSchedule
from tilestream.kernels.device.trace import BEGIN, CHUNK, END, ENDS, READY, TIMES, UNIT, WORDS, WORKER
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.candidate import ctas_of
from tilestream.plan.problem import GroupedProblem
from tilestream.runtime import driver
from tilestream.runtime.graphs import keep
from tilestream.trace.record import LaunchTrace, Recorder, Span, SpanKind, Zero

if TYPE_CHECKING:
    from tilestream.core.gate import Gate
    from tilestream.core.grid import WorkItem
    from tilestream.plan.plan import Plan
    from tilestream.plan.problem import Incoming


class Done(NamedTuple):
    """A kernel's record of an item. Times are the device's, in nanoseconds."""

    item: WorkItem
    times: int  # how often it was taken: 1
    #: worker, unit: the worker, and its SM; -1 if unknown.
    worker: int
    unit: int
    #: begin, ready, end: the times when it was taken, when its gate was passed, and when its last store was issued. On
    #: Hopper TMA goes on storing while the next item is computed.
    begin: int
    ready: int
    end: int
    complete: int  # the number of complete parts of the tile's rows; 1 for a tile that is finished as a whole
    #: The chunk that it waited for, if the kernel records it, else -1. Attention waits inside of an item: this is the
    #: chunk of its first keys, and ``ready`` is the time when that was there. Of rows by source it is the word of its
    #: group's rows (`tilestream.core.sources.rows_word`), and ``begin`` is when the worker began to look for a tile.
    chunk: int = -1


class SpanLog:
    """Memory for a record of each work item of a plan's schedule: see `tilestream.kernels.device.trace`."""

    def __init__(self, plan: Plan | AttentionPlan, device: torch.device, pinned: bool = False) -> None:
        self.plan = plan
        schedule = plan.schedule
        count = max(1, schedule.grid.tiles + schedule.slots)
        self.words = torch.zeros(count, WORDS.value, dtype=torch.int64, device=device, pin_memory=pinned)

    def done(self) -> list[Done]:
        """The records of all items that were taken. Waits for the current stream's work.

        Of rows by source an item's batch is its source, and its row tile is counted from the source's first on.
        """
        schedule, rows = self.plan.schedule, self.words.tolist()
        found = []
        for item in schedule.items():
            row = rows[item.tile if item.parts == 1 else schedule.grid.tiles + item.slot]
            if row[TIMES.value]:
                if isinstance(schedule, SourceSchedule):
                    source, pm = divmod(item.pm, schedule.grid.num_m // schedule.sources)
                    item = item._replace(batch=source, pm=pm)
                ends = row[END.value : END.value + ENDS.value]
                found.append(Done(
                    item, row[TIMES.value], row[WORKER.value], row[UNIT.value], row[BEGIN.value], row[READY.value],
                    max(ends) >> 1, sum(end & 1 for end in ends), row[CHUNK.value] - 1,
                ))  # fmt: skip
        return found


def untraced(plan: Plan | AttentionPlan) -> str:
    """Why launches of this plan are not recorded, for a log line; empty if they are."""
    if plan.backend == "cdna":
        return "the CDNA kernel writes no trace: backend='portable' does"
    if isinstance(plan, AttentionPlan) and plan.strips:
        return "attention whose values are taken in strips has no work items: outside of tilestream.invariant it has"
    if plan.variant == "triple":
        return "a tile of three consumers writes no trace, which has two ends: variant='cooperative' does"
    if ctas_of(plan.variant) > 1:
        return "a pair of CTAs writes no trace, as both would count each item: variant='cooperative' does"
    return ""


def traced(
    recorder: Recorder, op: str, plan: Plan | AttentionPlan, device: torch.device, issue: Callable[[SpanLog], None]
) -> None:
    """Issue a launch with a log, which the recorder reads when its block ends.

    Parameters
    ----------
    issue
        Issues the launch on the current stream of ``device``, which is the current device.
    """
    launch = recorder.begin(op, plan.label, plan.schedule.workers, plan.schedule.grid.tiles)
    log = SpanLog(plan, device)
    issue(log)
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record()

    def read() -> None:
        if event is not None:
            event.synchronize()
        _fill(launch, log, lambda done: recorder.zeros.setdefault(device, Zero(launch.begin, _first(done))))

    recorder.later(read)


def captured(
    recorder: Recorder, op: str, plan: Plan | AttentionPlan, device: torch.device, issue: Callable[[SpanLog], None]
) -> None:
    """Capture a launch with a log, which `Recorder.replayed` reads. See the module. Parameters as of `traced`."""
    log = SpanLog(plan, device)
    issue(log)
    stream = torch.cuda.current_stream(device).cuda_stream
    with driver.captures_relaxed():
        copy = SpanLog(plan, torch.device("cpu"), pinned=True)  # zeros until a replay writes there
    # By the driver: torch would record an event of this stream when the copy is freed, maybe in a later capture.
    size = log.words.numel() * log.words.element_size()
    driver.copy_out(stream, copy.words.data_ptr(), log.words.data_ptr(), size)
    keep(stream, copy, log)  # the log, too: a capture need not be in a pool of torch's

    def read() -> LaunchTrace:
        torch.cuda.synchronize(device)
        now = time.perf_counter()
        launch = LaunchTrace(op, plan.label, plan.schedule.workers, plan.schedule.grid.tiles, now)
        # The host does not know when a replay began: the end of the first that is read stands for the time of reading.
        _fill(launch, copy, lambda done: recorder.zeros.setdefault(device, Zero(now, max(one.end for one in done))))
        return launch

    recorder.captured(read)


def _first(done: list[Done]) -> int:
    return min(one.begin for one in done)


def _fill(launch: LaunchTrace, log: SpanLog, zero_of: Callable[[list[Done]], Zero]) -> None:
    """Fill a launch's trace from its log, whose kernel has ended."""
    plan = log.plan
    schedule = plan.schedule
    gate: Gate | None = None
    arriving: tuple[Incoming | None, ...]
    if isinstance(plan, AttentionPlan):
        arriving, halves = (plan.problem.keys,), 1
    else:
        gate, arriving = plan.gate, (plan.problem.rows, plan.problem.columns)
        halves = 2 if plan.variant == "cooperative" else 1
    done = log.done()
    if not done:  # the output is empty, or no replay has run
        launch.end = launch.begin
        return
    zero = zero_of(done)
    launch.begin, launch.end = zero.seconds(_first(done)), zero.seconds(max(one.end for one in done))
    for one in spans(done, gate, zero, halves):
        launch.by_worker[one.worker].append(one)
    launch.arrivals = {
        operand: (None,) * incoming.chunks.count for operand, incoming in enumerate(arriving) if incoming is not None
    }
    if isinstance(schedule, SourceSchedule) and isinstance(plan.problem, GroupedProblem) and plan.problem.arrives:
        launch.arrivals = {0: (None,) * schedule.packed}  # a word for a source's counts, and one a group's rows


def spans(done: list[Done], gate: Gate | None, zero: Zero, halves: int = 1) -> Iterator[Span]:
    """Spans of the items, by the host's clock. ``halves``: parts of a tile's rows that are finished separately.

    A worker's loads run ahead of its multiplications, so its items overlap. A span begins when the item's gate was
    passed, or when the worker's previous item ended if that is later. An item that was taken more than once has as many
    spans. A void item, stored as NaN, has only its wait.
    """
    last: dict[int, int] = {}
    completed: Counter[int] = Counter()
    for one in sorted(done, key=lambda one: one.end):
        item, free = one.item, last.get(one.worker, 0)
        needs = gate.needs(item) if gate is not None else []
        chunk, operand = (needs[-1].chunk, needs[-1].operand) if needs else (one.chunk, 0)
        waited = max(one.begin, free)
        ready = max(one.ready, waited)
        void = item.parts == 1 and not one.complete
        if chunk >= 0 and (void or ready > waited):
            yield _span(one, "wait", zero, waited, ready, chunk, operand)
        for _ in range(0 if void else one.times):
            yield _span(one, "tile" if item.parts == 1 else "part", zero, ready, max(one.end, ready), chunk, operand)
        # The halves of a tile are reduced separately, each by the worker that stores its last part.
        completed[item.tile] += one.complete
        if item.parts > 1 and one.complete and completed[item.tile] >= halves:
            yield _span(one, "reduce", zero, one.end, one.end, chunk, operand)
        last[one.worker] = max(one.end, free)


def _span(one: Done, kind: SpanKind, zero: Zero, begin: int, end: int, chunk: int, operand: int) -> Span:
    item = one.item
    return Span(
        one.worker, kind, zero.seconds(begin), zero.seconds(end), item.batch, item.pm, item.pn, item.k_begin,
        item.k_end, chunk, operand, one.unit,
    )  # fmt: skip
