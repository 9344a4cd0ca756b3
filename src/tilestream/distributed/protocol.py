"""How ranks take turns with each other's memory in a gather: the text that GPUs perform and the checker explores.

Each rank has `SLOTS` slots in memory that its peers can write, each as large as the whole, with words for signals. A
call has the next epoch, on every rank the same, and slot ``epoch % SLOTS`` with its words. A rank *pushes*::

    host                                          the kernel of the call before the last has ended, and ended well
    calling stream                                lanes
      the last call's kernel and lanes              the lanes may begin
      the lanes may begin                           shard -> its place in a peer's slot; signal it there; ...
      shard -> its place in the own slot; signal it
      kernel: gate, load, math, ... per tile
      the lanes

A lane is a stream: one for each peer; or, of large shards, one for all, one peer after the other. A signal is behind
its copy in the same stream (`lanes`). The last wait is for the caller, who may write to his shard after the call.

*Pushed, not pulled: the data are the handshake.* No stream waits for a peer, only the kernel does, and it has a
deadline. A rank pushes epoch n behind its own kernel n - 1, so when it has had every peer's rows of n - 1; a peer
pushed those behind its kernel n - 2. So nothing reads what a push of n writes to, if there are two slots, as long as
every kernel that ends has had all it waited for.

*Giving up.* A kernel whose deadline has expired ends without having had them. What was issued behind it is pushed
nevertheless, and what it says is not true. So the host asks, before it issues a call n, whether the kernel of n - 2, or
any before, has expired (the device's report says so, and it is there when the kernel has ended), and if so issues
nothing any more. Then a push of n comes from a rank whose kernel n - 2 has had all its rows; they were pushed behind
the kernels n - 3: with a third slot nobody reads where it goes, whatever becomes of n - 1. The watchdog (`watch`) is
left with nothing to let go. It tells the peers, so that all raise, and ends kernels that still wait: their rows may
come, from a rank that is late, but not those of the next call. What comes later is written to the slots of a broken
group, where no kernel is issued that could read it, and which are kept until the group is destroyed.

*Signals* only grow, and each call's are compared with its own epoch. A word is of the chunk of its number, whoever
sends that in a call of this shape: so the words, too, are a slot's. Whoever writes a word of an earlier call in the
same slot has done so before the kernels of that call had ended well.

No operation waits for one that is issued after it: the kernel is issued behind the lanes' part, and a stream's waits
come behind everything that they are for.

`tilestream.verify.gather` explores these texts for two and three ranks over several epochs, with ranks that are late,
give up or are lost. The way back, a sum, is in `tilestream.distributed.sum_protocol`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Literal, NamedTuple

#: Calls that may be issued while an earlier one is under way: its kernel, or of a sum its side stream.
AHEAD = 1
#: Slots of a rank: two as long as nobody gives up, and one for each call that may be issued before the host knows.
SLOTS = 2 + AHEAD


#: How a call's shards travel. Pushed: by a lane to each peer; by one lane to one peer after the other; or so, the
#: signals on a lane of their own. Or pulled, by one lane.
Lanes = Literal["each", "one", "apart", "pull"]


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
    """Calling stream: the lanes, or the side stream, may begin ``epoch``."""

    epoch: int


class AwaitPost(NamedTuple):
    """A lane, or the side stream: wait for `Post`."""

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


class Copied(NamedTuple):
    """The lane of the copies: ``number`` chunks of this call have been copied."""

    number: int
    epoch: int


class AwaitCopied(NamedTuple):
    """The lane of the signals: wait until so many have."""

    number: int
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


class LaneDone(NamedTuple):
    """A lane is done with ``epoch``."""

    lane: int
    epoch: int


class AwaitLanes(NamedTuple):
    """Calling stream: wait until all lanes are done with ``epoch``."""

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


def lanes(rank: int, world: int, chunks: int, epoch: int, form: Lanes = "each") -> list[Turn]:
    """The lanes' part of a gather, one text a lane."""
    to = receivers(rank, world)
    if form == "pull" and to:
        return [pull(rank, world, chunks, epoch)]
    if form == "apart" and to:
        return [copies(to, chunks, epoch), signals(to, chunks, epoch)]
    of_lane = [to] if form == "one" and to else [[peer] for peer in to]
    return [push(lane, some, chunks, epoch) for lane, some in enumerate(of_lane)]


def push(lane: int, to: list[int], chunks: int, epoch: int) -> Turn:
    """The part of a lane that copies and signals, to one peer after the other."""
    yield AwaitPost(epoch)
    slot = epoch % SLOTS
    for peer in to:
        for chunk in range(chunks):
            yield Push(peer, slot, chunk, epoch)
            yield Pushed(peer, slot, chunk, epoch)
            yield Tell(peer, slot, chunk, epoch)
    yield LaneDone(lane, epoch)
    return epoch


def copies(to: list[int], chunks: int, epoch: int) -> Turn:
    """The part of the lane that copies to all peers, one after the other."""
    yield AwaitPost(epoch)
    slot = epoch % SLOTS
    for i in range(len(to) * chunks):
        yield Push(to[i // chunks], slot, i % chunks, epoch)
        yield Pushed(to[i // chunks], slot, i % chunks, epoch)
        yield Copied(i + 1, epoch)
    yield LaneDone(0, epoch)
    return epoch


def signals(to: list[int], chunks: int, epoch: int) -> Turn:
    """The part of the lane that signals what `copies` has copied, beside its next copy."""
    for i in range(len(to) * chunks):
        yield AwaitCopied(i + 1, epoch)
        yield Tell(to[i // chunks], epoch % SLOTS, i % chunks, epoch)
    yield LaneDone(1, epoch)
    return epoch


def pull(rank: int, world: int, chunks: int, epoch: int) -> Turn:
    """The part of the lane that pulls from one peer after the other."""
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
    yield LaneDone(0, epoch)
    return epoch


def finish(epoch: int) -> Turn:
    """The calling stream's part of a gather, behind the kernel."""
    yield AwaitLanes(epoch)
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
