"""Seeded bugs of model 4: texts of a gather with one thing wrong each.

Where that reads best they are the real text with operations changed on their way, as in `seeded_ring`.
"""

from __future__ import annotations

from typing import Any

from tilestream.distributed import protocol as p
from tilestream.verify.seeded_ring import rewritten

Turn = p.Turn


def fills_the_other_slot(rank: int, chunks: int, epoch: int) -> Turn:
    """The shard goes into the slot of the next epoch, and peers pull from that of this one."""
    wrong = (epoch + 1) % p.SLOTS
    return rewritten(
        p.publish(rank, chunks, epoch), lambda op: op._replace(slot=wrong) if isinstance(op, p.Fill | p.Filled) else op
    )


def _with_slots(text: Turn, slots: int) -> Turn:
    return rewritten(text, lambda op: op._replace(slot=op.epoch % slots) if hasattr(op, "slot") else op)


def publish_one_slot(rank: int, chunks: int, epoch: int) -> Turn:
    """One slot for all calls, and no handshake at a call's end: it is filled while a peer still pulls from it."""
    return _with_slots(p.publish(rank, chunks, epoch), 1)


def gather_one_slot(rank: int, world: int, chunks: int, epoch: int) -> Turn:
    """The side of `publish_one_slot` that pulls."""
    return _with_slots(p.gather(rank, world, chunks, epoch), 1)


def publish_two_slots(rank: int, chunks: int, epoch: int) -> Turn:
    """Two slots: enough while no flag lies. One that the watchdog writes frees a slot that a peer still pulls from."""
    return _with_slots(p.publish(rank, chunks, epoch), 2)


def gather_two_slots(rank: int, world: int, chunks: int, epoch: int) -> Turn:
    """The side of `publish_two_slots` that pulls."""
    return _with_slots(p.gather(rank, world, chunks, epoch), 2)


def posts_before_filled(rank: int, chunks: int, epoch: int) -> Turn:
    """The side stream may begin, and tell the peers, while the shard is still being copied into its slot."""
    yield p.AwaitCall(epoch - 1)
    slot = epoch % p.SLOTS
    yield p.Fill(slot, epoch)
    yield p.Post(epoch)
    yield p.Filled(slot, epoch)
    for chunk in range(chunks):
        yield p.Signal(rank, chunk, epoch)
    return epoch


def publishes_at_once(rank: int, chunks: int, epoch: int) -> Turn:
    """A call does not wait for the one before: on another stream its kernel may still read what is gathered into."""
    return rewritten(p.publish(rank, chunks, epoch), lambda op: None if isinstance(op, p.AwaitCall) else op)


def signals_before_copy(rank: int, world: int, chunks: int, epoch: int) -> Turn:
    """A chunk is signalled when its copy is issued, not when it is done."""
    yield p.AwaitPost(epoch)
    for peer in p.peers(rank, world):
        yield p.Tell(peer, epoch)
    slot = epoch % p.SLOTS
    for peer in p.peers(rank, world):
        yield p.AwaitFlag(peer, epoch)
        for chunk in range(chunks):
            yield p.Pull(peer, slot, chunk, epoch)
            yield p.Signal(peer, chunk, epoch)
            yield p.Pulled(peer, slot, chunk, epoch)
    yield p.Done(epoch)
    return epoch


def reader_writes_flags(rank: int, world: int, chunks: int, epoch: int) -> Turn:
    """The flags of peers are written by who waits for them: they say nothing of the peers."""
    yield p.AwaitPost(epoch)
    yield p.Release(epoch)
    slot = epoch % p.SLOTS
    for peer in p.peers(rank, world):
        yield p.AwaitFlag(peer, epoch)
        for chunk in range(chunks):
            yield p.Pull(peer, slot, chunk, epoch)
            yield p.Pulled(peer, slot, chunk, epoch)
            yield p.Signal(peer, chunk, epoch)
    yield p.Done(epoch)
    return epoch


def tells_afterwards(rank: int, world: int, chunks: int, epoch: int) -> Turn:
    """A rank tells its peers that its shard is there when it has pulled theirs: all wait for each other."""
    tells = []

    def change(op: Any) -> Any:
        if isinstance(op, p.Tell):
            tells.append(op)
            return None
        return op

    yield from _without_done(rewritten(p.gather(rank, world, chunks, epoch), change))
    for op in tells:  # noqa: UP028  # not of a list: the model follows generators
        yield op
    yield p.Done(epoch)
    return epoch


def _without_done(text: Turn) -> Turn:
    return rewritten(text, lambda op: None if isinstance(op, p.Done) else op)


def waits_for_nobody(rank: int, world: int, chunks: int, epoch: int) -> Turn:
    """No handshake: a peer's shard is pulled without a look at its flag."""
    return rewritten(p.gather(rank, world, chunks, epoch), lambda op: None if isinstance(op, p.AwaitFlag) else op)


def begins_ahead(epoch: int) -> Turn:
    """The host runs one call further ahead than there are slots for."""
    return epoch if (yield p.Begin(epoch, epoch - p.AHEAD - 2)) else None


# `watch` goes round in a loop, and is written out: of a text that is rewritten no two places are known to be the same.


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


def releases_nothing(rank: int, world: int) -> Turn:
    """The watchdog tells all ranks, and leaves its own side stream to wait for ever."""
    yield from p.give_up(rank, world)
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
