"""Seeded bugs of model 9: ways to reduce in one shot with one thing wrong each; watchdogs are sums' and gathers'."""

from __future__ import annotations

from typing import Any

from tilestream.core.protocols import gather as p
from tilestream.core.protocols import one_shot as text
from tilestream.core.protocols import reduce_scatter as q
from tilestream.core.protocols.one_shot import Turn
from tilestream_tools.verify.seeded_bug import with_slots
from tilestream_tools.verify.seeded_ring import rewritten


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


def _first_alone(text_of: Turn, kind: type) -> Turn:
    """Of the operations of a kind only the first."""
    seen: list[object] = []

    def change(op: Any) -> Any:
        if isinstance(op, kind):
            seen.append(op)
        return None if isinstance(op, kind) and len(seen) > 1 else op

    return rewritten(text_of, change)


def hears_the_next_rank_alone(rank: int, world: int, epoch: int) -> Turn:
    """One peer is waited for, as if its being there said that of all."""
    return _first_alone(text.reduce(rank, world, epoch), text.HearPeer)


def tells_the_next_rank_alone(rank: int, world: int, epoch: int) -> Turn:
    """One peer is told, and the others wait for ever."""
    return _first_alone(text.reduce(rank, world, epoch), text.TellPeer)


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


def reduces_in_one_slot(rank: int, world: int, epoch: int) -> Turn:
    """One slot: the next product is written where the last is read."""
    return rewritten(text.reduce(rank, world, epoch), with_slots(1))


def reduces_in_two_slots(rank: int, world: int, epoch: int) -> Turn:
    """Two slots: who lets go of a stream writes over what a late peer reads."""
    return rewritten(text.reduce(rank, world, epoch), with_slots(2))


def begins_ahead(epoch: int) -> Turn:
    """The host runs two calls ahead: the third slot is used up before it knows."""
    return rewritten(
        q.begin_sum(epoch), lambda op: op._replace(epoch=op.epoch - 1) if isinstance(op, p.AwaitSide) else op
    )
