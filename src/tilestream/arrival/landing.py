"""The destination of a stream's rows: the tensor that the source fills, or a tensor on a GPU."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from bisect import bisect_right
from collections import deque
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from tilestream.arrival.device_words import REPLAYED
from tilestream.arrival.kernel_copies import KernelCopies
from tilestream.arrival.lanes import Lane, event_on
from tilestream.arrival.sources import as_rows, unversioned
from tilestream.runtime.graphs import keep, let_go
from tilestream.runtime.producer import Job, Producer
from tilestream.runtime.sequence import (
    MOST_OPERATIONS,
    CopyIn,
    Event,
    Operation,
    Record,
    Sequence,
    SequenceError,
    Slot,
    WaitEvent,
    Write,
)
from tilestream.runtime.streams import current_stream, on_device

if TYPE_CHECKING:
    from tilestream.arrival.device import DeviceSignals
    from tilestream.arrival.signals import Signals
    from tilestream.core.chunks import Chunks

#: Seconds for which the host polls without sleeping: a sleep of any length takes a tenth of a millisecond or more.
_SPIN_SECONDS = 0.02


class _Kept(NamedTuple):
    """A source that was dropped or replaced while it is copied: torch's pinned allocator knows only torch's copies."""

    source: torch.Tensor
    landed: Event  # after its copies
    #: The device where the event is used again; None if it is a lane's.
    device: torch.device | None


#: Kept until a filling begins or ends after they were copied. Any thread may append, also the garbage collector.
_kept: deque[_Kept] = deque()
#: Events that are used again.
_spare: dict[torch.device, list[Event]] = {}


def _keep(source: torch.Tensor, lane: Lane) -> None:
    """Keep ``source`` until the copies that are issued on the lane's stream are done."""
    device = lane.stream.device
    with on_device(device):
        try:
            landed = _spare[device].pop()
        except LookupError:
            landed = Event()
        landed.record(lane.handle)
    _kept.append(_Kept(source, landed, device))


def _let_sources_go() -> None:
    """Drop the sources whose copies are done, in eager fillings and in graphs that are gone."""
    let_go()
    for _ in range(len(_kept)):
        try:
            one = _kept.popleft()
        except IndexError:  # another thread was faster
            return
        if not one.landed.query():
            _kept.append(one)
        elif one.device is not None:
            _spare.setdefault(one.device, []).append(one.landed)


class Ahead(NamedTuple):
    """The operations of a filling that were issued, and the error of the operation behind them."""

    done: int
    error: SequenceError | None


class Landing:
    """A landing in the source's own tensor: rows are in place as soon as the source has read them.

    Attributes
    ----------
    tensor
        The tensor that the stream fills.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @property
    def how(self) -> str:
        """A description for `Stream.explain`; empty if this step does nothing."""
        return ""

    def begin(self) -> None:
        """Prepare a filling; called by the thread that begins it."""

    def issuing(self) -> AbstractContextManager[object]:
        """The block that lands rows and signals chunks."""
        return contextlib.nullcontext()

    def land(self, begin: int, end: int) -> None:
        """Land rows [begin, end), which the source has read."""

    def fill(self, chunks: Chunks, pivot: int, signals: Signals, ahead: Ahead | None = None) -> bool:
        """Land and signal all rows, from the pivot's chunk on. False if this is impossible, with nothing done.

        ``ahead``: what was issued of this before there were signals; None: nothing.
        """
        return False

    def end(self) -> None:
        """End a filling, whose producer has stopped."""

    def settled(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds for the landed rows; whether they are in place."""
        return True


class Prepared(NamedTuple):
    """The copies and signals of a filling, in order."""

    sequences: tuple[Sequence, ...]
    #: The number of operations up to each chunk's signal.
    signalled: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def filling(chunks: Chunks, pivot: int, row_bytes: int, in_graph: bool = False) -> Prepared:
    """The copies and signals of a filling.

    The slots are: the stream that the filling follows, the lane's stream, the addresses of destination, source and
    words, the epoch, and the lane's two events. A graph has neither lane nor events: it does not use the first slot and
    the last two, and the lane's stream is the graph's.
    """
    behind, lane, to, source, words, epoch, ready, landed = map(Slot, range(8))
    operations: list[Operation] = [] if in_graph else [Record(behind, ready), WaitEvent(lane, ready)]
    signalled = []
    for step in range(chunks.count):
        chunk = (pivot + step) % chunks.count
        begin, end = (row_bytes * row for row in chunks.range_of(chunk))
        if begin < end:
            operations.append(CopyIn(lane, to + begin, source + begin, end - begin))
        operations.append(Write(lane, words + 4 * chunk, epoch))
        signalled.append(len(operations))
    if not in_graph:
        operations.append(Record(lane, landed))
    begins = range(0, len(operations), MOST_OPERATIONS)
    return Prepared(tuple(Sequence(8, operations[at : at + MOST_OPERATIONS]) for at in begins), tuple(signalled))


class DeviceLanding(Landing):
    """A landing on a GPU: its copy engine copies the rows, in order, on a separate stream.

    A signal that is issued after a copy is written when the copy is done. Neither takes an SM (invariant 10). The
    copies overwrite the tensor after the earlier work of the stream that was current at the filling's beginning.

    ``prepared`` are the copies of ``host``, if it is known to be pinned and contiguous; None: ask the driver.
    """

    def __init__(
        self, host: torch.Tensor, device: torch.device, lane: Lane, prepared: Prepared | None = None
    ) -> None:  # fmt: skip
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                self.tensor = torch.empty(host.shape, dtype=host.dtype, device=device)
        elif prepared is not None:  # as the other, in a third of its time
            self.tensor = torch.empty_like(host, device=device)
        else:
            self.tensor = torch.empty(host.shape, dtype=host.dtype, device=device)
        self._device = device
        self._lane = lane
        self.stream = lane.stream
        self._prepared = prepared
        if prepared is None:
            self._read(host)
        else:
            self._host, self._is_pinned, self.in_place = host, True, True
        # The allocator reuses freed memory only after the copies into it (invariant 9).
        self.tensor.record_stream(self.stream)

    def take(self, host: torch.Tensor) -> None:
        """Copy rows from ``host``, of the tensor's shape and dtype, from now on."""
        if self.in_place and host.data_ptr() != self._host.data_ptr() and not self._lane.landed.query():
            _keep(self._host, self._lane)
        self._read(host)

    def _read(self, host: torch.Tensor) -> None:
        self._host = host
        self._is_pinned = host.is_pinned()
        #: Whether the driver copies the rows directly from the source, without torch.
        self.in_place = self._is_pinned and host.is_contiguous()

    def __del__(self) -> None:
        """Keep the source for copies in flight."""
        if not getattr(self, "in_place", False) or sys.is_finalizing():
            return
        landed = self._lane.landed
        try:
            if torch.cuda.is_current_stream_capturing():  # querying an event would end the capture
                _kept.append(_Kept(self._host, landed, None))
            elif not landed.query():
                _keep(self._host, self._lane)
        except Exception:  # the driver made no event
            landed.synchronize()

    @property
    def how(self) -> str:
        """See `Landing`."""
        return f"copied to {self._device}" + ("" if self._is_pinned else " from memory that is not pinned")

    def begin(self) -> None:
        """See `Landing`."""
        _let_sources_go()
        # Once a filling, because this copies the source if its rows cannot be a view.
        self._rows, self._places = as_rows(self._host), unversioned(self.tensor)
        current = current_stream(self._device)
        self._lane.behind = current.cuda_stream
        self.stream.wait_stream(current)

    def issuing(self) -> AbstractContextManager[object]:
        """See `Landing`."""
        return torch.cuda.stream(self.stream)

    def land(self, begin: int, end: int) -> None:
        """See `Landing`."""
        with torch.inference_mode():
            self._places[begin:end].copy_(self._rows[begin:end], non_blocking=True)

    def issue(self, prepared: Prepared, words: int, epoch: int, behind: int) -> Ahead:
        """Issue all copies, and the signals of ``epoch`` to the words at address ``words``.

        Nothing else precedes it that can follow it: the link is idle until the first copy. ``behind`` is the handle of
        the current stream.
        """
        if _kept and any(one.device is None for one in _kept):
            _let_sources_go()  # by events of lanes, which this may record anew
        lane, done = self._lane, 0
        lane.behind = behind
        values = (
            behind, lane.handle, self.tensor.data_ptr(), self._host.data_ptr(), words, epoch, lane.ready.handle,
            lane.landed.handle,
        )  # fmt: skip
        try:
            for sequence in prepared.sequences:
                sequence.issue(*values)
                done += len(sequence)
        except SequenceError as error:
            lane.landed.record(lane.handle)
            return Ahead(done + error.done, error)
        return Ahead(done, None)

    def fill(self, chunks: Chunks, pivot: int, signals: Signals, ahead: Ahead | None = None) -> bool:
        """See `Landing`. If the driver refuses an operation, only the chunks that were signalled before it arrive."""
        if not self.in_place:
            return False
        lane, signals = self._lane, cast("DeviceSignals", signals)
        prepared = self._prepared
        if prepared is None:
            self._prepared = prepared = filling(chunks, pivot, self._host.shape[-1] * self._host.element_size())
        if ahead is None:
            words = signals.begin_row(self.stream)
            with on_device(self._device):
                behind = torch._C._cuda_getCurrentRawStream(self._device.index)
                ahead = self.issue(prepared, words, signals.epoch, behind)
        if ahead.error is not None:
            count = bisect_right(prepared.signalled, ahead.done)
            signals.end_row(
                [(pivot + step) % chunks.count for step in range(count)], self.stream, event_on(self.stream)
            )
            raise ahead.error
        signals.end_row(range(chunks.count), self.stream, lane.landed)
        _let_sources_go()
        return True

    @property
    def producer(self) -> Producer | None:
        """The lane's native thread; None without the extension, or if the driver cannot copy the source directly."""
        return self._lane.producer if self.in_place else None

    def hand_over(
        self, producer: Producer, ends: torch.Tensor, chunks: Chunks, signals: DeviceSignals
    ) -> tuple[torch.cuda.Event, ...]:
        """Have the thread fill the experts of ``ends``, once the current stream's work so far is done.

        Parameters
        ----------
        ends
            ``int32[experts]`` in pinned memory, which that work writes.
        chunks
            An expert each, all of one size.

        Returns
        -------
        tuple[torch.cuda.Event, ...]
            Events that must live until the thread has ended.
        """
        lane, (begin, end) = self._lane, chunks.range_of(0)
        size = (end - begin) * self._host.shape[-1] * self._host.element_size()
        words = signals.begin_row(self.stream)
        lane.behind = behind = torch._C._cuda_getCurrentRawStream(self._device.index)
        with on_device(self._device):
            lane.ready.record(behind)
            signals.retire(behind)
            readers = signals.ends_of_launches
            producer.start(Job(
                lane.ready.handle, ends.data_ptr(), chunks.count, size, self.tensor.data_ptr(), self._host.data_ptr(),
                words, signals.epoch, lane.handle, lane.landed.handle, [event.cuda_event for event in readers],
            ))  # fmt: skip
        _let_sources_go()
        return readers

    def note(self, chunks: range | list[int], signals: DeviceSignals, epoch: int) -> None:
        """Note that the native thread has issued the copies and signals of ``chunks`` in ``epoch``."""
        signals.end_row(chunks, self.stream, self._lane.landed, epoch)

    def fill_in_graph(self, chunks: Chunks, pivot: int, signals: DeviceSignals) -> None:
        """Have the graph that the current stream is captured into copy and signal all rows at each replay.

        A replay copies the source's present contents. The graph keeps the source, the tensor and the signals' words
        alive.
        """
        stream = torch._C._cuda_getCurrentRawStream(self._device.index)
        prepared = filling(chunks, pivot, self._host.shape[-1] * self._host.element_size(), in_graph=True)
        with on_device(self._device), signals.filling_in_graph() as words:
            keep(stream, self._host, self.tensor, words)
            for sequence in prepared.sequences:
                sequence.issue(
                    0, stream, self.tensor.data_ptr(), self._host.data_ptr(), words.data_ptr(), REPLAYED, 0, 0
                )

    def end(self) -> None:
        """See `Landing`."""
        with on_device(self._device):
            self._lane.landed.record(self._lane.handle)

    def offer(self, chunks: Chunks, pivot: int) -> KernelCopies:
        """The copies, for a kernel to make; the copy engine makes them if no kernel does.

        Raises
        ------
        ValueError
            If a kernel cannot read the source.
        """
        rows = as_rows(self._host)
        if not rows.is_contiguous() or not rows.is_pinned():
            raise ValueError(
                f"stream_in: copies='kernel' of a source {list(self._host.shape)}, {self._host.dtype}, on "
                f"{self._host.device}, strides {self._host.stride()}, "
                f"{'pinned' if self._host.is_pinned() else 'not pinned'}; a kernel copies rows that lie one "
                "behind the other in pinned memory: source.contiguous().pin_memory(), or copies='engine'"
            )
        if rows.data_ptr() % 16:
            raise ValueError(
                f"stream_in: copies='kernel' of a source that begins at address {rows.data_ptr():#x}; a kernel copies "
                "from a multiple of 16 on: source.clone().pin_memory(), or copies='engine'"
            )

        def by_engine(signals: Signals) -> torch.cuda.Event:
            try:
                self.fill(chunks, pivot, signals)
            except BaseException:
                torch.cuda.current_stream(self._device).wait_stream(self.stream)
                raise
            return event_on(self.stream)

        return KernelCopies(rows, as_rows(self.tensor), chunks, pivot, by_engine, self.stream)

    def settled(self, timeout: float | None) -> bool:
        """See `Landing`."""
        landed = self._lane.landed
        if torch.cuda.is_current_stream_capturing():
            return False  # querying an event would end the capture
        if timeout is None:
            landed.synchronize()
            return True
        begun = time.perf_counter()
        while not landed.query():
            waited = time.perf_counter() - begun
            if waited >= timeout:
                return False
            time.sleep(0.0 if waited < _SPIN_SECONDS else 0.0002)
        return True
