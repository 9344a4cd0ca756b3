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
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.distributed import protocol as p
from tilestream.distributed.collective import agree, meet
from tilestream.distributed.members import Member
from tilestream.distributed.plan import DistributedPlan
from tilestream.distributed.shards import Part, Shards
from tilestream.distributed.symmetric import PeerMemory
from tilestream.distributed.whole import Product, Whole
from tilestream.runtime import exit
from tilestream.runtime.driver import copy_across, stream_wait, stream_write
from tilestream.runtime.errors import GroupBroken
from tilestream.runtime.streams import aside, lend_to

if TYPE_CHECKING:
    from tilestream.arrival.device import DeviceSignals

#: Seconds between two looks of the watchdog, while a call is under way.
LOOK_SECONDS = 0.05
#: Looks after which a kernel that has ended before its side stream is known to have given up. Of one that has all its
#: chunks, the side stream has an event left to record.
_LOOKS = 3
#: Signals that are kept, of as many shapes.
_MOST_ARRIVALS = 128
#: Scales begin at a multiple of this many bytes in a slot.
_ALIGN = 256


class Underway(NamedTuple):
    """A call that was issued.

    Attributes
    ----------
    epoch
        Of the protocol.
    arrival
        Its signals; no other call that is under way has them.
    kernel, side
        After its kernels, and after its side stream.
    """

    epoch: int
    arrival: Arrival
    kernel: torch.cuda.Event
    side: torch.cuda.Event


class Gatherer:
    """A member's calls on one GPU: their epochs, streams, signals, and what is under way. Hold the member's call."""

    def __init__(self, member: Member, device: torch.device, memory: PeerMemory | None = None) -> None:
        self._rank, self._world, self._name, self.device = member.rank, member.world, member.name, device
        self._member = weakref.ref(member)
        self.memory = memory or PeerMemory(member, device)
        self._side = lend_to(self, device)
        self._epoch = 0
        self._arrivals: dict[tuple[Shards, int], Arrival] = {}
        self._calls: list[Underway] = []
        self._last: Underway | None = None
        self._lock = threading.Lock()  # of `_calls`
        self._posted = torch.cuda.Event()
        self._suspect = 0, 0  # a call, and in how many looks its kernel had ended and its side stream not
        self._watchdog = _Watchdog(self)

    # The host ------------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """The epoch of a new call, once at most `protocol.AHEAD` are under way."""
        text = p.begin(self._epoch + 1)
        epoch = _answer(text, {p.Begin: self._begin})
        member = self._member()
        if epoch is None or member is None:
            assert member is not None
            member.check()
            raise AssertionError("a call was refused though the group is whole")
        self._epoch = epoch
        return epoch

    def _begin(self, op: p.Begin) -> int:
        for call in self._underway():
            if call.epoch <= op.after:
                call.side.synchronize()  # the watchdog lets a stream go that waits for a peer without hope
        member = self._member()
        return int(member is not None and not member.broken)

    def _underway(self) -> list[Underway]:
        """Calls whose side stream is not done; the others are forgotten."""
        with self._lock:
            self._calls = [call for call in self._calls if not call.side.query()]
            return list(self._calls)

    def reserve(self, size: int) -> None:
        """Have slots of at least ``size`` bytes. All ranks do it at the same call."""
        member = self._member()
        if self.memory.slot_bytes < size and member is not None:
            self.quiet()
            meet(member, self.device)  # nobody pulls from the old slots
            self.memory.grow(size)

    def quiet(self) -> None:
        """Wait until nothing is under way here."""
        for call in self._underway():
            call.kernel.synchronize()
            call.side.synchronize()

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
            self.give_up(f"all_gather_matmul on rank {self._rank}: {type(error).__name__}: {error}")
            raise
        try:
            outs = compute(whole, arrival)
        finally:  # without a kernel, too: the peers pull what was published
            kernel = torch.cuda.Event()
            kernel.record(calling)
            self._last = Underway(epoch, arrival, kernel, done)
            with self._lock:
                self._calls.append(self._last)
            self._watchdog.wake()
            # Whoever comes after this call in its stream may free what the side stream writes.
            calling.wait_event(done)
        return outs

    def _publish(
        self, epoch: int, shards: Shards, shard: Whole, slot: Whole, whole: Whole, arrival: Arrival,
        calling: torch.cuda.Stream,
    ) -> None:  # fmt: skip
        def await_call(op: p.AwaitCall) -> None:
            if self._last is not None:
                calling.wait_event(self._last.kernel)
                calling.wait_event(self._last.side)

        def fill(op: p.Fill) -> None:
            for mine, there, all_ in zip(shard, slot, whole, strict=True):
                if mine is not None and there is not None and all_ is not None:
                    copy(there[:, self._rank], mine)
                    if all_ is not there:
                        copy(all_[:, self._rank], mine)

        def post(op: p.Post) -> None:
            self._posted.record(calling)
            self._side.wait_event(self._posted)

        parts = list(shards.of_rank(self._rank))
        perform: dict[type, Callable[[Any], Any]] = {
            p.AwaitCall: await_call,
            p.Fill: fill,
            p.Filled: _nothing,  # what is issued to a stream comes after what was
            p.Signal: lambda op: arrival.signal(parts[op.chunk].chunk),
            p.Post: post,
        }
        _answer(p.publish(self._rank, len(parts), epoch), perform)

    def _gather(self, epoch: int, shards: Shards, whole: Whole, arrival: Arrival) -> torch.cuda.Event:
        side, handle, done = self._side, self._side.cuda_stream, torch.cuda.Event()
        parts = {peer: list(shards.of_rank(peer)) for peer in p.peers(self._rank, self._world)}
        order = [part.chunk for peer in parts for part in parts[peer]]

        def pull(op: p.Pull) -> None:
            part = parts[op.peer][op.chunk]
            for there, all_ in zip(self._slot(op.peer, op.slot, shards, whole), whole, strict=True):
                if there is not None and all_ is not None:
                    source, to = _rows(there, op.peer, part), _rows(all_, op.peer, part)
                    if size := to.numel() * to.element_size():
                        copy_across(handle, to.data_ptr(), source.data_ptr(), size)

        flag = self.memory.flag
        with torch.cuda.stream(side):
            write, end = cast("DeviceSignals", arrival._signals).set_in_row(order)
        perform: dict[type, Callable[[Any], Any]] = {
            p.AwaitPost: _nothing,  # `post` has issued it
            p.Tell: lambda op: stream_write(handle, flag(op.peer, self._rank), op.epoch),
            p.AwaitFlag: lambda op: stream_wait(handle, flag(self._rank, op.peer), op.epoch),
            p.Pull: pull,
            p.Pulled: _nothing,
            p.Signal: lambda op: write(parts[op.rank][op.chunk].chunk),
            p.Done: lambda op: (end(), done.record(side)),
        }
        with torch.cuda.stream(side):
            chunks = shards.batches * shards.parts
            _answer(p.gather(self._rank, self._world, chunks, epoch), perform)
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

    def expired(self) -> str:
        """What is said where a kernel of this rank has expired."""
        return f"all_gather_matmul: rank {self._rank} has given up waiting for a peer"

    def give_up(self, why: str) -> None:
        """Break the group, here and on all peers, unless it is."""
        member = self._member()
        if member is not None and not member.broken:
            perform = self._watching(member, why)
            perform[p.Break](p.Break())
            for peer in p.peers(self._rank, self._world):
                perform[p.Abort](p.Abort(peer))

    # The watchdog --------------------------------------------------------------------------------------------------

    def look(self) -> bool:
        """One look of the watchdog; whether there is anything to look at."""
        calls = self._underway()
        member = self._member()
        if not calls or member is None:
            return bool(calls)
        epoch, looks = self._suspect
        oldest = calls[0]
        self._suspect = oldest.epoch, (looks if oldest.epoch == epoch else 0) + int(oldest.kernel.query())
        with aside(self.device):
            told = self.memory.aborted()
        if told or self._suspect[1] >= _LOOKS:
            why = "all_gather_matmul: a peer has given up waiting" if told else self.expired()
            _answer(p.watch(self._rank, self._world), self._watching(member, why))
        return True

    def _watching(self, member: Member, why: str) -> dict[type, Callable[[Any], Any]]:
        def call_of(epoch: int) -> Underway | None:
            return next((call for call in self._underway() if call.epoch == epoch), None)

        def write(address: int, value: int) -> None:
            with aside(self.device) as stream:
                stream_write(stream.cuda_stream, address, value)

        def overrule(op: p.Overrule) -> None:
            if call := call_of(op.epoch):
                call.arrival.fail(GroupBroken(self._name, why))

        def await_kernel(op: p.AwaitKernel) -> None:
            if call := call_of(op.epoch):
                call.kernel.synchronize()  # it has a deadline of its own

        def release(op: p.Release) -> None:
            for peer in p.peers(self._rank, self._world):
                write(self.memory.flag(self._rank, peer), op.epoch)

        def await_done(op: p.AwaitDone) -> int:
            end = time.perf_counter() + LOOK_SECONDS
            while (call := call_of(op.epoch)) is not None and time.perf_counter() < end:
                time.sleep(0.001)
            return int(call is None)

        return {
            p.Notice: lambda op: 1,
            p.Break: lambda op: member.break_(why),
            p.Abort: lambda op: write(self.memory.abort(op.peer), 1),
            p.Oldest: lambda op: min((call.epoch for call in self._underway()), default=0),
            p.Overrule: overrule, p.AwaitKernel: await_kernel, p.Release: release, p.AwaitDone: await_done,
        }  # fmt: skip


def _expired(gatherer: Gatherer | None) -> None:
    """A kernel has expired: also where its peer came just behind the deadline, and the watchdog saw nothing."""
    if gatherer is not None:
        gatherer.give_up(gatherer.expired())


class _Watchdog:
    """The thread that looks after a gatherer's calls. Without any it does not keep the gatherer alive."""

    def __init__(self, gatherer: Gatherer) -> None:
        self._of = weakref.ref(gatherer)
        self._something = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        weakref.finalize(gatherer, self._something.set)
        exit.register(self)

    def wake(self) -> None:
        """A call has been issued."""
        self._something.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tilestream-watchdog", daemon=True)
            self._thread.start()

    def stop_at_exit(self, timeout: float) -> None:
        """See `tilestream.runtime.exit`."""
        self._stopped = True
        self._something.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopped:
            self._something.wait()
            gatherer = self._of()
            if gatherer is None:
                return
            self._something.clear()
            while not self._stopped and gatherer.look():
                time.sleep(LOOK_SECONDS)
            del gatherer


def _answer(text: p.Turn, perform: dict[type, Callable[[Any], Any]]) -> int | None:
    """Perform what a text yields; returns what it does."""
    try:
        op = next(text)
        while True:
            op = text.send(perform[type(op)](op))
    except StopIteration as end:
        result: int | None = end.value
        return result


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the current stream, whatever the strides."""
    to.copy_(source)


def _nothing(op: object) -> None:
    """What the order of a stream gives."""


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _rows(whole: torch.Tensor, rank: int, part: Part) -> torch.Tensor:
    return whole[part.batch, rank, part.begin : part.end]


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
