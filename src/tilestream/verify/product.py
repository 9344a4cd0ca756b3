"""The product of both models: several workers, each with a load loop and a math loop, on one schedule and one gate.

It is there to doubt the argument that the two models compose (see the package), on sizes where it fits: the load loop
asks the real schedule and passes the real gate (`handed_on` is `tilestream.kernels.loop.work` up to Compute), and the
math loop ends each item as `work` does from Compute on. What is read is checked where a load starts; what is finished,
where the epilogue comes.

Reductions: those of both models, whose operations do not touch each other's memory. Workers are not taken as
interchangeable: each has rings of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tilestream.arrival.gate import Gate, Wait, pass_gate
from tilestream.kernels.loop import Compute, Count, Poll, Reduce, WorkerState
from tilestream.schedule import Schedule, WorkItem, take
from tilestream.verify.barriers import STEPS, RingMemory
from tilestream.verify.faults import Fault
from tilestream.verify.model import Memory, State
from tilestream.verify.processes import Process
from tilestream.verify.protocol import (
    Epilogue,
    Expect,
    Get,
    Load,
    LoadState,
    MathState,
    Mma,
    Retire,
    Ring,
    load_turn,
    math_turn,
)  # fmt: skip
from tilestream.verify.ring import landings, say, say_item
from tilestream.verify.workers import WorkersCase, WorkersModel

#: ``(schedule, gate, worker)`` -> the source of a load loop.
Handing = Callable[[Schedule, "Gate | None", int], Callable[[Any], Generator[Any, Any, Any]]]


def handed_on(schedule: Schedule, gate: Gate | None, worker: int) -> Callable[[Any], Generator[Any, Any, Any]]:
    """The source of a worker's load loop: `work` up to where an item is handed on."""

    def source(state: WorkerState) -> Generator[Any, Any, tuple[WorkItem | None, WorkerState]]:
        if (yield Poll()):
            return None, state
        item, cursor = yield from take(schedule, worker, state.cursor)
        seen = state.seen
        if item is not None and gate is not None:
            arrived, seen = yield from pass_gate(gate, item, seen)
            if not arrived:
                item = None
        return item, WorkerState(cursor, seen)

    return source


def finished(item: WorkItem) -> Generator[Any, Any, None]:
    """What ends an item: `work` from Compute on."""
    yield Epilogue(item)
    if item.parts > 1 and (yield Count(item)) == item.parts - 1:
        yield Reduce(item)


@dataclass(frozen=True)
class ProductCase:
    """One configuration: what the workers run, and the rings that each of them has (one consumer)."""

    workers: WorkersCase
    ring: Ring
    handing: Handing = handed_on

    def build(self, reduce: bool = True, symmetry: bool = True) -> ProductModel:
        """The model of this configuration."""
        return ProductModel(self, reduce)

    def __str__(self) -> str:
        return f"{self.workers}; each {self.ring.depth} stages, {self.ring.items} item slots"


class ProductModel(WorkersModel):
    """See the module. Processes: load and math of each worker in turn; memory: the workers', then the rings."""

    eager: ClassVar[frozenset[type]] = frozenset({Expect, Load, Mma, Epilogue, Reduce})
    delayed: frozenset[type] = frozenset({Poll, Wait, Retire})

    def __init__(self, case: ProductCase, reduce: bool = True) -> None:
        self.product = case
        self.case = case.workers
        self._groups = []
        ring = case.ring
        if ring.consumers != "single":
            raise ValueError(f"ProductCase: consumers={ring.consumers!r}; the product is of rings with one consumer")
        processes = []
        for w in self.case.workers:
            processes.append(Process(f"worker {w} load", self._load_of(w), LoadState(WorkerState()), f"load {w}"))
            processes.append(Process(f"worker {w} math", self._math_of(), MathState(), "math"))
        self.set_up(len(processes))
        self.rings: list[RingMemory] = []
        self.items: list[WorkItem] = []
        base = self.end
        for w in self.case.workers:
            self.rings.append(RingMemory(ring, base, f"worker {w}: ", self.items))
            base = self.rings[-1].end
        self.domain_items = list(self.case.schedule.items())
        super(WorkersModel, self).__init__(processes, reduce)

    def _load_of(self, worker: int) -> Callable[[LoadState], Generator[Any, Any, LoadState | None]]:
        source = self.product.handing(self.case.schedule, self.case.gate, worker)
        return lambda state: load_turn(self.product.ring, source, state)

    def _math_of(self) -> Callable[[MathState], Generator[Any, Any, MathState | None]]:
        return lambda state: math_turn(self.product.ring, finished, 0, state)

    def memory(self) -> Memory:
        """As `Model.memory`."""
        m = super().memory()
        for rings in self.rings:
            m += rings.memory()
        return m

    def canonical(self, state: State) -> State:
        """As `Model.canonical`."""
        return state

    def domain(self, op: Any, past: Hashable) -> Sequence[Any]:
        """As `Model.domain`."""
        return (None, *self.domain_items) if type(op) is Get else super().domain(op, past)

    def answers_of(self, op: Any) -> Callable[[int, Any, Memory], Sequence[Any]] | None:
        """As `Model.answers_of`."""
        each = [answers for rings in self.rings if (answers := rings.answers_of(op)) is not None]
        if each:
            return lambda pid, op, m: each[pid // 2](pid, op, m)
        return super().answers_of(op)

    def performer_of(self, op: Any) -> Callable[[int, Any, Any, Memory], None] | None:
        """As `Model.performer_of`."""
        each = [own for rings in self.rings if (own := rings.performer_of(op, 0)) is not None]
        if not each:
            return super().performer_of(op)
        specials: dict[type, Callable[[int, Any, Any, Memory], None]]
        specials = {Load: self._load, Get: self._get, Epilogue: self._epilogue}
        special = specials.get(type(op))

        def perform(pid: int, op: Any, answer: Any, m: Memory) -> None:
            each[pid // 2](pid, op, answer, m)
            if special is not None:
                special(pid, op, answer, m)

        return perform

    def _load(self, pid: int, op: Load, answer: int, m: Memory) -> None:
        missing = self.oracle.needs(op.item) & ~m[self.arrived]
        if missing:
            raise Fault(
                "read before arrival",
                f"{self.processes[pid].name} loads of tile {op.item.tile} before {self.oracle.names(missing)}",
            )

    def _get(self, pid: int, op: Get, answer: WorkItem | None, m: Memory) -> None:
        if answer is not None:  # what the consumer must read next
            m[self.rings[pid // 2].consumer] = 1 + answer.tile * STEPS + answer.k_begin

    def _epilogue(self, pid: int, op: Epilogue, answer: int, m: Memory) -> None:
        # Arrived, and not too late: both were decided where the item was handed on, before the expiry perhaps.
        late, m[self.late] = m[self.late], 0
        aborted, m[self.aborted] = m[self.aborted], 0
        self._compute(pid, Compute(op.item), answer, m)
        m[self.late], m[self.aborted] = late, aborted

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """As `Model.environment`."""
        out = super().environment(m)
        for i, rings in enumerate(self.rings):
            out += landings(self, rings, m, (2 * i + 1,), rings.who)
        return out

    def at_rest(self, m: Memory) -> None:
        """As `Model.at_rest`."""
        if not any(m[rings.loading] for rings in self.rings) or not any(
            landings(self, rings, m, (2 * i + 1,), "") for i, rings in enumerate(self.rings)
        ):
            super().at_rest(m)

    def at_end(self, m: Memory) -> None:
        """All have left."""
        super().at_end(m)
        for rings in self.rings:
            rings.at_end(m)

    def tell(self, pid: int, op: Any, answer: Any) -> str:
        """As `Model.tell`."""
        if isinstance(op, Poll | Wait | Count | Reduce) or hasattr(op, "queue"):
            return super().tell(pid, op, answer)
        return f"{self.processes[pid].name}: {say(op)}" + (f" -> {say_item(answer)}" if isinstance(op, Get) else "")

    def say(self, op: Any) -> str:
        """As `Words.say`."""
        return super().say(op) if isinstance(op, Poll | Wait | Count | Reduce) or hasattr(op, "queue") else say(op)
