"""The C buffers of a worker's math loops in hardware: the meaning of `Drain`, `Fill`, `Fence` and `Store`.

A TMA store may read its buffer at any moment between its start and the `Drain` that waits for it; each consumer waits
for its own stores, the oldest first. So it is a fault to fill a buffer that a store may still read, and to end the
kernel while a store may still read. A store reads through the async proxy, so it may miss writes without a fence.
"""

from __future__ import annotations

from typing import Any

from tilestream.schedule import WorkItem
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory
from tilestream_tools.verify.protocol import Drain, Fence, Fill, Ring, Store

#: The number of strips in a value ``1 + tile * STRIPS + strip``.
STRIPS = 8


class Buffers:
    """Each consumer's C buffers, in the memory of a model.

    ``at``, for each consumer: the strip to store next (0: none), the buffers that stores in flight read, then each
    buffer's content that is not yet stored (0: nothing): twice its strip, and 1 more if it was fenced.
    """

    def __init__(self, ring: Ring, at: list[int], who: str) -> None:
        self.ring = ring
        self.at = at
        self.who = who

    @staticmethod
    def size(ring: Ring) -> int:
        """The number of entries of a consumer."""
        return 2 + ring.buffers if ring.strips else 0

    @staticmethod
    def memory(ring: Ring) -> Memory:
        """A consumer's entries at the start."""
        return [0, (), *[0] * ring.buffers] if ring.strips else []

    def begin(self, item: WorkItem, consumer: int, m: Memory) -> None:
        """Require the consumer to store ``item``, strip by strip."""
        self.finished(consumer, m)
        if self.ring.strips:
            m[self.at[consumer]] = _code(item, 0)

    def finished(self, consumer: int, m: Memory) -> None:
        """Raise `Fault` unless the consumer has stored all required strips."""
        if self.ring.strips and m[self.at[consumer]]:
            raise Fault("missing work", f"{self.who}{_say(m[self.at[consumer]])} is not stored")

    def fill(self, op: Fill, consumer: int, m: Memory) -> None:
        """Write a buffer."""
        owner = self.ring.owner(consumer)
        for c, at in enumerate(self.at):
            if self.ring.owner(c) == owner and op.buffer in m[at + 1]:
                raise Fault(
                    "overwritten while read", f"{self.who}C buffer {op.buffer} is filled while a store may read it"
                )
        m[self.at[owner] + 2 + op.buffer] = 2 * _code(op.item, op.strip)

    def fence(self, op: Fence, consumer: int, m: Memory) -> None:
        """Make the buffers' contents visible to copies."""
        begin = self.at[self.ring.owner(consumer)] + 2
        m[begin : begin + self.ring.buffers] = [x and x | 1 for x in m[begin : begin + self.ring.buffers]]

    def store(self, op: Store, consumer: int, m: Memory) -> None:
        """Start to read a buffer."""
        at, buffer = self.at[consumer], self.at[self.ring.owner(consumer)] + 2 + op.buffer
        strip = _code(op.item, op.strip)
        if m[at] != strip:
            meant = _say(m[at]) if m[at] else "none"
            raise Fault("wrong data", f"{self.who}{_say(strip)} is stored, meant is {meant}")
        if m[buffer] // 2 != strip:
            raise Fault(
                "wrong data", f"{self.who}{_say(strip)} is stored from C buffer {op.buffer}, which it is not in"
            )
        if m[buffer] % 2 == 0:
            raise Fault(
                "read before arrival", f"{self.who}{_say(strip)} is stored, and its store may not see it in C buffer "
                f"{op.buffer}"
            )  # fmt: skip
        m[at] = 0 if op.strip == self.ring.strips - 1 else strip + 1
        m[at + 1] = (*m[at + 1], op.buffer)
        m[buffer] = 0

    def drain(self, op: Drain, consumer: int, m: Memory) -> None:
        """Complete the reads of all but the newest stores."""
        in_flight = m[self.at[consumer] + 1]
        m[self.at[consumer] + 1] = in_flight[max(0, len(in_flight) - op.in_flight) :]

    def at_end(self, m: Memory) -> None:
        """Raise `Fault` for stores that still read when all loops have left."""
        if not self.ring.strips:
            return
        for consumer, at in enumerate(self.at):
            self.finished(consumer, m)
            if m[at + 1]:
                raise Fault("left too early", f"{self.who}a store may still read C buffer {m[at + 1][0]}")


def _code(item: WorkItem, strip: int) -> int:
    return 1 + item.tile * STRIPS + strip


def _say(code: int) -> str:
    return f"strip {(code - 1) % STRIPS} of item {(code - 1) // STRIPS}"


#: The method that performs each operation.
MEANING: dict[type, Any] = {Drain: Buffers.drain, Fill: Buffers.fill, Fence: Buffers.fence, Store: Buffers.store}
