"""Model 9: ranks that reduce a few rows in one shot, each reading all other ranks' slots: hosts, streams and watchdogs.

It explores `tilestream.core.protocols.one_shot.reduce`, and the host's part and the watchdog that it shares with sums
(`begin_sum` of `tilestream.core.protocols.reduce_scatter`, `watch` of `tilestream.core.protocols.gather`), over several
calls, with ranks that lose patience or are lost.

Properties: a rank that adds and was not overruled finds every rank's product of its call in its slot, and no rank
writes there until it has added. No rank waits for ever. Where one has given up, all know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from tilestream.core.protocols import gather as p
from tilestream.core.protocols import one_shot as text
from tilestream.core.protocols import reduce_scatter as q
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory
from tilestream_tools.verify.ranked import Asked, Does
from tilestream_tools.verify.ranks import FLAGGED, RanksCase, RanksModel, Turn, flags, reached, sets


@dataclass(frozen=True)
class OneShotCase(RanksCase):
    """One configuration of model 9: the texts."""

    begin: Callable[[int], Turn] = q.begin_sum
    reduce: Callable[[int, int, int], Turn] = text.reduce
    has_side_stream: ClassVar[bool] = False

    def build(self, reduce: bool = True, symmetry: bool = True) -> OneShotModel:
        """The model of this configuration."""
        return OneShotModel(self, reduce)

    def call(self, rank: int, epoch: int) -> Turn:
        """As of `RanksCase`."""
        return self.reduce(rank, self.world, epoch)

    def sizes(self) -> dict[str, int]:
        """As of `RanksCase`: which calls all peers told of, and were added; which one is being added, and its slot."""
        return {"heard": 1, "added": 1, "adding": 1, "from": 1, "flags": self.world, "slots": self.slots}

    def __str__(self) -> str:
        return self.of()


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


class OneShotModel(RanksModel):
    """See the module."""

    case: OneShotCase

    def kept(self, rank: int, at: int) -> bool:
        """As of `RanksModel`: what its peers may still read."""
        return self.at(rank, "slots") <= at < self.at(rank, "slots", self.case.slots)

    # Answers --------------------------------------------------------------------------------------------------------

    def over(self, rank: int, m: Memory) -> int:
        """As of `RanksModel`."""
        return int(m[self.at(rank, "heard")])

    def waiting(self, rank: int, m: Memory) -> text.AwaitPeer | None:
        """As of `RanksModel`: the calling stream's."""
        op: Any = self.locals.op[m[rank * self.roles + 1]]
        return op if isinstance(op, text.AwaitPeer) and not FLAGGED(self, rank, op, m) else None

    asked: ClassVar[dict[type, Asked]] = {
        **RanksModel.asked, p.AwaitCall: reached("added"), p.AwaitSide: reached("heard"), text.AwaitPeer: FLAGGED,
    }  # fmt: skip

    # What operations do ---------------------------------------------------------------------------------------------

    def _multiply(self, rank: int, op: text.Multiply, answer: int, m: Memory) -> None:
        m[self.at(rank, "slots", op.slot)] = -op.epoch  # half of it
        for other in range(self.case.world):
            reads = m[self.at(other, "adding")]
            if reads and m[self.at(other, "from")] == op.slot and not self._void(other, reads, m):
                what = f"rank {rank} writes call {op.epoch}'s product, and rank {other} adds those of {reads}"
                raise Fault("overwritten while read", what)

    def _multiplied(self, rank: int, op: text.Multiplied, answer: int, m: Memory) -> None:
        m[self.at(rank, "slots", op.slot)] = m[self.at(rank, "ended")] = op.epoch

    def _void(self, rank: int, epoch: int, m: Memory) -> bool:
        return bool(0 < m[self.at(rank, "over")] <= epoch)

    def _add(self, rank: int, op: text.AddSlots, answer: int, m: Memory) -> None:
        m[self.at(rank, "adding")], m[self.at(rank, "from")] = op.epoch, op.slot
        if self._void(rank, op.epoch, m):
            return
        for other in range(self.case.world):
            value = m[self.at(other, "slots", op.slot)]
            what = f"rank {rank} adds call {op.epoch}'s products, and rank {other}'s slot has"
            if abs(value) > op.epoch:
                raise Fault("overwritten while read", f"{what} that of {abs(value)}")
            if value != op.epoch:
                raise Fault("read before arrival", f"{what} {'half of one' if value < 0 else f'that of {value}'}")

    def _added(self, rank: int, op: text.Added, answer: int, m: Memory) -> None:
        m[self.at(rank, "adding")], m[self.at(rank, "from")], m[self.at(rank, "added")] = 0, 0, op.epoch

    performed: ClassVar[dict[type, Does]] = {
        **RanksModel.performed, text.Multiply: _multiply, text.Multiplied: _multiplied, text.FlagPeer: flags,
        text.AllFlagged: sets("heard"), text.AddSlots: _add, text.Added: _added,
    }  # fmt: skip

    # The world outside ----------------------------------------------------------------------------------------------

    def lose(self, rank: int, m: Memory) -> None:
        """As of `RanksModel`."""
        m[self.at(rank, "adding")] = m[self.at(rank, "from")] = 0
