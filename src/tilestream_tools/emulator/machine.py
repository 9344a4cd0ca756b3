"""What executes: waves, workgroups on compute units and dies, and the order in which they proceed.

A seed decides which wave executes next and for how long, how fast each wave is, and when loads and stores land. An
instruction is a function of a wave; one that returns true gives way to other waves.

Faults, beside those of `tilestream_tools.emulator.memory`: a register that is used before a wait covers the load that
fills it; barriers that never open; no end after ``limit`` instructions.
"""

from __future__ import annotations

import bisect
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import numpy as np

from tilestream_tools.emulator.fault import Fault
from tilestream_tools.emulator.memory import Memory, Shared
from tilestream_tools.emulator.numbers import LANES, MASK32, U32, Array
from tilestream_tools.emulator.order import Knowledge, Order
from tilestream_tools.emulator.registers import SCALARS, Registers

#: When loads and stores land: at once; when a wait covers them; at a moment that the seed decides.
Landing = Literal["early", "late", "random"]


#: Nanoseconds that the device has been up when a machine begins.
UP = 3 * 24 * 3600 * 10**9


class Pending:
    """An access under way."""

    __slots__ = ("end", "has_landed", "is_scalar", "land", "registers", "text")

    def __init__(
        self, land: Callable[[], None], registers: Iterable[int] = (), text: str = "", is_scalar: bool = False,
        end: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.land, self.registers, self.text, self.is_scalar, self.end = land, registers, text, is_scalar, end
        self.has_landed = False

    def go(self) -> None:
        """Land, unless it has."""
        if not self.has_landed:
            self.has_landed = True
            self.land()


class Group:
    """A workgroup: its die, its LDS, its waves."""

    def __init__(self, number: int, xcc: int, shared: Shared) -> None:
        self.number, self.xcc, self.shared = number, xcc, shared
        self.waves: list[Wave] = []

    def open_barrier(self) -> None:
        """Let the waves go on if all that have not ended are at the barrier."""
        alive = [wave for wave in self.waves if wave.state != "done"]
        if alive and all(wave.state == "barrier" for wave in alive):
            for wave in alive:
                wave.state, wave.epoch = "ready", wave.epoch + 1
            Order.meet([wave.known for wave in alive])


class Wave(Registers):
    """A wave: its registers, where it is, and what it waits for.

    Attributes
    ----------
    vector, other
        What the counters ``vmcnt`` and ``lgkmcnt`` count, oldest first.
    pending, busy
        By register, what fills it; the registers.
    epoch
        Barriers passed.
    known
        Which stores it may rely on.
    """

    def __init__(self, index: int, group: Group, machine: Machine, known: Knowledge) -> None:
        super().__init__()
        self.index, self.group, self.machine, self.known = index, group, machine, known
        self.pc, self.epoch = 0, 0
        self.state: Literal["ready", "barrier", "done"] = "ready"
        self.speed = 1.0
        self.vector: deque[Pending] = deque()
        self.other: deque[Pending] = deque()
        self.pending: dict[int, Pending] = {}
        self.busy = self.pending.keys()
        self.scratch: dict[int, Array] = {}

    def issue(self, queue: deque[Pending], one: Pending) -> None:
        """Count an access until a wait covers it; some of them land now."""
        queue.append(one)
        for register in one.registers:
            self.pending[register] = one
        machine = self.machine
        if machine.landing == "early":  # so have all before it
            one.go()
        elif machine.landing == "random" and machine.random.random() < 0.4:
            for each in itertools.islice(queue, machine.random.randint(1, len(queue))):
                each.go()

    def wait(self, queue: deque[Pending], left: int) -> None:
        """Wait until at most so many are under way. Scalar loads land in any order: only a wait for all covers one."""
        if left and any(one.is_scalar for one in queue):
            return
        if len(queue) > left:
            self.machine.waited.add(self.pc - 1)
        while len(queue) > left:
            one = queue.popleft()
            one.go()
            for register in one.registers:
                if self.pending.get(register) is one:
                    del self.pending[register]
            if one.end is not None:
                one.end()

    def finish(self) -> None:
        """End; what is under way lands."""
        self.wait(self.vector, 0)
        self.wait(self.other, 0)
        self.state = "done"


#: What an instruction does to a wave; true: other waves may go on.
Act = Callable[[Wave], "bool | None"]


class Step(NamedTuple):
    """A decoded instruction.

    Attributes
    ----------
    registers
        That it reads or writes: see `SCALARS`.
    loads
        Registers that it loads, which an earlier load of the same counter may be about to fill: both come in order.
    counter
        That counter's queue: ``"vector"``, ``"other"``; empty where it loads none.
    """

    act: Act
    registers: frozenset[int]
    loads: frozenset[int]
    counter: str
    text: str
    line: int


class Grid(NamedTuple):
    """What is launched.

    Attributes
    ----------
    groups, waves, shared
        Workgroups, waves of each, bytes of LDS of each.
    arguments
        The address of the kernel's arguments.
    entry, preloaded, user_registers
        Where a wave begins; dwords of the arguments that it has in registers; the register of the workgroup's number.
    dies, resident
        XCDs, over which the workgroups go round; workgroups at a time, all if 0.
    """

    groups: int
    waves: int
    shared: int
    arguments: int
    entry: int
    preloaded: int
    user_registers: int
    dies: int = 1
    resident: int = 0


class Machine:
    """Executes a grid.

    Parameters
    ----------
    seed, landing
        Of the order: see the module, and `Landing`.
    lds_in_order
        Whether LDS performs accesses in the order of their issue, across waves. Unset, a wave's read may be performed
        after what another wave has written since, as long as no wait covers it.
    skew
        Waves differ in speed by up to ten to this power.
    quantum
        Instructions at a time of a wave, at most.
    limit
        Instructions in all.
    nanoseconds
        That pass with each instruction, by the device's clock.
    host
        Called between two turns, with this machine: it may write to memory.
    """

    def __init__(
        self, memory: Memory, *, seed: int = 0, landing: Landing = "random",
        lds_in_order: bool = False, skew: float = 1.0, quantum: int = 40, limit: int = 20_000_000,
        nanoseconds: int = 10, host: Callable[[Machine], None] | None = None,
    ) -> None:  # fmt: skip
        self.memory, self.landing, self.lds_in_order = memory, landing, lds_in_order
        self.skew, self.quantum, self.limit, self.nanoseconds, self.host = skew, quantum, limit, nanoseconds, host
        self.random = random.Random(seed)
        #: executed, seconds: instructions, and processor time from the launch to its end.
        self.executed, self.seconds = 0, 0.0
        #: visited, waited: the instructions that were executed; of these, the waits that had something to wait for.
        self.visited: set[int] = set()
        self.waited: set[int] = set()
        #: The waves that can go on, and sums of their speeds; empty: to be looked for.
        self._ready: list[Wave] = []
        self._speeds: list[float] = []

    @property
    def clock(self) -> int:
        """The device's constant clock, since it was started: 100 MHz."""
        return (UP + self.executed * self.nanoseconds) // 10

    def execute(self, steps: list[Step], grid: Grid) -> None:
        """Run all workgroups to their end.

        Raises
        ------
        Fault
            Naming the workgroup, the wave, the line and the instruction.
        """
        self.begin(steps, grid)
        while self.go_on(turns=100):
            pass

    def begin(self, steps: list[Step], grid: Grid) -> None:
        """Launch, and execute nothing yet."""
        self._steps, self._grid, self._began = steps, grid, time.process_time()
        self._left, self._live = deque(range(grid.groups)), list[Wave]()
        self.order = Order(self.memory.bytes.size, grid.groups * grid.waves)
        self.memory.orders.append(self.order)

    def go_on(self, turns: int = 1) -> bool:
        """Let a wave go on for a while, so many times; whether there is one left.

        Several machines may take turns on one memory.
        """
        left, live, resident = self._left, self._live, self._grid.resident
        goes_on = False
        try:
            with np.errstate(all="ignore"):
                for _ in range(turns):
                    while left and (not resident or len({wave.group.number for wave in live}) < resident):
                        live += self._start(left.popleft())
                        self._ready = []
                    self._turn(live, self._steps)
                    if not (left or live):
                        break
            goes_on = bool(left or live)
        finally:
            if not goes_on:
                self.seconds += time.process_time() - self._began
                self.memory.orders.remove(self.order)
        return goes_on

    def _start(self, number: int) -> list[Wave]:
        grid = self._grid
        group = Group(number, number % grid.dies, Shared(grid.shared, grid.waves))
        for index in range(grid.waves):
            wave = Wave(index, group, self, self.order.wave(number * grid.waves + index))
            wave.s[0], wave.s[1] = grid.arguments & MASK32, grid.arguments >> 32
            words = self.memory.read(grid.arguments, np.zeros(grid.preloaded, U32)).tolist()
            wave.s[2 : 2 + grid.preloaded] = words
            wave.s[grid.user_registers] = number
            wave.v[0] = np.arange(LANES, dtype=U32) + U32(LANES * index)
            wave.pc = grid.entry
            wave.speed = 10 ** -self.random.uniform(0, self.skew)
            group.waves.append(wave)
        return group.waves

    def _turn(self, live: list[Wave], steps: list[Step]) -> None:
        """Let one wave go on for a while."""
        if not self._ready:
            self._ready = [wave for wave in live if wave.state == "ready"]
            self._speeds = list(itertools.accumulate(one.speed for one in self._ready))
        ready, speeds = self._ready, self._speeds
        if not ready:
            raise Fault(f"no wave can go on: {self._where(live, steps)}")
        if self.executed > self.limit:
            raise Fault(f"no end after {self.executed} instructions: {self._where(live, steps)}")
        if self.host is not None:
            self.host(self)
        wave = ready[bisect.bisect(speeds, self.random.random() * speeds[-1], hi=len(speeds) - 1)]
        self._run(wave, self.random.randint(1, self.quantum), steps)
        if wave.state != "ready":
            self._ready = []
            if wave.state == "done":
                live.remove(wave)
            wave.group.open_barrier()

    def _where(self, live: list[Wave], steps: list[Step]) -> str:
        return ", ".join(f"{w.group.number}.{w.index} {w.state}, line {steps[w.pc].line}" for w in live)

    def _run(self, wave: Wave, count: int, steps: list[Step]) -> None:
        busy, visit = wave.busy, self.visited.add
        step = steps[wave.pc]
        try:
            for _ in range(count):
                pc = wave.pc
                step = steps[pc]
                visit(pc)
                if busy and not busy.isdisjoint(step[1]):  # its registers
                    self._refuse_early_use(wave, step)
                wave.pc = pc + 1
                self.executed += 1
                if step[0](wave):  # its act
                    return
        except Fault as fault:
            where = f"workgroup {wave.group.number}, wave {wave.index}, line {step.line}: {step.text}"
            raise Fault(f"{where}: {fault}") from None

    def _refuse_early_use(self, wave: Wave, step: Step) -> None:
        early = set(step.registers & wave.pending.keys())
        if step.counter:
            queue = getattr(wave, step.counter)
            early = {n for n in early if n not in step.loads or wave.pending[n] not in queue}
        if early:
            n = min(early)
            name = f"s{n - SCALARS}" if n >= SCALARS else f"v{n}"
            raise Fault(f"{name} is used before a wait covers {wave.pending[n].text}")
