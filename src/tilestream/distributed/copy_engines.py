"""All-gather + matmul on GPUs: shards pulled by copy engines while a gated kernel takes what has come.

::

    calling stream:  shard -> slot, shard -> its place in the whole; signal; kernel: schedule, gate, load, math, ...
    side stream:     tell the peers; for each of them: wait for its flag; pull a chunk; signal it; the next
    watchdog:        lets the side stream go when a kernel has expired, here or on a peer

What is issued is `tilestream.distributed.protocol`, operation by operation, which the checker explores; here is only
what each of its operations is on a GPU. None but the kernel needs an SM (invariant 10); no operation waits for one that
is issued after it, on this rank or another, so the order in which the driver runs streams does not matter.

A slot is as large as the whole: a rank's shard stands at its place there, the peers' are pulled to theirs, and the
kernel reads the slot itself. So own rows are copied once; where the whole is wanted, too (``return_a``), twice.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.distributed import protocol as p
from tilestream.distributed.collective import agree
from tilestream.distributed.members import Member
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.shards import Shards
from tilestream.distributed.symmetric import PeerMemory
from tilestream.distributed.turns import Turns, Underway, answer, nothing
from tilestream.distributed.whole import Product, Whole
from tilestream.runtime.driver import copy_across, stream_wait, stream_write

if TYPE_CHECKING:
    from tilestream.arrival.device import DeviceSignals

#: Signals that are kept, of as many shapes.
_MOST_ARRIVALS = 128
#: Scales begin at a multiple of this many bytes in a slot.
_ALIGN = 256


class Gatherer(Turns):
    """A member's gathers on one GPU: their signals, and what is under way. Hold the member's call."""

    op = "all_gather_matmul"

    def __init__(self, member: Member, device: torch.device, memory: PeerMemory | None = None) -> None:
        super().__init__(member, device, memory)
        self._arrivals: dict[tuple[Shards, int], Arrival] = {}

    def arrival(self, shards: Shards, epoch: int) -> Arrival:
        """Signals for a call: those of the call before the last, at their next epoch."""
        key = shards, epoch % (p.AHEAD + 1)
        found = self._arrivals.get(key)
        if found is None:
            if len(self._arrivals) >= _MOST_ARRIVALS:
                del self._arrivals[next(iter(self._arrivals))]
            found = self._arrivals[key] = self.make_arrival(shards)
            rank, weakly = self._rank, weakref.ref(self)
            found._signals.whose = lambda chunk: (rank, f"rank {shards.rank_of(chunk)}'s part of a_shard")
            found._signals.gave_up = lambda: _expired(weakly())
        else:
            found.advance()
        return found

    def make_arrival(self, shards: Shards) -> Arrival:
        """Signals in this GPU's memory."""
        return shards.arrival(self._rank, device=str(self.device))

    # A call --------------------------------------------------------------------------------------------------------

    def issue(
        self, shards: Shards, shard: Whole, whole: Whole | None,
        compute: Callable[[Whole, Arrival], list[torch.Tensor]],
    ) -> list[torch.Tensor]:  # fmt: skip
        """Issue a call: publish, gather, kernels. Returns what ``compute`` does; none of it has run yet.

        ``whole`` None: what is gathered stands in a slot, and is another call's soon after.
        """
        epoch = self.begin()
        arrival = self.arrival(shards, epoch)
        slot = self._slot(self._rank, epoch % p.SLOTS, shards, shard)
        whole = slot if whole is None else whole
        calling = torch.cuda.current_stream(self.device)
        for x in (*shard, *whole):
            if x is not None:
                x.record_stream(calling)
        for x in whole:
            if x is not None:  # not freed, and used for something else, while the side stream writes it (invariant 9)
                x.record_stream(self._side)
        try:
            self._publish(epoch, shards, shard, slot, whole, arrival, calling)
            # Before the kernel: where launches block (CUDA_LAUNCH_BLOCKING) it waits for what is issued already.
            done = self._gather(epoch, shards, whole, arrival)
        except BaseException as error:  # half a call: what the peers wait for may never come
            self._half(error)
            raise
        try:
            outs = compute(whole, arrival)
        finally:  # without a kernel, too: the peers pull what was published
            kernel = torch.cuda.Event()
            kernel.record(calling)
            overrule = cast("DeviceSignals", arrival._signals).overrule
            self.issued(Underway(epoch, epoch, overrule, 0.0, kernel, done, kernel))
            # Whoever comes after this call in its stream may free what the side stream writes.
            calling.wait_event(done)
        return outs

    def _publish(
        self, epoch: int, shards: Shards, shard: Whole, slot: Whole, whole: Whole, arrival: Arrival,
        calling: torch.cuda.Stream,
    ) -> None:  # fmt: skip
        def fill(op: p.Fill) -> None:
            for mine, there, all_ in zip(shard, slot, whole, strict=True):
                if mine is None or there is None or all_ is None:
                    continue
                for batch in range(shards.batches):  # each in one piece: a copy engine does it, and no SM is needed
                    copy(there[batch, self._rank], mine[batch])
                    if all_ is not there:
                        copy(all_[batch, self._rank], mine[batch])

        own = [part.chunk for part in shards.of_rank(self._rank)]
        write, end = cast("DeviceSignals", arrival._signals).set_in_row(own)

        def post(op: p.Post) -> None:
            end()
            self.post(calling)

        perform: dict[type, Callable[[Any], Any]] = {
            p.AwaitCall: lambda op: self.await_call(calling),
            p.Fill: fill,
            p.Filled: nothing,  # what is issued to a stream comes after what was
            p.Signal: lambda op: write(own[op.chunk]),
            p.Post: post,
        }
        answer(p.publish(self._rank, len(own), epoch), perform)

    def _gather(self, epoch: int, shards: Shards, whole: Whole, arrival: Arrival) -> torch.cuda.Event:
        side, handle, done = self._side, self._side.cuda_stream, torch.cuda.Event()
        parts = {peer: list(shards.of_rank(peer)) for peer in p.peers(self._rank, self._world)}
        order = [part.chunk for peer in parts for part in parts[peer]]

        # Of data and scales: where they begin in a slot, where the whole has them, and the bytes of a row.
        into: list[tuple[int, int, int]] = []
        size = math.prod(shards.shape) * whole.data.element_size()
        for at, all_ in ((0, whole.data), (_aligned(size), whole.scales)):
            if all_ is not None:
                into.append((at, all_.data_ptr(), all_.shape[-1] * all_.element_size()))

        def pull(op: p.Pull) -> None:
            source = self.memory.address(op.peer, op.slot)
            first, rows = shards.place(op.peer, parts[op.peer][op.chunk])
            for at, to, of_row in into:
                if rows * of_row:
                    copy_across(handle, to + first * of_row, source + at + first * of_row, rows * of_row)

        flag = self.memory.flag
        with torch.cuda.stream(side):
            write, end = cast("DeviceSignals", arrival._signals).set_in_row(order)
        perform: dict[type, Callable[[Any], Any]] = {
            p.AwaitPost: nothing,  # `post` has issued it
            p.Tell: lambda op: stream_write(handle, flag(op.peer, self._rank), op.epoch),
            p.AwaitFlag: lambda op: stream_wait(handle, flag(self._rank, op.peer), op.epoch),
            p.Pull: pull,
            p.Pulled: nothing,
            p.Signal: lambda op: write(parts[op.rank][op.chunk].chunk),
            p.Done: lambda op: (end(), done.record(side)),
        }
        with torch.cuda.stream(side):
            chunks = shards.batches * shards.parts
            answer(p.gather(self._rank, self._world, chunks, epoch), perform)
        return done

    def _slot(self, rank: int, slot: int, shards: Shards, like: Whole) -> Whole:
        """A slot as what is in it: a whole, of which only its rank's shard is for others; then the scales."""
        memory, of = self.memory.slot(rank, slot), like.data.dtype
        size = math.prod(shards.shape) * of.itemsize
        data = memory[:size].view(of).view(shards.shape)
        if like.scales is None:
            return Whole(data, None)
        at = _aligned(size)
        scales = memory[at : at + 4 * shards.total].view(torch.float32)
        return Whole(data, scales.view(*shards.shape[:-1], 1))


def _expired(gatherer: Gatherer | None) -> None:
    """A kernel has expired: also where its peer came just behind the deadline, and the watchdog saw nothing."""
    if gatherer is not None:
        gatherer.give_up(gatherer.expired())


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the current stream, whatever the strides."""
    to.copy_(source)


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
        gatherer = member.gatherer
        if gatherer is None:
            gatherer = member.gatherer = Gatherer(member, device)
        elif gatherer.device != device:
            raise ValueError(
                f"{plan.case.op}: a_shard is on {device}; this group's calls are on {gatherer.device}: "
                "a rank has one GPU"
            )
        gatherer.reserve(_aligned(math.prod(shards.shape) * x.element_size()) + 4 * shards.total)
        whole = None
        if return_a:
            scales = None if shard.scales is None else x.new_empty((*shards.shape[:-1], 1), dtype=torch.float32)
            whole = Whole(x.new_empty(shards.shape), scales)

        def compute(gathered: Whole, arrival: Arrival) -> list[torch.Tensor]:
            a = gathered.data.view(shards.total, shards.width)
            of_rows = None if gathered.scales is None else gathered.scales.view(shards.total, 1)
            return [product(a, of_rows, arrival, seconds) for product in products]

        outs = gatherer.issue(shards, shard, whole, compute)
    return x if whole is None else whole.data, outs
