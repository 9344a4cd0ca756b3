"""Model 1: workers x queues x gates x expiry and drain.

Every worker runs the protocol text that the backends run, `tilestream.kernels.loop.work`, or another program given in
its place. This module says what its operations mean on shared memory, and what must hold:

=================  ==============================================================================================
``Take``, ``Peek``  atomic on a counter that starts at the launch's base, here 0
``Wait``           1 once the chunk has arrived; 0 once the abort word is set; either, where both are so; else blocked
``Poll``           the abort word
``Compute``        reads its rows and columns at once; a partial result is written, for others not yet visible
``Count``          acquire and release: what the worker has written for this tile is visible; the last restores to 0
``Reduce``         reads the slots that schedule and stream-K name, in that order
=================  ==============================================================================================

Chunks arrive in any order, or never. The deadline may expire whenever a worker is blocked at a chunk that is not there:
that sets the abort word, and that worker's wait is answered 0. What a tile reads is worked out here row by row, from
the bounds alone; `Chunks.of_rows` and `Gate.needs` are what is being checked.

Reductions, and why they hide nothing:

- *Compute* is eager. Nobody else reads what it writes before its worker's own Count, and what it needs (arrived
  chunks) only grows: done at once it shows every read before arrival. *Reduce* is eager for the same reason: what it
  needs (visible partials) only grows.
- *Poll* and *Wait* are delayed to the next operation of their worker. They change nothing; what delaying takes away is
  an order in which one is answered "go on", then the deadline expires, then the worker's next operation comes. That
  next operation does not look at the abort word (else it would be a Poll or a Wait), so expiry and operation change
  places: the worker that is blocked, and lets the deadline expire, stays blocked meanwhile. Whatever came between
  them and depends on the expiry is a worker that was told "over", and leaves.
- *Arrivals* are lazy: a chunk arrives only when a worker waits for it. Arriving enables that Wait and nothing else, and
  a chunk that arrives as late as it can shows every read before arrival and every expiry.
- *After an expiry* a worker that is at a Poll or a Wait goes first, alone: what it is answered depends on nobody, and
  what it then does up to its next Count or Poll nobody can tell, but by the check of double work, which asks for no
  order. A chunk that arrives after the expiry does so in the Wait that sees it.
- *Local states* that no answers can tell apart are one (`Locals.minimise`).
- *Symmetry*: workers with the same home queue are interchangeable (dynamic, stream_k). `Locals` checks that they are.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tilestream.arrival.gate import Gate, Wait
from tilestream.kernels.loop import Compute, Count, Poll, Reduce, WorkerState, work
from tilestream.schedule import Peek, Schedule, Take, WorkItem
from tilestream.schedule import stream_k as stream_k_rules
from tilestream.schedule.queues import home_queue, next_base
from tilestream.verify import operations as ops
from tilestream.verify.faults import Fault
from tilestream.verify.model import Memory, Model, State
from tilestream.verify.oracle import Oracle, expected_tiles
from tilestream.verify.processes import LEFT, Process

#: ``(schedule, gate, worker, state)`` -> one turn.
Program = Callable[[Schedule, Gate | None, int, WorkerState], Generator[Any, int, WorkerState | None]]


@dataclass(frozen=True)
class WorkersCase:
    """One configuration of model 1.

    Attributes
    ----------
    schedule, gate
        What is run. ``gate`` None: everything is there.
    running
        The workers that ever run; empty for all. Under ``static``, each does its own positions and no others.
    program
        The protocol; see `Program`.
    clears
        Whether the program shall leave counters at zero: the form for graphs, in which the last worker out clears them.
    """

    schedule: Schedule
    gate: Gate | None = None
    running: tuple[int, ...] = ()
    program: Program = work
    clears: bool = False

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
        if self.program is not work:
            words.append(self.program.__name__)
        return ", ".join(words)


class WorkersModel(Model):
    """See the module. Memory: aborted, arrived, done, stored, late, left, counters, counts, slots."""

    eager: ClassVar[frozenset[type]] = frozenset({Compute, Reduce})
    delayed: ClassVar[frozenset[type]] = frozenset({Poll, Wait})

    def __init__(self, case: WorkersCase, reduce: bool = True, symmetry: bool = True) -> None:
        self.case = case
        schedule = case.schedule
        shares_alike = schedule.kind != "static" and symmetry
        names = sorted(case.workers, key=lambda w: (home_queue(w, schedule.queues), w))

        def turn_of(worker: int) -> Callable[[WorkerState], Generator[Any, int, WorkerState | None]]:
            return lambda state: case.program(schedule, case.gate, worker, state)

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
        self.aborted, self.arrived, self.done, self.stored, self.late, self.left = range(private, private + 6)
        self.counter = private + 6
        self.count = self.counter + schedule.queues
        self.slot = self.count + schedule.remainder
        self.end = self.slot + schedule.slots
        self.parts: list[WorkItem] = []  # what lies in slots, by number
        self.position = {schedule.remainder_tile(t).tile: t for t in range(schedule.remainder)}
        self.all_steps = (1 << grid.k_steps) - 1
        self.oracle = Oracle(schedule, gate)
        self.expected = expected_tiles(schedule, self.case.running)

    def memory(self) -> Memory:
        """As `Model.memory`."""
        schedule = self.case.schedule
        return [0] * (6 + schedule.queues + schedule.remainder + schedule.slots)

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
        if kind is Wait or kind is ops.WaitForever:
            bit = self.oracle.bit(op.operand, op.chunk)
            if not bit:
                return None  # performing it is the fault
            if kind is ops.WaitForever:
                return lambda pid, op, m: (1,) if m[self.arrived] & bit else ()
            # By arrived, aborted. With reductions the chunk may arrive in the very operation, once the launch is over.
            answers = (((), (0, 1) if self.reduce else (0,)), ((1,), (0, 1)))
            return lambda pid, op, m: answers[1 if m[self.arrived] & bit else 0][m[self.aborted]]
        if kind is Poll:
            return lambda pid, op, m: (m[self.aborted],)
        if kind is Take or kind is Peek:
            counter = self.counter + op.queue
            return lambda pid, op, m: (m[counter],)
        if kind is Count or kind is ops.Add:
            count = self.count + self.position[op.item.tile]
            return lambda pid, op, m: (m[count],)
        if kind is ops.AwaitCount:
            count = self.count + self.position[op.item.tile]
            return lambda pid, op, m: (1,) if m[count] == op.wanted else ()
        if kind is ops.AwaitTile:
            return lambda pid, op, m: (1,) if m[self.stored] >> op.tile & 1 else ()
        if kind is ops.Leave:
            return lambda pid, op, m: (m[self.left],)
        return None

    def domain(self, op: Any) -> Sequence[Any]:
        """As `Model.domain`."""
        schedule = self.case.schedule
        kind = type(op)
        if kind is Take or kind is Peek:
            return range(next_base(0, schedule.queue_size(op.queue), schedule.workers) + 1)
        if kind is Count or kind is ops.Add:
            return range(op.item.parts + 1)
        if kind is ops.Leave:
            return range(schedule.workers)
        if kind is ops.AwaitCount or kind is ops.AwaitTile or kind is ops.WaitForever:
            return (1,)
        return (0, 1) if kind is Wait or (kind is Poll and self.case.gate is not None) else (0,)

    def urgent(self, pid: int, m: Memory) -> bool:
        """As `Model.urgent`."""
        return m[self.aborted] == 1 and type(self.locals.op[m[pid]]) in self.delayed

    def remember(self, op: Any, answer: Any) -> bool:
        """As `Model.remember`."""
        return _over(op, answer)

    def performer_of(self, op: Any) -> Callable[[int, Any, Any, Memory], None] | None:
        """As `Model.performer_of`."""
        return {
            Wait: self._wait,
            ops.WaitForever: self._wait,
            Take: self._take,
            Compute: self._compute,
            Count: self._count,
            ops.Add: self._add,
            Reduce: self._reduce,
            ops.Store: self._store,
            ops.Leave: self._leave,
            ops.AwaitCount: self._await_count,
        }.get(type(op))

    def _wait(self, pid: int, op: Any, answer: int, m: Memory) -> None:
        bit = self.oracle.bit(op.operand, op.chunk)
        if not bit:
            raise Fault("signal out of range", f"a wait for chunk {op.chunk} of {self.oracle.counts[op.operand]}")
        if answer:
            m[self.arrived] |= bit

    def _take(self, pid: int, op: Take, answer: int, m: Memory) -> None:
        schedule = self.case.schedule
        if answer >= next_base(0, schedule.queue_size(op.queue), schedule.workers):
            raise Fault(
                "counter out of bounds",
                f"queue {op.queue} hands out {answer}; the next launch counts from "
                f"{next_base(0, schedule.queue_size(op.queue), schedule.workers)}",
            )
        if m[self.aborted] and self.locals.past[m[pid]]:
            raise Fault("not drained", f"{self.processes[pid].name} takes a ticket after it was told to leave")
        m[self.counter + op.queue] = answer + 1

    def _compute(self, pid: int, op: Compute, answer: int, m: Memory) -> None:
        item = op.item
        name = self.processes[pid].name
        self._check_item(item)
        if m[self.aborted]:
            if self.locals.past[m[pid]]:
                told_by = self._say(self.locals.past[m[pid]][0][0])
                raise Fault(
                    "gate ignored", f"{name} does tile {item.tile} after {told_by} has said that the launch is over"
                )
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
        steps = ((1 << item.k_end) - (1 << item.k_begin)) << item.tile * self.case.schedule.grid.k_steps
        if m[self.done] & steps:
            raise Fault("double work", f"{name} does tile {item.tile}, K steps {item.k_begin} to {item.k_end}, again")
        m[self.done] |= steps
        if item.parts == 1:
            self._finish(pid, item, m)
            return
        slot = self.slot + item.slot
        if not self.slot <= slot < self.end:
            raise Fault("wrong data", f"{name} writes a partial to slot {item.slot} of {self.end - self.slot}")
        if m[slot]:
            raise Fault("overwritten while read", f"{name} writes slot {item.slot}, where a partial is still needed")
        if item not in self.parts:
            self.parts.append(item)
        m[slot] = 2 * (self.parts.index(item) + 1)  # even: written, not yet visible

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

    def _add(self, pid: int, op: Any, answer: int, m: Memory) -> None:
        m[self.count + self.position[op.item.tile]] = answer + 1
        slot = self.slot + op.item.slot
        if m[slot] and self.parts[m[slot] // 2 - 1] == op.item:
            m[slot] |= 1

    def _count(self, pid: int, op: Count, answer: int, m: Memory) -> None:
        self._add(pid, op, answer, m)
        if answer == op.item.parts - 1:
            m[self.count + self.position[op.item.tile]] = 0

    def _reduce(self, pid: int, op: Reduce, answer: int, m: Memory) -> None:
        schedule, tile = self.case.schedule, op.item.tile
        name = self.processes[pid].name
        k = 0
        for share in schedule.contributors(self.position[tile]):
            slot = self.slot + stream_k_rules.slot(share, self.position[tile])
            if not m[slot] & 1 and not (m[slot] and self.parts[m[slot] // 2 - 1] == op.item):  # its own it can see
                raise Fault(
                    "partial not visible",
                    f"{name} adds slot {slot - self.slot} of tile {tile} before its partial is visible",
                )
            part = self.parts[m[slot] // 2 - 1]
            if part.tile != tile or part.k_begin != k:
                raise Fault(
                    "wrong data",
                    f"{name} adds K steps {part.k_begin} to {part.k_end} of tile {part.tile} to {k} of tile {tile}",
                )
            k = part.k_end
            m[slot] = 0
        if k != schedule.grid.k_steps:
            raise Fault("missing work", f"{name} stores tile {tile} with {k} of {schedule.grid.k_steps} K steps")
        self._finish(pid, op.item, m)

    def _await_count(self, pid: int, op: ops.AwaitCount, answer: int, m: Memory) -> None:
        m[self.count + self.position[op.item.tile]] = 0

    def _store(self, pid: int, op: ops.Store, answer: int, m: Memory) -> None:
        m[self.counter + op.queue] = op.value

    def _leave(self, pid: int, op: ops.Leave, answer: int, m: Memory) -> None:
        m[self.left] = answer + 1

    # The world outside ----------------------------------------------------------------------------------------------

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """As `Model.environment`."""
        if not self.oracle.chunks:
            return []
        out = []
        blocked = 0
        for pid, process in enumerate(self.processes):
            op = self.locals.op[m[pid]]
            if type(op) is Wait or type(op) is ops.WaitForever:
                bit = self.oracle.bit(op.operand, op.chunk) & ~m[self.arrived]
                if bit and type(op) is Wait and not m[self.aborted]:
                    n = m.copy()
                    n[self.aborted] = 1
                    n[pid] = self.locals.next(m[pid], 0)
                    out.append((f"{process.name}: {self._say(op)} -> the deadline expires, abort is set", n))
                blocked |= bit
        if self.reduce and m[self.aborted]:
            blocked = 0
        elif not self.reduce:
            blocked = (1 << self.oracle.chunks) - 1 & ~m[self.arrived]
        for c in range(self.oracle.chunks):
            if blocked >> c & 1:
                n = m.copy()
                n[self.arrived] |= 1 << c
                out.append((f"{self.oracle.names(1 << c)} arrives", n))
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
                if isinstance(op, Wait | ops.WaitForever) and self.oracle.bit(op.operand, op.chunk) & ~m[self.arrived]:
                    return  # the chunk may come, or the deadline
            raise Fault("deadlock", who)
        self.at_end(m)

    def at_end(self, m: Memory) -> None:
        """All have left."""
        schedule = self.case.schedule
        if self.case.clears and any(m[self.counter : self.count]):
            raise Fault(
                "count not restored", f"counters {m[self.counter : self.count]} are not zero after the last worker"
            )
        if m[self.aborted]:
            return
        for tile in self.expected:
            if (
                not m[self.stored] >> tile & 1
                or (m[self.done] >> tile * schedule.grid.k_steps & self.all_steps) != self.all_steps
            ):
                raise Fault("missing work", f"tile {tile} is not finished")
        if any(m[self.count : self.slot]):
            raise Fault("count not restored", f"the counts of stream-K's tiles are {m[self.count : self.slot]}")
        if any(m[self.slot : self.end]):
            raise Fault("missing work", "a partial result was never added")

    def tell(self, pid: int, op: Any, answer: Any) -> str:
        """As `Model.tell`."""
        told = {"Wait": ("the launch is over", "arrived"), "Poll": ("go on", "the launch is over")}.get(
            type(op).__name__
        )
        after = f" -> {told[answer] if told else answer}"
        if isinstance(op, Compute | Reduce | ops.Store):
            after = ""
        return f"{self.processes[pid].name}: {self._say(op)}{after}"

    def _say(self, op: Any) -> str:
        if isinstance(op, Take | Peek):
            return f"{type(op).__name__.lower()}(queue {op.queue})"
        if isinstance(op, Wait):
            chunk = self.oracle.names(self.oracle.bit(op.operand, op.chunk)) or f"chunk {op.chunk}"
            return f"wait({chunk}, for tile {op.item.tile})"
        if hasattr(op, "item"):
            item = op.item
            part = (
                f", K steps {item.k_begin} to {item.k_end}, part {item.part} of {item.parts}" if item.parts > 1 else ""
            )
            return f"{type(op).__name__.lower()}(tile {item.tile}{part})"
        return f"{type(op).__name__.lower()}({', '.join(f'{k} {v}' for k, v in op._asdict().items())})"


def _over(op: Any, answer: Any) -> bool:
    """Whether a worker is told that the launch is over."""
    return (type(op) is Wait and not answer) or (type(op) is Poll and bool(answer))


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
