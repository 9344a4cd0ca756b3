"""The order of memory accesses in a one-shot all-reduce between ranks: GPUs perform it, the checker explores it.

Each rank has `SLOTS` slots in memory that its peers can read, and one flag for each peer in its own memory, which that
peer writes. A call has the next epoch, the same on every rank, and uses slot ``epoch % SLOTS``. All of it is issued to
one stream::

    the last call is over
    matmul -> the slot
    each peer's memory: my flag = epoch
    for each peer: wait until its flag here >= epoch
    sum: read every rank's slot, add them in the order of the ranks

*One shot*: each rank reads every peer's whole partial sum over NVLink, in the kernel that adds. For a few rows that
takes microseconds. No barrier follows to say that a slot has been read.

*Slots.* A flag of epoch n says that its writer's product of n is in its slot, and that its sum of n - 1, which precedes
it in the stream, has ended. So with two slots, a rank that has received n from all peers and goes on to n + 1 writes to
no slot that is still read. The third slot is for the watchdog, as in `tilestream.core.protocols.reduce_scatter`: it
releases a stream that waits for a lost peer by writing the flag itself, which then implies nothing. The host begins no
call while one before the last is under way, and none in a group that it knows to be broken.

*Giving up.* The matmul waits for no peer. The watchdog counts the deadline from its end, and makes this call's sum and
every later one NaN before it releases the stream.

`tilestream_tools.verify.one_shot` explores this for two and three ranks over several calls.
"""

from __future__ import annotations

from tilestream.core.protocols.gather import SLOTS, AwaitCall, OfCall, OfPeer, OfSlot, Operations, peers


class Multiply(OfSlot):
    """Start the matmul into a slot."""


class Multiplied(OfSlot):
    """The matmul has ended."""


class FlagPeer(OfPeer):
    """Write this rank's flag in a peer's memory."""


class AwaitPeer(OfPeer):
    """Wait until a peer's flag in this rank's memory is at least ``epoch``."""


class AllFlagged(OfCall):
    """All peers' flags have reached ``epoch``."""


class AddSlots(OfSlot):
    """Start adding every rank's slot; the sum is NaN if the call was overruled."""


class Added(OfSlot):
    """The sum is complete, and so is the call."""


def reduce(rank: int, world: int, epoch: int) -> Operations:
    """The calling stream's part: the whole call."""
    yield AwaitCall(epoch - 1)
    slot = epoch % SLOTS
    yield Multiply(slot, epoch)
    yield Multiplied(slot, epoch)
    for peer in peers(rank, world):
        yield FlagPeer(peer, epoch)
    for peer in peers(rank, world):
        yield AwaitPeer(peer, epoch)
    yield AllFlagged(epoch)
    yield AddSlots(slot, epoch)
    yield Added(slot, epoch)
    return epoch
