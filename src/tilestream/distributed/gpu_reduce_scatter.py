"""Matmul + reduce-scatter on GPUs: chunks of the product pulled by copy engines while the rest is computed.

::

    calling stream:  kernel: the next rank's chunks, published; ...; the own ones; then the sum, when all are here
    side stream:     for each step: my chunk is published: tell its rank; wait for the peer at this step; pull its chunk
    watchdog:        lets the side stream go when a peer has not come in time, and makes the sum NaN

What is issued is `tilestream.distributed.sum_protocol`, operation by operation, which the checker explores; here is
only what each of its operations is on a GPU. None but the kernel and the sum behind it needs an SM (invariant 10).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from tilestream.core.errors import ArrivalTimeout
from tilestream.distributed import protocol as p
from tilestream.distributed import sum_protocol as q
from tilestream.distributed.call_queue import Turns, Underway, answer, nothing
from tilestream.distributed.collective import agree
from tilestream.distributed.group_state import Member
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.shards import Shards
from tilestream.distributed.symmetric import PeerMemory
from tilestream.ops.publish import Publication
from tilestream.runtime.channel import channel
from tilestream.runtime.driver import copy_across, copy_in, stream_wait, stream_write

#: Chunks of a product that are signalled, at most, at first; more are made when they are needed.
_CHUNKS = 64

#: Looks after which a kernel that has ended before its side stream is known to have given up. Of one that has all its
#: chunks, the side stream has an event left to record.
LOOKS = 3

#: ``product(out, publication, epoch, rows_per_chunk, pivot)`` issues the kernel that computes ``out`` and publishes it.
Product = Callable[[torch.Tensor, Publication, int, int, int], object]


class Marks:
    """Which events of a call have been recorded, and where the rest are, should its issue end half way."""

    def __init__(self, call: Underway, calling: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
        self.call, self.calling = call, calling
        self.marked: list[torch.cuda.Event] = []
        self._on = ((call.kernel, calling), (call.side, side), (call.end, calling))

    def mark(self, which: torch.cuda.Event) -> None:
        """Record an event of the call in its stream."""
        which.record(next(stream for event, stream in self._on if event is which))
        self.marked.append(which)

    def rest(self) -> None:
        """Record those that were not: never one anew, which would then come behind a wait for a peer."""
        for event, _ in self._on:
            if event not in self.marked:
                self.mark(event)


class Scatterer(Turns):
    """A member's sums on one GPU: their signals, and what is under way. Hold the member's call."""

    op = "matmul_reduce_scatter"

    def __init__(self, member: Member, device: torch.device, memory: PeerMemory | None = None) -> None:
        super().__init__(member, device, memory)
        #: A call, in how many looks its kernel had ended and its side stream not, and since when.
        self._suspect = 0, 0, 0.0
        self._publication = self.make_publication(_CHUNKS)
        with torch.inference_mode(False):
            #: `RankWords.void` as it was when the stream was let go that the sum comes behind.
            self._over = torch.zeros(1, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # it is written on any stream
        #: Chunks that every peer has told of in the calls so far.
        self._told = 0
        self._reported = False

    def make_publication(self, chunks: int) -> Publication:
        """Signals in this GPU's memory."""
        return Publication(chunks, self.device)

    def issue(
        self, shards: Shards, dtype: torch.dtype, received: torch.Tensor, product: Product,
        add_up: Callable[[torch.Tensor, torch.Tensor, int], None], seconds: float,
    ) -> None:  # fmt: skip
        """Issue a call: the kernel, what is pulled behind it, and the sum. None of it has run yet.

        Parameters
        ----------
        received
            ``[world, batches, rows, width]``: where the peers' parts are pulled to. This rank's is not written.
        add_up
            ``add_up(whole, over, epoch)`` issues the sum of ``received`` and of the own part of this rank's product
            ``whole``; NaN where ``over`` is a call, and none after this.
        seconds
            That are waited for peers when the kernel has ended.
        """
        assert shards.rows % shards.parts == 0, "what is published is in chunks of one size"
        count = shards.batches * shards.world * shards.parts
        if self._publication.chunks < count:  # it may raise, so before the call is counted
            self.quiet()
            self._publication = self.make_publication(count)
        epoch = self.begin()
        before, calling = self._told, torch.cuda.current_stream(self.device)
        self._told += shards.batches * shards.parts
        call = self.call(epoch, self._told, seconds)
        marks = Marks(call, calling, self._side)
        try:
            for stream in (self._side, calling):
                received.record_stream(stream)
            whole = self._slot(self._rank, epoch % p.SLOTS, shards, dtype)
            self._produce(epoch, shards, whole, product, marks)
            self._scatter(epoch, shards, dtype, received, before, marks)
            self.issued(call)  # before the sum: a launch that blocks (CUDA_LAUNCH_BLOCKING) waits there for the peers
            perform: dict[type, Callable[[Any], Any]] = {
                p.AwaitSide: lambda op: calling.wait_event(call.side),
                q.Sum: lambda op: add_up(whole, self.over(calling), epoch),
                q.Summed: lambda op: marks.mark(call.end),
            }
            answer(q.add_up(epoch), perform)
        except BaseException as error:
            self.halved(error, marks)
            raise

    def over(self, calling: torch.cuda.Stream) -> torch.Tensor:
        """Which call is the first that is void, on the GPU, behind what the stream has waited for. See `words`."""
        copy_in(calling.cuda_stream, self._over.data_ptr(), self.words.void.data_ptr(), self._over.element_size())
        return self._over

    def call(self, epoch: int, told: int, patience: float) -> Underway:
        """A call that is to be issued."""
        kernel, side, end = (torch.cuda.Event() for _ in range(3))
        return Underway(epoch, functools.partial(self._overrule, epoch), kernel, side, end, told, patience)

    def halved(self, error: BaseException, marks: Marks) -> None:
        """Half a call has been issued: the peers are told, and its streams, which may wait for them, looked after."""
        self._half(error)
        unseen = marks.call.side not in marks.marked
        marks.rest()
        if unseen:
            self.issued(marks.call)

    def _produce(self, epoch: int, shards: Shards, whole: torch.Tensor, product: Product, marks: Marks) -> None:
        calling = marks.calling

        def compute(op: q.Compute) -> None:
            if op.step == 0:  # one launch computes all of them, in this order, and publishes each
                out = whole.view(shards.total, shards.width)
                pivot = (self._rank + 1) * shards.parts % (shards.batches * shards.world * shards.parts)
                product(out, self._publication, op.epoch, shards.rows // shards.parts, pivot)

        perform: dict[type, Callable[[Any], Any]] = {
            p.AwaitCall: lambda op: self.await_call(calling),
            p.Post: lambda op: self.post(calling),
            q.Compute: compute, q.Computed: nothing, q.Publish: nothing,
            q.Ended: lambda op: marks.mark(marks.call.kernel),
        }  # fmt: skip
        answer(q.produce(self._rank, self._world, shards.batches, shards.parts, epoch), perform)

    def _scatter(
        self, epoch: int, shards: Shards, dtype: torch.dtype, received: torch.Tensor, before: int, marks: Marks
    ) -> None:
        side, handle = self._side, self._side.cuda_stream
        total, mine = shards.batches * shards.world * shards.parts, list(shards.of_rank(self._rank))
        flag, address = self.words.flag, self._publication.address

        of_row, plane = shards.width * dtype.itemsize, shards.batches * shards.rows
        to = received.data_ptr()

        def pull(op: q.PullPart) -> None:
            part = mine[q.sent(op.peer, self._world, shards.batches, shards.parts, op.step)[1]]
            first, rows = shards.place(self._rank, part)
            there = op.peer * plane + part.batch * shards.rows + part.begin
            source = self.memory.address(op.peer, op.slot) + first * of_row
            copy_across(handle, to + there * of_row, source, rows * of_row)

        def published(op: q.AwaitPublished) -> None:
            chunk = ((self._rank + 1) * shards.parts + op.step) % total
            stream_wait(handle, address(chunk), op.epoch)

        perform: dict[type, Callable[[Any], Any]] = {
            p.AwaitPost: lambda op: side.wait_event(self._posted),
            q.AwaitPublished: published,
            q.TellPart: lambda op: stream_write(handle, flag(op.peer, self._rank), before + op.parts),
            q.AwaitPart: lambda op: stream_wait(handle, flag(self._rank, op.peer), before + op.parts),
            q.PullPart: pull, q.PulledPart: nothing,
            p.Done: lambda op: marks.mark(marks.call.side),
        }  # fmt: skip
        answer(q.scatter(self._rank, self._world, shards.batches, shards.parts, epoch), perform)

    def _slot(self, rank: int, slot: int, shards: Shards, dtype: torch.dtype) -> torch.Tensor:
        """A slot as what is in it: a rank's product, ``[batches, world, rows, width]``."""
        size = math.prod(shards.shape) * dtype.itemsize
        return self.memory.slot(rank, slot)[:size].view(dtype).view(shards.shape)

    # The host, and giving up ---------------------------------------------------------------------------------------

    def begun(self, epoch: int) -> int | None:
        """As of `Turns`."""

        def await_side(op: p.AwaitSide) -> None:
            for call in self._underway():
                if call.epoch <= op.epoch:
                    call.side.synchronize()  # the watchdog lets a stream go that waits for a peer without hope

        return answer(q.begin_sum(epoch), {p.AwaitSide: await_side, p.Begin: self._begin})

    def gave_up(self, oldest: Underway) -> str:
        """As of `Turns`: where the kernel has ended, the side stream has not, and patience is over.

        At once where the group is broken: its peers have been told, and send nothing any more.
        """
        member = self._member()
        if member is not None and member.broken:
            return super().expired()
        epoch, looks, since = self._suspect
        now = time.perf_counter()
        if oldest.epoch != epoch or not looks:
            looks, since = 0, now
        self._suspect = oldest.epoch, looks + int(oldest.kernel.query()), since
        return self.expired(oldest) if self._suspect[1] >= LOOKS and now - since >= oldest.patience else ""

    def expired(self, call: Underway | None = None) -> str:
        """As `Turns.expired`; what it says is raised by the next call on this device, too."""
        if call is not None and not self._reported:
            self._reported = True
            said = self.words.told()
            late = next((x for x in p.peers(self._rank, self._world) if said[x] < call.told), None)
            whose = f"rank {late}'s part of the sum" if late is not None else "the sum"
            waited = call.patience
            error = ArrivalTimeout(self.op, 0, 0, "the sum", waited, waited, self._rank, whose)
            channel(self.device).post(error)
        return super().expired(call)

    def _overrule(self, epoch: int, error: BaseException) -> None:
        """From this call on the sum is NaN; said before the side stream is let go."""
        if not self._reported:
            self._reported = True
            channel(self.device).post(error)
        self.words.make_void(epoch)


def matmul_scatter(
    member: Member,
    plan: DistributedPlan,
    shards: Shards,
    like: torch.Tensor,
    dtype: torch.dtype,
    product: Product,
    average: bool,
    bias: torch.Tensor | None,
    seconds: float,
) -> torch.Tensor:
    """The sum (or average) over all ranks of this rank's part of their products, and ``bias``.

    Issues everything and returns; what goes wrong later is raised by the next call on this device, and with this group.

    Parameters
    ----------
    like
        A tensor on the call's device.
    dtype
        Of what travels, and of the result.

    Returns
    -------
    torch.Tensor
        ``[batches, rows, width]``.
    """
    device = like.device
    with torch.cuda.device(device):
        agree(member, plan, device)
        scatterer = member.scatterer = member.scatterer or Scatterer(member, device)
        scatterer.check_gpu("a", device)
        scatterer.reserve(math.prod(shards.shape) * dtype.itemsize)
        bias = None if bias is None else bias.contiguous()  # what the kernel reads has no strides
        mine = (shards.batches, shards.rows, shards.width)
        received = member.buffer("received", (shards.world, *mine), dtype, device)
        out = torch.empty(mine, dtype=dtype, device=device)

        def add_up(whole: torch.Tensor, over: torch.Tensor, epoch: int) -> None:
            from tilestream.kernels.portable.add import BLOCK, add_parts

            plane = shards.rows * shards.width
            add_parts[-(-plane // BLOCK), shards.batches](
                whole, received, out, bias, over, member.rank, epoch, shards.batches, plane, shards.width,
                float(shards.world if average else 1), WORLD=shards.world, BIAS=bias is not None, BLOCK=BLOCK,
            )  # fmt: skip

        scatterer.issue(shards, dtype, received, product, add_up, seconds)
    return out
