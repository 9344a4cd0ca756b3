"""The loop of one worker: the five parts as a protocol, which every kernel follows.

::

    for item in schedule:            # take()
        gate.wait(item)              # pass_gate(), before the item is handed on
        load and math                # Compute
        epilogue(item)               # in Compute; of a split tile, by its last contributor: Reduce

The loop's body is a generator of operations, built on `tilestream.schedule.take`. A backend performs the operations;
`tilestream_tools.verify` explores every order in which several workers can perform them. Between two items a worker
keeps `WorkerState` and nothing else.

`work` is the CPU backend's loop: once the launch is over, the worker leaves (invariant 5). The host waits for all
workers and then writes NaN into tiles that were not computed. Workers of a GPU go on and drain the items instead; their
kernels' loop is `tilestream_tools.verify.gpu_loop`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

from tilestream.core.gate import Needs, Seen, Wait, pass_gate
from tilestream.core.grid import WorkItem
from tilestream.core.schedule import Cursor, Peek, Ready, Schedule, Take, take


class Poll(NamedTuple):
    """Read the abort word. Answer: 1 if the launch is over and workers drain.

    If an earlier launch has left the signals in quarantine, they are not valid, and the answer is 1 from the beginning.
    Only the last worker to leave writes the quarantine, so reading it once a launch is enough.
    """


class Compute(NamedTuple):
    """Compute an item: the whole tile with its epilogue, or a partial result into the item's slot.

    ``held``: the worker keeps the partial result, and stores it later or adds it to the others.
    """

    item: WorkItem
    held: bool = False


class OfItem(NamedTuple):
    """An operation on the tile of a work item."""

    item: WorkItem


class Count(OfItem):
    """Add one to the tile's count (acquire and release), once the partial result is visible.

    Answer: the previous count. If it is ``parts - 1``, the worker is the last, and this operation has restored the
    count to 0.
    """


class Reduce(OfItem):
    """Add the tile's partial results in K order (NaN stays), then the epilogue. Only the last contributor does so."""


class Landed(NamedTuple):
    """Wait until this worker's stores of an item are complete, not only issued."""

    item: int


class CountRows(NamedTuple):
    """Add an item's rows of a chunk of the output to the chunk's count (acquire and release).

    Answer: the previous count.
    """

    chunk: int
    rows: int


class RestoreRows(NamedTuple):
    """Write 0 to the count of a chunk, by a plain store."""

    chunk: int


class Announce(NamedTuple):
    """Signal that a chunk of the output is complete (release, at system scope)."""

    chunk: int


Operation = Take | Peek | Ready | Wait | Poll | Compute | Count | Reduce


class WorkerState(NamedTuple):
    """A worker's state between two items."""

    cursor: Cursor = Cursor()
    seen: Seen = Seen()


def work(
    schedule: Schedule, gate: Needs | None, worker: int, state: WorkerState
) -> Generator[Operation, int, WorkerState | None]:
    """One iteration of ``worker``'s loop; the state for the next, or None to leave (STOP, or drained)."""
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
    yield from store_and_count(Compute(item))
    return WorkerState(cursor, seen)


def store_and_count(done: Any) -> Generator[Any, int, None]:
    """Store an item's result and, after a tile's last part, reduce the tile.

    ``done`` stores the result: `Compute`, or another operation with an ``item``.
    """
    yield done
    item = done.item
    if item.parts > 1 and (yield Count(item)) == item.parts - 1:
        yield Reduce(item)


class Share(NamedTuple):
    """An item's rows of a chunk of the output, and the chunk's rows in all."""

    chunk: int
    rows: int
    due: int


def publish(item: int, shares: Iterable[Share]) -> Generator[Landed | CountRows | RestoreRows | Announce, int, None]:
    """Publish an item's stores: the worker that completes a chunk's count signals the chunk.

    ::

        wait until the stores have landed
        for each chunk of the item's rows: count them; if the count is complete: restore it; signal

    No worker waits for another, or for a later item. Only the worker that completes a count restores it, and no worker
    reads it again in this launch. So a plain store is enough, and the next launch finds 0 (invariant 4).
    """
    yield Landed(item)
    for chunk, rows, due in shares:
        if (yield CountRows(chunk, rows)) + rows == due:
            yield RestoreRows(chunk)
            yield Announce(chunk)
