"""Model 4: the ranks of a gather, their streams, hosts and watchdogs, over slots, flags, signals and abort words.

Explored is the text of `tilestream.distributed.protocol`, as GPUs perform it. A rank is four processes: the host, which
issues calls ahead of the device; the calling stream, kernel included; the side stream; and the watchdog. Calls may also
come from two streams in turn, which know nothing of each other. A copy has a begin and an end, and anything may come
between.

The world outside may make a kernel that waits expire (``expires``: also one whose peers are only late), and may take a
rank away for good, at any moment, in the middle of a copy too (``lost``).

What must hold: a kernel reads of each chunk the data of its own epoch and no other, whole, or it hands in NaN; nobody
is ever stuck for good, the ranks that have lost a peer included; where no kernel has expired all calls are done; where
one has, every rank that is left is told.

Reductions, and why they hide nothing:

- *Filled, Pulled, ReadDone* are delayed to the operation after them: a copy that takes longer can be disturbed longer.
- *Fill, Pull, Read* are eager: a copy that begins at once can be disturbed longer, and sees what was there at first.
- *Signal, Post, Done, Ended* are eager: they make others go on, and take no behaviour away. What could come between
  one of them and the end of the copy before it can come before both. So it is with *Break*, *Overrule* and *Release*
  and the look before them, which changes nothing.
- *Issued, AwaitCall, AwaitPost* are lazy: they wait for what, once it is there, stays, and change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from tilestream.distributed import protocol as p
from tilestream.verify.faults import Fault
from tilestream.verify.model import Memory, Model, State
from tilestream.verify.processes import LEFT, Process

#: What a place holds that is no epoch: half a copy; a copy out of a slot that was filled again meanwhile.
TORN, OVERWRITTEN = -1, -2

Turn = Generator[Any, int, "int | None"]
#: ``(model, rank, operation, memory)`` to the possible answers.
_Asked = Callable[[Any, int, Any, Memory], Sequence[int]]


class Issued(NamedTuple):
    """A stream: wait until the host has issued ``epoch``. Answer: 0 where it never will."""

    epoch: int


class Gate(NamedTuple):
    """The kernel's gate. Answer: 1 arrived, 0 the launch is over."""

    rank: int
    chunk: int
    epoch: int


class Read(NamedTuple):
    """The kernel starts reading a chunk of what was gathered."""

    rank: int
    chunk: int
    epoch: int


class ReadDone(NamedTuple):
    """It has read it."""

    rank: int
    chunk: int
    epoch: int


class Ended(NamedTuple):
    """The kernel of ``epoch`` has ended."""

    epoch: int


@dataclass(frozen=True)
class GatherCase:
    """One configuration of model 4.

    Attributes
    ----------
    world, chunks, epochs
        Ranks, chunks of a shard, calls.
    expires
        Which kernels may expire, as (rank, epoch).
    lost
        Which rank may be lost; None: none.
    slots
        Slots of a rank, as the text that is run has them.
    streams
        Calling streams, which take the calls in turn.
    begin, publish, gather, watch
        The text.
    """

    world: int = 2
    chunks: int = 1
    epochs: int = 3
    expires: tuple[tuple[int, int], ...] = ()
    lost: int | None = None
    slots: int = p.SLOTS
    streams: int = 1
    begin: Callable[[int], Turn] = p.begin
    publish: Callable[[int, int, int], Turn] = p.publish
    gather: Callable[[int, int, int, int], Turn] = p.gather
    watch: Callable[[int, int], Turn] = p.watch

    def build(self, reduce: bool = True, symmetry: bool = True) -> GatherModel:
        """The model of this configuration."""
        return GatherModel(self, reduce)

    def calling(self, rank: int, epoch: int) -> Turn:
        """A turn of a calling stream: a call."""
        return calling(self, rank, epoch)

    def side(self, rank: int, epoch: int) -> Turn:
        """A turn of the side stream: a call."""
        return side(self, rank, epoch)

    def sizes(self) -> dict[str, int]:
        """What a rank's memory holds beside `_FIELDS`."""
        shards = self.world * self.chunks
        # Last: what each stream's kernel is reading.
        return {
            "flags": self.world, "signals": shards, "slots": self.slots * self.chunks, "gathered": shards,
            "read": self.streams,
        }  # fmt: skip

    def __str__(self) -> str:
        words = [f"{self.world} ranks, {self.chunks} chunks a shard, {self.epochs} calls, {self.slots} slots"]
        words += [f"rank {rank}'s kernel of call {epoch} may expire" for rank, epoch in self.expires]
        words += [f"from {self.streams} streams in turn"] if self.streams > 1 else []
        words += [f"rank {self.lost} may be lost"] if self.lost is not None else []
        return ", ".join([*words, *self.changed()])

    def changed(self) -> list[str]:
        """The names of the texts that are not the real ones."""
        given = ((field.default, getattr(self, field.name)) for field in fields(self))
        return [text.__name__ for own, text in given if callable(own) and text is not own]


def host(case: GatherCase, epoch: int) -> Turn:
    """The host issues the calls, one after the other."""
    begun = yield from case.begin(epoch)
    return epoch + 1 if begun is not None and epoch < case.epochs else None


def calling(case: GatherCase, rank: int, epoch: int) -> Turn:
    """The calling stream: what comes before the kernel, and the kernel, which reads one's own rows first."""
    if not (yield Issued(epoch)):
        return None
    yield from case.publish(rank, case.chunks, epoch)
    for peer in (rank, *p.peers(rank, case.world)):
        for chunk in range(case.chunks):
            if not (yield Gate(peer, chunk, epoch)):
                break
            yield Read(peer, chunk, epoch)
            yield ReadDone(peer, chunk, epoch)
    yield Ended(epoch)
    return epoch + case.streams if epoch + case.streams <= case.epochs else None


def side(case: GatherCase, rank: int, epoch: int) -> Turn:
    """The side stream."""
    if not (yield Issued(epoch)):
        return None
    yield from case.gather(rank, case.world, case.chunks, epoch)
    return epoch + 1 if epoch < case.epochs else None


#: What a rank's memory begins with: what its host and streams have come to, by epoch, and what was said to it.
_FIELDS = ("issued", "posted", "sided", "ended", "over", "broken", "expired", "abort", "dead", "pull")


class GatherModel(Model):
    """See the module. A rank's memory: `_FIELDS`, then its flags, signals, slots and what it has gathered."""

    eager: ClassVar[frozenset[type]] = frozenset(
        {p.Fill, p.Pull, p.Signal, p.Post, p.Done, p.Break, p.Overrule, p.Release, Read, Ended}
    )
    delayed: frozenset[type] = frozenset({p.Filled, p.Pulled, ReadDone})
    lazy: ClassVar[frozenset[type]] = frozenset({Issued, p.AwaitCall, p.AwaitPost})
    progress: ClassVar[frozenset[type]] = frozenset({p.Begin})

    def __init__(self, case: GatherCase, reduce: bool = True) -> None:
        self.case = case
        streams = [f"calling stream {i}" if case.streams > 1 else "calling stream" for i in range(case.streams)]
        roles = ("host", *streams, "side stream", "watchdog")
        self._roles = len(roles)
        turns: list[Process] = []
        for rank in range(case.world):
            programs: list[tuple[Callable[[Any], Turn], int]] = [
                (lambda epoch: host(case, epoch), 1),
                *((lambda epoch, rank=rank: case.calling(rank, epoch), 1 + i) for i in range(case.streams)),
                (lambda epoch, rank=rank: case.side(rank, epoch), 1),  # type: ignore[misc]
                (lambda _, rank=rank: case.watch(rank, case.world), 0),  # type: ignore[misc]
            ]
            turns += [
                Process(f"rank {rank}'s {role}", turn, start, (role, rank))
                for role, (turn, start) in zip(roles, programs, strict=True)
            ]
        self._offset = {name: i for i, name in enumerate(_FIELDS)}
        at = len(_FIELDS)
        for name, size in case.sizes().items():
            self._offset[name] = at
            at += size
        self._size, self._base = at, len(turns)
        super().__init__(turns, reduce)

    def memory(self) -> Memory:
        """As `Model.memory`."""
        return [0] * (self._size * self.case.world)

    def at(self, rank: int, name: str, index: int = 0) -> int:
        """Where a word of a rank is."""
        return self._base + rank * self._size + self._offset[name] + index

    def shard(self, rank: int, chunk: int) -> int:
        """The place of a chunk among all ranks'."""
        return rank * self.case.chunks + chunk

    def canonical(self, state: State) -> State:
        """As `Model.canonical`: of a rank that is lost nothing matters but what its peers may still pull."""
        lost = self.case.lost
        if lost is None or not state[self.at(lost, "dead")]:
            return state
        m = list(state)
        first = self._roles * lost
        m[first : first + self._roles] = [LEFT] * self._roles
        for at in range(self.at(lost, "issued"), self.at(lost, "issued") + self._size):
            if not self.at(lost, "slots") <= at < self.at(lost, "gathered") and at != self.at(lost, "dead"):
                m[at] = 0
        return tuple(m)

    # Answers --------------------------------------------------------------------------------------------------------

    def domain(self, op: Any, past: Any) -> Sequence[Any]:
        """As `Model.domain`."""
        if type(op) is p.Oldest:
            return range(self.case.epochs + 1)
        return (0, 1) if type(op) in self._asked else (0,)

    def answers_of(self, op: Any) -> Callable[[int, Any, Memory], Sequence[Any]] | None:
        """As `Model.answers_of`: nothing is done by a rank that is lost."""
        ask: _Asked = self._asked.get(type(op), GatherModel._always)

        def answers(pid: int, op: Any, m: Memory) -> Sequence[Any]:
            rank = pid // self._roles
            return () if m[self.at(rank, "dead")] else ask(self, rank, op, m)

        return answers

    def _always(self, rank: int, op: Any, m: Memory) -> Sequence[int]:
        return (0,)

    def _begin(self, rank: int, op: p.Begin, m: Memory) -> Sequence[int]:
        if m[self.at(rank, "broken")]:
            return (0,)
        return (1,) if m[self.at(rank, "sided")] >= op.after else ()

    def _issued(self, rank: int, op: Issued, m: Memory) -> Sequence[int]:
        if m[self.at(rank, "issued")] >= op.epoch:
            return (1,)
        return (0,) if m[rank * self._roles] == LEFT else ()

    def _await_call(self, rank: int, op: p.AwaitCall, m: Memory) -> Sequence[int]:
        return (0,) if min(m[self.at(rank, "sided")], m[self.at(rank, "ended")]) >= op.epoch else ()

    def _await_post(self, rank: int, op: p.AwaitPost, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "posted")] >= op.epoch else ()

    def _await_flag(self, rank: int, op: p.AwaitFlag, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "flags", op.peer)] >= op.epoch else ()

    def _gate(self, rank: int, op: Gate, m: Memory) -> Sequence[int]:
        arrived = (1,) if m[self.at(rank, "signals", self.shard(op.rank, op.chunk))] >= op.epoch else ()
        return (*arrived, 0) if m[self.at(rank, "over")] >= op.epoch else arrived

    def _notice(self, rank: int, op: p.Notice, m: Memory) -> Sequence[int]:
        if m[self.at(rank, "expired")] or m[self.at(rank, "abort")]:
            return (1,)
        first = rank * self._roles
        return (0,) if all(local == LEFT for local in m[first : first + self._roles - 1]) else ()

    def _oldest(self, rank: int, op: p.Oldest, m: Memory) -> Sequence[int]:
        sided = m[self.at(rank, "sided")]
        return (sided + 1,) if m[self.at(rank, "issued")] > sided else (0,)

    def _await_kernel(self, rank: int, op: p.AwaitKernel, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "ended")] >= op.epoch else ()

    def _await_done(self, rank: int, op: p.AwaitDone, m: Memory) -> Sequence[int]:
        if m[self.at(rank, "sided")] >= op.epoch:
            return (1,)
        waits = self.locals.op[m[(rank + 1) * self._roles - 2]]
        stuck = type(waits) is p.AwaitFlag and not self._await_flag(rank, waits, m)
        return (0,) if stuck else ()

    def _release_answers(self, rank: int, op: p.Release, m: Memory) -> Sequence[int]:
        # 1: a flag that came between the look and the write is overwritten.
        return (0, 1)

    _asked: ClassVar[dict[type, _Asked]] = {
        p.Begin: _begin, Issued: _issued, p.AwaitCall: _await_call, p.AwaitPost: _await_post,
        p.AwaitFlag: _await_flag, Gate: _gate, p.Notice: _notice, p.Oldest: _oldest, p.AwaitKernel: _await_kernel,
        p.AwaitDone: _await_done, p.Release: _release_answers,
    }  # fmt: skip

    # What operations do ---------------------------------------------------------------------------------------------

    def performer_of(self, op: Any) -> Callable[[int, Any, Any, Memory], None] | None:
        """As `Model.performer_of`."""
        done = self._does.get(type(op))
        if done is None:
            return None
        return lambda pid, op, answer, m: done(self, pid // self._roles, op, answer, m)

    def _set_issued(self, rank: int, op: p.Begin, answer: int, m: Memory) -> None:
        if answer:
            m[self.at(rank, "issued")] = op.epoch

    def _fill(self, rank: int, op: p.Fill, answer: int, m: Memory) -> None:
        for chunk in range(self.case.chunks):
            m[self.at(rank, "slots", op.slot * self.case.chunks + chunk)] = TORN
            self._write(rank, rank, chunk, TORN, m)
        for peer in range(self.case.world):
            pull = m[self.at(peer, "pull")]
            if pull and pull[:2] == (rank, op.slot):
                m[self.at(peer, "pull")] = (*pull[:3], OVERWRITTEN)

    def _filled(self, rank: int, op: p.Filled, answer: int, m: Memory) -> None:
        for chunk in range(self.case.chunks):
            m[self.at(rank, "slots", op.slot * self.case.chunks + chunk)] = op.epoch
            self._write(rank, rank, chunk, op.epoch, m)

    def _write(self, rank: int, source: int, chunk: int, value: int, m: Memory) -> None:
        """Write a chunk to what ``rank`` has gathered."""
        reads = self.at(rank, "read")
        if (source, chunk) in m[reads : reads + self.case.streams]:
            raise Fault("overwritten while read", f"rank {rank}'s kernel reads chunk {chunk} of rank {source}'s shard")
        m[self.at(rank, "gathered", self.shard(source, chunk))] = value

    def _post(self, rank: int, op: p.Post, answer: int, m: Memory) -> None:
        m[self.at(rank, "posted")] = op.epoch

    def _tell(self, rank: int, op: p.Tell, answer: int, m: Memory) -> None:
        m[self.at(op.peer, "flags", rank)] = op.epoch

    def _pull(self, rank: int, op: p.Pull, answer: int, m: Memory) -> None:
        value = m[self.at(op.peer, "slots", op.slot * self.case.chunks + op.chunk)]
        m[self.at(rank, "pull")] = (op.peer, op.slot, op.chunk, value)
        self._write(rank, op.peer, op.chunk, TORN, m)

    def _pulled(self, rank: int, op: p.Pulled, answer: int, m: Memory) -> None:
        self._write(rank, op.peer, op.chunk, m[self.at(rank, "pull")][3], m)
        m[self.at(rank, "pull")] = 0

    def _signal(self, rank: int, op: p.Signal, answer: int, m: Memory) -> None:
        m[self.at(rank, "signals", self.shard(op.rank, op.chunk))] = op.epoch

    def _done(self, rank: int, op: p.Done, answer: int, m: Memory) -> None:
        m[self.at(rank, "sided")] = op.epoch

    def _read(self, rank: int, op: Read, answer: int, m: Memory) -> None:
        value = m[self.at(rank, "gathered", self.shard(op.rank, op.chunk))]
        what = f"rank {rank}'s kernel of call {op.epoch} reads chunk {op.chunk} of rank {op.rank}'s shard"
        if value == OVERWRITTEN or value > op.epoch:
            raise Fault("overwritten while read", f"{what}, which that rank wrote over while it was pulled")
        if value != op.epoch:
            raise Fault("read before arrival", f"{what}, and has {'half of it' if value < 0 else f'that of {value}'}")
        m[self._reader(rank, op.epoch)] = (op.rank, op.chunk)

    def _read_done(self, rank: int, op: ReadDone, answer: int, m: Memory) -> None:
        m[self._reader(rank, op.epoch)] = 0

    def _reader(self, rank: int, epoch: int) -> int:
        return self.at(rank, "read", (epoch - 1) % self.case.streams)

    def _ended(self, rank: int, op: Ended, answer: int, m: Memory) -> None:
        m[self.at(rank, "ended")] = max(m[self.at(rank, "ended")], op.epoch)

    def _break(self, rank: int, op: p.Break, answer: int, m: Memory) -> None:
        m[self.at(rank, "broken")] = 1

    def _abort(self, rank: int, op: p.Abort, answer: int, m: Memory) -> None:
        m[self.at(op.peer, "abort")] = 1

    def _overrule(self, rank: int, op: p.Overrule, answer: int, m: Memory) -> None:
        m[self.at(rank, "over")] = max(m[self.at(rank, "over")], op.epoch)

    def _release(self, rank: int, op: p.Release, answer: int, m: Memory) -> None:
        for peer in p.peers(rank, self.case.world):
            flag = self.at(rank, "flags", peer)
            m[flag] = op.epoch if answer else max(m[flag], op.epoch)

    _does: ClassVar[dict[type, Callable[[Any, int, Any, int, Memory], None]]] = {
        p.Begin: _set_issued, p.Fill: _fill, p.Filled: _filled, p.Post: _post, p.Tell: _tell, p.Pull: _pull,
        p.Pulled: _pulled, p.Signal: _signal, p.Done: _done, Read: _read, ReadDone: _read_done, Ended: _ended,
        p.Break: _break, p.Abort: _abort, p.Overrule: _overrule, p.Release: _release,
    }  # fmt: skip

    # The world outside, and ends ------------------------------------------------------------------------------------

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """As `Model.environment`."""
        out: list[tuple[str, Memory]] = []
        for rank in range(self.case.world):
            if m[self.at(rank, "dead")]:
                continue
            for stream in range(self.case.streams):
                waits = self.locals.op[m[rank * self._roles + 1 + stream]]
                may = type(waits) is Gate and (rank, waits.epoch) in self.case.expires
                if may and not self._gate(rank, waits, m):
                    n = m.copy()
                    n[self.at(rank, "over")], n[self.at(rank, "expired")] = waits.epoch, 1
                    out.append((f"rank {rank}'s kernel of call {waits.epoch} expires", n))
            if rank == self.case.lost:
                n = m.copy()
                n[self.at(rank, "dead")], n[self.at(rank, "pull")] = 1, 0
                out.append((f"rank {rank} is lost", n))
        return out

    def at_rest(self, m: Memory) -> None:
        """As `Model.at_rest`."""
        alive = [rank for rank in range(self.case.world) if not m[self.at(rank, "dead")]]
        roles = range(self._roles)
        here = [pid for rank in alive for pid in (self._roles * rank + role for role in roles) if m[pid] != LEFT]
        if here:
            if not self.environment(m):
                stuck = (f"{self.processes[pid].name} at {say(self.locals.op[m[pid]])}" for pid in here)
                raise Fault("deadlock", "; ".join(stuck))
            return
        gave_up = [rank for rank in alive if m[self.at(rank, "expired")]]
        for rank in alive:
            if gave_up and not (m[self.at(rank, "expired")] or m[self.at(rank, "abort")]):
                raise Fault("not told", f"rank {gave_up[0]} has given up, and rank {rank} does not know")
            if not m[self.at(rank, "broken")] and m[self.at(rank, "ended")] < self.case.epochs:
                raise Fault("missing work", f"rank {rank} has left after {m[self.at(rank, 'ended')]} calls")

    def tell(self, pid: int, op: Any, answer: Any) -> str:
        """As `Model.tell`."""
        after = f" -> {answer}" if type(op) in self._asked and len(self.domain(op, None)) > 1 else ""
        return f"{self.processes[pid].name}: {say(op)}{after}"


def say(op: Any) -> str:
    """An operation in a trace."""
    return f"{type(op).__name__.lower()}({', '.join(f'{name} {value}' for name, value in op._asdict().items())})"
