"""The signal words of an input in a GPU's memory, and the order in which streams touch them.

The GPU writes a signal after the stream's earlier work: the copy of the chunk. Issuing the signal costs no SM and is
non-blocking (invariant 10).

Eager words are epochs, as on the host. A captured graph would replay one epoch forever, so a captured signal is a 1 in
a second set of words. The captured launch that has seen all of these zeroes them (invariant 4): one launch a graph. A
caller's own words follow the same rule. A launch that misses a chunk sets the quarantine word: words of this second
kind may hold anything until `reset` (invariant 6).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from tilestream.arrival.lanes import Lane, Words, event_on
from tilestream.arrival.signals import Signals
from tilestream.runtime.channel import channel
from tilestream.runtime.driver import stream_write
from tilestream.runtime.sequence import Event
from tilestream.runtime.streams import aside, is_torchs

#: Words whose addresses captured launches and signals hold: a graph may live forever.
_captured_stores: list[torch.Tensor] = []


#: The most streams of launches on a lane, and the most epochs of its 32-bit words: a lane with more is dropped. It is
#: also dropped after a launch on a stream that torch does not own: that stream may be gone when the next filling would
#: wait for its launches.
_MOST_USERS, _MOST_EPOCHS = 32, 1 << 30


#: The value of a signal of a graph that fills a stream's tensor, in words that the graph zeroes first. The host has no
#: such epoch.
REPLAYED = 1 << 30


class Last(NamedTuple):
    """The stream of a chunk's last signal, and an event after that signal."""

    stream: int
    event: torch.cuda.Event | Event

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Have ``stream`` wait for the event."""
        if isinstance(self.event, Event):
            self.event.hold(stream.cuda_stream)
        else:
            stream.wait_event(self.event)


def zero(words: torch.Tensor) -> None:
    """Zero ``words`` on the current stream."""
    with torch.inference_mode():  # words made in inference mode can be changed in that mode only
        words.zero_()


class DeviceWords(Signals):
    """The words of `tilestream.arrival.device.DeviceSignals`, the streams that use them, and their producers.

    Parameters
    ----------
    count
        Number of chunks.
    device
        The GPU.
    words
        The caller's own ``int32[count]`` on the GPU; None for tilestream's own.
    lane
        The lane that owns the words, if a `tilestream.Stream` signals them; epochs continue from its last epoch.
    """

    _lane: Lane | None = None
    #: Whether a graph holds the address of our words.
    _in_graph_too = False
    #: Whether a chunk was left out.
    _left_out = False
    #: Takes over what the native thread of this epoch has done, if it has ended: see `tilestream.arrival.routed`.
    hear: Callable[[], object] | None = None

    def __init__(
        self, count: int, device: torch.device, words: torch.Tensor | None = None, lane: Lane | None = None
    ) -> None:
        super().__init__(count, bell=None if lane is None else lane.bell)
        self.device, self.self_reset = str(device), words is not None
        self._device = device
        if lane is None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Arrival: made while a CUDA graph is captured, which would clear its signals at each replay; make it "
                "before the capture"
            )
        self._channel = channel(device)  # the error channel of launches, made outside of captures
        self._theirs = words
        own = Words(0 if words is not None else count, device) if lane is None else lane.words
        self._store, self._eager, self._quarantine = own.store, own.eager, own.quarantine
        #: Words that are zero or nonzero: a caller's own, or else those of captured launches.
        self._flags = own.captured if words is None else words
        self._zeroed, self._streams = own.zeroed, own.streams
        self._issued = [0] * count
        self._last: list[Last | None] = [None] * count
        #: By stream: the epoch that its last launch waits for, and the newest record before that launch.
        self._waiting: dict[int, tuple[int, int]] = {}
        self._users: dict[int, torch.cuda.Stream] = {}  # streams of this epoch's eager launches
        self._over: dict[int, torch.cuda.Event] = {}  # the end of earlier epochs' launches, by stream
        if lane is not None:
            self._lane, self.epoch, self._users = lane, lane.epoch + 1, dict(lane.users)
            self._last = [Last(lane.handle, lane.landed)] * count
            self._issued = [lane.epoch] * count  # a late signal must not lower the word of a waiting launch

    def __del__(self) -> None:
        """Leave the lane. The garbage collector may call this in any thread."""
        lane = self._lane
        if lane is not None and not sys.is_finalizing():
            lane.epoch = self.epoch
            lane.users |= self._users
            lane.awaited = self._left_out
            lane.leave(
                self._error is None
                and not self._in_graph_too
                and not (self._left_out and any(handle != lane.behind for handle in lane.users))
                and self.epoch < _MOST_EPOCHS
                and len(lane.users) <= _MOST_USERS
                and all(map(is_torchs, lane.users.values()))
                and self._issued.count(self.epoch) == self.count
                and all(last is not None and last.stream == lane.handle for last in self._last)
            )

    def _settle(self, stream: torch.cuda.Stream) -> None:
        """Before ``stream`` first uses our words: have it wait until they are zeroed, and tell torch."""
        if stream.cuda_stream in self._streams:
            return
        with self._bell:
            # The allocator reuses freed words only after this stream's use of them (invariant 9).
            self._store.record_stream(stream)
            if torch.cuda.is_current_stream_capturing():
                return  # torch synchronises before a capture, so the words are zeroed
            stream.wait_event(self._zeroed)
            self._streams.add(stream.cuda_stream)

    def _keep(self, *tensors: torch.Tensor) -> None:
        """Keep tensors whose addresses the graph under capture holds."""
        _captured_stores.extend(tensors)
        self._in_graph_too = True

    # Producers -----------------------------------------------------------------------------------------------------

    def set(self, chunk: int, epoch: int | None = None) -> None:
        """Issue the signal of chunk ``chunk`` on the current stream of the words' device.

        Raises
        ------
        RuntimeError
            If a launch that waits for it was issued on this stream before: neither would ever end.
        """
        self._checked(chunk, epoch)
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            self._settle(stream)
            if torch.cuda.is_current_stream_capturing() or self._theirs is not None:
                self._set_flag(chunk, stream)
                return
            with self._bell:
                value = self.epoch if epoch is None else epoch  # `advance` and `fail` also hold the bell
                if self._issued[chunk] >= value:
                    return  # a late signal must not lower a word
                if self._is_awaited_on(stream.cuda_stream, value) and not stream.query():
                    raise RuntimeError(
                        f"signal: chunk {chunk} is signalled on the stream on which a launch already waits for it, and "
                        "would come after it; copy and signal on a stream of their own, or before the launch"
                    )
                self._follow(chunk, stream)
                self._write(stream, self._eager, chunk, value)
                self._issued[chunk] = value
                self._wrote([chunk], stream)

    def leave_out(self, chunk: int, epoch: int) -> None:
        """Note that chunk ``chunk`` is not brought in ``epoch``: a launch that needs it waits until its deadline.

        The device alone knows what a launch needs. A signal would have it read what the tensor had there before.
        """
        with self._bell:
            self._issued[chunk] = max(epoch, self._issued[chunk])
            self._left_out = True

    def _set_flag(self, chunk: int, stream: torch.cuda.Stream) -> None:
        """Write 1 instead of an epoch: under capture, and for a caller's own words."""
        if not torch.cuda.is_current_stream_capturing():
            self._flags.record_stream(stream)
            with self._bell:
                self._write(stream, self._flags, chunk, 1)
                self._wrote([chunk], stream)
            return
        if torch.version.hip is not None:
            raise NotImplementedError(
                "signal: under capture, HIP writes a stream's value at once and not in the graph; replay the matmul "
                "alone, and signal words of your own (signals=) from a kernel"
            )
        self._keep(self._flags)
        self._write(stream, self._flags, chunk, 1)

    def begin_row(self, stream: torch.cuda.Stream) -> int:
        """Prepare this epoch's signals, which a sequence issues on ``stream``; returns the words' address."""
        self._settle(stream)
        for last in self._signal_ends(stream):
            last.hold(stream)
        address: int = self._eager.data_ptr()
        return address

    def end_row(
        self, chunks: Sequence[int], stream: torch.cuda.Stream, event: torch.cuda.Event | Event,
        epoch: int | None = None,
    ) -> None:  # fmt: skip
        """Note that signals of these chunks were issued on ``stream``, and ``event`` recorded after them."""
        last, value = Last(stream.cuda_stream, event), self.epoch if epoch is None else epoch
        if len(chunks) == self.count:
            self._issued, self._last = [value] * self.count, [last] * self.count
            return
        for chunk in chunks:
            self._issued[chunk], self._last[chunk] = value, last

    def left_some_out(self) -> None:
        """Note that chunks of an epoch of which all signals were noted are not brought: see `leave_out`."""
        self._left_out = True

    @property
    def ends_of_launches(self) -> tuple[torch.cuda.Event, ...]:
        """Events after the launches of earlier epochs, which `retire` has recorded."""
        return tuple(self._over.values())

    @staticmethod
    def _write(stream: torch.cuda.Stream, words: torch.Tensor, chunk: int, value: int) -> None:
        stream_write(stream.cuda_stream, words.data_ptr() + 4 * chunk, value)

    def _wrote(self, chunks: Iterable[int], stream: torch.cuda.Stream) -> None:
        """Note that signals of these chunks were issued on ``stream``."""
        last = Last(stream.cuda_stream, event_on(stream))
        for chunk in chunks:
            self._last[chunk] = last

    def _follow(self, chunk: int, stream: torch.cuda.Stream) -> None:
        """Order ``stream`` after an earlier epoch's signal of this chunk, which must not lower the word later."""
        last = self._last[chunk]
        if last is not None and last.stream != stream.cuda_stream:
            last.hold(stream)

    def _fail_chunks(self, chunks: Iterable[int], stream: torch.cuda.Stream) -> None:
        """Signal that these chunks will not come in the present epoch."""
        for chunk in chunks:
            self._write(stream, self._eager, chunk, -self.epoch)

    def _signalled_by_launch(self, stream: torch.cuda.Stream, end: torch.cuda.Event, epoch: int) -> None:
        """Note that a launch on ``stream`` signals all chunks of an epoch; ``end`` is the event after it."""
        self._issued = [epoch] * self.count
        self._last = [Last(stream.cuda_stream, end)] * self.count

    @property
    def awaited_here(self) -> bool:
        """Whether a launch on the current stream waits for the present epoch, and has not reported that it gave up."""
        return self._is_awaited_on(torch._C._cuda_getCurrentRawStream(self._device.index), self.epoch)

    def _waits_on(self, stream: int) -> None:
        """Note that a launch on ``stream`` waits for the present epoch."""
        self._waiting[stream] = self.epoch, self._channel.raised

    def _is_awaited_on(self, stream: int, epoch: int) -> bool:
        """Whether the last launch on ``stream`` waits for ``epoch``, and has not reported that it gave up."""
        of, before = self._waiting.get(stream, (-1, 0))
        # A report does not name its launch's stream: with launches on several, it may be another one's.
        alone = sum(one == epoch for one, _ in self._waiting.values()) == 1
        return of == epoch and not (alone and self._channel.heard(before, (self.key,))[1])

    # Epochs --------------------------------------------------------------------------------------------------------

    def advance(self) -> int:
        """Begin a new epoch. A caller's own words are zeroed on the current stream: see `_wipe`."""
        with self._bell:
            self._retire()
            if self._theirs is not None:
                self._wipe()
            self.epoch += 1
            return self.epoch

    def advance_at_once(self) -> None:
        """Like `advance`, for an epoch whose signals are all issued first; the caller calls `retire` if that fails."""
        with self._bell:
            self.epoch += 1

    def retire(self, ahead: int | None = None) -> None:
        """End the epoch of the launches so far: `fail` then waits for their end.

        ``ahead``: the handle of a stream on which the lane's `ready` event has been recorded since.
        """
        with self._bell:
            if ahead is not None:
                self._users.pop(ahead, None)
            self._retire()

    def clear(self) -> None:
        """Do nothing: the launch that has seen all signals zeroes a caller's own words."""

    def _retire(self) -> None:
        """End the epoch of the launches so far: writes to the words that they read must wait for their end."""
        users, self._users = self._users, {}
        for handle, stream in users.items():
            with torch.cuda.stream(stream):
                if not torch.cuda.is_current_stream_capturing():  # nothing outside can wait for a graph's event
                    self._over[handle] = event_on(stream)

    def _wipe(self) -> None:
        """Zero `_flags` on the current stream, after all their known writers and readers.

        The next use of the words, on any stream, follows that. Under capture this is a part of the graph.
        """
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            self._settle(stream)
            self._flags.record_stream(stream)
            if torch.cuda.is_current_stream_capturing():
                zero(self._flags)
                return
            self._come_behind_all(stream)
            zero(self._flags)
            self._zeroed = event_on(stream)
            self._streams = {stream.cuda_stream}

    def _come_behind_all(self, stream: torch.cuda.Stream) -> None:
        """Order ``stream`` after all issued signals, and after the launches that wait for earlier epochs."""
        for last in self._signal_ends(stream):
            last.hold(stream)
        for event in self._over.values():
            stream.wait_event(event)

    def _signal_ends(self, stream: torch.cuda.Stream) -> frozenset[Last]:
        """The last signals on other streams."""
        first = self._last[0] if self._last else None
        if first is not None and first.stream == stream.cuda_stream and self._last.count(first) == self.count:
            return frozenset()  # as behind each whole filling
        return frozenset(last for last in self._last if last is not None and last.stream != stream.cuda_stream)

    # Looking -------------------------------------------------------------------------------------------------------

    def arrived(self, chunk: int, epoch: int | None = None) -> bool:
        """Whether the chunk's signal is written, in eager launches' words. It waits only for reading the words."""
        self._check(chunk)
        return self._there(self._read()[chunk], epoch)

    def state(self) -> list[bool]:
        """See `Signals`; all words are read at once."""
        return [self._there(word) for word in self._read()]

    def void_if_late(self, epoch: int, needs: torch.Tensor | None = None) -> torch.Tensor:
        """A scalar on the GPU: 0, or NaN if a launch of ``epoch`` missed a chunk that has not come since.

        It is computed on the current stream, after that launch. ``epoch`` is 0 for a captured launch. ``needs``: bool
        ``[count]``, the chunks that the launch waited for; None: all.
        """
        with torch.cuda.device(self._device):
            self._settle(torch.cuda.current_stream())
            if torch.cuda.is_current_stream_capturing():  # a backward pass of an eager launch
                self._keep(self._store)
            words, least = self._looked_at(epoch)
            late = words < least
            if needs is not None and words is self._eager:
                late = late & needs
            return torch.where(late.any(), float("nan"), 0.0)

    def _looked_at(self, epoch: int) -> tuple[torch.Tensor, int]:
        """Words and a number: a word below the number means that a launch of ``epoch`` has missed a chunk."""
        if epoch and self._theirs is None:
            return self._eager, epoch
        return -self._quarantine.abs(), 0

    def _there(self, word: int, epoch: int | None = None) -> bool:
        return word != 0 if self.self_reset else word >= (self.epoch if epoch is None else epoch)

    def _read(self) -> list[int]:
        """The present words, read on a separate stream, since others may wait for them."""
        words = self._eager if self._theirs is None else self._theirs
        with aside(self._device) as stream:
            self._settle(stream)
            found: list[int] = words.cpu().tolist()
        return found
