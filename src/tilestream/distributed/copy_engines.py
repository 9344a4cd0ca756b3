"""All-gather + matmul on GPUs: copy engines push or pull shards while a gated kernel multiplies the arrived rows.

::

    calling stream:  shard -> own slot; signal it; kernel: schedule, gate, load, math, ...; the side stream
    side stream:     pushed: for each peer: push a chunk into its slot; signal it there; repeat
                     pulled: set my flags; for each peer: wait for its flag; pull a chunk; signal it; repeat
    watchdog:        when this rank or a peer has given up: set abort flags, end waiting kernels and streams

`tilestream.core.protocols.gather`, which the checker explores, has the operations. This module maps each to a GPU's
operation, and records them (`tilestream.distributed.program`). Only the kernel, and the copy of the own shard into the
slot before it, need an SM (invariant 10). No operation waits for a later one, so the driver may run the streams in any
order.

A slot has a place for each rank's rows, and the kernel reads them there. If the own shard is pushed, the kernel and the
copy engines read it in the caller's tensor. It is copied into the own slot only for a kernel that cannot read two
places (`tilestream.arrival.device.LocalRows`). A shard that is pulled or strided is first copied into the own slot, and
sent from there. ``return_a`` copies all rows out of the slot after the kernel.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import PeerSignals
from tilestream.core.error_record import FIELDS, RECORDS
from tilestream.core.errors import ArrivalTimeout
from tilestream.core.protocols import gather
from tilestream.distributed.call_queue import CallQueue, IssuedCall
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.program import (
    CALLING,
    EPOCH,
    FIRST,
    SECOND,
    Handlers,
    Program,
    Recorder,
    issue,
    more,
    no_op,
    run_protocol,
)
from tilestream.distributed.repeats import NO_EXTRAS, Extras, Gathered, PlainCall, ProgramRepeat, fresh
from tilestream.distributed.shards import Product, ScaledRows, Shards
from tilestream.distributed.slots import (
    SCALE_BYTES,
    Form,
    is_brought,
    local_rows,
    place,
    push,
    scales_at,
    slot_rows,
    slot_size,
    sources_of,
)
from tilestream.distributed.symmetric import PeerMemory
from tilestream.launch.gate import nanoseconds
from tilestream.launch.native_program import Launched, NativeProgram, Part, Patch, ProgramError, keeping
from tilestream.runtime.channel import channel
from tilestream.runtime.sequence import AwaitEvent, Check, CopyAcross, Operand, Record, Wait, WaitEvent, Write
from tilestream.runtime.sequence import Sequence as OperationSequence
from tilestream.runtime.streams import current_stream

#: Values of a native issue behind the others: the deadline as kernels have it, and the newest report that is known. The
#: products' addresses follow.
_ALLOWED, _HEARD = map(more, range(2))
_ADDRESSES = 2
#: The most arrivals, one for each shape and slot. This exceeds the calls in flight, since an arrival identifies an
#: expiry.
_MOST_ARRIVALS = 128
#: Seconds after the deadline in which a launched kernel reports its own expiry.
_LOADING = 0.25


class Prepared(NamedTuple):
    """The program of calls of one form in one slot; and the slot as all ranks' rows with their scales."""

    program: Program
    slot: ScaledRows


class _PendingIssue:
    """A pulled call that the host is still issuing, while its side stream may already wait for a peer.

    The host may block on that stream, and so on the peer: at a kernel's first launch the driver loads it only after all
    work on the GPU has ended, waiting streams included. In that case this call's kernel, which has the deadline, may
    never be launched.
    """

    def __init__(self, epoch: int, shards: Shards, signals: PeerSignals, seconds: float, heard: int) -> None:
        self.epoch, self.seconds, self.heard, self.key = epoch, seconds, heard, signals.key
        self._shards, self._signals = shards, signals
        self.begun = time.perf_counter()
        #: The ranks whose rows are missing, once the stream was released. Results from their rows are undefined.
        self.missing: list[int] | None = None

    def timeout(self, op: str, rank: int, waited: float) -> ArrivalTimeout:
        """The error for a missing rank that no kernel reports."""
        assert self._signals.whose is not None
        chunk = next(self._shards.of_rank(rank)).chunk
        here, whose = self._signals.whose(chunk)
        return ArrivalTimeout(op, 0, chunk, "the first that reads it", waited, self.seconds, here, whose)


class GatherQueue(CallQueue):
    """A group's gathers on one GPU. Hold the group's call."""

    op = "all_gather_matmul"
    admission_values = more(_ADDRESSES).index

    def __init__(self, state: GroupState, device: torch.device, memory: PeerMemory | None = None) -> None:
        super().__init__(state, device, memory)
        self._arrivals: dict[tuple[Shards, int], Arrival] = {}
        self._keys: set[int] = set()  # the keys of their signals
        self._nan: dict[torch.dtype, torch.Tensor] = {}
        self._heard = channel(device).newest
        #: Calls without all their kernels, with their deadlines in seconds.
        self._without_kernel: dict[int, tuple[PeerSignals, float]] = {}
        #: Set by the thread that issues; the watchdog marks it under the lock.
        self._pending: _PendingIssue | None = None
        self._lock = threading.Lock()
        #: The program after the kernel, by slot.
        self._finish = [self._prepare_finish(slot) for slot in range(gather.SLOTS)]

    def _prepare_finish(self, slot: int) -> Program:
        recorder, events = Recorder(slot), self._events[slot]
        recorder.add(Record(CALLING, events.kernel.cuda_event))
        recorder.add(Record(self._side.cuda_stream, events.side.cuda_event))
        awaits: Handlers = {gather.AwaitSide: lambda op: recorder.add(WaitEvent(CALLING, events.side.cuda_event))}
        recorder.run(gather.finish(recorder.epoch), awaits)
        recorder.add(Record(CALLING, events.end.cuda_event))
        return recorder.program()

    def reserve(self, size: int, chunks: int = 0) -> bool:
        """See `CallQueue`; drops the arrivals of the old signals."""
        new = super().reserve(size, chunks)
        if new:
            self._check_expired(None)  # before the old arrivals' keys are dropped
            self._arrivals.clear()
            self._keys = set()
        return new

    def arrival(self, shards: Shards, epoch: int) -> Arrival:
        """The arrival that a call's kernel waits for: the signals of its slot."""
        key = shards, epoch % gather.SLOTS
        found = self._arrivals.get(key)
        if found is None:
            if len(self._arrivals) >= _MOST_ARRIVALS:  # drop the one whose last call, repeated or not, is the oldest
                del self._arrivals[min(self._arrivals, key=lambda known: _signals(self._arrivals[known]).epoch)]
                self._keys = {kept.key for kept in self._arrivals.values()}
            found = shards.arrival(self._rank)
            words = self.memory.signals(epoch % gather.SLOTS)[: found.num_chunks]
            found._signals = PeerSignals(words, self.device)
            rank, queue = self._rank, weakref.ref(self)
            found._signals.whose = lambda chunk: (rank, f"rank {shards.rank_of(chunk)}'s part of a_shard")
            found._signals.gave_up = lambda: abort_expired(queue())
            self._keys = self._keys | {found.key}  # a new set: the watchdog may be reading the old one
            self._arrivals[key] = found
        _signals(found).begin(epoch)
        return found

    # A call --------------------------------------------------------------------------------------------------------

    def issue(
        self, shards: Shards, shard: ScaledRows, gathered: torch.Tensor | None,
        compute: Callable[[ScaledRows, Arrival], list[torch.Tensor]], seconds: float, way: gather.Way,
        repeat: GatherRepeat | None = None,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Issue a call: publish, side stream, kernels. Non-blocking; returns the results of ``compute``.

        Parameters
        ----------
        shard
            The own rows; later work in the calling stream may overwrite or free them.
        gathered
            The tensor that all ranks' rows are copied to; None: no copy. A later call reuses the slot.
        seconds
            The kernels' deadline.
        way
            The direction in which shards travel; the same on each rank.
        repeat
            Learns to repeat the call.
        """
        from_slot = way == "pull" or not shard.data.is_contiguous()
        form = Form(shards, shard.data.dtype, shard.scales is not None, way, from_slot)
        epoch, calling = self.begin(), torch.cuda.current_stream(self.device)
        handle, begun = calling.cuda_stream, None
        try:
            arrival = self.arrival(shards, epoch)
            signals = begun = _signals(arrival)
            program, slot = self.prepared(form, epoch, self._prepare)
            if shard.scales is not None:  # they are few, and often one expanded number
                shard = shard._replace(scales=shard.scales.contiguous())
            for x in shard:
                if x is not None:  # memory is reused only after the wait for the side stream (invariant 9)
                    x.record_stream(calling)
            own = None if from_slot else local_rows(self._rank, shards, shard.data, slot.data)

            def fill() -> None:
                if from_slot:  # otherwise they stay apart, or `bring` copies them
                    place(self._rank, slot.data, shard.data)
                if shard.scales is not None and slot.scales is not None:
                    place(self._rank, slot.scales, shard.scales)

            def await_peers() -> None:
                self._pending = _PendingIssue(epoch, shards, signals, seconds, self._heard)
                self._watchdog.wake()

            # Before the kernel: a blocking launch (CUDA_LAUNCH_BLOCKING) ends only if its copies are already issued.
            scales = 0 if shard.scales is None else shard.scales.data_ptr()
            values = handle, epoch, shard.data.data_ptr(), scales
            issue(program, values, {"fill": fill, "await peers": await_peers})
        except BaseException as error:  # peers may wait for the rest of the call
            self._abort_half_issued(error)
            self._end(epoch, begun, handle)  # so that the watchdog releases a waiting side stream
            raise
        self._without_kernel[epoch] = signals, seconds
        signals.local_rows = own
        try:
            if repeat is None:
                outs = compute(slot, arrival)
            else:
                at = epoch % gather.SLOTS
                with keeping() as launches:
                    outs = compute(slot, arrival)
                if shard.data.is_contiguous():
                    bring = self._bring(form, at)
                    fills = {"fill": [bring] * from_slot, "await peers": []}
                    fills["fill"] += [self._bring_scales(form, at)] * form.scaled
                    before = [x for part in program for x in (fills[part] if isinstance(part, str) else [part])]
                    before += [bring] if own is not None and is_brought(own) else []
                    behind = self._finish[at] if gathered is None else ()
                    repeat.learn(at, arrival, before, behind, launches, outs, slot.data, own is not None)
            del self._without_kernel[epoch]
            if gathered is not None:
                self.take_out(gathered, slot.data, signals, shards, None if own is None else shard.data)
        finally:  # without a kernel, too, so that the peers get their rows
            signals.local_rows = None  # drops the reference to the caller's tensor
            missing = self._end(epoch, signals, handle)
        _void(missing, outs, shards)
        for rank in missing:
            if gathered is not None:
                _fill_nan(gathered[:, rank])
        return outs

    def take_out(
        self, into: torch.Tensor, gathered: torch.Tensor, signals: PeerSignals, shards: Shards, own: torch.Tensor | None
    ) -> None:
        """`take_out` of a slot behind its kernel; ``own``: the rows of this rank where they are not in the slot."""
        take_out(into, gathered, signals, shards, self._nan)
        if own is not None:
            place(self._rank, into, own)

    def repeat(
        self, program: NativeProgram, signals: PeerSignals, shards: Shards, rows: torch.Tensor,
        scales: torch.Tensor | None, addresses: Sequence[int], seconds: float, way: gather.Way,
        behind: Callable[[PeerSignals], None] | None = None,
    ) -> list[int] | None:  # fmt: skip
        """Issue a call with all its kernels by a program.

        Parameters
        ----------
        signals
            What the program's kernels wait for.
        rows, scales
            The own rows, and their scales; contiguous.
        addresses
            See `GatherRepeat`.
        behind
            Issues what follows the kernels before the slot may be used again; None: the program has all operations.

        Returns
        -------
        list of int or None
            The ranks that were given up during the issue. None if nothing was issued: the stream lacks the words of a
            launch, the slot has other signals now, or the usual way has to find out what a kernel has reported.
        """
        if self._without_kernel or signals.key not in self._keys:  # another arrival has the slot's signals now
            return None
        if way == "pull":  # the wait for an earlier kernel is no part of the time that this call's peers have
            self._events[(self._epoch - gather.AHEAD) % gather.SLOTS].kernel.synchronize()
        epoch, index, calling = self.begin_native(), rows.get_device(), current_stream(self.device)
        stream, at_scales = torch._C._cuda_getCurrentRawStream(index), 0
        signals.begin(epoch)
        rows.record_stream(calling)  # as in `issue`
        if scales is not None:
            scales.record_stream(calling)
            at_scales = scales.data_ptr()
        given = rows.data_ptr(), at_scales, nanoseconds(seconds), self._heard, *addresses
        if way == "pull":
            self._pending = _PendingIssue(epoch, shards, signals, seconds, self._heard)
            self._watchdog.wake()
        program.progress = None
        try:
            if not program.issue(index, stream, epoch, *given):
                with self._lock:
                    self._pending = None
                self.take_back(epoch)
                return None
            if behind is None:
                return self._watch(epoch, signals)
        except BaseException as error:
            issued = program.recover(error)
            if issued == len(program):  # an interrupt came behind the issue: no event is recorded again
                if behind is None:
                    self._watch(epoch, signals)
                else:
                    self._end(epoch, signals, stream)
                raise
            if issued < program.first_launch or not isinstance(error, ProgramError):
                self._abort_half_issued(error)  # peers may wait for the rest of the call
            else:  # the peers get their rows
                self._without_kernel[epoch] = signals, seconds
            if behind is not None or issued + 1 < len(program):
                self._end(epoch, signals, stream)
            raise
        try:
            behind(signals)
        finally:
            missing = self._end(epoch, signals, stream)
        return missing

    def _end(self, epoch: int, signals: PeerSignals | None, calling: int) -> list[int]:
        """Issue the program after the kernel. Returns the ranks that were given up during the issue."""
        issue(self._finish[epoch % gather.SLOTS], (calling, epoch, 0, 0), {})
        return self._watch(epoch, signals)

    def _watch(self, epoch: int, signals: PeerSignals | None) -> list[int]:
        """Have the watchdog watch an issued call. Returns the ranks that were given up during the issue."""
        kernel, _, end = self._events[epoch % gather.SLOTS]
        self.track(IssuedCall(epoch, kernel, end, epoch, 0.0, signals))
        if self._pending is None:
            return []
        with self._lock:  # from here on the watchdog treats it as a call in flight
            pending, self._pending = self._pending, None
        return pending.missing or []

    def overrule(self, call: IssuedCall, error: BaseException) -> None:
        """See `CallQueue`; a call that failed before it had signals has no kernel."""
        if call.signals is not None:
            call.signals.overrule(error)

    def _prepare(self, form: Form, slot: int) -> Prepared:
        """Record the calling stream's operations before the kernel, then the side stream's."""
        recorder, memory, shards = Recorder(slot), self.memory, form.shards
        epoch, add = recorder.epoch, recorder.add
        parts = [list(shards.of_rank(rank)) for rank in range(self._world)]
        mine, side, posted = parts[self._rank], self._side.cuda_stream, self._posted.cuda_event
        sources = list(sources_of(memory, self._rank, form, slot))
        flag, epoch_of = self.flags.flag, recorder.epoch_of

        def own_signal(stream: Operand) -> Callable[[gather.Signal], None]:
            def signal(op: gather.Signal) -> None:
                chunk = parts[op.rank][op.chunk].chunk
                add(Write(stream, memory.signal(self._rank, op.slot, chunk), epoch_of(op)))

            return signal

        publish: Handlers = {
            gather.AwaitCall: lambda op: add(WaitEvent(CALLING, self._events[op.epoch % gather.SLOTS].end.cuda_event)),
            gather.Post: lambda op: add(Record(CALLING, posted)),
            gather.Fill: lambda op: recorder.host("fill") if form.fills else None,
            gather.Filled: no_op,
            gather.Signal: own_signal(CALLING),
        }
        recorder.run(gather.publish(self._rank, len(mine), epoch, form.from_slot), publish)
        if form.way == "pull":
            recorder.host("await peers")

        def push_chunk(op: gather.Push) -> None:
            for one in push(memory, sources, shards, self._rank, mine[op.chunk], op.peer, op.slot, side):
                add(one)

        def tell(op: gather.SignalPeer) -> None:
            add(Write(side, memory.signal(op.peer, op.slot, mine[op.chunk].chunk), epoch_of(op)))

        def pull(op: gather.Pull) -> None:
            source, target = (memory.address(rank, op.slot) for rank in (op.peer, self._rank))
            first, rows = shards.place(op.peer, parts[op.peer][op.chunk])
            for x in sources:
                at = x.at + first * x.row_bytes
                add(CopyAcross(side, target + at, source + at, rows * x.row_bytes))

        travel: Handlers = {
            gather.AwaitPost: lambda op: add(WaitEvent(side, posted)),
            gather.Push: push_chunk,
            gather.Pushed: no_op,
            gather.SignalPeer: tell,
            gather.Flag: lambda op: add(Write(side, flag(op.peer, self._rank), epoch_of(op))),
            gather.AwaitFlag: lambda op: add(Wait(side, flag(self._rank, op.peer), epoch_of(op))),
            gather.Pull: pull,
            gather.Pulled: no_op,
            gather.Signal: own_signal(side),
            gather.Done: no_op,  # `_finish` records the event
        }
        recorder.run(gather.side(self._rank, self._world, len(mine), epoch, form.way), travel)
        return Prepared(recorder.program(), slot_rows(memory, self._rank, slot, form))

    def _bring(self, form: Form, slot: int) -> OperationSequence:
        """Copies a contiguous shard to its place in the own slot, as `slots.place`."""
        shards, at = form.shards, self.memory.address(self._rank, slot)
        row = shards.width * form.dtype.itemsize
        return OperationSequence(more(0).index, [
            CopyAcross(
                CALLING, at + (batch * self._world + self._rank) * shards.rows * row,
                FIRST + batch * shards.rows * row, shards.rows * row,
            )
            for batch in range(shards.batches)
        ])  # fmt: skip

    def _bring_scales(self, form: Form, slot: int) -> OperationSequence:
        """Copies contiguous scales to their place behind the rows of the own slot, as `slots.place`."""
        shards, first = form.shards, self.memory.address(self._rank, slot) + scales_at(form)
        size = shards.rows * SCALE_BYTES
        return OperationSequence(more(0).index, [
            CopyAcross(CALLING, first + (batch * self._world + self._rank) * size, SECOND + batch * size, size)
            for batch in range(shards.batches)
        ])  # fmt: skip

    # The host, and giving up ---------------------------------------------------------------------------------------

    def admit(self, epoch: int) -> int | None:
        """See `CallQueue`."""
        handlers: Handlers = {
            gather.AwaitKernel: self._await_rows,
            gather.CheckExpired: self._check_expired,
            gather.Begin: self._begin,
        }
        return run_protocol(gather.begin(epoch), handlers)

    def record_admission(self, recorder: Recorder, begin: Callable[[gather.Begin], int]) -> None:
        """See `CallQueue`; the value `_HEARD` is the newest record that is known."""
        records = channel(self.device).records

        def check(op: gather.CheckExpired) -> int:
            recorder.add(Check(records.data_ptr(), FIELDS * records.element_size(), RECORDS, _HEARD))
            return 0

        handlers: Handlers = {
            gather.AwaitKernel: lambda op: recorder.add(
                AwaitEvent(self._events[op.epoch % gather.SLOTS].kernel.cuda_event)
            ),
            gather.CheckExpired: check, gather.Begin: begin,
        }  # fmt: skip
        recorder.run(gather.begin(recorder.epoch), handlers)

    def _await_rows(self, op: gather.AwaitKernel) -> None:
        """Wait for a call's kernel; if it was not issued, for the call's rows."""
        self.await_kernel(op)
        for epoch in [epoch for epoch in self._without_kernel if epoch <= op.epoch]:
            signals, seconds = self._without_kernel.pop(epoch)
            end = time.perf_counter() + seconds
            while not all(signals.state()):
                if time.perf_counter() > end:
                    self.abort_group(self.describe_expiry())
                    return
                time.sleep(0.001)

    def poll(self) -> bool:
        """See `CallQueue`; also polls the call that is being issued."""
        busy, pending = super().poll(), self._pending
        if pending is not None:
            self._poll_pending(pending)
        return busy or pending is not None

    def _poll_pending(self, pending: _PendingIssue) -> None:
        """Release the call's side stream if a peer has given up or is late, or a kernel has reported its expiry.

        This uses host memory only, because the driver may be waiting for that stream.
        """
        state = self._state()
        if state is None:
            return
        flags = self.flags.peer_flags()
        late = [peer for peer in gather.peers(self._rank, self._world) if flags[peer] < pending.epoch]
        error: BaseException | None = None
        if not state.broken:
            waited = time.perf_counter() - pending.begun
            if self.flags.aborted():
                self.abort_group(f"{self.op}: a peer has given up waiting")
                error = state.break_("")  # the first reason is kept
            elif late and waited > pending.seconds + _LOADING:
                self.abort_group(self.describe_expiry())
                error = pending.timeout(self.op, late[0], waited)
            elif not self._check_expired(pending):  # a launched kernel reports its own expiry
                return
        if pending.missing is None:
            with self._lock:
                if self._pending is not pending:
                    return  # it is issued, and polled as a call in flight
                pending.missing = late
            if error is not None:
                channel(self.device).post(error, pending.key, pending.heard)  # a kernel of it may be running
        for peer in gather.peers(self._rank, self._world):
            self.flags.release(peer, pending.epoch)

    def _check_expired(self, op: object) -> int:
        newest, expired = channel(self.device).heard(self._heard, self._keys)
        if expired:
            self.abort_group(self.describe_expiry())
        self._heard = newest  # last, so that host and watchdog both see the report until the group is broken
        return int(expired)

    def why_expired(self, oldest: IssuedCall) -> str:
        """See `CallQueue`: a kernel has reported its expiry, or the group is broken."""
        state = self._state()
        return self.describe_expiry() if self._check_expired(oldest) or (state is not None and state.broken) else ""


def _signals(arrival: Arrival) -> PeerSignals:
    signals = arrival._signals
    assert isinstance(signals, PeerSignals)
    return signals


def abort_expired(queue: CallQueue | None) -> None:
    """Break the group, because a report of the device was read before the watchdog's poll."""
    if queue is not None:
        queue.abort_group(queue.describe_expiry())


def take_out(
    into: torch.Tensor, gathered: torch.Tensor, signals: PeerSignals, shards: Shards,
    nans: dict[torch.dtype, torch.Tensor],
) -> None:  # fmt: skip
    """Copy the gathered rows out of their slot, on the current stream after the kernel; NaN for missing chunks.

    ``nans``: a NaN of each dtype, kept for later calls, which all follow the call that made it.
    """
    words = signals.use(local_rows=True).words.view(shards.batches, shards.world, shards.parts, 1, 1)
    arrived = words >= signals.epoch  # a separate kernel, before the rows are read
    bits = _bits(into)
    nan = nans.get(bits)
    if nan is None:
        nan = nans[bits] = into.view(bits).new_full((), torch.iinfo(bits).max)
    to, source = into.view(bits), gathered.view(bits)
    if shards.rows % shards.parts == 0:  # chunks of one size
        chunks = (shards.batches, shards.world, shards.parts, shards.rows // shards.parts, -1)
        torch.where(arrived, source.view(chunks), nan, out=to.view(chunks))
        return
    for i in range(shards.parts):
        rows = slice(shards.rows * i // shards.parts, shards.rows * (i + 1) // shards.parts)
        torch.where(arrived[:, :, i], source[:, :, rows], nan, out=to[:, :, rows])


def _bits(x: torch.Tensor) -> torch.dtype:
    """The integer dtype whose largest value is a NaN in ``x``'s format."""
    return torch.int8 if x.element_size() == 1 else torch.int16


def _void(ranks: list[int], outs: list[torch.Tensor], shards: Shards) -> None:
    """Make the rows of these ranks NaN."""
    for rank in ranks:
        for out in outs:
            out.view(*shards.shape[:-1], out.shape[-1])[:, rank].fill_(math.nan)


def _fill_nan(x: torch.Tensor) -> None:
    bits = x.view(_bits(x))
    bits.fill_(torch.iinfo(bits.dtype).max)


class GatherRepeat(ProgramRepeat):
    """Equal gathers of a contiguous shard.

    ``return_a``: all ranks' rows are copied out of the slot, by torch's kernels behind the program's. The addresses of
    an issue are those of the products' right operands, of their results, and of the biases and scales that they have.
    """

    def __init__(
        self, queue: GatherQueue, shards: Shards, way: gather.Way, return_a: bool = False, extras: Extras = NO_EXTRAS
    ) -> None:
        super().__init__(queue)
        self._queue, self._shards, self._way, self._return_a = queue, shards, way, return_a
        #: By slot: all ranks' rows in it. And whether this rank's own are in the caller's tensor alone.
        self._rows: list[torch.Tensor | None] = [None] * gather.SLOTS
        self._own_apart = False
        #: By slot: the arrival that its program waits for.
        self._arrivals: list[Arrival | None] = [None] * gather.SLOTS
        #: Of each product, its columns; and the dtype of all.
        self._columns: list[int] = []
        self._dtype = torch.bfloat16
        #: Make new results, of all ranks' rows and of the products, from the first repeated call on.
        self._fresh_rows: Callable[[], torch.Tensor] | None = None
        self._fresh: list[Callable[[], torch.Tensor]] = []
        #: The operands of products that are given, by name. The kernels read scales of rows in the slot.
        self._given = [
            (name, i)
            for name, each in (("bias", extras.biases), ("scale_b", extras.scales_b))
            for i, x in enumerate(each)
            if x is not None
        ]

    def learn(
        self, slot: int, arrival: Arrival, before: Sequence[Part], behind: Program, launches: list[Launched],
        outs: list[torch.Tensor], rows: torch.Tensor, own_apart: bool,
    ) -> None:  # fmt: skip
        """Prepare a slot, from a call that the queue has issued.

        Parameters
        ----------
        before, behind
            The operations before and after the kernels; with ``return_a`` the queue issues those after them.
        launches
            The launches that the extension has issued for it, one for each of ``outs``.
        rows, own_apart
            All ranks' rows in the slot; whether this rank's own are not there.
        """
        if len(launches) != len(outs):
            return
        self._rows[slot], self._own_apart = rows, own_apart
        self._columns, self._dtype, self._arrivals[slot] = [out.shape[1] for out in outs], outs[0].dtype, arrival
        named = [(name, i) for name in ("b", "out") for i in range(len(outs))] + self._given
        patches = [[Patch("local", FIRST), Patch("row_epoch", EPOCH), Patch("allowed", _ALLOWED)] for _ in outs]
        for number, (name, i) in enumerate(named):
            patches[i].append(Patch(name, more(_ADDRESSES + number)))
        kernels = zip(launches, patches, strict=True)
        parts = (*self._queue.admission(slot), *before, *kernels, *behind)
        self.keep(slot, _ADDRESSES + len(named), parts)

    def issue_by(self, program: NativeProgram, call: PlainCall, slot: int) -> Gathered | None:
        """See `ProgramRepeat`: all ranks' rows, None without ``return_a``, and the products."""
        a, arrival, extras = call.a, self._arrivals[slot], call.extras
        assert arrival is not None
        if self._fresh_rows is None:
            self._fresh_rows = self._see(a, call.dim)
        outs = [make() for make in self._fresh]
        addresses = [x.data_ptr() for x in (*call.bs, *outs)]
        scales = gathered = behind = None
        if extras is not NO_EXTRAS:
            addresses += [x.data_ptr() for x in (*extras.biases, *extras.scales_b) if x is not None]
            scales = call.scales_of_rows()
        if self._return_a:
            gathered = self._fresh_rows()
            behind = functools.partial(self._take_out, slot, a, gathered)
        of_call = _signals(arrival), self._shards, a, scales, addresses, call.seconds, self._way, behind
        missing = self._queue.repeat(program, *of_call)
        if missing is None:
            return None
        if missing:
            _void(missing, outs, self._shards)
        if gathered is not None:
            for rank in missing:
                _fill_nan(gathered.view(self._shards.shape)[:, rank])
        return gathered, outs

    def _see(self, shard: torch.Tensor, dim: int) -> Callable[[], torch.Tensor]:
        """Prepare the results of calls with such shards: what is returned makes all ranks' rows."""
        shape, device = list(shard.shape), self._queue.device
        shape[dim] *= self._shards.world
        self._fresh = [fresh(device, (*shape[:-1], n), self._dtype) for n in self._columns]
        return fresh(device, shape, shard.dtype)

    def _take_out(self, slot: int, a: torch.Tensor, gathered: torch.Tensor, signals: PeerSignals) -> None:
        """Copy all ranks' rows out of the slot."""
        shards, rows = self._shards, self._rows[slot]
        assert rows is not None
        own = a.view(shards.batches, shards.rows, shards.width) if self._own_apart else None
        self._queue.take_out(gathered.view(shards.shape), rows, signals, shards, own)


def gather_matmul(
    state: GroupState, plan: DistributedPlan, shards: Shards, shard: ScaledRows, products: Sequence[Product],
    seconds: float, return_a: bool, plain: PlainCall | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """Gather ``shard`` (``[batches, rows, width]``) from all ranks while ``products`` of all rows are computed.

    Non-blocking. The next call on this device, or with this group, raises later errors. ``plain``: the call, if equal
    ones can be repeated.
    """
    device, x = shard.data.device, shard.data
    with torch.cuda.device(device):
        queue = GatherQueue.of(state, plan, "a_shard", device, slot_size(shards, x.dtype), shards.chunks)
        gathered = x.new_empty(shards.shape) if return_a else None
        repeat = None
        # Of strided leading dimensions the shard is a copy, and the caller's address is not that of its rows.
        if plain is not None and plain.a.is_contiguous():
            repeat = GatherRepeat.of(plain, queue, shards, plan.decision.way, return_a, plain.extras)

        def compute(rows: ScaledRows, arrival: Arrival) -> list[torch.Tensor]:
            a = rows.data.view(shards.total, shards.width)
            scales = None if rows.scales is None else rows.scales.view(shards.total, 1)
            return [product(a, scales, arrival, seconds) for product in products]

        outs = queue.issue(shards, shard, gathered, compute, seconds, plan.decision.way, repeat)
    return x if gathered is None else gathered, outs
