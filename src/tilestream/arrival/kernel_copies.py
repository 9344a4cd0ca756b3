"""A stream's copies, offered to the kernel that reads them: who makes them, and when.

Nothing is copied before somebody reads. The first launch of an epoch that can takes the copies (`KernelCopies.take`)
and makes them itself, see `tilestream.arrival.copy_items`; launches after it in the same stream find all there, and
those in another stream wait for it, since they might hold the SMs that it needs (invariant 10). Whoever reads and
cannot make copies (another kernel, the host) has them made by the copy engine, as if they had never been offered.

A captured launch makes them at each replay, so its graph needs nobody outside.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from tilestream.arrival.chunks import Chunks
from tilestream.arrival.copy_items import COUNTERS, CopyArguments, Pieces, word_bytes, word_dtype

if TYPE_CHECKING:
    from tilestream.arrival.device import DeviceSignals

#: What captured launches know by address: a graph may live for ever.
_captured: list[torch.Tensor] = []


class KernelCopies:
    """The copies of one tensor's rows, from memory that the GPU can read.

    Parameters
    ----------
    source, target
        ``[rows, K]`` each, contiguous, from an address on that is a multiple of 16: pinned memory, or what else the
        kernel may read by its address; and the GPU's.
    chunks, pivot
        How they arrive.
    by_engine
        Has the present epoch's copies made by the copy engine, beginning behind what the current stream was given; the
        event behind the last. It is told the signals, which nothing here may hold on to: they hold this.

    Raises
    ------
    ValueError
        If a chunk is too large: see `tilestream.arrival.copy_items.Pieces`.
    """

    def __init__(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        chunks: Chunks,
        pivot: int,
        by_engine: Callable[[DeviceSignals], torch.cuda.Event],
    ) -> None:
        row_bytes = source.shape[1] * source.element_size()
        #: Bytes of a word.
        self.width = word_bytes(row_bytes)
        pieces = Pieces.of(chunks, pivot, row_bytes // self.width, self.width)
        dtype: torch.dtype = getattr(torch, word_dtype(self.width))
        self._by_engine = by_engine
        self._lock = threading.RLock()
        with torch.inference_mode(False):
            words = torch.zeros(2 * (COUNTERS + chunks.count), dtype=torch.int32, device=target.device)
            self._table = torch.tensor(pieces.table(), dtype=torch.int32, device="cpu").to(target.device)
            self._source, self._target = (x.detach().view(-1).view(dtype) for x in (source, target))
            self._mark = torch.empty_like(self._target[:1])
        self._eager, self._captured = words.tensor_split(2)
        self._device = target.device
        self._made = torch.cuda.Event()
        self._made.record(torch.cuda.current_stream(self._device))
        self._known = {torch.cuda.current_stream(self._device).cuda_stream}
        self._graph = 0
        self._taken: torch.cuda.Event | None = None
        self._taker: torch.cuda.Stream | None = None
        self.pending = False
        self.begin()

    def begin(self) -> None:
        """A new epoch: its copies come after what the current stream was given so far."""
        with self._lock:
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._device))
            self.pending = True

    @contextlib.contextmanager
    def launching(self) -> Iterator[None]:
        """Around a launch that may `take` the copies. One that was not issued has not taken them."""
        with self._lock:
            before, stream = self.pending, torch.cuda.current_stream(self._device)
            try:
                yield
            except BaseException:
                self.pending = before
                raise
            if before and not self.pending:
                self._issued(stream)

    def take(self, copiers: int, graph: int = 0) -> CopyArguments:
        """What a launch on the current stream copies; nothing where an earlier launch of the epoch took it all.

        Parameters
        ----------
        graph
            Of the capture that the stream is in; 0: in none.
        """
        with self._lock:
            stream = torch.cuda.current_stream(self._device)
            if graph:
                self._graph = graph
                _captured.extend((self._source, self._target, self._table, self._captured))
                return CopyArguments(self._source, self._target, self._table, self._captured, copiers)
            if self.pending:
                self.pending = False
                self._settle(stream)
                stream.wait_event(self._ready)
                self._wait_for_taker(stream)
                self._taker = stream
            else:
                copiers = 0
            return CopyArguments(self._source, self._target, self._table, self._eager, copiers)

    def brought_in(self, graph: int) -> bool:
        """Whether a launch of this graph makes the copies."""
        return self._graph == graph

    def follow(self, stream: torch.cuda.Stream, signals: DeviceSignals) -> None:
        """A launch on ``stream``, which is current, waits for these chunks: see that they come."""
        with self._lock:
            if self.pending:
                self.by_engine(signals)
            else:
                self._wait_for_taker(stream)

    def by_engine(self, signals: DeviceSignals) -> None:
        """Have the copies made by the copy engine, where nobody has taken them."""
        with self._lock:
            if self.pending:
                self.pending = False
                stream = torch.cuda.current_stream(self._device)
                stream.wait_event(self._ready)
                self._wait_for_taker(stream)
                self._taker, self._taken = None, self._by_engine(signals)

    def settled(self, timeout: float | None) -> bool:
        """Wait until what a launch has taken is there, at most ``timeout`` seconds; whether it is."""
        taken = self._taken
        if self.pending or taken is None:
            return False
        if timeout is None:
            taken.synchronize()
            return True
        end = time.perf_counter() + timeout
        while not taken.query():
            if time.perf_counter() >= end:
                return False
            time.sleep(0.0002)
        return True

    def _issued(self, stream: torch.cuda.Stream) -> None:
        """The launch that took the copies was issued on ``stream``."""
        # torch's allocator of pinned memory learns of what torch copies, and of nothing else: behind the launch, a word
        # that nobody reads. So the source is not handed out again while the launch may read it (invariant 9).
        if self._source.numel():
            with torch.cuda.stream(stream), torch.inference_mode():
                self._mark.copy_(self._source[:1], non_blocking=True)
        self._taken = torch.cuda.Event()
        self._taken.record(stream)

    def _wait_for_taker(self, stream: torch.cuda.Stream) -> None:
        """Come after the copies of this epoch or, before they are taken, of the one before."""
        if self._taken is not None and (self._taker is None or self._taker.cuda_stream != stream.cuda_stream):
            stream.wait_event(self._taken)

    def _settle(self, stream: torch.cuda.Stream) -> None:
        """Before ``stream`` first touches what is ours: it is filled by then, and the allocator knows of that use."""
        if stream.cuda_stream in self._known:
            return
        stream.wait_event(self._made)
        for store in (self._eager, self._table, self._mark):
            store.record_stream(stream)
        self._known.add(stream.cuda_stream)
