"""A stream's copies, offered to the kernel that reads them: what makes them, and when.

The first launch of an epoch that can takes the copies (`KernelCopies.take`) and makes them itself: see
`tilestream.core.copy_items`. Launches after it in the same stream find all there; those in another stream wait for it,
since they might hold the SMs that it needs (invariant 10). A reader that cannot make copies (another kernel, the host)
has the copy engine make them. A captured launch makes them at each replay, with counts and signals of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

import torch

from tilestream.core.chunks import Chunks
from tilestream.core.copy_items import COUNTERS, CopyArguments, Pieces, word_bytes, word_dtype

if TYPE_CHECKING:
    from tilestream.arrival.signals import Signals

logger = logging.getLogger(__name__)

#: Tables that captured launches know by address: a graph may live for ever.
_captured_tables: list[torch.Tensor] = []


class KernelCopies:
    """The copies of one tensor's rows, from memory that the GPU can read.

    Parameters
    ----------
    source, target
        ``[rows, K]`` each, contiguous, from an address on that is a multiple of 16: pinned memory, or other memory that
        the kernel may read by its address; and the GPU's. A captured launch keeps neither alive: the owner of the graph
        keeps them.
    chunks, pivot
        How they arrive.
    by_engine
        Has the copy engine make the present epoch's copies behind what the current stream was given; returns the event
        behind the last. It is passed the signals: this object cannot hold them, because they hold it. Where it raises,
        the current stream comes behind what it had issued.
    beside
        The stream that the copy engine copies in. It knows of its use of the target.

    Raises
    ------
    ValueError
        If a chunk is too large: see `tilestream.core.copy_items.Pieces`.
    """

    def __init__(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        chunks: Chunks,
        pivot: int,
        by_engine: Callable[[Signals], torch.cuda.Event],
        beside: torch.cuda.Stream,
    ) -> None:
        row_bytes = source.shape[1] * source.element_size()
        #: Bytes of a word.
        self.width = word_bytes(row_bytes)
        pieces = Pieces.of(chunks, pivot, row_bytes // self.width, self.width)
        dtype: torch.dtype = getattr(torch, word_dtype(self.width))
        self._by_engine, self._beside = by_engine, beside
        self._lock = threading.RLock()
        self._chunks = chunks.count
        self._device = target.device
        with torch.inference_mode(False):
            self._words = torch.zeros(COUNTERS + chunks.count, dtype=torch.int32, device=target.device)
            self._table = torch.tensor(pieces.table(), dtype=torch.int32, device="cpu").to(target.device)
            self._source, self._target = (x.detach().view(-1).view(dtype) for x in (source, target))
            self._mark = torch.empty_like(self._target[:1])
        self._mark.record_stream(beside)
        self._made = torch.cuda.Event()
        self._made.record(self._current)
        self._known = {self._current.cuda_stream}
        self._graph: tuple[int, torch.Tensor] | None = None  # the last that was captured, and its signals
        self._took = self._said = False
        self._begun: torch.cuda.Event | None = None
        self._taken: torch.cuda.Event | None = None
        self._taker: torch.cuda.Stream | None = None
        #: Whether this epoch's copies are still to be taken.
        self.pending = False
        self.begin()

    @property
    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def begin(self) -> None:
        """A new epoch: its copies come after what the current stream was given so far."""
        with self._lock:
            self._ready = torch.cuda.Event()
            self._ready.record(self._current)
            self.pending = True

    @contextlib.contextmanager
    def launching(self, issued: Callable[[torch.cuda.Stream, torch.cuda.Event], None]) -> Iterator[None]:
        """Around a launch that may `take` the copies. One that raised has not taken them.

        ``issued`` is told the stream of a launch that makes this epoch's copies, and the event behind it.
        """
        with self._lock:
            graph, stream = self._graph, self._current
            self._took = False
            try:
                yield
            except BaseException:
                self._graph = graph
                if self._took:
                    try:
                        self._issued(stream)  # it may have been issued: the next copies come behind it
                    finally:
                        self.pending = True
                raise
            if self._took:
                issued(stream, self._issued(stream))

    def take(self, copiers: int, graph: int = 0) -> CopyArguments:
        """What a launch on the current stream copies; nothing where an earlier launch of the epoch took it all.

        Parameters
        ----------
        graph
            Of the capture that the stream is in; 0: in none.
        """
        with self._lock:
            stream, words = self._current, self._words
            if graph:
                # In the graph's memory, and zeroed at each replay.
                store = torch.zeros(COUNTERS + 2 * self._chunks, dtype=torch.int32, device=self._device)
                words, signals = store.split([COUNTERS + self._chunks, self._chunks])
                self._graph = graph, signals
                _captured_tables.append(self._table)
            elif self.pending:
                self._settle(stream)
                stream.wait_event(self._ready)
                self._wait_for_taker(stream)
                # In this order, as `settled` looks at them.
                self._taken, self._taker, self._took = None, stream, True
                self.pending = False
            else:
                copiers = 0
            return CopyArguments(self._source, self._target, self._table, words, copiers)

    @property
    def maker(self) -> Literal["kernel", "engine"] | None:
        """What makes this epoch's copies; None before they are taken. Those of a graph are its own."""
        if self.pending:
            return None
        return "engine" if self._taker is None else "kernel"

    @property
    def captured(self) -> bool:
        """Whether a graph makes them, too, at each replay."""
        return self._graph is not None

    def signals_in(self, graph: int) -> torch.Tensor | None:
        """The signals, ``int32[chunks]``, of the launch of this graph that makes the copies; None where none does."""
        return self._graph[1] if self._graph is not None and self._graph[0] == graph else None

    def follow(self, stream: torch.cuda.Stream, signals: Signals) -> None:
        """A launch on ``stream``, which is current, waits for these chunks: see that they come."""
        with self._lock:
            if self.pending:
                self.by_engine(signals)
            elif self._taker is None and self._begun is not None:
                # An engine needs no SM, so its chunks are waited for at gates; but what it comes behind may need one.
                stream.wait_event(self._begun)
            else:
                self._wait_for_taker(stream)

    def by_engine(self, signals: Signals, timeout: float | None = None) -> bool:
        """Have the copies made by the copy engine, unless a launch has taken them.

        Returns
        -------
        bool
            False if another thread has been launching a kernel for ``timeout`` seconds, which perhaps takes them.
        """
        if not self._lock.acquire(timeout=-1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)):
            return False
        try:
            if self.pending:
                stream = self._current
                stream.wait_event(self._ready)
                self._wait_for_taker(stream)
                self._begun = torch.cuda.Event()
                self._begun.record(stream)
                try:
                    end = self._by_engine(signals)
                except BaseException:
                    self.begin()  # behind what was issued
                    raise
                self._taken, self._taker = end, None
                self.pending = False
                if not self._said:
                    logger.info("stream_in: a copy engine makes the copies: this epoch's first reader makes none")
                self._said = True
        finally:
            self._lock.release()
        return True

    def reset(self) -> None:
        """Zero what eager launches count with, on the current stream. A graph zeroes its own at each replay."""
        with self._lock:
            stream = self._current
            if torch.cuda.is_current_stream_capturing():
                return
            self._settle(stream)
            self._wait_for_taker(stream)
            with torch.inference_mode():
                self._words.zero_()
            self._made.record(stream)
            self._known = {stream.cuda_stream}

    def settled(self, timeout: float | None) -> bool:
        """Wait at most ``timeout`` seconds until what was taken is there; whether it is. False if nothing was taken."""
        end = math.inf if timeout is None else time.perf_counter() + timeout
        while not self.pending:  # read before `_taken`: a new epoch's launch changes them the other way round
            taken = self._taken
            if taken is not None and timeout is None:
                taken.synchronize()
                return True
            if taken is not None and taken.query():
                return True
            if time.perf_counter() >= end:
                return False
            time.sleep(0.0002)
        return False

    def _issued(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """The launch that took the copies was issued on ``stream``; the event behind it."""
        self._taken = torch.cuda.Event()
        self._taken.record(stream)
        # torch's allocator of pinned memory knows of torch's own copies alone: one of a word that nothing reads keeps
        # the source until the launch is over (invariant 9). The caller's stream would wait for the copy engine.
        if self._source.numel():
            self._beside.wait_event(self._taken)
            with torch.cuda.stream(self._beside), torch.inference_mode():
                self._mark.copy_(self._source[:1], non_blocking=True)
        return self._taken

    def _wait_for_taker(self, stream: torch.cuda.Stream) -> None:
        """Come after the copies of this epoch or, before they are taken, of the one before."""
        if self._taken is not None and (self._taker is None or self._taker.cuda_stream != stream.cuda_stream):
            stream.wait_event(self._taken)

    def _settle(self, stream: torch.cuda.Stream) -> None:
        """Before ``stream`` first touches our memory: it is filled by then, and the allocator knows of that use."""
        if stream.cuda_stream in self._known:
            return
        stream.wait_event(self._made)
        for store in (self._words, self._table, self._target):
            store.record_stream(stream)
        self._known.add(stream.cuda_stream)
