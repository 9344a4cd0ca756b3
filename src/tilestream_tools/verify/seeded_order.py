"""Seeded bugs of model 1 in arrival order: ways to take an item that hang, lose items, or wait beside work."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from tilestream.core.gate import Gate, pass_gate
from tilestream.core.loop import Compute, Poll, WorkerState
from tilestream.core.schedule import first_of, take_ready
from tilestream.schedule import Cursor, Ready, Schedule, Take, WorkItem

Turn = Generator[Any, int, "WorkerState | None"]
Taken = Generator[Any, int, "tuple[WorkItem | None, Cursor]"]
Taking = Callable[[Schedule, Cursor], Taken]


def _working(take: Taking, schedule: Schedule, gate: Gate | None, state: WorkerState, gated: bool = True) -> Turn:
    """`tilestream.core.loop.work` with another way to take."""
    if (yield Poll()):
        return None
    item, cursor = yield from take(schedule, state.cursor)
    if item is None:
        return None
    seen = state.seen
    if gated and gate is not None:
        arrived, seen = yield from pass_gate(gate, item, seen)
        if not arrived:
            return None
    yield Compute(item)
    return WorkerState(cursor, seen)


def _open(schedule: Schedule, cursor: Cursor) -> int:
    return ((1 << schedule.queues) - 1) & ~cursor.empty


def _drawn(schedule: Schedule, cursor: Cursor, queue: int) -> Taken:
    """A ticket of a queue: its item, or the cursor that knows the queue for empty."""
    ticket = yield Take(queue)
    if ticket < schedule.queue_size(queue):
        item, behind = schedule.ticket(queue, ticket)
        return item, behind._replace(queue=queue, empty=cursor.empty)
    return None, Cursor(empty=cursor.empty | 1 << queue)


def _unseen(schedule: Schedule, cursor: Cursor) -> Taken:
    item = None
    while item is None and _open(schedule, cursor):
        item, cursor = yield from _drawn(schedule, cursor, first_of(_open(schedule, cursor)))
    return item, cursor


def drawn_unseen(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A ticket is drawn from the first queue that is not empty, whether its chunks were seen or not."""
    return (yield from _working(_unseen, schedule, gate, state))


def _one_queue(schedule: Schedule, cursor: Cursor) -> Taken:
    item = None
    while item is None and (left := _open(schedule, cursor)):
        yield Ready(left & -left)
        item, cursor = yield from _drawn(schedule, cursor, first_of(left))
    return item, cursor


def waits_for_one_queue(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A worker waits for the first queue that it has not found empty, not for any of them."""
    return (yield from _working(_one_queue, schedule, gate, state))


def _passing(schedule: Schedule, cursor: Cursor) -> Taken:
    item = None
    while item is None and (left := _open(schedule, cursor)):
        queue = yield Ready(left)
        queue = queue if queue >= 0 else first_of(left)
        item, cursor = yield from _drawn(schedule, cursor, queue)
        cursor = cursor._replace(empty=cursor.empty | ((1 << queue) - 1))
    return item, cursor


def passed_for_good(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """Queues before the one that is ready first are passed, and not looked at again when their chunks come."""
    return (yield from _working(_passing, schedule, gate, state))


def _forgetting(schedule: Schedule, cursor: Cursor) -> Taken:
    item = None
    while item is None:
        queue = yield Ready(_open(schedule, Cursor()))
        item, _ = yield from _drawn(schedule, Cursor(), max(queue, 0))
    return item, Cursor()


def empty_queue_forgotten(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A worker forgets which queues it has found empty, and draws from them for ever."""
    return (yield from _working(_forgetting, schedule, gate, state))


def _one_only(schedule: Schedule, cursor: Cursor) -> Taken:
    queue = cursor.queue
    if queue < 0:
        queue = yield Ready(_open(schedule, cursor))
    return (yield from _drawn(schedule, cursor, max(queue, 0)))


def stops_with_its_queue(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A worker that finds its queue empty leaves, while others have items that nobody may come to take."""
    return (yield from _working(_one_only, schedule, gate, state))


def waits_after_the_end(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """A worker that is told that the launch is over, or its deadline has passed, waits on for a queue to be ready."""
    left = _open(schedule, state.cursor)
    queue = (yield Ready(left)) if left else -1
    if left and queue < 0:
        return state
    item, cursor = None, state.cursor
    if left:
        item, cursor = yield from _drawn(schedule, cursor, queue)
    if item is not None:
        yield Compute(item)
    return WorkerState(cursor._replace(queue=-1)) if left else None


def ready_is_enough(schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState) -> Turn:
    """The gate is left out: but a worker whose deadline has passed takes items whose chunks it has not seen."""
    return (yield from _working(take_ready, schedule, gate, state, gated=False))
