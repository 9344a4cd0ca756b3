"""A worker's barriers, stages and slots in hardware: the meaning of the operations of `protocol`.

An mbarrier has a phase bit, a count of pending arrivals and a count of pending bytes (here: loads). When both counts
are zero, the phase completes: the bit flips and the arrivals restart. ``wait(parity)`` blocks while the bit equals the
parity: on a new barrier wait(0) blocks and wait(1) passes. A waiter that is two phases late cannot detect this: it
blocks, or passes, wrongly.

In the model one load fills a stage. The hardware has several (A's tile and B's), covered by one `Expect`: the phase
completes with the last of them, and until then the stage must not be read.

A load may fill its stage at any moment after its start. A multiplication reads its stage until the `Retire` that waits
for it. So the start of a load into a stage that is being read or filled is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tilestream.schedule import WorkItem
from tilestream_tools.verify import protocol as p
from tilestream_tools.verify.buffers import MEANING, Buffers
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory

#: The number of K steps in a stage's value ``1 + tile * STEPS + k``.
STEPS = 64
#: The last of these K steps, which no item has. In an accumulator's value it stands for NaN.
VOID = STEPS - 1


def fresh(count: int) -> int:
    """A barrier after init, as ``phase + 2 * arrivals + 32 * bytes``: phase 0, ``count`` pending arrivals, no bytes."""
    return count << 1


def blocks(barrier: int, parity: int) -> bool:
    """Whether wait(parity) blocks."""
    return barrier & 1 == parity


def arrived(barrier: int, count: int, arrivals: int = 0, loads: int = 0) -> int:
    """A barrier after ``arrivals`` of its ``count`` arrivals, and ``loads`` more (or fewer) loads to wait for."""
    pending = (barrier >> 1 & 15) - arrivals
    bytes_ = (barrier >> 5) + loads
    if pending < 0 or bytes_ < 0:
        raise Fault("barrier broken", "an arrival at a barrier whose phase has all of its arrivals")
    if pending == 0 and bytes_ == 0:
        return fresh(count) | (barrier & 1 ^ 1)
    return barrier & 1 | pending << 1 | bytes_ << 5


class RingMemory:
    """The memory of one worker's rings, from ``base`` on in the memory of a model, and the operations on it.

    Layout: barriers, stages, bits of stages being loaded, whether a gate has seen an arrival without a fence since,
    slots; then for each consumer the step that it must read next, the stages of its multiplications in flight, and its
    C buffers.
    """

    def __init__(self, ring: p.Ring, base: int, who: str, items: list[WorkItem]) -> None:
        self.ring = ring
        self.who = who
        self.items = items
        counts = ring.barriers()
        self.where: dict[p.Barrier, int] = {barrier: base + i for i, barrier in enumerate(counts)}
        self.counts = counts
        self.stage = base + len(counts)
        self.loading = self.stage + ring.depth
        self.unfenced = self.loading + 1
        self.slot = self.unfenced + 1
        self.consumer = self.slot + ring.items
        self.private = 2 + Buffers.size(ring)
        self.end = self.consumer + self.private * ring.num_consumers
        self.of_consumer = list(range(self.consumer, self.end, self.private))
        self.buffers = Buffers(ring, [at + 2 for at in self.of_consumer], who)

    def memory(self) -> Memory:
        """The memory at the start."""
        ring = self.ring
        consumers: list[Any] = []
        for c in range(ring.num_consumers):
            consumers += [1 + (c * STEPS if ring.consumers == "ping_pong" else 0), (), *Buffers.memory(ring)]
        return [*(fresh(n) for n in self.counts.values()), *[0] * (ring.depth + 2 + ring.items), *consumers]

    def answers_of(self, op: Any) -> Callable[[int, Any, Memory], Sequence[Any]] | None:
        """See `Model.answers_of`."""
        if type(op) is p.WaitBarrier:
            at = self.where[op.barrier]
            return lambda pid, op, m: () if blocks(m[at], op.parity) else (0,)
        if type(op) is p.Get:
            slot = self.slot + op.slot
            return lambda pid, op, m: (self.items[m[slot] - 2] if m[slot] > 1 else None,)
        return None

    def performer_of(self, op: Any, consumer: int) -> Callable[[int, Any, Any, Memory], None] | None:
        """`Model.performer_of` for math loop ``consumer`` (for the load loop: any number)."""
        private = self.of_consumer[consumer]
        meaning = MEANING.get(type(op))
        if meaning is not None:
            return lambda pid, op, answer, m: meaning(self.buffers, op, consumer, m)
        handlers: dict[type, Callable[[int, Any, Any, Memory], None]] = {
            p.Arrive: lambda pid, op, answer, m: self._arrive(op.barrier, m, 1, 0),
            p.Expect: lambda pid, op, answer, m: self._arrive(op.barrier, m, 1, 1),
            p.Acquired: lambda pid, op, answer, m: self._acquired(m),
            p.Load: lambda pid, op, answer, m: self._load(op, m),
            p.Put: lambda pid, op, answer, m: self._put(op, m),
            p.Get: lambda pid, op, answer, m: self._get(op, m),
            p.Mma: lambda pid, op, answer, m: self._mma(op, m, private),
            p.Retire: lambda pid, op, answer, m: self._retire(op, m, private),
            p.Poisoned: lambda pid, op, answer, m: self._poison(op, m, private),
            p.Epilogue: lambda pid, op, answer, m: self._epilogue(op, m, consumer),
            p.Fixup: lambda pid, op, answer, m: self.buffers.begin(op.item, consumer, m) if answer else None,
        }
        return handlers.get(type(op))

    def _arrive(self, barrier: p.Barrier, m: Memory, arrivals: int, loads: int) -> None:
        at = self.where[barrier]
        m[at] = arrived(m[at], self.counts[barrier], arrivals, loads)

    def see(self, m: Memory) -> None:
        """Record that the load loop has seen an arrival at a gate. Copies see it only after a fence."""
        m[self.unfenced] = 1

    def _acquired(self, m: Memory) -> None:
        m[self.unfenced] = 0

    def _load(self, op: p.Load, m: Memory) -> None:
        if m[self.unfenced]:
            raise Fault("read before arrival", f"{self.who}loads item {op.item.tile}: what its gate saw is not fenced")
        if m[self.loading] >> op.stage & 1:
            raise Fault("overwritten while read", f"{self.who}loads into stage {op.stage}, which is still being loaded")
        for private in self.of_consumer:
            if op.stage in m[private + 1]:
                raise Fault("overwritten while read", f"{self.who}loads into stage {op.stage} while an mma reads it")
        m[self.stage + op.stage] = 1 + op.item.tile * STEPS + op.k
        m[self.loading] |= 1 << op.stage

    def land(self, stage: int, m: Memory) -> None:
        """Complete the load into ``stage``."""
        m[self.loading] &= ~(1 << stage)
        self._arrive(p.Barrier("full", stage), m, 0, -1)

    def _put(self, op: p.Put, m: Memory) -> None:
        if op.item is not None and op.item not in self.items:
            self.items.append(op.item)
        m[self.slot + op.slot] = 1 if op.item is None else 2 + self.items.index(op.item)

    def _get(self, op: p.Get, m: Memory) -> None:
        if not m[self.slot + op.slot]:
            raise Fault("wrong data", f"{self.who}reads slot {op.slot} of the item ring before anything was put there")

    def _mma(self, op: p.Mma, m: Memory, private: int) -> None:
        if m[self.loading] >> op.stage & 1:
            raise Fault("read before arrival", f"{self.who}an mma reads stage {op.stage} before its load has landed")
        held, meant = m[self.stage + op.stage], m[private]
        if held != meant:
            raise Fault(
                "wrong data", f"{self.who}an mma reads {_data(held)} in stage {op.stage}, meant is {_data(meant)}"
            )
        m[private] = meant + 1
        m[private + 1] = (*m[private + 1], op.stage)

    def _retire(self, op: p.Retire, m: Memory, private: int) -> None:
        in_flight = m[private + 1]
        m[private + 1] = in_flight[max(0, len(in_flight) - op.in_flight) :]

    def _poison(self, op: p.Poisoned, m: Memory, private: int) -> None:
        item = op.item
        if m[private + 1]:
            raise Fault("wrong data", f"{self.who}NaN is written to the accumulator while an mma writes it")
        if item.k_begin < item.k_end or m[private] != 1 + item.tile * STEPS + item.k_end:
            raise Fault(
                "wrong data", f"{self.who}NaN for item {item.tile}; its accumulator is to get {_data(m[private])}"
            )
        m[private] = 1 + item.tile * STEPS + VOID

    def _epilogue(self, op: p.Epilogue, m: Memory, consumer: int) -> None:
        private, item = self.of_consumer[consumer], op.item
        if m[private + 1]:
            raise Fault("wrong data", f"{self.who}the epilogue takes the accumulator while an mma writes it")
        if m[private] != 1 + item.tile * STEPS + (item.k_end if item.k_begin < item.k_end else VOID):
            raise Fault(
                "wrong data",
                f"{self.who}the epilogue of item {op.item.tile}; its accumulator has yet to get {_data(m[private])}",
            )
        self.finish(op.item, consumer, m)

    def finish(self, item: WorkItem, consumer: int, m: Memory) -> None:
        """Take a whole accumulator: its tile must be stored, or for a part, if `Fixup` says so."""
        if item.parts == 1:
            self.buffers.begin(item, consumer, m)
        else:
            self.buffers.finished(consumer, m)

    def at_end(self, m: Memory) -> None:
        """After all loops have left, raise `Fault` unless both rings, except their phases, are as at the start."""
        self.buffers.at_end(m)
        if m[self.loading]:
            raise Fault("ring in use", f"{self.who}a load is still under way")
        if any(m[private + 1] for private in self.of_consumer):
            raise Fault("ring in use", f"{self.who}an mma is still in flight")
        for barrier, count in self.counts.items():
            if barrier.name != "order" and m[self.where[barrier]] & ~1 != fresh(count):
                raise Fault("ring in use", f"{self.who}{barrier} is in the middle of a phase")
        for full, empty, n in (("full", "empty", self.ring.depth), ("item_full", "item_empty", self.ring.items)):
            for i in range(n):
                if (m[self.where[p.Barrier(full, i)]] ^ m[self.where[p.Barrier(empty, i)]]) & 1:
                    raise Fault("ring in use", f"{self.who}{full}[{i}] and {empty}[{i}] are not in the same round")


def _data(code: int) -> str:
    return f"K step {(code - 1) % STEPS} of item {(code - 1) // STEPS}" if code else "nothing that was loaded"
