"""The words that workers share, and the meaning of the operations of `tilestream.core.loop` on them.

=====================  ==========================================================================================
``Take``, ``Peek``     atomic on a counter that starts at the launch's base, here 0
``Ready``              any of its queues whose chunks' signals are all set; -1 once the abort word is set, or this
                       worker's deadline has passed; either answer if both hold; else blocked
``Wait``, ``See``      1 once the signal is set; 0 once the abort word is set; either if both are set; else blocked
``Poll``               the abort word; 1 too if the launch found its signals in quarantine
``Compute``            reads its rows and columns at once; writes a partial result, not yet visible to others
``Poison``             reads nothing, and writes NaN instead of Compute's result
``Count``              acquire and release: makes the worker's writes of this tile visible; the last restores 0
``Look``               acquire: an atomic read of the count
``Write``              writes the worker's result of ``Compute`` or ``Poison`` (``held``), not yet visible to others
``Add``                ``Count`` without restoring
``Restore``            a plain write of 0
``Reduce``             reads the slots that schedule and stream-K name, in that order; NaN gives NaN
``ReducePartials``     ``Reduce`` with the worker's own part from ``held``
``Leave``              atomic on the exit count
``Reset``              a plain write of 0; for signals, to all of them
=====================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

from tilestream.core.gate import Gate, See, Wait, chunks_of
from tilestream.core.loop import Compute, Count, Poll, Reduce
from tilestream.core.queues import next_base
from tilestream.plan.additions import cuts_of
from tilestream.schedule import Peek, Ready, Schedule, Take, WorkItem
from tilestream_tools.verify import operations as ops
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.gpu_loop import Add, Leave, Look, Poison, Quarantine, ReducePartials, Reset, Restore, Write
from tilestream_tools.verify.model import Memory, Model
from tilestream_tools.verify.oracle import Oracle, expected_tiles
from tilestream_tools.verify.partials import Partials
from tilestream_tools.verify.processes import LEFT

#: The workers' drain: they leave; they poison the remaining items; or they poison, and the last resets the words.
Drain = Literal["leave", "poison", "reset"]
#: The operations by which a worker watches the launch.
WATCHES: frozenset[type] = frozenset({Poll, Wait, See})


class Case(Protocol):
    """The part of a `tilestream_tools.verify.workers.WorkersCase` that decides the words."""

    @property
    def schedule(self) -> Schedule:
        """The schedule that is run."""

    @property
    def gate(self) -> Gate | None:
        """The gate; None if no operand arrives."""

    @property
    def running(self) -> tuple[int, ...]:
        """The workers that run; empty for all."""

    @property
    def drain(self) -> Drain:
        """The workers' drain."""

    @property
    def quarantined(self) -> bool:
        """Whether the signals are in quarantine."""

    @property
    def fixup(self) -> bool:
        """Whether workers contribute the parts of a tile by `fixup`."""


class Words(Model):
    """The memory of a `WorkersCase`: the words and the true state (`set_up`), counters, counts, slots."""

    case: Case

    def set_up(self, private: int) -> None:
        """Lay out the memory after ``private`` entries, and compute each tile's parts and chunks."""
        schedule, gate = self.case.schedule, self.case.gate
        grid = schedule.grid
        # The abort word, the signals (chunks as bits), their mark, the exit count.
        self.aborted, self.signals, self.quarantined, self.left = range(private, private + 4)
        # The true state: arrived chunks, counted K steps, stored tiles, items computed after the expiry; in arrival
        # order, whether a worker's deadline has passed in a wait for several queues.
        self.arrived, self.done, self.stored, self.late, self.passed = range(private + 4, private + 9)
        self.counter = private + 9
        self.partials = Partials(schedule, self.counter + schedule.queues, self.case.fixup)
        self.end = self.partials.end
        self.all_steps = (1 << grid.k_steps) - 1
        self.oracle = Oracle(schedule, gate)
        self.all_chunks = (1 << self.oracle.chunks) - 1
        self.wanted = self._wanted()
        self.stated = _stated(schedule)
        self.expected = expected_tiles(schedule, self.case.running)

    def memory(self) -> Memory:
        """See `Model.memory`."""
        words = [0, 0, int(self.case.quarantined), 0]
        return [*words, 0, 0, 0, 0, 0, *[0] * self.case.schedule.queues, *self.partials.memory()]

    def _wanted(self) -> list[int]:
        """In arrival order, for each queue: the signals, as bits, that a worker checks before it takes an item."""
        schedule, gate = self.case.schedule, self.case.gate
        if schedule.split != "chunks":
            return []
        assert gate is not None, "arrival order without a gate"
        operand = 0 if gate.rows is not None else 1
        return [sum(self.oracle.bit(operand, chunk) for chunk in of) for of in chunks_of(schedule, gate)]

    def ready(self, op: Ready, m: Memory) -> list[int]:
        """The queues of an operation whose chunks' signals are set."""
        return [queue for queue in ops.queues_of(op) if not self.wanted[queue] & ~m[self.signals]]

    def idle(self, m: Memory) -> int:
        """The first queue with an item and with its chunks' signals set; -1 if there is none."""
        sizes = map(self.case.schedule.queue_size, range(len(self.wanted)))
        found = (
            queue for queue, size in enumerate(sizes)
            if m[self.counter + queue] < size and not self.wanted[queue] & ~m[self.signals]
        )  # fmt: skip
        return next(found, -1)

    # Meanings of operations ------------------------------------------------------------------------------------------

    def answers_of(self, op: Any) -> Callable[[int, Any, Memory], Sequence[Any]] | None:
        """See `Model.answers_of`."""
        kind = type(op)
        if kind in ops.WAITS:
            bit = self.oracle.bit(op.operand, op.chunk)
            if not bit:
                return None  # performing it is the fault
            if kind is ops.WaitForever:
                return lambda pid, op, m: (1,) if m[self.signals] & bit else ()
            # By signal, aborted. With reductions the chunk may arrive in the very operation, once the launch is over.
            answers = (((), (0, 1) if self.reduce else (0,)), ((1,), (0, 1)))
            return lambda pid, op, m: answers[1 if m[self.signals] & bit else 0][m[self.aborted]]
        if kind is Ready:
            return self._ready_answers
        if kind is Poll:
            return lambda pid, op, m: (m[self.aborted] | m[self.quarantined],)
        if kind is ops.PollAbort:
            return lambda pid, op, m: (m[self.aborted],)
        if kind is Take or kind is Peek:
            counter = self.counter + op.queue
            return lambda pid, op, m: (m[counter],)
        if kind is Count or kind is Add or kind is Look:
            count = self.partials.count_of(op.item)
            return lambda pid, op, m: (m[count],)
        if kind is ops.AwaitCount:
            count = self.partials.count_of(op.item)
            return lambda pid, op, m: (1,) if m[count] == op.wanted else ()
        if kind is ops.AwaitTile:
            return lambda pid, op, m: (1,) if m[self.stored] >> op.tile & 1 else ()
        if kind is Leave:
            return lambda pid, op, m: (m[self.left],)
        return None

    def _ready_answers(self, pid: int, op: Ready, m: Memory) -> Sequence[int]:
        if not m[self.aborted]:
            return self.ready(op, m)
        # As of a Wait: with reductions, chunks may arrive in the very operation, once the launch is over.
        return [*(ops.queues_of(op) if self.reduce else self.ready(op, m)), -1]

    def domain(self, op: Any, past: Hashable) -> Sequence[Any]:
        """See `Model.domain`."""
        schedule = self.case.schedule
        kind = type(op)
        if kind is Ready:
            return (-1, *ops.queues_of(op))
        if kind is Take or kind is Peek:
            return range(next_base(0, schedule.queue_size(op.queue), schedule.workers) + 1)
        if kind is Count or kind is Add or kind is Look:
            return range(op.item.parts + 1)
        if kind is Leave:
            return range(schedule.workers)
        if kind is ops.AwaitCount or kind is ops.AwaitTile or kind is ops.WaitForever:
            return (1,)
        if kind in ops.POLLS and past is not None:
            return (1,)  # no worker resets the abort word while this worker is in
        return (0, 1) if kind in ops.WAITS or (kind in ops.POLLS and self.case.gate is not None) else (0,)

    def urgent(self, pid: int, m: Memory) -> bool:
        """See `Model.urgent`."""
        return m[self.aborted] == 1 and type(self.locals.op[m[pid]]) in WATCHES

    def remember(self, op: Any, answer: Any) -> Hashable:
        """See `Model.remember`: what has told a worker that the launch is over."""
        over = (type(op) in ops.WAITS and not answer) or (type(op) in ops.POLLS and answer)
        return type(op).__name__.lower() if over else None

    def performer_of(self, op: Any) -> Callable[[int, Any, Any, Memory], None] | None:
        """See `Model.performer_of`."""
        return {
            **dict.fromkeys(ops.WAITS, self._wait),
            Ready: self._ready,
            Take: self._take,
            Compute: self._compute,
            Poison: self._poison,
            Count: self._count,
            Add: self._add,
            Write: self._write,
            Restore: self._restore,
            Reduce: self._reduce,
            ReducePartials: self._reduce,
            ops.ReduceNumbers: self._reduce,
            ops.SetCounter: self._set_counter,
            Leave: self._leave,
            Reset: self._reset,
            Quarantine: self._quarantine,
            ops.AwaitCount: self._await_count,
        }.get(type(op))

    def _wait(self, pid: int, op: Any, answer: int, m: Memory) -> None:
        bit = self.oracle.bit(op.operand, op.chunk)
        if not bit:
            raise Fault("signal out of range", f"a wait for chunk {op.chunk} of {self.oracle.counts[op.operand]}")
        if answer:
            self._signal(bit, m)

    def _ready(self, pid: int, op: Ready, answer: int, m: Memory) -> None:
        if answer >= 0:
            self._signal(self.wanted[answer], m)

    def _signal(self, bits: int, m: Memory) -> None:
        """Set signals. The chunks have arrived, unless the signals are those of an earlier launch."""
        m[self.signals] |= bits
        if not self.case.quarantined:
            m[self.arrived] |= bits

    def _take(self, pid: int, op: Take, answer: int, m: Memory) -> None:
        schedule = self.case.schedule
        if answer >= next_base(0, schedule.queue_size(op.queue), schedule.workers):
            raise Fault(
                "counter out of bounds",
                f"queue {op.queue} hands out {answer}; the next launch counts from "
                f"{next_base(0, schedule.queue_size(op.queue), schedule.workers)}",
            )
        if self.case.drain == "leave" and m[self.aborted] and self.locals.past[m[pid]]:
            raise Fault("not drained", f"{self.processes[pid].name} takes a ticket after it was told to leave")
        m[self.counter + op.queue] = answer + 1

    def _compute(self, pid: int, op: Compute, answer: int, m: Memory) -> None:
        item = op.item
        name = self.processes[pid].name
        told_by = self.locals.past[m[pid]]
        if told_by is not None:
            raise Fault(
                "gate ignored", f"{name} does tile {item.tile} after a {told_by} has said that the launch is over"
            )
        if m[self.aborted]:
            m[self.late] += 1
            if m[self.late] >= len(self.processes):
                raise Fault(
                    "not drained",
                    f"{m[self.late]} items done after the expiry by {len(self.processes)} workers, one of them blocked",
                )
        missing = self.oracle.needs(item) & ~m[self.arrived]
        if missing:
            raise Fault(
                "read before arrival",
                f"{name} does tile {item.tile} (rows {item.pm}, columns {item.pn}) before {self.oracle.names(missing)}",
            )
        self._hand_in(pid, op, m, nan=False)

    def _poison(self, pid: int, op: Poison, answer: int, m: Memory) -> None:
        item = op.item
        if self.locals.past[m[pid]] is None:
            raise Fault(
                "poisoned in vain",
                f"{self.processes[pid].name} poisons tile {item.tile}, and was not told that the launch is over",
            )
        self._hand_in(pid, op, m, nan=True)

    def _hand_in(self, pid: int, op: Compute | Poison, m: Memory, nan: bool) -> None:
        item, name = op.item, self.processes[pid].name
        self._check_item(item)
        steps = ((1 << item.k_end) - (1 << item.k_begin)) << item.tile * self.case.schedule.grid.k_steps
        if m[self.done] & steps:
            raise Fault("double work", f"{name} does tile {item.tile}, K steps {item.k_begin} to {item.k_end}, again")
        m[self.done] |= steps
        if (item.k_begin, item.k_end) not in self.stated:
            raise Fault(
                "other order",
                f"{name} adds K steps {item.k_begin} to {item.k_end} of tile {item.tile} by themselves; the plan "
                f"states {', '.join(f'{begin} to {end}' for begin, end in sorted(self.stated))}",
            )
        if item.parts == 1:
            self._finish(pid, item, m)
            return
        if op.held:
            self.partials.hold(name, item, nan, m)
        else:
            self.partials.write(name, item, nan, m)

    def _check_item(self, item: WorkItem) -> None:
        grid = self.case.schedule.grid
        if self.oracle.tiles.get(item.tile) != (item.batch, item.pm, item.pn):
            raise Fault("wrong data", f"tile {item.tile} is handed over as {(item.batch, item.pm, item.pn)}")
        if not 0 <= item.k_begin < item.k_end <= grid.k_steps:
            raise Fault("wrong data", f"tile {item.tile} with K steps {item.k_begin} to {item.k_end} of {grid.k_steps}")

    def _finish(self, pid: int, item: WorkItem, m: Memory) -> None:
        if m[self.stored] >> item.tile & 1:
            raise Fault("double work", f"{self.processes[pid].name} stores tile {item.tile} again")
        m[self.stored] |= 1 << item.tile

    def _add(self, pid: int, op: Add, answer: int, m: Memory) -> None:
        self.partials.add(op, answer, m)

    def _count(self, pid: int, op: Count, answer: int, m: Memory) -> None:
        self.partials.count_in(op, answer, m)

    def _await_count(self, pid: int, op: ops.AwaitCount, answer: int, m: Memory) -> None:
        self.partials.restore(op.item, m)

    def _write(self, pid: int, op: Write, answer: int, m: Memory) -> None:
        self.partials.write_held(self.processes[pid].name, op.item, m)

    def _restore(self, pid: int, op: Restore, answer: int, m: Memory) -> None:
        self.partials.restore(op.item, m)

    def _reduce(self, pid: int, op: Reduce | ReducePartials | ops.ReduceNumbers, answer: int, m: Memory) -> None:
        self._finish(pid, op.item, m)
        self.partials.reduce(self.processes[pid].name, op, m)

    def _set_counter(self, pid: int, op: ops.SetCounter, answer: int, m: Memory) -> None:
        m[self.counter + op.queue] = op.value

    def _leave(self, pid: int, op: Leave, answer: int, m: Memory) -> None:
        m[self.left] = answer + 1

    def _reset(self, pid: int, op: Reset, answer: int, m: Memory) -> None:
        name = self.processes[pid].name
        if op.word == "signals" or op.word == "abort":
            still = [p.name for o, p in enumerate(self.processes) if o != pid and m[o] != LEFT and self.watches(o)]
            if still:
                what = f"{name} does {self.describe(op)}, and {', '.join(still)} may still read it"
                raise Fault("reset too early", what)
        if op.word == "signals":
            missing = self.all_chunks & ~m[self.arrived]
            if missing:
                raise Fault("reset too early", f"{name} zeroes the signals; {self.oracle.names(missing)} may yet come")
            m[self.signals] = 0
        elif op.word == "abort":
            m[self.aborted] = 0
        elif op.word == "exits":
            m[self.left] = 0
        else:
            m[self.counter + op.queue] = 0

    def _quarantine(self, pid: int, op: Quarantine, answer: int, m: Memory) -> None:
        if not m[self.aborted] | m[self.quarantined]:
            raise Fault("not reset", f"{self.processes[pid].name} marks the signals of a launch that is not over")
        m[self.quarantined] = 1

    def watches(self, pid: int) -> bool:
        """Whether a process reads the abort word and signals."""
        return True

    def describe(self, op: Any) -> str:
        """An operation in a trace."""
        return ops.describe(op, self.oracle)

    # Ends -----------------------------------------------------------------------------------------------------------

    def check_words(self, m: Memory) -> None:
        """Check the words for the next launch, after all have left, the last by `gpu_loop.leave`."""
        counters = m[self.counter : self.partials.count]
        if any(counters):
            raise Fault("not reset", f"the queues' counters are {counters}")
        for name, at in (("exit count", self.left), ("abort word", self.aborted)):
            if m[at]:
                raise Fault("not reset", f"the {name} is {m[at]}")
        if m[self.quarantined]:
            return
        if m[self.signals]:
            raise Fault("not reset", f"the signal of {self.oracle.names(m[self.signals])} is still up")
        missing = self.all_chunks & ~m[self.arrived]
        if missing:
            raise Fault("not reset", f"the signal of {self.oracle.names(missing)} may come, and is in no quarantine")


def _stated(schedule: Schedule) -> set[tuple[int, int]]:
    """The ranges of K steps that a plan of a schedule states as separate sums."""
    ends = schedule.grid.k_steps
    return {(begin, end) for cut in cuts_of(schedule, 1) for begin, end in pairwise((0, *cut, ends))}
