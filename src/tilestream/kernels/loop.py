"""The loop of one worker: the five parts, as the protocol every kernel follows.

::

    for item in schedule:            # take()
        gate.wait(item)              # pass_gate(), before the item is handed on
        load and math                # Compute
        epilogue(item)               # in Compute, or in Reduce by the last of several contributors

`work` is that loop's body as a generator over operations, like `tilestream.schedule.take`, of which it is made. The CPU
backend performs the operations; `tilestream.verify` explores every order in which several workers can perform them.
Between two items a worker remembers `WorkerState` and nothing else.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple

from tilestream.arrival.gate import Gate, Seen, Wait, pass_gate
from tilestream.schedule.grid import WorkItem
from tilestream.schedule.schedule import Cursor, Peek, Schedule, Take, take


class Poll(NamedTuple):
    """Read the abort word. Answer: 1 if the launch is over and workers shall drain."""


class Compute(NamedTuple):
    """Do an item: the whole tile with its epilogue, or its partial result into the item's slot."""

    item: WorkItem


class Count(NamedTuple):
    """A partial result is visible: add one to the tile's count (acquire and release).

    Answer: the count before. Whoever is told ``parts - 1`` is the last, and has restored the count to 0.
    """

    item: WorkItem


class Reduce(NamedTuple):
    """Add the tile's partial results in K order, then the epilogue. Only the last contributor does it."""

    item: WorkItem


Operation = Take | Peek | Wait | Poll | Compute | Count | Reduce


class WorkerState(NamedTuple):
    """All that a worker carries from one item to the next."""

    cursor: Cursor = Cursor()
    seen: Seen = Seen()


def work(
    schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState
) -> Generator[Operation, int, WorkerState | None]:
    """One turn of ``worker``'s loop; the state for the next, or None when it is to leave (STOP, or drained)."""
    if (yield Poll()):
        return None
    item, cursor = yield from take(schedule, worker, state.cursor)
    if item is None:
        return None
    seen = state.seen
    if gate is not None:
        arrived, seen = yield from pass_gate(gate, item, seen)
        if not arrived:
            return None
    yield Compute(item)
    if item.parts > 1 and (yield Count(item)) == item.parts - 1:
        yield Reduce(item)
    return WorkerState(cursor, seen)
