"""A machine for the loops of workers: shared words in plain Python, and workers that step in any order.

Each worker stops before each operation; the driver picks the worker that goes on. So an interleaving is a list of
choices, and a test can take them at random, unfairly, or all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tilestream.core import loop
from tilestream.core.gate import Gate, See, Wait
from tilestream.core.grid import WorkItem
from tilestream.core.queues import next_base
from tilestream.core.schedule import Peek, Ready, Schedule, Take
from tilestream_tools.verify import gpu_loop


@dataclass
class Words:
    """Queue counters, as the launches before left them, and the base this launch counts from."""

    raw: list[int]
    bases: list[int]
    counts: Counter = field(default_factory=Counter)

    @classmethod
    def fresh(cls, schedule: Schedule) -> Words:
        return cls([0] * schedule.queues, [0] * schedule.queues)

    def next_launch(self, schedule: Schedule) -> Words:
        """The words as the next launch finds them: nothing was cleared."""
        bases = [next_base(base, schedule.queue_size(queue), schedule.workers) for queue, base in enumerate(self.bases)]
        return Words(list(self.raw), bases)

    def add(self, queue: int) -> int:
        before = max(self.raw[queue], self.bases[queue])
        self.raw[queue] = before + 1
        return before - self.bases[queue]

    def peek(self, queue: int) -> int:
        return max(self.raw[queue] - self.bases[queue], 0)

    def count(self, item: WorkItem) -> int:
        before = self.counts[item.tile]
        self.counts[item.tile] = (before + 1) % item.parts
        return before


@dataclass
class Log:
    """What was done, in the order in which it happened."""

    computed: list[tuple[int, WorkItem]] = field(default_factory=list)  # worker, item
    poisoned: list[tuple[int, WorkItem]] = field(default_factory=list)
    told: list[tuple[int, object]] = field(default_factory=list)  # worker, what told it that the launch is over
    computed_after_told: list[WorkItem] = field(default_factory=list)
    reduced: list[WorkItem] = field(default_factory=list)
    written: list[WorkItem] = field(default_factory=list)  # of those that were held
    waited: list[Wait] = field(default_factory=list)
    read_early: list[tuple[WorkItem, tuple[int, int]]] = field(default_factory=list)

    @property
    def items(self) -> list[WorkItem]:
        return [item for _, item in self.computed]

    @property
    def handed_in(self) -> list[WorkItem]:
        return [item for _, item in self.computed + self.poisoned]


class Machine:
    """``crew`` of the schedule's workers on shared words.

    Parameters
    ----------
    crew
        The workers that get to run at all.
    reads
        ``item -> (operand, chunk)`` pairs it truly reads: an oracle of its own, not the gate.
    program
        The protocol: what the workers run.

    Each K step counts 1, so a tile's result is its K steps; ``slots`` and ``tiles`` hold results, NaN for poison.
    ``arrived`` are the signals that are up.
    """

    def __init__(
        self,
        schedule: Schedule,
        crew: Iterable[int],
        *,
        words: Words | None = None,
        gate: Gate | None = None,
        reads: Callable[[WorkItem], Iterable[tuple[int, int]]] = lambda item: (),
        program: Callable = loop.work,
    ) -> None:
        self.schedule, self.gate, self.reads, self.program = schedule, gate, reads, program
        self.words = words or Words.fresh(schedule)
        self.arrived: set[tuple[int, int]] = set()
        self.aborted = self.quarantined = False
        self.exits = 0
        self.slots: dict[int, float] = {}
        self.tiles: dict[int, float] = {}
        self.held: dict[int, float] = {}  # worker -> the part it has in its registers
        self.log = Log()
        self._at: dict[int, tuple] = {}  # worker -> (its generator, the operation it is stopped before)
        for worker in crew:
            self._begin(worker, loop.WorkerState())

    def _begin(self, worker: int, state: loop.WorkerState) -> None:
        turn = self.program(self.schedule, self.gate, worker, state)
        first = next(turn, None)
        if first is not None:  # else STOP, without a look at any word
            self._at[worker] = (turn, first)

    @property
    def alive(self) -> list[int]:
        return list(self._at)

    @property
    def runnable(self) -> list[int]:
        """Workers that are not asleep at a gate."""
        return [worker for worker, (_, operation) in self._at.items() if self.aborted or self._awake(operation)]

    def _awake(self, operation) -> bool:
        if isinstance(operation, Ready):
            return bool(self._ready(operation))
        return not isinstance(operation, Wait | See) or (operation.operand, operation.chunk) in self.arrived

    def _ready(self, operation: Ready) -> list[int]:
        """The queues of an operation whose items' chunks have all arrived."""
        schedule = self.schedule
        return [
            queue for queue in range(schedule.queues)
            if operation.queues >> queue & 1
            and all((w.operand, w.chunk) in self.arrived for w in self.gate.needs(schedule.ticket(queue, 0)[0]))
        ]  # fmt: skip

    def step(self, worker: int) -> None:
        turn, operation = self._at.pop(worker)
        answer = self._perform(worker, operation)
        over = answer if isinstance(operation, loop.Poll) else isinstance(operation, Wait | See) and not answer
        if over:
            self.log.told.append((worker, operation))
        try:
            self._at[worker] = (turn, turn.send(answer))
        except StopIteration as end:
            if end.value is not None:
                self._begin(worker, end.value)

    def _perform(self, worker: int, operation) -> int:
        log, words = self.log, self.words
        match operation:
            case loop.Poll():
                return int(self.aborted or self.quarantined)
            case Take(queue):
                return words.add(queue)
            case Peek(queue):
                return words.peek(queue)
            case Ready():
                return next(iter(self._ready(operation)), -1)
            case Wait(operand, chunk) | See(operand, chunk):
                if isinstance(operation, Wait):
                    log.waited.append(operation)
                return int((operand, chunk) in self.arrived)
            case loop.Compute(item):
                log.computed.append((worker, item))
                if any(told == worker for told, _ in log.told):
                    log.computed_after_told.append(item)
                self._hand_in(worker, operation, float(item.k_end - item.k_begin))
                log.read_early += [(item, chunk) for chunk in self.reads(item) if chunk not in self.arrived]
            case gpu_loop.Poison(item):
                log.poisoned.append((worker, item))
                self._hand_in(worker, operation, float("nan"))
            case loop.Count(item):
                return words.count(item)
            case gpu_loop.Look(item):
                return words.counts[item.tile]
            case gpu_loop.Write(item):
                log.written.append(item)
                self.slots[item.slot] = self.held[worker]
            case gpu_loop.Add(item):
                words.counts[item.tile] += 1
                return words.counts[item.tile] - 1
            case gpu_loop.Restore(item):
                words.counts[item.tile] = 0
            case loop.Reduce(item) | gpu_loop.ReducePartials(item):
                log.reduced.append(item)
                if isinstance(operation, gpu_loop.ReducePartials):
                    self.slots[item.slot] = self.held.pop(worker)
                first = item.slot - item.part
                parts = range(first, first + item.parts)
                self.tiles[item.tile] = sum(self.slots.pop(slot, float("nan")) for slot in parts)
            case gpu_loop.Leave():
                self.exits += 1
                return self.exits - 1
            case gpu_loop.Quarantine():
                self.quarantined = True
            case gpu_loop.Reset("signals"):
                self.arrived.clear()
            case gpu_loop.Reset("counter", queue):
                words.raw[queue] = 0
            case gpu_loop.Reset("exits"):
                self.exits = 0
            case gpu_loop.Reset("abort"):
                self.aborted = False
            case _:
                raise AssertionError(f"the machine does not know {operation!r}")
        return 0

    def _hand_in(self, worker: int, done: loop.Compute | gpu_loop.Poison, result: float) -> None:
        item = done.item
        if done.held:
            self.held[worker] = result
        elif item.parts == 1:
            self.tiles[item.tile] = result
        else:
            self.slots[item.slot] = result

    def run(
        self, choose: Callable[[Sequence[int]], int], arrivals: Iterable[tuple[int, int]] = (), expires: bool = False
    ) -> Log:
        """Step the worker that ``choose`` picks, until all have left.

        Option -1 is the next arrival. Option -2 is the deadline (``expires``), offered only while a worker is asleep.
        """
        coming = list(arrivals)
        while self._at:
            runnable = self.runnable
            options = runnable + [-1] * bool(coming) + [-2] * (expires and len(runnable) < len(self._at))
            assert options, f"deadlock: {self._at}"
            worker = choose(options)
            if worker == -1:
                self.arrived.add(coming.pop(0))
            elif worker == -2:
                self.aborted = True
            else:
                self.step(worker)
        return self.log


def unfair(seed: int) -> Callable[[Sequence[int]], int]:
    """A scheduler that favours some workers by orders of magnitude, and changes its mind now and then."""
    rng = random.Random(seed)
    weights: dict[int, float] = {}

    def choose(options: Sequence[int]) -> int:
        if rng.random() < 0.01:
            weights.clear()
        for option in options:
            weights.setdefault(option, 10 ** rng.uniform(-4, 0))
        return rng.choices(options, [weights[option] for option in options])[0]

    return choose


def every_interleaving(run: Callable[[Callable[[Sequence[int]], int]], object]) -> Iterator[object]:
    """``run(choose)`` once for every list of choices it can be given; what it returns, each time."""
    path: list[tuple[int, int]] = []  # (choice, number of options) at each step
    while True:
        step = 0

        def choose(options: Sequence[int]) -> int:
            nonlocal step
            if step == len(path):
                path.append((0, len(options)))
            choice, number = path[step]
            assert number == len(options), "a run is no function of its choices"
            step += 1
            return options[choice]

        yield run(choose)
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        choice, number = path.pop()
        path.append((choice + 1, number))


def done(items: Iterable[WorkItem]) -> Counter:
    """How often each (tile, K step) was done."""
    return Counter((item.tile, k) for item in items for k in range(item.k_begin, item.k_end))


def all_of(schedule: Schedule) -> Counter:
    """Each (tile, K step) of the grid once: what `done` must be."""
    grid = schedule.grid
    return Counter((tile, k) for tile in range(grid.tiles) for k in range(grid.k_steps))
