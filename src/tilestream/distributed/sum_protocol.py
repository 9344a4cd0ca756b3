"""How ranks take turns in a sum: the text that GPUs perform and the checker explores.

What a rank computes is its peers' to pull, when there is something of each for each. A slot holds a rank's whole
product, and there is a flag a peer in a rank's own memory, which that peer writes::

    calling stream                                side stream
      the last call's sum and side stream
      side stream may begin
      kernel: the next rank's chunk; signal it;   for each step, the own chunks left out:
              its next; ...; the own ones last      wait until the step's chunk is signalled here
                                                    that chunk's rank's memory: my flag = so many of its
                                                    wait until the flag of the rank whose step's chunk is
      the side stream                                 one's own says so; pull it
      sum, in the order of the ranks

All ranks are at the same step, and each step a rank has one chunk to tell of and one to pull, of another. A flag counts
chunks over all calls, so that it never falls. What it says of a call, it says of the one before, too: its writer has
pulled all of that. So one handshake a call opens this epoch's slots and frees those of the epoch before the last.

The kernel waits for nobody; the side stream, which has no deadline, would wait for a missing flag for ever, and the
calling stream for it. So here the watchdog (`watch`) counts the deadline, from the kernel's end. It lets the side
stream go by writing the flag itself, when it has told the peers, and the sum is NaN from that call on. What such a flag
says is not true, and must free no slot that a peer may still pull from: with two slots it would, by the calls that were
issued before the host knew. So the host runs ahead by `AHEAD` calls and no more, and there is a slot for each.

No operation waits for one that is issued after it: the kernel is issued before the side stream's part.

What a sum has in common with a gather is in `tilestream.distributed.protocol`. `tilestream_tools.verify.sums`
explores these texts, as `tilestream_tools.verify.gather` does those.
"""

from __future__ import annotations

from typing import NamedTuple

from tilestream.distributed.protocol import (
    AHEAD,
    SLOTS,
    AwaitCall,
    AwaitPost,
    AwaitSide,
    Begin,
    Done,
    Post,
    Turn,
)


class Compute(NamedTuple):
    """Calling stream, of a sum: start computing the chunk that is ``step``-th, into a slot: see `sent`."""

    slot: int
    step: int
    epoch: int


class Computed(NamedTuple):
    """It is complete."""

    slot: int
    step: int
    epoch: int


class Publish(NamedTuple):
    """Signal it on this rank."""

    step: int
    epoch: int


class Ended(NamedTuple):
    """Calling stream, of a sum: the kernel that computes and publishes has ended."""

    epoch: int


class AwaitPublished(NamedTuple):
    """Side stream: wait until the ``step``-th chunk is published."""

    step: int
    epoch: int


class TellPart(NamedTuple):
    """Write one's flag in a peer's memory: so many of its chunks are there."""

    peer: int
    parts: int
    epoch: int


class AwaitPart(NamedTuple):
    """Wait until a peer's flag in one's own memory says that so many chunks are there."""

    peer: int
    parts: int
    epoch: int


class PullPart(NamedTuple):
    """Start copying the chunk that was ``step``-th of a peer's out of its slot."""

    peer: int
    slot: int
    step: int
    epoch: int


class PulledPart(NamedTuple):
    """That copy is done."""

    peer: int
    slot: int
    step: int
    epoch: int


class Sum(NamedTuple):
    """Calling stream: start adding what was pulled; where the call was overruled, NaN is its sum."""

    epoch: int


class Summed(NamedTuple):
    """That is done, and the call with it."""

    epoch: int


def begin_sum(epoch: int) -> Turn:
    """As `begin`, of a sum."""
    yield AwaitSide(epoch - AHEAD - 1)
    return epoch if (yield Begin(epoch)) else None


def sent(rank: int, world: int, batches: int, parts: int, step: int) -> tuple[int, int]:
    """Whose chunk ``rank`` computes as its ``step``-th, and which of that rank's it is.

    In the order of the rows, from the next rank's first on, all around: the last of each round is the rank's own.
    """
    chunk = ((rank + 1) * parts + step) % (batches * world * parts)
    return chunk // parts % world, chunk // (parts * world) * parts + chunk % parts


def sender(rank: int, world: int, parts: int, step: int) -> int:
    """Whose ``step``-th chunk is ``rank``'s: one rank's, and at its own steps its own."""
    return (rank - 1 - step // parts) % world


def produce(rank: int, world: int, batches: int, parts: int, epoch: int) -> Turn:
    """The calling stream's part of a sum, up to the end of its kernel."""
    yield AwaitCall(epoch - 1)
    yield Post(epoch)
    slot = epoch % SLOTS
    for step in range(batches * world * parts):
        yield Compute(slot, step, epoch)
        yield Computed(slot, step, epoch)
        yield Publish(step, epoch)
    yield Ended(epoch)
    return epoch


def scatter(rank: int, world: int, batches: int, parts: int, epoch: int) -> Turn:
    """The side stream's part of a sum."""
    yield AwaitPost(epoch)
    slot = epoch % SLOTS
    for step in range(batches * world * parts):
        source = sender(rank, world, parts, step)
        if source != rank:
            count = step // (world * parts) * parts + step % parts + 1
            yield AwaitPublished(step, epoch)
            yield TellPart(sent(rank, world, batches, parts, step)[0], count, epoch)
            yield AwaitPart(source, count, epoch)
            yield PullPart(source, slot, step, epoch)
            yield PulledPart(source, slot, step, epoch)
    yield Done(epoch)
    return epoch


def add_up(epoch: int) -> Turn:
    """The calling stream's part of a sum, behind the kernel."""
    yield AwaitSide(epoch)
    yield Sum(epoch)
    yield Summed(epoch)
    return epoch
