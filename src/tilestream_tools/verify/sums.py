"""Model 7: the ranks of a reduce-scatter, their streams, hosts and watchdogs; products are pulled and added.

It explores `tilestream.core.protocols.reduce_scatter`, as GPUs perform it, in a world like that of
`tilestream_tools.verify.gather`, whose words these are, with a side stream in place of lanes. The kernel waits for no
rank. The watchdog's patience may expire after the kernel has ended, while the side stream waits for a peer.

Properties: a sum is of all parts of its own epoch, complete; or it is NaN, from the call on that the watchdog has
overruled. The rest, reductions included, is as in model 4: Compute corresponds to Fill, Publish to Signal, Sum to Read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tilestream.core.protocols import gather as p
from tilestream.core.protocols import reduce_scatter as q
from tilestream_tools.verify import ranks as r
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory
from tilestream_tools.verify.ranked import Asked, Does

#: ``produce(rank, world, batches, parts, epoch)``, and the same of `scatter`.
Text = Callable[[int, int, int, int, int], r.Turn]


@dataclass(frozen=True)
class SumCase(r.RanksCase):
    """One configuration of model 7: ``chunks`` that a rank has for each, and the texts."""

    chunks: int = 1
    begin: Callable[[int], r.Turn] = q.begin_sum
    produce: Text = q.produce
    scatter: Text = q.scatter
    add_up: Callable[[int], r.Turn] = q.add_up

    def build(self, reduce: bool = True, symmetry: bool = True) -> SumModel:
        """The model of this configuration."""
        return SumModel(self, reduce)

    def call(self, rank: int, epoch: int) -> r.Turn:
        """As of `RanksCase`."""
        yield from self.produce(rank, self.world, 1, self.chunks, epoch)
        yield from self.add_up(epoch)
        return None

    def beside(self, rank: int, epoch: int) -> r.Turn:
        """As of `RanksCase`."""
        return self.scatter(rank, self.world, 1, self.chunks, epoch)

    def sizes(self) -> dict[str, int]:
        """As of `RanksCase`: slots hold whole products; ``summed`` is the last call that is over."""
        shards = self.world * self.chunks
        return {
            "sided": 1, "pull": 1, "flags": self.world, "signals": shards, "slots": self.slots * shards,
            "gathered": shards, "read": self.streams, "summed": 1,
        }  # fmt: skip

    def __str__(self) -> str:
        return self.of(str(self.chunks))


class SumModel(r.RanksModel):
    """See the module. A signal is a step's; what is read by a sum is all of a call."""

    case: SumCase
    eager: ClassVar[frozenset[type]] = frozenset(
        {q.Compute, q.PullPart, q.Publish, p.Post, p.Done, q.Ended, p.Break, p.Overrule, p.Release, q.Sum}
    )
    delayed: frozenset[type] = frozenset({q.Computed, q.PulledPart, q.Summed})
    lazy: ClassVar[frozenset[type]] = frozenset({r.Issued, p.AwaitCall, p.AwaitPost, q.AwaitPublished, p.AwaitSide})

    def kept(self, rank: int, at: int) -> bool:
        """As of `RanksModel`: what its peers may still pull."""
        return self.at(rank, "slots") <= at < self.at(rank, "gathered")

    def shard(self, rank: int, chunk: int) -> int:
        """The place of a chunk among all ranks'."""
        return rank * self.case.chunks + chunk

    def _told(self, epoch: int, parts: int) -> int:
        """What a flag says that so many chunks of a call are there."""
        return (epoch - 1) * self.case.chunks + parts

    def _place(self, slot: int, peer: int, n: int) -> int:
        """Of a chunk for ``peer`` in a rank's slots."""
        return (slot * self.case.world + peer) * self.case.chunks + n

    def _sent(self, rank: int, step: int) -> tuple[int, int]:
        return q.sent(rank, self.case.world, 1, self.case.chunks, step)

    # Answers --------------------------------------------------------------------------------------------------------

    def _await_call(self, rank: int, op: p.AwaitCall, m: Memory) -> Sequence[int]:
        return (0,) if min(m[self.at(rank, "sided")], m[self.at(rank, "summed")]) >= op.epoch else ()

    def _await_published(self, rank: int, op: q.AwaitPublished, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "signals", op.step)] >= op.epoch else ()

    def _await_part(self, rank: int, op: q.AwaitPart, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "flags", op.peer)] >= self._told(op.epoch, op.parts) else ()

    def over(self, rank: int, m: Memory) -> int:
        """As of `RanksModel`."""
        return int(m[self.at(rank, "sided")])

    def waiting(self, rank: int, m: Memory) -> q.AwaitPart | None:
        """As of `RanksModel`: the side stream's."""
        op: Any = self.locals.op[m[(rank + 1) * self.roles - 2]]
        return op if isinstance(op, q.AwaitPart) and not self._await_part(rank, op, m) else None

    asked: ClassVar[dict[type, Asked]] = {
        **r.RanksModel.asked, p.AwaitCall: _await_call, q.AwaitPublished: _await_published, q.AwaitPart: _await_part,
        p.AwaitSide: r.reached("sided"),
    }  # fmt: skip

    # What operations do ---------------------------------------------------------------------------------------------

    def _compute(self, rank: int, op: q.Compute, answer: int, m: Memory) -> None:
        peer, n = self._sent(rank, op.step)
        place = self._place(op.slot, peer, n)
        reads = self.at(rank, "read")
        if peer == rank and any(x and x % self.case.slots == op.slot for x in m[reads : reads + self.case.streams]):
            raise Fault("overwritten while read", f"rank {rank} computes where its sum reads")
        m[self.at(rank, "slots", place)] = r.TORN
        for other in range(self.case.world):
            pull = m[self.at(other, "pull")]
            if pull and pull[:2] == (rank, place):
                m[self.at(other, "pull")] = (*pull[:2], r.OVERWRITTEN)

    def _computed(self, rank: int, op: q.Computed, answer: int, m: Memory) -> None:
        m[self.at(rank, "slots", self._place(op.slot, *self._sent(rank, op.step)))] = op.epoch

    def _publish(self, rank: int, op: q.Publish, answer: int, m: Memory) -> None:
        m[self.at(rank, "signals", op.step)] = op.epoch

    def _flag_part(self, rank: int, op: q.FlagPart, answer: int, m: Memory) -> None:
        m[self.at(op.peer, "flags", rank)] = self._told(op.epoch, op.parts)

    def _pull_part(self, rank: int, op: q.PullPart, answer: int, m: Memory) -> None:
        n = self._sent(op.peer, op.step)[1]
        place = self._place(op.slot, rank, n)
        m[self.at(rank, "pull")] = (op.peer, place, m[self.at(op.peer, "slots", place)])
        self._receive(rank, op.peer, n, r.TORN, m)

    def _pulled_part(self, rank: int, op: q.PulledPart, answer: int, m: Memory) -> None:
        self._receive(rank, op.peer, self._sent(op.peer, op.step)[1], m[self.at(rank, "pull")][2], m)
        m[self.at(rank, "pull")] = 0

    def _receive(self, rank: int, source: int, n: int, value: int, m: Memory) -> None:
        reads = self.at(rank, "read")
        if any(m[reads : reads + self.case.streams]):
            raise Fault("overwritten while read", f"rank {rank} pulls to where its sum reads")
        m[self.at(rank, "gathered", self.shard(source, n))] = value

    def _sum(self, rank: int, op: q.Sum, answer: int, m: Memory) -> None:
        m[self._reader(rank, op.epoch)] = op.epoch
        over = m[self.at(rank, "over")]
        if over and over <= op.epoch:
            return
        for source in range(self.case.world):
            for n in range(self.case.chunks):
                at = self.at(rank, "gathered", self.shard(source, n))
                if source == rank:
                    at = self.at(rank, "slots", self._place(op.epoch % p.SLOTS, rank, n))
                what = f"rank {rank}'s sum of call {op.epoch} has chunk {n} of rank {source}'s product"
                if m[at] == r.OVERWRITTEN or m[at] > op.epoch:
                    raise Fault("overwritten while read", f"{what}, which that rank wrote over while it was pulled")
                if m[at] != op.epoch:
                    raise Fault("read before arrival", f"{what} of call {m[at]}" if m[at] >= 0 else f"{what}, half")

    def _summed(self, rank: int, op: q.Summed, answer: int, m: Memory) -> None:
        m[self._reader(rank, op.epoch)] = 0
        m[self.at(rank, "summed")] = max(m[self.at(rank, "summed")], op.epoch)

    def told(self, epoch: int) -> int:
        """As of `RanksModel`."""
        return self._told(epoch, self.case.chunks)

    def _reader(self, rank: int, epoch: int) -> int:
        return self.at(rank, "read", self.stream(epoch))

    performed: ClassVar[dict[type, Does]] = {
        **r.RanksModel.performed, q.Compute: _compute, q.Computed: _computed, q.Publish: _publish,
        q.FlagPart: _flag_part,
        q.PullPart: _pull_part, q.PulledPart: _pulled_part, q.Ended: r.RanksModel._ended, p.Done: r.sets("sided"),
        q.Sum: _sum, q.Summed: _summed,
    }  # fmt: skip

    # The world outside ----------------------------------------------------------------------------------------------

    def lose(self, rank: int, m: Memory) -> None:
        """As of `RanksModel`."""
        m[self.at(rank, "pull")] = 0
