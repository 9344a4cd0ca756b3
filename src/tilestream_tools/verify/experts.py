"""Model 12: ranks whose kernels push rows to the ranks of their experts and results back, over replays of a graph.

It explores `tilestream.core.protocols.experts`: model 10 (`replay`) with rows to every rank, the own too, with heads,
and with results. No host takes part. A source's head, rows and marks are of its own call; the experts make results of
the rows that they read, and a rank hands in what the results that it read were made of. A rank without rows for another
one signals as any: the model has no numbers of rows, which only heads tell.

Properties and environment are those of model 10: a result that is no NaN was made of the complete rows of its own call
and form, and no rank is ever stuck. What was computed is freed when its call has ended.

Reductions are those of model 10, too: begins of writes and reads, signals and hand-overs are eager, ends are delayed,
waits for the rank's own streams are lazy. A head is neither: it is written in one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from tilestream.core.protocols import experts as e
from tilestream.core.protocols import replay as p
from tilestream_tools.verify.model import Memory
from tilestream_tools.verify.ranked import Asked, Does
from tilestream_tools.verify.ranks import OVERWRITTEN, TORN
from tilestream_tools.verify.replay import ReplayCase, ReplayModel, Turn, Write

#: A rank's text: ``text(rank, world, replay)``.
Text = Callable[[int, int, int], Turn]


@dataclass(frozen=True)
class ExpertsCase(ReplayCase):
    """One configuration of model 12; see `ReplayCase`."""

    calling: Any = e.calling
    side: Any = e.side

    def build(self, reduce: bool = True, symmetry: bool = True) -> ExpertsModel:
        """The model of this configuration."""
        return ExpertsModel(self, reduce)

    def turn(self, text: Any, rank: int, writes: bool, replay: int) -> Turn:
        """A replay on one of a rank's streams."""
        if writes:
            yield Write(replay)
        yield from cast("Text", text)(rank, self.world, replay)
        return replay + 1 if replay < self.replays_of(rank) else None

    def __str__(self) -> str:
        words = [f"{self.world} ranks, {self.replays} replays"]
        words += [f"rank {rank} may give up in replay {replay}" for rank, replay in self.expires]
        words += [f"rank {self.more} replays once more"] if self.more is not None else []
        words += [f"rank {self.lost} may be lost"] if self.lost is not None else []
        words += [f"rank {rank}'s replay {replay} is of another form" for rank, replay in self.others]
        words += [] if self.names_form else ["marks do not name it"]
        texts = ((self.calling, e.calling), (self.side, e.side))
        return ", ".join([*words, *(text.__name__ for text, own in texts if text is not own)])


def configurations(full: bool) -> Iterator[ExpertsCase]:
    """2 ranks. Full: more replays, 3 ranks, patience that ends anywhere, and ranks lost."""
    for replays in (1, 2, 3):
        yield ExpertsCase(replays=replays)
    yield ExpertsCase(replays=1, expires=((0, 1),))
    yield ExpertsCase(replays=2, expires=((0, 2),))
    yield ExpertsCase(replays=1, more=0, expires=((0, 2),))
    yield ExpertsCase(replays=1, lost=1, expires=((0, 1),))
    yield ExpertsCase(replays=2, others=((0, 1), (1, 2)))
    if full:
        yield ExpertsCase(replays=5)
        yield ExpertsCase(replays=3, expires=((0, 1), (1, 2)))
        yield ExpertsCase(replays=2, more=1, expires=((1, 3),))
        yield ExpertsCase(replays=3, lost=1, expires=((0, 1), (0, 2), (0, 3)))
        yield ExpertsCase(replays=3, others=((0, 2), (1, 3)))
        yield ExpertsCase(world=3, replays=1)


class ExpertsModel(ReplayModel):
    """See the module."""

    eager: ClassVar[frozenset[type]] = ReplayModel.eager | {
        e.SignalHead, e.PushRows, e.SignalRows, e.Compute, e.Hand, e.PushResults, e.SignalResults, e.Add,
    }  # fmt: skip
    delayed = frozenset({e.PushedRows, e.Computed, e.PushedResults, e.Added})
    lazy: ClassVar[frozenset[type]] = ReplayModel.lazy | {e.AwaitHand}
    waits: ClassVar[frozenset[type]] = frozenset({p.AwaitTaken, e.AwaitHead, e.AwaitRows, e.AwaitResults})
    looks: ClassVar[frozenset[type]] = ReplayModel.looks | {e.Matches, e.AwaitHand}

    def sizes(self) -> dict[str, int]:
        """What a rank's memory holds beside that of model 10, whose signals and rows are those of sources.

        What the experts read, and what results under way carry. By source: head, its signal; what was computed of it,
        and the hand-over (twice the replay, plus whether it was computed). By rank: results, their signal.
        """
        world = self.case.world
        more = dict.fromkeys(("heads", "head signals", "computed", "handed over", "results", "result signals"), world)
        return {**super().sizes(), "value": 1, "returning": 1, **more}

    def of(self, rank: int, name: str, other: int) -> int:
        """Where a word of a rank for another one is."""
        return self.at(rank, name) + other

    # Answers --------------------------------------------------------------------------------------------------------

    def _await_head(self, rank: int, op: e.AwaitHead, m: Memory) -> Sequence[int]:
        return self._wait(rank, m[self.of(rank, "head signals", op.source)] != 0, m)

    def _await_rows(self, rank: int, op: e.AwaitRows, m: Memory) -> Sequence[int]:
        return self._wait(rank, m[self.of(rank, "signals", op.source)] != 0, m)

    def _await_results(self, rank: int, op: e.AwaitResults, m: Memory) -> Sequence[int]:
        return self._wait(rank, m[self.of(rank, "result signals", op.peer)] != 0, m)

    def _matches(self, rank: int, op: e.Matches, m: Memory) -> Sequence[int]:
        own = op.call + self._form_named(rank, m[self.at(rank, "begun")])
        return (int(m[self.of(rank, "marks", op.source)] == own),)

    def _await_hand(self, rank: int, op: e.AwaitHand, m: Memory) -> Sequence[int]:
        handed = m[self.of(rank, "handed over", op.source)]
        return (handed % 2,) if handed >= 2 * op.replay else ()

    asked: ClassVar[dict[type, Asked]] = {
        **ReplayModel.asked, e.AwaitHead: _await_head, e.AwaitRows: _await_rows, e.AwaitResults: _await_results,
        e.Matches: _matches, e.AwaitHand: _await_hand,
    }  # fmt: skip

    # What operations do ---------------------------------------------------------------------------------------------

    def _due(self, rank: int, m: Memory) -> int:
        """What a rank's call is made of."""
        begun = m[self.at(rank, "begun")]
        return int(begun + self.case.form_of(rank, begun))

    def _write(self, rank: int, place: int, value: int, m: Memory) -> None:
        """Write where ``rank``'s kernel may be reading."""
        m[place] = value
        if m[self.at(rank, "read")] == place:
            m[self.at(rank, "value")] = OVERWRITTEN

    def _write_tensor(self, rank: int, op: Write, answer: int, m: Memory) -> None:
        super()._write_tensor(rank, op, answer, m)
        first = self.at(rank, "computed")
        m[first : first + self.case.world] = [OVERWRITTEN] * self.case.world

    def _tell(self, rank: int, op: e.Head, answer: int, m: Memory) -> None:
        m[self.of(op.peer, "heads", rank)] = m[self.at(rank, "tensor")]

    def _push_rows(self, rank: int, op: e.PushRows, answer: int, m: Memory) -> None:
        m[self.at(rank, "push")] = m[self.at(rank, "tensor")]
        self._write(op.peer, self.of(op.peer, "rows", rank), TORN, m)

    def _pushed_rows(self, rank: int, op: e.PushedRows, answer: int, m: Memory) -> None:
        self._write(op.peer, self.of(op.peer, "rows", rank), m[self.at(rank, "push")], m)
        m[self.at(rank, "push")] = 0

    def _clear_rows(self, rank: int, op: e.ClearRows, answer: int, m: Memory) -> None:
        m[self.of(rank, "head signals", op.source)] = m[self.of(rank, "signals", op.source)] = 0
        if m[self.of(rank, "heads", op.source)] != self._due(rank, m):
            m[self.at(rank, "dirty")] = TORN

    def _compute(self, rank: int, op: e.Compute, answer: int, m: Memory) -> None:
        place = self.of(rank, "rows", op.source)
        m[self.at(rank, "read")], m[self.at(rank, "value")] = place, m[place]
        m[self.of(rank, "computed", op.source)] = TORN

    def _computed(self, rank: int, op: e.Computed, answer: int, m: Memory) -> None:
        value = m[self.at(rank, "value")]
        m[self.of(rank, "computed", op.source)] = value
        self._read_all(rank, value, m)

    def _read_all(self, rank: int, value: int, m: Memory) -> None:
        """A rank has read; ``value`` is what."""
        m[self.at(rank, "read")] = m[self.at(rank, "value")] = 0
        if value != self._due(rank, m) and not m[self.at(rank, "dirty")]:
            m[self.at(rank, "dirty")] = OVERWRITTEN if value == OVERWRITTEN or value > self._due(rank, m) else TORN

    def _hand_over(self, rank: int, op: e.Hand, answer: int, m: Memory) -> None:
        m[self.of(rank, "handed over", op.source)] = 2 * op.replay + op.computed

    def _push_results(self, rank: int, op: e.PushResults, answer: int, m: Memory) -> None:
        m[self.at(rank, "returning")] = m[self.of(rank, "computed", op.source)]
        self._write(op.source, self.of(op.source, "results", rank), TORN, m)

    def _pushed_results(self, rank: int, op: e.PushedResults, answer: int, m: Memory) -> None:
        now, begun = m[self.of(rank, "computed", op.source)], m[self.at(rank, "returning")]
        self._write(op.source, self.of(op.source, "results", rank), begun if now == begun else OVERWRITTEN, m)
        m[self.at(rank, "returning")] = 0

    def _add(self, rank: int, op: e.Add, answer: int, m: Memory) -> None:
        place = self.of(rank, "results", op.peer)
        m[self.at(rank, "read")], m[self.at(rank, "value")] = place, m[place]

    def _added(self, rank: int, op: e.Added, answer: int, m: Memory) -> None:
        self._read_all(rank, m[self.at(rank, "value")], m)

    def _clear_results(self, rank: int, op: e.ClearResults, answer: int, m: Memory) -> None:
        first = self.at(rank, "result signals")
        m[first : first + self.case.world] = [0] * self.case.world

    def _signal_head(self, rank: int, op: e.SignalHead, answer: int, m: Memory) -> None:
        m[self.of(op.peer, "head signals", rank)] = 1

    def _signal_rows(self, rank: int, op: e.SignalRows, answer: int, m: Memory) -> None:
        m[self.of(op.peer, "signals", rank)] = 1

    def _signal_results(self, rank: int, op: e.SignalResults, answer: int, m: Memory) -> None:
        m[self.of(op.source, "result signals", rank)] = 1

    performed: ClassVar[dict[type, Does]] = {
        **ReplayModel.performed, Write: _write_tensor, e.Head: _tell, e.SignalHead: _signal_head,
        e.PushRows: _push_rows,
        e.PushedRows: _pushed_rows, e.SignalRows: _signal_rows, e.ClearRows: _clear_rows, e.Compute: _compute,
        e.Computed: _computed, e.Hand: _hand_over, e.PushResults: _push_results, e.PushedResults: _pushed_results,
        e.SignalResults: _signal_results, e.ClearResults: _clear_results, e.Add: _add, e.Added: _added,
        e.AwaitHead: ReplayModel._waited, e.AwaitRows: ReplayModel._waited, e.AwaitResults: ReplayModel._waited,
    }  # fmt: skip
