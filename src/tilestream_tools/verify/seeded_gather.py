"""Seeded bugs of model 4: texts of a gather with one thing wrong each.

Where that reads best they are the real text with operations changed on their way, as in `seeded_ring`.
"""

from __future__ import annotations

from typing import Any

from tilestream.core.protocols import gather as p
from tilestream_tools.verify.seeded_bug import with_slots
from tilestream_tools.verify.seeded_ring import rewritten

Turn = p.Turn
FILLS = (p.Fill, p.Filled)


# The host ------------------------------------------------------------------------------------------------------------


def begins_without_asking(epoch: int) -> Turn:
    """The host does not ask whether the kernel that it has waited for expired."""
    return rewritten(p.begin(epoch), lambda op: None if isinstance(op, p.Ask) else op)


def begins_behind_the_side(epoch: int) -> Turn:
    """The host waits for the side stream of the call before the last, and asks of its kernel, which has not ended."""
    return rewritten(p.begin(epoch), lambda op: p.AwaitSide(op.epoch) if isinstance(op, p.AwaitKernel) else op)


def begins_ahead(epoch: int) -> Turn:
    """The host runs one call further ahead than there are slots for."""
    return rewritten(
        p.begin(epoch), lambda op: op._replace(epoch=op.epoch - 1) if isinstance(op, p.AwaitKernel) else op
    )


# The calling stream --------------------------------------------------------------------------------------------------


def publish_one_slot(rank: int, chunks: int, epoch: int, from_slot: bool) -> Turn:
    """One slot for all calls: it is filled while a peer's kernel still reads it."""
    return rewritten(p.publish(rank, chunks, epoch, from_slot), with_slots(1))


def publish_two_slots(rank: int, chunks: int, epoch: int, from_slot: bool) -> Turn:
    """Two slots: enough while every kernel that ends has had its rows. One that expires has not."""
    return rewritten(p.publish(rank, chunks, epoch, from_slot), with_slots(2))


def own_not_signalled(rank: int, chunks: int, epoch: int, from_slot: bool) -> Turn:
    """The own chunks are in the slot, and nobody says so: the kernel waits for them."""
    return rewritten(p.publish(rank, chunks, epoch, from_slot), lambda op: None if isinstance(op, p.Signal) else op)


def fills_nothing(rank: int, chunks: int, epoch: int, from_slot: bool) -> Turn:
    """The shard stays where the caller has it, and the kernel looks for it in the slot."""
    return rewritten(p.publish(rank, chunks, epoch, from_slot), lambda op: None if isinstance(op, FILLS) else op)


def posts_before_filled(rank: int, chunks: int, epoch: int, from_slot: bool) -> Turn:
    """What leaves out of the own slot does so before it is there: pushed, or pulled by peers who were told."""
    return p.publish(rank, chunks, epoch)


def publishes_at_once(rank: int, chunks: int, epoch: int, from_slot: bool) -> Turn:
    """A call does not wait for the one before: of another stream, whose kernel may not have had its rows yet."""
    return rewritten(p.publish(rank, chunks, epoch, from_slot), lambda op: None if isinstance(op, p.AwaitCall) else op)


def frees_at_once(epoch: int) -> Turn:
    """The calling stream does not wait for the side stream: the caller writes to his tensor while it is pushed."""
    return rewritten(p.finish(epoch), lambda op: None)


# The side stream -----------------------------------------------------------------------------------------------------


def side_one_slot(rank: int, world: int, chunks: int, epoch: int, way: p.Way) -> Turn:
    """The side stream of `publish_one_slot`."""
    return rewritten(p.side(rank, world, chunks, epoch, way), with_slots(1))


def side_two_slots(rank: int, world: int, chunks: int, epoch: int, way: p.Way) -> Turn:
    """The side stream of `publish_two_slots`."""
    return rewritten(p.side(rank, world, chunks, epoch, way), with_slots(2))


def pushes_to_the_next_slot(rank: int, world: int, chunks: int, epoch: int, way: p.Way) -> Turn:
    """A shard goes into the slot of the next epoch."""
    wrong = (epoch + 1) % p.SLOTS
    return rewritten(
        p.side(rank, world, chunks, epoch, way),
        lambda op: op._replace(slot=wrong) if isinstance(op, p.Push | p.Pushed) else op,
    )


def begins_before_posted(rank: int, world: int, chunks: int, epoch: int, way: p.Way) -> Turn:
    """The side stream pushes as soon as its last call is done, whatever its own kernel is still waiting for."""
    return rewritten(p.side(rank, world, chunks, epoch, way), lambda op: None if isinstance(op, p.AwaitPost) else op)


def signals_before_copy(rank: int, world: int, chunks: int, epoch: int, way: p.Way) -> Turn:
    """A chunk is signalled when its copy is issued, not when it is done."""
    return _signalled_first(p.side(rank, world, chunks, epoch, way))


def _signalled_first(text: Turn) -> Turn:
    waiting: list[Any] = []
    try:
        op = next(text)
        while True:
            if isinstance(op, p.Pushed | p.Pulled):
                waiting.append(op)
            else:
                yield op
                if isinstance(op, p.Tell | p.Signal):
                    yield waiting.pop()
            op = text.send(0)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


def publish_in_one_set(rank: int, chunks: int, epoch: int, from_slot: bool) -> Turn:
    """One set of signals for all slots: of another shape a word is another rank's, which may be a call ahead."""
    return rewritten(
        p.publish(rank, chunks, epoch, from_slot), lambda op: op._replace(slot=0) if isinstance(op, p.Signal) else op
    )


def signals_in_one_set(rank: int, world: int, chunks: int, epoch: int, way: p.Way) -> Turn:
    """The side stream of `publish_in_one_set`."""
    return rewritten(
        p.side(rank, world, chunks, epoch, way), lambda op: op._replace(slot=0) if isinstance(op, p.Tell) else op
    )


# What is pulled ------------------------------------------------------------------------------------------------------


def waits_for_nobody(rank: int, world: int, chunks: int, epoch: int, way: p.Way) -> Turn:
    """A peer's shard is pulled without a look at its flag."""
    return rewritten(p.side(rank, world, chunks, epoch, way), lambda op: None if isinstance(op, p.AwaitFlag) else op)


def reader_writes_flags(rank: int, world: int, chunks: int, epoch: int, way: p.Way) -> Turn:
    """The flags of peers are written by who waits for them: they say nothing of the peers."""
    last = list(p.peers(rank, world))[-1]

    def change(op: Any) -> Any:
        if isinstance(op, p.Flag):
            return p.Release(op.epoch) if op.peer == last else None
        return op

    return rewritten(p.side(rank, world, chunks, epoch, way), change)


def tells_afterwards(rank: int, world: int, chunks: int, epoch: int, way: p.Way) -> Turn:
    """A rank tells its peers that its shard is there when it has pulled theirs: all wait for each other."""
    text = p.side(rank, world, chunks, epoch, way)
    yield from rewritten(text, lambda op: None if isinstance(op, p.Flag | p.Done) else op)
    for peer in p.peers(rank, world):
        yield p.Flag(peer, epoch)
    yield p.Done(epoch)
    return epoch


# The watchdog --------------------------------------------------------------------------------------------------------


def tells_nobody(rank: int, world: int) -> Turn:
    """A rank that has given up keeps it to itself."""
    if not (yield p.Notice()):
        return None
    yield p.Break()
    while epoch := (yield p.Oldest()):
        yield p.Overrule(epoch)
        yield p.AwaitKernel(epoch)
        yield p.Release(epoch)
        while not (yield p.AwaitDone(epoch)):
            yield p.Release(epoch)
    return None


def overrules_nothing(rank: int, world: int) -> Turn:
    """The watchdog tells all ranks, and leaves its own kernels to wait for peers that issue nothing any more."""
    yield from p.give_up(rank, world)
    return None


def releases_nothing(rank: int, world: int) -> Turn:
    """The watchdog ends its kernels, and leaves a side stream that pulls to wait for ever."""
    if not (yield from p.give_up(rank, world)):
        return None
    while epoch := (yield p.Oldest()):
        yield p.Overrule(epoch)
        yield p.AwaitKernel(epoch)
        if not (yield p.AwaitDone(epoch)):
            return None
    return None


def releases_under_the_kernel(rank: int, world: int) -> Turn:
    """The side stream is let go while the kernel still waits: it pulls what is not there, and signals it."""
    if not (yield from p.give_up(rank, world)):
        return None
    while epoch := (yield p.Oldest()):
        yield p.Release(epoch)
        while not (yield p.AwaitDone(epoch)):
            yield p.Release(epoch)
    return None


def releases_once(rank: int, world: int) -> Turn:
    """A flag that a late peer takes back is not written again."""
    if not (yield from p.give_up(rank, world)):
        return None
    while epoch := (yield p.Oldest()):
        yield p.Overrule(epoch)
        yield p.AwaitKernel(epoch)
        yield p.Release(epoch)
        if not (yield p.AwaitDone(epoch)):
            return None
    return None
