"""Seeded bugs of model 9: ways to reduce in one shot with one thing wrong each."""

from __future__ import annotations

from tilestream.distributed import one_shot_protocol as text
from tilestream.distributed import protocol as p
from tilestream.distributed.one_shot_protocol import Turn


def tells_before_multiplied(rank: int, world: int, epoch: int) -> Turn:
    """The peers are told when the matmul has been started."""
    yield p.AwaitCall(epoch - 1)
    yield text.Multiply(epoch, epoch)
    for peer in p.peers(rank, world):
        yield text.TellPeer(peer, epoch)
    yield text.Multiplied(epoch, epoch)
    for peer in p.peers(rank, world):
        yield text.HearPeer(peer, epoch)
    yield text.Heard(epoch)
    yield text.AddSlots(epoch, epoch)
    yield text.Added(epoch, epoch)
    return epoch


def hears_the_next_rank_alone(rank: int, world: int, epoch: int) -> Turn:
    """One peer is waited for, as if its being there said that of all."""
    heard = 0
    text_of = text.reduce(rank, world, epoch)
    op = next(text_of)
    while not isinstance(op, text.Added):
        heard += isinstance(op, text.HearPeer)
        answer = 0 if isinstance(op, text.HearPeer) and heard > 1 else (yield op)
        op = text_of.send(answer)
    yield op
    return epoch


def tells_the_next_rank_alone(rank: int, world: int, epoch: int) -> Turn:
    """One peer is told, and the others wait for ever."""
    told = 0
    text_of = text.reduce(rank, world, epoch)
    op = next(text_of)
    while not isinstance(op, text.Added):
        told += isinstance(op, text.TellPeer)
        answer = 0 if isinstance(op, text.TellPeer) and told > 1 else (yield op)
        op = text_of.send(answer)
    yield op
    return epoch


def tells_when_added(rank: int, world: int, epoch: int) -> Turn:
    """The peers are told behind the sum, for which each waits."""
    yield p.AwaitCall(epoch - 1)
    yield text.Multiply(epoch, epoch)
    yield text.Multiplied(epoch, epoch)
    for peer in p.peers(rank, world):
        yield text.HearPeer(peer, epoch)
    yield text.Heard(epoch)
    yield text.AddSlots(epoch, epoch)
    yield text.Added(epoch, epoch)
    for peer in p.peers(rank, world):
        yield text.TellPeer(peer, epoch)
    return epoch


def overrules_nothing(rank: int, world: int) -> p.Turn:
    """The stream is let go, and the sum is taken for one."""
    if not (yield from p.give_up(rank, world)):
        return None
    while epoch := (yield p.Oldest()):
        yield p.AwaitKernel(epoch)
        yield p.Release(epoch)
        while not (yield p.AwaitDone(epoch)):
            yield p.Release(epoch)
    return None


def overrules_afterwards(rank: int, world: int) -> p.Turn:
    """The sum is overruled when the stream has been let go."""
    if not (yield from p.give_up(rank, world)):
        return None
    while epoch := (yield p.Oldest()):
        yield p.AwaitKernel(epoch)
        yield p.Release(epoch)
        yield p.Overrule(epoch)
        while not (yield p.AwaitDone(epoch)):
            yield p.Release(epoch)
    return None


def tells_nobody(rank: int, world: int) -> p.Turn:
    """A rank that gives up keeps it to itself."""
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
