"""The order in which ranks access each other's memory in calls that CUDA graphs may hold.

A graph replays one text for ever, and the host issues nothing between two calls. So the device counts the calls: each
slot has a count in the device's memory, and a call's first kernel advances it. All other operations of the graph are
copies, of rows and of words. Eager calls have the same text: replays and eager calls may come in any order, which may
differ from rank to rank. For each slot a rank has its own count, a signal for each chunk, and two words for each peer,
which that peer writes. *mark*: the number and form of the call whose rows the peer is about to write here. *taken*: the
last call whose rows, which this rank wrote there, the peer has finished reading::

    calling stream                                      side stream
      a kernel: count = count + 1;
        for each peer: wait until taken >= count - 1
      the side stream may begin                           for each peer: mark = count there;
      kernel: gate, load, math, ... per tile;               for each chunk: chunk -> the peer's slot;
        the last worker out: all signals = 0                  signal = 1 there
      a kernel: all marks = count?
        for each peer: taken = count there
      NaN, where they were not
      the side stream

What is pushed is a gather's shard, or a sum's partial products. The reader of a gather is the matmul, whose gate waits
chunk by chunk. The reader of a sum waits for all chunks first, then adds (`adding`).

*A signal is 1 or 0*, since a launch in a graph cannot be told another number each time. The reader clears the signals
when it has seen all of them. No peer signals the next call before that: it has not been told `Taken`.

*One slot may serve all calls*: a rank writes to a slot of a peer only after that peer has said that it has finished
reading the rows of the previous call. With several slots in turn that was said long ago, and the wait costs nothing.

*Giving up.* Both waits are a kernel's, with a deadline. A rank that gives up breaks the group, by a word in the memory
of every rank: a call that finds it set computes nothing, since its signals may be an earlier call's. A gate does not
poll that word; its own deadline ends it. No host takes part. A graph makes its copies in any case, since no node of a
graph can be left out, and may overwrite rows that a late peer still reads. The mark in front of the rows reveals this:
a rank that has read all its rows checks the marks, and its result is NaN if one is of another call.

*Another form.* Ranks compare their calls when they make the first of a kind; no host compares replays. If a rank
replays one graph while another replays a second one, with calls of another shape, both calls have the same number. So a
mark names the form too (`stamp`), and a rank that finds another one breaks the group.

*Memory.* A graph holds addresses: of slots and words, its own and the peers', and of what it computes, which lies in
its memory pool. A pool's memory is used again by other graphs of the pool, between replays, and is freed when its
graphs are destroyed and their last replays have ended on this GPU. Neither waits for a peer, and a peer may write
later: that it has read this rank's rows (`Taken`), rows of a call that this rank does not make any more, that the group
is broken. So slots and words come from no pool and, once a capture has used them, are never freed (`prepare`). What is
pushed may lie in the pool, since only this rank's side stream reads it, and the graph does not end before that.

`tilestream_tools.verify.replay` explores this: replays by turns of several slots, one more on one rank than on another,
calls that expire, ranks lost, graphs that are destroyed under way, and pools that graphs share.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

from tilestream.core.protocols.gather import Abort, Break, Operations, peers, receivers

#: Words of a slot behind its signals, in the memory of each rank: the count; a 1, of which signals are copies; whether
#: the present call is void; whether the group is broken (of the first slot, for all slots); the stamp of the present
#: call, of which marks are copies; then a mark for each rank, and a taken for each rank.
COUNT, ONE, VOID, BROKEN, STAMP, MARKS = range(6)


def control_words(world: int) -> int:
    """Their number."""
    return MARKS + 2 * world


def form_number(handshake: bytes) -> int:
    """A number of 31 bits, equal for calls with equal handshakes."""
    return zlib.crc32(handshake) & 0x7FFFFFFF


def stamp(call: int, form: int) -> int:
    """A mark: of one form, two calls' marks differ, and so do the marks of one number of two forms."""
    return call ^ form


#: Where a slot is: in memory of its own, or in the pool of the graph. How long it is kept: until its graph is destroyed
#: and the graph's last replay has ended on this GPU, or for ever.
OUTSIDE, POOL = range(2)
GRAPH, FOREVER = range(2)


class Reserve(NamedTuple):
    """Host, in an eager call: make the slot and its words in ``where``. The group's queue holds them."""

    slot: int
    where: int


class Keep(NamedTuple):
    """Host, in a capture: keep the slot, whose addresses the graph holds, ``until``, whatever the queue does."""

    slot: int
    until: int


class LetGo(NamedTuple):
    """Host: the queue lets go of the slot. Calls need a larger one, or the group is destroyed."""

    slot: int


class Destroy(NamedTuple):
    """Host: destroy the graph, whose replays may be under way."""


class Advance(NamedTuple):
    """Count a call of this slot. Answer: its number."""

    slot: int


class AwaitTaken(NamedTuple):
    """A kernel waits until a peer has read the rows of ``call``. Answer: 1; 0 if broken, or its time is up."""

    peer: int
    slot: int
    call: int


class Fork(NamedTuple):
    """Calling stream: the side stream may begin replay ``replay``, which is call ``call`` of its slot."""

    replay: int
    call: int


class AwaitFork(NamedTuple):
    """Side stream: wait for `Fork`. Answer: the call."""

    replay: int


class Mark(NamedTuple):
    """Say in a peer's memory that the rows of ``call``, of its form, are about to be written there."""

    peer: int
    slot: int
    call: int


class Push(NamedTuple):
    """Start copying a chunk of the shard to its place in a peer's slot."""

    peer: int
    slot: int
    chunk: int
    call: int


class Pushed(NamedTuple):
    """The copy is complete."""

    peer: int
    slot: int
    chunk: int
    call: int


class SignalPeer(NamedTuple):
    """Signal a chunk of the shard to a peer's kernel."""

    peer: int
    slot: int
    chunk: int
    call: int


class Joined(NamedTuple):
    """The side stream has finished ``replay``."""

    replay: int


class AwaitJoin(NamedTuple):
    """Calling stream: wait until the side stream has finished ``replay``."""

    replay: int


class Gate(NamedTuple):
    """The kernel waits for a chunk of a peer's. Answer: 1; 0 if the group is broken, or its time is up."""

    peer: int
    slot: int
    chunk: int
    call: int


class Read(NamedTuple):
    """The kernel starts reading it."""

    peer: int
    slot: int
    chunk: int
    call: int


class ReadDone(NamedTuple):
    """It has read it."""

    peer: int
    slot: int
    chunk: int
    call: int


class Unbroken(NamedTuple):
    """The reader begins. Answer: 1; 0 if the group is broken, and then signals of an earlier call may be left."""


class Clear(NamedTuple):
    """All chunks were signalled: the reader zeroes the signals."""

    slot: int


class Intact(NamedTuple):
    """A kernel behind the reader looks at all marks. Answer: 1 if they are of ``call``, and of its form."""

    slot: int
    call: int


class HandIn(NamedTuple):
    """The result is a number, not NaN."""

    replay: int


class Taken(NamedTuple):
    """Say in a peer's memory that this rank has read the rows of ``call``."""

    peer: int
    slot: int
    call: int


def prepare(rank: int, world: int, slot: int) -> Operations:
    """The host, before any replay: an eager call, on all ranks, and the capture."""
    yield Reserve(slot, OUTSIDE)
    yield Keep(slot, FOREVER)
    return None


def retire(rank: int, world: int, slots: int) -> Operations:
    """The host, while any replay may be under way."""
    for slot in range(slots):
        yield LetGo(slot)
    yield Destroy()
    return None


def give_up(rank: int, world: int) -> Operations:
    """Break the group, on every rank."""
    yield Break()
    for peer in peers(rank, world):
        yield Abort(peer)
    return None


def admit(rank: int, world: int, slot: int) -> Operations:
    """The first kernel. Returns the number of the call, negative if it must not be computed."""
    call = yield Advance(slot)
    for peer in peers(rank, world):
        if not (yield AwaitTaken(peer, slot, call - 1)):
            yield from give_up(rank, world)
            return -call
    return call


def multiply(rank: int, world: int, slot: int, chunks: int, call: int) -> Operations:
    """A gather's kernel: each chunk is read when it is there. Returns 1 if it has read all of them."""
    if not (yield Unbroken()):
        return 0
    for peer in peers(rank, world):
        for chunk in range(chunks):
            if not (yield Gate(peer, slot, chunk, call)):
                yield from give_up(rank, world)
                return 0
            yield Read(peer, slot, chunk, call)
            yield ReadDone(peer, slot, chunk, call)
    yield Clear(slot)
    return 1


def add_up(rank: int, world: int, slot: int, chunks: int, call: int) -> Operations:
    """A sum's kernels: all chunks are read when all are there. Returns 1 if it has read all of them."""
    if not (yield Unbroken()):
        return 0
    for peer in peers(rank, world):
        for chunk in range(chunks):
            if not (yield Gate(peer, slot, chunk, call)):
                yield from give_up(rank, world)
                return 0
    yield Clear(slot)
    for peer in peers(rank, world):
        for chunk in range(chunks):
            yield Read(peer, slot, chunk, call)
            yield ReadDone(peer, slot, chunk, call)
    return 1


def end(rank: int, world: int, slot: int, replay: int, call: int, read: int | None) -> Operations:
    """The calling stream behind the reader. ``read``: whether that has read all rows."""
    intact = read
    if read and not (yield Intact(slot, call)):
        intact = 0
        yield from give_up(rank, world)
    for peer in peers(rank, world):
        yield Taken(peer, slot, call)
    if intact:
        yield HandIn(replay)
    yield AwaitJoin(replay)
    return None


def calling(rank: int, world: int, slot: int, chunks: int, replay: int) -> Operations:
    """The calling stream of a gather: the whole call."""
    admitted = yield from admit(rank, world, slot)
    assert admitted is not None
    call = abs(admitted)
    yield Fork(replay, call)
    read = (yield from multiply(rank, world, slot, chunks, call)) if admitted > 0 else 0
    yield from end(rank, world, slot, replay, call, read)
    return None


def adding(rank: int, world: int, slot: int, chunks: int, replay: int) -> Operations:
    """The calling stream of a sum: the whole call."""
    admitted = yield from admit(rank, world, slot)
    assert admitted is not None
    call = abs(admitted)
    yield Fork(replay, call)
    read = (yield from add_up(rank, world, slot, chunks, call)) if admitted > 0 else 0
    yield from end(rank, world, slot, replay, call, read)
    return None


def side(rank: int, world: int, slot: int, chunks: int, replay: int) -> Operations:
    """The side stream: the own rows to every peer."""
    call = yield AwaitFork(replay)
    for peer in receivers(rank, world):
        yield Mark(peer, slot, call)
        for chunk in range(chunks):
            yield Push(peer, slot, chunk, call)
            yield Pushed(peer, slot, chunk, call)
            yield SignalPeer(peer, slot, chunk, call)
    yield Joined(replay)
    return None
