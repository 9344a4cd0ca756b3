"""Matmul + reduce-scatter on GPUs: copy engines pull finished chunks of the product while the rest is computed.

::

    calling stream:  kernel: compute and publish the next rank's chunks; ...; the own ones; after all pulls, the sum
    side stream:     for each step: wait for my published chunk; set my flag at its rank; wait for the peer's flag; pull
    watchdog:        if a peer is late: release the side stream, and make the sum NaN

`tilestream.core.protocols.reduce_scatter`, which the checker explores, has the operations. This module maps each to a
GPU's operation, and records them (`tilestream.distributed.program`). Only the kernel and the sum need an SM (invariant
10).
"""

from __future__ import annotations

import functools
import logging
import math
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilestream.core.errors import ArrivalTimeout
from tilestream.core.protocols import gather, one_shot, reduce_scatter
from tilestream.distributed.call_queue import CallQueue, IssuedCall, SlotEvents
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.program import (
    CALLING,
    EPOCH,
    FIRST,
    SECOND,
    Handlers,
    Host,
    Program,
    Recorder,
    issue,
    more,
    no_op,
    run_protocol,
)
from tilestream.distributed.repeats import NO_EXTRAS, Extras, PlainCall, ProgramRepeat, fresh
from tilestream.distributed.request import Request
from tilestream.distributed.shards import Shards
from tilestream.distributed.symmetric import PeerMemory
from tilestream.launch.native_program import Launched, NativeProgram, Part, Patch, keeping
from tilestream.launch.observe import observe
from tilestream.ops.publish import Publication
from tilestream.ops.scales import canonical_scales
from tilestream.runtime.channel import channel
from tilestream.runtime.sequence import AwaitEvent, CopyAcross, CopyIn, Record, Sequence, Wait, WaitEvent, Write
from tilestream.runtime.streams import current_stream

logger = logging.getLogger(__name__)

#: Initial number of a publication's signals, which grows on demand.
_CHUNKS = 64

#: Values of an issue: every peer's flag before the call, and the address that parts are pulled to.
_BEFORE, _RECEIVED = FIRST, SECOND
#: The number of polls with an ended kernel and a busy side stream that mean a wait for a peer. If all chunks had
#: arrived, the side stream would only have an event left to record.
POLLS = 3

#: ``product(out, publication, epoch, rows_per_chunk, pivot)`` issues the kernel that computes ``out`` and publishes it.
Product = Callable[[torch.Tensor, Publication, int, int, int], object]
#: ``reduce_partials(operand, void, epoch)`` issues the sum: NaN if ``void`` is the epoch of this or an earlier call.
ReducePartials = Callable[[torch.Tensor, torch.Tensor, int], None]


class SumForm(NamedTuple):
    """The values that decide a call's operations: its shards, and the bytes of a row."""

    shards: Shards
    row_bytes: int


class Issuing:
    """A call while it is issued. After a failure `recover` records the missing events."""

    def __init__(
        self, queue: ReduceScatterQueue, epoch: int, flag_value: int, seconds: float | None,
        calling: torch.cuda.Stream, side: torch.cuda.Stream,
    ) -> None:  # fmt: skip
        self._queue, self._calling, self._side = queue, calling, side
        self._events, self._call = queue.events(epoch), queue.issued_call(epoch, flag_value, seconds)
        self.has_kernel = self._tracked = False

    def host(self, multiply: Callable[[], object], add: Callable[[], object]) -> Host:
        """The host's actions in a sum's program."""
        return {"multiply": multiply, "kernel": self._record_kernel, "track": self.track, "add": add}

    def _record_kernel(self) -> None:
        self._events.kernel.record(self._calling)
        self.has_kernel = True

    def track(self) -> None:
        """Have the call watched before its sum, whose launch may block for the peers (CUDA_LAUNCH_BLOCKING)."""
        self._queue.track(self._call)
        self._tracked = True

    def recover(self) -> None:
        """Record the missing events only: an event that is recorded again would wait for a peer."""
        if not self.has_kernel:
            self._record_kernel()
        if not self._tracked:
            self._events.side.record(self._side)
        self._events.end.record(self._calling)
        if not self._tracked:
            self.track()


class ReduceScatterQueue(CallQueue):
    """A group's reduce-scatters on one GPU. Hold the group's call."""

    op = "matmul_reduce_scatter"

    def __init__(self, state: GroupState, device: torch.device, memory: PeerMemory | None = None) -> None:
        super().__init__(state, device, memory)
        #: A call, its polls with an ended kernel and a busy side stream, and the time of its first poll.
        self._suspect = 0, 0, 0.0
        self._publication = self.make_publication(_CHUNKS)
        with torch.inference_mode(False):
            #: The value of `RankFlags.void` that the stream has copied, for the sum's kernel.
            self._void = torch.zeros(1, dtype=torch.int32, device=device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # any stream may write to it afterwards
        #: The value of every peer's flag after the calls so far.
        self._flag_value = 0
        self._reported = False
        #: The memory that the last repeated call has pulled to, and the handle of its calling stream.
        self._recorded: tuple[Callable[[], torch.Tensor | None], int] = lambda: None, 0

    def make_publication(self, chunks: int) -> Publication:
        """A publication, with signals in this GPU's memory."""
        return Publication(chunks, self.device)

    def issue(
        self, shards: Shards, dtype: torch.dtype, received: torch.Tensor, product: Product,
        reduce_partials: ReducePartials, seconds: float, repeat: SumRepeat | None = None,
    ) -> None:  # fmt: skip
        """Issue a call: the kernel, the pulls, and the sum. Non-blocking.

        Parameters
        ----------
        received
            ``[world, batches, rows, width]``: the peers' parts are pulled into it. This rank's part is not written.
        reduce_partials
            Adds ``received`` and this rank's part of its own product, which is the operand.
        seconds
            Seconds that peers have from the kernel's end.
        repeat
            Learns to repeat the call.
        """
        assert shards.rows % shards.parts == 0, "a kernel publishes chunks of one size"
        if self._publication.chunks < shards.chunks:  # before the call is counted, because it may raise
            self.drain()
            self._publication = self.make_publication(shards.chunks)
            self.forget_programs()
        epoch = self.begin()
        slot, before, calling = epoch % gather.SLOTS, self._flag_value, torch.cuda.current_stream(self.device)
        self._flag_value += shards.batches * shards.parts
        call = Issuing(self, epoch, self._flag_value, seconds, calling, self._side)
        try:
            for stream in (self._side, calling):
                received.record_stream(stream)
            whole = self._slot(self._rank, slot, shards, dtype)

            def multiply() -> None:
                out = whole.view(shards.total, shards.width)
                pivot = (self._rank + 1) * shards.parts % shards.chunks
                product(out, self._publication, epoch, shards.rows // shards.parts, pivot)

            program = self.prepared(SumForm(shards, shards.width * dtype.itemsize), epoch, self._prepare)
            values = calling.cuda_stream, epoch, before, received.data_ptr()
            add = functools.partial(reduce_partials, whole, self._void, epoch)
            if repeat is None:
                issue(program, values, call.host(multiply, add))
            else:
                repeat.learn(slot, program, values, lambda add: call.host(multiply, add), add)
        except BaseException as error:
            self.recover_half_issued(error, call)
            raise

    def issued_call(self, epoch: int, flag_value: int, seconds: float | None) -> IssuedCall:
        """A call for the watchdog."""
        kernel, side, _ = self._events[epoch % gather.SLOTS]
        return IssuedCall(epoch, kernel, side, flag_value, seconds)

    def events(self, epoch: int) -> SlotEvents:
        """The events of a call."""
        return self.events_in(epoch % gather.SLOTS)

    def events_in(self, slot: int) -> SlotEvents:
        """The events of a slot's calls."""
        return self._events[slot]

    def repeat(
        self, program: NativeProgram, device: int, kernel: int, flags: int, received: torch.Tensor | None,
        addresses: tuple[int, ...], seconds: float | None,
    ) -> bool:  # fmt: skip
        """Issue a call by a program.

        Parameters
        ----------
        device
            The device's index, as of a tensor.
        kernel
            The number of the program's part that records the kernel's event.
        flags
            By how much the call raises every peer's flag; 0 if it sets the flag to its epoch.
        received
            As of `issue`; None for an all-reduce.
        seconds
            As of `IssuedCall`.
        addresses
            See `SumRepeat`.

        Returns
        -------
        bool
            False if nothing was issued: the stream lacks the words of a launch.
        """
        epoch, before, calling = self.begin_native(), self._flag_value, torch._C._cuda_getCurrentRawStream(device)
        of_call = epoch, before + flags if flags else epoch, seconds
        if received is not None and (self._recorded[0]() is not received or self._recorded[1] != calling):
            for stream in (self._side, current_stream(self.device)):  # torch's allocator knows it until it is freed
                received.record_stream(stream)
            self._recorded = weakref.ref(received), calling
        there = 0 if received is None else received.data_ptr()
        program.progress = None
        try:
            if not program.issue(device, calling, epoch, before, there, *addresses):
                self.take_back(epoch)
                return False
            self._flag_value = before + flags
            self.track(self.issued_call(*of_call))
        except BaseException as error:
            self._flag_value = before + flags
            issued = program.recover(error)
            if issued == len(program):  # an interrupt came behind the issue, and the peers get what they wait for
                self.track(self.issued_call(*of_call))
                raise
            here = current_stream(self.device)
            call = Issuing(self, *of_call, here, here if received is None else self._side)
            call.has_kernel = issued > kernel
            self.recover_half_issued(error, call)
            raise
        return True

    def recover_half_issued(self, error: BaseException, call: Issuing) -> None:
        """After a partly issued call: abort the peers, and watch the streams, which may wait for them."""
        self._abort_half_issued(error)
        call.recover()

    def ends(self, recorder: Recorder) -> Handlers:
        """The operations before and after the parts of a sum: the wait for the last call, and the sum itself."""
        add, slot = recorder.add, recorder.epoch % gather.SLOTS

        def sum_(op: object) -> None:
            # The number of the first void call is copied to the GPU after the stream's waits.
            add(CopyIn(CALLING, self._void.data_ptr(), self.flags.void.data_ptr(), self._void.element_size()))
            recorder.host("add")

        def summed(op: object) -> None:
            add(Record(CALLING, self._events[slot].end.cuda_event))

        return {
            gather.AwaitCall: lambda op: add(WaitEvent(CALLING, self.events(op.epoch).end.cuda_event)),
            reduce_scatter.Sum: sum_, one_shot.AddSlots: sum_,
            reduce_scatter.Summed: summed, one_shot.Added: summed,
        }  # fmt: skip

    def _prepare(self, form: SumForm, slot: int) -> Program:
        """Record a call."""
        recorder, shards, side, posted = Recorder(slot), form.shards, self._side.cuda_stream, self._posted.cuda_event
        add, epoch, of_sum = recorder.add, recorder.epoch, (self._rank, self._world, shards.batches, shards.parts)
        mine, flag, address = list(shards.of_rank(self._rank)), self.flags.flag, self._publication.address
        plane, side_event = shards.batches * shards.rows, self._events[slot].side.cuda_event

        def compute(op: reduce_scatter.Compute) -> None:
            if op.step == 0:  # one launch computes all chunks in this order, and publishes each
                recorder.host("multiply")

        def pull(op: reduce_scatter.PullPart) -> None:
            part = mine[reduce_scatter.sent(op.peer, self._world, shards.batches, shards.parts, op.step)[1]]
            first, rows = shards.place(self._rank, part)
            there = op.peer * plane + part.batch * shards.rows + part.begin
            source = self.memory.address(op.peer, op.slot) + first * form.row_bytes
            add(CopyAcross(side, _RECEIVED + there * form.row_bytes, source, rows * form.row_bytes))

        def published(op: reduce_scatter.AwaitPublished) -> None:
            chunk = ((self._rank + 1) * shards.parts + op.step) % shards.chunks
            add(Wait(side, address(chunk), recorder.epoch_of(op)))

        handlers: Handlers = {
            **self.ends(recorder),
            gather.Post: lambda op: add(Record(CALLING, posted)),
            reduce_scatter.Compute: compute, reduce_scatter.Computed: no_op, reduce_scatter.Publish: no_op,
            reduce_scatter.Ended: lambda op: recorder.host("kernel"),
            gather.AwaitPost: lambda op: add(WaitEvent(side, posted)),
            reduce_scatter.AwaitPublished: published,
            reduce_scatter.FlagPart: lambda op: add(Write(side, flag(op.peer, self._rank), _BEFORE + op.parts)),
            reduce_scatter.AwaitPart: lambda op: add(Wait(side, flag(self._rank, op.peer), _BEFORE + op.parts)),
            reduce_scatter.PullPart: pull, reduce_scatter.PulledPart: no_op,
            gather.Done: lambda op: add(Record(side, side_event)),
            gather.AwaitSide: lambda op: add(WaitEvent(CALLING, side_event)),
        }  # fmt: skip
        recorder.run(reduce_scatter.produce(*of_sum, epoch), handlers)
        recorder.run(reduce_scatter.scatter(*of_sum, epoch), handlers)
        recorder.host("track")
        recorder.run(reduce_scatter.add_up(epoch), handlers)
        return recorder.program()

    def _slot(self, rank: int, slot: int, shards: Shards, dtype: torch.dtype) -> torch.Tensor:
        """A slot as a rank's product, ``[batches, world, rows, width]``."""
        size = math.prod(shards.shape) * dtype.itemsize
        return self.memory.slot(rank, slot)[:size].view(dtype).view(shards.shape)

    # The host, and giving up ---------------------------------------------------------------------------------------

    def admit(self, epoch: int) -> int | None:
        """See `CallQueue`."""

        def await_side(op: gather.AwaitSide) -> None:
            for call in self._issued(op.epoch):
                call.side.synchronize()  # bounded: the watchdog releases a stream that waits for a lost peer

        return run_protocol(reduce_scatter.begin_sum(epoch), {gather.AwaitSide: await_side, gather.Begin: self._begin})

    def record_admission(self, recorder: Recorder, begin: Callable[[gather.Begin], int]) -> None:
        """See `CallQueue`."""
        handlers: Handlers = {
            gather.AwaitSide: lambda op: recorder.add(AwaitEvent(self.events(op.epoch).side.cuda_event)),
            gather.Begin: begin,
        }
        recorder.run(reduce_scatter.begin_sum(recorder.epoch), handlers)

    def why_expired(self, oldest: IssuedCall) -> str:
        """See `CallQueue`: the kernel has ended, the side stream has not, and the peers' time is over.

        If the group is broken, this rank gives up at once: the peers have been aborted, and send nothing.
        """
        state = self._state()
        if state is not None and state.broken:
            return super().describe_expiry()
        epoch, polls, since = self._suspect
        now = time.perf_counter()
        if oldest.epoch != epoch or not polls:
            polls, since = 0, now
        self._suspect = oldest.epoch, polls + int(oldest.kernel.query()), since
        expired = self._suspect[1] >= POLLS and now - since >= self._seconds(oldest)
        return self.describe_expiry(oldest) if expired else ""

    def _seconds(self, call: IssuedCall) -> float:
        """The seconds that the peers of a call have."""
        state = self._state()
        if call.peer_seconds is None and state is not None:
            try:
                return state.timeout("cuda")
            except RuntimeError:  # the group was destroyed, and its peers do nothing more
                return 0.0
        return call.peer_seconds or 0.0

    def describe_expiry(self, call: IssuedCall | None = None) -> str:
        """See `CallQueue`; the next call on this device raises the expiry, too."""
        if call is not None and not self._reported:
            self._reported = True
            flags, seconds = self.flags.peer_flags(), self._seconds(call)
            late = next((x for x in gather.peers(self._rank, self._world) if flags[x] < call.flag_value), None)
            whose = f"rank {late}'s part of the sum" if late is not None else "the sum"
            error = ArrivalTimeout(self.op, 0, 0, "the sum", seconds, seconds, self._rank, whose)
            channel(self.device).post(error)
        return super().describe_expiry(call)

    def overrule(self, call: IssuedCall, error: BaseException) -> None:
        """See `CallQueue`: makes this sum and all later ones NaN, before the side stream is released."""
        if not self._reported:
            self._reported = True
            channel(self.device).post(error)
        self.flags.make_void(call.epoch)


class SumRepeat(ProgramRepeat):
    """Equal sums of a contiguous A.

    The addresses of an issue are those of A, B and the result, and of the scales and the bias that are given.

    Parameters
    ----------
    flags
        See `ReduceScatterQueue.repeat`.
    received
        Gives the memory in a group's state that the peers' parts are pulled to; None for an all-reduce. It refers to no
        state, which has this repeat: the state is freed with its group.
    shape, dtype
        Of the result.
    extras
        As of all equal calls.
    """

    def __init__(
        self, queue: ReduceScatterQueue, flags: int, received: Callable[[GroupState], torch.Tensor] | None,
        shape: tuple[int, ...], dtype: torch.dtype, extras: Extras = NO_EXTRAS,
    ) -> None:  # fmt: skip
        super().__init__(queue)
        given = zip(("scale_a", "scale_b", "bias"), _operands(extras), strict=True)
        #: By the name of an operand that is given: its address in an issue.
        self._given = {name: more(3 + i) for i, name in enumerate(name for name, x in given if x is not None)}
        self._queue, self._flags, self._received = queue, flags, received
        self._fresh = fresh(queue.device, shape, dtype)
        #: See `ReduceScatterQueue.repeat`.
        self._kernel = 0
        self._last_buffer: Callable[[], torch.Tensor | None] = lambda: None

    def learn(
        self, slot: int, program: Program, values: tuple[int, int, int, int],
        host: Callable[[Callable[[], object]], Host], add: Callable[[], object],
    ) -> None:  # fmt: skip
        """Issue a call's program, and prepare its slot.

        Parameters
        ----------
        host
            The host's actions, one of which calls its argument to issue the sum.
        add
            Issues the sum.
        """
        added: list[Any] = []

        def observed() -> None:
            with observe() as seen:
                add()
            added.extend(seen.issued)

        with keeping() as launches:
            issue(program, values, host(observed))
        if len(launches) != 1 or len(added) != 1 or added[0] is None:
            return
        try:
            adds = Launched.of_kernel(added[0])
        except ValueError as error:
            logger.debug("no repeat: %s", error)
            return
        kernel, given = self._queue.events_in(slot).kernel, dict(self._given)
        added_to = [Patch("bias", given.pop("bias"))] if "bias" in given else []
        scales = [Patch(name, value) for name, value in given.items()]
        parts: dict[str, Part] = {
            "multiply": (launches[0], [Patch("a", more(0)), Patch("b", more(1)), *scales, *self._publishes]),
            "kernel": Sequence(more(0).index, [Record(CALLING, kernel.cuda_event)]),
            "add": (adds, [Patch("out", more(2)), Patch("epoch", EPOCH), *added_to, *self._adds]),
        }
        # The whole call is issued before it is watched.
        watched = [*self._queue.admission(slot), *(part for part in program if part != "track")]
        self._kernel = watched.index("kernel")
        made = [parts.get(part, part) if isinstance(part, str) else part for part in watched]
        self.keep(slot, 3 + len(self._given), made)

    @property
    def _publishes(self) -> list[Patch]:
        return [] if self._received is None else [Patch("out_epoch", EPOCH)]

    @property
    def _adds(self) -> list[Patch]:
        return [] if self._received is None else [Patch("parts", SECOND)]

    def issue_by(self, program: NativeProgram, call: PlainCall, slot: int) -> torch.Tensor | None:
        """See `ProgramRepeat`: the sum."""
        a, (b,) = call.a, call.bs
        received = None if self._received is None else self._buffer(call.state)
        out = self._fresh()
        addresses: tuple[int, ...] = a.data_ptr(), b.data_ptr(), out.data_ptr()
        if self._given:
            more = self._contiguous(a, b, call.extras)
            addresses += tuple(x.data_ptr() for x in more)
        of_call = a.get_device(), self._kernel, self._flags, received, addresses, call.deadline
        return out if self._queue.repeat(program, *of_call) else None

    def _contiguous(self, a: torch.Tensor, b: torch.Tensor, extras: Extras) -> list[torch.Tensor]:
        """The scales and the bias that are given, as kernels take them."""
        scale_a, scale_b, bias = _operands(extras)
        shape = math.prod(a.shape[:-1]), b.shape[-1]
        scale_a, scale_b = canonical_scales(self._queue.op, scale_a, scale_b, a.shape[:-1], (), shape)
        return [x for x in (scale_a, scale_b, None if bias is None else bias.contiguous()) if x is not None]

    def _buffer(self, state: GroupState) -> torch.Tensor:
        """The memory that the peers' parts are pulled to: that of the last call, as long as the state keeps it."""
        found = self._last_buffer()
        if found is None:
            assert self._received is not None
            found = self._received(state)
            self._last_buffer = weakref.ref(found)
        return found


def _operands(extras: Extras) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """A sum's scales of A and B, and its bias."""
    return extras.scale_a, extras.scales_b[0], extras.biases[0]


def matmul_scatter(
    state: GroupState, plan: DistributedPlan, shards: Shards, request: Request, dtype: torch.dtype, product: Product,
    seconds: float,
    plain: PlainCall | None = None,
) -> torch.Tensor:  # fmt: skip
    """The sum (or average) over all ranks of this rank's part of their products, plus the bias.

    Non-blocking. The next call on this device, or with this group, raises later errors.

    Parameters
    ----------
    dtype
        The dtype of the parts that travel, and of the result.
    plain
        The call, if equal ones can be repeated.

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

        def buffer(of: GroupState) -> torch.Tensor:
            return of.buffer("received", (shards.world, *mine), dtype, device)

        received = buffer(state)
        out = torch.empty(mine, dtype=dtype, device=device)

        def reduce_partials(product_of_all: torch.Tensor, void: torch.Tensor, epoch: int) -> None:
            from tilestream.launch.portable.add import add_parts  # imports Triton

            divisor = request.divisor(shards.world)
            add_parts(product_of_all, received, out, bias, void, state.rank, epoch, divisor)

        repeat = None
        if plain is not None and plain.a.is_contiguous():
            shape = [*plain.a.shape[:-1], shards.width]
            shape[plain.dim] //= shards.world
            flags, of = shards.batches * shards.parts, tuple(shape)
            repeat = SumRepeat.of(plain, queue, flags, buffer, of, dtype, plain.extras)
        queue.issue(shards, dtype, received, product, reduce_partials, seconds, repeat)
    return out
