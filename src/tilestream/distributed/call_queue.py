"""`CallQueue`: the calls of one op of a group on one GPU: epochs, calls in flight, the watchdog.

`tilestream.core.protocols` has the protocols of the queues, with the reasons why they are correct.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from tilestream.arrival.device import DeviceSignals
from tilestream.core.protocols import gather
from tilestream.distributed.collective import agree, barrier
from tilestream.distributed.group_state import GroupState
from tilestream.distributed.plan import Call
from tilestream.distributed.program import Handlers, Program, Recorder, more, run_protocol
from tilestream.distributed.symmetric import PeerMemory
from tilestream.runtime import shutdown
from tilestream.runtime.channel import channel
from tilestream.runtime.driver import relax_captures
from tilestream.runtime.sequence import Check
from tilestream.runtime.streams import lend_to

#: Seconds between two polls of the watchdog while a call is in flight.
POLL_SECONDS = 0.05
#: The limit in seconds of an attempt to end a kernel through the driver.
_OVERRULE_SECONDS = 0.5
#: Programs that a queue keeps: one for each form of a call and each slot.
_MOST_PREPARED = 384

Q = TypeVar("Q", bound="CallQueue")
F = TypeVar("F")
P = TypeVar("P")


class SlotEvents(NamedTuple):
    """The events of the calls in one slot: after the kernel, after the other streams, and after the whole call.

    Each call records them again. It begins when the call `SLOTS` before it, which used the same events, has ended.
    """

    kernel: torch.cuda.Event
    side: torch.cuda.Event
    end: torch.cuda.Event


class IssuedCall(NamedTuple):
    """A call that was issued."""

    epoch: int  # its epoch in the protocol
    #: kernel, side: the events after its kernel, and after its other streams: see `SlotEvents`.
    kernel: torch.cuda.Event
    side: torch.cuda.Event
    flag_value: int  # the least value of a peer's flag once the peer has signalled all of this call
    #: Seconds that peers have from the kernel's end; None: the group's own timeout, which the watchdog asks for when
    #: it needs it. Unused by gathers, whose kernels have a deadline.
    peer_seconds: float | None = 0.0
    signals: DeviceSignals | None = None  # that its kernel waits for; None of sums, and of a call without a kernel


class CallQueue:
    """A group's calls of one op on one GPU. Hold the group's call.

    Parameters
    ----------
    memory
        The memory that the ranks share; None: made by this queue (collectively, at its first growth).
    """

    #: The op, for messages.
    op = ""
    #: Values that `admission` reads of an issue.
    admission_values = more(0).index

    def __init__(self, state: GroupState, device: torch.device, memory: PeerMemory | None = None) -> None:
        self._rank, self._world, self.device = state.rank, state.world, device
        self._state = weakref.ref(state)
        self.memory = memory or PeerMemory(state, device, self.op)
        self.flags = self.memory.flags
        channel(device)  # made here, because the watchdog uses it and must not allocate on the GPU
        self._side = lend_to(self, device)
        self._epoch = 0
        #: By slot: the last call, from when it is issued until the slot's next call begins.
        self._calls: list[IssuedCall | None] = [None] * gather.SLOTS
        self._posted = made_event()
        self._events = [SlotEvents(made_event(), made_event(), made_event()) for _ in range(gather.SLOTS)]
        #: Programs by form and slot; they hold addresses of the present slots.
        self._prepared: dict[object, Any] = {}
        self._watchdog = Watchdog(self)

    # The host ------------------------------------------------------------------------------------------------------

    @classmethod
    def of(
        cls: type[Q], state: GroupState, plan: Call, operand: str, device: torch.device, size: int,
        chunks: int = 0,
    ) -> Q:  # fmt: skip
        """The group's queue, with slots of at least ``size`` bytes with ``chunks`` signals each. Collective.

        Raises
        ------
        ValueError
            If the ranks' calls differ, or the operand is on another GPU than the group's calls.
        """
        agree(state, plan, device)
        queue = state.queue(cls, device)
        if device != queue.device:
            raise ValueError(
                f"{cls.op}: {operand} is on {device}; this group's calls are on {queue.device}: a rank has one GPU"
            )
        queue.reserve(size, chunks)
        return queue

    def begin(self) -> int:
        """Wait until at most `AHEAD` calls are in flight; returns the epoch of the new call."""
        epoch = self.admit(self._epoch + 1)
        if epoch is None:
            state = self._state()
            assert state is not None
            state.check()
            raise AssertionError("the call was refused, but the group is not broken")
        self._epoch = epoch
        self._calls[epoch % gather.SLOTS] = None  # it has ended, and its events are reused
        return epoch

    @property
    def next_slot(self) -> int:
        """The slot of the next call."""
        return (self._epoch + 1) % gather.SLOTS

    def begin_native(self) -> int:
        """The epoch of a new call, whose program performs the host's part of the protocol: see `admission`."""
        epoch = self._epoch = self._epoch + 1
        self._calls[epoch % gather.SLOTS] = None  # it has ended, and the program records its events again
        return epoch

    def admission(self, slot: int) -> Program:
        """The host's part of the protocol before a call in ``slot``, as operations that a native program begins with.

        They wait for earlier calls. They stop the issue if the group is broken by then, or if Python has to find out.
        """
        recorder, state = Recorder(slot, self.admission_values), self._state()
        assert state is not None
        word = ctypes.addressof(state.broken_word)

        def begin(op: gather.Begin) -> int:
            recorder.add(Check(word, ctypes.sizeof(state.broken_word), 1, 0))
            return 1

        self.record_admission(recorder, begin)
        return recorder.program()

    def record_admission(self, recorder: Recorder, begin: Callable[[gather.Begin], int]) -> None:
        """Record the operations of `admit`; ``begin`` is the handler of the last one."""
        raise NotImplementedError

    def take_back(self, epoch: int) -> None:
        """Undo `begin` or `begin_native`: nothing of the call was issued."""
        assert epoch == self._epoch
        self._epoch -= 1

    def admit(self, epoch: int) -> int | None:
        """Perform the host's part of the protocol before call ``epoch``: the epoch, or None if the group is broken."""
        raise NotImplementedError

    def _begin(self, op: gather.Begin) -> int:
        state = self._state()
        return int(state is not None and not state.broken)

    def await_kernel(self, op: gather.AwaitKernel) -> None:
        """Wait for the kernels up to ``op.epoch``; bounded, because each has a deadline or waits for no peer."""
        for call in self._issued(op.epoch):
            call.kernel.synchronize()

    def _issued(self, epoch: int) -> list[IssuedCall]:
        """The calls up to ``epoch`` that may be in flight, the oldest first."""
        calls = [call for call in self._calls if call is not None and call.epoch <= epoch]
        return sorted(calls, key=lambda call: call.epoch)

    def _under_way(self) -> list[IssuedCall]:
        """The calls whose other streams have work left, the oldest first."""
        return [call for call in self._issued(self._epoch) if not call.side.query()]

    def track(self, call: IssuedCall) -> None:
        """Have the watchdog watch a completely issued call."""
        self._calls[call.epoch % gather.SLOTS] = call
        self._watchdog.wake()

    def reserve(self, size: int, chunks: int = 0) -> bool:
        """Provide slots of at least ``size`` bytes with ``chunks`` signals each. Collective, at the same call.

        Returns
        -------
        bool
            Whether the slots are new.
        """
        state, memory = self._state(), self.memory
        if state is None or (memory.slot_bytes >= size and memory.chunks >= chunks):
            return False
        self.drain()
        barrier(state, self.device)  # no rank uses the old slots any more
        self.forget_programs()
        memory.grow(max(size, memory.slot_bytes), max(chunks, memory.chunks))
        return True

    def forget_programs(self) -> None:
        """Drop what holds addresses of memory that is replaced now."""
        self._prepared.clear()
        if (state := self._state()) is not None:
            state.repeats.clear()

    def drain(self) -> None:
        """Wait until no call of this rank is in flight."""
        for call in self._under_way():
            call.kernel.synchronize()
            call.side.synchronize()
        self._calls = [None] * gather.SLOTS  # which keep memory of the slots

    def prepared(self, form: F, epoch: int, prepare: Callable[[F, int], P]) -> P:
        """The preparation of calls of this form in the epoch's slot; ``prepare(form, slot)`` makes it."""
        key = form, epoch % gather.SLOTS
        found: P | None = self._prepared.get(key)
        if found is None:
            if len(self._prepared) >= _MOST_PREPARED:
                del self._prepared[next(iter(self._prepared))]
            found = self._prepared[key] = prepare(*key)
        return found

    # Giving up -----------------------------------------------------------------------------------------------------

    def describe_expiry(self, call: IssuedCall | None = None) -> str:
        """The reason of the break when this rank gives up on ``call`` (None: on an earlier call)."""
        return f"{self.op}: rank {self._rank} has given up waiting for a peer"

    def abort_group(self, why: str) -> None:
        """Break the group and set all peers' abort flags, unless it is already broken."""
        state = self._state()
        if state is not None and not state.broken:
            state.break_(why)
            for peer in gather.peers(self._rank, self._world):
                self.flags.abort(peer)

    def _abort_half_issued(self, error: BaseException) -> None:
        """Break the group after a partly issued call: peers may wait for the rest."""
        self.abort_group(f"{self.op} on rank {self._rank}: {type(error).__name__}: {error}")

    def overrule(self, call: IssuedCall, error: BaseException) -> None:
        """Signal to ``call`` that its missing chunks will not come."""
        raise NotImplementedError

    def why_expired(self, oldest: IssuedCall) -> str:
        """The reason why this rank gives up; empty if it does not. ``oldest``: the oldest call in flight."""
        raise NotImplementedError

    def poll(self) -> bool:
        """Poll once for the watchdog; returns whether a call is in flight."""
        calls = self._under_way()
        state = self._state()
        if not calls or state is None:
            return bool(calls)
        why = f"{self.op}: a peer has given up waiting" if self.flags.aborted() else self.why_expired(calls[0])
        if why:
            run_protocol(gather.watch(self._rank, self._world), self._watch_handlers(state, why))
        return True

    def _watch_handlers(self, state: GroupState, why: str) -> Handlers:
        """The handlers of the operations of `watch`."""

        def overrule(op: gather.Overrule) -> None:
            if call := self.call_of(op.epoch):
                error = state.break_(why)  # has the first reason, if the group is already broken
                _run_bounded(functools.partial(self.overrule, call, error))

        def await_kernel(op: gather.AwaitKernel) -> None:
            # Polls: a wait for an event blocks in the driver, which may be loading a kernel.
            while any(call.epoch <= op.epoch and not call.kernel.query() for call in self._under_way()):
                time.sleep(0.001)

        def release(op: gather.Release) -> None:
            if call := self.call_of(op.epoch):
                for peer in gather.peers(self._rank, self._world):
                    self.flags.release(peer, call.flag_value)

        def await_done(op: gather.AwaitDone) -> int:
            end = time.perf_counter() + POLL_SECONDS
            while (call := self.call_of(op.epoch)) is not None and time.perf_counter() < end:
                time.sleep(0.001)
            return int(call is None)

        return {
            gather.Notice: lambda op: 1,
            gather.Break: lambda op: state.break_(why),
            gather.Abort: lambda op: self.flags.abort(op.peer),
            gather.Oldest: lambda op: min((call.epoch for call in self._under_way()), default=0),
            gather.Overrule: overrule,
            gather.AwaitKernel: await_kernel,
            gather.Release: release,
            gather.AwaitDone: await_done,
        }

    def call_of(self, epoch: int) -> IssuedCall | None:
        """The call of this epoch, if it is in flight."""
        return next((call for call in self._under_way() if call.epoch == epoch), None)


class Watchdog:
    """The thread that polls a queue while calls are in flight. It does not keep an idle queue alive."""

    def __init__(self, queue: CallQueue) -> None:
        self._queue = weakref.ref(queue)
        self._wake = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        weakref.finalize(queue, self._wake.set)
        shutdown.register(self)

    def wake(self) -> None:
        """Begin to poll, because a call was issued."""
        if not self._wake.is_set():  # if set, the thread is about to poll
            self._wake.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tilestream-watchdog", daemon=True)
            self._thread.start()

    def stop_at_exit(self, timeout: float) -> None:
        """See `tilestream.runtime.shutdown`."""
        self._stopped = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        if torch.cuda.is_initialized():
            relax_captures()
        while not self._stopped:
            self._wake.wait()
            queue = self._queue()
            if queue is None:
                return
            self._wake.clear()
            while not self._stopped:
                # Sleep first: a poll right after the wake-up would compete with the thread that issues the call.
                time.sleep(POLL_SECONDS)
                if not queue.poll():
                    break
            del queue


def _run_bounded(overrule: Callable[[], None]) -> None:
    """Overrule a call, within a bounded time.

    The driver may block, because it waits for the stream that is released next (see
    `tilestream.distributed.host_flags`). In that case the overrule stays in its thread, and the kernel ends by its own
    deadline.
    """
    thread = threading.Thread(target=overrule, name="tilestream-overrule", daemon=True)
    thread.start()
    thread.join(_OVERRULE_SECONDS)


def made_event() -> torch.cuda.Event:
    """An event with a handle, which torch makes at the first record."""
    event = torch.cuda.Event()
    event.record()
    return event
