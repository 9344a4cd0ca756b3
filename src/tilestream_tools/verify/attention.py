"""The model of the Hopper attention's rings: `attention_protocol`, explored as `ring` is for the GEMM.

The stream of items is endless, of any of some numbers of key blocks, none included, with STOP after any of them.
Properties: no loop is ever stuck. Each consumer multiplies each block of K, then of V, of each item once and in order,
by that item's queries, from buffers that hold just that. No copy goes to a buffer that is read or being filled. A slot
still holds the item when it is read again at its end. After STOP all loops leave and no item is unfinished. Where keys
arrive, any wait at the gate and any poll of the abort word may end with the launch: no block is copied unless it was
waited for and fenced, and a result is void if and only if a block of the item was not copied. Converted values are
fenced before they are multiplied.

Reductions as in `ring`, for the same reasons: *Next* and *Retire* are delayed; *Expect*, *Copy*, *Start*, *Fence* and
*Done* are eager (a fence concerns what its own loop has read and written). A copy lands when a process may wait for it.
Consumers are not interchangeable: each has its own queries.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tilestream.schedule import WorkItem
from tilestream_tools.verify import attention_protocol as a
from tilestream_tools.verify.barriers import arrived, blocks, fresh
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory, Model
from tilestream_tools.verify.processes import Process
from tilestream_tools.verify.protocol import Arrive, Expect, Fence, Get, Next, Put, Retire, WaitBarrier, k_steps
from tilestream_tools.verify.ring import describe_item

#: Item numbers in use: one that the load loop holds, two in the item ring, one whose last store a consumer is at.
NUMBERS = 4

#: In place of a copy's barrier, where a buffer was written and not fenced.
UNFENCED = "unfenced"
#: A buffer that holds nothing; a consumer that is at no item.
_NOTHING: tuple[Any, ...] = ()


@dataclass(frozen=True)
class AttentionCase:
    """One configuration: the rings, the numbers of blocks that an item may have, the programs of the loops."""

    ring: a.AttentionRing
    counts: tuple[int, ...] = (0, 1, 2)
    load: a.LoadTurn = a.load_turn
    math: a.MathTurn = a.math_turn
    convert: a.ConvertTurn = a.convert_turn

    def build(self, reduce: bool = True, symmetry: bool = True) -> AttentionModel:
        """The model of this configuration."""
        return AttentionModel(self, reduce, symmetry)

    def __str__(self) -> str:
        ring = self.ring
        how = (", in turns" if ring.ordered else "") + (", keys arriving" if ring.arriving else "")
        how += ", values converted" if ring.converting else ""
        how += f", {ring.own} blocks left out" if ring.own else ""
        return (
            f"attention, {ring.consumers} consumers{how}, {ring.depth} stages, queries of {ring.queries} items, "
            f"{' or '.join(map(str, self.counts))} blocks an item"
        )


class AttentionModel(Model):
    """See the module.

    Memory: barriers; buffers (what they hold, and whether it has landed); slots; for each consumer the reads of its
    multiplications in flight and ``(item number, blocks of K started, of V)``; the next item's number, and by number
    how many consumers have to finish it. Where keys arrive, also each slot's mark, and by number how many blocks the
    item has, how many of them were waited for, whether one was not copied, and how many were waited for and fenced.
    """

    eager: ClassVar[frozenset[type]] = frozenset({Expect, a.Copy, a.Start, Fence, a.Done})
    delayed: frozenset[type] = frozenset({Retire})
    lazy: ClassVar[frozenset[type]] = frozenset({Next})
    progress: ClassVar[frozenset[type]] = frozenset({Next})

    def __init__(self, case: AttentionCase, reduce: bool = True, symmetry: bool = True) -> None:
        self.case = case
        ring = case.ring

        def math_of(who: int) -> Callable[[a.MathPlaces], Generator[Any, Any, Any]]:
            return lambda state: case.math(ring, who, state)

        processes = [Process("load", lambda state: case.load(ring, state), a.LoadPlaces(), "load")]
        processes += [Process(f"math {c}", math_of(c), a.MathPlaces(), f"math {c}") for c in range(ring.consumers)]
        if ring.converting:
            processes.append(Process("convert", lambda state: case.convert(ring, state), a.ConvertPlaces(), "convert"))
        counts = {*case.counts, 0} if ring.arriving else case.counts
        self.items = [WorkItem(n, 0, 0, 0, 0, count) for n in range(NUMBERS) for count in sorted(counts)]
        base = len(processes)
        self.counts = ring.barriers()
        self.barrier = {bar: base + i for i, bar in enumerate(self.counts)}
        base += len(self.counts)
        names = [("q", at) for at in range(ring.consumers * ring.queries)]
        names += [(what, at) for what in ("k", "v", *["raw"] * ring.converting) for at in range(ring.depth)]
        self.buffer = {name: base + i for i, name in enumerate(names)}
        base += len(names)
        self.slot = base
        self.consumer = base + ring.items
        self.number = self.consumer + 2 * ring.consumers
        self.left = self.number + 1
        self.mark = self.left + NUMBERS
        self.blocks = self.mark + ring.items
        super().__init__(processes, reduce, symmetry)

    def memory(self) -> Memory:
        """See `Model.memory`."""
        ring = self.case.ring
        return [
            *(fresh(count) for count in self.counts.values()), *[_NOTHING] * len(self.buffer), *[None] * ring.items,
            *[(), (0, 0, 0)] * ring.consumers, 0, *[0] * NUMBERS,
            *([0] * ring.items + [(0, 0, 0, 0)] * NUMBERS if ring.arriving else ()),
        ]  # fmt: skip

    def domain(self, op: Any, past: Hashable) -> Sequence[Any]:
        """See `Model.domain`."""
        if type(op) in (Next, Get):
            return (None, *self.items)
        if type(op) is a.Own:
            first, last = ((0, 1) if self.case.ring.own in (side, "both") else (0,) for side in ("first", "last"))
            sides = itertools.product(first, last)
            return [(before, after) for before, after in sides if before + after < k_steps(op.item)]
        return (0, 1) if type(op) in (a.Ask, a.Pass, a.Look) else (0,)

    def _arrive(self, barrier: Any, m: Memory, arrivals: int, loads: int) -> None:
        at = self.barrier[barrier]
        m[at] = arrived(m[at], self.counts[barrier], arrivals, loads)

    def _next(self, pid: int, op: Next, answer: WorkItem | None, m: Memory) -> None:
        if answer is not None:
            if m[self.left + answer.tile]:
                raise Fault("missing work", f"item {answer.tile} is not finished {NUMBERS} items later")
            m[self.left + answer.tile] = self.case.ring.consumers
            if self.case.ring.arriving:
                m[self.blocks + answer.tile] = (k_steps(answer), 0, 0, 0)
            m[self.number] = (answer.tile + 1) % NUMBERS

    def _put(self, pid: int, op: Put, answer: int, m: Memory) -> None:
        m[self.slot + op.slot] = op.item
        if self.case.ring.arriving and op.item is not None:
            blocks, passed, _, fenced = m[self.blocks + op.item.tile]
            # An item that came with no blocks is not known to be done: over before it began, it is void all the same.
            m[self.blocks + op.item.tile] = (blocks, passed, int(k_steps(op.item) < blocks), fenced)

    def _mark(self, pid: int, op: a.Mark, answer: int, m: Memory) -> None:
        m[self.mark + op.slot] = op.void

    def _pass(self, pid: int, op: a.Pass, answer: int, m: Memory) -> None:
        if not answer:
            blocks, _, void, fenced = m[self.blocks + op.item.tile]
            m[self.blocks + op.item.tile] = (blocks, op.k + 1, void, fenced)

    def _empty(self, pid: int, op: a.Empty, answer: int, m: Memory) -> None:
        blocks, passed, _, fenced = m[self.blocks + op.item.tile]
        m[self.blocks + op.item.tile] = (blocks, passed, 1, fenced)
        m[self.buffer[op.what, op.at]] = (op.item.tile, op.k, None, True)
        self._arrive(op.barrier, m, 1, 0)

    def _get(self, pid: int, op: Get, answer: WorkItem | None, m: Memory) -> None:
        if pid > self.case.ring.consumers:  # the convert loop: what it converts says which item it is at
            return
        number = m[self.consumer + 2 * (pid - 1) + 1][0]
        if answer is not None and answer.tile != number:
            raise Fault("wrong data", f"{self.processes[pid].name} reads item {answer.tile}, its own is {number}")

    def _copy(self, pid: int, op: a.Copy, answer: int, m: Memory) -> None:
        at = self.buffer[op.what, op.at]
        if m[at] and not m[at][-1]:
            raise Fault("overwritten while read", f"{op.what}[{op.at}] is filled while a copy to it is under way")
        self._not_read(op.what, op.at, m)
        if self.case.ring.arriving and op.what != "q":
            _, passed, _, fenced = m[self.blocks + op.item.tile]
            if op.k >= min(passed, fenced):
                behind = "waited for" if op.k >= passed else "fenced"
                raise Fault("read before arrival", f"block {op.k} of {op.what} is copied, and was not {behind}")
        m[at] = (op.item.tile, op.k, op.barrier, False)

    def _not_read(self, what: str, at: int, m: Memory) -> None:
        for c in range(self.case.ring.consumers):
            if any((what, at) in reads for reads in m[self.consumer + 2 * c]):
                raise Fault("overwritten while read", f"{what}[{at}] is filled while math {c} reads it")

    def _convert(self, pid: int, op: a.Convert, answer: int, m: Memory) -> None:
        held = m[self.buffer["raw", op.at]]
        if not held or not held[-1] or held[:2] != (op.item.tile, op.k):
            raise Fault("wrong data", f"raw[{op.at}] is converted, which does not hold block {op.k} of the item")
        self._not_read("v", op.at, m)
        m[self.buffer["v", op.at]] = (*held[:2], UNFENCED, True)

    def _fence(self, pid: int, op: Fence, answer: int, m: Memory) -> None:
        if self.processes[pid].name == "load":
            for number in range(NUMBERS):
                blocks, passed, void, _ = m[self.blocks + number]
                m[self.blocks + number] = (blocks, passed, void, passed)
            return
        for (what, _), place in self.buffer.items():
            if what == "v" and m[place] and m[place][2] == UNFENCED:
                m[place] = (*m[place][:2], None, True)

    def _start(self, pid: int, op: a.Start, answer: int, m: Memory) -> None:
        flight = self.consumer + 2 * (pid - 1)
        number, *started = m[flight + 1]
        reads: tuple[tuple[str, int], ...] = ((op.what, op.at),)
        if op.q >= 0:
            reads += (("q", op.q),)
        for what, at in reads:
            held = m[self.buffer[what, at]]
            if not held or not held[-1] or held[:2] != (op.item.tile, op.k if what != "q" else 0):
                raise Fault("wrong data", f"{self.processes[pid].name} reads {what}[{at}], which does not hold that")
            if held[2] == UNFENCED:
                raise Fault(
                    "read before arrival", f"{self.processes[pid].name} reads {what}[{at}], and may not see what was "
                    "converted"
                )  # fmt: skip
        which = "kv".index(op.what)
        if (op.item.tile, op.k) != (number, started[which]):
            raise Fault("wrong data", f"{self.processes[pid].name} is at block {started[which]} of item {number}")
        started[which] += 1
        m[flight] = (*m[flight], reads)
        m[flight + 1] = (number, *started)

    def _leave(self, pid: int, op: a.Leave, answer: int, m: Memory) -> None:
        at = self.consumer + 2 * (pid - 1) + 1
        if m[at] != (op.item.tile, op.k, op.k):
            raise Fault("wrong data", f"{self.processes[pid].name} leaves out block {op.k}, and is at {m[at]}")
        m[at] = (op.item.tile, op.k + 1, op.k + 1)

    def _retire(self, pid: int, op: Retire, answer: int, m: Memory) -> None:
        flight = self.consumer + 2 * (pid - 1)
        m[flight] = m[flight][len(m[flight]) - op.in_flight :] if op.in_flight else ()

    def _done(self, pid: int, op: a.Done, answer: int, m: Memory) -> None:
        flight = self.consumer + 2 * (pid - 1)
        number, *started = m[flight + 1]
        if op.item.tile != number or m[flight] or started != [k_steps(op.item)] * 2:
            raise Fault("wrong data", f"{self.processes[pid].name} ends item {op.item.tile} after {started} blocks")
        if self.case.ring.arriving and m[self.blocks + number][0] and op.void != m[self.blocks + number][2]:
            what = "a void item for a result" if not op.void else "a result for void"
            raise Fault("wrong data", f"{self.processes[pid].name} takes {what}: item {op.item.tile}")
        m[self.left + number] -= 1
        m[flight + 1] = ((number + 1) % NUMBERS, 0, 0)

    def _given(self, pid: int, op: Next, m: Memory) -> Sequence[Any]:
        counts = self.case.counts
        return *(item for item in self.items if item.tile == m[self.number] and k_steps(item) in counts), None

    asked: ClassVar[dict[type, Callable[..., Sequence[Any]]]] = {
        Next: _given,
        a.Own: lambda self, pid, op, m: self.domain(op, None),
        **dict.fromkeys((a.Ask, a.Pass), lambda self, pid, op, m: (0, 1)),
        a.Look: lambda self, pid, op, m: (m[self.mark + op.slot],),
        WaitBarrier: lambda self, pid, op, m: () if blocks(m[self.barrier[op.barrier]], op.parity) else (0,),
        Get: lambda self, pid, op, m: (m[self.slot + op.slot],),
    }
    performed: ClassVar[dict[type, Callable[..., None]]] = {
        Next: _next, Put: _put, Get: _get, a.Copy: _copy, a.Start: _start, a.Convert: _convert, Retire: _retire,
        a.Done: _done, a.Pass: _pass, a.Mark: _mark, a.Empty: _empty, Fence: _fence, a.Leave: _leave,
        Arrive: lambda self, pid, op, answer, m: self._arrive(op.barrier, m, 1, 0),
        Expect: lambda self, pid, op, answer, m: self._arrive(op.barrier, m, 1, 1),
    }  # fmt: skip

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """See `Model.environment`: copies land."""
        ops = [self.locals.op[m[pid]] for pid in range(1, len(self.processes))]
        waited = {op.barrier for op in ops if type(op) is WaitBarrier}
        out: list[tuple[str, Memory]] = []
        for (what, at), place in self.buffer.items():
            held = m[place]
            if held and not held[-1] and (not self.reduce or held[2] in waited):
                n = m.copy()
                self._arrive(held[2], n, 0, -1)
                n[place] = (*held[:2], None, True)
                out.append((f"the copy to {what}[{at}] lands", n))
        return out

    def at_end(self, m: Memory) -> None:
        """See `Model.at_end`."""
        if any(m[self.left : self.left + NUMBERS]):
            raise Fault("missing work", "an item was handed out and not finished")

    def describe_answer(self, op: Any, answer: Any) -> str:
        """See `Model.describe_answer`."""
        return f" -> {describe_item(answer)}" if isinstance(op, Next | Get) else ""
