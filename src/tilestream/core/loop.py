"""The loop of one worker: the five parts, as the protocol every kernel follows.

::

    for item in schedule:            # take()
        gate.wait(item)              # pass_gate(), before the item is handed on
        load and math                # Compute
        epilogue(item)               # in Compute; of a split tile, by its last contributor: Reduce

That loop's body is a generator over operations, like `tilestream.schedule.take`, of which it is made. A backend
performs the operations; `tilestream_tools.verify` explores every order in which several workers can perform them.
Between two items a worker remembers `WorkerState` and nothing else.

`work` is the CPU backend's loop: once the launch is over, the worker leaves (invariant 5). The host waits for the
workers, and then writes NaN into what was not computed. Workers of a GPU go on; their kernels' loop is
`tilestream_tools.verify.gpu_loop`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, NamedTuple

from tilestream.core.gate import Needs, Seen, Wait, pass_gate
from tilestream.core.grid import WorkItem
from tilestream.core.schedule import Cursor, Peek, Ready, Schedule, Take, take


class Poll(NamedTuple):
    """Read the abort word. Answer: 1 if the launch is over and workers are to drain.

    Where an earlier launch has left the signals in quarantine, the answer is 1 from the beginning: they are not valid.
    Only the last worker out writes that mark, so it can be read once a launch.
    """


class Compute(NamedTuple):
    """Do an item: the whole tile with its epilogue, or its partial result into the item's slot.

    ``held``: a part's product stays with the worker, which stores it later or adds it to the others'.
    """

    item: WorkItem
    held: bool = False


class OfItem(NamedTuple):
    """What an operation on a tile's parts names: a work item."""

    item: WorkItem


class Count(OfItem):
    """A partial result is visible: add one to the tile's count (acquire and release).

    Answer: the count before. If that is ``parts - 1``, the worker is the last, and has restored the count to 0.
    """


class Reduce(OfItem):
    """Only by the last contributor: add the tile's partial results in K order, NaN where one is; then the epilogue."""


class Landed(NamedTuple):
    """Wait until this worker's stores of an item have landed, not only been issued."""

    item: int


class CountRows(NamedTuple):
    """Add an item's rows of a chunk of the output to the chunk's count (acquire and release).

    Answer: the count before.
    """

    chunk: int
    rows: int


class RestoreRows(NamedTuple):
    """Write 0 to the count of a chunk, plainly."""

    chunk: int


class Announce(NamedTuple):
    """Signal that a chunk of the output is complete (release, at system scope)."""

    chunk: int


Operation = Take | Peek | Ready | Wait | Poll | Compute | Count | Reduce


class WorkerState(NamedTuple):
    """All that a worker carries from one item to the next."""

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
    """An item's result (``done``: `Compute`, or another operation with an ``item``), and the tile's after its parts."""
    yield done
    item = done.item
    if item.parts > 1 and (yield Count(item)) == item.parts - 1:
        yield Reduce(item)


class Share(NamedTuple):
    """What an item brings to a chunk of the output: so many rows, of so many that the chunk comes to in all."""

    chunk: int
    rows: int
    due: int


def publish(item: int, shares: Iterable[Share]) -> Generator[Landed | CountRows | RestoreRows | Announce, int, None]:
    """Publish an item's stores: the worker that completes a chunk's count signals the chunk.

    ::

        wait until the stores have landed
        for each chunk of the item's rows: count them; that was all of it: restore the count; signal

    No worker waits for another, or for a later item. Only the worker that completes a count writes it, and no worker
    reads it again in this launch: so it is restored plainly, and the next launch finds 0 (invariant 4).
    """
    yield Landed(item)
    for chunk, rows, due in shares:
        if (yield CountRows(chunk, rows)) + rows == due:
            yield RestoreRows(chunk)
            yield Announce(chunk)
