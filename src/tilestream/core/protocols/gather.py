"""The order in which ranks access each other's memory in a gather: GPUs perform it, the checker explores it.

Each rank has `SLOTS` slots in memory that its peers can reach, each as large as all shards together, with a signal for
each chunk, and one flag for each peer in its own memory, which that peer writes. A call has the next epoch, the same on
every rank, and uses slot ``epoch % SLOTS`` and its signals. Shards are pushed or pulled: all ranks the same way, which
may change from call to call::

    host                                          the kernel of the call before the last has ended, and not expired
    calling stream                                side stream
      the last call is over                         the calling stream is at (a), or at (b)
      (a) pushed: the side stream may begin         pushed: for each peer, for each chunk of the own shard:
      shard -> its place in the own slot; signal it   chunk -> its place in the peer's slot; signal it there
      (b) pulled: the side stream may begin         pulled: each peer's memory: my flag = epoch
      kernel: gate, load, math, ... per tile          for each peer: wait until its flag here >= epoch;
      the side stream                                   for each of its chunks: pull it out of its slot; signal it

The calling stream waits for the side stream last, because the caller may write to the shard after the call.

*Pushed, the data are the handshake*: no stream waits for a peer. Only the kernel does, and it has a deadline. *Pulled*,
one handshake precedes the data, and the copies disturb the matmul less.

*Each call begins behind all of the previous call.* So a rank that pushes epoch n, or signals it, has received every
peer's rows of n - 1, which that peer sent behind its kernel and side stream of n - 2. With two slots nothing therefore
reads what is written for n, whichever way it travels, as long as every kernel receives all rows before it ends.

*Expiry.* A kernel whose deadline passes ends without all rows. Calls that were issued behind it still push, and still
signal, so their signals no longer imply what they should. The host therefore checks, before it issues call n, whether
the kernel of n - 2 or an earlier one has expired (the device's report is complete when the kernel has ended), and if so
issues nothing more. Signals of n then come from a rank whose kernel n - 2 received all rows, which peers sent behind
their kernels n - 3. With a third slot nothing reads what is written for n, whatever happens to n - 1.

The watchdog (`watch`) sets the peers' abort flags, so that all ranks raise. It ends kernels that still wait: the rows
of a late rank may come, but those of the next call do not. A side stream that pulls has no deadline. The watchdog
releases it by writing the missing flag, but only after its kernel has ended, because what it then pulls is undefined
and is signalled all the same. Later writes go to slots of a broken group: no kernel is issued that could read them, and
they are kept until the group is destroyed.

*Signals* only grow, and are compared with the call's own epoch. A signal belongs to the chunk of its number, and which
rank sends that chunk depends on the shape of the call. Signals therefore belong to a slot: any write of an earlier call
to them happened before the kernels of that call ended without expiry.

No operation waits for one that is issued later: the kernel is issued behind the side stream's part, and each wait of a
stream is issued behind everything that it waits for.

`tilestream_tools.verify.gather` explores this for two and three ranks over several epochs, with ranks that are late,
give up or are lost. The reverse, a reduce-scatter, is in `tilestream.core.protocols.reduce_scatter`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Literal, NamedTuple

#: Calls that may be issued while an earlier one is under way: its kernel, or its side stream in a reduce-scatter.
AHEAD = 1
#: Slots of a rank: two while no rank gives up, and one for each call that may be issued before the host knows.
SLOTS = 2 + AHEAD


#: How a call's shards travel.
Way = Literal["push", "pull"]


class OfCall(NamedTuple):
    """What an operation names: the call."""

    epoch: int


class OfPeer(NamedTuple):
    """The call, and a peer."""

    peer: int
    epoch: int


class OfSlot(NamedTuple):
    """The call, and a slot of this rank."""

    slot: int
    epoch: int


class OfChunk(NamedTuple):
    """A chunk of the shard of this rank or of a peer, and a slot."""

    peer: int
    slot: int
    chunk: int
    epoch: int


class AwaitKernel(OfCall):
    """Host: wait until the kernel of ``epoch`` has ended."""


class CheckExpired(NamedTuple):
    """Host: has a kernel of this rank expired (1)? Exact for kernels that have ended. If so, break the group."""


class Begin(OfCall):
    """Host: issue ``epoch``. Answer: 1; 0 if the group is broken, and nothing is issued."""


class AwaitCall(OfCall):
    """Calling stream: wait until all of ``epoch`` is over. It may have been issued from another stream."""


class Fill(OfSlot):
    """Calling stream: start copying the shard to its place in an own slot."""


class Filled(OfSlot):
    """The copy is complete."""


class Signal(NamedTuple):
    """Signal a chunk of a rank's shard to this rank's kernel."""

    rank: int
    slot: int
    chunk: int
    epoch: int


class Post(OfCall):
    """Calling stream: the side stream may begin ``epoch``."""


class AwaitPost(OfCall):
    """Side stream: wait for `Post`."""


class Push(OfChunk):
    """Start copying a chunk of the shard to its place in a peer's slot."""


class Pushed(OfChunk):
    """The copy is complete."""


class SignalPeer(OfChunk):
    """Signal a chunk of the shard to a peer's kernel."""


class Flag(OfPeer):
    """Write this rank's flag in a peer's memory."""


class AwaitFlag(OfPeer):
    """Wait until a peer's flag in this rank's memory is at least ``epoch``."""


class Pull(OfChunk):
    """Start copying a chunk of a peer's shard from its slot to its place in the own slot."""


class Pulled(OfChunk):
    """The copy is complete."""


class Done(OfCall):
    """The side stream has finished ``epoch``."""


class AwaitSide(OfCall):
    """Calling stream, or host: wait until the side stream has finished ``epoch``."""


class Notice(NamedTuple):
    """Watchdog: wait until this rank or a peer has given up (1), or nothing is left to watch (0)."""


class Break(NamedTuple):
    """Break the group: no later call begins."""


class Abort(NamedTuple):
    """Set the abort flag of a peer."""

    peer: int


class Oldest(NamedTuple):
    """Watchdog. Answer: the oldest issued epoch that is under way on any stream; 0 if there is none."""


class Overrule(OfCall):
    """End the wait of the kernel of ``epoch``: the missing chunks will not come."""


class Release(OfCall):
    """Raise every flag of this rank to ``epoch`` in its peer's place."""


class AwaitDone(OfCall):
    """Watchdog: wait until all of ``epoch`` is done (1), or a stream waits for a flag that a peer has lowered (0)."""


#: A protocol: it yields its operations and receives their answers.
Operations = Generator[Any, int, "int | None"]


def peers(rank: int, world: int) -> Iterator[int]:
    """The other ranks, the next one first: the order of their tiles; no two ranks pull from one at the same time."""
    return ((rank + x) % world for x in range(1, world))


def begin(epoch: int) -> Operations:
    """The host's part of a gather, before anything is issued. Returns the epoch; None if the group is broken."""
    yield AwaitKernel(epoch - AHEAD - 1)
    if (yield CheckExpired()):
        return None
    return epoch if (yield Begin(epoch)) else None


def publish(rank: int, chunks: int, epoch: int, from_slot: bool = False) -> Operations:
    """The calling stream's part of a gather, before the kernel.

    ``from_slot``: the shard is sent from the own slot, because it is pulled, or the caller's tensor is not contiguous.
    """
    yield AwaitCall(epoch - 1)
    slot = epoch % SLOTS
    if not from_slot:
        yield Post(epoch)
    yield Fill(slot, epoch)
    yield Filled(slot, epoch)
    for chunk in range(chunks):
        yield Signal(rank, slot, chunk, epoch)
    if from_slot:
        yield Post(epoch)
    return epoch


def receivers(rank: int, world: int) -> list[int]:
    """The other ranks, in the order in which they need ``rank``'s rows; no two ranks push to one at the same time."""
    return [(rank - x) % world for x in range(1, world)]


def side(rank: int, world: int, chunks: int, epoch: int, way: Way = "push") -> Operations:
    """The side stream's part of a gather."""
    text = push if way == "push" else pull
    return text(rank, world, chunks, epoch)


def push(rank: int, world: int, chunks: int, epoch: int) -> Operations:
    """The side stream's part where shards are pushed. Each signal follows its copy in the same stream."""
    yield AwaitPost(epoch)
    slot = epoch % SLOTS
    for peer in receivers(rank, world):
        for chunk in range(chunks):
            yield Push(peer, slot, chunk, epoch)
            yield Pushed(peer, slot, chunk, epoch)
            yield SignalPeer(peer, slot, chunk, epoch)
    yield Done(epoch)
    return epoch


def pull(rank: int, world: int, chunks: int, epoch: int) -> Operations:
    """The side stream's part where shards are pulled."""
    yield AwaitPost(epoch)
    for peer in peers(rank, world):
        yield Flag(peer, epoch)
    slot = epoch % SLOTS
    for peer in peers(rank, world):
        yield AwaitFlag(peer, epoch)
        for chunk in range(chunks):
            yield Pull(peer, slot, chunk, epoch)
            yield Pulled(peer, slot, chunk, epoch)
            yield Signal(peer, slot, chunk, epoch)
    yield Done(epoch)
    return epoch


def finish(epoch: int) -> Operations:
    """The calling stream's part of a gather, behind the kernel."""
    yield AwaitSide(epoch)
    return epoch


def give_up(rank: int, world: int) -> Operations:
    """Break the group and set the peers' abort flags (1) once a kernel has expired here or a peer has given up."""
    if not (yield Notice()):
        return 0
    yield Break()
    for peer in peers(rank, world):
        yield Abort(peer)
    return 1


def watch(rank: int, world: int) -> Operations:
    """The watchdog: what the host does when this rank or a peer has given up."""
    if not (yield from give_up(rank, world)):
        return None
    while epoch := (yield Oldest()):
        yield Overrule(epoch)
        yield AwaitKernel(epoch)
        yield Release(epoch)
        while not (yield AwaitDone(epoch)):
            yield Release(epoch)  # a late peer has overwritten the flag
    return None
