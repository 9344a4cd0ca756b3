"""A machine for `tilestream.kernels.loop.work`: shared words in plain Python, and workers that step in any order.

Each worker is stopped before each operation it asks for; whoever drives picks who goes next. So an interleaving is a
list of choices, and a test can take them at random, unfairly, or all.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tilestream.arrival.gate import Gate, Wait
from tilestream.kernels.loop import Compute, Count, Poll, Reduce, WorkerState, work
from tilestream.schedule.grid import WorkItem
from tilestream.schedule.queues import next_base
from tilestream.schedule.schedule import Peek, Schedule, Take


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
    reduced: list[WorkItem] = field(default_factory=list)
    waited: list[Wait] = field(default_factory=list)
    read_early: list[tuple[WorkItem, tuple[int, int]]] = field(default_factory=list)

    @property
    def items(self) -> list[WorkItem]:
        return [item for _, item in self.computed]


class Machine:
    """``crew`` of the schedule's workers on shared words.

    Parameters
    ----------
    crew
        The workers that get to run at all.
    reads
        ``item -> (operand, chunk)`` pairs it truly reads: an oracle of its own, not the gate.
    """

    def __init__(
        self,
        schedule: Schedule,
        crew: Iterable[int],
        *,
        words: Words | None = None,
        gate: Gate | None = None,
        reads: Callable[[WorkItem], Iterable[tuple[int, int]]] = lambda item: (),
    ) -> None:
        self.schedule, self.gate, self.reads = schedule, gate, reads
        self.words = words or Words.fresh(schedule)
        self.arrived: set[tuple[int, int]] = set()
        self.aborted = False
        self.log = Log()
        self._at: dict[int, tuple] = {}  # worker -> (its generator, the operation it is stopped before)
        for worker in crew:
            self._begin(worker, WorkerState())

    def _begin(self, worker: int, state: WorkerState) -> None:
        turn = work(self.schedule, self.gate, worker, state)
        self._at[worker] = (turn, next(turn))

    @property
    def alive(self) -> list[int]:
        return list(self._at)

    @property
    def runnable(self) -> list[int]:
        """Workers that are not asleep at a gate."""
        return [
            worker
            for worker, (_, operation) in self._at.items()
            if not isinstance(operation, Wait) or self.aborted or (operation.operand, operation.chunk) in self.arrived
        ]

    def step(self, worker: int) -> None:
        turn, operation = self._at.pop(worker)
        try:
            self._at[worker] = (turn, turn.send(self._perform(worker, operation)))
        except StopIteration as end:
            if end.value is not None:
                self._begin(worker, end.value)

    def _perform(self, worker: int, operation) -> int:
        match operation:
            case Poll():
                return int(self.aborted)
            case Take(queue):
                return self.words.add(queue)
            case Peek(queue):
                return self.words.peek(queue)
            case Wait(operand, chunk, _):
                self.log.waited.append(operation)
                return int((operand, chunk) in self.arrived)
            case Compute(item):
                self.log.computed.append((worker, item))
                self.log.read_early += [(item, chunk) for chunk in self.reads(item) if chunk not in self.arrived]
                return 0
            case Count(item):
                return self.words.count(item)
            case Reduce(item):
                self.log.reduced.append(item)
                return 0
        raise AssertionError(f"the machine does not know {operation!r}")

    def run(self, choose: Callable[[Sequence[int]], int], arrivals: Iterable[tuple[int, int]] = ()) -> Log:
        """Step whom ``choose`` picks until all have left; -1 among its options is the next arrival."""
        coming = list(arrivals)
        while self._at:
            options = self.runnable + [-1] * bool(coming)
            assert options, f"deadlock: {self._at}"
            worker = choose(options)
            if worker < 0:
                self.arrived.add(coming.pop(0))
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
