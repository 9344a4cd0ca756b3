"""Model 1: workers x queues x gates x expiry and drain.

Every worker runs a protocol text that a backend runs, `tilestream.kernels.loop.work` or `work_through`, or another
program given in its place. This module says what its operations mean on shared memory, and what must hold:

=====================  ==========================================================================================
``Take``, ``Peek``     atomic on a counter that starts at the launch's base, here 0
``Wait``, ``See``      1 once the signal is up; 0 once the abort word is set; either, where both are so; else blocked
``Poll``               the abort word; 1 too where the launch found its signals in quarantine
``Compute``            reads its rows and columns at once; a partial result is written, for others not yet visible
``Poison``             reads nothing, and writes NaN where Compute would write
``Count``              acquire and release: what the worker has written for this tile is visible; the last restores to 0
``Reduce``             reads the slots that schedule and stream-K name, in that order; of NaN comes NaN
``Leave``              atomic on the exit count
``Reset``              a plain write of 0; of the signals, to all of them
=====================  ==========================================================================================

Chunks arrive in any order, or never; each signal comes up with its chunk, once. The deadline may expire whenever a
worker is blocked at a chunk that is not there: that sets the abort word, and that worker's wait is answered 0. Nobody
but the launch's workers sets that word. What a tile reads is worked out here row by row, from the bounds alone;
`Chunks.of_rows` and `Gate.needs` are what is being checked.

What must hold beside what holds for all (each item once, none before its chunks, nobody stuck, counts and slots as
they were), by `Drain`:

- *leave*: after an expiry a worker that is told so takes nothing more.
- *poison*: after an expiry, too, each item is handed in once and each tile stored. Nobody computes who was told that
  the launch is over, ever after; nobody poisons who was not. A split tile is NaN if one of its parts is, and only then.
- *reset*: that, and in the end counters, exit count and abort word are 0. The abort word was reset when all others had
  left. The signals were so too, and when each chunk had arrived: none can come up for the next launch. Or, only where
  the launch was over, they are in quarantine.

Either way, at most one item a worker is computed after an expiry. A launch whose words are reset leaves to the next
either what it found, or signals in quarantine, which come up as they like and with nothing there
(`WorkersCase.quarantined`). Both beginnings are explored: that is why graphs replay.

Reductions, and why they hide nothing:

- *Compute* and *Poison* are eager. Nobody else reads what they write before their worker's own Count, and what they
  need (arrived chunks) only grows: done at once they show every read before arrival. *Reduce* is eager for the same
  reason: what it needs (visible partials) only grows.
- *Poll* and *Wait* are delayed to the next operation of their worker, in *leave*. They change nothing; what delaying
  takes away is an order in which one is answered "go on", then the deadline expires, then the worker's next operation
  comes. That next operation does not look at the abort word (else it would be a Poll or a Wait), so expiry and
  operation change places: the worker that is blocked, and lets the deadline expire, stays blocked meanwhile. Whatever
  came between them and depends on the expiry is a worker that was told "over", and leaves. In *poison* and *reset* it
  does not leave: it takes, counts, counts itself out, and the other's next operation may see that. There nothing is
  delayed. (The seeded bug "over asked too early" is one that delaying would hide.)
- *Arrivals* are lazy: a chunk arrives only when a worker waits for it. Arriving enables that Wait and nothing else, and
  a chunk that arrives as late as it can shows every read before arrival, every expiry, and every signal that is reset
  before it came. So are signals that come up late, out of quarantine.
- *After an expiry* a worker that is at a Poll or a Wait goes first, alone. What it is answered depends on nobody: the
  abort word stays set while a worker is in, or else its Reset is the fault that is found. And what the worker then does
  up to its next operation on shared words (Poll, Take, Count, Leave) nobody can tell, but by the check of double work,
  which asks for no order. A chunk that arrives after the expiry does so in the Wait that sees it.
- *Local states* that no answers can tell apart are one (`Locals.minimise`); a worker that was told that the launch is
  over stays apart from one that was not.
- *Symmetry*: workers with the same home queue are interchangeable (dynamic, stream_k). `Locals` checks that they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

from tilestream.arrival.gate import Gate, See, Wait
from tilestream.kernels.loop import (
    Compute,
    Count,
    Leave,
    Poison,
    Poll,
    Quarantine,
    Reduce,
    Reset,
    WorkerState,
    work,
    work_through,
)  # fmt: skip
from tilestream.schedule import Peek, Schedule, Take, WorkItem
from tilestream.schedule.queues import home_queue, next_base
from tilestream.verify import operations as ops
from tilestream.verify.faults import Fault
from tilestream.verify.model import Memory, Model, State
from tilestream.verify.oracle import Oracle, expected_tiles
from tilestream.verify.partials import Partials
from tilestream.verify.processes import LEFT, Process

#: ``(schedule, gate, worker, state)`` -> one turn.
Program = Callable[[Schedule, Gate | None, int, WorkerState], Generator[Any, int, WorkerState | None]]

#: How workers drain: they leave; they poison what is left; they do, and the last one out resets the words.
Drain = Literal["leave", "poison", "reset"]

#: What a worker watches the launch by.
WATCHES: frozenset[type] = frozenset({Poll, Wait, See})

PROGRAMS: dict[Drain, Program] = {"leave": work, "poison": work_through, "reset": partial(work_through, reset=True)}


@dataclass(frozen=True)
class WorkersCase:
    """One configuration of model 1.

    Attributes
    ----------
    schedule, gate
        What is run. ``gate`` None: everything is there.
    running
        The workers that ever run; empty for all. Under ``static``, each does its own positions and no others.
    drain
        How workers drain: what must hold after an expiry, and at the end.
    program
        What runs in place of ``PROGRAMS[drain]``.
    quarantined
        Whether an earlier launch has left the signals in quarantine: they come up as they like, and nothing with them.
    """

    schedule: Schedule
    gate: Gate | None = None
    running: tuple[int, ...] = ()
    drain: Drain = "leave"
    program: Program | None = None
    quarantined: bool = False

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that run."""
        return self.running or tuple(range(self.schedule.workers))

    def build(self, reduce: bool = True, symmetry: bool = True) -> WorkersModel:
        """The model of this configuration."""
        return WorkersModel(self, reduce, symmetry)

    def __str__(self) -> str:
        s = self.schedule
        words = [f"{s.kind}, {s.workers} workers"]
        if self.running:
            words.append(f"running {list(self.running)}")
        if s.kind == "dynamic":
            words.append(f"{s.queues} queues of {s.split}")
        words.append(f"{s.grid.batch} x {s.grid.num_m} x {s.grid.num_n} tiles of {s.grid.k_steps} K steps")
        if s.kind == "stream_k":
            words.append(f"{s.num_shares} shares")
        raster = s.raster
        words.append(f"{raster.order} from row tile {raster.first}" if raster.order == "chunk_major" else raster.order)
        if self.gate is not None:
            for name, chunks in (("rows", self.gate.rows), ("columns", self.gate.columns)):
                if chunks is not None:
                    block = self.gate.block_m if name == "rows" else self.gate.block_n
                    words.append(f"{name} in chunks {list(chunks.bounds)}, {block} a tile")
        if self.drain != "leave":
            words.append("what is left is poisoned" if self.drain == "poison" else "poisoned, and words are reset")
        if self.quarantined:
            words.append("signals in quarantine")
        if self.program is not None:
            words.append(self.program.__name__)
        return ", ".join(words)


class WorkersModel(Model):
    """See the module. Memory: the words and the truth (`_set_up`), counters, counts, slots."""

    eager: ClassVar[frozenset[type]] = frozenset({Compute, Poison, Reduce})

    def __init__(self, case: WorkersCase, reduce: bool = True, symmetry: bool = True) -> None:
        self.case = case
        self.delayed = WATCHES if case.drain == "leave" else frozenset()
        schedule = case.schedule
        shares_alike = schedule.kind != "static" and symmetry
        program = case.program or PROGRAMS[case.drain]
        names = sorted(case.workers, key=lambda w: (home_queue(w, schedule.queues), w))

        def turn_of(worker: int) -> Callable[[WorkerState], Generator[Any, int, WorkerState | None]]:
            return lambda state: program(schedule, case.gate, worker, state)

        processes = [
            Process(
                f"worker {w}", turn_of(w), WorkerState(),
                group=("home", home_queue(w, schedule.queues)) if shares_alike else ("worker", w),
            )
            for w in names
        ]  # fmt: skip
        self._groups = _runs([p.group for p in processes])
        self._set_up(len(processes))
        super().__init__(processes, reduce, symmetry)

    def _set_up(self, private: int) -> None:
        """Lay out the memory behind ``private`` entries, and work out what each tile is and reads."""
        schedule, gate = self.case.schedule, self.case.gate
        grid = schedule.grid
        # The abort word, the signals (chunks as bits), their mark, the exit count.
        self.aborted, self.signals, self.quarantined, self.left = range(private, private + 4)
        # The truth: chunks that are there, K steps handed in, tiles stored, items computed after the expiry.
        self.arrived, self.done, self.stored, self.late = range(private + 4, private + 8)
        self.counter = private + 8
        self.partials = Partials(schedule, self.counter + schedule.queues)
        self.end = self.partials.end
        self.all_steps = (1 << grid.k_steps) - 1
        self.oracle = Oracle(schedule, gate)
        self.all_chunks = (1 << self.oracle.chunks) - 1
        self.expected = expected_tiles(schedule, self.case.running)

    def memory(self) -> Memory:
        """As `Model.memory`."""
        words = [0, 0, int(self.case.quarantined), 0]
        return [*words, 0, 0, 0, 0, *[0] * self.case.schedule.queues, *self.partials.memory()]

    def canonical(self, state: State) -> State:
        """As `Model.canonical`."""
        if not self._groups:
            return state
        m = list(state)
        for begin, end in self._groups:
            m[begin:end] = sorted(m[begin:end])
        return tuple(m)

    # What operations mean -------------------------------------------------------------------------------------------

    def answers_of(self, op: Any) -> Callable[[int, Any, Memory], Sequence[Any]] | None:
        """As `Model.answers_of`."""
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
        if kind is Poll:
            return lambda pid, op, m: (m[self.aborted] | m[self.quarantined],)
        if kind is ops.PollAbort:
            return lambda pid, op, m: (m[self.aborted],)
        if kind is Take or kind is Peek:
            counter = self.counter + op.queue
            return lambda pid, op, m: (m[counter],)
        if kind is Count or kind is ops.Add:
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

    def domain(self, op: Any, past: Hashable) -> Sequence[Any]:
        """As `Model.domain`."""
        schedule = self.case.schedule
        kind = type(op)
        if kind is Take or kind is Peek:
            return range(next_base(0, schedule.queue_size(op.queue), schedule.workers) + 1)
        if kind is Count or kind is ops.Add:
            return range(op.item.parts + 1)
        if kind is Leave:
            return range(schedule.workers)
        if kind is ops.AwaitCount or kind is ops.AwaitTile or kind is ops.WaitForever:
            return (1,)
        if kind in ops.POLLS and past is not None:
            return (1,)  # nobody takes the abort word back while this worker is in
        return (0, 1) if kind in ops.WAITS or (kind in ops.POLLS and self.case.gate is not None) else (0,)

    def urgent(self, pid: int, m: Memory) -> bool:
        """As `Model.urgent`."""
        return m[self.aborted] == 1 and type(self.locals.op[m[pid]]) in WATCHES

    def remember(self, op: Any, answer: Any) -> Hashable:
        """As `Model.remember`: what has told a worker that the launch is over."""
        over = (type(op) in ops.WAITS and not answer) or (type(op) in ops.POLLS and answer)
        return type(op).__name__.lower() if over else None

    def performer_of(self, op: Any) -> Callable[[int, Any, Any, Memory], None] | None:
        """As `Model.performer_of`."""
        return {
            **dict.fromkeys(ops.WAITS, self._wait),
            Take: self._take,
            Compute: self._compute,
            Poison: self._poison,
            Count: self._count,
            ops.Add: self._add,
            Reduce: self._reduce,
            ops.ReduceNumbers: self._reduce,
            ops.Store: self._store,
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

    def _signal(self, bits: int, m: Memory) -> None:
        """Signals come up; the chunks have arrived, unless the signals are those of an earlier launch."""
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
        self._hand_in(pid, item, m, nan=False)

    def _poison(self, pid: int, op: Poison, answer: int, m: Memory) -> None:
        item = op.item
        if self.locals.past[m[pid]] is None:
            raise Fault(
                "poisoned in vain",
                f"{self.processes[pid].name} poisons tile {item.tile}, and nobody told it that the launch is over",
            )
        self._hand_in(pid, item, m, nan=True)

    def _hand_in(self, pid: int, item: WorkItem, m: Memory, nan: bool) -> None:
        name = self.processes[pid].name
        self._check_item(item)
        steps = ((1 << item.k_end) - (1 << item.k_begin)) << item.tile * self.case.schedule.grid.k_steps
        if m[self.done] & steps:
            raise Fault("double work", f"{name} does tile {item.tile}, K steps {item.k_begin} to {item.k_end}, again")
        m[self.done] |= steps
        if item.parts == 1:
            self._finish(pid, item, m)
            return
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

    def _add(self, pid: int, op: ops.Add, answer: int, m: Memory) -> None:
        self.partials.add(op, answer, m)

    def _count(self, pid: int, op: Count, answer: int, m: Memory) -> None:
        self.partials.count_in(op, answer, m)

    def _await_count(self, pid: int, op: ops.AwaitCount, answer: int, m: Memory) -> None:
        self.partials.restore(op.item, m)

    def _reduce(self, pid: int, op: Reduce | ops.ReduceNumbers, answer: int, m: Memory) -> None:
        self.partials.reduce(self.processes[pid].name, op, m)
        self._finish(pid, op.item, m)

    def _store(self, pid: int, op: ops.Store, answer: int, m: Memory) -> None:
        m[self.counter + op.queue] = op.value

    def _leave(self, pid: int, op: Leave, answer: int, m: Memory) -> None:
        m[self.left] = answer + 1

    def _reset(self, pid: int, op: Reset, answer: int, m: Memory) -> None:
        name = self.processes[pid].name
        if op.word == "signals" or op.word == "abort":
            still = [p.name for other, p in enumerate(self.processes) if other != pid and m[other] != LEFT]
            if still:
                raise Fault("reset too early", f"{name} does {self._say(op)}, and {', '.join(still)} may still read it")
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

    # The world outside ----------------------------------------------------------------------------------------------

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """As `Model.environment`."""
        if not self.oracle.chunks:
            return []
        out = []
        blocked = 0
        for pid, process in enumerate(self.processes):
            op = self.locals.op[m[pid]]
            if type(op) in ops.WAITS:
                bit = self.oracle.bit(op.operand, op.chunk) & ~m[self.signals]
                if bit and type(op) is not ops.WaitForever and not m[self.aborted]:
                    n = m.copy()
                    n[self.aborted] = int(type(op) is not ops.WaitAlone)
                    n[pid] = self.locals.next(m[pid], 0)
                    after = ", abort is set" if n[self.aborted] else ""
                    out.append((f"{process.name}: {self._say(op)} -> the deadline expires{after}", n))
                blocked |= bit
        if self.reduce and m[self.aborted]:
            blocked = 0
        elif not self.reduce:
            blocked = self.all_chunks & ~m[self.signals] & ~m[self.arrived]
        for c in range(self.oracle.chunks):
            if blocked >> c & 1:
                n = m.copy()
                self._signal(1 << c, n)
                line = "a late signal says that {} arrives" if self.case.quarantined else "{} arrives"
                out.append((line.format(self.oracle.names(1 << c)), n))
        return out

    # Ends -----------------------------------------------------------------------------------------------------------

    def at_rest(self, m: Memory) -> None:
        """As `Model.at_rest`."""
        here = [(p.name, self.locals.op[m[pid]]) for pid, p in enumerate(self.processes) if m[pid] != LEFT]
        if here:
            who = "; ".join(f"{name} at {self._say(op)}" for name, op in here)
            if m[self.aborted]:
                raise Fault("not drained", f"the launch is over, and {who}")
            for _, op in here:
                if type(op) in ops.WAITS and self.oracle.bit(op.operand, op.chunk) & ~m[self.signals]:
                    return  # the chunk may come, or the deadline
            raise Fault("deadlock", who)
        self.at_end(m)

    def at_end(self, m: Memory) -> None:
        """All have left."""
        schedule = self.case.schedule
        if self.case.drain == "leave" and m[self.aborted]:
            return
        if self.case.drain == "reset":
            self._check_words(m)
        for tile in self.expected:
            if (
                not m[self.stored] >> tile & 1
                or (m[self.done] >> tile * schedule.grid.k_steps & self.all_steps) != self.all_steps
            ):
                raise Fault("missing work", f"tile {tile} is not finished")
        self.partials.at_end(m)

    def _check_words(self, m: Memory) -> None:
        """All have left, the last of them through `tilestream.kernels.loop.leave`: what the next launch finds."""
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

    def tell(self, pid: int, op: Any, answer: Any) -> str:
        """As `Model.tell`."""
        return f"{self.processes[pid].name}: {self._say(op)}{ops.say_answer(op, answer)}"

    def _say(self, op: Any) -> str:
        return ops.say(op, self.oracle)


def _runs(groups: Sequence[object]) -> list[tuple[int, int]]:
    """Ranges of neighbours in the same group, two or more."""
    out = []
    begin = 0
    for i in range(1, len(groups) + 1):
        if i == len(groups) or groups[i] != groups[begin]:
            if i - begin > 1:
                out.append((begin, i))
            begin = i
    return out
