"""The order in which ranks access each other's memory in a reduce-scatter: GPUs perform it, the checker explores it.

Each rank pulls its part of every peer's product while the rest is computed. A slot holds a rank's whole product, and a
rank has one flag for each peer in its own memory, which that peer writes::

    calling stream                                side stream
      the last call's sum and side stream
      side stream may begin
      kernel: the next rank's chunk; signal it;   for each step, the own chunks left out:
              its next; ...; the own ones last      wait until the step's chunk is signalled here
                                                    that chunk's rank's memory: my flag = so many of its
                                                    wait until the flag of the rank whose step's chunk is
      the side stream                                 one's own says so; pull it
      sum, in the order of the ranks

All ranks are at the same step; at each step a rank has one chunk to signal, for one peer, and one to pull, from
another. A flag counts chunks over all calls, so it never falls. A flag of this call also says that its writer has
pulled everything of the previous call: one handshake a call opens this epoch's slots and frees those of the epoch
before the last.

The kernel waits for no peer. The side stream has no deadline: it would wait for a missing flag for ever, and the
calling stream for it. The watchdog (`watch`) therefore counts the deadline from the kernel's end. It sets the peers'
abort flags, makes this call's sum and all later ones NaN, and then releases the side stream by writing the flag. Such a
flag does not mean that a peer has finished, and must free no slot that a peer may still pull from. With two slots it
would, through calls that were issued before the host knew. So the host runs ahead by at most `AHEAD` calls, and there
is one more slot for each.

No operation waits for one that is issued later: the kernel is issued before the side stream's part.

`tilestream.core.protocols.gather` has the operations that gathers share. `tilestream_tools.verify.sums` explores this
protocol, as `tilestream_tools.verify.gather` does that one.
"""

from __future__ import annotations

from typing import NamedTuple

from tilestream.core.protocols.gather import (
    AHEAD,
    SLOTS,
    AwaitCall,
    AwaitPost,
    AwaitSide,
    Begin,
    Done,
    OfCall,
    Operations,
    Post,
)


class OfStep(NamedTuple):
    """What an operation names: the call, and the ``step``-th chunk (see `sent`)."""

    step: int
    epoch: int


class OfComputed(NamedTuple):
    """The same, and a slot of this rank."""

    slot: int
    step: int
    epoch: int


class OfParts(NamedTuple):
    """The call, a peer, and a number of chunks."""

    peer: int
    parts: int
    epoch: int


class OfPart(NamedTuple):
    """A peer's ``step``-th chunk, and a slot of that peer."""

    peer: int
    slot: int
    step: int
    epoch: int


class Compute(OfComputed):
    """Calling stream: start computing the ``step``-th chunk (see `sent`) into a slot."""


class Computed(OfComputed):
    """It is complete."""


class Publish(OfStep):
    """Signal it on this rank."""


class Ended(OfCall):
    """Calling stream: the kernel that computes and publishes has ended."""


class AwaitPublished(OfStep):
    """Side stream: wait until the ``step``-th chunk is published."""


class FlagPart(OfParts):
    """Write this rank's flag in a peer's memory: so many of the peer's chunks are published."""


class AwaitPart(OfParts):
    """Wait until a peer's flag in this rank's memory says that so many chunks are published."""


class PullPart(OfPart):
    """Start copying a peer's ``step``-th chunk from its slot."""


class PulledPart(OfPart):
    """The copy is complete."""


class Sum(OfCall):
    """Calling stream: start adding the parts; the sum is NaN if the call was overruled."""


class Summed(OfCall):
    """The sum is complete, and so is the call."""


def begin_sum(epoch: int) -> Operations:
    """The host's part, before anything is issued. Returns the epoch; None if the group is broken."""
    yield AwaitSide(epoch - AHEAD - 1)
    return epoch if (yield Begin(epoch)) else None


def sent(rank: int, world: int, batches: int, parts: int, step: int) -> tuple[int, int]:
    """The rank whose chunk ``rank`` computes at ``step``, and the number of that chunk in that rank's shard.

    In the order of the rows, cyclically, from the next rank's first chunk; the own chunks end each round.
    """
    chunk = ((rank + 1) * parts + step) % (batches * world * parts)
    return chunk // parts % world, chunk // (parts * world) * parts + chunk % parts


def sender(rank: int, world: int, parts: int, step: int) -> int:
    """The rank that computes a chunk of ``rank`` at ``step``; at its own steps, ``rank`` itself."""
    return (rank - 1 - step // parts) % world


def produce(rank: int, world: int, batches: int, parts: int, epoch: int) -> Operations:
    """The calling stream's part, up to the end of its kernel."""
    yield AwaitCall(epoch - 1)
    yield Post(epoch)
    slot = epoch % SLOTS
    for step in range(batches * world * parts):
        yield Compute(slot, step, epoch)
        yield Computed(slot, step, epoch)
        yield Publish(step, epoch)
    yield Ended(epoch)
    return epoch


def scatter(rank: int, world: int, batches: int, parts: int, epoch: int) -> Operations:
    """The side stream's part."""
    yield AwaitPost(epoch)
    slot = epoch % SLOTS
    for step in range(batches * world * parts):
        source = sender(rank, world, parts, step)
        if source != rank:
            count = step // (world * parts) * parts + step % parts + 1
            yield AwaitPublished(step, epoch)
            yield FlagPart(sent(rank, world, batches, parts, step)[0], count, epoch)
            yield AwaitPart(source, count, epoch)
            yield PullPart(source, slot, step, epoch)
            yield PulledPart(source, slot, step, epoch)
    yield Done(epoch)
    return epoch


def add_up(epoch: int) -> Operations:
    """The calling stream's part behind the kernel."""
    yield AwaitSide(epoch)
    yield Sum(epoch)
    yield Summed(epoch)
    return epoch
