"""The product of models 1 and 2: several workers, each with a load loop and a math loop, on one schedule and one gate.

It tests the argument that the two models compose (see the package) at sizes where that is feasible. The load loop asks
the real schedule and passes the real gate (`handed_on` is the first half of `work_through`), hands STOP on and then
leaves (`leave`) with its math loops still at work. A math loop ends each item as `store_and_count` or `fixup` does.
What is read is checked where a load starts; what is finished, at Compute or Poison, which here is the epilogue. The
math loops act on what the load loop was told at a gate: an item that is handed on void is poisoned, and no other.

Reductions: those of both models, whose operations do not touch each other's memory. Workers are not interchangeable:
each has rings of its own. Tiles are stored from registers: C buffers concern no other process.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tilestream.core.consumers import sharing
from tilestream.core.gate import Gate
from tilestream.core.loop import Compute, WorkerState, store_and_count
from tilestream.schedule import Schedule, WorkItem
from tilestream_tools.verify import operations as ops
from tilestream_tools.verify import protocol as p
from tilestream_tools.verify.barriers import STEPS, RingMemory
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.gpu_loop import Poison, fixup, leave, take_and_pass
from tilestream_tools.verify.model import Memory, State
from tilestream_tools.verify.processes import Process
from tilestream_tools.verify.ring import RingModel, describe, describe_item, landings
from tilestream_tools.verify.workers import WorkersCase, WorkersModel

#: ``(schedule, gate, worker)`` -> the source of a load loop.
Handing = Callable[[Schedule, "Gate | None", int], Callable[[Any], Generator[Any, Any, Any]]]


def handed_on(schedule: Schedule, gate: Gate | None, worker: int) -> Callable[[Any], Generator[Any, Any, Any]]:
    """The source of a worker's load loop: `work_through` up to where an item is handed on."""

    def source(state: WorkerState) -> Generator[Any, Any, tuple[WorkItem | None, WorkerState]]:
        item, arrived, after = yield from take_and_pass(schedule, gate, worker, state)
        if item is not None and gate is not None:
            yield p.Acquired()
            item = item if arrived else p.voided(item)
        return item, after

    return source


@dataclass(frozen=True)
class ProductCase:
    """One configuration: what the workers run, and the rings that each of them has (one consumer, or ping-pong)."""

    workers: WorkersCase
    ring: p.Ring
    handing: Handing = handed_on

    def build(self, reduce: bool = True, symmetry: bool = True) -> ProductModel:
        """The model of this configuration."""
        return ProductModel(self, reduce)

    def __str__(self) -> str:
        return f"{self.workers}; each {self.ring.consumers}, {self.ring.depth} stages, {self.ring.items} item slots"


class ProductModel(WorkersModel):
    """See the module. Processes: load and math of each worker in turn; memory: the workers', then the rings."""

    eager: ClassVar[frozenset[type]] = WorkersModel.eager | RingModel.eager
    delayed: frozenset[type] = frozenset({p.Retire})

    def __init__(self, case: ProductCase, reduce: bool = True) -> None:
        self.product = case
        self.case = case.workers
        self._groups = []
        ring = case.ring
        if sharing(ring.consumers) > 1:
            raise ValueError(
                f"ProductCase: consumers={ring.consumers!r}; the product is of consumers that do whole items"
            )
        if self.case.gate is not None and self.case.drain == "leave":
            raise ValueError("ProductCase: drain='leave'; load loops with a gate work their launch through")
        processes = []
        for w in self.case.workers:
            processes.append(Process(f"worker {w} load", self._load_of(w), p.LoadState(WorkerState()), f"load {w}"))
            for c in range(ring.num_consumers):
                name = "math" if ring.num_consumers == 1 else f"math {c}"
                processes.append(Process(f"worker {w} {name}", self._math_of(c), p.MathState(), name))
        self.loops = 1 + ring.num_consumers
        self.set_up(len(processes))
        self.rings: list[RingMemory] = []
        self.items: list[WorkItem] = []
        base = self.end
        for w in self.case.workers:
            self.rings.append(RingMemory(ring, base, f"worker {w}: ", self.items))
            base = self.rings[-1].end
        self.domain_items = list(self.case.schedule.items())
        super(WorkersModel, self).__init__(processes, reduce)

    def _load_of(self, worker: int) -> Callable[[p.LoadState], Generator[Any, Any, p.LoadState | None]]:
        schedule, gate = self.case.schedule, self.case.gate
        source = self.product.handing(schedule, gate, worker)

        def turn(state: p.LoadState) -> Generator[Any, Any, p.LoadState | None]:
            after = yield from p.load_turn(self.product.ring, source, state)
            if after is None and self.case.drain == "reset":
                yield from leave(schedule, gate)
            return after

        return turn

    def _math_of(self, consumer: int) -> Callable[[p.MathState], Generator[Any, Any, p.MathState | None]]:
        end = fixup if self.case.fixup else store_and_count

        def finish(ring: p.Ring, item: WorkItem) -> Generator[Any, Any, None]:
            done: Any = Compute(item) if p.k_steps(item) > 0 else Poison(p.voided(item))
            yield from end(done)

        return lambda state: p.math_turn(self.product.ring, finish, consumer, state)

    def memory(self) -> Memory:
        """See `Model.memory`."""
        m = super().memory()
        for rings in self.rings:
            m += rings.memory()
        return m

    def canonical(self, state: State) -> State:
        """See `Model.canonical`."""
        return state

    def domain(self, op: Any, past: Hashable) -> Sequence[Any]:
        """See `Model.domain`."""
        if type(op) is p.Get:
            return (None, *self.domain_items, *map(p.voided, self.domain_items))
        return super().domain(op, past)

    def watches(self, pid: int) -> bool:
        """As `Words.watches`: load loops do."""
        return pid % self.loops == 0

    def answers_of(self, op: Any) -> Callable[[int, Any, Memory], Sequence[Any]] | None:
        """See `Model.answers_of`."""
        each = [answers for rings in self.rings if (answers := rings.answers_of(op)) is not None]
        if each:
            return lambda pid, op, m: each[pid // self.loops](pid, op, m)
        return super().answers_of(op)

    def performer_of(self, op: Any) -> Callable[[int, Any, Any, Memory], None] | None:
        """See `Model.performer_of`."""
        # Compute and Poison are the epilogue, as far as the rings know.
        known = op
        if type(op) is Compute or type(op) is Poison:
            known = p.Epilogue(op.item if type(op) is Compute else p.voided(op.item))
        consumers = range(self.product.ring.num_consumers)
        each = [own for r in self.rings for c in consumers if (own := r.performer_of(known, c)) is not None]
        if not each:
            meant = super().performer_of(op)
            return self._looking(meant) if type(op) in ops.WAITS and meant is not None else meant
        specials: dict[type, Callable[[int, Any, Any, Memory], None]]
        specials = {
            p.Load: self._load, p.Put: self._put, p.Get: self._get, Compute: self._epilogue, Poison: self._poison
        }  # fmt: skip
        special = specials.get(type(op))

        def perform(pid: int, op: Any, answer: Any, m: Memory) -> None:
            worker, loop = divmod(pid, self.loops)
            each[worker * len(consumers) + max(0, loop - 1)](pid, known, answer, m)
            if special is not None:
                special(pid, op, answer, m)

        return perform

    def _looking(self, meant: Callable[[int, Any, Any, Memory], None]) -> Callable[[int, Any, Any, Memory], None]:
        def look(pid: int, op: Any, answer: int, m: Memory) -> None:
            meant(pid, op, answer, m)
            if answer:
                self.rings[pid // self.loops].see(m)

        return look

    def _put(self, pid: int, op: p.Put, answer: int, m: Memory) -> None:
        told_by, steps = self.locals.past[m[pid]], p.k_steps(op.item)
        if steps > 0 and told_by is not None:
            raise Fault("gate ignored", f"{self.processes[pid].name} hands an item on after a {told_by} has said no")
        if steps < 0 and told_by is None:
            raise Fault("poisoned in vain", f"{self.processes[pid].name} hands a void item on, and was not told to")

    def _load(self, pid: int, op: p.Load, answer: int, m: Memory) -> None:
        missing = self.oracle.needs(op.item) & ~m[self.arrived]
        if missing:
            raise Fault(
                "read before arrival",
                f"{self.processes[pid].name} loads of tile {op.item.tile} before {self.oracle.names(missing)}",
            )

    def _get(self, pid: int, op: p.Get, answer: WorkItem | None, m: Memory) -> None:
        if answer is not None:  # what the consumer must read next, if the item is for it
            worker, loop = divmod(pid, self.loops)
            m[self.rings[worker].of_consumer[loop - 1]] = 1 + answer.tile * STEPS + min(answer.k_begin, answer.k_end)

    def _epilogue(self, pid: int, op: Compute, answer: int, m: Memory) -> None:
        # Arrived, and not too late: both were decided where the item was handed on, before the expiry perhaps.
        late, m[self.late] = m[self.late], 0
        aborted, m[self.aborted] = m[self.aborted], 0
        self._compute(pid, op, answer, m)
        m[self.late], m[self.aborted] = late, aborted

    def _poison(self, pid: int, op: Poison, answer: int, m: Memory) -> None:
        self._hand_in(pid, op, m, nan=True)  # that the item is void the rings have checked

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """See `Model.environment`."""
        return super().environment(m) + self._landings(m)

    def _landings(self, m: Memory) -> list[tuple[str, Memory]]:
        out = []
        for i, rings in enumerate(self.rings):
            out += landings(self, rings, m, range(self.loops * i + 1, self.loops * (i + 1)), rings.who)
        return out

    def at_rest(self, m: Memory) -> None:
        """See `Model.at_rest`."""
        if not self._landings(m):
            super().at_rest(m)

    def at_end(self, m: Memory) -> None:
        """All have left."""
        super().at_end(m)
        for rings in self.rings:
            rings.at_end(m)

    def describe(self, op: Any) -> str:
        """As `Words.describe`."""
        return describe(op) if type(op).__module__ == p.__name__ else super().describe(op)

    def describe_answer(self, op: Any, answer: Any) -> str:
        """See `Model.describe_answer`."""
        if type(op).__module__ != p.__name__:
            return super().describe_answer(op, answer)
        return f" -> {describe_item(answer)}" if isinstance(op, p.Get) else ""
