"""Experts whose offsets a GPU computes: the copy of the offsets to the host, and the native thread that waits for it.

::

    current stream:   the router; offsets -> pinned memory; event; whatever the caller launches
    native thread:    the event has come -> the experts' copies and signals on the lane's stream, most rows first

No step of this needs the GIL. Python hears what the thread has done when it next asks for it: see `Routed.hear`.
Without the extension, and for sources that a GPU's driver cannot copy directly, a Python thread does the same:
`tilestream.arrival.filling`.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch

from tilestream.core.errors import ProducerStopped
from tilestream.core.groups import by_load
from tilestream.runtime import shutdown
from tilestream.runtime.producer import End, Outcome, Producer
from tilestream.runtime.streams import on_device

if TYPE_CHECKING:
    from tilestream.arrival.arrival import Arrival
    from tilestream.arrival.device import DeviceSignals
    from tilestream.arrival.landing import DeviceLanding
    from tilestream.core.chunks import Chunks

_OP = "stream_experts"
#: Fillings whose threads had not ended when Python last asked. The thread uses memory, events and a stream that these
#: keep alive, also if their streams are dropped (invariant 9).
_under_way: set[Routed] = set()


def ordered(ends: list[int]) -> tuple[list[int], int]:
    """The experts that end there, in the order of their copies; and how many are copied.

    Raises
    ------
    ValueError
        If an end falls or is negative.
    """
    if any(begin > end for begin, end in zip([0, *ends], ends, strict=False)):
        raise ValueError(f"{_OP}: offsets={ends}; they do not fall, and begin at 0 or above")
    return by_load(ends)


class OffsetsCopy:
    """Offsets on a GPU, copied to the host on the current stream. As an `Order` it waits for that copy.

    Parameters
    ----------
    offsets
        ``int32[experts]`` on a GPU.
    ends
        Pinned memory for them.
    """

    #: Whether the host has the offsets. Until then `ends` is no other copy's destination.
    has_come = False

    def __init__(self, offsets: torch.Tensor, ends: torch.Tensor) -> None:
        self.ends = ends
        self._device = offsets.device
        with on_device(self._device):
            ends.copy_(offsets.detach(), non_blocking=True)

    def record(self) -> None:
        """Record the event that a call waits for, on the stream of the copy."""
        with on_device(self._device):
            self._copied = torch.cuda.Event(blocking=True)
            self._copied.record()

    def __call__(self) -> tuple[list[int], int]:
        """Wait for the copy; the order of the experts, and how many of them have rows."""
        self._copied.synchronize()
        self.has_come = True
        return ordered(self.ends.tolist())


def begin(arrival: Arrival, chunks: Chunks, landing: DeviceLanding, order: OffsetsCopy) -> Routed | None:
    """Begin a filling by the lane's native thread; None if it has none, or cannot read the source."""
    hear_all()
    producer = landing.producer
    if producer is None:
        return None
    made = Routed(arrival, landing, order, producer)
    made.start(chunks)
    return made


def hear_all() -> None:
    """Take over what threads that have ended have done, and drop what they needed.

    The garbage collector may call this: during a capture, which a question to the driver would end, and in a thread
    that holds locks. So it waits for none.
    """
    if _under_way and not sys.is_finalizing() and not torch.cuda.is_current_stream_capturing():
        for filling in list(_under_way):
            filling.hear(blocking=False)


class Routed:
    """One filling of experts, issued by a native thread; has the methods of `Filling`."""

    cpu_seconds = 0.0
    _has_begun = _is_heard = _has_issued_all = False
    #: Events that the thread may use.
    _readers: tuple[torch.cuda.Event, ...] = ()

    def __init__(self, arrival: Arrival, landing: DeviceLanding, order: OffsetsCopy, producer: Producer) -> None:
        self._arrival, self._landing, self._order, self._producer = arrival, landing, order, producer
        self._signals = cast("DeviceSignals", arrival._signals)
        self._epoch = arrival.epoch
        shutdown.register(self)

    def start(self, chunks: Chunks) -> None:
        """Have the thread begin. What the driver refuses is the error of the arrival."""
        _under_way.add(self)  # first: an interrupt may come behind the start
        self._signals.hear = self.hear
        try:
            self._readers = self._landing.hand_over(self._producer, self._order.ends, chunks, self._signals)
            self._has_begun = True
        except BaseException as error:
            self._has_begun = self._producer.is_busy
            if not self._has_begun:
                self._give_up(error)
            if not isinstance(error, Exception):
                raise

    def _give_up(self, error: BaseException) -> None:
        self._end()
        self._is_heard = True
        self._signals.retire()
        self._arrival.fail(error, epoch=self._epoch)

    def _end(self) -> None:
        self._signals.hear = None
        _under_way.discard(self)

    @property
    def left_out(self) -> Sequence[int]:
        """The experts that are not copied, once the thread has ended."""
        if not self._has_issued_all:
            return ()
        order, wanted = ordered(self._order.ends.tolist())
        return order[wanted:]

    @property
    def issued(self) -> bool:
        """Whether the thread has ended."""
        return self.hear()

    @property
    def done(self) -> bool:
        """Whether the thread has ended, and the copies that it issued are done."""
        return self.hear() and self._landing.settled(0.0)

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread, and for the copies that it issued; whether all have ended."""
        end = None if timeout is None else time.perf_counter() + timeout
        self._producer.wait(timeout)
        left = None if end is None else max(0.0, end - time.perf_counter())
        return self.hear() and self._landing.settled(left)

    def finish_issuing(self) -> None:
        """Wait for the thread, without the copies that it has issued. It stays awake, since a `restart` follows."""
        self._producer.wait(None)
        self.hear()
        self._producer.wake()

    def halt(self) -> None:
        """Have the thread end after the copy that it issues now."""
        if not self._is_heard:
            self._producer.stop()

    def stop_at_exit(self, timeout: float) -> None:
        """See `tilestream.runtime.shutdown`."""
        self.halt()
        self._producer.wait(timeout)
        self.hear()

    def hear(self, blocking: bool = True) -> bool:
        """Note what the thread has signalled, or why it failed, if it has ended; whether it has, and that is noted.

        ``blocking``: wait while another thread has the signals' lock.
        """
        if self._is_heard:
            return True
        if not self._has_begun or self._producer.is_busy or not self._signals._bell.acquire(blocking):
            return False
        try:
            if not self._is_heard:
                self._note(self._producer.outcome())
        finally:
            self._is_heard = True
            self._signals._bell.release()
        return True

    def _note(self, outcome: Outcome) -> None:
        if outcome.end is End.LOST:
            return  # a forked child, which has no GPU: what it has of its parent stays as it is
        self._end()
        self.cpu_seconds = outcome.cpu_seconds
        self._order.has_come = outcome.experts > 0 or outcome.end in (End.ISSUED, End.BAD_ENDS)
        error = self._error_of(outcome)
        if error is None:
            # Those that are left out, too: no signal of theirs is under way elsewhere.
            self._landing.note(range(self._signals.count), self._signals, self._epoch)
            self._has_issued_all = True
            if outcome.experts < self._signals.count:
                self._signals.left_some_out()
            return
        if outcome.experts:
            order, _ = ordered(self._order.ends.tolist())
            self._landing.note(order[: outcome.experts], self._signals, self._epoch)
        with contextlib.suppress(RuntimeError):  # a driver that refuses this, too: the error has been noted
            self._arrival.fail(error, epoch=self._epoch)

    def _error_of(self, outcome: Outcome) -> Exception | None:
        if outcome.end is End.BAD_ENDS:
            try:
                ordered(self._order.ends.tolist())
            except ValueError as error:
                return error
        if outcome.end is End.STOPPED:
            return ProducerStopped(f"{_OP}: closed before all experts were delivered; {outcome.experts} were")
        return None if outcome.end is End.ISSUED else RuntimeError(f"{_OP}: {outcome.error}")
