"""Model 10: ranks that replay a captured gather or sum, their two streams, over slots, signals, marks and counts.

It explores `tilestream.core.protocols.replay`. No host takes part: each rank replays its graphs one behind another, and
may be a call ahead, or behind, at any moment. A copy has a begin and an end, and any operation may come between. Before
each replay the caller writes the next shard to the tensor that held the last one.

A rank's host may destroy its graph (``destroyed``) and let go of its slots, at any moment: freed is then what only the
graph kept, once the graph's last replay has ended on this rank, and what only the queue kept, at once. Graphs may share
a pool of memory (``shared``): between two replays of a rank another graph writes to all that the pool has.

A gate in a broken group may end: on a GPU its own deadline ends it, at some time.

The environment may end the patience of a wait (``expires``), and may remove a rank for good (``lost``). A rank that
replays once more than the others (``more``) gives up in the end. A rank may replay a call of another form than the
others' (``others``); its rows are of no use to them.

Properties: a result that is no NaN was made of the complete rows of its own call. Nothing that has been freed is read
or written, by a peer neither. No rank is ever stuck for good. Where no patience has ended, and all forms are the same,
every call is handed in; else every remaining rank is told.

Reductions, which are those of `tilestream_tools.verify.gather`: ends of copies and of reads are delayed, their begins
and signals are eager, the waits for a rank's own streams are lazy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tilestream.core.protocols import gather
from tilestream.core.protocols import replay as p
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory, State
from tilestream_tools.verify.processes import LEFT, Process
from tilestream_tools.verify.ranked import Asked, Does, RankedModel
from tilestream_tools.verify.ranks import OVERWRITTEN, TORN

#: What the rows, and the marks, of another form differ by.
_OTHER = 100

Turn = Generator[Any, int, "int | None"]
Text = Callable[[int, int, int, int, int], Turn]
#: A host's text, of a rank, the number of ranks, and a slot or the number of slots.
HostText = Callable[[int, int, int], gather.Operations]
#: Who holds a slot: the queue; the graph, whose pool it is of, or that keeps it; the graph's process.
_QUEUE, _GRAPH, _PROCESS = 1, 2, 4


class Write(NamedTuple):
    """The caller, on the calling stream: write the shard of ``replay`` to its tensor."""

    replay: int


@dataclass(frozen=True)
class ReplayCase:
    """One configuration of model 10.

    Attributes
    ----------
    replays
        Of each rank.
    slots
        Of the replays, from the first on again.
    chunks
        Of a shard.
    expires
        Where patience may end, as (rank, replay).
    lost, more
        Which rank may be lost; which one replays once more. None: none.
    others
        Which calls are of another form, as (rank, replay).
    names_form
        Whether marks name the form. A model that must fail, otherwise.
    destroyed
        The ranks whose graphs are destroyed, and whose slots are let go of.
    shared
        Whether another graph of the same pool runs between two replays.
    calling, side, prepare, retire
        The text.
    """

    world: int = 2
    replays: int = 2
    slots: tuple[int, ...] = (0,)
    chunks: int = 1
    expires: tuple[tuple[int, int], ...] = ()
    lost: int | None = None
    more: int | None = None
    others: tuple[tuple[int, int], ...] = ()
    names_form: bool = True
    destroyed: tuple[int, ...] = ()
    shared: bool = False
    calling: Text = p.calling
    side: Text = p.side
    prepare: HostText = p.prepare
    retire: HostText = p.retire

    def build(self, reduce: bool = True, symmetry: bool = True) -> ReplayModel:
        """The model of this configuration."""
        return ReplayModel(self, reduce)

    def replays_of(self, rank: int) -> int:
        """How many a rank makes."""
        return self.replays + (rank == self.more)

    def slot_of(self, replay: int) -> int:
        """The slot of a replay's call."""
        return self.slots[(replay - 1) % len(self.slots)]

    def form_of(self, rank: int, replay: int) -> int:
        """What a value of another form differs by; 0: the form is the usual one."""
        return _OTHER * ((rank, replay) in self.others)

    def turn(self, text: Text, rank: int, writes: bool, replay: int) -> Turn:
        """A replay on one of a rank's streams."""
        if writes:
            yield Write(replay)
        yield from text(rank, self.world, self.slot_of(replay), self.chunks, replay)
        return replay + 1 if replay < self.replays_of(rank) else None

    def retiring(self, rank: int, _: Any) -> Turn:
        """A rank's host, if it destroys the graph."""
        if rank in self.destroyed:
            yield from self.retire(rank, self.world, max(self.slots) + 1)
        return None

    def __str__(self) -> str:
        words = [f"{self.world} ranks, {self.chunks} chunks a shard, {self.replays} replays"]
        words += [f"slots {'/'.join(map(str, self.slots))} in turn"] if self.slots != (0,) else []
        words += [f"rank {rank} may give up in replay {replay}" for rank, replay in self.expires]
        words += [f"rank {self.more} replays once more"] if self.more is not None else []
        words += [f"rank {self.lost} may be lost"] if self.lost is not None else []
        words += [f"rank {rank}'s replay {replay} is of another form" for rank, replay in self.others]
        words += [] if self.names_form else ["marks do not name it"]
        words += [f"rank {rank}'s graph is destroyed" for rank in self.destroyed]
        words += ["another graph shares the pool"] if self.shared else []
        texts = ((self.calling, p.calling), (self.side, p.side), (self.prepare, p.prepare), (self.retire, p.retire))
        return ", ".join([*words, *(text.__name__ for text, own in texts if text is not own)])


def configurations(full: bool) -> Iterator[ReplayCase]:
    """2 ranks, and 3 once. Full: more replays, chunks, patience that ends anywhere, and ranks lost."""
    for replays in (1, 2, 3):
        yield ReplayCase(replays=replays)
    yield ReplayCase(replays=3, slots=(0, 1))
    yield ReplayCase(replays=3, slots=(0, 1, 1))
    yield ReplayCase(replays=2, chunks=2)
    yield ReplayCase(world=3, replays=1)
    yield ReplayCase(replays=2, expires=((0, 2),))
    yield ReplayCase(replays=1, more=0, expires=((0, 2),))
    yield ReplayCase(replays=1, lost=1, expires=((0, 1),))
    yield ReplayCase(replays=3, calling=p.adding)
    yield ReplayCase(replays=2, chunks=2, expires=((0, 2),), calling=p.adding)
    yield ReplayCase(replays=2, others=((0, 1), (1, 2)))
    yield ReplayCase(replays=1, destroyed=(0,))
    yield ReplayCase(replays=2, destroyed=(0, 1))
    yield ReplayCase(replays=2, shared=True)
    yield ReplayCase(replays=1, more=1, expires=((1, 2),), destroyed=(0,))
    if full:
        yield ReplayCase(world=3, replays=2, calling=p.adding)
        yield ReplayCase(replays=3, slots=(0, 1), lost=0, expires=((1, 1), (1, 2), (1, 3)), calling=p.adding)
        yield ReplayCase(replays=2, slots=(0, 1), more=1, expires=((1, 3),), calling=p.adding)
        yield ReplayCase(replays=5)
        yield ReplayCase(replays=5, slots=(0, 1))
        yield ReplayCase(replays=4, slots=(0, 1, 1), chunks=2)
        yield ReplayCase(world=3, replays=2)
        yield ReplayCase(replays=3, expires=((0, 1), (1, 2)))
        yield ReplayCase(replays=3, chunks=2, expires=((0, 2),))
        yield ReplayCase(replays=4, slots=(0, 1), expires=((0, 2), (1, 3)))
        yield ReplayCase(replays=2, slots=(0, 1), more=1, expires=((1, 3),))
        yield ReplayCase(replays=3, lost=1, expires=((0, 1), (0, 2), (0, 3)))
        yield ReplayCase(replays=3, slots=(0, 1), lost=0, expires=((1, 1), (1, 2), (1, 3)))
        yield ReplayCase(world=3, replays=1, expires=((0, 1),))
        yield ReplayCase(replays=3, others=((0, 2), (1, 3)))
        yield ReplayCase(replays=2, others=((0, 1), (1, 2)), calling=p.adding)
        yield ReplayCase(world=3, replays=1, others=((2, 1),), calling=p.adding)
        yield ReplayCase(replays=2, chunks=2, destroyed=(0, 1), shared=True, calling=p.adding)
        yield ReplayCase(replays=3, slots=(0, 1), destroyed=(0, 1), shared=True)
        yield ReplayCase(replays=2, expires=((0, 1), (1, 2)), destroyed=(0, 1), shared=True)
        yield ReplayCase(replays=2, lost=1, expires=((0, 1), (0, 2)), destroyed=(0,))


class ReplayModel(RankedModel):
    """See the module. ``m`` has, behind the processes' local states, each rank's words: `sizes`."""

    eager: ClassVar[frozenset[type]] = frozenset({
        p.Mark, p.Push, p.SignalPeer, p.Fork, p.Joined, p.Read, p.Taken, gather.Break, gather.Abort,
    })  # fmt: skip
    delayed: frozenset[type] = frozenset({p.Pushed, p.ReadDone})
    lazy: ClassVar[frozenset[type]] = frozenset({p.AwaitFork, p.AwaitJoin})
    #: A kernel's waits for a peer, in which its patience may end; and what else is answered by 0 or 1.
    waits: ClassVar[frozenset[type]] = frozenset({p.AwaitTaken, p.Gate})
    looks: ClassVar[frozenset[type]] = frozenset({p.Intact, p.Unbroken})
    progress: ClassVar[frozenset[type]] = frozenset({p.Advance})

    def __init__(self, case: ReplayCase, reduce: bool = True) -> None:
        self.case = case
        #: A rank's streams, and its host if one does anything.
        self.roles = 3 if case.destroyed else 2
        turns = []
        for rank in range(case.world):
            for role, text, writes in (("calling stream", case.calling, True), ("side stream", case.side, False)):
                turn = functools.partial(case.turn, text, rank, writes)
                turns.append(Process(f"rank {rank}'s {role}", turn, 1, (role, rank)))
            if case.destroyed:
                host = functools.partial(case.retiring, rank)
                turns.append(Process(f"rank {rank}'s host", host, 1, ("host", rank)))
        self._base, self._size, self._offset = len(turns), 0, {}
        for name, size in self.sizes().items():
            self._offset[name] = self._size
            self._size += size
        super().__init__(turns, reduce)

    def sizes(self) -> dict[str, int]:
        """What a rank's memory holds.

        Whether it is lost, broken, out of patience, has given up; replays begun, handed in, forked and joined, and the
        call of the fork; the caller's tensor; what the push under way carries; the place that the kernel reads; whether
        it has read what it should not; whether its graph is destroyed. By slot: who holds it, its count; by slot and
        peer: marks, taken; by slot, peer and chunk: signals, rows.
        """
        slots, words = max(self.case.slots) + 1, self.case.world
        return {
            "dead": 1, "broken": 1, "late": 1, "gave up": 1, "begun": 1, "handed": 1, "forked": 1, "call": 1,
            "joined": 1, "tensor": 1, "push": 1, "read": 1, "dirty": 1, "destroyed": 1, "held": slots, "count": slots,
            "marks": slots * words, "taken": slots * words, "signals": slots * words * self.case.chunks,
            "rows": slots * words * self.case.chunks,
        }  # fmt: skip

    def at(self, rank: int, name: str, *index: int) -> int:
        """Where a word of a rank is: of a slot; of a slot and a peer; of a slot, a peer and a chunk."""
        sizes = (1, self.case.world, self.case.chunks)[: len(index)]
        place = 0
        for one, size in zip(index, sizes, strict=True):
            place = place * size + one
        return self._base + rank * self._size + self._offset[name] + place

    def memory(self) -> Memory:
        """See `Model.memory`. All hosts have prepared: ranks meet in the eager call that makes a slot."""
        m = [0] * (self._base + self._size * self.case.world)
        for rank in range(self.case.world):
            for slot in range(max(self.case.slots) + 1):
                at = self.at(rank, "held", slot)
                for op in self.case.prepare(rank, self.case.world, slot):
                    if type(op) is p.Reserve:
                        m[at] |= _QUEUE if op.where == p.OUTSIDE else _GRAPH
                    elif type(op) is p.Keep:
                        m[at] |= _GRAPH if op.until == p.GRAPH else _PROCESS
        return m[self._base :]

    def canonical(self, state: State) -> State:
        """See `Model.canonical`: of a rank that is lost nothing matters."""
        lost = self.case.lost
        if lost is None or not state[self.at(lost, "dead")]:
            return state
        m = list(state)
        m[self.roles * lost : self.roles * lost + self.roles] = [LEFT] * self.roles
        first = self._base + lost * self._size
        m[first : first + self._size] = [0] * self._size
        m[self.at(lost, "dead")] = 1
        return tuple(m)

    # Answers --------------------------------------------------------------------------------------------------------

    def domain(self, op: Any, past: Any) -> Sequence[Any]:
        """See `Model.domain`."""
        if type(op) in (p.Advance, p.AwaitFork):
            return range(1, self.case.replays + 2)
        return (0, 1) if type(op) in self.waits | self.looks else (0,)

    def _advance_count(self, rank: int, op: p.Advance, m: Memory) -> Sequence[int]:
        return (m[self.at(rank, "count", op.slot)] + 1,)

    def _await_taken(self, rank: int, op: p.AwaitTaken, m: Memory) -> Sequence[int]:
        return self._wait(rank, m[self.at(rank, "taken", op.slot, op.peer)] >= op.call, m)

    def _gate(self, rank: int, op: p.Gate, m: Memory) -> Sequence[int]:
        return self._wait(rank, m[self.at(rank, "signals", op.slot, op.peer, op.chunk)] != 0, m)

    def _wait(self, rank: int, there: bool, m: Memory) -> Sequence[int]:
        """A kernel's wait. What is there and what ends the wait are looked at one after the other: either may win."""
        over = m[self.at(rank, "broken")] or m[self.at(rank, "late")]
        return (*((1,) if there else ()), *((0,) if over else ()))

    def _await_fork(self, rank: int, op: p.AwaitFork, m: Memory) -> Sequence[int]:
        return (m[self.at(rank, "call")],) if m[self.at(rank, "forked")] >= op.replay else ()

    def _await_join(self, rank: int, op: p.AwaitJoin, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "joined")] >= op.replay else ()

    def _unbroken(self, rank: int, op: p.Unbroken, m: Memory) -> Sequence[int]:
        return (int(not m[self.at(rank, "broken")]),)

    def _intact(self, rank: int, op: p.Intact, m: Memory) -> Sequence[int]:
        marks = (m[self.at(rank, "marks", op.slot, peer)] for peer in gather.peers(rank, self.case.world))
        own = op.call + self._form_named(rank, m[self.at(rank, "begun")])
        return (int(all(mark == own for mark in marks)),)

    def _form_named(self, rank: int, replay: int) -> int:
        """What a mark says of the form."""
        return self.case.form_of(rank, replay) if self.case.names_form else 0

    asked: ClassVar[dict[type, Asked]] = {
        p.Advance: _advance_count, p.AwaitTaken: _await_taken, p.Gate: _gate, p.AwaitFork: _await_fork,
        p.AwaitJoin: _await_join, p.Intact: _intact, p.Unbroken: _unbroken,
    }  # fmt: skip

    # Memory that has been freed ---------------------------------------------------------------------------------------

    def _use(self, rank: int, slot: int, m: Memory) -> None:
        """Raise `Fault` if a rank's slot has been freed. A lost rank's is not, while a peer has it mapped."""
        held = m[self.at(rank, "held", slot)]
        if held & _GRAPH and self._graph_is_gone(rank, m):
            held &= ~_GRAPH
        if not held and not m[self.at(rank, "dead")]:
            raise Fault("freed memory", f"rank {rank}'s slot {slot} has been freed, and is used")

    def _use_tensor(self, rank: int, m: Memory) -> None:
        """Likewise of what a rank pushes, which is of its graph's pool."""
        if self._graph_is_gone(rank, m):
            raise Fault("freed memory", f"rank {rank} pushes from a pool that has been freed")

    def _graph_is_gone(self, rank: int, m: Memory) -> bool:
        """Whether a rank's graph is destroyed, and its last replay has ended there."""
        return bool(m[self.at(rank, "destroyed")]) and m[self.roles * rank] == LEFT

    def _let_go(self, rank: int, op: p.LetGo, answer: int, m: Memory) -> None:
        m[self.at(rank, "held", op.slot)] &= ~_QUEUE

    def _destroy(self, rank: int, op: p.Destroy, answer: int, m: Memory) -> None:
        m[self.at(rank, "destroyed")] = 1

    def _run_other_graph(self, rank: int, m: Memory) -> None:
        """Another graph of the pool writes to what nothing outside of the pool holds."""
        for slot in range(max(self.case.slots) + 1):
            if m[self.at(rank, "held", slot)] == _GRAPH:
                for peer in gather.peers(rank, self.case.world):
                    for chunk in range(self.case.chunks):
                        self._write(rank, self.at(rank, "rows", slot, peer, chunk), OVERWRITTEN, m)
                        m[self.at(rank, "signals", slot, peer, chunk)] = 1

    # What operations do ---------------------------------------------------------------------------------------------

    def _write_tensor(self, rank: int, op: Write, answer: int, m: Memory) -> None:
        m[self.at(rank, "begun")] = op.replay
        m[self.at(rank, "tensor")] = op.replay + self.case.form_of(rank, op.replay)
        m[self.at(rank, "dirty")] = 0
        if m[self.at(rank, "push")]:
            m[self.at(rank, "push")] = OVERWRITTEN
        if self.case.shared:
            self._run_other_graph(rank, m)

    def _count(self, rank: int, op: p.Advance, answer: int, m: Memory) -> None:
        self._use(rank, op.slot, m)
        m[self.at(rank, "count", op.slot)] = answer

    def _fork(self, rank: int, op: p.Fork, answer: int, m: Memory) -> None:
        m[self.at(rank, "forked")], m[self.at(rank, "call")] = op.replay, op.call

    def _joined(self, rank: int, op: p.Joined, answer: int, m: Memory) -> None:
        m[self.at(rank, "joined")] = op.replay

    def _mark(self, rank: int, op: p.Mark, answer: int, m: Memory) -> None:
        self._use(op.peer, op.slot, m)
        m[self.at(op.peer, "marks", op.slot, rank)] = op.call + self._form_named(rank, m[self.at(rank, "forked")])

    def _taken(self, rank: int, op: p.Taken, answer: int, m: Memory) -> None:
        self._use(op.peer, op.slot, m)
        m[self.at(op.peer, "taken", op.slot, rank)] = op.call

    def _write(self, rank: int, place: int, value: int, m: Memory) -> None:
        """Write rows of ``rank``'s; what its kernel reads of them then is not what it should be."""
        m[place] = value
        if m[self.at(rank, "read")] == place:
            m[self.at(rank, "dirty")] = m[self.at(rank, "dirty")] or OVERWRITTEN

    def _push(self, rank: int, op: p.Push, answer: int, m: Memory) -> None:
        self._use_tensor(rank, m)
        self._use(op.peer, op.slot, m)
        m[self.at(rank, "push")] = m[self.at(rank, "tensor")]
        self._write(op.peer, self.at(op.peer, "rows", op.slot, rank, op.chunk), TORN, m)

    def _pushed(self, rank: int, op: p.Pushed, answer: int, m: Memory) -> None:
        self._use_tensor(rank, m)
        self._use(op.peer, op.slot, m)
        self._write(op.peer, self.at(op.peer, "rows", op.slot, rank, op.chunk), m[self.at(rank, "push")], m)
        m[self.at(rank, "push")] = 0

    def _signal(self, rank: int, op: p.SignalPeer, answer: int, m: Memory) -> None:
        self._use(op.peer, op.slot, m)
        m[self.at(op.peer, "signals", op.slot, rank, op.chunk)] = 1

    def _clear(self, rank: int, op: p.Clear, answer: int, m: Memory) -> None:
        self._use(rank, op.slot, m)
        first = self.at(rank, "signals", op.slot, 0, 0)
        count = self.case.world * self.case.chunks
        m[first : first + count] = [0] * count

    def _read(self, rank: int, op: p.Read, answer: int, m: Memory) -> None:
        self._use(rank, op.slot, m)
        place = self.at(rank, "rows", op.slot, op.peer, op.chunk)
        m[self.at(rank, "read")] = place
        value, due = m[place], m[self.at(rank, "begun")] + self.case.form_of(rank, m[self.at(rank, "begun")])
        if value != due and not m[self.at(rank, "dirty")]:
            m[self.at(rank, "dirty")] = OVERWRITTEN if value == OVERWRITTEN or value > due else TORN

    def _read_done(self, rank: int, op: p.ReadDone, answer: int, m: Memory) -> None:
        m[self.at(rank, "read")] = 0

    def _hand_in(self, rank: int, op: p.HandIn, answer: int, m: Memory) -> None:
        m[self.at(rank, "handed")] = op.replay
        if dirty := m[self.at(rank, "dirty")]:
            kind = "overwritten while read" if dirty == OVERWRITTEN else "read before arrival"
            raise Fault(kind, f"rank {rank} hands in replay {op.replay}, made of rows of another call")

    def _waited(self, rank: int, op: Any, answer: int, m: Memory) -> None:
        if answer:  # it came while the deadline passed
            m[self.at(rank, "late")] = 0
        elif not m[self.at(rank, "broken")]:
            m[self.at(rank, "gave up")] = 1

    def _break(self, rank: int, op: gather.Break, answer: int, m: Memory) -> None:
        m[self.at(rank, "broken")] = 1

    def _abort(self, rank: int, op: gather.Abort, answer: int, m: Memory) -> None:
        self._use(op.peer, 0, m)
        m[self.at(op.peer, "broken")] = 1

    performed: ClassVar[dict[type, Does]] = {
        Write: _write_tensor, p.Advance: _count, p.Fork: _fork, p.Joined: _joined, p.Mark: _mark, p.Taken: _taken,
        p.Push: _push, p.Pushed: _pushed, p.SignalPeer: _signal, p.Read: _read, p.ReadDone: _read_done,
        p.Clear: _clear, p.HandIn: _hand_in, p.AwaitTaken: _waited, p.Gate: _waited, gather.Break: _break,
        gather.Abort: _abort, p.LetGo: _let_go, p.Destroy: _destroy,
    }  # fmt: skip

    # The world outside, and ends ------------------------------------------------------------------------------------

    def impatient(self, rank: int, m: Memory) -> list[tuple[str, Memory]]:
        """See `RankedModel.impatient`: patience ends at a wait."""
        op: Any = self.locals.op[m[self.roles * rank]]
        late = (rank, m[self.at(rank, "begun")]) in self.case.expires and not m[self.at(rank, "late")]
        if not late or type(op) not in self.waits:
            return []
        n = m.copy()
        n[self.at(rank, "late")] = 1
        return [(f"rank {rank} is out of patience", n)]

    def all_have_left(self, alive: list[int], m: Memory) -> None:
        """See `RankedModel.all_have_left`."""
        short = [rank for rank in alive if m[self.at(rank, "handed")] < self.case.replays_of(rank)]
        gave_up = [rank for rank in alive if m[self.at(rank, "gave up")]] or (short if self.case.others else [])
        for rank in alive:
            if gave_up and not m[self.at(rank, "broken")]:
                raise Fault("not told", f"rank {gave_up[0]} has given up, and rank {rank} does not know")
            if rank in short and (not gave_up or not (self.case.expires or self.case.others)):
                raise Fault("missing work", f"rank {rank} has handed in {m[self.at(rank, 'handed')]} replays")
