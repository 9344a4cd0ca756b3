"""Matmul + reduce-scatter on GPUs: copy engines pull finished chunks of the product while the rest is computed.

::

    calling stream:  kernel: the next rank's chunks, published; ...; the own ones; then the sum, when all are here
    side stream:     for each step: my chunk is published: set my flag at its rank; wait for the peer's flag; pull
    watchdog:        releases the side stream when a peer has not come in time, and makes the sum NaN

The operations are those of `tilestream.core.protocols.reduce_scatter`, which the checker explores; this module performs
each on a GPU. Only the kernel, and the sum behind it, need an SM (invariant 10).
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable

import torch

from tilestream.core.errors import ArrivalTimeout
from tilestream.core.protocols import gather, reduce_scatter
from tilestream.distributed.call_queue import CallQueue, Handlers, IssuedCall, no_op, run_protocol
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.request import Request
from tilestream.distributed.shards import Shards
from tilestream.distributed.symmetric import PeerMemory
from tilestream.ops.publish import Publication
from tilestream.runtime.channel import channel
from tilestream.runtime.driver import copy_across, copy_in, stream_wait, stream_write

#: Initial number of a publication's signals; it grows when more are needed.
_CHUNKS = 64

#: Polls after which a kernel that has ended before its side stream is taken to wait for a peer. With all chunks here,
#: the side stream has only an event left to record.
POLLS = 3

#: ``product(out, publication, epoch, rows_per_chunk, pivot)`` issues the kernel that computes ``out`` and publishes it.
Product = Callable[[torch.Tensor, Publication, int, int, int], object]
#: ``reduce_partials(operand, void, epoch)`` issues the sum: NaN if ``void`` is the epoch of this or an earlier call.
ReducePartials = Callable[[torch.Tensor, torch.Tensor, int], None]


class CallEvents:
    """The events of a call. Those that are missing when its issue fails are recorded at the end."""

    def __init__(self, call: IssuedCall, calling: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
        self.call, self.calling = call, calling
        self.recorded: list[torch.cuda.Event] = []
        self._streams = ((call.kernel, calling), (call.side, side), (call.end, calling))

    def record(self, event: torch.cuda.Event) -> None:
        """Record an event of the call in its stream."""
        event.record(next(stream for x, stream in self._streams if x is event))
        self.recorded.append(event)

    def record_rest(self) -> None:
        """Record the missing events. An event that is recorded again would wait behind a peer."""
        for event, _ in self._streams:
            if event not in self.recorded:
                self.record(event)


class ReduceScatterQueue(CallQueue):
    """A group's reduce-scatters on one GPU. Hold the group's call."""

    op = "matmul_reduce_scatter"

    def __init__(self, state: GroupState, device: torch.device, memory: PeerMemory | None = None) -> None:
        super().__init__(state, device, memory)
        #: A call, the polls at which its kernel had ended and its side stream had not, and the time of the first poll.
        self._suspect = 0, 0, 0.0
        self._publication = self.make_publication(_CHUNKS)
        with torch.inference_mode(False):
            #: The value of `RankFlags.void` that the stream has copied, for the sum's kernel.
            self._void = torch.zeros(1, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # any stream may write to it
        #: The value of every peer's flag after the calls so far.
        self._flag_value = 0
        self._reported = False

    def make_publication(self, chunks: int) -> Publication:
        """Signals in this GPU's memory."""
        return Publication(chunks, self.device)

    def issue(
        self, shards: Shards, dtype: torch.dtype, received: torch.Tensor, product: Product,
        reduce_partials: ReducePartials, seconds: float,
    ) -> None:  # fmt: skip
        """Issue a call: the kernel, the pulls, and the sum. Non-blocking.

        Parameters
        ----------
        received
            ``[world, batches, rows, width]``: the peers' parts are pulled into it. This rank's part is not written.
        reduce_partials
            Of ``received`` and this rank's part of its own product, which is the operand.
        seconds
            Seconds that peers have from the kernel's end.
        """
        assert shards.rows % shards.parts == 0, "a kernel publishes chunks of one size"
        if self._publication.chunks < shards.chunks:  # may raise, so before the call is counted
            self.drain()
            self._publication = self.make_publication(shards.chunks)
        epoch = self.begin()
        before, calling = self._flag_value, torch.cuda.current_stream(self.device)
        self._flag_value += shards.batches * shards.parts
        events = CallEvents(self.call(epoch, self._flag_value, seconds), calling, self._side)
        try:
            for stream in (self._side, calling):
                received.record_stream(stream)
            product_of_all = self._slot(self._rank, epoch % gather.SLOTS, shards, dtype)
            self._produce(epoch, shards, product_of_all, product, events)
            self._scatter(epoch, shards, dtype, received, before, events)
            self.track(events.call)  # before the sum: a blocking launch (CUDA_LAUNCH_BLOCKING) waits for the peers
            handlers: Handlers = {
                gather.AwaitSide: lambda op: calling.wait_event(events.call.side),
                reduce_scatter.Sum: lambda op: reduce_partials(product_of_all, self.void(calling), epoch),
                reduce_scatter.Summed: lambda op: events.record(events.call.end),
            }
            run_protocol(reduce_scatter.add_up(epoch), handlers)
        except BaseException as error:
            self.recover_half_issued(error, events)
            raise

    def void(self, calling: torch.cuda.Stream) -> torch.Tensor:
        """The first void call, copied to the GPU behind the stream's waits."""
        copy_in(calling.cuda_stream, self._void.data_ptr(), self.flags.void.data_ptr(), self._void.element_size())
        return self._void

    def call(self, epoch: int, flag_value: int, peer_seconds: float) -> IssuedCall:
        """A call that is about to be issued."""
        kernel, side, end = (torch.cuda.Event() for _ in range(3))
        overrule = functools.partial(self._overrule, epoch)
        return IssuedCall(epoch, overrule, kernel, side, end, flag_value, peer_seconds)

    def recover_half_issued(self, error: BaseException, events: CallEvents) -> None:
        """After a call was issued in part: abort the peers, and watch the streams, which may wait for them."""
        self._abort_half_issued(error)
        untracked = events.call.side not in events.recorded
        events.record_rest()
        if untracked:
            self.track(events.call)

    def _produce(self, epoch: int, shards: Shards, into: torch.Tensor, product: Product, events: CallEvents) -> None:
        calling = events.calling

        def compute(op: reduce_scatter.Compute) -> None:
            if op.step == 0:  # one launch computes all chunks in this order, and publishes each
                out = into.view(shards.total, shards.width)
                pivot = (self._rank + 1) * shards.parts % shards.chunks
                product(out, self._publication, op.epoch, shards.rows // shards.parts, pivot)

        handlers: Handlers = {
            gather.AwaitCall: lambda op: self.await_call(calling),
            gather.Post: lambda op: self.post(calling),
            reduce_scatter.Compute: compute, reduce_scatter.Computed: no_op, reduce_scatter.Publish: no_op,
            reduce_scatter.Ended: lambda op: events.record(events.call.kernel),
        }  # fmt: skip
        run_protocol(reduce_scatter.produce(self._rank, self._world, shards.batches, shards.parts, epoch), handlers)

    def _scatter(
        self, epoch: int, shards: Shards, dtype: torch.dtype, received: torch.Tensor, before: int, events: CallEvents
    ) -> None:
        side, handle = self._side, self._side.cuda_stream
        mine, flag, address = list(shards.of_rank(self._rank)), self.flags.flag, self._publication.address
        row_bytes, plane, to = shards.width * dtype.itemsize, shards.batches * shards.rows, received.data_ptr()

        def pull(op: reduce_scatter.PullPart) -> None:
            part = mine[reduce_scatter.sent(op.peer, self._world, shards.batches, shards.parts, op.step)[1]]
            first, rows = shards.place(self._rank, part)
            there = op.peer * plane + part.batch * shards.rows + part.begin
            source = self.memory.address(op.peer, op.slot) + first * row_bytes
            copy_across(handle, to + there * row_bytes, source, rows * row_bytes)

        def published(op: reduce_scatter.AwaitPublished) -> None:
            chunk = ((self._rank + 1) * shards.parts + op.step) % shards.chunks
            stream_wait(handle, address(chunk), op.epoch)

        handlers: Handlers = {
            gather.AwaitPost: lambda op: side.wait_event(self._posted),
            reduce_scatter.AwaitPublished: published,
            reduce_scatter.FlagPart: lambda op: stream_write(handle, flag(op.peer, self._rank), before + op.parts),
            reduce_scatter.AwaitPart: lambda op: stream_wait(handle, flag(self._rank, op.peer), before + op.parts),
            reduce_scatter.PullPart: pull, reduce_scatter.PulledPart: no_op,
            gather.Done: lambda op: events.record(events.call.side),
        }  # fmt: skip
        run_protocol(reduce_scatter.scatter(self._rank, self._world, shards.batches, shards.parts, epoch), handlers)

    def _slot(self, rank: int, slot: int, shards: Shards, dtype: torch.dtype) -> torch.Tensor:
        """A slot as a rank's product, ``[batches, world, rows, width]``."""
        size = math.prod(shards.shape) * dtype.itemsize
        return self.memory.slot(rank, slot)[:size].view(dtype).view(shards.shape)

    # The host, and giving up ---------------------------------------------------------------------------------------

    def admit(self, epoch: int) -> int | None:
        """As of `CallQueue`."""

        def await_side(op: gather.AwaitSide) -> None:
            for call in self._under_way():
                if call.epoch <= op.epoch:
                    call.side.synchronize()  # bounded: the watchdog releases a stream that waits for a lost peer

        return run_protocol(reduce_scatter.begin_sum(epoch), {gather.AwaitSide: await_side, gather.Begin: self._begin})

    def why_expired(self, oldest: IssuedCall) -> str:
        """As of `CallQueue`: the kernel has ended, the side stream has not, and the peers' time is over.

        At once if the group is broken: its peers have been aborted, and send nothing.
        """
        state = self._state()
        if state is not None and state.broken:
            return super().describe_expiry()
        epoch, polls, since = self._suspect
        now = time.perf_counter()
        if oldest.epoch != epoch or not polls:
            polls, since = 0, now
        self._suspect = oldest.epoch, polls + int(oldest.kernel.query()), since
        expired = self._suspect[1] >= POLLS and now - since >= oldest.peer_seconds
        return self.describe_expiry(oldest) if expired else ""

    def describe_expiry(self, call: IssuedCall | None = None) -> str:
        """As of `CallQueue`; the next call on this device raises the expiry, too."""
        if call is not None and not self._reported:
            self._reported = True
            flags, seconds = self.flags.peer_flags(), call.peer_seconds
            late = next((x for x in gather.peers(self._rank, self._world) if flags[x] < call.flag_value), None)
            whose = f"rank {late}'s part of the sum" if late is not None else "the sum"
            error = ArrivalTimeout(self.op, 0, 0, "the sum", seconds, seconds, self._rank, whose)
            channel(self.device).post(error)
        return super().describe_expiry(call)

    def _overrule(self, epoch: int, error: BaseException) -> None:
        """Make the sum NaN from this call on; before the side stream is released."""
        if not self._reported:
            self._reported = True
            channel(self.device).post(error)
        self.flags.make_void(epoch)


def matmul_scatter(
    state: GroupState, plan: DistributedPlan, shards: Shards, request: Request, dtype: torch.dtype, product: Product,
    seconds: float,
) -> torch.Tensor:  # fmt: skip
    """The sum (or average) over all ranks of this rank's part of their products, plus the bias.

    Non-blocking. Later errors are raised by the next call on this device, and with this group.

    Parameters
    ----------
    dtype
        Of the parts that travel, and of the result.

    Returns
    -------
    torch.Tensor
        ``[batches, rows, width]``.
    """
    device = request.a.device
    with torch.cuda.device(device):
        queue = ReduceScatterQueue.of(state, plan, "a", device, math.prod(shards.shape) * dtype.itemsize)
        bias = None if request.bias is None else request.bias.contiguous()  # the kernel takes no strides
        mine = (shards.batches, shards.rows, shards.width)
        received = state.buffer("received", (shards.world, *mine), dtype, device)
        out = torch.empty(mine, dtype=dtype, device=device)

        def reduce_partials(product_of_all: torch.Tensor, void: torch.Tensor, epoch: int) -> None:
            from tilestream.launch.portable.add import add_parts  # imports Triton

            divisor = request.divisor(shards.world)
            add_parts(product_of_all, received, out, bias, void, state.rank, epoch, divisor)

        queue.issue(shards, dtype, received, product, reduce_partials, seconds)
    return out
