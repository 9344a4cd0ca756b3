"""Seeded bugs of model 1 in how a launch that poisons what is left drains, and in how its last worker leaves.

Where that reads best they are `work_through` with operations changed on their way, as in `seeded_ring`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from tilestream.core.gate import Gate, Seen, Wait, pass_gate
from tilestream.core.loop import (
    Compute,
    Leave,
    Poison,
    Poll,
    Quarantine,
    Reduce,
    Reset,
    WorkerState,
    hand_in,
    leave,
    work_through,
)  # fmt: skip
from tilestream.schedule import Schedule, WorkItem, take
from tilestream_tools.verify.operations import PollAbort, ReduceNumbers, WaitAlone
from tilestream_tools.verify.seeded_ring import rewritten

Turn = Generator[Any, int, "WorkerState | None"]


def _gated(gate: Gate | None, item: WorkItem, seen: Seen) -> Generator[Any, int, tuple[bool, Seen]]:
    """The gate of `work_through`."""
    if gate is None:
        return True, seen
    if (yield Poll()):
        return False, seen
    return (yield from pass_gate(gate, item, seen))


def _done(item: WorkItem, arrived: bool) -> Generator[Any, int, None]:
    """An item, computed or poisoned."""
    if arrived:
        yield from hand_in(Compute(item))
    else:
        yield from hand_in(Poison(item))


def _rest(schedule: Schedule) -> Generator[Any, int, None]:
    """What the last one out resets after the signals."""
    for queue in range(schedule.queues):
        yield Reset("counter", queue)
    yield Reset("exits")
    yield Reset("abort")


# Items ----------------------------------------------------------------------------------------------------------------


def leaves_the_rest(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A worker that finds the launch over leaves, as on the CPU: nobody hands in what is left."""
    item, cursor = yield from take(schedule, worker, state.cursor)
    arrived, seen = False, state.seen
    if item is not None:
        arrived, seen = yield from _gated(gate, item, seen)
    if item is None or not arrived:
        yield from leave(schedule, gate)
        return None
    yield from hand_in(Compute(item))
    return WorkerState(cursor, seen)


def poisons_uncounted(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A part that is poisoned is not counted in: nobody is the last, and its tile is never stored."""
    item, cursor = yield from take(schedule, worker, state.cursor)
    if item is None:
        yield from leave(schedule, gate)
        return None
    arrived, seen = yield from _gated(gate, item, state.seen)
    if arrived:
        yield from hand_in(Compute(item))
    else:
        yield Poison(item)
    return WorkerState(cursor, seen)


def counts_what_is_not_there(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A part that cannot be computed is counted in, and its slot left as some launch before has left it."""
    turn = work_through(schedule, gate, worker, state, reset=True)
    return rewritten(turn, lambda op: None if isinstance(op, Poison) and op.item.parts > 1 else op)


def poison_lost(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """The epilogue of a tile makes a number of NaN: a poisoned part looks computed."""
    turn = work_through(schedule, gate, worker, state, reset=True)
    return rewritten(turn, lambda op: ReduceNumbers(op.item) if isinstance(op, Reduce) else op)


def polls_at_new_chunks(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """The abort word is read only where there is a chunk to wait for; the others' items are computed after the end."""
    item, cursor = yield from take(schedule, worker, state.cursor)
    if item is None:
        yield from leave(schedule, gate)
        return None
    arrived, seen = True, state.seen
    if gate is not None:
        arrived, seen = yield from pass_gate(gate, item, seen)
    yield from _done(item, arrived)
    return WorkerState(cursor, seen)


def poisons_what_was_seen(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """An item passes its gate by a wait that is answered "arrived": where all was seen before, it does not pass."""
    item, cursor = yield from take(schedule, worker, state.cursor)
    if item is None:
        yield from leave(schedule, gate)
        return None
    before = state.seen
    arrived, seen = yield from _gated(gate, item, before)
    yield from _done(item, arrived and seen != before)
    return WorkerState(cursor, seen)


def expires_alone(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A worker whose wait expires poisons its item, and sets no abort word."""
    turn = work_through(schedule, gate, worker, state, reset=True)
    return rewritten(turn, lambda op: WaitAlone(op.operand, op.chunk) if isinstance(op, Wait) else op)


def mark_not_read(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A launch believes signals that the one before has left in quarantine."""
    turn = work_through(schedule, gate, worker, state, reset=True)
    return rewritten(turn, lambda op: PollAbort() if isinstance(op, Poll) else op)


# Leaving --------------------------------------------------------------------------------------------------------------


def unread_chunk_forgotten(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """The last one out zeroes the signals of a launch that is not over, with chunks that nobody has waited for."""
    after = yield from work_through(schedule, gate, worker, state)
    if after is None and (yield Leave()) == schedule.workers - 1:
        over = yield Poll()
        yield Quarantine() if over else Reset("signals")
        yield from _rest(schedule)
    return after


def asks_before_leaving(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """Whether the launch is over is asked before counting out: the others may have yet to find the deadline expired."""
    after = yield from work_through(schedule, gate, worker, state)
    if after is None:
        over = yield Poll()
        if (yield Leave()) == schedule.workers - 1:
            yield Quarantine() if over else Reset("signals")
            yield from _rest(schedule)
    return after


def zeroes_signals_always(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """The last one out zeroes the signals after an expiry, too, though chunks are on their way."""
    turn = work_through(schedule, gate, worker, state, reset=True)
    return rewritten(turn, lambda op: Reset("signals") if isinstance(op, Quarantine) else op)


def not_in_quarantine(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """The last one out leaves the signals alone after an expiry, and says so to nobody."""
    turn = work_through(schedule, gate, worker, state, reset=True)
    return rewritten(turn, lambda op: None if isinstance(op, Quarantine) else op)


def takes_abort_back(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """Whoever leaves a launch that is over resets the abort word, while others have yet to read it."""
    after = yield from work_through(schedule, gate, worker, state)
    if after is None:
        if (yield Poll()):
            yield Reset("abort")
        yield from leave(schedule, gate)
    return after


def restores_only_what_went_well(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """After an expiry the last one out marks the signals and leaves, and the counters are as they were."""
    marked = False

    def change(op: Any) -> Any:
        nonlocal marked
        marked = marked or isinstance(op, Quarantine)
        return None if marked and isinstance(op, Reset) else op

    return rewritten(work_through(schedule, gate, worker, state, reset=True), change)


def drained_not_counted(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A worker that leaves a launch that is over does not count itself out: nobody is the last."""
    after = yield from work_through(schedule, gate, worker, state)
    if after is None and not (yield Poll()):
        yield from leave(schedule, gate)
    return after
