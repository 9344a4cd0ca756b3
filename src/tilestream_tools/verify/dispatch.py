"""Model 11: ranks that send rows to the ranks of their experts, and get back what became of them.

It explores `tilestream.core.protocols.dispatch`: on each rank the calling thread and a thread for each peer, in every
order, with rows in several parts, of which no rank knows the number before it is told; a rank that may be lost at any
moment, or that is silent from the beginning; deadlines that may pass in any wait.

Properties: a part is computed once, and only when its rows and all counts before it are there; a result is sent when it
is computed, and received once, as the result of its own part. No thread waits for ever, and without a rank that is lost
or a deadline that passes every rank ends with all results. A rank that has not got all of them has failed, and then
has closed its connections.

Reductions: sends, signals, hand-overs and products are *eager*. They never block, and all that they do is to let a wait
of another thread be answered. What a wait finds is checked where it is answered, so a message that is there too early
is a fault all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from tilestream.core.protocols import dispatch as text
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory
from tilestream_tools.verify.processes import LEFT, Process
from tilestream_tools.verify.ranked import Asked, Does, RankedModel

#: A rank's own words; and those that it has for each peer: what it has sent it and what it has of it, in parts.
_OWN = ("dead", "failed", "stopped", "closed", "left")
_OF_PEER = ("counts", "rows", "results", "signalled", "computed", "handed", "received")


@dataclass(frozen=True)
class DispatchCase:
    """One configuration of model 11.

    Attributes
    ----------
    parts
        By rank: the parts of its rows for each other rank, in the order of the ranks.
    lost
        Which rank may be lost at any moment; None: none.
    silent
        Which rank never calls; None: none.
    expires
        Whether deadlines may pass.
    converse, compute
        The texts.
    """

    parts: tuple[tuple[int, ...], ...] = ((1,), (1,))
    lost: int | None = None
    silent: int | None = None
    expires: bool = False
    converse: Callable[[int, int], text.Operations] = text.converse
    compute: Callable[[int, int], text.Operations] = text.compute

    @property
    def world(self) -> int:
        """The ranks."""
        return len(self.parts)

    def of(self, rank: int, peer: int) -> int:
        """The parts of the rows of ``rank`` for ``peer``."""
        return self.parts[rank][peer - (peer > rank)]

    def build(self, reduce: bool = True, symmetry: bool = True) -> DispatchModel:
        """The model of this configuration."""
        return DispatchModel(self, reduce)

    def __str__(self) -> str:
        words = [f"{self.world} ranks, parts {'; '.join(', '.join(map(str, row)) for row in self.parts)}"]
        words += [f"rank {self.lost} may be lost"] if self.lost is not None else []
        words += [f"rank {self.silent} is silent"] if self.silent is not None else []
        words += ["deadlines may pass"] if self.expires else []
        given = ((field.default, getattr(self, field.name)) for field in fields(self))
        return ", ".join([*words, *(made.__name__ for own, made in given if callable(own) and made is not own)])


def configurations(full: bool) -> Iterator[DispatchCase]:
    """2 ranks with up to 2 parts, and 3 with 1. Full: more parts, and 3 ranks of which one fails."""
    for first in (1, 2):
        for second in (1, 2):
            yield DispatchCase(((first,), (second,)))
    yield DispatchCase(((2,), (1,)), lost=1)
    yield DispatchCase(((1,), (2,)), silent=1, expires=True)
    yield DispatchCase(((1,), (2,)), expires=True)
    yield DispatchCase(((1, 1), (1, 1), (1, 1)))
    if full:
        yield DispatchCase(((3,), (3,)))
        yield DispatchCase(((3,), (2,)), lost=0)
        yield DispatchCase(((2, 1), (1, 1), (1, 2)))
        yield DispatchCase(((1, 1), (1, 1), (1, 1)), silent=2, expires=True)
        yield DispatchCase(((1, 1), (1, 1), (1, 1)), lost=2)


def _message(name: str) -> Asked:
    """A wait for a message: it is there, or the connection is closed at either end."""

    def ask(model: DispatchModel, rank: int, op: Any, m: Memory) -> Sequence[int]:
        there = m[model.at(op.peer, name, rank)] > getattr(op, "part", 0)
        answer = model.case.of(op.peer, rank) if name == "counts" else 0
        gone = any(m[model.at(one, word)] for one in (op.peer, rank) for word in ("closed", "dead"))
        found = (answer,) if there else ()
        return (*found, -1) if gone or model.case.expires else found

    return ask


def _next(name: str, kind: str) -> Does:
    """The next part of a sequence; another one is ``kind``."""

    def does(model: DispatchModel, rank: int, op: Any, answer: int, m: Memory) -> None:
        at = model.at(rank, name, getattr(op, "peer", getattr(op, "source", 0)))
        if m[at] != getattr(op, "part", 0):
            raise Fault(kind, f"rank {rank}: {model.describe(op)}, behind {m[at]} of them")
        m[at] += 1

    return does


def _set(name: str) -> Does:
    """Set a word of the rank."""

    def does(model: DispatchModel, rank: int, op: Any, answer: int, m: Memory) -> None:
        m[model.at(rank, name)] = 1

    return does


class DispatchModel(RankedModel):
    """See the module. Processes: of each rank the calling thread, then its peers' threads in the order of the ranks."""

    eager = frozenset({
        text.SendCounts, text.SendRows, text.Signal, text.SendResult, text.Fail, text.ComputeOwn, text.Compute,
        text.Hand, text.Stop, text.Close,
    })  # fmt: skip

    may_be_continued = False  # no wait is for the loss of a rank

    def __init__(self, case: DispatchCase, reduce: bool = True) -> None:
        self.case, self.roles = case, case.world
        world = case.world
        processes = []
        for rank in range(world):
            others = [peer for peer in range(world) if peer != rank]
            threads = [("calling thread", lambda _, rank=rank: case.compute(rank, world)), *(
                (f"thread for {peer}", lambda _, rank=rank, peer=peer: case.converse(peer, case.of(rank, peer)))
                for peer in others
            )]  # fmt: skip
            processes += [Process(f"rank {rank}'s {name}", turn, 0, (rank, name)) for name, turn in threads]
        self._size = len(_OWN) + world * len(_OF_PEER)
        super().__init__(processes, reduce)

    def memory(self) -> Memory:
        """See `Model.memory`."""
        m = [0] * (self._size * self.case.world)
        if self.case.silent is not None:
            m[self.case.silent * self._size] = 1
        return m

    def at(self, rank: int, name: str, peer: int = 0) -> int:
        """Where a word of a rank is."""
        base = len(self.processes) + rank * self._size
        if name in _OWN:
            return base + _OWN.index(name)
        return base + len(_OWN) + peer * len(_OF_PEER) + _OF_PEER.index(name)

    # Answers --------------------------------------------------------------------------------------------------------

    def domain(self, op: Any, past: Any) -> Sequence[Any]:
        """See `Model.domain`."""
        if isinstance(op, text.AwaitAny):
            return range(-1, len(op.parts))
        most = max(max(row) for row in self.case.parts)
        if isinstance(op, text.AwaitCounts):
            return range(-1, 1 + most)
        if isinstance(op, text.Compute):
            return (0, 1) if op.part + 1 < most else (1,)
        return (-1, 0) if type(op) in self.asked else (0,)

    def _last(self, rank: int, op: text.Compute, m: Memory) -> Sequence[int]:
        return (int(op.part + 1 >= self.case.of(op.source, rank)),)

    def _computed(self, rank: int, op: text.AwaitComputed, m: Memory) -> Sequence[int]:
        if m[self.at(rank, "handed", op.peer)] > op.part:
            return (0,)
        return (-1,) if m[self.at(rank, "stopped")] else ()

    def _any(self, rank: int, op: text.AwaitAny, m: Memory) -> Sequence[int]:
        found = [i for i, (source, part) in enumerate(op.parts) if m[self.at(rank, "signalled", source)] > part]
        return (*found, -1) if m[self.at(rank, "failed")] or self.case.expires else found

    def _peers(self, rank: int, op: text.AwaitPeers, m: Memory) -> Sequence[int]:
        world = self.case.world
        if any(m[pid] != LEFT for pid in range(rank * world + 1, (rank + 1) * world)):
            return ()
        return (-1,) if m[self.at(rank, "failed")] else (0,)

    asked: ClassVar[dict[type, Asked]] = {
        text.AwaitCounts: _message("counts"), text.AwaitRows: _message("rows"), text.AwaitResult: _message("results"),
        text.AwaitComputed: _computed, text.AwaitAny: _any, text.AwaitPeers: _peers, text.Compute: _last,
    }  # fmt: skip

    # What operations do ---------------------------------------------------------------------------------------------

    def _compute(self, rank: int, op: text.Compute, answer: int, m: Memory) -> None:
        if m[self.at(op.source, "rows", rank)] <= op.part or m[self.at(rank, "signalled", op.source)] <= op.part:
            raise Fault("read before arrival", f"rank {rank} computes part {op.part} of rank {op.source}")
        _next("computed", "double work")(self, rank, op, answer, m)

    def _hand(self, rank: int, op: text.Hand, answer: int, m: Memory) -> None:
        if m[self.at(rank, "computed", op.source)] <= op.part:
            raise Fault("read before arrival", f"rank {rank} hands on part {op.part} of rank {op.source} uncomputed")
        m[self.at(rank, "handed", op.source)] += 1

    def _send_result(self, rank: int, op: text.SendResult, answer: int, m: Memory) -> None:
        if m[self.at(rank, "computed", op.peer)] <= op.part:
            raise Fault("read before arrival", f"rank {rank} sends back part {op.part} of rank {op.peer} uncomputed")
        _next("results", "wrong data")(self, rank, op, answer, m)

    def _signal(self, rank: int, op: text.Signal, answer: int, m: Memory) -> None:
        if m[self.at(op.peer, "rows", rank)] <= op.part:
            raise Fault("read before arrival", f"rank {rank} signals part {op.part} of rank {op.peer}")
        _next("signalled", "wrong data")(self, rank, op, answer, m)

    def _receive(self, rank: int, op: text.AwaitResult, answer: int, m: Memory) -> None:
        if answer >= 0:
            m[self.at(rank, "received", op.peer)] += 1

    performed: ClassVar[dict[type, Does]] = {
        text.SendCounts: _next("counts", "wrong data"), text.SendRows: _next("rows", "wrong data"),
        text.Signal: _signal, text.Compute: _compute, text.Hand: _hand, text.SendResult: _send_result,
        text.AwaitResult: _receive, text.Fail: _set("failed"), text.Stop: _set("stopped"), text.Close: _set("closed"),
    }  # fmt: skip

    # The world outside, and ends ------------------------------------------------------------------------------------

    def all_have_left(self, alive: list[int], m: Memory) -> None:
        """See `RankedModel.all_have_left`."""
        for rank in alive:
            peers = [peer for peer in range(self.case.world) if peer != rank]
            has_all = all(m[self.at(rank, "received", peer)] == self.case.of(rank, peer) for peer in peers)
            if not has_all and not m[self.at(rank, "closed")]:
                raise Fault("missing work", f"rank {rank} has left, neither with all results nor having given up")
            may_fail = self.case.expires or len(alive) < self.case.world
            if not has_all and not may_fail:
                raise Fault("missing work", f"rank {rank} has given up, and no rank was late or lost")
