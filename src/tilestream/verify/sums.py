"""Model 7: the ranks of a sum, their streams, hosts and watchdogs: model 4 for products that are pulled and added.

Explored is the text of `tilestream.distributed.protocol`, as GPUs perform it, in a world like that of
`tilestream.verify.gather`, whose words these are. The kernel waits for nobody; so what may expire is the watchdog's
patience, once the kernel has ended, while the side stream waits for a peer.

What must hold: a sum is of its own epoch's parts, all of them, whole; or it is NaN, from the call on that the watchdog
has overruled. For the rest as in model 4. So are the reductions: Compute is as Fill, Publish as Signal, Sum as Read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tilestream.distributed import protocol as p
from tilestream.verify.faults import Fault
from tilestream.verify.gather import OVERWRITTEN, TORN, GatherCase, GatherModel, Issued, Turn
from tilestream.verify.model import Memory

#: ``produce(rank, world, batches, parts, epoch)``, and the same of `scatter`.
Text = Callable[[int, int, int, int, int], Turn]


@dataclass(frozen=True)
class SumCase(GatherCase):
    """One configuration of model 7: as of model 4, with ``produce``, ``scatter`` and ``add_up`` for texts."""

    produce: Text = p.produce
    scatter: Text = p.scatter
    add_up: Callable[[int], Turn] = p.add_up

    def build(self, reduce: bool = True, symmetry: bool = True) -> SumModel:
        """The model of this configuration."""
        return SumModel(self, reduce)

    def calling(self, rank: int, epoch: int) -> Turn:
        """As of `GatherCase`."""
        if not (yield Issued(epoch)):
            return None
        yield from self.produce(rank, self.world, 1, self.chunks, epoch)
        yield from self.add_up(epoch)
        return epoch + self.streams if epoch + self.streams <= self.epochs else None

    def side(self, rank: int, epoch: int) -> Turn:
        """As of `GatherCase`."""
        if not (yield Issued(epoch)):
            return None
        yield from self.scatter(rank, self.world, 1, self.chunks, epoch)
        return epoch + 1 if epoch < self.epochs else None

    def sizes(self) -> dict[str, int]:
        """As of `GatherCase`: slots hold whole products; ``summed`` is the last call that is over."""
        shards = self.world * self.chunks
        return {
            "flags": self.world, "signals": shards, "slots": self.slots * shards, "gathered": shards,
            "read": self.streams, "summed": 1,
        }  # fmt: skip


class SumModel(GatherModel):
    """See the module. A rank's memory as in model 4; a signal is a step's."""

    case: SumCase
    eager: ClassVar[frozenset[type]] = frozenset(
        {p.Compute, p.PullPart, p.Publish, p.Post, p.Done, p.Ended, p.Break, p.Overrule, p.Release, p.Sum}
    )
    delayed: frozenset[type] = frozenset({p.Computed, p.PulledPart, p.Summed})
    lazy: ClassVar[frozenset[type]] = frozenset({Issued, p.AwaitCall, p.AwaitPost, p.AwaitPublished, p.AwaitSide})

    def _told(self, epoch: int, parts: int) -> int:
        """What a flag says that so many chunks of a call are there."""
        return (epoch - 1) * self.case.chunks + parts

    def _place(self, slot: int, peer: int, n: int) -> int:
        """Of a chunk for ``peer`` in a rank's slots."""
        return (slot * self.case.world + peer) * self.case.chunks + n

    def _sent(self, rank: int, step: int) -> tuple[int, int]:
        return p.sent(rank, self.case.world, 1, self.case.chunks, step)

    # Answers --------------------------------------------------------------------------------------------------------

    def _await_call(self, rank: int, op: p.AwaitCall, m: Memory) -> Sequence[int]:
        return (0,) if min(m[self.at(rank, "sided")], m[self.at(rank, "summed")]) >= op.epoch else ()

    def _await_published(self, rank: int, op: p.AwaitPublished, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "signals", op.step)] >= op.epoch else ()

    def _await_part(self, rank: int, op: p.AwaitPart, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "flags", op.peer)] >= self._told(op.epoch, op.parts) else ()

    def _await_side(self, rank: int, op: p.AwaitSide, m: Memory) -> Sequence[int]:
        return (0,) if m[self.at(rank, "sided")] >= op.epoch else ()

    def _waits(self, rank: int, m: Memory) -> p.AwaitPart | None:
        """What the side stream is stuck at: a flag that does not say it yet."""
        op = self.locals.op[m[(rank + 1) * self._roles - 2]]
        return op if isinstance(op, p.AwaitPart) and not self._await_part(rank, op, m) else None

    def _await_done(self, rank: int, op: p.AwaitDone, m: Memory) -> Sequence[int]:
        if m[self.at(rank, "sided")] >= op.epoch:
            return (1,)
        return () if self._waits(rank, m) is None else (0,)

    _asked = {  # noqa: RUF012  # as the class it extends has it
        **GatherModel._asked, p.AwaitCall: _await_call, p.AwaitPublished: _await_published,
        p.AwaitPart: _await_part, p.AwaitSide: _await_side, p.AwaitDone: _await_done,
    }  # fmt: skip

    # What operations do ---------------------------------------------------------------------------------------------

    def _compute(self, rank: int, op: p.Compute, answer: int, m: Memory) -> None:
        peer, n = self._sent(rank, op.step)
        place = self._place(op.slot, peer, n)
        reads = self.at(rank, "read")
        if peer == rank and any(x and x % self.case.slots == op.slot for x in m[reads : reads + self.case.streams]):
            raise Fault("overwritten while read", f"rank {rank} computes where its sum reads")
        m[self.at(rank, "slots", place)] = TORN
        for other in range(self.case.world):
            pull = m[self.at(other, "pull")]
            if pull and pull[:2] == (rank, place):
                m[self.at(other, "pull")] = (*pull[:2], OVERWRITTEN)

    def _computed(self, rank: int, op: p.Computed, answer: int, m: Memory) -> None:
        m[self.at(rank, "slots", self._place(op.slot, *self._sent(rank, op.step)))] = op.epoch

    def _publish(self, rank: int, op: p.Publish, answer: int, m: Memory) -> None:
        m[self.at(rank, "signals", op.step)] = op.epoch

    def _tell_part(self, rank: int, op: p.TellPart, answer: int, m: Memory) -> None:
        m[self.at(op.peer, "flags", rank)] = self._told(op.epoch, op.parts)

    def _pull_part(self, rank: int, op: p.PullPart, answer: int, m: Memory) -> None:
        n = self._sent(op.peer, op.step)[1]
        place = self._place(op.slot, rank, n)
        m[self.at(rank, "pull")] = (op.peer, place, m[self.at(op.peer, "slots", place)])
        self._receive(rank, op.peer, n, TORN, m)

    def _pulled_part(self, rank: int, op: p.PulledPart, answer: int, m: Memory) -> None:
        self._receive(rank, op.peer, self._sent(op.peer, op.step)[1], m[self.at(rank, "pull")][2], m)
        m[self.at(rank, "pull")] = 0

    def _receive(self, rank: int, source: int, n: int, value: int, m: Memory) -> None:
        reads = self.at(rank, "read")
        if any(m[reads : reads + self.case.streams]):
            raise Fault("overwritten while read", f"rank {rank} pulls to where its sum reads")
        m[self.at(rank, "gathered", self.shard(source, n))] = value

    def _kernel_ended(self, rank: int, op: p.Ended, answer: int, m: Memory) -> None:
        m[self.at(rank, "ended")] = max(m[self.at(rank, "ended")], op.epoch)

    def _sum(self, rank: int, op: p.Sum, answer: int, m: Memory) -> None:
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
                if m[at] == OVERWRITTEN or m[at] > op.epoch:
                    raise Fault("overwritten while read", f"{what}, which that rank wrote over while it was pulled")
                if m[at] != op.epoch:
                    raise Fault("read before arrival", f"{what} of call {m[at]}" if m[at] >= 0 else f"{what}, half")

    def _summed(self, rank: int, op: p.Summed, answer: int, m: Memory) -> None:
        m[self._reader(rank, op.epoch)] = 0
        m[self.at(rank, "summed")] = max(m[self.at(rank, "summed")], op.epoch)

    def _overrule(self, rank: int, op: p.Overrule, answer: int, m: Memory) -> None:
        m[self.at(rank, "over")] = m[self.at(rank, "over")] or op.epoch

    def _release(self, rank: int, op: p.Release, answer: int, m: Memory) -> None:
        for peer in p.peers(rank, self.case.world):
            flag, told = self.at(rank, "flags", peer), self._told(op.epoch, self.case.chunks)
            m[flag] = told if answer else max(m[flag], told)

    _does = {  # noqa: RUF012  # as above
        **GatherModel._does, p.Compute: _compute, p.Computed: _computed, p.Publish: _publish, p.TellPart: _tell_part,
        p.PullPart: _pull_part, p.PulledPart: _pulled_part, p.Ended: _kernel_ended, p.Sum: _sum, p.Summed: _summed,
        p.Overrule: _overrule, p.Release: _release,
    }  # fmt: skip

    def environment(self, m: Memory) -> list[tuple[str, Memory]]:
        """As `Model.environment`."""
        out: list[tuple[str, Memory]] = []
        for rank in range(self.case.world):
            if m[self.at(rank, "dead")]:
                continue
            stuck = self._waits(rank, m)
            patient = stuck is None or m[self.at(rank, "ended")] < stuck.epoch or m[self.at(rank, "expired")]
            if stuck is not None and not patient and (rank, stuck.epoch) in self.case.expires:
                n = m.copy()
                n[self.at(rank, "expired")] = 1
                out.append((f"rank {rank} is out of patience with call {stuck.epoch}", n))
            if rank == self.case.lost:
                n = m.copy()
                n[self.at(rank, "dead")], n[self.at(rank, "pull")] = 1, 0
                out.append((f"rank {rank} is lost", n))
        return out
