"""The loop of one worker: the five parts, as the protocol every kernel follows.

::

    for item in schedule:            # take()
        gate.wait(item)              # pass_gate(), before the item is handed on
        load and math                # Compute
        epilogue(item)               # in Compute; of a split tile, by its last contributor: Reduce, ReducePartials

That loop's body is a generator over operations, like `tilestream.schedule.take`, of which it is made. A backend
performs the operations; `tilestream_tools.verify` explores every order in which several workers can perform them.
Between two items a worker remembers `WorkerState` and nothing else.

There are two loops, which drain differently once the launch is over (invariant 5):

- `work`, of the CPU backend: the worker leaves. The host waits for the workers and then writes NaN into what was not
  computed.
- `work_through`, of the GPU kernels, whose output the host does not touch: the worker goes on taking items and stores
  NaN for them. So each item is taken once, computed or not, and stream-K's counts are restored as ever.

And there are two ways to store the parts of a tile; all contributors of a schedule use the same:

- `store_and_count`: each writes its partial result and counts. The last to count adds them all.
- `fixup`, of the Hopper kernel, which holds its product in registers: each reads the count first. The one that finds
  all others counted is the last, and writes nothing. The last adds the others' partial results and its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, Literal, NamedTuple, TypeVar

from tilestream.core.gate import Needs, See, Seen, Wait, pass_gate
from tilestream.core.grid import WorkItem
from tilestream.core.schedule import Cursor, Peek, Ready, Schedule, Take, take


class Poll(NamedTuple):
    """Read the abort word. Answer: 1 if the launch is over and workers are to drain.

    Where an earlier launch has left the signals in quarantine, the answer is 1 from the beginning: they are not valid.
    Only the last worker out writes that mark (`Quarantine`), so it can be read once a launch.
    """


class Compute(NamedTuple):
    """Do an item: the whole tile with its epilogue, or its partial result into the item's slot.

    ``held``: a part's product stays with the worker, for `Write` and `ReducePartials`.
    """

    item: WorkItem
    held: bool = False


class Poison(NamedTuple):
    """Store NaN in place of an item's product: as `Compute`, without reading any operand."""

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


class Look(OfItem):
    """Read the count of an item's tile (acquire). Answer: how many of its parts have been counted."""


class Write(OfItem):
    """Write the product that the worker holds into the item's slot: a partial result."""


class Add(OfItem):
    """As `Count`, and restore nothing. Answer: the count before."""


class Restore(OfItem):
    """Write 0 to the count of an item's tile, plainly."""


class ReducePartials(OfItem):
    """As `Reduce`, with the item's own part as the worker holds it: only the others' are read from their slots."""


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


class Leave(NamedTuple):
    """Add one to the exit count (acquire and release). Answer: how many had left before."""


class Reset(NamedTuple):
    """Write 0 to a word: the signals, all of them; the counter of a queue; the exit count; the abort word."""

    word: Literal["signals", "counter", "exits", "abort"]
    queue: int = 0


class Quarantine(NamedTuple):
    """Mark the signals as invalid: some are set, or may be set later (invariant 6).

    Later launches are over from the beginning, until the host has waited for this launch's producers, zeroed the
    signals and removed the mark.
    """


Operation = Take | Peek | Ready | Wait | Poll | Compute | Count | Reduce
FixupOperation = Look | Write | Add | Restore | ReducePartials
DrainingOperation = Operation | FixupOperation | Poison | Leave | See | Reset | Quarantine

#: How an item is stored.
Done = TypeVar("Done", Compute, Poison)
Finish = Callable[[Any], Generator[Any, int, None]]


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


def work_through(
    schedule: Schedule, gate: Needs | None, worker: int, state: WorkerState, reset: bool = False,
    finish: Finish | None = None,
) -> Generator[DrainingOperation, int, WorkerState | None]:  # fmt: skip
    """As `work`, for a launch that always takes every item: None means STOP only.

    The abort word is read for each item, after it was taken: so a worker computes at most its present item after the
    launch has ended.

    Parameters
    ----------
    reset
        Whether the last worker out resets the words of this launch; see `leave`.
    finish
        How an item is stored: `store_and_count`, if None, or `fixup`.
    """
    finish = finish or store_and_count
    item, arrived, after = yield from take_and_pass(schedule, gate, worker, state)
    if item is None:
        if reset:
            yield from leave(schedule, gate)
        return None
    done: Any = Compute(item) if arrived else Poison(item)
    yield from finish(done)
    return after


def take_and_pass(
    schedule: Schedule, gate: Needs | None, worker: int, state: WorkerState
) -> Generator[Take | Peek | Ready | Poll | Wait, int, tuple[WorkItem | None, bool, WorkerState]]:
    """The first half of `work_through`: an item, whether to compute or poison it, and the state after it.

    With warp specialisation the load warp does this half, and the math warps the rest.
    """
    item, cursor = yield from take(schedule, worker, state.cursor)
    arrived, seen = True, state.seen
    if item is not None and gate is not None:
        arrived = not (yield Poll())
        if arrived:
            arrived, seen = yield from pass_gate(gate, item, seen)
    return item, arrived, WorkerState(cursor, seen)


def store_and_count(done: Done) -> Generator[Done | Count | Reduce, int, None]:
    """An item's result, and the tile's where this was the last of its parts."""
    yield done
    item = done.item
    if item.parts > 1 and (yield Count(item)) == item.parts - 1:
        yield Reduce(item)


def fixup(done: Done) -> Generator[Done | FixupOperation, int, None]:
    """As `store_and_count`, by a worker that holds a part's product, and writes it only if another worker will read it.

    ::

        all others have counted:  this is the last, and only it reads its part
        else:                     write the part; count: if all others have, this is the last after all
        the last:                 restore the count; add the others' parts and its own

    A worker that finds the others counted has not counted itself, so no other sees a full count: there is one last. It
    restores the count before it reads the parts: no worker reads the count again in this launch, and the next launch,
    which writes these slots again, begins when this one has ended.
    """
    item = done.item
    if item.parts == 1:
        yield done
        return
    yield done._replace(held=True)
    last = (yield Look(item)) == item.parts - 1
    if not last:
        yield Write(item)
        last = (yield Add(item)) == item.parts - 1
    if last:
        yield Restore(item)
        yield ReducePartials(item)


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


def leave(schedule: Schedule, gate: Needs | None) -> Generator[Leave | Poll | See | Reset | Quarantine, int, None]:
    """Count a worker out; the last one out leaves the words as a launch has to find them (invariant 4).

    ::

        exits = add(exit count, 1);  others are still in:   nothing
        the launch is not over:      see every chunk, those that no tile reads too
        all have arrived:            zero the signals: none can come any more
        else:                        quarantine: some may still come
        zero the counters, the exit count and the abort word

    The abort word, read after all others have left, says whether the launch is over. This worker's last answer does
    not: the deadline may have expired at another's gate after this worker's last item. Nor do the signals: in
    quarantine all may be set, and more may come. All workers must run.
    """
    if (yield Leave()) < schedule.workers - 1:
        return
    if gate is not None:
        arrived = not (yield Poll())
        for see in gate.every():
            arrived = arrived and bool((yield see))
        yield Reset("signals") if arrived else Quarantine()
    for queue in range(schedule.queues):
        yield Reset("counter", queue)
    yield Reset("exits")
    if gate is not None:
        yield Reset("abort")
