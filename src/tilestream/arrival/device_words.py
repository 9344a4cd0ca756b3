"""The signal words of an input in a GPU's memory, and the order in which streams touch them.

A signal is written when the stream has done what it was given before: the copy that brings the chunk. Issuing it costs
no SM and waits for nothing (invariant 10).

Eagerly the words are epochs, as on the host. A captured graph would replay one epoch for ever, so a captured signal is
a 1 in a second set of words, which the captured launch that has seen all of them zeroes (invariant 4): one launch a
graph. A caller's own words work alike. A launch that misses a chunk sets the quarantine word: such words may hold
anything until `reset` (invariant 6).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from tilestream.arrival.lanes import Lane, Words, event_on
from tilestream.arrival.signals import Signals
from tilestream.runtime.channel import channel
from tilestream.runtime.driver import stream_write
from tilestream.runtime.sequence import Event
from tilestream.runtime.streams import aside, is_torchs

#: Words that captured launches and signals know by address: a graph may live for ever.
_captured_stores: list[torch.Tensor] = []


#: Streams that launches on a lane were issued on, and its epochs, in words of 32 bits: with more it is dropped. Also
#: with a stream of the caller's own, which may be gone when the next filling comes behind its launches.
_MOST_USERS, _MOST_EPOCHS = 32, 1 << 30


#: What a graph that fills a stream's tensor signals with, in words that it zeroes first: no epoch of the host's.
REPLAYED = 1 << 30


class Last(NamedTuple):
    """Where a chunk was last signalled, and the moment after it."""

    stream: int
    event: torch.cuda.Event | Event

    def hold(self, stream: torch.cuda.Stream) -> None:
        """Have ``stream`` wait for that moment."""
        if isinstance(self.event, Event):
            self.event.hold(stream.cuda_stream)
        else:
            stream.wait_event(self.event)


def zero(words: torch.Tensor) -> None:
    """Zero them, on the current stream."""
    with torch.inference_mode():  # words made in that mode are changed in no other
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
        The caller's own ``int32[count]`` there; None for ours.
    lane
        Whose words they are, where a `tilestream.Stream` signals them; the epochs go on from its last.
    """

    _lane: Lane | None = None
    #: Whether a graph knows our words.
    _in_graph_too = False

    def __init__(
        self, count: int, device: torch.device, words: torch.Tensor | None = None, lane: Lane | None = None
    ) -> None:
        super().__init__(count)
        self.device, self.self_reset = str(device), words is not None
        self._device = device
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Arrival: made while a CUDA graph is captured, which would clear its signals at each replay; make it "
                "before the capture"
            )
        channel(device)  # what a launch reports to, made while nothing is captured
        self._theirs = words
        own = Words(0 if words is not None else count, device) if lane is None else lane.words
        self._store, self._eager, self._quarantine = own.store, own.eager, own.quarantine
        #: Words that are 0 or not: a caller's own, else those of captured launches.
        self._flags = own.captured if words is None else words
        self._zeroed, self._streams = own.zeroed, own.streams
        self._issued = [0] * count
        self._last: list[Last | None] = [None] * count
        self._waiting: dict[int, int] = {}  # by stream: the epoch that its last launch waits for
        self._users: dict[int, torch.cuda.Stream] = {}  # of this epoch's eager launches
        self._over: dict[int, torch.cuda.Event] = {}  # by stream: the end of earlier epochs' launches
        if lane is not None:
            self._lane, self.epoch, self._users = lane, lane.epoch + 1, dict(lane.users)
            self._last = [Last(lane.handle, lane.landed)] * count
            self._issued = [lane.epoch] * count  # a late signal must not take a word back from a launch that waits

    def __del__(self) -> None:
        """Leave the lane. The garbage collector may call this in any thread."""
        lane = self._lane
        if lane is not None and not sys.is_finalizing():
            lane.epoch = self.epoch
            lane.users |= self._users
            lane.leave(
                self._error is None
                and not self._in_graph_too
                and self.epoch < _MOST_EPOCHS
                and len(lane.users) <= _MOST_USERS
                and all(map(is_torchs, lane.users.values()))
                and self._issued.count(self.epoch) == self.count
                and all(last is not None and last.stream == lane.handle for last in self._last)
            )

    def _settle(self, stream: torch.cuda.Stream) -> None:
        """Before ``stream`` first touches our words: they are zeroed by then, and its use of them is known to torch."""
        if stream.cuda_stream in self._streams:
            return
        with self._bell:
            # Freed words are not handed out again before this stream is past its use of them (invariant 9).
            self._store.record_stream(stream)
            if torch.cuda.is_current_stream_capturing():
                return  # torch synchronises before it captures: they are zeroed
            stream.wait_event(self._zeroed)
            self._streams.add(stream.cuda_stream)

    def _keep(self, *tensors: torch.Tensor) -> None:
        """A graph that is being captured knows these by address."""
        _captured_stores.extend(tensors)
        self._in_graph_too = True

    # Producers -----------------------------------------------------------------------------------------------------

    def set(self, chunk: int, epoch: int | None = None) -> None:
        """Issue the signal of chunk ``chunk`` on the current stream of the words' device.

        Raises
        ------
        RuntimeError
            If a launch that waits for it was issued on this stream before: neither would ever come to its end.
        """
        self._checked(chunk, epoch)
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            self._settle(stream)
            if torch.cuda.is_current_stream_capturing() or self._theirs is not None:
                self._set_flag(chunk, stream)
                return
            with self._bell:
                value = self.epoch if epoch is None else epoch  # `advance` and `fail` hold the bell, too
                if self._issued[chunk] >= value:
                    return  # a late one must not take a word back
                # A launch that has ended, expired, waits no more.
                if self._waiting.get(stream.cuda_stream) == value and not stream.query():
                    raise RuntimeError(
                        f"signal: chunk {chunk} is signalled on the stream on which a launch already waits for it, and "
                        "would come after it; copy and signal on a stream of their own, or before the launch"
                    )
                self._follow(chunk, stream)
                self._write(stream, self._eager, chunk, value)
                self._issued[chunk] = value
                self._wrote([chunk], stream)

    def _set_flag(self, chunk: int, stream: torch.cuda.Stream) -> None:
        """Under capture, and for a caller's own words: not an epoch, but 1."""
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
        """Signals of the present epoch are about to be issued on ``stream`` by a sequence. The address of the words."""
        self._settle(stream)
        for last in {last for last in self._last if last is not None and last.stream != stream.cuda_stream}:
            last.hold(stream)
        address: int = self._eager.data_ptr()
        return address

    def end_row(self, chunks: Sequence[int], stream: torch.cuda.Stream, event: torch.cuda.Event | Event) -> None:
        """Signals of these chunks were issued there, and ``event`` was recorded behind them."""
        last = Last(stream.cuda_stream, event)
        if len(chunks) == self.count:
            self._issued, self._last = [self.epoch] * self.count, [last] * self.count
            return
        for chunk in chunks:
            self._issued[chunk], self._last[chunk] = self.epoch, last

    @staticmethod
    def _write(stream: torch.cuda.Stream, words: torch.Tensor, chunk: int, value: int) -> None:
        stream_write(stream.cuda_stream, words.data_ptr() + 4 * chunk, value)

    def _wrote(self, chunks: Iterable[int], stream: torch.cuda.Stream) -> None:
        """Signals of these chunks were issued on ``stream``."""
        last = Last(stream.cuda_stream, event_on(stream))
        for chunk in chunks:
            self._last[chunk] = last

    def _follow(self, chunk: int, stream: torch.cuda.Stream) -> None:
        """Come after an earlier epoch's signal of this chunk, which would take the word back if it came later."""
        last = self._last[chunk]
        if last is not None and last.stream != stream.cuda_stream:
            last.hold(stream)

    def _fail_chunks(self, chunks: Iterable[int], stream: torch.cuda.Stream) -> None:
        """Signal that these will not come in the present epoch."""
        for chunk in chunks:
            self._write(stream, self._eager, chunk, -self.epoch)

    def _signalled_by_launch(self, stream: torch.cuda.Stream, end: torch.cuda.Event, epoch: int) -> None:
        """A launch on ``stream`` that signals all chunks of an epoch was issued; ``end`` is behind it."""
        self._issued = [epoch] * self.count
        self._last = [Last(stream.cuda_stream, end)] * self.count

    @property
    def awaited_here(self) -> bool:
        """Whether a launch on the current stream waits for the present epoch."""
        return self._waiting.get(torch._C._cuda_getCurrentRawStream(self._device.index)) == self.epoch

    # Epochs --------------------------------------------------------------------------------------------------------

    def advance(self) -> int:
        """Begin a new epoch. A caller's own words are zeroed, on the current stream: see `_wipe`."""
        with self._bell:
            self._retire()
            if self._theirs is not None:
                self._wipe()
            self.epoch += 1
            return self.epoch

    def advance_at_once(self) -> None:
        """As `advance`, where all signals are issued before anything else is; `retire` follows where that fails."""
        with self._bell:
            self.epoch += 1

    def retire(self) -> None:
        """The launches so far are over for `fail`, which comes behind them."""
        with self._bell:
            self._retire()

    def clear(self) -> None:
        """Nothing to do: the launch that has seen all signals zeroes a caller's own words."""

    def _retire(self) -> None:
        """The epoch of the launches so far is over: what overwrites what they read comes behind them."""
        users, self._users = self._users, {}
        for handle, stream in users.items():
            with torch.cuda.stream(stream):
                if not torch.cuda.is_current_stream_capturing():  # an event of a graph is none to wait for
                    self._over[handle] = event_on(stream)

    def _wipe(self) -> None:
        """Zero `_flags` on the current stream, behind all that are known to have written or read them.

        The next use of them, on any stream, comes behind that. Under capture this is a part of the graph.
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
        """Behind the launches that wait for earlier epochs, and behind all signals that were issued."""
        for last in self._signal_ends(stream):
            last.hold(stream)
        for event in self._over.values():
            stream.wait_event(event)

    def _signal_ends(self, stream: torch.cuda.Stream) -> frozenset[Last]:
        """The signals that were issued on other streams."""
        return frozenset(last for last in self._last if last is not None and last.stream != stream.cuda_stream)

    # Looking -------------------------------------------------------------------------------------------------------

    def arrived(self, chunk: int, epoch: int | None = None) -> bool:
        """Whether the chunk's signal was written by now (eager launches' words). Waits for nothing but the look."""
        self._check(chunk)
        return self._there(self._read()[chunk], epoch)

    def state(self) -> list[bool]:
        """As of `Signals`, with one look at all."""
        return [self._there(word) for word in self._read()]

    def void_if_late(self, epoch: int) -> torch.Tensor:
        """A scalar on the GPU: 0, or NaN where a chunk that a launch of ``epoch`` missed has not come since.

        It is computed on the current stream, behind that launch. ``epoch`` is 0 for a captured one.
        """
        with torch.cuda.device(self._device):
            self._settle(torch.cuda.current_stream())
            words, least = self._looked_at(epoch)
            return torch.where((words < least).any(), float("nan"), 0.0)

    def _looked_at(self, epoch: int) -> tuple[torch.Tensor, int]:
        """Words of which one is less than a number where a launch of ``epoch`` has missed a chunk."""
        if epoch and self._theirs is None:
            return self._eager, epoch
        return -self._quarantine.abs(), 0

    def _there(self, word: int, epoch: int | None = None) -> bool:
        return word != 0 if self.self_reset else word >= (self.epoch if epoch is None else epoch)

    def _read(self) -> list[int]:
        """The words as they are now, read beside all streams that may wait for them."""
        words = self._eager if self._theirs is None else self._theirs
        with aside(self._device) as stream:
            self._settle(stream)
            found: list[int] = words.cpu().tolist()
        return found
