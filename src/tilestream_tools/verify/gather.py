"""Model 4: the ranks of a gather, their streams, hosts and watchdogs, over slots, signals and abort words.

It explores `tilestream.core.protocols.gather`, as GPUs perform it. A rank consists of its host, which issues calls
ahead of the device; the calling stream, kernel included; the side stream; and the watchdog. Calls may also come from
two streams in turn that do not synchronise. A copy has a begin and an end, and any operation may come between. Before
each call the caller writes the next shard to the tensor that held the shard of the stream's last call.

From call to call shards may be pushed or pulled, in different numbers of chunks. A place in a slot and a signal have
the number of their chunk in the whole, so another call's chunk of that number may be another rank's.

The environment may make a waiting kernel expire (``expires``: also one whose peers are only late), and may remove a
rank for good at any moment, in the middle of a copy too (``lost``).

Properties: a kernel reads of each chunk the complete data of its own epoch, or it hands in NaN. No rank is ever stuck
for good, ranks that have lost a peer included. Where no kernel has expired, all calls are done; where one has, every
remaining rank is told.

Reductions, and why they hide no fault:

- *Filled, Pushed, Pulled, ReadDone* are delayed to the operation after them: a longer copy can be disturbed for longer.
- *Fill, Push, Pull, Read* are eager: a copy that begins at once can be disturbed for longer, and sees the first values.
- *Signal, SignalPeer, Post, Done, Ended* are eager: they enable others and remove no behaviour. What could come
  between one of them and the end of the copy before it can come before both. The same holds for *Break*, *Abort*,
  *Overrule* and *Release* and the look before them, which changes nothing.
- *Issued* and the waits for a rank's own streams are lazy: what they wait for stays once it is there, and they change
  nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from tilestream.core.protocols import gather as p
from tilestream_tools.verify import ranks as r
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.model import Memory
from tilestream_tools.verify.ranked import Asked, Does


class Write(NamedTuple):
    """The caller, on the calling stream: write the shard of ``epoch`` to its tensor."""

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


@dataclass(frozen=True)
class GatherCase(r.RanksCase):
    """One configuration of model 4.

    Attributes
    ----------
    chunks
        Of a shard, call by call, and from the first on again.
    strided
        Whether shards are not in one piece.
    ways
        In which shards travel, call by call, and from the first on again.
    local
        Whether the kernel reads a shard that is pushed out of the caller's tensor there, too; else in the slot.
    brought
        Whether it is not copied there before the kernel's launch has asked for it, behind its signals.
    sets
        Sets of signals, as the text that is run has them.
    publish, side, finish
        The text, beside that of every case.
    """

    chunks: tuple[int, ...] = (1,)
    strided: bool = False
    ways: tuple[p.Way, ...] = ("push",)
    local: bool = False
    brought: bool = False
    sets: int = p.SLOTS
    publish: Callable[[int, int, int, bool], r.Turn] = p.publish
    side: Callable[[int, int, int, int, p.Way], r.Turn] = p.side
    finish: Callable[[int], r.Turn] = p.finish

    def build(self, reduce: bool = True, symmetry: bool = True) -> GatherModel:
        """The model of this configuration."""
        return GatherModel(self, reduce)

    def chunks_of(self, epoch: int) -> int:
        """Chunks of a shard in a call."""
        return self.chunks[(epoch - 1) % len(self.chunks)]

    def way_of(self, epoch: int) -> p.Way:
        """In which the shards of a call travel."""
        return self.ways[(epoch - 1) % len(self.ways)]

    def from_slot(self, epoch: int) -> bool:
        """Whether a call's shard goes out of the own slot."""
        return self.strided or self.way_of(epoch) == "pull"

    def reads_apart(self, epoch: int) -> bool:
        """Whether a call's kernel reads the own shard where the caller has it; it is not in the slot then."""
        return self.local and not self.from_slot(epoch)

    @property
    def words(self) -> int:
        """Of signals, a slot."""
        return self.world * max(self.chunks)

    def call(self, rank: int, epoch: int) -> r.Turn:
        """As of `RanksCase`: the caller's write, a call, with the kernel, which reads its rank's own rows first."""
        yield Write(epoch)
        chunks = self.chunks_of(epoch)
        published = self.publish(rank, chunks, epoch, self.from_slot(epoch))
        yield from _brought(published) if self.brought and not self.from_slot(epoch) else published
        for peer in (rank, *p.peers(rank, self.world)):
            for chunk in range(chunks):
                if not (yield Gate(peer, chunk, epoch)):
                    break
                yield Read(peer, chunk, epoch)
                yield ReadDone(peer, chunk, epoch)
        yield r.Ended(epoch)
        yield from self.finish(epoch)
        return None

    def beside(self, rank: int, epoch: int) -> r.Turn:
        """As of `RanksCase`."""
        return self.side(rank, self.world, self.chunks_of(epoch), epoch, self.way_of(epoch))

    def sizes(self) -> dict[str, int]:
        """As of `RanksCase`.

        The last call that the side stream is done with; where the push under way reads, and what; the pull under way;
        flags by peer; the caller's tensors; signals and slots; by stream, the place that its kernel reads, or that it
        reads the caller's tensor.
        """
        words = self.slots * self.words
        return {
            "sided": 1, "push": 1, "pull": 1, "flags": self.world, "tensors": self.streams,
            "signals": self.sets * self.words, "slots": words, "read": self.streams,
        }  # fmt: skip

    def __str__(self) -> str:
        words = [self.of("/".join(map(str, self.chunks)))]
        words += ["strided"] if self.strided else []
        words += ["own rows local"] if self.local else ["own rows brought"] if self.brought else []
        words += [f"by {'/'.join(self.ways)}"] if self.ways != ("push",) else []
        return ", ".join(words)


def _brought(published: r.Turn) -> r.Turn:
    """The same, with the copy into the own slot behind all else."""
    fills: list[Any] = []
    for op in published:  # no answer matters to it
        if isinstance(op, (p.Fill, p.Filled)):
            fills.append(op)
        else:
            yield op
    for op in fills:
        yield op
    return None


class GatherModel(r.RanksModel):
    """See the module."""

    case: GatherCase
    eager: ClassVar[frozenset[type]] = frozenset({
        p.Fill, p.Push, p.Pull, p.Signal, p.SignalPeer, p.Post, p.Done, p.Break, p.Abort, p.Overrule, p.Release, Read,
        r.Ended,
    })  # fmt: skip
    delayed: frozenset[type] = frozenset({p.Filled, p.Pushed, p.Pulled, ReadDone})
    lazy: ClassVar[frozenset[type]] = frozenset({r.Issued, p.AwaitCall, p.AwaitPost, p.AwaitSide, p.AwaitKernel})

    def place(self, slot: int, rank: int, chunk: int, epoch: int) -> int:
        """Of a chunk of a rank's shard, and of its signal."""
        return slot * self.case.words + rank * self.case.chunks_of(epoch) + chunk

    # Answers --------------------------------------------------------------------------------------------------------

    def _expired(self, rank: int, op: p.CheckExpired, m: Memory) -> Sequence[int]:
        expired = m[self.at(rank, "expired")]
        if not expired:
            return (0,)
        return (1,) if expired <= m[self.at(rank, "ended")] else (0, 1)

    def _await_call(self, rank: int, op: p.AwaitCall, m: Memory) -> Sequence[int]:
        return (0,) if self.over(rank, m) >= op.epoch else ()

    def over(self, rank: int, m: Memory) -> int:
        """As of `RanksModel`."""
        return min(int(m[self.at(rank, "ended")]), int(m[self.at(rank, "sided")]))

    def waiting(self, rank: int, m: Memory) -> p.AwaitFlag | None:
        """As of `RanksModel`: the side stream's."""
        op: Any = self.locals.op[m[(rank + 1) * self.roles - 2]]
        return op if type(op) is p.AwaitFlag and not r.FLAGGED(self, rank, op, m) else None

    def _gate(self, rank: int, op: Gate, m: Memory) -> Sequence[int]:
        place = self.place(op.epoch % self.case.sets, op.rank, op.chunk, op.epoch)
        arrived = (1,) if m[self.at(rank, "signals", place)] >= op.epoch else ()
        return (*arrived, 0) if m[self.at(rank, "over")] >= op.epoch else arrived

    asked: ClassVar[dict[type, Asked]] = {
        **r.RanksModel.asked, p.CheckExpired: _expired, p.AwaitCall: _await_call, p.AwaitSide: r.reached("sided"),
        p.AwaitFlag: r.FLAGGED, Gate: _gate,
    }  # fmt: skip

    # What operations do ---------------------------------------------------------------------------------------------

    def kept(self, rank: int, at: int) -> bool:
        """As of `RanksModel`: what its peers may still pull."""
        return "pull" in self.case.ways and self.at(rank, "slots") <= at < self.at(rank, "read")

    def _break_if_expired(self, rank: int, op: p.CheckExpired, answer: int, m: Memory) -> None:
        if answer:
            m[self.at(rank, "broken")] = 1
            for peer in p.peers(rank, self.case.world):
                m[self.at(peer, "abort")] = 1

    def _overwrite(self, rank: int, source: int, m: Memory) -> None:
        """What a push under way reads from ``source`` is written again."""
        push = m[self.at(rank, "push")]
        if push and push[0] == source:
            m[self.at(rank, "push")] = (source, r.OVERWRITTEN)

    def _write_tensor(self, rank: int, op: Write, answer: int, m: Memory) -> None:
        self._overwrite(rank, -1 - self.stream(op.epoch), m)
        m[self.at(rank, "tensors", self.stream(op.epoch))] = op.epoch

    def _write(self, rank: int, place: int, value: int, m: Memory) -> None:
        """Write to a slot of ``rank``'s."""
        reads = self.at(rank, "read")
        if place + 1 in m[reads : reads + self.case.streams]:
            raise Fault("overwritten while read", f"rank {rank}'s kernel reads place {place} of its slots")
        m[self.at(rank, "slots", place)] = value
        for peer in p.peers(rank, self.case.world):
            pull = m[self.at(peer, "pull")]
            if pull and pull[:2] == (rank, place):
                m[self.at(peer, "pull")] = (rank, place, r.OVERWRITTEN)

    def _fill(self, rank: int, op: p.Fill, answer: int, m: Memory) -> None:
        if self.case.reads_apart(op.epoch):
            return
        for chunk in range(self.case.chunks_of(op.epoch)):
            self._write(rank, self.place(op.slot, rank, chunk, op.epoch), r.TORN, m)
        self._overwrite(rank, op.slot, m)

    def _filled(self, rank: int, op: p.Filled, answer: int, m: Memory) -> None:
        if self.case.reads_apart(op.epoch):
            return
        for chunk in range(self.case.chunks_of(op.epoch)):
            self._write(rank, self.place(op.slot, rank, chunk, op.epoch), op.epoch, m)

    def _signal(self, rank: int, op: p.Signal, answer: int, m: Memory) -> None:
        m[self.at(rank, "signals", self.place(op.slot, op.rank, op.chunk, op.epoch))] = op.epoch

    def _push(self, rank: int, op: p.Push, answer: int, m: Memory) -> None:
        place, source = self.place(op.slot, rank, op.chunk, op.epoch), -1 - self.stream(op.epoch)
        value = m[self.at(rank, "tensors", self.stream(op.epoch))]
        if self.case.strided:
            source, value = op.slot, m[self.at(rank, "slots", place)]
        m[self.at(rank, "push")] = (source, value)
        self._write(op.peer, place, r.TORN, m)

    def _pushed(self, rank: int, op: p.Pushed, answer: int, m: Memory) -> None:
        value = m[self.at(rank, "push")][1]
        self._write(op.peer, self.place(op.slot, rank, op.chunk, op.epoch), value, m)
        m[self.at(rank, "push")] = 0

    def _signal_peer(self, rank: int, op: p.SignalPeer, answer: int, m: Memory) -> None:
        m[self.at(op.peer, "signals", self.place(op.slot, rank, op.chunk, op.epoch))] = op.epoch

    def _pull(self, rank: int, op: p.Pull, answer: int, m: Memory) -> None:
        place = self.place(op.slot, op.peer, op.chunk, op.epoch)
        m[self.at(rank, "pull")] = (op.peer, place, m[self.at(op.peer, "slots", place)])
        self._write(rank, place, r.TORN, m)

    def _pulled(self, rank: int, op: p.Pulled, answer: int, m: Memory) -> None:
        _, place, value = m[self.at(rank, "pull")]
        m[self.at(rank, "pull")] = 0
        self._write(rank, place, value, m)

    def _read(self, rank: int, op: Read, answer: int, m: Memory) -> None:
        stream = self.stream(op.epoch)
        reads = self.place(op.epoch % self.case.slots, op.rank, op.chunk, op.epoch) + 1
        value = m[self.at(rank, "slots", reads - 1)]
        if op.rank == rank and self.case.reads_apart(op.epoch):
            reads, value = -1 - stream, m[self.at(rank, "tensors", stream)]
        what = f"rank {rank}'s kernel of call {op.epoch} reads chunk {op.chunk} of rank {op.rank}'s shard"
        if value == r.OVERWRITTEN or value > op.epoch:
            raise Fault("overwritten while read", f"{what}, and has that of a later call")
        if value != op.epoch:
            raise Fault("read before arrival", f"{what}, and has {'half of it' if value < 0 else f'that of {value}'}")
        m[self.at(rank, "read", stream)] = reads

    def _read_done(self, rank: int, op: ReadDone, answer: int, m: Memory) -> None:
        m[self.at(rank, "read", self.stream(op.epoch))] = 0

    def _overrule(self, rank: int, op: p.Overrule, answer: int, m: Memory) -> None:
        m[self.at(rank, "over")] = max(m[self.at(rank, "over")], op.epoch)

    performed: ClassVar[dict[type, Does]] = {
        **r.RanksModel.performed, p.CheckExpired: _break_if_expired, Write: _write_tensor, p.Fill: _fill,
        p.Filled: _filled,
        p.Signal: _signal, p.Push: _push, p.Pushed: _pushed, p.SignalPeer: _signal_peer, p.Flag: r.flags, p.Pull: _pull,
        p.Pulled: _pulled, p.Done: r.sets("sided"), Read: _read, ReadDone: _read_done, p.Overrule: _overrule,
    }  # fmt: skip

    # The world outside ----------------------------------------------------------------------------------------------

    def lose(self, rank: int, m: Memory) -> None:
        """As of `RanksModel`."""
        m[self.at(rank, "pull")] = 0

    def impatient(self, rank: int, m: Memory) -> list[tuple[str, Memory]]:
        """As of `RanksModel`: a kernel that waits."""
        out: list[tuple[str, Memory]] = []
        for stream in range(self.case.streams):
            waits: Any = self.locals.op[m[rank * self.roles + 1 + stream]]
            may = type(waits) is Gate and (rank, waits.epoch) in self.case.expires
            if may and not self._gate(rank, waits, m):
                n = m.copy()
                n[self.at(rank, "over")] = waits.epoch
                n[self.at(rank, "expired")] = n[self.at(rank, "expired")] or waits.epoch
                out.append((f"rank {rank}'s kernel of call {waits.epoch} expires", n))
        return out
