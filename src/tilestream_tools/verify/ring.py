"""Model 2: the load loop and the math loops of one worker, over item ring and stage ring.

The stream of items is endless: any sequence of K counts, and STOP after any of them. So the run length of the loops is
unbounded. Item numbers count modulo `NUMBERS`, which exceeds the items in flight. At any item the gate may find the
launch over (`RingCase.expires`). Then this item and all later ones are void.

Properties: no loop is ever stuck. Each consumer multiplies each K step of each of its items once, in order, from a
stage with exactly this step. No load goes to a stage that is being read or loaded, and none is between a gate and the
fence after it. The epilogue has the whole item, or NaN if and only if the item is void. It stores each strip of a tile
once, from a C buffer with exactly this strip, which no store read when it was filled. After STOP all loops leave, no
store reads any more, and both rings are as at the start. Each circle of states takes a new item, so an item is finished
in a bounded number of steps.

Reductions, and why they hide no fault:

- *Next*, *Pass* and *Acquired* do not touch the rings, and are delayed until the load loop can hand the item on.
- *Retire* is delayed to the operation after it: a longer read of a stage shows more overwrites.
- *Expect*, *Load*, *Mma*, *Poisoned* and *Epilogue* are eager. Expect alone completes no phase. A load or an mma uses
  its stage from its start on, so doing it at once shows all overlaps. If the order of a load and an mma on one stage
  could matter, both orders are faults.
- *Fixup*, *Drain*, *Fill*, *Fence* and *Store* are eager: a consumer has its own C buffers, and no other process sees
  the answer to `Fixup`. (If two consumers share a buffer by mistake, each leaves it with a store in flight. In both
  orders the second fills it too early.)
- *Landing* is lazy: a load lands only when a process may wait for it. The other events that could precede it, a second
  load into the stage or an mma on it, are faults.
- *Symmetry*: consumers that share tiles are interchangeable.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tilestream.core.consumers import sharing
from tilestream.schedule import WorkItem
from tilestream_tools.verify import protocol as p
from tilestream_tools.verify.barriers import STEPS, VOID, RingMemory
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory, Model, State
from tilestream_tools.verify.processes import Process

#: Item numbers in use: one in the load loop, two in the item ring, and one in a consumer.
NUMBERS = 4

#: A consumer's operations on its own accumulator and C buffers.
OWN: frozenset[type] = frozenset({p.Mma, p.Retire, p.Poisoned, p.Fixup, p.Drain, p.Fill, p.Fence, p.Store})

LoadTurn = Callable[[p.Ring, p.Source, p.LoadState], Generator[Any, Any, "p.LoadState | None"]]
MathTurn = Callable[..., Generator[Any, Any, "p.MathState | None"]]


@dataclass(frozen=True)
class RingCase:
    """One configuration of model 2: the rings, the K counts an item may have, and the programs of the loops.

    ``split``: an item may also be a part of a tile, the last one or another. ``expires``: the launch may be over from
    any item on. ``ends_clean``: at the end both rings must be as at the start. (A kernel that exits does not need this;
    a kernel that uses the same rings for another problem does.)
    """

    ring: p.Ring
    k_counts: tuple[int, ...] = (1, 2)
    load: LoadTurn = p.load_turn
    math: MathTurn = p.math_turn
    source: p.Source = p.gated
    finish: p.Finish = p.epilogue
    ends_clean: bool = True
    split: bool = False
    expires: bool = False

    def build(self, reduce: bool = True, symmetry: bool = True) -> RingModel:
        """The model of this configuration."""
        return RingModel(self, reduce, symmetry)

    def __str__(self) -> str:
        ring = self.ring
        words = [
            f"{ring.consumers}, {ring.depth} stages, {ring.items} item slots",
            f"{' or '.join(map(str, self.k_counts))} K steps an item",
        ]
        if ring.promoted:
            words.append("promoted")
        if ring.strips:
            words.append(f"{ring.strips} strips through {ring.buffers} C buffers")
        if self.split:
            words.append("tiles and parts")
        if self.expires:
            words.append("over from any item on")
        words += [
            f.__name__
            for f, ours in (
                (self.load, p.load_turn),
                (self.math, p.math_turn),
                (self.source, p.gated),
                (self.finish, p.epilogue),
            )
            if f is not ours
        ]
        return ", ".join(words)


class RingModel(Model):
    """See the module.

    Memory: `RingMemory`, whether the launch is over, the next item's number; for each number: its K steps, and the
    number of consumers that have yet to finish it.
    """

    eager: ClassVar[frozenset[type]] = frozenset({p.Expect, p.Load, p.Epilogue, *OWN}) - {p.Retire}
    delayed: frozenset[type] = frozenset({p.Retire})
    lazy: ClassVar[frozenset[type]] = frozenset({p.Next, p.Pass, p.Acquired})
    progress: ClassVar[frozenset[type]] = frozenset({p.Next})

    def __init__(self, case: RingCase, reduce: bool = True, symmetry: bool = True) -> None:
        self.case = case
        ring = case.ring
        alike = sharing(ring.consumers) > 1 and symmetry

        def math_of(consumer: int) -> Callable[[p.MathState], Generator[Any, Any, p.MathState | None]]:
            return lambda state: case.math(ring, case.finish, consumer, state)

        processes = [Process("load", lambda state: case.load(ring, case.source, state), p.LoadState(), "load")]
        for c in range(ring.num_consumers):
            name = "math" if ring.num_consumers == 1 else f"math {c}"
            processes.append(Process(name, math_of(c), p.MathState(), "math" if alike else f"math {c}"))
        self.alike = alike
        parts = (1, 2) if case.split else (1,)
        self.all_items = [
            WorkItem(n, 0, 0, 0, 0, k, 0, part) for n in range(NUMBERS) for k in case.k_counts for part in parts
        ]
        self.handed_on = [*self.all_items, *(map(p.voided, self.all_items) if case.expires else ())]
        self.rings = RingMemory(ring, len(processes), "", self.handed_on)
        self.over = self.rings.end
        self.number = self.over + 1
        self.left = self.number + 1
        super().__init__(processes, reduce, symmetry)

    def memory(self) -> Memory:
        """See `Model.memory`."""
        return [*self.rings.memory(), 0, 0, *[0] * NUMBERS]

    def canonical(self, state: State) -> State:
        """See `Model.canonical`."""
        if not self.alike:
            return state
        begin, end, width = self.rings.consumer, self.rings.end, self.rings.private
        own = [(state[c], state[at : at + width]) for c, at in enumerate(self.rings.of_consumer, 1)]
        ordered = sorted(own)
        if ordered == own:
            return state
        memory = itertools.chain.from_iterable(private for _, private in ordered)
        return (state[0], *(at for at, _ in ordered), *state[1 + len(own) : begin], *memory, *state[end:])

    def domain(self, op: Any, past: Hashable) -> Sequence[Any]:
        """See `Model.domain`."""
        if type(op) is p.Next or type(op) is p.Get:
            return (None, *(self.all_items if type(op) is p.Next else self.handed_on))
        return (0, 1) if type(op) is p.Pass or type(op) is p.Fixup else (0,)

    def answers_of(self, op: Any) -> Callable[[int, Any, Memory], Sequence[Any]] | None:
        """See `Model.answers_of`."""
        if type(op) is p.Next:
            return lambda pid, op, m: (*(item for item in self.all_items if item.tile == m[self.number]), None)
        if type(op) is p.Pass:
            answers = ((1, 0) if self.case.expires else (1,), (0,))
            return lambda pid, op, m: answers[m[self.over]]
        if type(op) is p.Fixup:
            return lambda pid, op, m: (1, 0)
        return self.rings.answers_of(op)

    def performer_of(self, op: Any) -> Callable[[int, Any, Any, Memory], None] | None:
        """See `Model.performer_of`."""
        kind = type(op)
        if kind is p.Next:
            return self._next
        if kind is p.Pass:
            return self._pass
        if kind is p.Epilogue:
            return self._epilogue
        if kind in OWN:
            consumers = range(self.case.ring.num_consumers)
            each = [perform for c in consumers if (perform := self.rings.performer_of(op, c)) is not None]
            return lambda pid, op, answer, m: each[pid - 1](pid, op, answer, m)
        return self.rings.performer_of(op, 0)

    def _next(self, pid: int, op: p.Next, answer: WorkItem | None, m: Memory) -> None:
        if answer is not None:
            if m[self.left + answer.tile]:
                raise Fault("missing work", f"item {answer.tile} is not finished {NUMBERS} items later")
            readers = sharing(self.case.ring.consumers)
            m[self.left + answer.tile] = (VOID if m[self.over] else answer.k_end) * 4 + readers
            m[self.number] = (answer.tile + 1) % NUMBERS

    def _pass(self, pid: int, op: p.Pass, answer: int, m: Memory) -> None:
        if answer:
            self.rings.see(m)
        elif not m[self.over]:
            m[self.over] = 1
            m[self.left + op.item.tile] += (VOID - op.item.k_end) * 4

    def _epilogue(self, pid: int, op: p.Epilogue, answer: int, m: Memory) -> None:
        private = self.rings.of_consumer[pid - 1]
        number, k = divmod(m[private] - 1, STEPS)
        steps, readers = divmod(m[self.left + number], 4)
        if op.item.tile != number:
            raise Fault("wrong data", f"{self.processes[pid].name} has item {op.item.tile}, its next is {number}")
        if not readers:
            raise Fault("double work", f"{self.processes[pid].name} does item {number}, which is finished")
        if k != steps and VOID in (k, steps):
            has = "NaN, and the launch is not over" if k == VOID else "a product, though its gate said that it is over"
            raise Fault("gate ignored", f"{self.processes[pid].name} ends item {number} with {has}")
        if k != steps:
            raise Fault("wrong data", f"{self.processes[pid].name} ends item {number} after {k} of {steps} K steps")
        if m[private + 1]:
            raise Fault("wrong data", f"{self.processes[pid].name} takes the accumulator while an mma writes it")
        m[self.left + number] = 0 if readers == 1 else m[self.left + number] - 1
        stride = 2 if self.case.ring.consumers == "ping_pong" else 1
        m[private] = 1 + (number + stride) % NUMBERS * STEPS
        self.rings.finish(op.item, pid - 1, m)

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """See `Model.environment`."""
        return landings(self, self.rings, m, range(1, len(self.processes)), "")

    def at_end(self, m: Memory) -> None:
        """See `Model.at_end`."""
        for number in range(NUMBERS):
            if m[self.left + number]:
                raise Fault("missing work", f"item {number} was handed out and not finished")
        self.rings.buffers.at_end(m)
        if self.case.ends_clean:
            self.rings.at_end(m)

    def describe(self, op: Any) -> str:
        """See `Model.describe`."""
        return describe(op)

    def describe_answer(self, op: Any, answer: Any) -> str:
        """See `Model.describe_answer`."""
        if isinstance(op, p.Next | p.Get):
            return f" -> {describe_item(answer)}"
        if isinstance(op, p.Pass):
            return " -> arrived" if answer else " -> the launch is over"
        if isinstance(op, p.Fixup):
            return " -> the last part" if answer else " -> others are to come"
        return ""


def landings(model: Model, rings: RingMemory, m: Memory, math: Sequence[int], who: str) -> list[tuple[str, Memory]]:
    """The loads that may land now: with reductions, those that a math loop may be waiting for."""
    out: list[tuple[str, Memory]] = []
    if not m[rings.loading]:
        return out
    ops = [model.locals.op[m[pid]] for pid in math]
    waited = {op.barrier.at for op in ops if type(op) is p.WaitBarrier and op.barrier.name == "full"}
    for stage in range(rings.ring.depth):
        if m[rings.loading] >> stage & 1 and (not model.reduce or stage in waited):
            n = m.copy()
            line = f"{who}the load into stage {stage} lands"
            try:
                rings.land(stage, n)
            except Fault as fault:
                fault.step = [line]
                raise
            out.append((line, n))
    return out


def describe_item(item: WorkItem | None) -> str:
    """An item in a trace."""
    if item is None:
        return "STOP"
    return f"item {item.tile}, void" if item.k_end < item.k_begin else f"item {item.tile} of {p.k_steps(item)} K steps"


def describe(op: Any) -> str:
    """An operation of `protocol` in a trace."""
    if isinstance(op, p.WaitBarrier):
        return f"wait({op.barrier}, phase {op.parity})"
    if isinstance(op, p.Put):
        return f"put(slot {op.slot}, {describe_item(op.item)})"
    if isinstance(op, p.Load):
        return f"load(stage {op.stage}, K step {op.k} of item {op.item.tile})"
    if isinstance(op, p.Retire):
        return f"retire(all but {op.in_flight})"
    if isinstance(op, p.Drain):
        return f"drain(all but {op.in_flight} stores)"
    words = [
        f"item {v.tile}" if isinstance(v, WorkItem) else f"{k} {v}" if isinstance(v, int) else str(v)
        for k, v in op._asdict().items()
    ]
    return f"{type(op).__name__.lower()}({', '.join(words)})"
