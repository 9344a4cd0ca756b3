"""Model 3: the warps of one worker over a ring without mbarriers, as the CDNA kernel has it.

One loop does load and math, and each warp runs it: a warp copies its own share of a stage and reads all of it. It
counts its own copies in flight in *instructions*, oldest first. A barrier orders warps, and waits for no copy and no
read. The text is `direct` and `staged`; the heads of `tilestream.kernels.cdna.ring` and `.gemm` say the same for the
kernel.

Properties: no warp is ever stuck. A stage is read when every warp's share of the intended step has landed. No copy or
write goes to a stage that a warp reads or that is still being filled. A value is put only after it has come into its
registers. No wait covers copies that only a later step, or the other operand, needs. Nothing is in flight when a worker
leaves.

A copy lands when a wait says so, and not before. On the hardware it may land earlier; the resulting error, a stage
overwritten while a warp reads it, is already a fault when the copy starts. Every warp is given the same items.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tilestream.core.ring import after, before
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory, Model
from tilestream_tools.verify.processes import Process

#: K steps, at most, in what a share holds: ``1 + item * STEPS + step``.
STEPS = 64
#: Of a matmul, where they are fetched one after the other: A, B.
OPERANDS = (0, 1)


class Item(NamedTuple):
    """A work item: its number, its whole K steps, and whether a rest of K comes behind them."""

    number: int
    steps: int
    rest: bool = False

    def holds(self, step: int) -> int:
        """What a share holds of a step; the rest is the step behind the whole ones."""
        return 1 + self.number * STEPS + step


class Copy(NamedTuple):
    """Start this warp's copies of a step into its share of a stage."""

    stage: int
    item: Item
    step: int


class Fetch(NamedTuple):
    """Start this warp's loads of a step into its registers: of one of two operands, which has its own, or of None."""

    item: Item
    step: int
    operand: int | None = None


class WaitLoads(NamedTuple):
    """Wait until ``left`` of this warp's copies and loads are in flight, in instructions."""

    left: int


class Put(NamedTuple):
    """Write a step, which has been fetched, from registers to this warp's share of a stage.

    What is in the registers of an ``operand`` must have come; of None it is not asked.
    """

    stage: int
    item: Item
    step: int
    operand: int | None = None


class Arrive(NamedTuple):
    """Come to the barrier. Answer: its round."""


class Await(NamedTuple):
    """Wait at the barrier until all warps have come to it in this round."""

    round: int


class Read(NamedTuple):
    """Start to read a stage, all of it."""

    stage: int
    item: Item
    step: int


class Have(NamedTuple):
    """Wait until what this warp reads is in its registers."""


Turn = Generator[Any, Any, None]


@dataclass(frozen=True)
class SharedRing:
    """The ring: ``depth`` stages, ``loads`` instructions of a warp to fill its share of one.

    ``operands``: where a stage's operands are read one after the other, each has a slot of its own, ``loads`` of its
    own, and a number: stage ``s`` has the slots from ``s * operands`` on.
    """

    depth: int = 3
    loads: int = 2
    warps: int = 2
    operands: int = 1

    @property
    def slots(self) -> int:
        """Of all stages."""
        return self.depth * self.operands


def meet() -> Turn:
    """The barrier of all warps."""
    now = yield Arrive()
    yield Await(now)


def direct(ring: SharedRing, item: Item) -> Turn:
    """An item by copies past the registers: `tilestream.kernels.cdna.gemm.multiply_direct`."""
    ahead = ring.depth - 1
    for i in range(ahead):
        yield Copy(i, item, min(i, max(item.steps - 1, 0)))
    stage = 0
    for step in range(item.steps - ahead):
        yield WaitLoads(ring.loads * (ahead - 1))
        yield from meet()
        yield Read(stage, item, step)
        yield Copy(before(stage, ring.depth), item, step + ahead)
        yield Have()
        stage = after(stage, ring.depth)
    first = max(0, item.steps - ahead)
    for i in range(ahead):
        yield WaitLoads(ring.loads * (ahead - 1 - i))
        yield from meet()
        if first + i < item.steps:
            yield Read(stage, item, first + i)
            yield Have()
        stage = after(stage, ring.depth)
    yield from meet()
    if item.rest:
        yield from rest(ring, item)
        yield from meet()


def staged(ring: SharedRing, item: Item) -> Turn:
    """An item by way of registers: `tilestream.kernels.cdna.gemm.multiply_staged`."""
    last = max(item.steps - 1, 0)
    yield from fetch_both(item, 0)
    for step in range(item.steps):
        yield from meet()
        for operand in OPERANDS:
            yield WaitLoads(ring.loads)
            yield Put(0, item, step, operand)
            yield Fetch(item, min(step + 1, last), operand)
        yield from meet()
        yield Read(0, item, step)
        yield Have()
    yield from land_both(ring)
    if item.rest:
        yield from rest(ring, item)


def rest(ring: SharedRing, item: Item) -> Turn:
    """The rest of K, through registers into the first stage: `tilestream.kernels.cdna.gemm.multiply_rest`."""
    yield from fetch_both(item, item.steps)
    yield from land_both(ring)
    yield from meet()
    for operand in OPERANDS:
        yield Put(0, item, item.steps, operand)
    yield from meet()
    yield Read(0, item, item.steps)
    yield Have()


def fetch_both(item: Item, step: int) -> Turn:
    """Start the loads of a step."""
    for operand in OPERANDS:
        yield Fetch(item, step, operand)


def land_both(ring: SharedRing) -> Turn:
    """Wait for them, in the order in which they were started."""
    yield WaitLoads(ring.loads)
    yield WaitLoads(0)


Text = Callable[[SharedRing, Item], Turn]


@dataclass(frozen=True)
class SharedCase:
    """One configuration of model 3: the ring, the items' K steps, and the text that each warp runs of each.

    ``exact``: a wait that is for more than what it is for is a fault, too.
    """

    ring: SharedRing
    items: tuple[tuple[int, bool], ...]
    text: Text = direct
    exact: bool = True

    def build(self, reduce: bool = True, symmetry: bool = True) -> SharedModel:
        """The model of this configuration."""
        return SharedModel(self, reduce, symmetry)

    def __str__(self) -> str:
        ring = self.ring
        items = ", ".join(f"{steps}{' and a rest' if rest else ''}" for steps, rest in self.items)
        name = getattr(self.text, "__name__", "a text")
        loads = f"{ring.loads} loads a stage" if ring.operands == 1 else f"{ring.loads} loads an operand"
        return f"{name}: {ring.warps} warps, {ring.depth} stages, {loads}; items of {items} K steps"


class SharedModel(Model):
    """See the module.

    Memory: arrivals and round of the barrier; the shares, by stage and warp; the operands' registers, by warp; then for
    each warp the stages that its copies in flight go to (below 0: registers), oldest first, and those that it reads.

    A share, or registers, hold the negative of a step that is on its way.
    """

    def __init__(self, case: SharedCase, reduce: bool = True, symmetry: bool = True) -> None:
        self.case = case
        ring = case.ring
        items = [Item(number, *item) for number, item in enumerate(case.items)]

        def turn(at: int) -> Generator[Any, Any, int | None]:
            yield from case.text(ring, items[at])
            return at + 1 if at + 1 < len(items) else None

        names = [f"warp {w}" for w in range(ring.warps)]
        self.arrivals = ring.warps
        self.round = self.arrivals + 1
        self.shares = self.round + 1
        self.registers = self.shares + ring.slots * ring.warps
        self.flying = self.registers + len(OPERANDS) * ring.warps
        self.reading = self.flying + ring.warps
        super().__init__([Process(name, turn, 0, name) for name in names], reduce, symmetry)

    def memory(self) -> Memory:
        """See `Model.memory`."""
        ring = self.case.ring
        held = (ring.slots + len(OPERANDS)) * ring.warps
        return [0, 0, *[0] * held, *[()] * ring.warps, *[()] * ring.warps]

    def domain(self, op: Any, past: Any) -> Sequence[Any]:
        """See `Model.domain`."""
        return (0, 1) if type(op) is Arrive else (0,)

    def _share(self, stage: int, warp: int) -> int:
        return self.shares + stage * self.case.ring.warps + warp

    def _register(self, operand: int, warp: int) -> int:
        return self.registers + operand * self.case.ring.warps + warp

    def _free(self, what: str, stage: int, pid: int, m: Memory) -> None:
        """Raise `Fault` if a warp reads the stage, or this warp's share of it is still being filled."""
        for warp in range(self.case.ring.warps):
            if stage in m[self.reading + warp]:
                raise Fault("overwritten while read", f"warp {pid} {what} stage {stage} while warp {warp} reads it")
        if m[self._share(stage, pid)] < 0:
            raise Fault("overwritten while read", f"warp {pid} {what} stage {stage}, which is still being filled")

    def _copy(self, pid: int, op: Copy, answer: int, m: Memory) -> None:
        self._free("copies into", op.stage, pid, m)
        m[self._share(op.stage, pid)] = -op.item.holds(op.step)
        m[self.flying + pid] = (*m[self.flying + pid], *[op.stage] * self.case.ring.loads)

    def _fetch(self, pid: int, op: Fetch, answer: int, m: Memory) -> None:
        to = -1
        if op.operand is not None:
            m[self._register(op.operand, pid)] = -op.item.holds(op.step)
            to = -2 - op.operand
        m[self.flying + pid] = (*m[self.flying + pid], *[to] * self.case.ring.loads)

    def _wait(self, pid: int, op: WaitLoads, answer: int, m: Memory) -> None:
        flying = m[self.flying + pid]
        landed = flying[: max(0, len(flying) - op.left)]
        if self.case.exact and landed:
            operands = self.case.ring.operands
            wanted = [stage // operands if stage >= 0 else stage for stage in flying]
            needed = wanted.count(wanted[0])
            if len(landed) > needed:
                raise Fault(
                    "drained in vain", f"warp {pid} waits for {len(landed)} copies, its step is there after {needed}"
                )
        m[self.flying + pid] = flying[len(landed) :]
        for stage in set(landed) - set(m[self.flying + pid]) - {-1}:
            place = self._share(stage, pid) if stage >= 0 else self._register(-2 - stage, pid)
            m[place] = abs(m[place])

    def _put(self, pid: int, op: Put, answer: int, m: Memory) -> None:
        self._free("writes to", op.stage, pid, m)
        held = op.item.holds(op.step) if op.operand is None else m[self._register(op.operand, pid)]
        if held < 0:
            raise Fault("read before arrival", f"warp {pid} puts {_said(-held)}, which is not in its registers yet")
        m[self._share(op.stage, pid)] = held

    def _arrive(self, pid: int, op: Arrive, answer: int, m: Memory) -> None:
        m[self.arrivals] += 1
        if m[self.arrivals] == self.case.ring.warps:
            m[self.arrivals], m[self.round] = 0, 1 - m[self.round]

    def _read(self, pid: int, op: Read, answer: int, m: Memory) -> None:
        meant = op.item.holds(op.step)
        for warp in range(self.case.ring.warps):
            held = m[self._share(op.stage, warp)]
            if abs(held) > meant:  # what is later has come to lie there
                raise Fault(
                    "overwritten while read", f"warp {pid} reads stage {op.stage} for {_said(meant)}, warp {warp} has "
                    f"begun to fill it with {_said(abs(held))}"
                )  # fmt: skip
            if held < 0:
                raise Fault(
                    "read before arrival", f"warp {pid} reads stage {op.stage} before warp {warp}'s copies have landed"
                )
            if held != meant:
                raise Fault(
                    "wrong data", f"warp {pid} reads {_said(held)} of warp {warp} in stage {op.stage}, meant is "
                    f"{_said(meant)}"
                )  # fmt: skip
        m[self.reading + pid] = (*m[self.reading + pid], op.stage)

    def _have(self, pid: int, op: Have, answer: int, m: Memory) -> None:
        m[self.reading + pid] = ()

    asked: ClassVar[dict[type, Callable[..., Sequence[Any]]]] = {
        Arrive: lambda self, pid, op, m: (m[self.round],),
        Await: lambda self, pid, op, m: () if m[self.round] == op.round else (0,),
    }
    performed: ClassVar[dict[type, Callable[..., None]]] = {
        Copy: _copy, Fetch: _fetch, WaitLoads: _wait, Put: _put, Arrive: _arrive, Read: _read, Have: _have,
    }  # fmt: skip

    def at_end(self, m: Memory) -> None:
        """See `Model.at_end`."""
        for warp in range(self.case.ring.warps):
            if m[self.flying + warp]:
                raise Fault("left too early", f"warp {warp} has left, and copies of it are in flight")


def _said(held: int) -> str:
    return f"step {(held - 1) % STEPS} of item {(held - 1) // STEPS}" if held else "nothing that was copied"
