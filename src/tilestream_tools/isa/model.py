"""The time of an iteration of a kernel's main loop on one compute unit, from its assembly and published rates.

There are two answers. The **floor** is what its instructions occupy: matrix units, LDS, issue slots, the path from L2,
and memory; in no order can they take less than the largest of these. The **estimate** lets the waves of one worker run
the loop in order, as the hardware does: a wave issues an instruction when it is its turn, the operands are ready and
the unit is free, and stops at ``s_waitcnt`` and ``s_barrier``; a load waits while the compute unit has as much in
flight as it can. The difference is what the waits do not hide.

Not modelled: bank conflicts of LDS, misses of the instruction cache, other workers on the compute unit, and the clock,
which falls under load (a share of the peak is of the peak at the same clock).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tilestream_tools.isa import rates as published
from tilestream_tools.isa.amdgcn import WAVE, Instruction, Kernel, Kind, Loop, Register
from tilestream_tools.isa.rates import CYCLES, MEMORY_CYCLES, RATES, Rates, passes

#: Iterations that are run, and those at the beginning that do not count: until the waves have found their places.
_ITERATIONS, _WARM = 16, 6


@dataclass(frozen=True)
class Occupancy:
    """Waves that one SIMD can hold, and what bounds them.

    Attributes
    ----------
    waves
        Of a SIMD: the least of the others.
    by_registers, by_lds, by_sgprs
        As each alone would have it.
    workers
        Of a compute unit.
    """

    waves: int
    by_registers: int
    by_lds: int
    by_sgprs: int
    workers: int


def occupancy(kernel: Kernel, warps: int, lds: int) -> Occupancy:
    """How many waves fit, of workers of ``warps`` waves and ``lds`` bytes."""
    rates = RATES[kernel.arch]
    granted = max(rates.granule, -(-kernel.vgprs // rates.granule) * rates.granule)
    by_registers = min(rates.waves, rates.registers // granted)
    # 800 scalar registers a SIMD, given 16 at a time; the guides' table, from 8 waves down.
    by_sgprs = 8 if kernel.sgprs <= 100 else 7
    given = -(-lds // rates.lds_granule) * rates.lds_granule
    fit = rates.lds // given if given else rates.waves * rates.simds // warps
    by_lds = min(rates.waves, fit * warps // rates.simds)
    # A worker of eight waves puts two on each SIMD.
    workers = min(fit, *(limit * rates.simds // warps for limit in (by_registers, by_sgprs, rates.waves)))
    return Occupancy(workers * warps // rates.simds, by_registers, by_lds, by_sgprs, workers)


@dataclass(frozen=True)
class Floors:
    """Cycles of an iteration that each unit of a compute unit is busy; none of them can be gone below.

    Attributes
    ----------
    mfma, lds, issue, feed
        The matrix unit of a SIMD, LDS, the busiest of a SIMD's vector issue slot and a wave's own, the way from L2.
    memory
        The problem's bytes, read and written once, spread over its iterations; 0 where the problem is not known.
    """

    mfma: float
    lds: float
    issue: float
    feed: float
    memory: float = 0.0

    @property
    def cycles(self) -> float:
        """The largest."""
        return max(self.mfma, self.lds, self.issue, self.feed, self.memory)

    @property
    def binds(self) -> str:
        """Which it is."""
        each = {"MFMA": self.mfma, "LDS": self.lds, "issue": self.issue, "L2": self.feed, "memory": self.memory}
        return max(each, key=lambda name: each[name])


@dataclass(frozen=True)
class Estimate:
    """An iteration of the main loop.

    Attributes
    ----------
    operations
        Of all waves of a worker, multiply-adds counted two each.
    floors
        See `Floors`.
    cycles
        What the model's waves took.
    peak
        Operations a cycle of a compute unit on these operands, by the data sheet.
    """

    operations: int
    floors: Floors
    cycles: float
    peak: int

    @property
    def share(self) -> float:
        """Of the peak, at the same clock."""
        return self.operations / (self.cycles * self.peak)

    @property
    def busy(self) -> float:
        """Share of the cycles that the matrix units work: more than `share` where their instructions are slow ones."""
        return self.floors.mfma / self.cycles


def estimate(
    kernel: Kernel, warps: int, memory_cycles: float = MEMORY_CYCLES, bytes_an_operation: float = 0.0,
    bandwidth: float = 0.0,
) -> Estimate | None:  # fmt: skip
    """The main loop's estimate; None where the kernel has no loop that multiplies.

    Parameters
    ----------
    warps
        Waves of a worker.
    memory_cycles
        From a load to its data.
    bytes_an_operation, bandwidth
        Of the problem: bytes that move at least, by its operations; and bytes a cycle and compute unit from memory.

    Raises
    ------
    ValueError
        If a rate is not known: the message names the instruction, or the arch.
    """
    if kernel.arch not in RATES:
        raise ValueError(f"arch={kernel.arch!r}: rates are known of {', '.join(RATES)}")
    loop = kernel.main_loop
    if loop is None:
        return None
    rates = RATES[kernel.arch]
    multiplying = [one.mfma for one in loop.instructions if one.mfma]
    operations = warps * sum(one.operations for one in multiplying)
    memory = operations * bytes_an_operation / bandwidth if bandwidth else 0.0
    floors = _floors(loop, rates, warps, memory)
    types = Counter({one.types: 0 for one in multiplying})
    for one in multiplying:
        types[one.types] += one.operations
    cycles = _Machine(rates, warps, memory_cycles, loop.instructions).run()
    return Estimate(operations, floors, max(cycles, floors.cycles), rates.peak(types.most_common(1)[0][0]))


def _floors(loop: Loop, rates: Rates, warps: int, memory: float) -> Floors:
    code = loop.instructions
    a_simd = math.ceil(warps / rates.simds)
    mfma = sum(CYCLES * passes(one.mfma, rates.arch) for one in code if one.mfma)
    turns = sum(_turns(one) for one in code if one.kind in _VECTOR)
    return Floors(
        mfma=float(a_simd * mfma),
        lds=warps * sum(_lds_cycles(one, rates) for one in code),
        issue=float(max(CYCLES * a_simd * turns, CYCLES * len(code))),
        feed=warps * sum(WAVE * one.bits / 8 for one in code if one.kind in ("load", "load_to_lds")) / rates.feed,
        memory=memory,
    )


#: What goes through a SIMD's vector issue slot.
_VECTOR = ("valu", "transcendental", "accumulator_move", "mfma")


def _turns(one: Instruction) -> int:
    return published.TRANSCENDENTAL_TURNS if one.kind == "transcendental" else 1


def _lds_cycles(one: Instruction, rates: Rates) -> float:
    if one.kind in ("lds_read", "shuffle"):
        return rates.lds_cycles(one.bits, read=one.kind == "lds_read")
    # What a direct copy brings is written to LDS as any other.
    return rates.lds_cycles(one.bits, read=False) if one.kind in ("lds_write", "load_to_lds") else 0.0


class _Step(NamedTuple):
    """An instruction, as a wave meets it.

    Attributes
    ----------
    issue
        Cycles until the wave can issue its next.
    matrix, lds, feed
        Cycles that it occupies a matrix unit, LDS, the way from L2.
    loaded
        Bytes that it brings from memory.
    operands
        Registers that it reads or writes, for which it waits.
    """

    kind: Kind
    issue: float
    matrix: float
    lds: float
    feed: float
    loaded: float
    operands: tuple[Register, ...]
    writes: frozenset[Register]
    waits: dict[str, int]


def _steps(code: Sequence[Instruction], rates: Rates) -> list[_Step]:
    """``code`` as steps; of its branches only the last is taken."""
    made = []
    for i, one in enumerate(code):
        turns = _turns(one)
        if one.kind == "branch" and i == len(code) - 1:
            turns = published.BRANCH_TURNS
        elif one.mnemonic == "s_nop":
            turns = 1 + int(one.operands or "0", 0)
        tracked = one.kind in _VECTOR or one.kind in ("store", "lds_write")
        moved = WAVE * one.bits / 8
        loaded = moved if one.kind in ("load", "load_to_lds", "scratch") else 0.0
        made.append(
            _Step(
                one.kind,
                CYCLES * turns + (moved / published.HANDED_OVER if one.kind == "lds_write" else 0.0),
                CYCLES * passes(one.mfma, rates.arch) if one.mfma else 0.0,
                _lds_cycles(one, rates),
                loaded / rates.feed,
                loaded,
                tuple(one.reads | one.writes) if tracked else (),
                one.writes if tracked else frozenset(),
                one.waits,
            )
        )
    return made


@dataclass
class _Wave:
    """Where a wave is, and what it waits for.

    Attributes
    ----------
    time
        When its next instruction can issue.
    under_way
        By counter, when each operation that it counts is done; in order.
    ready, addend
        When a register may be read, and when as the addend of a matrix instruction that writes the same register.
    laps
        When each iteration ended.
    """

    simd: int
    at: int = 0
    time: float = 0.0
    under_way: dict[str, deque[float]] = field(default_factory=lambda: {"vmcnt": deque(), "lgkmcnt": deque()})
    ready: dict[Register, float] = field(default_factory=dict)
    addend: dict[Register, float] = field(default_factory=dict)
    laps: list[float] = field(default_factory=list)


class _Machine:
    """A compute unit with one worker on it, which runs a loop."""

    def __init__(self, rates: Rates, warps: int, memory_cycles: float, code: Sequence[Instruction]) -> None:
        self._memory, self._code = memory_cycles, _steps(code, rates)
        self._waves = [_Wave(i % rates.simds) for i in range(warps)]
        self._vector = [0.0] * rates.simds
        self._matrix = [0.0] * rates.simds
        self._lds = self._feed = 0.0
        self._coming: deque[tuple[float, float]] = deque()  # when, and how many bytes; in order
        self._turn = [(0.0, i) for i in range(warps)]  # which wave can issue next, and when

    def run(self) -> float:
        """Cycles of an iteration, once they are alike."""
        waiting: list[int] = []
        while self._turn:
            _, i = heapq.heappop(self._turn)
            wave = self._waves[i]
            step = self._code[wave.at]
            if step.kind == "barrier":
                waiting.append(i)
                if len(waiting) == len(self._waves):
                    latest = max(self._waves[j].time for j in waiting) + CYCLES
                    for j in waiting:
                        self._waves[j].time = latest
                        self._advance(j)
                    waiting = []
                continue
            start = self._start(wave, step)
            if start > wave.time:  # not yet: another may come first
                wave.time = start
                heapq.heappush(self._turn, (start, i))
            else:
                self._issue(wave, step)
                self._advance(i)
        laps = self._waves[0].laps
        return (laps[-1] - laps[_WARM]) / (len(laps) - 1 - _WARM)

    def _advance(self, i: int) -> None:
        wave = self._waves[i]
        wave.at += 1
        if wave.at == len(self._code):
            wave.at = 0
            wave.laps.append(wave.time)
        if len(wave.laps) < _ITERATIONS:
            heapq.heappush(self._turn, (wave.time, i))

    def _start(self, wave: _Wave, step: _Step) -> float:
        """When the operands are there and the unit is free."""
        start = wave.time
        for name, left in step.waits.items():
            under_way = wave.under_way.get(name, ())
            if len(under_way) > left:
                start = max(start, under_way[len(under_way) - left - 1])
        if step.kind in _VECTOR:
            start = max(start, self._vector[wave.simd])
        if step.matrix:
            start = max(start, self._matrix[wave.simd])
        for register in step.operands:
            moments = wave.addend if step.matrix and register in step.writes else wave.ready
            start = max(start, moments.get(register, 0.0))
        return max(start, self._room(step.loaded)) if step.loaded else start

    def _room(self, loaded: float) -> float:
        """When so many bytes more may be under way."""
        start, room = 0.0, published.UNDER_WAY - loaded - sum(size for _, size in self._coming)
        for done, size in self._coming:
            if room >= 0:
                break
            start, room = done, room + size
        return start

    def _issue(self, wave: _Wave, step: _Step) -> None:
        now = wave.time
        wave.time = now + step.issue if step.kind != "transcendental" else now + CYCLES
        if step.kind in _VECTOR:
            self._vector[wave.simd] = now + step.issue
            result = addend = now + step.issue
            if step.matrix:
                self._matrix[wave.simd] = now + step.matrix
                result, addend = now + step.matrix + CYCLES * published.RESULT_TURNS, now + step.matrix
            wave.ready.update(dict.fromkeys(step.writes, result))
            wave.addend.update(dict.fromkeys(step.writes, addend))
        if step.lds:
            self._lds = max(self._lds, now) + step.lds
        if step.feed:
            self._feed = max(self._feed, now) + step.feed
        if step.kind in ("lds_read", "lds_write", "shuffle"):
            self._count(wave, "lgkmcnt", self._lds + published.LDS_CYCLES)
        elif step.kind in ("load", "load_to_lds", "store", "scratch"):
            done = (self._feed if step.feed else now) + self._memory
            if step.loaded:
                while self._coming and self._coming[0][0] <= now:
                    self._coming.popleft()
                self._coming.append((done, step.loaded))
            self._count(wave, "vmcnt", done)
        for name, left in step.waits.items():
            under_way = wave.under_way.get(name, deque())
            while len(under_way) > left:
                under_way.popleft()

    def _count(self, wave: _Wave, name: str, done: float) -> None:
        """Another operation under way; a counter goes down in order."""
        under_way = wave.under_way[name]
        under_way.append(max(done, under_way[-1]) if under_way else done)
