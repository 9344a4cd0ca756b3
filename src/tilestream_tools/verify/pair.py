"""Model 15: two CTAs of a cluster that load for each other: load loops and math loops of both, over a ring each.

The text of each is `tilestream_tools.verify.protocol`'s, with ``Ring.ctas`` 2. A `Load` brings the CTA's own part of
a stage, and a half of what both need to both CTAs. So a stage of a CTA is filled by two loads, which land in any order;
one may land before its own load loop expects it. A consumer's `Arrive` at ``empty`` counts at that barrier of both
CTAs: both load loops wait for it. All loops of both CTAs meet before they begin and before they leave:
`tilestream.kernels.hopper.pair`.

Properties: no loop is ever stuck. A multiplication reads a stage that has both halves of the intended K step. No load
goes to a stage, of either CTA, that is being read or filled. Nothing is done to a CTA that may not have made its
barriers yet, or whose loops have all left.

Both CTAs are given the same items, as a static schedule gives them. Reductions are those of model 2
(`tilestream_tools.verify.ring`), whose reasons hold for a stage of either CTA, and one more: *the CTAs are
interchangeable*, and so are the consumers of one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tilestream.schedule import WorkItem
from tilestream_tools.verify import protocol as p
from tilestream_tools.verify.barriers import STEPS, blocks, fresh
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory, Model, State
from tilestream_tools.verify.processes import LEFT, Process

CTAS = (0, 1)


class Come(NamedTuple):
    """``barrier.cluster.arrive``. Answer: the round of the cluster's barrier."""


class Await(NamedTuple):
    """``barrier.cluster.wait``: until all loops of both CTAs have come in this round."""

    round: int


#: What a loop carries: whether it has begun, whether it is to leave, and its own state.
Carried = tuple[bool, bool, Any]
Turn = Generator[Any, Any, "Carried | None"]


def meet() -> Generator[Any, Any, None]:
    """Wait for all loops of both CTAs."""
    now = yield Come()
    yield Await(now)


def paired(turn: Callable[[Any], Generator[Any, Any, Any]], carried: Carried) -> Turn:
    """A loop that meets the others before its first turn and behind its last."""
    begun, leaves, state = carried
    if not begun:
        yield from meet()
        return True, False, state
    if leaves:
        yield from meet()
        return None
    after = yield from turn(state)
    return (True, True, state) if after is None else (True, False, after)


@dataclass(frozen=True)
class PairCase:
    """A configuration: the rings, the K steps of the items, and how a loop meets the others."""

    ring: p.Ring
    items: tuple[int, ...] = (2, 1)
    load: Callable[..., Generator[Any, Any, Any]] = p.load_turn
    math: Callable[..., Generator[Any, Any, Any]] = p.math_turn
    around: Callable[..., Turn] = paired

    def build(self, reduce: bool = True, symmetry: bool = True) -> PairModel:
        """The model of this configuration."""
        return PairModel(self, reduce, symmetry)

    def __str__(self) -> str:
        ring = self.ring
        own = [
            f.__name__
            for f, ours in ((self.load, p.load_turn), (self.math, p.math_turn), (self.around, paired))
            if f is not ours
        ]
        what = (
            f"two CTAs, {ring.consumers}, {ring.depth} stages, {ring.items} item slots; items of {self.items} K steps"
        )
        return ", ".join([what, *own])


def configurations(full: bool) -> Iterator[PairCase]:
    """Pairs of one consumer: no item, and items of more K steps than stages. Full: two consumers, more items."""

    def case(depth: int, items: tuple[int, ...], consumers: p.Consumers = "single") -> PairCase:
        return PairCase(p.Ring(depth, 2, consumers, promoted=depth == 1, ctas=2), items)

    for depth, items in ((2, ()), (2, (1,)), (1, (2, 1)), (2, (3, 1)), (2, (2, 1))):
        yield case(depth, items)
    if full:
        yield case(3, (2, 1, 1))
        yield case(1, (1,), "cooperative")
        yield case(2, (2, 1), "cooperative")


def ends(ring: p.Ring, item: WorkItem) -> Generator[Any, Any, None]:
    """The finish: no other loop sees a CTA's epilogue."""
    yield p.Epilogue(item)


class PairModel(Model):
    """See the module.

    Memory: how many loops have come to the cluster's barrier, and its round; by CTA: whether one of its loops has ever
    come, its barriers, for each stage the halves that it holds (below 0: on their way), its slots, and for each
    consumer what it reads next and the stages that its multiplications read.
    """

    eager: ClassVar[frozenset[type]] = frozenset({p.Expect, p.Load, p.Mma, p.Epilogue})
    delayed: frozenset[type] = frozenset({p.Retire})

    def __init__(self, case: PairCase, reduce: bool = True, symmetry: bool = True) -> None:
        self.case, ring = case, case.ring
        self.items = [WorkItem(n, 0, 0, 0, 0, steps) for n, steps in enumerate(case.items)]
        self.counts = ring.barriers()
        self.places = {barrier: 1 + i for i, barrier in enumerate(self.counts)}
        self.stage = 1 + len(self.counts)
        self.slot = self.stage + ring.depth
        self.reads = self.slot + ring.items
        self.size = self.reads + 2 * ring.num_consumers
        self.loops = 1 + ring.num_consumers

        def source(number: int | None) -> Generator[Any, Any, tuple[WorkItem | None, int]]:
            yield from ()
            at = number or 0
            return (self.items[at] if at < len(self.items) else None), at + 1

        def load(carried: Carried) -> Turn:
            return case.around(lambda state: case.load(ring, source, state), carried)

        def math_of(consumer: int) -> Callable[[Carried], Turn]:
            return lambda carried: case.around(lambda state: case.math(ring, ends, consumer, state), carried)

        processes = []
        for cta in CTAS:
            processes.append(Process(f"load of CTA {cta}", load, (False, False, p.LoadState()), "load"))
            for consumer in range(ring.num_consumers):
                name = f"math {consumer} of CTA {cta}"
                processes.append(Process(name, math_of(consumer), (False, False, p.MathState()), "math"))
        self.come, self.round = len(processes), len(processes) + 1
        self.base = [self.round + 1 + cta * self.size for cta in CTAS]
        super().__init__(processes, reduce, symmetry)

    def memory(self) -> Memory:
        """As `Model.memory`."""
        ring = self.case.ring
        consumers = [entry for _ in range(ring.num_consumers) for entry in (0, ())]
        each = [0, *(fresh(n) for n in self.counts.values()), *[(None, None)] * ring.depth, *[None] * ring.items]
        return [0, 0, *(each + consumers) * len(CTAS)]

    def canonical(self, state: State) -> State:
        """As `Model.canonical`."""
        if not self.symmetry:
            return state
        swapped = []
        for cta in CTAS:
            local, shared = (
                state[cta * self.loops : (cta + 1) * self.loops],
                state[self.base[cta] : self.base[cta] + self.size],
            )
            # Of a stage the CTA's own half is first.
            stages = tuple(halves[::-1] if cta else halves for halves in shared[self.stage : self.slot])
            loops = [
                (local[1 + c], *shared[self.reads + 2 * c : self.reads + 2 * c + 2]) for c in range(self.loops - 1)
            ]
            swapped.append((local[0], shared[: self.stage], stages, shared[self.slot : self.reads], sorted(loops)))
        swapped.sort(key=repr)
        locals_: list[Any] = []
        memory: list[Any] = []
        for cta, (load, barriers, stages, slots, loops) in enumerate(swapped):
            locals_ += [load, *(local for local, *_ in loops)]
            memory += [*barriers, *(halves[::-1] if cta else halves for halves in stages), *slots]
            memory += [entry for _, *reads in loops for entry in reads]
        return (*locals_, *state[self.come : self.round + 1], *memory)

    def domain(self, op: Any, past: Any) -> Sequence[Any]:
        """As `Model.domain`."""
        if type(op) is p.Get:
            return (None, *self.items)
        return (0, 1) if type(op) is Come else (0,)

    def _cta(self, pid: int) -> int:
        return pid // self.loops

    def _consumer(self, pid: int) -> int:
        """Where what this math loop reads next is."""
        return self.base[self._cta(pid)] + self.reads + 2 * (pid % self.loops - 1)

    def _reached(self, cta: int, what: str, m: Memory) -> None:
        """Raise `Fault` unless the CTA has made its barriers and has not left."""
        if not m[self.base[cta]]:
            raise Fault("barrier broken", f"{what} CTA {cta}, which may not have made its barriers yet")
        if all(m[pid] == LEFT for pid in range(cta * self.loops, (cta + 1) * self.loops)):
            raise Fault("left too early", f"{what} CTA {cta}, whose loops have left")

    def _count(self, cta: int, barrier: p.Barrier, m: Memory, arrivals: int, loads: int) -> None:
        at = self.base[cta] + self.places[barrier]
        pending, left = (m[at] >> 1 & 15) - arrivals, (m[at] >> 5) + loads
        if pending < 0 or (pending == 0 and left < 0):
            raise Fault("barrier broken", f"{barrier} of CTA {cta} has more arrivals or bytes than its phase counts")
        ended = pending == left == 0
        m[at] = fresh(self.counts[barrier]) | (m[at] & 1 ^ 1) if ended else m[at] & 1 | pending << 1 | left << 5

    def _come(self, pid: int, op: Come, answer: int, m: Memory) -> None:
        m[self.base[self._cta(pid)]] = 1
        m[self.come] += 1
        if m[self.come] == len(self.processes):
            m[self.come], m[self.round] = 0, 1 - m[self.round]

    def _arrive(self, pid: int, op: p.Arrive, answer: int, m: Memory) -> None:
        for cta in CTAS if op.barrier.name == "empty" else (self._cta(pid),):
            self._reached(cta, f"{self.processes[pid].name} arrives at", m)
            self._count(cta, op.barrier, m, 1, 0)

    def _expect(self, pid: int, op: p.Expect, answer: int, m: Memory) -> None:
        self._count(self._cta(pid), op.barrier, m, 1, len(CTAS))

    def _load(self, pid: int, op: p.Load, answer: int, m: Memory) -> None:
        half = self._cta(pid)
        for cta in CTAS:
            self._reached(cta, f"{self.processes[pid].name} loads into", m)
            base = self.base[cta]
            where = f"{self.processes[pid].name} loads into stage {op.stage} of CTA {cta}"
            for consumer in range(self.case.ring.num_consumers):
                if op.stage in m[base + self.reads + 2 * consumer + 1]:
                    raise Fault("overwritten while read", f"{where} while an mma reads it")
            halves = list(m[base + self.stage + op.stage])
            if halves[half] is not None and halves[half] < 0:
                raise Fault("overwritten while read", f"{where}, which is still being loaded")
            halves[half] = ~(op.item.tile * STEPS + op.k)
            m[base + self.stage + op.stage] = tuple(halves)

    def _put(self, pid: int, op: p.Put, answer: int, m: Memory) -> None:
        m[self.base[self._cta(pid)] + self.slot + op.slot] = op.item

    def _mma(self, pid: int, op: p.Mma, answer: int, m: Memory) -> None:
        at, halves = self._consumer(pid), m[self.base[self._cta(pid)] + self.stage + op.stage]
        if any(half is not None and half < 0 for half in halves):
            raise Fault(
                "read before arrival", f"{self.processes[pid].name} reads stage {op.stage} before it has landed"
            )
        if halves != (m[at], m[at]):
            raise Fault(
                "wrong data", f"{self.processes[pid].name} reads {halves} in stage {op.stage}, meant is {m[at]}"
            )
        m[at] += 1
        m[at + 1] = (*m[at + 1], op.stage)

    def _retire(self, pid: int, op: p.Retire, answer: int, m: Memory) -> None:
        at = self._consumer(pid) + 1
        m[at] = m[at][max(0, len(m[at]) - op.in_flight) :]

    def _epilogue(self, pid: int, op: p.Epilogue, answer: int, m: Memory) -> None:
        at = self._consumer(pid)
        if m[at] != op.item.tile * STEPS + op.item.k_end or m[at + 1]:
            raise Fault(
                "wrong data", f"{self.processes[pid].name} ends item {op.item.tile} after {m[at] % STEPS} K steps"
            )
        m[at] = (op.item.tile + 1) * STEPS

    asked: ClassVar[dict[type, Callable[..., Sequence[Any]]]] = {
        Come: lambda self, pid, op, m: (m[self.round],),
        Await: lambda self, pid, op, m: () if m[self.round] == op.round else (0,),
        p.WaitBarrier: lambda self, pid, op, m: (
            () if blocks(m[self.base[self._cta(pid)] + self.places[op.barrier]], op.parity) else (0,)
        ),
        p.Get: lambda self, pid, op, m: (m[self.base[self._cta(pid)] + self.slot + op.slot],),
    }
    performed: ClassVar[dict[type, Callable[..., None]]] = {
        Come: _come, p.Arrive: _arrive, p.Expect: _expect, p.Load: _load, p.Put: _put,
        p.Mma: _mma, p.Retire: _retire, p.Epilogue: _epilogue,
    }  # fmt: skip

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """As `Model.environment`: a half lands."""
        out = []
        for cta in CTAS:
            ops = [self.locals.op[m[pid]] for pid in range(cta * self.loops, (cta + 1) * self.loops)]
            waited = {op.barrier.at for op in ops if type(op) is p.WaitBarrier and op.barrier.name == "full"}
            for stage in range(self.case.ring.depth):
                if self.reduce and stage not in waited:
                    continue
                at = self.base[cta] + self.stage + stage
                for source, half in enumerate(m[at]):
                    if half is None or half >= 0:
                        continue
                    n, line = m.copy(), f"the load of CTA {source} into stage {stage} of CTA {cta} lands"
                    n[at] = tuple(~x if i == source else x for i, x in enumerate(m[at]))
                    try:
                        self._reached(cta, f"the load of CTA {source} lands at", n)
                        self._count(cta, p.Barrier("full", stage), n, 0, -1)
                    except Fault as fault:
                        fault.step = [line]
                        raise
                    out.append((line, n))
        return out

    def at_end(self, m: Memory) -> None:
        """As `Model.at_end`."""
        for cta in CTAS:
            for consumer in range(self.case.ring.num_consumers):
                if m[self.base[cta] + self.reads + 2 * consumer] != len(self.items) * STEPS:
                    raise Fault("missing work", f"math {consumer} of CTA {cta} has left before its last item")
            stages = m[self.base[cta] + self.stage : self.base[cta] + self.slot]
            if any(half is not None and half < 0 for halves in stages for half in halves):
                raise Fault("left too early", f"a load into CTA {cta} is under way")
