"""The order in which ranks access each other's memory in a gather that CUDA graphs capture: explored, not built yet.

A graph replays one text for ever, and the host issues nothing between two calls. So a call's number is not the host's:
a word of each slot in the device's memory counts the calls of that slot, and a captured node advances it. A signal is a
copy of that word, behind its chunk's copy in one stream. Nothing in a graph waits for a value that changes but kernels.
Eager calls have the same text. Each rank has, for each slot, its own count, a signal for each chunk, and two words for
each peer, which that peer writes. *mark*: the call whose rows it is about to write here. *taken*: the last call whose
rows, which this rank has written there, it needs no more::

    calling stream                                      side stream
      a kernel: count = count + 1;
        for each peer: wait until taken >= count - 1
      the side stream may begin                           for each peer: mark = count there;
      kernel: gate, load, math, ... per tile;               for each chunk: chunk -> the peer's slot;
        the last worker out: all marks = count?               signal = count there
      the side stream
      for each peer: taken = count there

*One slot may serve all calls*: no rank writes to a slot of a peer before that peer has said that it needs no more the
rows of the call before. With two slots in turn that was said long ago, and the wait costs nothing.

*Giving up.* Both waits are a kernel's. Their deadlines break the group: by words that every kernel of every rank looks
at while it waits, so that no host takes part. A broken rank computes nothing; what its graph copies, it copies all the
same, since no node of a graph can be left out. It may overwrite rows that a late peer still reads. The mark in front of
them says so: a kernel that has read all its rows looks at the marks, and hands in NaN where one is of another call.

`tilestream_tools.verify.replay` explores this: replays by turns of several slots, one more on one rank than on another,
calls that expire, and ranks lost.
"""

from __future__ import annotations

from typing import NamedTuple

from tilestream.core.protocols.gather import Abort, Break, Operations, peers, receivers


class Advance(NamedTuple):
    """Count a call of this slot. Answer: its number."""

    slot: int


class AwaitTaken(NamedTuple):
    """A kernel waits until a peer needs the rows of ``call`` no more. Answer: 1; 0 if broken, or its time is up."""

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
    """Say in a peer's memory that the rows of ``call`` are about to be written there."""

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


class Intact(NamedTuple):
    """The last worker out looks at all marks. Answer: 1 if they are of ``call``."""

    slot: int
    call: int


class HandIn(NamedTuple):
    """The result is a number, not NaN."""

    replay: int


class Taken(NamedTuple):
    """Say in a peer's memory that this rank needs the rows of ``call`` no more."""

    peer: int
    slot: int
    call: int


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
    """The kernel: the peers' rows. Returns 1 if its result is a number."""
    for peer in peers(rank, world):
        for chunk in range(chunks):
            if not (yield Gate(peer, slot, chunk, call)):
                yield from give_up(rank, world)
                return 0
            yield Read(peer, slot, chunk, call)
            yield ReadDone(peer, slot, chunk, call)
    if not (yield Intact(slot, call)):
        yield from give_up(rank, world)
        return 0
    return 1


def calling(rank: int, world: int, slot: int, chunks: int, replay: int) -> Operations:
    """The calling stream: the whole call."""
    admitted = yield from admit(rank, world, slot)
    assert admitted is not None
    call = abs(admitted)
    yield Fork(replay, call)
    if admitted > 0 and (yield from multiply(rank, world, slot, chunks, call)):
        yield HandIn(replay)
    yield AwaitJoin(replay)
    for peer in peers(rank, world):
        yield Taken(peer, slot, call)
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
