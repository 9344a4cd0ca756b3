"""Signals on a GPU: words in its memory, written in a stream's order.

A signal is issued, not given: it is written when the stream has done what it was given before, the copy that brings the
chunk. Issuing it costs no SM and waits for nothing (invariant 10).

Eagerly the words are epochs, as on the host. A captured graph would replay one epoch for ever, so under capture a
signal goes to a second set of words, as the value 1, and the captured launch that has seen all of them zeroes them
(invariant 4). After a replay in which a chunk was missing these words may hold anything: that launch sets the
quarantine word, and is not to be had again before `advance` (invariant 6).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilestream.arrival.signals import Signals
from tilestream.runtime.channel import channel
from tilestream.runtime.driver import stream_write
from tilestream.runtime.streams import aside


class GateWords(NamedTuple):
    """What a launch is told of an operand's signals.

    Attributes
    ----------
    words
        ``int32[chunks]``.
    quarantine
        ``int32[1]``, read and set by captured launches.
    epoch
        The epoch they are compared with; 0: any word that is not 0 will do, and they are zeroed at the end.
    key
        What an error record knows the signals by.
    """

    words: torch.Tensor
    quarantine: torch.Tensor
    epoch: int
    key: int


class DeviceSignals(Signals):
    """The signal words of one input on a GPU.

    Parameters
    ----------
    count
        Number of chunks.
    device
        The GPU.
    words
        The caller's own ``int32[count]`` there; None for ours.
    """

    def __init__(self, count: int, device: torch.device, words: torch.Tensor | None = None) -> None:
        super().__init__(count)
        self.device = str(device)
        self._device = device
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "Arrival: made while a CUDA graph is captured, which would clear its signals at each replay; make it "
                "before the capture"
            )
        channel(device)  # what a launch reports to, while nothing is captured
        self._theirs = words
        size = 0 if words is not None else count
        with torch.inference_mode(False):
            store = torch.zeros(2 * size + 1, dtype=torch.int32, device=device)
        self._eager, self._captured, self._quarantine = store[:size], store[size : 2 * size], store[2 * size :]
        self._store = store
        self._zeroed = torch.cuda.Event()
        with torch.cuda.device(device):
            self._streams: set[int] = {torch.cuda.current_stream().cuda_stream}
            self._zeroed.record()
        self._issued = [0] * count
        self._was_captured = False

    @property
    def self_reset(self) -> bool:
        """Whether an eager call that has seen all chunks zeroes the words."""
        return self._theirs is not None

    def use(self) -> GateWords:
        """What a launch on the current stream waits for; eager or captured as the stream is."""
        stream = torch.cuda.current_stream(self._device)
        self._settle(stream)
        if self._theirs is not None:
            self._theirs.record_stream(stream)
            self._was_captured |= torch.cuda.is_current_stream_capturing()
            return GateWords(self._theirs, self._quarantine, 0, self.key)
        if torch.cuda.is_current_stream_capturing():
            self._was_captured = True
            return GateWords(self._captured, self._quarantine, 0, self.key)
        return GateWords(self._eager, self._quarantine, self.epoch, self.key)

    def _settle(self, stream: torch.cuda.Stream) -> None:
        """Before ``stream`` first touches our words: they are zeroed by then, and its use of them is known to torch."""
        if stream.cuda_stream in self._streams:
            return
        with self._bell:
            self._streams.add(stream.cuda_stream)
            if not torch.cuda.is_current_stream_capturing():  # torch synchronises before it captures
                stream.wait_event(self._zeroed)
            # Freed words are not handed out again before this stream is past its use of them (invariant 9).
            self._store.record_stream(stream)

    def set(self, chunk: int, epoch: int | None = None) -> None:
        """Issue the signal of chunk ``chunk`` on the current stream of the words' device."""
        self._check(chunk)
        now = self.epoch
        if epoch is not None and epoch > now:
            raise ValueError(f"signal: epoch={epoch}; the present epoch is {now}: advance() begins the next")
        if epoch is not None and epoch < now:
            return  # too late to count, and it must not take a word back
        with torch.cuda.device(self._device):
            self.setter()(chunk)

    def setter(self) -> Callable[[int], None]:
        """`set` for many chunks of the present epoch in a row, on the stream that is current now."""
        now, issued = self.epoch, self._issued
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            self._settle(stream)
            captured = torch.cuda.is_current_stream_capturing()
        words, value = self._eager, now
        if self._theirs is not None:
            words, value = self._theirs, 1
            words.record_stream(stream)
        elif captured:
            words, value = self._captured, 1
            self._was_captured = True
        handle, address, ours = stream.cuda_stream, words.data_ptr(), words is self._eager

        def write(chunk: int) -> None:
            if ours:
                issued[chunk] = now
            stream_write(handle, address + 4 * chunk, value)

        return write

    def fail(self, error: BaseException, epoch: int | None = None) -> None:
        """The producer cannot go on: the chunks whose signals were not issued are signalled as failed, at once."""
        now = self.epoch
        super().fail(error, epoch)
        if self._theirs is not None or epoch not in (None, now):
            return
        with aside(self._device) as stream:  # beside whoever waits
            self._settle(stream)
            for chunk in range(self._count):
                if self._issued[chunk] < now:
                    stream_write(stream.cuda_stream, self._eager.data_ptr() + 4 * chunk, -now)

    def advance(self) -> int:
        """Begin a new epoch. What captured launches and a caller's own words hold is zeroed, on the current stream."""
        with self._bell:
            self._epoch += 1
            self._error = None
        with torch.cuda.device(self._device), torch.inference_mode():
            self._settle(torch.cuda.current_stream())
            if self._was_captured:
                self._captured.zero_()
                self._quarantine.zero_()
            if self._theirs is not None:
                self._theirs.zero_()
        return self._epoch

    def clear(self) -> None:
        """Nothing to do: the launch that has seen all signals zeroes a caller's own words."""

    def arrived(self, chunk: int, epoch: int | None = None) -> bool:
        """Whether the chunk's signal was written by now (eager launches' words). Waits for nothing but the look."""
        self._check(chunk)
        return self._has_arrived(self._read()[chunk], epoch)

    def _has_arrived(self, word: int, epoch: int | None = None) -> bool:
        return word != 0 if self._theirs is not None else word >= (self.epoch if epoch is None else epoch)

    @property
    def num_arrived(self) -> int:
        """As of `Signals`, with one look at all."""
        return sum(map(self._has_arrived, self._read()))

    def _read(self) -> list[int]:
        """The words as they are now, read beside all streams that may wait for them."""
        words = self._eager if self._theirs is None else self._theirs
        with aside(self._device) as stream:
            self._settle(stream)
            found: list[int] = words.cpu().tolist()
        return found
