"""How ranks take turns in an all-reduce of a few rows: the text that GPUs perform and the checker explores.

Each rank has `SLOTS` slots in memory that its peers can read, and a flag a peer in its own memory, which that peer
writes. A call has the next epoch, on every rank the same, and slot ``epoch % SLOTS``; all of it is one stream's::

    the last call is over
    matmul -> the slot
    each peer's memory: my flag = epoch
    for each peer: wait until its flag here >= epoch
    sum: read every rank's slot, add them in the order of the ranks

*One shot*: each rank reads all of every peer's partial sum, over NVLink, in the kernel that adds. Of a few rows that is
microseconds, and there is nothing behind it: no barrier tells that a slot has been read.

*Slots.* A flag of epoch n says that its writer's product of n is in its slot, and that its sum of n - 1 has ended,
which came before in its stream. So whoever has heard n from all peers, and goes on to n + 1, writes to no slot that
anybody reads, if there are two. As for a sum (`tilestream.distributed.protocol`), there is a third: who lets a stream
go that waits for a lost peer writes the flag itself, and what it says is not true; the host begins no call while one
before the last is under way, and none at all in a group that it knows to be broken.

*Giving up.* The matmul waits for nobody. The watchdog counts the deadline from its end, and makes this call's sum, and
every later one, NaN before it lets the stream go.

`tilestream_tools.verify.one_shot` explores this text for two and three ranks over several calls.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from tilestream.distributed.protocol import SLOTS, AwaitCall, peers

Turn = Generator[Any, int, "int | None"]


class Multiply(NamedTuple):
    """Start the matmul, into a slot."""

    slot: int
    epoch: int


class Multiplied(NamedTuple):
    """It has ended."""

    slot: int
    epoch: int


class TellPeer(NamedTuple):
    """Write one's flag in a peer's memory."""

    peer: int
    epoch: int


class HearPeer(NamedTuple):
    """Wait until a peer's flag in one's own memory is at least ``epoch``."""

    peer: int
    epoch: int


class Heard(NamedTuple):
    """All have told of ``epoch``."""

    epoch: int


class AddSlots(NamedTuple):
    """Start adding what is in every rank's slot; where the call was overruled, NaN is its sum."""

    slot: int
    epoch: int


class Added(NamedTuple):
    """That is done, and the call with it."""

    slot: int
    epoch: int


def reduce(rank: int, world: int, epoch: int) -> Turn:
    """The calling stream's part of a call: all of it."""
    yield AwaitCall(epoch - 1)
    slot = epoch % SLOTS
    yield Multiply(slot, epoch)
    yield Multiplied(slot, epoch)
    for peer in peers(rank, world):
        yield TellPeer(peer, epoch)
    for peer in peers(rank, world):
        yield HearPeer(peer, epoch)
    yield Heard(epoch)
    yield AddSlots(slot, epoch)
    yield Added(slot, epoch)
    return epoch
