"""Signals on a GPU: words in its memory, written in a stream's order.

A signal is issued, not given: it is written when the stream has done what it was given before, the copy that brings the
chunk. Issuing it costs no SM and waits for nothing (invariant 10).

Eagerly the words are epochs, as on the host. A captured graph would replay one epoch for ever, so under capture a
signal goes to a second set of words, as the value 1, and the captured launch that has seen all of them zeroes them
(invariant 4): one launch a graph, then. So it is with a caller's own words. After a launch in which a chunk was missing
such words may hold anything: it sets the quarantine word, and they are not to be had again before `reset`
(invariant 6).

Where a matmul signals the chunks (``publish=``), see `tilestream.arrival.publishing`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch

from tilestream.arrival.kernel_copies import KernelCopies
from tilestream.arrival.publishing import Publishing
from tilestream.core.copy_items import CopyArguments
from tilestream.runtime.channel import channel
from tilestream.runtime.driver import capture_id, stream_write
from tilestream.runtime.streams import aside

#: Words that captured launches and signals know by address: a graph may live for ever.
_captured_stores: list[torch.Tensor] = []


class GateWords(NamedTuple):
    """What a launch is told of an operand's signals.

    Attributes
    ----------
    words
        ``int32[chunks]``.
    quarantine
        ``int32[1]``, read and set by launches whose epoch is 0.
    epoch
        The epoch they are compared with; 0: any word that is not 0 will do, and they are zeroed at the end.
    key
        What an error record knows the signals by.
    """

    words: torch.Tensor
    quarantine: torch.Tensor
    epoch: int
    key: int


class LocalRows(NamedTuple):
    """Rows of an arriving operand that this GPU has already, in another tensor, where a launch may read them.

    Attributes
    ----------
    rows
        ``[n, K]``, contiguous: those of the first batch, of the next, and so on.
    first, height
        In each batch of the operand, the first of them, and how many there are.
    period
        Rows of a batch of the operand.
    bring
        For a launch that reads them where the others are: copies them there, on the current stream, once.
    """

    rows: torch.Tensor
    first: int
    height: int
    period: int
    bring: Callable[[], None]


class _Last(NamedTuple):
    """Where a chunk was last signalled, and the moment after it."""

    stream: int
    event: torch.cuda.Event


def zero(words: torch.Tensor) -> None:
    """Zero them, on the current stream."""
    with torch.inference_mode():  # words made in that mode are changed in no other
        words.zero_()


class DeviceSignals(Publishing):
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

    #: Local rows for the launches of the present epoch.
    local_rows: LocalRows | None = None
    #: Signals of producers that failed, until a launch has reported it: the exception shall outlive the arrival.
    _failed: ClassVar[dict[int, DeviceSignals]] = {}

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
        self._last: list[_Last | None] = [None] * count
        self._waiting: dict[int, int] = {}  # by stream: the epoch that its last launch waits for
        self._users: dict[int, torch.cuda.Stream] = {}  # of this epoch's eager launches
        self._over: dict[int, torch.cuda.Event] = {}  # by stream: the end of earlier epochs' launches
        self._captures: set[int] = set()
        self._copies: KernelCopies | None = None

    @property
    def self_reset(self) -> bool:
        """Whether an eager call that has seen all chunks zeroes the words."""
        return self._theirs is not None

    def offer(self, copies: KernelCopies) -> None:
        """What these signal is copied by the launch that waits for it, if that can."""
        self._copies = copies

    @property
    def copied(self) -> int:
        """As of `Signals`."""
        return 0 if self._copies is None else self._copies.width

    # Launches ------------------------------------------------------------------------------------------------------

    def use(self, local_rows: bool = False) -> GateWords:
        """What a launch on the current stream waits for; eager or captured as the stream is.

        ``local_rows``: it reads the local rows in their own tensor.

        Raises
        ------
        RuntimeError
            If it is captured, and nothing would signal, or another launch of that graph zeroes the signals; or if
            another thread is about to issue the matmul that signals.
        """
        stream = torch.cuda.current_stream(self._device)
        self._settle(stream)
        self._come_behind_matmul(stream)
        if self.local_rows is not None and not local_rows:
            self.local_rows.bring()
        captured = torch.cuda.is_current_stream_capturing()
        if captured:
            self._enter_graph(stream)
        elif self._copies is not None:
            self._copies.follow(stream, self)
        if self._theirs is not None:
            self._theirs.record_stream(stream)
            return GateWords(self._theirs, self._quarantine, 0, self.key)
        if captured:
            copied = None if self._copies is None else self._copies.signals_in(capture_id(stream.cuda_stream))
            return GateWords(self._captured if copied is None else copied, self._quarantine, 0, self.key)
        self._waiting[stream.cuda_stream] = self.epoch
        return GateWords(self._eager, self._quarantine, self.epoch, self.key)

    @contextlib.contextmanager
    def copying(self) -> Iterator[None]:
        """See `KernelCopies.launching`: around a launch whose kernel may make these copies."""
        if self._copies is None:
            yield
            return
        captures, epoch = set(self._captures), self._epoch
        with self._copies.launching() as taking:
            try:
                yield
            except BaseException:
                self._captures = captures
                raise
        if taking.end is not None:
            with self._bell:
                self._signalled(torch.cuda.current_stream(self._device), taking.end, epoch)

    def take_copies(self, copiers: int) -> CopyArguments:
        """What a launch on the current stream copies, before `use`: see `KernelCopies.take`."""
        if self._copies is None:
            raise RuntimeError("arrival: the plan has the kernel make the copies, and nobody has offered them")
        captured = torch.cuda.is_current_stream_capturing()
        stream = torch.cuda.current_stream(self._device)
        return self._copies.take(copiers, capture_id(stream.cuda_stream) if captured else 0)

    def _enter_graph(self, stream: torch.cuda.Stream) -> None:
        graph = capture_id(stream.cuda_stream)
        if self._streamed and not (self._copies is not None and self._copies.signals_in(graph) is not None):
            raise RuntimeError(
                "arrival: a CUDA graph is being captured, and what ts.stream_in copies is not in it; capture copies of "
                "your own, and arrival.signal() of an Arrival behind each; or take copies='kernel' and a matmul whose "
                "plan makes them"
            )
        if graph in self._captures:
            raise RuntimeError(
                "arrival: a launch of this graph waits for these signals already, and zeroes them when it has seen "
                "them; give the second launch an Arrival of its own, and signal both, or make the two matmuls one"
            )
        self._captures.add(graph)
        self._keep(self._store, *(() if self._theirs is None else (self._theirs,)))

    def _keep(self, *tensors: torch.Tensor) -> None:
        """A graph that is being captured knows these by address."""
        _captured_stores.extend(tensors)

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

    # Producers -----------------------------------------------------------------------------------------------------

    def set(self, chunk: int, epoch: int | None = None) -> None:
        """Issue the signal of chunk ``chunk`` on the current stream of the words' device.

        Raises
        ------
        RuntimeError
            If a launch that waits for it was issued on this stream before: neither would ever come to its end.
        """
        self._check(chunk)
        self._check_epoch(epoch)
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            self._settle(stream)
            if torch.cuda.is_current_stream_capturing() or self._theirs is not None:
                self._set_flag(chunk, stream)
                return
            with self._bell:
                value = self._epoch if epoch is None else epoch
                if self._issued[chunk] >= value:
                    return  # a late one must not take a word back
                if self._waiting.get(stream.cuda_stream) == value:
                    raise RuntimeError(
                        f"signal: chunk {chunk} is signalled on the stream on which a launch already waits for it, and "
                        "would come after it; copy and signal on a stream of their own, or before the launch"
                    )
                self._follow(chunk, stream)
                stream_write(stream.cuda_stream, self._eager.data_ptr() + 4 * chunk, value)
                self._issued[chunk] = value
                event = torch.cuda.Event()
                event.record(stream)
                self._last[chunk] = _Last(stream.cuda_stream, event)

    def _set_flag(self, chunk: int, stream: torch.cuda.Stream) -> None:
        """Under capture, and for a caller's own words: not an epoch, but 1."""
        words = self._captured if self._theirs is None else self._theirs
        if torch.cuda.is_current_stream_capturing():
            if torch.version.hip is not None:
                raise NotImplementedError(
                    "signal: under capture, HIP writes a stream's value at once and not in the graph; replay the "
                    "matmul alone, and signal words of your own (signals=) from a kernel"
                )
            self._keep(words)
            stream_write(stream.cuda_stream, words.data_ptr() + 4 * chunk, 1)
            return
        words.record_stream(stream)
        with self._bell:
            stream_write(stream.cuda_stream, words.data_ptr() + 4 * chunk, 1)
            event = torch.cuda.Event()
            event.record(stream)
            self._last[chunk] = _Last(stream.cuda_stream, event)

    def _signalled(self, stream: torch.cuda.Stream, end: torch.cuda.Event, epoch: int) -> None:
        """A launch on ``stream`` that signals all chunks of an epoch was issued; ``end`` is behind it."""
        self._issued = [epoch] * self._count
        self._last = [_Last(stream.cuda_stream, end)] * self._count

    def _follow(self, chunk: int, stream: torch.cuda.Stream) -> None:
        """Come after an earlier epoch's signal of this chunk, which would take the word back if it came later."""
        last = self._last[chunk]
        if last is not None and last.stream != stream.cuda_stream:
            stream.wait_event(last.event)

    def _written(self, chunk: int) -> bool:
        last = self._last[chunk]
        return last is None or last.event.query()

    def set_in_row(self, order: Sequence[int]) -> tuple[Callable[[int], None], Callable[[], None]]:
        """`set` for all of these chunks of the present epoch, on the stream that is current now, at less cost.

        Returns
        -------
        write, end
            ``write(chunk)`` issues a signal; ``end()`` comes after the last.
        """
        stream, now = torch.cuda.current_stream(self._device), self.epoch
        self._settle(stream)
        for chunk in order:
            self._follow(chunk, stream)
        handle, address, issued = stream.cuda_stream, self._eager.data_ptr(), self._issued

        def write(chunk: int) -> None:
            issued[chunk] = now
            stream_write(handle, address + 4 * chunk, now)

        def end() -> None:
            event = torch.cuda.Event()
            event.record(stream)
            for chunk in order:
                self._last[chunk] = _Last(handle, event)

        return write, end

    def fail(self, error: BaseException, epoch: int | None = None) -> None:
        """The producer cannot go on: the chunks whose signals were not issued are signalled as failed, at once.

        But after the launches of earlier epochs, which may not have looked at those words yet.
        """
        with self._bell:
            now = self._epoch
            self._stopped()
            super().fail(error, epoch)
            if self._theirs is not None or epoch not in (None, now):
                return
            self._failed[self.key] = self
            with aside(self._device) as stream:  # beside the streams that wait
                self._settle(stream)
                for event in self._over.values():
                    stream.wait_event(event)
                missing = [chunk for chunk in range(self._count) if self._issued[chunk] < now]
                # Last those for which an earlier epoch's signal is still under way: the others do not wait for it.
                for chunk in sorted(missing, key=lambda chunk: not self._written(chunk)):
                    self._follow(chunk, stream)
                    stream_write(stream.cuda_stream, self._eager.data_ptr() + 4 * chunk, -now)
                event = torch.cuda.Event()
                event.record(stream)
                for chunk in missing:
                    self._last[chunk] = _Last(stream.cuda_stream, event)

    def overrule(self, error: BaseException) -> None:
        """As `fail`, for the chunks whose signals were issued, too, and have not come: their stream may be stuck.

        Who lets that stream go afterwards sees to it that the launches of this epoch have ended by then.
        """
        with self._bell:
            now = self._epoch
            super().fail(error, None)
            self._failed[self.key] = self
            missing = [chunk for chunk, word in enumerate(self._read()) if word < now]
            with aside(self._device) as stream:
                self._settle(stream)
                for chunk in missing:
                    stream_write(stream.cuda_stream, self._eager.data_ptr() + 4 * chunk, -now)

    def reported(self) -> None:
        """A launch has reported that the producer failed."""
        self._failed.pop(self.key, None)

    def advance(self) -> int:
        """Begin a new epoch. A caller's own words are zeroed, on the current stream: see `_wipe`."""
        with self._bell:
            self._retire()
            if self._theirs is not None:
                self._wipe(self._theirs)
            self._epoch += 1
            return self._epoch

    def _retire(self) -> None:
        """The epoch of the launches so far is over: what overwrites what they read comes behind them."""
        users, self._users = self._users, {}
        for handle, stream in users.items():
            with torch.cuda.stream(stream):
                if not torch.cuda.is_current_stream_capturing():  # an event of a graph is none to wait for
                    self._over[handle] = torch.cuda.Event()
                    self._over[handle].record()

    def reset(self) -> None:
        """End the quarantine: zero what captured launches look at, on the current stream."""
        with self._bell, torch.cuda.device(self._device):
            self._settle(torch.cuda.current_stream())
            zero(self._quarantine)
            if self._theirs is None:
                zero(self._captured)
            else:
                self._retire()
                self._wipe(self._theirs)
        if self._copies is not None:
            self._copies.reset()

    def _wipe(self, words: torch.Tensor) -> None:
        """Zero a caller's own words on the current stream, behind all who are known to have written or read them.

        The next use of them, on any stream, comes behind that. Under capture ``words`` may be those of the
        captured launches, too, and this is a part of the graph.
        """
        with torch.cuda.device(self._device):
            stream = torch.cuda.current_stream()
            self._settle(stream)
            words.record_stream(stream)
            if torch.cuda.is_current_stream_capturing():
                zero(words)
                return
            self._come_behind_all(stream)
            zero(words)
            self._zeroed = torch.cuda.Event()
            self._zeroed.record(stream)
            self._streams = {stream.cuda_stream}

    def _come_behind_all(self, stream: torch.cuda.Stream) -> None:
        """Behind the launches that wait for earlier epochs, and behind all signals that were issued."""
        events = {last.event for last in self._last if last is not None and last.stream != stream.cuda_stream}
        if self._published is not None:
            events.add(self._published.end)
        for event in (*events, *self._over.values()):
            stream.wait_event(event)

    def clear(self) -> None:
        """Nothing to do: the launch that has seen all signals zeroes a caller's own words."""

    # Looking -------------------------------------------------------------------------------------------------------

    def arrived(self, chunk: int, epoch: int | None = None) -> bool:
        """Whether the chunk's signal was written by now (eager launches' words). Waits for nothing but the look."""
        self._check(chunk)
        word = self._read()[chunk]
        return word != 0 if self._theirs is not None else word >= (self.epoch if epoch is None else epoch)

    def state(self) -> list[bool]:
        """As of `Signals`, with one look at all."""
        return [word != 0 if self._theirs is not None else word >= self.epoch for word in self._read()]

    def _read(self) -> list[int]:
        """The words as they are now, read beside all streams that may wait for them."""
        words = self._eager if self._theirs is None else self._theirs
        with aside(self._device) as stream:
            self._settle(stream)
            found: list[int] = words.cpu().tolist()
        return found


class PeerSignals(DeviceSignals):
    """Signals whose words other GPUs can write, in memory that outlives this object. The caller counts the epochs.

    Several may have the same words, as long as no two of them are of one epoch: words only grow.

    Parameters
    ----------
    words
        ``int32[count]`` on the device, of which none is more than the first epoch that is begun.
    """

    def __init__(self, words: torch.Tensor, device: torch.device) -> None:
        super().__init__(words.numel(), device, words)
        self._theirs, self._eager = None, words

    def begin(self, epoch: int) -> None:
        """A launch that is issued from here on waits for ``epoch``. Those of this object's epoch before have ended."""
        with self._bell:
            self._epoch = epoch
            self._users.clear()
