"""How ranks take turns with each other's memory: the text that GPUs perform and the checker explores.

A gather
--------

Each rank has `SLOTS` slots for its shard in memory that its peers can read, and a flag a peer in its own memory, which
that peer writes. A call has the next epoch, on every rank the same, and slot ``epoch % SLOTS``::

    calling stream                                side stream
      the last call's kernel and side stream        shard is in the slot
      shard -> slot; signal one's own chunks        each peer's memory: my flag = epoch
      side stream may begin                         for each peer, the next rank first:
      kernel: gate, load, math, ... per tile          wait until its flag here >= epoch
                                                      for each of its chunks: pull it; signal it
    host, before that: at most `AHEAD` calls of which the side stream is not done

The first wait is for calls from several streams: what a call gathers into may be what the last call's kernel still
reads. (On one stream the kernel is waited for anyway. The side stream is for the sake of memory, invariant 9: whoever
comes after a call may free what it writes to.)

A flag of epoch n says two things: its writer's shard of epoch n is in its slot, and its writer has finished pulling
epoch n - 1. So one handshake a call opens this epoch's slots and frees those of the epoch before the last.

*Pulled, not pushed*: once the flags of an epoch are there, a rank's progress depends on no later act of a peer, and the
signals that its kernel believes are written by its own streams, each after its copy. Peers write flags, nothing else.

*Giving up.* A kernel whose deadline expires ends by itself; the side stream, which has no deadline, would wait for the
missing flag for ever, and the calling stream for it. The host's watchdog lets it go (`watch`): it writes the flag
itself, but only for an epoch whose kernel has ended, since what is pulled then is anybody's guess and gets signalled
all the same. It first tells the peers, so that all raise. What such a flag says is not true, and must free no slot that
a peer may still pull from: with two slots it would, by the calls that were issued before the host knew. So the host
runs ahead by `AHEAD` calls and no more, and there is a slot for each: the slot of a call that was issued behind the
one that is let go was freed by the flags of the call before it, which are true.

A sum
-----
The other way round: what a rank computes is its peers' to pull. A slot holds a rank's whole product::

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
chunks over all calls, so that it never falls. What a flag of a call says of the call before is as for a gather, and so
are slots, watchdog and `AHEAD`. The kernel waits for nobody, so here the watchdog counts the deadline, from its end;
and what was pulled after it lets the side stream go is no number: the sum is NaN from that call on.

No operation waits for one that is issued after it, so the kernel is issued before the side stream's part, and a
stream's waits come behind everything that they are for.

`tilestream.verify.gather` and `tilestream.verify.sums` explore these texts for two and three ranks over several epochs,
with ranks that are late, give up or are lost.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

#: Calls that may be issued while the side stream is at an earlier one.
AHEAD = 1
#: Slots of a rank: `watch` needs one beyond the two that the handshake does, for each call that is issued ahead.
SLOTS = 2 + AHEAD


class Begin(NamedTuple):
    """Host: wait until the side stream is done with epoch ``after``. Answer: 0 where the group is broken, else 1."""

    epoch: int
    after: int


class AwaitCall(NamedTuple):
    """Calling stream: wait until ``epoch``'s kernel has ended, and the side stream is done with it."""

    epoch: int


class Fill(NamedTuple):
    """Calling stream: start copying the shard into a slot."""

    slot: int
    epoch: int


class Filled(NamedTuple):
    """That copy is done."""

    slot: int
    epoch: int


class Post(NamedTuple):
    """Calling stream: the side stream may begin ``epoch``."""

    epoch: int


class AwaitPost(NamedTuple):
    """Side stream: wait for `Post`."""

    epoch: int


class Tell(NamedTuple):
    """Write one's flag in a peer's memory."""

    peer: int
    epoch: int


class AwaitFlag(NamedTuple):
    """Wait until a peer's flag in one's own memory is at least ``epoch``."""

    peer: int
    epoch: int


class Pull(NamedTuple):
    """Start copying a chunk of a peer's shard out of its slot."""

    peer: int
    slot: int
    chunk: int
    epoch: int


class Pulled(NamedTuple):
    """That copy is done."""

    peer: int
    slot: int
    chunk: int
    epoch: int


class Signal(NamedTuple):
    """Signal chunk ``chunk`` of rank ``rank``'s shard to the kernel of this rank."""

    rank: int
    chunk: int
    epoch: int


class Done(NamedTuple):
    """The side stream is done with ``epoch``."""

    epoch: int


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


class AwaitSide(NamedTuple):
    """Calling stream, of a sum: wait until the side stream is done with ``epoch``."""

    epoch: int


class Sum(NamedTuple):
    """Calling stream: start adding what was pulled; where the call was overruled, NaN is its sum."""

    epoch: int


class Summed(NamedTuple):
    """That is done, and the call with it."""

    epoch: int


class Notice(NamedTuple):
    """Watchdog: wait until a kernel here has expired, or a peer says so (1), or there is nothing to watch (0)."""


class Break(NamedTuple):
    """From now on no call begins: the group is broken."""


class Abort(NamedTuple):
    """Write the abort word of a peer."""

    peer: int


class Oldest(NamedTuple):
    """Watchdog. Answer: the oldest epoch issued with which the side stream is not done; 0 where there is none."""


class Overrule(NamedTuple):
    """Say to the kernel of ``epoch`` that what is missing will not come."""

    epoch: int


class AwaitKernel(NamedTuple):
    """Watchdog: wait until the kernel of ``epoch`` has ended."""

    epoch: int


class Release(NamedTuple):
    """Write ``epoch`` into every flag of one's own that is less, though its peer has not."""

    epoch: int


class AwaitDone(NamedTuple):
    """Watchdog: wait until the side stream is done with ``epoch`` (1), or is at a flag that was taken back (0)."""

    epoch: int


Turn = Generator[Any, int, "int | None"]


def peers(rank: int, world: int) -> Iterator[int]:
    """The others, the next rank first, so that no two ranks pull from one at a time."""
    return ((rank + x) % world for x in range(1, world))


def begin(epoch: int) -> Turn:
    """The host's part of a call, before anything is issued. Returns the epoch; None where the group is broken."""
    return epoch if (yield Begin(epoch, epoch - AHEAD - 1)) else None


def publish(rank: int, chunks: int, epoch: int) -> Turn:
    """The calling stream's part of a call, before the kernel."""
    yield AwaitCall(epoch - 1)
    slot = epoch % SLOTS
    yield Fill(slot, epoch)
    yield Filled(slot, epoch)
    for chunk in range(chunks):
        yield Signal(rank, chunk, epoch)
    yield Post(epoch)
    return epoch


def gather(rank: int, world: int, chunks: int, epoch: int) -> Turn:
    """The side stream's part of a call."""
    yield AwaitPost(epoch)
    for peer in peers(rank, world):
        yield Tell(peer, epoch)
    slot = epoch % SLOTS
    for peer in peers(rank, world):
        yield AwaitFlag(peer, epoch)
        for chunk in range(chunks):
            yield Pull(peer, slot, chunk, epoch)
            yield Pulled(peer, slot, chunk, epoch)
            yield Signal(peer, chunk, epoch)
    yield Done(epoch)
    return epoch


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


def give_up(rank: int, world: int) -> Turn:
    """Whether the group is broken from now on, and all peers told so: a kernel has expired here, or a peer says so."""
    if not (yield Notice()):
        return 0
    yield Break()
    for peer in peers(rank, world):
        yield Abort(peer)
    return 1


def watch(rank: int, world: int) -> Turn:
    """The watchdog: what the host does when a kernel has expired here, or a peer says that one has there."""
    if not (yield from give_up(rank, world)):
        return None
    while epoch := (yield Oldest()):
        yield Overrule(epoch)
        yield AwaitKernel(epoch)
        yield Release(epoch)
        while not (yield AwaitDone(epoch)):
            yield Release(epoch)  # a peer that was only late has written its flag over ours
    return None
