"""Seeded bugs of model 7: texts of a sum with one thing wrong each."""

from __future__ import annotations

from typing import Any

from tilestream.core.protocols import gather as p
from tilestream.core.protocols import reduce_scatter as q
from tilestream_tools.verify.seeded_ring import rewritten

Turn = p.Turn


def tells_of_what_is_not_published(rank: int, world: int, batches: int, parts: int, epoch: int) -> Turn:
    """A peer is told of a chunk when the kernel has begun, not when the chunk is signalled."""
    return rewritten(
        q.scatter(rank, world, batches, parts, epoch), lambda op: None if isinstance(op, q.AwaitPublished) else op
    )


def publishes_before_computed(rank: int, world: int, batches: int, parts: int, epoch: int) -> Turn:
    """A chunk is signalled while its tiles are still being stored."""
    yield p.AwaitCall(epoch - 1)
    yield p.Post(epoch)
    slot = epoch % p.SLOTS
    for step in range(batches * world * parts):
        yield q.Compute(slot, step, epoch)
        yield q.Publish(step, epoch)
        yield q.Computed(slot, step, epoch)
    yield q.Ended(epoch)
    return epoch


def waits_before_it_tells(rank: int, world: int, batches: int, parts: int, epoch: int) -> Turn:
    """Each step a rank waits for its chunk first, and tells of the one that it has for a peer afterwards."""
    yield p.AwaitPost(epoch)
    slot = epoch % p.SLOTS
    for step in range(batches * world * parts):
        source = q.sender(rank, world, parts, step)
        if source != rank:
            count = step // (world * parts) * parts + step % parts + 1
            yield q.AwaitPart(source, count, epoch)
            yield q.PullPart(source, slot, step, epoch)
            yield q.PulledPart(source, slot, step, epoch)
            yield q.AwaitPublished(step, epoch)
            yield q.TellPart(q.sent(rank, world, batches, parts, step)[0], count, epoch)
    yield p.Done(epoch)
    return epoch


def sums_at_once(epoch: int) -> Turn:
    """The sum does not wait for the side stream."""
    yield q.Sum(epoch)
    yield q.Summed(epoch)
    return epoch


def produces_at_once(rank: int, world: int, batches: int, parts: int, epoch: int) -> Turn:
    """A call does not wait for the one before: on another stream its sum may still read what is pulled to."""
    return rewritten(
        q.produce(rank, world, batches, parts, epoch), lambda op: None if isinstance(op, p.AwaitCall) else op
    )


def _in_one_slot(text: Turn) -> Turn:
    return rewritten(text, lambda op: op._replace(slot=0) if hasattr(op, "slot") else op)


def produces_in_one_slot(rank: int, world: int, batches: int, parts: int, epoch: int) -> Turn:
    """One slot for all calls: it is computed into while a peer still pulls from it."""
    return _in_one_slot(q.produce(rank, world, batches, parts, epoch))


def scatters_one_slot(rank: int, world: int, batches: int, parts: int, epoch: int) -> Turn:
    """The side of `produces_in_one_slot` that pulls."""
    return _in_one_slot(q.scatter(rank, world, batches, parts, epoch))


def overrules_nothing(rank: int, world: int) -> Turn:
    """The stream that waits is let go, and nothing says that what comes of it is no number."""
    if not (yield from p.give_up(rank, world)):
        return None
    while epoch := (yield p.Oldest()):
        yield p.AwaitKernel(epoch)
        yield p.Release(epoch)
        while not (yield p.AwaitDone(epoch)):
            yield p.Release(epoch)
    return None


def overrules_afterwards(rank: int, world: int) -> Turn:
    """The sum is made NaN when the stream that waits has been let go: it may have been added by then."""
    if not (yield from p.give_up(rank, world)):
        return None
    while epoch := (yield p.Oldest()):
        yield p.AwaitKernel(epoch)
        yield p.Release(epoch)
        while not (yield p.AwaitDone(epoch)):
            yield p.Release(epoch)
        yield p.Overrule(epoch)
    return None


def pulls_from_the_next(rank: int, world: int, batches: int, parts: int, epoch: int) -> Turn:
    """A rank waits for the peer whose chunk it computes, not for who computes its own: all wait in a circle."""

    def change(op: Any) -> Any:
        if isinstance(op, q.AwaitPart | q.PullPart | q.PulledPart):
            return op._replace(peer=(2 * rank - op.peer) % world)
        return op

    return rewritten(q.scatter(rank, world, batches, parts, epoch), change)
