"""What the models of ranks have in common: hosts, watchdogs, abort words, ranks that are lost.

A rank consists of processes: the host, which issues calls ahead of the device; calling streams, kernels included; other
streams; and the watchdog, which is the last of them. `tilestream_tools.verify.gather`, `tilestream_tools.verify.sums`
and `tilestream_tools.verify.one_shot` say what the streams do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple

from tilestream.core.protocols import gather as p
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory, State
from tilestream_tools.verify.processes import LEFT, Process
from tilestream_tools.verify.ranked import Asked, Does, RankedModel

#: What a place holds that is no epoch: half a copy; a copy of what was written again meanwhile.
TORN, OVERWRITTEN = -1, -2

Turn = Generator[Any, int, "int | None"]


def _watchdog(case: RanksCase, rank: int, carried: int) -> Turn:
    return case.watch(rank, case.world)


class Issued(NamedTuple):
    """A stream: wait until the host has issued ``epoch``. Answer: 0 where it never will."""

    epoch: int


class Ended(NamedTuple):
    """The kernel of ``epoch`` has ended."""

    epoch: int


def reached(name: str) -> Asked:
    """An operation that blocks until a word of its rank, or its peer's of several, has come to its epoch."""

    def ask(model: Any, rank: int, op: Any, m: Memory) -> Sequence[int]:
        return (0,) if m[model.at(rank, name, getattr(op, "peer", 0))] >= op.epoch else ()

    return ask


#: A wait for a peer's flag.
FLAGGED = reached("flags")


def sets(name: str) -> Does:
    """An operation that sets a word of its rank to its epoch."""

    def does(model: Any, rank: int, op: Any, answer: int, m: Memory) -> None:
        m[model.at(rank, name)] = op.epoch

    return does


def flags(model: Any, rank: int, op: Any, answer: int, m: Memory) -> None:
    """An operation that writes its epoch to its rank's flag at a peer."""
    m[model.at(op.peer, "flags", rank)] = op.epoch


@dataclass(frozen=True)
class RanksCase:
    """One configuration of a model of ranks.

    Attributes
    ----------
    world, epochs
        Ranks, calls.
    expires
        Where patience may end, as (rank, epoch).
    lost
        Which rank may be lost; None: none.
    slots
        Slots of a rank, as the text that is run has them.
    streams
        Calling streams, which take the calls in turn.
    begin, watch
        The text.
    """

    world: int = 2
    epochs: int = 3
    expires: tuple[tuple[int, int], ...] = ()
    lost: int | None = None
    slots: int = p.SLOTS
    streams: int = 1
    begin: Callable[[int], Turn] = p.begin
    watch: Callable[[int, int], Turn] = p.watch
    has_side_stream: ClassVar[bool] = True

    def call(self, rank: int, epoch: int) -> Turn:
        """What a call does on its calling stream."""
        raise NotImplementedError

    def beside(self, rank: int, epoch: int) -> Turn:
        """What it does on the side stream."""
        raise NotImplementedError

    def programs(self, rank: int) -> list[tuple[str, Callable[[int], Turn], int]]:
        """Of a rank's streams: what traces call them, their turns, the first one. Calling streams first."""
        name = "calling stream"
        names = [f"{name} {i}" for i in range(self.streams)] if self.streams > 1 else [name]
        calling = [(name, self._turns(self.call, rank, self.streams), 1 + i) for i, name in enumerate(names)]
        return [*calling, *([("side stream", self._turns(self.beside, rank, 1), 1)] if self.has_side_stream else ())]

    def _turns(self, text: Callable[[int, int], Turn], rank: int, step: int) -> Callable[[int], Turn]:
        """The turns of a stream: a call each, from when the host has issued it."""

        def turn(epoch: int) -> Turn:
            if not (yield Issued(epoch)):
                return None
            yield from text(rank, epoch)
            return epoch + step if epoch + step <= self.epochs else None

        return turn

    def sizes(self) -> dict[str, int]:
        """What a rank's memory holds beside `FIELDS`."""
        raise NotImplementedError

    def host(self, epoch: int) -> Turn:
        """The host issues the calls, one after the other."""
        begun = yield from self.begin(epoch)
        return epoch + 1 if begun is not None and epoch < self.epochs else None

    def of(self, chunks: str = "") -> str:
        """The case in words."""
        shards = f"{chunks} chunks a shard, " if chunks else ""
        words = [f"{self.world} ranks, {shards}{self.epochs} calls, {self.slots} slots"]
        words += [f"rank {rank}'s kernel of call {epoch} may expire" for rank, epoch in self.expires]
        words += [f"from {self.streams} streams in turn"] if self.streams > 1 else []
        words += [f"rank {self.lost} may be lost"] if self.lost is not None else []
        return ", ".join([*words, *self.changed()])

    def changed(self) -> list[str]:
        """The names of the texts that are not the real ones."""
        given = ((field.default, getattr(self, field.name)) for field in fields(self))
        return [text.__name__ for own, text in given if callable(own) and text is not own]


#: What a rank's memory begins with: what its host and streams have come to, by epoch, and what was said to it.
FIELDS = ("issued", "ended", "over", "broken", "expired", "abort", "dead")


class RanksModel(RankedModel):
    """See the module. A rank's memory: `FIELDS`, by stream the call that was posted, then what `sizes` says."""

    progress: ClassVar[frozenset[type]] = frozenset({p.Begin})

    def __init__(self, case: Any, reduce: bool = True) -> None:
        self.case = case
        turns: list[Process] = []
        for rank in range(case.world):
            programs = [
                ("host", case.host, 1),
                *case.programs(rank),
                ("watchdog", functools.partial(_watchdog, case, rank), 0),
            ]
            turns += [Process(f"rank {rank}'s {role}", turn, start, (role, rank)) for role, turn, start in programs]
        self.roles = len(turns) // case.world
        self._offset = {name: i for i, name in enumerate(FIELDS)}
        at = len(FIELDS)
        for name, size in {"posted": case.streams, **case.sizes()}.items():
            self._offset[name] = at
            at += size
        self._size, self._base = at, len(turns)
        super().__init__(turns, reduce)

    def memory(self) -> Memory:
        """See `Model.memory`."""
        return [0] * (self._size * self.case.world)

    def at(self, rank: int, name: str, index: int = 0) -> int:
        """Where a word of a rank is."""
        return self._base + rank * self._size + self._offset[name] + index

    def stream(self, epoch: int) -> int:
        """The calling stream of a call."""
        return int((epoch - 1) % self.case.streams)

    def urgent(self, pid: int, m: Memory) -> bool:
        """See `Model.urgent`: where no rank can give up, hosts and watchdogs only let others go on."""
        if self.case.expires or self.case.lost is not None or 0 < pid % self.roles < self.roles - 1:
            return False
        op = self.locals.op[m[pid]]
        ask = self.asked.get(type(op))
        return ask is None or bool(ask(self, pid // self.roles, op, m))

    def kept(self, rank: int, at: int) -> bool:
        """Whether the word at ``at`` of a rank that is lost matters to the others."""
        raise NotImplementedError

    def canonical(self, state: State) -> State:
        """See `Model.canonical`: of a rank that is lost nothing matters but what is `kept`."""
        lost = self.case.lost
        if lost is None or not state[self.at(lost, "dead")]:
            return state
        m = list(state)
        first = self.roles * lost
        m[first : first + self.roles] = [LEFT] * self.roles
        for at in range(self.at(lost, "issued"), self.at(lost, "issued") + self._size):
            if at != self.at(lost, "dead") and not self.kept(lost, at):
                m[at] = 0
        return tuple(m)

    # Answers --------------------------------------------------------------------------------------------------------

    def domain(self, op: Any, past: Any) -> Sequence[Any]:
        """See `Model.domain`."""
        if type(op) is p.Oldest:
            return range(self.case.epochs + 1)
        return (0, 1) if type(op) in self.asked else (0,)

    def _begin(self, rank: int, op: p.Begin, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "broken")] else (1,)

    def _issued(self, rank: int, op: Issued, m: Memory) -> Sequence[int]:
        if m[self.at(rank, "issued")] >= op.epoch:
            return (1,)
        return (0,) if m[rank * self.roles] == LEFT else ()

    def _await_post(self, rank: int, op: p.AwaitPost, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "posted", self.stream(op.epoch))] >= op.epoch else ()

    def _notice(self, rank: int, op: p.Notice, m: Memory) -> Sequence[int]:
        if m[self.at(rank, "expired")] or m[self.at(rank, "abort")]:
            return (1,)
        first = rank * self.roles
        return (0,) if all(local == LEFT for local in m[first : first + self.roles - 1]) else ()

    def over(self, rank: int, m: Memory) -> int:
        """The last call of a rank that its watchdog need not look after."""
        raise NotImplementedError

    def waiting(self, rank: int, m: Memory) -> Any:
        """The wait for a peer's flag at which a rank's stream is blocked; None: at none."""
        raise NotImplementedError

    def _oldest(self, rank: int, op: p.Oldest, m: Memory) -> Sequence[int]:
        over = self.over(rank, m)
        return (over + 1,) if m[self.at(rank, "issued")] > over else (0,)

    def _await_done(self, rank: int, op: p.AwaitDone, m: Memory) -> Sequence[int]:
        if self.over(rank, m) >= op.epoch:
            return (1,)
        return () if self.waiting(rank, m) is None else (0,)

    def _release_answers(self, rank: int, op: p.Release, m: Memory) -> Sequence[int]:
        return (0, 1)  # 1: a flag that came between the look and the write is overwritten

    asked: ClassVar[dict[type, Asked]] = {
        p.Begin: _begin, Issued: _issued, p.AwaitPost: _await_post, p.AwaitKernel: reached("ended"), p.Notice: _notice,
        p.Oldest: _oldest, p.AwaitDone: _await_done, p.Release: _release_answers,
    }  # fmt: skip

    # What operations do ---------------------------------------------------------------------------------------------

    def _set_issued(self, rank: int, op: p.Begin, answer: int, m: Memory) -> None:
        if answer:
            m[self.at(rank, "issued")] = op.epoch

    def _post(self, rank: int, op: p.Post, answer: int, m: Memory) -> None:
        m[self.at(rank, "posted", self.stream(op.epoch))] = op.epoch

    def _ended(self, rank: int, op: Ended, answer: int, m: Memory) -> None:
        m[self.at(rank, "ended")] = max(m[self.at(rank, "ended")], op.epoch)

    def _break(self, rank: int, op: p.Break, answer: int, m: Memory) -> None:
        m[self.at(rank, "broken")] = 1

    def _abort(self, rank: int, op: p.Abort, answer: int, m: Memory) -> None:
        m[self.at(op.peer, "abort")] = 1

    def told(self, epoch: int) -> int:
        """What a flag reads that says all of a call."""
        return epoch

    def _release(self, rank: int, op: p.Release, answer: int, m: Memory) -> None:
        for peer in p.peers(rank, self.case.world):
            flag = self.at(rank, "flags", peer)
            m[flag] = self.told(op.epoch) if answer else max(m[flag], self.told(op.epoch))

    def _overrule(self, rank: int, op: p.Overrule, answer: int, m: Memory) -> None:
        m[self.at(rank, "over")] = m[self.at(rank, "over")] or op.epoch

    performed: ClassVar[dict[type, Does]] = {
        p.Begin: _set_issued, p.Post: _post, Ended: _ended, p.Break: _break, p.Abort: _abort, p.Release: _release,
        p.Overrule: _overrule,
    }  # fmt: skip

    # The world outside, and ends ------------------------------------------------------------------------------------

    def impatient(self, rank: int, m: Memory) -> list[tuple[str, Memory]]:
        """A watchdog may give up a stream that waits for a peer, from when the call's kernel has ended."""
        wait = self.waiting(rank, m)
        if wait is None or m[self.at(rank, "expired")] or (rank, wait.epoch) not in self.case.expires:
            return []
        if m[self.at(rank, "ended")] < wait.epoch:
            return []
        n = m.copy()
        n[self.at(rank, "expired")] = 1
        return [(f"rank {rank} is out of patience with call {wait.epoch}", n)]

    def all_have_left(self, alive: list[int], m: Memory) -> None:
        """See `RankedModel.all_have_left`."""
        gave_up = [rank for rank in alive if m[self.at(rank, "expired")]]
        for rank in alive:
            if gave_up and not (m[self.at(rank, "expired")] or m[self.at(rank, "abort")]):
                raise Fault("not told", f"rank {gave_up[0]} has given up, and rank {rank} does not know")
            if not m[self.at(rank, "broken")] and m[self.at(rank, "ended")] < self.case.epochs:
                raise Fault("missing work", f"rank {rank} has left after {m[self.at(rank, 'ended')]} calls")
