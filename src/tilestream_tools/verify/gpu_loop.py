"""The checker's loop of a GPU kernel's worker, built on `tilestream.core.loop`.

The host does not inspect a GPU's output before its use. So a worker that finds the launch over does not leave, as
`tilestream.core.loop.work` does. It continues to take items, and stores NaN for them (invariant 5). Each item is taken
once, computed or not, and stream-K's counts are restored as usual.

There are two ways to store the parts of a tile. All contributors of a schedule use the same way:

- `store_and_count`: each contributor writes its partial result and counts. The last to count adds all of them.
- `fixup`, of the Hopper kernel, which has its product in registers: each contributor reads the count first. If all
  others have counted, it is the last and writes nothing. The last adds the others' partial results and its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Literal, NamedTuple

from tilestream.core.gate import Needs, See, Wait, pass_gate
from tilestream.core.grid import WorkItem
from tilestream.core.loop import Compute, OfItem, Poll, WorkerState, store_and_count
from tilestream.core.schedule import Peek, Ready, Schedule, Take, take

#: The way to store an item.
Finish = Callable[[Any], Generator[Any, int, None]]


class Poison(NamedTuple):
    """Store NaN instead of an item's product: `Compute` without reads of operands."""

    item: WorkItem
    held: bool = False


class Look(OfItem):
    """Read the count of an item's tile (acquire). Answer: the number of counted parts."""


class Write(OfItem):
    """Write the worker's product into the item's slot, as a partial result."""


class Add(OfItem):
    """`Count` without restoring the count. Answer: the count before."""


class Restore(OfItem):
    """Write 0 to the count of an item's tile, without an atomic."""


class ReducePartials(OfItem):
    """`Reduce` with the item's own part from the worker. Only the other parts are read from their slots."""


class Leave(NamedTuple):
    """Add one to the exit count (acquire and release). Answer: the number of workers that had left before."""


class Reset(NamedTuple):
    """Write 0 to all signals, to the counter of a queue, to the exit count, or to the abort word."""

    word: Literal["signals", "counter", "exits", "abort"]
    queue: int = 0


class Quarantine(NamedTuple):
    """Mark the signals as invalid: some are set, or may be set later (invariant 6).

    Later launches are over from the beginning, until the host has waited for this launch's producers, zeroed the
    signals and removed the mark.
    """


def work_through(
    schedule: Schedule, gate: Needs | None, worker: int, state: WorkerState, reset: bool = False,
    finish: Finish | None = None,
) -> Generator[Any, int, WorkerState | None]:  # fmt: skip
    """`work` for a launch that always takes all items: None means STOP only.

    The abort word is read for each item after it was taken. So a worker computes at most its current item after the
    launch has ended.

    Parameters
    ----------
    reset
        Whether the last worker to leave resets the words of this launch; see `leave`.
    finish
        The way to store an item: `fixup`, or None for `store_and_count`.
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
    """The first half of `work_through`: an item, whether to compute it (or poison it), and the new state.

    With warp specialisation the load warp does this half, and the math warps the rest.
    """
    item, cursor = yield from take(schedule, worker, state.cursor)
    arrived, seen = True, state.seen
    if item is not None and gate is not None:
        arrived = not (yield Poll())
        if arrived:
            arrived, seen = yield from pass_gate(gate, item, seen)
    return item, arrived, WorkerState(cursor, seen)


def fixup(done: Any) -> Generator[Any, int, None]:
    """`store_and_count` for a worker with a part's product, which it writes only if another worker will read it.

    ::

        all others have counted:  this is the last, and only it reads its part
        else:                     write the part; count: if all others have counted now, this is the last
        the last:                 restore the count; add the others' parts and its own

    A worker that finds all others counted has not counted itself, so no other sees a full count, and only one is last.
    It may restore the count before it reads the parts: no worker reads the count again in this launch, and the next
    launch, which writes these slots again, begins after the end of this one.
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


def leave(schedule: Schedule, gate: Needs | None) -> Generator[Leave | Poll | See | Reset | Quarantine, int, None]:
    """Count a worker out. The last one to leave resets the words for the next launch (invariant 4).

    ::

        exits = add(exit count, 1);  others are still in:   nothing
        the launch is not over:      see all chunks, including those that no tile reads
        all have arrived:            zero the signals: no later signal is possible
        else:                        quarantine: later signals are possible
        zero the counters, the exit count and the abort word

    The abort word, read after all others have left, says whether the launch is over. This worker's last answer does
    not, because the deadline may have expired later at another worker's gate. Nor do the signals: in quarantine all may
    be set, and more may come. All workers must run.
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
