"""`Turns`: what calls of a group on a GPU have in common, whatever they send: epochs, what is under way, the watchdog.

The texts that are performed, and why they are right, are in `tilestream.distributed.protocol` and, of sums, in
`tilestream.distributed.sum_protocol`.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tilestream.distributed import protocol as p
from tilestream.distributed.collective import meet
from tilestream.distributed.group_state import Member
from tilestream.distributed.symmetric import PeerMemory
from tilestream.runtime import shutdown
from tilestream.runtime.channel import channel
from tilestream.runtime.streams import lend_to

#: Seconds between two looks of the watchdog, while a call is under way.
LOOK_SECONDS = 0.05
#: Seconds that the driver is given to end a kernel before its deadline.
_OVERRULE_SECONDS = 0.5


class Underway(NamedTuple):
    """A call that was issued.

    Attributes
    ----------
    epoch
        Of the protocol.
    overrule
        Says to the call that what is missing will not come.
    kernel, side, end
        After its kernel, after its other streams, and after all of it.
    told
        What the flag of a peer is at least that has told all of this call.
    patience
        Of a sum: seconds that are waited for peers once the kernel has ended. A gather's kernel waits itself.
    """

    epoch: int
    overrule: Callable[[BaseException], None]
    kernel: torch.cuda.Event
    side: torch.cuda.Event
    end: torch.cuda.Event
    told: int
    patience: float = 0.0


class Turns:
    """A member's calls of one op on one GPU. Hold the member's call.

    Parameters
    ----------
    memory
        What the ranks share; made, by all of them, where it is None.
    """

    #: The op, for messages.
    op = ""

    def __init__(self, member: Member, device: torch.device, memory: PeerMemory | None = None) -> None:
        self._rank, self._world, self.device = member.rank, member.world, device
        self._member = weakref.ref(member)
        self.memory = memory or PeerMemory(member, device, self.op)
        self.words = self.memory.words
        channel(device)  # the watchdog reports by it, and makes nothing on the GPU
        self._side = lend_to(self, device)
        self._epoch = 0
        self._calls: list[Underway] = []
        self._last: Underway | None = None
        self._lock = threading.Lock()  # of `_calls`
        self._posted = torch.cuda.Event()
        self._watchdog = Watchdog(self)

    # The host ------------------------------------------------------------------------------------------------------

    def check_gpu(self, what: str, device: torch.device) -> None:
        """Raise unless an operand is where this group's calls are."""
        if device != self.device:
            raise ValueError(
                f"{self.op}: {what} is on {device}; this group's calls are on {self.device}: a rank has one GPU"
            )

    def begin(self) -> int:
        """The epoch of a new call, once at most `protocol.AHEAD` are under way."""
        epoch = self.begun(self._epoch + 1)
        member = self._member()
        if epoch is None or member is None:
            assert member is not None
            member.check()
            raise AssertionError("a call was refused though the group is whole")
        self._epoch = epoch
        return epoch

    def begun(self, epoch: int) -> int | None:
        """The text of what the host does before call ``epoch``, performed: the epoch, or None."""
        raise NotImplementedError

    def _begin(self, op: p.Begin) -> int:
        member = self._member()
        return int(member is not None and not member.broken)

    def await_kernel(self, op: p.AwaitKernel) -> None:
        """Wait for the kernels up to ``op.epoch``: they have deadlines of their own, or wait for nobody."""
        for call in self._underway():
            if call.epoch <= op.epoch:
                call.kernel.synchronize()

    def _underway(self) -> list[Underway]:
        """Calls whose other streams are not done; the others are forgotten."""
        with self._lock:
            self._calls = [call for call in self._calls if not call.side.query()]
            return list(self._calls)

    def issued(self, call: Underway) -> None:
        """A call has been issued, all of it."""
        self._last = call
        with self._lock:
            self._calls.append(call)
        self._watchdog.wake()

    def reserve(self, size: int, chunks: int = 0) -> bool:
        """Have slots of at least ``size`` bytes, and ``chunks`` signals for each. All ranks do it at the same call.

        Returns
        -------
        bool
            Whether they are new ones.
        """
        member, memory = self._member(), self.memory
        if member is None or (memory.slot_bytes >= size and memory.chunks >= chunks):
            return False
        self.quiet()
        meet(member, self.device)  # nobody writes to the old slots, or pulls from them
        memory.grow(max(size, memory.slot_bytes), max(chunks, memory.chunks))
        return True

    def quiet(self) -> None:
        """Wait until nothing is under way here."""
        for call in self._underway():
            call.kernel.synchronize()
            call.side.synchronize()

    def await_call(self, calling: torch.cuda.Stream) -> None:
        """Have the calling stream wait for the call before, which may have come from another stream."""
        if self._last is not None:
            calling.wait_event(self._last.end)
            if self._last.side is not self._last.end:
                calling.wait_event(self._last.side)

    def post(self, calling: torch.cuda.Stream) -> None:
        """Let whoever waits for `_posted` begin when the calling stream is here."""
        self._posted.record(calling)

    # Giving up -----------------------------------------------------------------------------------------------------

    def expired(self, call: Underway | None = None) -> str:
        """What is said where this rank has given up waiting for its peers, in ``call`` (None: in one that is over)."""
        return f"{self.op}: rank {self._rank} has given up waiting for a peer"

    def give_up(self, why: str) -> None:
        """Break the group, here and on all peers, unless it is."""
        member = self._member()
        if member is not None and not member.broken:
            perform = self._watching(member, why)
            perform[p.Break](p.Break())
            for peer in p.peers(self._rank, self._world):
                perform[p.Abort](p.Abort(peer))

    def _half(self, error: BaseException) -> None:
        """Half a call has been issued: what the peers wait for may never come."""
        self.give_up(f"{self.op} on rank {self._rank}: {type(error).__name__}: {error}")

    def gave_up(self, oldest: Underway) -> str:
        """Why this rank has given up waiting; empty where it has not. ``oldest``: the oldest call under way."""
        raise NotImplementedError

    def look(self) -> bool:
        """One look of the watchdog; whether there is anything to look at."""
        calls = self._underway()
        member = self._member()
        if not calls or member is None:
            return bool(calls)
        why = f"{self.op}: a peer has given up waiting" if self.words.aborted() else self.gave_up(calls[0])
        if why:
            answer(p.watch(self._rank, self._world), self._watching(member, why))
        return True

    def _watching(self, member: Member, why: str) -> dict[type, Callable[[Any], Any]]:
        """What the operations of `watch` are."""

        def overrule(op: p.Overrule) -> None:
            if call := self.call_of(op.epoch):
                _bounded(functools.partial(call.overrule, member.break_(why)))  # which says why it was broken first

        def await_kernel(op: p.AwaitKernel) -> None:
            # By asking: who waits for an event in the driver may wait for a kernel that it loads, too.
            while any(call.epoch <= op.epoch and not call.kernel.query() for call in self._underway()):
                time.sleep(0.001)

        def release(op: p.Release) -> None:
            if call := self.call_of(op.epoch):
                for peer in p.peers(self._rank, self._world):
                    self.words.let_go(peer, call.told)

        def await_done(op: p.AwaitDone) -> int:
            end = time.perf_counter() + LOOK_SECONDS
            while (call := self.call_of(op.epoch)) is not None and time.perf_counter() < end:
                time.sleep(0.001)
            return int(call is None)

        return {
            p.Notice: lambda op: 1,
            p.Break: lambda op: member.break_(why),
            p.Abort: lambda op: self.words.abort(op.peer),
            p.Oldest: lambda op: min((call.epoch for call in self._underway()), default=0),
            p.Overrule: overrule, p.AwaitKernel: await_kernel, p.Release: release, p.AwaitDone: await_done,
        }  # fmt: skip

    def call_of(self, epoch: int) -> Underway | None:
        """A call that is under way."""
        return next((call for call in self._underway() if call.epoch == epoch), None)


class Watchdog:
    """The thread that looks after a member's calls. Without any it does not keep them alive."""

    def __init__(self, turns: Turns) -> None:
        self._of = weakref.ref(turns)
        self._something = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        weakref.finalize(turns, self._something.set)
        shutdown.register(self)

    def wake(self) -> None:
        """A call has been issued."""
        self._something.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tilestream-watchdog", daemon=True)
            self._thread.start()

    def stop_at_exit(self, timeout: float) -> None:
        """See `tilestream.runtime.shutdown`."""
        self._stopped = True
        self._something.set()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopped:
            self._something.wait()
            turns = self._of()
            if turns is None:
                return
            self._something.clear()
            while not self._stopped:
                # First this: beside the thread that has just issued the call, a look would cost that one its time.
                time.sleep(LOOK_SECONDS)
                if not turns.look():
                    break
            del turns


def _bounded(overrule: Callable[[], None]) -> None:
    """Overrule a call, as far as that is possible.

    It may need the driver, which may be waiting for the very stream that is to be let go next (see
    `tilestream.distributed.host_flags`). Then it is left to a thread of its own: the kernel that it would have ended
    ends by its own deadline.
    """
    thread = threading.Thread(target=overrule, name="tilestream-overrule", daemon=True)
    thread.start()
    thread.join(_OVERRULE_SECONDS)


def answer(text: p.Turn, perform: dict[type, Callable[[Any], Any]]) -> int | None:
    """Perform what a text yields; returns what it does."""
    try:
        op = next(text)
        while True:
            op = text.send(perform[type(op)](op))
    except StopIteration as end:
        result: int | None = end.value
        return result


def nothing(op: object) -> None:
    """What the order of a stream gives."""
