"""How ranks take turns with each other's memory in a gather: the text that GPUs perform and the checker explores.

Each rank has `SLOTS` slots in memory that its peers can reach, each as large as the whole, with words for signals, and
a flag a peer in its own memory, which that peer writes. A call has the next epoch, on every rank the same, and slot
``epoch % SLOTS`` with its words. Its shards are pushed, or pulled: on each rank alike, and the next call's otherwise if
need be::

    host                                          the kernel of the call before the last has ended, and ended well
    calling stream                                side stream
      the last call is over                         the calling stream is there (a), or (b)
      (a) pushed: the side stream may begin         pushed: for each peer, for each chunk of the own shard:
      shard -> its place in the own slot; signal it   chunk -> its place in the peer's slot; signal it there
      (b) pulled: the side stream may begin         pulled: each peer's memory: my flag = epoch
      kernel: gate, load, math, ... per tile          for each peer: wait until its flag here >= epoch;
      the side stream                                   for each of its chunks: pull it out of its slot; signal it

The last wait is for the caller, who may write to his shard after the call.

*Pushed, the data are the handshake*: no stream waits for a peer, only the kernel does, and it has a deadline. *Pulled*,
one handshake comes before the data; what a rank computes meanwhile is disturbed less.

*A call is begun behind the last one, all of it.* So whoever pushes epoch n, or tells of it, has had every peer's rows
of n - 1; and those were pushed, or told of, behind that peer's kernel and side stream of n - 2. So nothing reads what
is written for n, whichever way it goes, if there are two slots, as long as every kernel that ends has had all it waited
for.

*Giving up.* A kernel whose deadline has expired ends without having had them. What was issued behind it is pushed, or
told of, nevertheless, and what it says is not true. So the host asks, before it issues a call n, whether the kernel of
n - 2, or any before, has expired (the device's report says so, and it is there when the kernel has ended), and if so
issues nothing any more. Then what is said of n comes from a rank whose kernel n - 2 has had all its rows; they were
sent behind the kernels n - 3: with a third slot nobody reads what is written for n, whatever becomes of n - 1.

The watchdog (`watch`) tells the peers, so that all raise. It ends kernels that still wait: their rows may come, from a
rank that is late, but not those of the next call. A side stream that pulls has no deadline, and would wait for a flag
for ever: it is let go, by writing the flag here, once its kernel has ended, since what is pulled then is anybody's
guess and gets signalled all the same. What comes later is written to the slots of a broken group, where no kernel is
issued that could read it, and which are kept until the group is destroyed.

*Signals* only grow, and each call's are compared with its own epoch. A word is of the chunk of its number, whoever
sends that in a call of this shape: so the words, too, are a slot's. Whoever writes a word of an earlier call in the
same slot has done so before the kernels of that call had ended well.

No operation waits for one that is issued after it: the kernel is issued behind the side stream's part, and a stream's
waits come behind everything that they are for.

`tilestream_tools.verify.gather` explores these texts for two and three ranks over several epochs, with ranks that
are late, give up or are lost. The way back, a sum, is in `tilestream.distributed.sum_protocol`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Literal, NamedTuple

#: Calls that may be issued while an earlier one is under way: its kernel, or of a sum its side stream.
AHEAD = 1
#: Slots of a rank: two as long as nobody gives up, and one for each call that may be issued before the host knows.
SLOTS = 2 + AHEAD


#: How a call's shards travel.
Way = Literal["push", "pull"]


class AwaitKernel(NamedTuple):
    """Host: wait until the kernel of ``epoch`` has ended."""

    epoch: int


class Ask(NamedTuple):
    """Host: has a kernel here expired (1)? Of those that have ended it is certain. Then break the group, as `watch`."""


class Begin(NamedTuple):
    """Host: issue ``epoch``. Answer: 0 where the group is broken, and nothing is; else 1."""

    epoch: int


class AwaitCall(NamedTuple):
    """Calling stream: wait until all of ``epoch`` is over, which may have come from another stream."""

    epoch: int


class Fill(NamedTuple):
    """Calling stream, of a gather: start copying the shard to its place in an own slot."""

    slot: int
    epoch: int


class Filled(NamedTuple):
    """That copy is done."""

    slot: int
    epoch: int


class Signal(NamedTuple):
    """Signal a chunk of a rank's shard to the kernel here."""

    rank: int
    slot: int
    chunk: int
    epoch: int


class Post(NamedTuple):
    """Calling stream: the side stream may begin ``epoch``."""

    epoch: int


class AwaitPost(NamedTuple):
    """Side stream: wait for `Post`."""

    epoch: int


class Push(NamedTuple):
    """Start copying a chunk of the shard to its place in a slot of a peer's."""

    peer: int
    slot: int
    chunk: int
    epoch: int


class Pushed(NamedTuple):
    """That copy is done."""

    peer: int
    slot: int
    chunk: int
    epoch: int


class Tell(NamedTuple):
    """Signal a chunk of the shard to a peer's kernel."""

    peer: int
    slot: int
    chunk: int
    epoch: int


class Flag(NamedTuple):
    """Write one's flag in a peer's memory."""

    peer: int
    epoch: int


class AwaitFlag(NamedTuple):
    """Wait until a peer's flag in one's own memory is at least ``epoch``."""

    peer: int
    epoch: int


class Pull(NamedTuple):
    """Start copying a chunk of a peer's shard out of its slot, to its place in the own one."""

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


class Done(NamedTuple):
    """The side stream is done with ``epoch``."""

    epoch: int


class AwaitSide(NamedTuple):
    """Calling stream, or host: wait until the side stream is done with ``epoch``."""

    epoch: int


class Notice(NamedTuple):
    """Watchdog: wait until this rank has given up, or a peer says that it has (1), or nothing is left to watch (0)."""


class Break(NamedTuple):
    """From now on no call begins: the group is broken."""


class Abort(NamedTuple):
    """Write the abort word of a peer."""

    peer: int


class Oldest(NamedTuple):
    """Watchdog. Answer: the oldest epoch issued that is under way, on whatever stream; 0 where there is none."""


class Overrule(NamedTuple):
    """Say to the kernel of ``epoch`` that what is missing will not come."""

    epoch: int


class Release(NamedTuple):
    """Write ``epoch`` into every flag of one's own that is less, though its peer has not."""

    epoch: int


class AwaitDone(NamedTuple):
    """Watchdog: wait until all of ``epoch`` is done (1), or a stream is at a flag that was taken back (0)."""

    epoch: int


Turn = Generator[Any, int, "int | None"]


def peers(rank: int, world: int) -> Iterator[int]:
    """The others, the next rank first: as their rows are come to, and so that no two ranks pull from one at a time."""
    return ((rank + x) % world for x in range(1, world))


def begin(epoch: int) -> Turn:
    """The host's part of a gather, before anything is issued. Returns the epoch; None where the group is broken."""
    yield AwaitKernel(epoch - AHEAD - 1)
    if (yield Ask()):
        return None
    return epoch if (yield Begin(epoch)) else None


def publish(rank: int, chunks: int, epoch: int, from_slot: bool = False) -> Turn:
    """The calling stream's part of a gather, before the kernel.

    ``from_slot``: the shard goes out of the own slot: it is pulled, or not in one piece where the caller has it.
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
    """The others, in the order in which they come to ``rank``'s rows: so no two ranks push to one at a time."""
    return [(rank - x) % world for x in range(1, world)]


def side(rank: int, world: int, chunks: int, epoch: int, way: Way = "push") -> Turn:
    """The side stream's part of a gather."""
    text = push if way == "push" else pull
    return text(rank, world, chunks, epoch)


def push(rank: int, world: int, chunks: int, epoch: int) -> Turn:
    """The side stream's part where shards are pushed. A signal is behind its copy in the same stream."""
    yield AwaitPost(epoch)
    slot = epoch % SLOTS
    for peer in receivers(rank, world):
        for chunk in range(chunks):
            yield Push(peer, slot, chunk, epoch)
            yield Pushed(peer, slot, chunk, epoch)
            yield Tell(peer, slot, chunk, epoch)
    yield Done(epoch)
    return epoch


def pull(rank: int, world: int, chunks: int, epoch: int) -> Turn:
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


def finish(epoch: int) -> Turn:
    """The calling stream's part of a gather, behind the kernel."""
    yield AwaitSide(epoch)
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
    """The watchdog: what the host does when this rank has given up, or a peer says that it has."""
    if not (yield from give_up(rank, world)):
        return None
    while epoch := (yield Oldest()):
        yield Overrule(epoch)
        yield AwaitKernel(epoch)
        yield Release(epoch)
        while not (yield AwaitDone(epoch)):
            yield Release(epoch)  # a peer that was only late has written its flag over ours
    return None
