"""All-gather + matmul on GPUs: shards pushed or pulled by copy engines while a gated kernel takes what has come.

::

    calling stream:  shard -> own slot; signal it; kernel: schedule, gate, load, math, ...; the side stream
    side stream:     pushed: for each peer: push a chunk into its slot; signal it there; the next
                     pulled: tell the peers; for each of them: wait for its flag; pull a chunk; signal it; the next
    watchdog:        when this rank has given up, or a peer has: tells the others, ends kernels and streams that wait

What is issued is `tilestream.distributed.protocol`, operation by operation, which the checker explores; here is only
what each of its operations is on a GPU. None but the kernel needs an SM (invariant 10), and, before that, a copy of the
own shard into the slot; no operation waits for one that is issued after it, so the order in which the driver runs
streams does not matter.

A slot is as large as the whole: each rank's shard stands at its place there, and the kernel reads the slot itself. A
shard that is pushed is read where the caller has it, by the kernel and by the copy engines; it is copied into the own
slot only for a kernel that cannot (`tilestream.arrival.device.Apart`). One that is pulled, or not in one piece
(strides), goes out of that slot, behind that copy. Where the whole is wanted, too (``return_a``), it is copied out of
the slot behind the kernel.
"""

from __future__ import annotations

import functools
import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import Apart, PeerSignals
from tilestream.core.errors import ArrivalTimeout
from tilestream.distributed import protocol as p
from tilestream.distributed.call_queue import Turns, Underway, answer, nothing
from tilestream.distributed.collective import agree
from tilestream.distributed.gathered import Product, Whole
from tilestream.distributed.group_state import Member
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.shards import Shards
from tilestream.distributed.symmetric import PeerMemory
from tilestream.runtime.channel import channel
from tilestream.runtime.driver import copy_across, stream_wait, stream_write

#: Arrivals that are kept, of as many shapes and slots. More than calls under way: an expiry is known by their keys.
_MOST_ARRIVALS = 128
#: Scales begin at a multiple of this many bytes in a slot.
_ALIGN = 256
#: Seconds beyond the deadline that are left to a kernel that was launched to report it itself.
_LOADING = 0.25


class _Source(NamedTuple):
    """Data, or scales, as they travel: what a row is long, where they begin in a slot, and where they come from."""

    of_row: int
    at: int
    address: int
    from_slot: bool


class _Opening:
    """A call whose host is still issuing it, though a stream of it waits for a peer already.

    What the host does meanwhile may wait for that stream, and so for the peer: the driver loads a kernel (the first
    launch of any, ours or torch's, does it) only when what the GPU is at has ended, the stream's wait included. It may
    be that no kernel of this call runs then, which would have a deadline.
    """

    def __init__(self, epoch: int, shards: Shards, signals: PeerSignals, seconds: float, heard: int) -> None:
        self.epoch, self.seconds, self.heard, self.key = epoch, seconds, heard, signals.key
        self._shards, self._signals = shards, signals
        self.begun = time.perf_counter()
        #: Once its stream was let go: ranks that had not come. What kernels made of their rows is no number.
        self.missing: list[int] | None = None

    def timeout(self, op: str, rank: int, waited: float) -> ArrivalTimeout:
        """What is raised later where a rank has not come, if no kernel reports it."""
        assert self._signals.whose is not None
        chunk = next(self._shards.of_rank(rank)).chunk
        here, whose = self._signals.whose(chunk)
        return ArrivalTimeout(op, 0, chunk, "the first that reads it", waited, self.seconds, here, whose)


class Gatherer(Turns):
    """A member's gathers on one GPU: their signals, and what is under way. Hold the member's call."""

    op = "all_gather_matmul"

    def __init__(self, member: Member, device: torch.device, memory: PeerMemory | None = None) -> None:
        super().__init__(member, device, memory)
        self._arrivals: dict[tuple[Shards, int], Arrival] = {}
        self._heard = channel(device).newest
        #: Calls whose kernels were not all issued, and how long their peers' rows are waited for.
        self._without_kernel: dict[int, tuple[PeerSignals, float]] = {}
        self._opening: _Opening | None = None

    def reserve(self, size: int, chunks: int = 0) -> bool:
        """As of `Turns`. What waits for the old signals is forgotten with them."""
        new = super().reserve(size, chunks)
        if new:
            self._ask(None)  # while their keys are known
            self._arrivals.clear()
        return new

    def arrival(self, shards: Shards, epoch: int) -> Arrival:
        """What the kernel of a call waits for: the signals of its slot."""
        key = shards, epoch % p.SLOTS
        found = self._arrivals.pop(key, None)
        if found is None:
            if len(self._arrivals) >= _MOST_ARRIVALS:
                del self._arrivals[next(iter(self._arrivals))]
            found = shards.arrival(self._rank)
            words = self.memory.signals(epoch % p.SLOTS)[: found.num_chunks]
            found._signals = PeerSignals(words, self.device)
            rank, weakly = self._rank, weakref.ref(self)
            found._signals.whose = lambda chunk: (rank, f"rank {shards.rank_of(chunk)}'s part of a_shard")
            found._signals.gave_up = lambda: _expired(weakly())
        self._arrivals[key] = found  # the last, so that the first is the one that was not used for longest
        _signals(found).begin(epoch)
        return found

    # A call --------------------------------------------------------------------------------------------------------

    def issue(
        self, shards: Shards, shard: Whole, whole: torch.Tensor | None,
        compute: Callable[[Whole, Arrival], list[torch.Tensor]], seconds: float, way: p.Way,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Issue a call: publish, side stream, kernels. Returns what ``compute`` does; none of it has run yet.

        Parameters
        ----------
        shard
            May be written to, or freed, by whoever comes after this call in its stream.
        whole
            Where what is gathered is copied to; None: nowhere. It stands in a slot, and is another call's soon after.
        seconds
            The kernels' deadline.
        way
            How the shards travel; on each rank the same.
        """
        epoch, calling = self.begin(), torch.cuda.current_stream(self.device)
        overrule: Callable[[BaseException], None] = nothing
        try:
            arrival = self.arrival(shards, epoch)
            signals = _signals(arrival)
            overrule = signals.overrule
            slot = self._slot(self._rank, epoch % p.SLOTS, shards, shard)
            if shard.scales is not None:  # few, and often one number that is seen as many
                shard = shard._replace(scales=shard.scales.contiguous())
            for x in (*shard, *slot, whole):
                if x is not None:  # not freed, and used for something else, before the side stream is waited for (9)
                    x.record_stream(calling)
            from_slot = way == "pull" or not shard.data.is_contiguous()
            apart = None if from_slot else self._apart(shards, shard.data, slot.data)
            self._publish(epoch, shards, shard, slot, calling, from_slot)
            if way == "pull":
                self._opening = _Opening(epoch, shards, signals, seconds, self._heard)
                self._watchdog.wake()
            # Before the kernel: where launches block (CUDA_LAUNCH_BLOCKING) it waits for what is issued already.
            self._travel(epoch, shards, shard, slot, way)
        except BaseException as error:  # half a call: what the peers wait for may never come
            self._half(error)
            self._end(epoch, overrule, calling)  # and a side stream that waits for them is let go
            raise
        self._without_kernel[epoch] = signals, seconds
        signals.apart = apart
        try:
            outs = compute(slot, arrival)
            del self._without_kernel[epoch]
            if whole is not None:
                take_out(whole, slot.data, signals, shards)
                if apart is not None:
                    self._place(whole, shard.data)
        finally:  # without a kernel, too: the peers get their rows
            signals.apart = None  # the caller's tensor is his again
            missing = self._end(epoch, overrule, calling)
        for rank in missing:
            for out in outs:
                out.view(*shards.shape[:-1], out.shape[-1])[:, rank].fill_(math.nan)
            if whole is not None:
                _fill_nan(whole[:, rank])
        return outs

    def _apart(self, shards: Shards, mine: torch.Tensor, slot: torch.Tensor) -> Apart:
        """The own rows where the caller has them; a launch that reads them in the slot has them copied there."""

        @functools.cache  # once, for all products of the call
        def bring() -> None:
            self._place(slot, mine)

        rows = shards.rows
        whole = mine.view(shards.batches * rows, shards.width)
        return Apart(whole, self._rank * rows, rows, shards.world * rows, bring)

    def _place(self, whole: torch.Tensor, mine: torch.Tensor) -> None:
        """Copy the own rows to their place, each batch in one piece. Inside a GPU the driver copies by a kernel."""
        for into, source in zip(whole[:, self._rank], mine, strict=True):
            copy(into, source)

    def _end(self, epoch: int, overrule: Callable[[BaseException], None], calling: torch.cuda.Stream) -> list[int]:
        """What comes behind the kernel. Returns the ranks that were given up before all of the call was issued."""
        kernel, done = _mark(calling), _mark(self._side)
        answer(p.finish(epoch), {p.AwaitSide: lambda op: calling.wait_event(done)})
        end = _mark(calling)
        self.issued(Underway(epoch, overrule, kernel, end, end, epoch))
        with self._lock:  # the watchdog knows it as one under way by now
            opening, self._opening = self._opening, None
        return [] if opening is None else opening.missing or []

    def _publish(
        self, epoch: int, shards: Shards, shard: Whole, slot: Whole, calling: torch.cuda.Stream, from_slot: bool
    ) -> None:
        own = [part.chunk for part in shards.of_rank(self._rank)]

        def fill(op: p.Fill) -> None:
            if from_slot:  # else the data stand apart, and are brought behind their signals if at all (`bring`)
                self._place(slot.data, shard.data)
            if shard.scales is not None and slot.scales is not None:
                self._place(slot.scales, shard.scales)

        def signal(op: p.Signal) -> None:
            stream_write(calling.cuda_stream, self.memory.signal(self._rank, op.slot, own[op.chunk]), op.epoch)

        perform: dict[type, Callable[[Any], Any]] = {
            p.AwaitCall: lambda op: self.await_call(calling),
            p.Post: lambda op: self.post(calling),
            p.Fill: fill,
            p.Filled: nothing,  # what is issued to a stream comes after what was
            p.Signal: signal,
        }
        answer(p.publish(self._rank, len(own), epoch, from_slot), perform)

    def _travel(self, epoch: int, shards: Shards, shard: Whole, slot: Whole, way: p.Way) -> None:
        """The side stream's part."""
        parts, memory = [list(shards.of_rank(rank)) for rank in range(self._world)], self.memory
        mine, sources, handle = parts[self._rank], list(_sources(shard, slot)), self._side.cuda_stream

        def push(op: p.Push) -> None:
            part, target = mine[op.chunk], memory.address(op.peer, op.slot)
            there, rows = shards.place(self._rank, part)
            for source in sources:
                first = there if source.from_slot else part.batch * shards.rows + part.begin
                copy_across(
                    handle, target + source.at + there * source.of_row, source.address + first * source.of_row,
                    rows * source.of_row,
                )  # fmt: skip

        def tell(op: p.Tell) -> None:
            stream_write(handle, memory.signal(op.peer, op.slot, mine[op.chunk].chunk), op.epoch)

        def pull(op: p.Pull) -> None:
            source, target = (memory.address(rank, op.slot) for rank in (op.peer, self._rank))
            first, rows = shards.place(op.peer, parts[op.peer][op.chunk])
            for what in sources:
                at = what.at + first * what.of_row
                copy_across(handle, target + at, source + at, rows * what.of_row)

        def signal(op: p.Signal) -> None:
            stream_write(handle, memory.signal(self._rank, op.slot, parts[op.rank][op.chunk].chunk), op.epoch)

        perform: dict[type, Callable[[Any], Any]] = {
            p.AwaitPost: lambda op: self._side.wait_event(self._posted),
            p.Push: push,
            p.Pushed: nothing,
            p.Tell: tell,
            p.Flag: lambda op: stream_write(handle, self.words.flag(op.peer, self._rank), op.epoch),
            p.AwaitFlag: lambda op: stream_wait(handle, self.words.flag(self._rank, op.peer), op.epoch),
            p.Pull: pull,
            p.Pulled: nothing,
            p.Signal: signal,
            p.Done: nothing,  # `_end` marks it
        }
        answer(p.side(self._rank, self._world, len(mine), epoch, way), perform)

    def _slot(self, rank: int, slot: int, shards: Shards, like: Whole) -> Whole:
        """A slot as what is in it: a whole, then its scales."""
        memory, of = self.memory.slot(rank, slot), like.data.dtype
        size = math.prod(shards.shape) * of.itemsize
        data = memory[:size].view(of).view(shards.shape)
        if like.scales is None:
            return Whole(data, None)
        at = _aligned(size)
        scales = memory[at : at + 4 * shards.total].view(torch.float32)
        return Whole(data, scales.view(*shards.shape[:-1], 1))

    # The host, and giving up ---------------------------------------------------------------------------------------

    def begun(self, epoch: int) -> int | None:
        """As of `Turns`."""
        perform: dict[type, Callable[[Any], Any]] = {
            p.AwaitKernel: self._await_rows, p.Ask: self._ask, p.Begin: self._begin,
        }  # fmt: skip
        return answer(p.begin(epoch), perform)

    def _await_rows(self, op: p.AwaitKernel) -> None:
        """Wait for a kernel; where it was not issued, for what it would have waited for."""
        self.await_kernel(op)
        for epoch in [epoch for epoch in self._without_kernel if epoch <= op.epoch]:
            signals, seconds = self._without_kernel.pop(epoch)
            end = time.perf_counter() + seconds
            while not all(signals.state()):
                if time.perf_counter() > end:
                    self.give_up(self.expired())
                    return
                time.sleep(0.001)

    def look(self) -> bool:
        """As of `Turns`; and a call that is still being issued is not waited for in vain."""
        busy, opening = super().look(), self._opening
        if opening is not None:
            self._look_at(opening)
        return busy or opening is not None

    def _look_at(self, opening: _Opening) -> None:
        """Let its stream go where a peer will not come, or was not there in time, or a kernel has reported that.

        All of it by the host's memory: the driver may be waiting for that stream.
        """
        member = self._member()
        if member is None:
            return
        told = self.words.told()
        late = [peer for peer in p.peers(self._rank, self._world) if told[peer] < opening.epoch]
        error: BaseException | None = None
        if not member.broken:
            waited = time.perf_counter() - opening.begun
            if self.words.aborted():
                self.give_up(f"{self.op}: a peer has given up waiting")
                error = member.break_("")  # why it was broken is kept
            elif late and waited > opening.seconds + _LOADING:
                self.give_up(self.expired())
                error = opening.timeout(self.op, late[0], waited)
            elif not self._ask(opening):  # a kernel that was launched has its own deadline, and reports
                return
        if opening.missing is None:
            with self._lock:
                if self._opening is not opening:
                    return  # under way by now, and looked after as such
                opening.missing = late
            if error is not None:
                channel(self.device).post(error, opening.key, opening.heard)  # a kernel of it may be running
        for peer in p.peers(self._rank, self._world):
            self.words.let_go(peer, opening.epoch)

    def _ask(self, op: object) -> int:
        newest, said = channel(self.device).heard(self._heard, {x.key for x in list(self._arrivals.values())})
        if said:
            self.give_up(self.expired())
        self._heard = newest  # last: until the group is broken, host and watchdog each hear of it for themselves
        return int(said)

    def gave_up(self, oldest: Underway) -> str:
        """As of `Turns`: a kernel has reported that it did, or the group is broken without a word of a peer's."""
        member = self._member()
        return self.expired() if self._ask(oldest) or (member is not None and member.broken) else ""


def _signals(arrival: Arrival) -> PeerSignals:
    signals = arrival._signals
    assert isinstance(signals, PeerSignals)
    return signals


def _expired(gatherer: Gatherer | None) -> None:
    """A kernel has expired, and whoever asked for what the device has reported is told before the watchdog looks."""
    if gatherer is not None:
        gatherer.give_up(gatherer.expired())


def _sources(shard: Whole, slot: Whole) -> Iterator[_Source]:
    """Data and scales as they travel."""
    base = slot.data.data_ptr()
    for mine, there in zip(shard, slot, strict=True):
        if mine is not None and there is not None:
            strided = not mine.is_contiguous()
            address = (there if strided else mine).data_ptr()
            yield _Source(mine.shape[-1] * mine.element_size(), there.data_ptr() - base, address, strided)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the current stream, whatever the strides."""
    to.copy_(source)


def take_out(whole: torch.Tensor, gathered: torch.Tensor, signals: PeerSignals, shards: Shards) -> None:
    """Copy what was gathered out of its slot, on the current stream, behind the kernel; NaN where it did not come."""
    words = signals.use(apart=True).words.view(shards.batches, shards.world, shards.parts, 1, 1)
    arrived = words >= signals.epoch  # by a kernel of its own, before what it says has arrived is read
    bits = _bits(whole)
    nan = whole.view(bits).new_full((), torch.iinfo(bits).max)
    for i in range(shards.parts):
        rows = slice(shards.rows * i // shards.parts, shards.rows * (i + 1) // shards.parts)
        into, source = (x.view(bits)[:, :, rows] for x in (whole, gathered))
        torch.where(arrived[:, :, i], source, nan, out=into)


def _bits(x: torch.Tensor) -> torch.dtype:
    """As which integers what travels is made NaN, whatever its format: the largest is one in each."""
    return torch.int8 if x.element_size() == 1 else torch.int16


def _fill_nan(x: torch.Tensor) -> None:
    bits = x.view(_bits(x))
    bits.fill_(torch.iinfo(bits.dtype).max)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def gather_matmul(
    member: Member,
    plan: DistributedPlan,
    shards: Shards,
    shard: Whole,
    products: Sequence[Product],
    seconds: float,
    return_a: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gather ``shard`` (``[batches, rows, width]``) from all ranks, and compute ``products`` of the whole meanwhile.

    Issues everything and returns; what goes wrong later is raised by the next call on this device, and with this group.
    """
    device, x = shard.data.device, shard.data
    with torch.cuda.device(device):
        agree(member, plan, device)
        gatherer = member.gatherer = member.gatherer or Gatherer(member, device)
        gatherer.check_gpu("a_shard", device)
        size = _aligned(math.prod(shards.shape) * x.element_size()) + 4 * shards.total
        gatherer.reserve(size, shards.batches * shards.world * shards.parts)
        whole = x.new_empty(shards.shape) if return_a else None

        def compute(gathered: Whole, arrival: Arrival) -> list[torch.Tensor]:
            a = gathered.data.view(shards.total, shards.width)
            of_rows = None if gathered.scales is None else gathered.scales.view(shards.total, 1)
            return [product(a, of_rows, arrival, seconds) for product in products]

        outs = gatherer.issue(shards, shard, whole, compute, seconds, plan.decision.way)
    return x if whole is None else whole, outs
