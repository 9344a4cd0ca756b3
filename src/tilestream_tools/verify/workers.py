"""Model 1: workers x queues x gates x expiry and drain.

Each worker runs a backend's protocol, `tilestream.core.loop.work` or `gpu_loop.work_through`, or another given program.
`tilestream_tools.verify.words` defines its operations on the words that workers share.

Chunks arrive in any order, or never. Each signal is set with its chunk, once. The deadline may expire whenever a worker
is blocked at a chunk that has not arrived. Its expiry sets the abort word, and the wait's answer is 0. Only the
launch's workers set that word. The model computes the chunks that a tile reads row by row, from the bounds alone,
because `Chunks.of_rows` and `Gate.needs` are under test.

Properties of all configurations: each item is done once, none before its chunks, no worker is stuck, counts and slots
are as at the start. Properties for each `Drain`:

- *leave*: after an expiry a worker that has been told of it takes no further item.
- *poison*: after an expiry, too, each item is counted once and each tile stored. A worker that was told that the launch
  is over computes no more; a worker that was not told poisons nothing. A split tile is NaN if and only if one of its
  parts is.
- *reset*: as *poison*, and at the end counters, exit count and abort word are 0. The abort word was reset after all
  others had left. The signals were reset after all others had left and each chunk had arrived, so none can be set for
  the next launch. Only if the launch was over, they may be in quarantine instead.

In arrival order, until a worker's deadline has passed in a wait for several queues: no worker waits, at a gate or for
queues, while a queue has an item whose chunks have arrived. A gate never waits for an item whose chunks were seen.

Each worker computes at most one item after an expiry. A launch that resets its words leaves them to the next launch as
at the start, or with signals in quarantine, which are set at any time and mean nothing (`WorkersCase.quarantined`).
Both beginnings are explored, so graphs may be replayed.

Reductions, and why they hide no fault:

- *Compute* and *Poison* are eager. No other process reads their results before their worker's own Count, and their
  inputs (arrived chunks) only grow: done at once they show all reads before arrival. *Reduce* is eager for the same
  reason (visible partials only grow), and so are *Write* and *ReducePartials*. Between those two, *Look*, *Add* and
  *Restore* are separate steps.
- In *leave*, *Poll* and *Wait* are delayed to the next operation of their worker, but for arrival order, where a Ready
  follows, which reads the abort word too. They change nothing. Delaying removes the orders in which one of them is
  answered "go on", then the deadline expires, then the worker's next operation comes. That operation does not read the
  abort word (else it would be a Poll or a Wait), so expiry and operation can change places: the blocked worker that
  lets the deadline expire stays blocked meanwhile, and a worker in between that depends on the expiry was told "over"
  and leaves. In *poison* and *reset* it would not leave: it takes, counts and counts itself out, and the other's next
  operation may see that. There nothing is delayed. (Delaying would hide the seeded bug "over asked too early".)
- *Ready* is a separate step. Its answer is any queue whose chunks have arrived, which is more than a device gives: that
  polls one queue after the other. A deadline that has passed for one wait may not have passed for the next.
- *Arrivals* are lazy: a chunk arrives only when a worker waits for it, or in arrival order for any. An arrival enables
  that Wait (or Ready) and nothing else. A chunk that arrives as late as possible shows all reads before arrival, all
  expiries, and all resets of a signal before it was set. The same holds for quarantined signals that are set late.
- *After an expiry* a worker at a Poll or a Wait goes first, alone. Its answer depends on no other process: the abort
  word stays set while a worker is in; otherwise its Reset is the fault. No other process sees the worker's operations
  before its next one on shared words (Poll, Take, Count, Leave), except the check of double work, which is independent
  of the order. A chunk that arrives after the expiry does so in the Wait that sees it.
- *Local states* that no answers can distinguish are merged (`Locals.minimise`). A worker that was told that the launch
  is over remains distinct from one that was not.
- *Symmetry*: workers with the same home queue are interchangeable (dynamic, stream_k). `Locals` checks this.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from tilestream.core.gate import Gate
from tilestream.core.loop import Compute, Reduce, WorkerState, work
from tilestream.core.queues import home_queue
from tilestream.schedule import Ready, Schedule
from tilestream_tools.verify import operations as ops
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.gpu_loop import Poison, ReducePartials, Write, fixup, work_through
from tilestream_tools.verify.model import Memory, State
from tilestream_tools.verify.processes import LEFT, Process
from tilestream_tools.verify.words import WATCHES, Drain, Words

#: ``(schedule, gate, worker, state)`` -> one turn.
Program = Callable[[Schedule, Gate | None, int, WorkerState], Generator[Any, int, WorkerState | None]]

#: Programs by the workers' drain, and by whether they `fixup` the parts of a tile.
PROGRAMS: dict[tuple[Drain, bool], Program] = {
    ("leave", False): work,
    ("poison", False): work_through,
    ("reset", False): partial(work_through, reset=True),
    ("poison", True): partial(work_through, finish=fixup),
    ("reset", True): partial(work_through, reset=True, finish=fixup),
}


@dataclass(frozen=True)
class WorkersCase:
    """One configuration of model 1.

    Attributes
    ----------
    schedule, gate
        The schedule and the gate. ``gate`` None: no operand arrives.
    running
        The workers that run; empty for all. Under ``static`` each does only its own positions.
    drain
        The workers' drain, which decides the properties after an expiry and at the end.
    program
        The program that replaces that of `PROGRAMS`.
    quarantined
        Whether an earlier launch has left the signals in quarantine: they are set at any time, without a chunk.
    fixup
        Whether workers keep the parts of a tile, and contribute them by `fixup`.
    """

    schedule: Schedule
    gate: Gate | None = None
    running: tuple[int, ...] = ()
    drain: Drain = "leave"
    program: Program | None = None
    quarantined: bool = False
    fixup: bool = False

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
        if self.fixup:
            words.append("fixup")
        if self.drain != "leave":
            words.append("what is left is poisoned" if self.drain == "poison" else "poisoned, and words are reset")
        if self.quarantined:
            words.append("signals in quarantine")
        if self.program is not None:
            words.append(self.program.__name__)
        return ", ".join(words)


class WorkersModel(Words):
    """See the module."""

    eager: ClassVar[frozenset[type]] = frozenset({Compute, Poison, Write, Reduce, ReducePartials})

    def __init__(self, case: WorkersCase, reduce: bool = True, symmetry: bool = True) -> None:
        self.case = case
        # Not in arrival order: a Ready may follow there, which reads the abort word.
        leaves = case.drain == "leave" and case.schedule.split != "chunks"
        self.delayed = WATCHES if leaves else frozenset()
        schedule = case.schedule
        shares_alike = schedule.kind != "static" and symmetry
        program = case.program or PROGRAMS[case.drain, case.fixup]
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
        self.set_up(len(processes))
        super().__init__(processes, reduce, symmetry)

    def canonical(self, state: State) -> State:
        """See `Model.canonical`."""
        if not self._groups:
            return state
        m = list(state)
        for begin, end in self._groups:
            m[begin:end] = sorted(m[begin:end])
        return tuple(m)

    # The environment ------------------------------------------------------------------------------------------------

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """See `Model.environment`."""
        if not self.oracle.chunks:
            return []
        out = []
        blocked = 0
        for pid, process in enumerate(self.processes):
            op = self.locals.op[m[pid]]
            if type(op) is Ready and not m[self.aborted] and not self.ready(op, m):
                self._check_idle(process.name, op, m)
                n = m.copy()
                n[self.passed] = 1
                n[pid] = self.locals.next(m[pid], -1)
                out.append((f"{process.name}: {self.describe(op)} -> the deadline has passed", n))
                blocked |= self.all_chunks & ~m[self.signals]
            elif type(op) in ops.WAITS:
                bit = self.oracle.bit(op.operand, op.chunk) & ~m[self.signals]
                if bit and type(op) is not ops.WaitForever and not m[self.aborted]:
                    n = m.copy()
                    n[self.aborted] = int(type(op) is not ops.WaitAlone)
                    n[pid] = self.locals.next(m[pid], 0)
                    after = ", abort is set" if n[self.aborted] else ""
                    out.append((f"{process.name}: {self.describe(op)} -> the deadline expires{after}", n))
                blocked |= bit
                if bit and self.wanted:
                    self._check_idle(process.name, op, m)
                    blocked |= self.all_chunks & ~m[self.signals]
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

    def _check_idle(self, name: str, op: Any, m: Memory) -> None:
        """In arrival order, before the deadline: no worker waits while a queue has an item."""
        if m[self.aborted] or m[self.passed]:
            return
        queue = self.idle(m)
        if queue >= 0:
            raise Fault("idle beside work", f"{name} is at {self.describe(op)}, and queue {queue} has an item to take")

    # Ends -----------------------------------------------------------------------------------------------------------

    def at_rest(self, m: Memory) -> None:
        """See `Model.at_rest`."""
        if here := "; ".join(self.blocked(m)):
            if m[self.aborted]:
                raise Fault("not drained", f"the launch is over, and {here}")
            for op in (self.locals.op[m[pid]] for pid in range(len(self.processes)) if m[pid] != LEFT):
                if type(op) in ops.WAITS and self.oracle.bit(op.operand, op.chunk) & ~m[self.signals]:
                    return  # the chunk may arrive, or the deadline expire
                if type(op) is Ready and op.queues:
                    return
            raise Fault("deadlock", here)
        self.at_end(m)

    def at_end(self, m: Memory) -> None:
        """Check the memory after all workers have left."""
        schedule = self.case.schedule
        if self.case.drain == "leave" and m[self.aborted]:
            return
        if self.case.drain == "reset":
            self.check_words(m)
        for tile in self.expected:
            if (
                not m[self.stored] >> tile & 1
                or (m[self.done] >> tile * schedule.grid.k_steps & self.all_steps) != self.all_steps
            ):
                raise Fault("missing work", f"tile {tile} is not finished")
        self.partials.at_end(m)

    def describe_answer(self, op: Any, answer: Any) -> str:
        """See `Model.describe_answer`."""
        return ops.describe_answer(op, answer)


def _runs(groups: Sequence[object]) -> list[tuple[int, int]]:
    """The ranges of at least two neighbours in the same group."""
    out = []
    begin = 0
    for i in range(1, len(groups) + 1):
        if i == len(groups) or groups[i] != groups[begin]:
            if i - begin > 1:
                out.append((begin, i))
            begin = i
    return out
