"""Seeded bugs of model 3: rings without mbarriers that are wrong in one place each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tilestream_tools.verify.shared_ring import (
    Arrive,
    Await,
    Copy,
    Fetch,
    Have,
    Item,
    Put,
    Read,
    SharedRing,
    Turn,
    WaitLoads,
    direct,
    meet,
    rest,
    staged,
)


def changed(turn: Turn, change: Callable[[Any], Any]) -> Turn:
    """``turn`` with each operation replaced by what ``change`` makes of it; None leaves it out."""
    answer: Any = None
    while True:
        try:
            op = turn.send(answer)
        except StopIteration:
            return
        other = change(op)
        answer = 0 if other is None else (yield other)


def one_buffer_without_barrier(ring: SharedRing, item: Item) -> Turn:
    """One stage, read past the compiler's own waits: nothing keeps a warp's next copy from others' reads."""
    for step in range(item.steps):
        yield Copy(0, item, step)
        yield WaitLoads(0)
        yield from meet()
        yield Read(0, item, step)
        yield Have()


def waits_count_groups(ring: SharedRing, item: Item) -> Turn:
    """A wait is told how many groups may be in flight, where the hardware counts instructions."""
    return changed(direct(ring, item), lambda op: WaitLoads(op.left // ring.loads) if isinstance(op, WaitLoads) else op)


def waits_a_group_short(ring: SharedRing, item: Item) -> Turn:
    """A wait leaves as many groups in flight as there are: the step's own is among them."""
    return changed(direct(ring, item), lambda op: WaitLoads(op.left + ring.loads) if isinstance(op, WaitLoads) else op)


def no_barrier_after_the_wait(ring: SharedRing, item: Item) -> Turn:
    """A warp has waited for its own copies, and reads others' shares."""
    return changed(direct(ring, item), lambda op: None if isinstance(op, Arrive | Await) else op)


def copies_before_the_barrier(ring: SharedRing, item: Item) -> Turn:
    """The copies of the step ahead are started between the wait and the barrier that comes with the read."""
    ahead = ring.depth - 1
    for i in range(ahead):
        yield Copy(i, item, min(i, item.steps - 1))
    for step in range(item.steps):
        yield WaitLoads(ring.loads * (ahead - 1))
        yield Copy((step + ahead) % ring.depth, item, min(step + ahead, item.steps - 1))
        yield from meet()
        yield Read(step % ring.depth, item, step)
        yield Have()
    yield WaitLoads(0)


def short_items_commit_less(ring: SharedRing, item: Item) -> Turn:
    """An item of few steps starts no copies for those that it does not have; its waits count on them."""
    loop = direct(ring, item)
    started = 0

    def change(op: Any) -> Any:
        nonlocal started
        if isinstance(op, Copy):
            started += 1
            return op if started <= item.steps else None
        return op

    return changed(loop, change)


def no_barrier_between_items(ring: SharedRing, item: Item) -> Turn:
    """A warp begins the next item while others read the last stages of this one."""
    for op in operations(direct(ring, item))[:-1]:
        yield from done(op)


def no_barrier_after_the_rest(ring: SharedRing, item: Item) -> Turn:
    """The same behind an item's rest of K, which lies in the first stage."""
    yield from direct(ring, item._replace(rest=False))
    if item.rest:
        yield from rest(ring, item)


def barrier_passes_reads(ring: SharedRing, item: Item) -> Turn:
    """A warp comes to the barrier with reads in flight: the copies that the others then start overwrite them."""
    reading = False
    for op in operations(direct(ring, item)):
        if op is not None and not isinstance(op, Have):
            yield op
        if op is None:
            yield from meet()
            if reading:
                yield Have()
        reading = isinstance(op, Have) or (reading and op is not None)


def put_without_barrier(ring: SharedRing, item: Item) -> Turn:
    """Through registers: a step is written while others read the one before it."""
    ops = operations(staged(ring, item))
    for op, behind in zip(ops, [*ops[1:], Have()], strict=True):
        if op is not None or isinstance(behind, Read):
            yield from done(op)


def puts_what_has_not_come(ring: SharedRing, item: Item) -> Turn:
    """Through registers: a wait leaves both operands in flight, that which is put among them."""
    both = 2 * ring.loads
    return changed(staged(ring, item), lambda op: WaitLoads(both) if isinstance(op, WaitLoads) and op.left else op)


def drains_for_each_put(ring: SharedRing, item: Item) -> Turn:
    """Through registers: each wait is for all that is in flight, the other operand's next step too."""
    return changed(staged(ring, item), lambda op: WaitLoads(0) if isinstance(op, WaitLoads) else op)


def fetched_in_the_other_order(ring: SharedRing, item: Item) -> Turn:
    """Through registers: B's first loads are started before A's, and waits count as if they were behind them."""
    yield Fetch(item, 0, 1)
    yield Fetch(item, 0, 0)
    for op in operations(staged(ring, item))[2:]:
        yield from done(op)


def read_without_barrier(ring: SharedRing, item: Item) -> Turn:
    """Through registers: a step is read before others have written their shares."""
    ops = operations(staged(ring, item))
    for op, behind in zip(ops, [*ops[1:], Have()], strict=True):
        if op is not None or not isinstance(behind, Read):
            yield from done(op)


def rest_without_barrier(ring: SharedRing, item: Item) -> Turn:
    """The rest of K is written to the first stage while others read it."""
    ops = operations(direct(ring, item))
    last = max((i for i, op in enumerate(ops) if isinstance(op, Put)), default=len(ops))
    barriers = [i for i, op in enumerate(ops) if op is None and i < last]
    for i, op in enumerate(ops):
        if not item.rest or i not in barriers[-2:]:
            yield from done(op)


def operations(turn: Turn) -> list[Any]:
    """The operations of a turn; None for a barrier."""
    ops: list[Any] = []
    answer: Any = None
    while True:
        try:
            op = turn.send(answer)
        except StopIteration:
            return ops
        answer = 0
        if not isinstance(op, Await):
            ops.append(None if isinstance(op, Arrive) else op)


def done(op: Any) -> Turn:
    """An operation as `operations` gives it: a barrier for None."""
    if op is None:
        yield from meet()
    else:
        yield op
