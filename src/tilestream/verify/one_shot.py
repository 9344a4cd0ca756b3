"""Model 9: ranks that reduce a few rows in one shot, each reading all others' slots: hosts, streams and watchdogs.

Explored are `tilestream.distributed.one_shot_protocol.reduce` and the watchdog that it shares with sums
(`tilestream.distributed.protocol.watch`), over several calls, with ranks that lose patience or are lost. A host issues
a call when at most one is under way before it, and none in a group that it knows to be broken.

What must hold: whoever adds, and was not overruled, finds every rank's product of his call in its slot, and nobody
writes there until he has done so; nobody waits for ever; and where one has given up, all know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tilestream.distributed import one_shot_protocol as text
from tilestream.distributed import protocol as p
from tilestream.verify.faults import Fault
from tilestream.verify.model import Memory, Model
from tilestream.verify.processes import LEFT, Process


class Issue(NamedTuple):
    """Host: issue ``epoch`` (1), or leave, the group being broken (0); once ``after`` has been heard of by all."""

    epoch: int
    after: int


class Issued(NamedTuple):
    """Calling stream: wait until ``epoch`` is issued (1), or the host has left (0)."""

    epoch: int


@dataclass(frozen=True)
class OneShotCase:
    """One configuration of model 9.

    Attributes
    ----------
    world, epochs
        Ranks, and calls.
    expires
        Which calls' patience may end, as (rank, epoch).
    lost
        Which rank may be lost; None: none.
    slots, ahead
        As the text has them: `tilestream.distributed.protocol`.
    reduce, watch
        The text.
    """

    world: int = 2
    epochs: int = 3
    expires: tuple[tuple[int, int], ...] = ()
    lost: int | None = None
    slots: int = p.SLOTS
    ahead: int = p.AHEAD
    reduce: Callable[[int, int, int], text.Turn] = text.reduce
    watch: Callable[[int, int], Any] = p.watch

    def build(self, reduce: bool = True, symmetry: bool = True) -> OneShotModel:
        """The model of this configuration."""
        return OneShotModel(self, reduce)

    def __str__(self) -> str:
        words = [f"{self.world} ranks, {self.epochs} calls, {self.slots} slots, {self.ahead} ahead"]
        words += [f"rank {rank} may lose patience in call {epoch}" for rank, epoch in self.expires]
        words += [f"rank {self.lost} may be lost"] if self.lost is not None else []
        words += [own.__name__ for own, real in ((self.reduce, text.reduce), (self.watch, p.watch)) if own is not real]
        return ", ".join(words)


def configurations(full: bool) -> Iterator[OneShotCase]:
    """2 ranks, and 3 once. Full: more calls, patience that ends anywhere, and ranks lost."""
    for epochs in (1, 2, 3):
        yield OneShotCase(epochs=epochs)
    yield OneShotCase(world=3, epochs=1)
    yield OneShotCase(epochs=1, expires=((0, 1),), lost=1)
    yield OneShotCase(epochs=2, expires=((0, 2),))
    if full:
        yield OneShotCase(epochs=5)
        yield OneShotCase(world=3, epochs=2)
        yield OneShotCase(epochs=2, expires=((0, 1), (1, 2)))
        yield OneShotCase(epochs=3, expires=((0, 2),))
        yield OneShotCase(epochs=2, expires=((0, 1), (0, 2)), lost=1)
        yield OneShotCase(epochs=4, expires=((0, 2), (1, 2)))
        yield OneShotCase(epochs=3, expires=((0, 1), (0, 2), (0, 3)), lost=1)


def host(case: OneShotCase, epoch: int) -> text.Turn:
    """The host issues the calls, one after the other."""
    issued = yield Issue(epoch, epoch - case.ahead - 1)
    return epoch + 1 if issued and epoch < case.epochs else None


def calling(case: OneShotCase, rank: int, epoch: int) -> text.Turn:
    """The calling stream."""
    if not (yield Issued(epoch)):
        return None
    yield from case.reduce(rank, case.world, epoch)
    return epoch + 1 if epoch < case.epochs else None


#: What a rank's memory begins with: what its host and stream have come to, by epoch, and what was said to it.
_FIELDS = ("issued", "multiplied", "heard", "added", "adding", "over", "broken", "expired", "abort", "dead")
_ROLES = ("host", "calling stream", "watchdog")
_Asked = Callable[["OneShotModel", int, Any, Memory], Sequence[int]]


class OneShotModel(Model):
    """See the module. A rank's memory: `_FIELDS`, then its flags and its slots."""

    progress: ClassVar[frozenset[type]] = frozenset({Issue})

    def __init__(self, case: OneShotCase, reduce: bool = True) -> None:
        self.case = case
        turns: list[Process] = []
        for rank in range(case.world):
            programs: tuple[tuple[Callable[[Any], Any], int], ...] = (
                (lambda epoch: host(case, epoch), 1),
                (lambda epoch, rank=rank: calling(case, rank, epoch), 1),  # type: ignore[misc]
                (lambda _, rank=rank: case.watch(rank, case.world), 0),  # type: ignore[misc]
            )
            turns += [
                Process(f"rank {rank}'s {role}", turn, start, (role, rank))
                for role, (turn, start) in zip(_ROLES, programs, strict=True)
            ]
        self._base, self._size = len(turns), len(_FIELDS) + case.world + case.slots
        super().__init__(turns, reduce)

    def memory(self) -> Memory:
        """As `Model.memory`."""
        return [0] * (self._size * self.case.world)

    def at(self, rank: int, name: str, index: int = 0) -> int:
        """Where a word of a rank is."""
        fields = {**{name: i for i, name in enumerate(_FIELDS)}, "flags": len(_FIELDS)}
        fields["slots"] = fields["flags"] + self.case.world
        return self._base + rank * self._size + fields[name] + index

    # Answers --------------------------------------------------------------------------------------------------------

    def domain(self, op: Any, past: Any) -> Sequence[Any]:
        """As `Model.domain`."""
        if type(op) is p.Oldest:
            return range(self.case.epochs + 1)
        return (0, 1) if type(op) in (Issue, Issued, p.Notice, p.AwaitDone, p.Release) else (0,)

    def answers_of(self, op: Any) -> Callable[[int, Any, Memory], Sequence[Any]] | None:
        """As `Model.answers_of`: nothing is done by a rank that is lost."""
        ask = self._asked.get(type(op))

        def answers(pid: int, op: Any, m: Memory) -> Sequence[Any]:
            rank = pid // len(_ROLES)
            if m[self.at(rank, "dead")]:
                return ()
            return (0,) if ask is None else ask(self, rank, op, m)

        return answers

    def _issue(self, rank: int, op: Issue, m: Memory) -> Sequence[int]:
        if m[self.at(rank, "broken")]:
            return (0,)
        return (1,) if m[self.at(rank, "heard")] >= op.after else ()

    def _issued(self, rank: int, op: Issued, m: Memory) -> Sequence[int]:
        if m[self.at(rank, "issued")] >= op.epoch:
            return (1,)
        return (0,) if m[rank * len(_ROLES)] == LEFT else ()

    def _await_call(self, rank: int, op: p.AwaitCall, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "added")] >= op.epoch else ()

    def _hear(self, rank: int, op: text.HearPeer, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "flags", op.peer)] >= op.epoch else ()

    def _notice(self, rank: int, op: p.Notice, m: Memory) -> Sequence[int]:
        if m[self.at(rank, "expired")] or m[self.at(rank, "abort")]:
            return (1,)
        first = rank * len(_ROLES)
        return (0,) if all(local == LEFT for local in m[first : first + 2]) else ()

    def _oldest(self, rank: int, op: p.Oldest, m: Memory) -> Sequence[int]:
        heard = m[self.at(rank, "heard")]
        return (heard + 1,) if m[self.at(rank, "issued")] > heard else (0,)

    def _await_kernel(self, rank: int, op: p.AwaitKernel, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "multiplied")] >= op.epoch else ()

    def _await_done(self, rank: int, op: p.AwaitDone, m: Memory) -> Sequence[int]:
        if m[self.at(rank, "heard")] >= op.epoch:
            return (1,)
        waits = self.locals.op[m[rank * len(_ROLES) + 1]]
        return (0,) if type(waits) is text.HearPeer and not self._hear(rank, waits, m) else ()

    def _release_answers(self, rank: int, op: p.Release, m: Memory) -> Sequence[int]:
        return (0, 1)  # 1: a flag that came between the look and the write is overwritten

    _asked: ClassVar[dict[type, _Asked]] = {
        Issue: _issue, Issued: _issued, p.AwaitCall: _await_call, text.HearPeer: _hear, p.Notice: _notice,
        p.Oldest: _oldest, p.AwaitKernel: _await_kernel, p.AwaitDone: _await_done, p.Release: _release_answers,
    }  # fmt: skip

    # What operations do ---------------------------------------------------------------------------------------------

    def performer_of(self, op: Any) -> Callable[[int, Any, Any, Memory], None] | None:
        """As `Model.performer_of`."""
        every: dict[type, Callable[[int, Any, int, Memory], None]] = {
            text.Multiply: self._multiply, text.Multiplied: self._multiplied, text.TellPeer: self._tell_peer,
            text.Heard: lambda rank, op, _, m: self._set(rank, "heard", op.epoch, m),
            text.AddSlots: self._add, text.Added: self._added,
            Issue: lambda rank, op, yes, m: self._set(rank, "issued", op.epoch, m) if yes else None,
            p.Break: lambda rank, op, _, m: self._set(rank, "broken", 1, m),
            p.Abort: lambda rank, op, _, m: self._set(op.peer, "abort", 1, m),
            p.Overrule: self._overrule, p.Release: self._release,
        }  # fmt: skip
        does = every.get(type(op))
        return None if does is None else lambda pid, op, answer, m: does(pid // len(_ROLES), op, answer, m)

    def _set(self, rank: int, name: str, value: int, m: Memory) -> None:
        m[self.at(rank, name)] = value

    def _multiply(self, rank: int, op: text.Multiply, _: int, m: Memory) -> None:
        m[self.at(rank, "slots", self._place(op))] = -op.epoch  # half of it
        for other in range(self.case.world):
            reads = m[self.at(other, "adding")]
            if reads and reads % self.case.slots == self._place(op) and not self._void(other, reads, m):
                what = f"rank {rank} writes call {op.epoch}'s product, and rank {other} adds those of {reads}"
                raise Fault("overwritten while read", what)

    def _place(self, op: Any) -> int:
        """The slot: what the text says, or, of another number of slots, what it would say."""
        return int(op.slot if self.case.slots == p.SLOTS else op.epoch) % self.case.slots

    def _multiplied(self, rank: int, op: text.Multiplied, _: int, m: Memory) -> None:
        m[self.at(rank, "slots", self._place(op))] = op.epoch
        m[self.at(rank, "multiplied")] = op.epoch

    def _tell_peer(self, rank: int, op: text.TellPeer, _: int, m: Memory) -> None:
        m[self.at(op.peer, "flags", rank)] = op.epoch

    def _void(self, rank: int, epoch: int, m: Memory) -> bool:
        return bool(0 < m[self.at(rank, "over")] <= epoch)

    def _add(self, rank: int, op: text.AddSlots, _: int, m: Memory) -> None:
        m[self.at(rank, "adding")] = op.epoch
        if self._void(rank, op.epoch, m):
            return
        for other in range(self.case.world):
            value = m[self.at(other, "slots", self._place(op))]
            what = f"rank {rank} adds call {op.epoch}'s products, and rank {other}'s slot has"
            if abs(value) > op.epoch:
                raise Fault("overwritten while read", f"{what} that of {abs(value)}")
            if value != op.epoch:
                raise Fault("read before arrival", f"{what} {'half of one' if value < 0 else f'that of {value}'}")

    def _added(self, rank: int, op: text.Added, _: int, m: Memory) -> None:
        m[self.at(rank, "adding")], m[self.at(rank, "added")] = 0, op.epoch

    def _overrule(self, rank: int, op: p.Overrule, _: int, m: Memory) -> None:
        at = self.at(rank, "over")
        m[at] = m[at] or op.epoch

    def _release(self, rank: int, op: p.Release, over: int, m: Memory) -> None:
        for peer in p.peers(rank, self.case.world):
            flag = self.at(rank, "flags", peer)
            m[flag] = op.epoch if over else max(m[flag], op.epoch)

    # The world outside, and ends ------------------------------------------------------------------------------------

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """As `Model.environment`."""
        out: list[tuple[str, Memory]] = []
        for rank in range(self.case.world):
            if m[self.at(rank, "dead")]:
                continue
            waits = self.locals.op[m[rank * len(_ROLES) + 1]]
            may = type(waits) is text.HearPeer and (rank, waits.epoch) in self.case.expires
            if may and not m[self.at(rank, "expired")] and not self._hear(rank, waits, m):
                n = m.copy()
                n[self.at(rank, "expired")] = 1
                out.append((f"rank {rank} loses patience in call {waits.epoch}", n))
            if rank == self.case.lost:
                n = m.copy()
                n[self.at(rank, "dead")], n[self.at(rank, "adding")] = 1, 0
                out.append((f"rank {rank} is lost", n))
        return out

    def at_rest(self, m: Memory) -> None:
        """As `Model.at_rest`."""
        alive = [rank for rank in range(self.case.world) if not m[self.at(rank, "dead")]]
        here = [len(_ROLES) * rank + role for rank in alive for role in range(len(_ROLES))]
        here = [pid for pid in here if m[pid] != LEFT]
        if here:
            if not self.environment(m):
                raise Fault(
                    "deadlock", "; ".join(f"{self.processes[pid].name} at {self.locals.op[m[pid]]}" for pid in here)
                )
            return
        gave_up = [rank for rank in alive if m[self.at(rank, "expired")]]
        for rank in alive:
            if gave_up and not (m[self.at(rank, "expired")] or m[self.at(rank, "abort")]):
                raise Fault("not told", f"rank {gave_up[0]} has given up, and rank {rank} does not know")
            if not m[self.at(rank, "broken")] and m[self.at(rank, "added")] < self.case.epochs:
                raise Fault("missing work", f"rank {rank} has left after {m[self.at(rank, 'added')]} calls")
