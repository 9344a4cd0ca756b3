"""A stream's copies, offered to the kernel that reads the rows: their maker, and their time.

The first capable launch of an epoch takes the copies (`KernelCopies.take`) and makes them itself: see
`tilestream.core.copy_items`. Later launches on the same stream find all rows in place. Launches on another stream wait
for it, since they might hold the SMs that it needs (invariant 10). If the first reader cannot make copies (another
kernel, the host), the copy engine makes them. A captured launch makes them at each replay, with its own counts and
signals.
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

#: Tables whose addresses captured launches hold: a graph may live forever.
_captured_tables: list[torch.Tensor] = []


class KernelCopies:
    """The copies of one tensor's rows, from memory that the GPU can read.

    Parameters
    ----------
    source, target
        ``[rows, K]`` each, contiguous, at an address that is a multiple of 16. The source is pinned memory, or other
        memory that the kernel can read by its address; the target is the GPU's memory. A captured launch keeps neither
        alive: the owner of the graph must keep them.
    chunks, pivot
        The chunks in which the rows arrive, and the first of them.
    by_engine
        Has the copy engine make the present epoch's copies after the current stream's earlier work; returns the event
        after the last copy. Its argument is the signals: this object cannot hold them, because they hold it. If it
        raises, it has ordered the current stream after the copies that it did issue.
    beside
        The stream of the copy engine's copies. The allocator already knows that it uses the target.

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
        self._graph: tuple[int, torch.Tensor] | None = None  # the last captured launch's graph, and its signals
        self._took = self._said = False
        self._begun: torch.cuda.Event | None = None
        self._taken: torch.cuda.Event | None = None
        self._taker: torch.cuda.Stream | None = None
        #: Whether this epoch's copies have no maker yet.
        self.pending = False
        self.begin()

    @property
    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def begin(self) -> None:
        """Begin a new epoch, whose copies follow the current stream's work so far."""
        with self._lock:
            self._ready = torch.cuda.Event()
            self._ready.record(self._current)
            self.pending = True

    @contextlib.contextmanager
    def launching(self, issued: Callable[[torch.cuda.Stream, torch.cuda.Event], None]) -> Iterator[None]:
        """The block that issues a launch that may `take` the copies. If it raises, the copies are not taken.

        ``issued`` is called with the stream of a launch that makes this epoch's copies, and the event after it.
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
                        self._issued(stream)  # it may have been issued, so the next copies must follow it
                    finally:
                        self.pending = True
                raise
            if self._took:
                issued(stream, self._issued(stream))

    def take(self, copiers: int, graph: int = 0) -> CopyArguments:
        """The copies of a launch on the current stream; none if an earlier launch of the epoch took them.

        Parameters
        ----------
        graph
            The graph that the stream is captured into; 0: none.
        """
        with self._lock:
            stream, words = self._current, self._words
            if graph:
                # The words are in the graph's memory, and zeroed at each replay.
                store = torch.zeros(COUNTERS + 2 * self._chunks, dtype=torch.int32, device=self._device)
                words, signals = store.split([COUNTERS + self._chunks, self._chunks])
                self._graph = graph, signals
                _captured_tables.append(self._table)
            elif self.pending:
                self._settle(stream)
                stream.wait_event(self._ready)
                self._wait_for_taker(stream)
                # In this order, which `settled` relies on.
                self._taken, self._taker, self._took = None, stream, True
                self.pending = False
            else:
                copiers = 0
            return CopyArguments(self._source, self._target, self._table, words, copiers)

    @property
    def maker(self) -> Literal["kernel", "engine"] | None:
        """The maker of this epoch's eager copies; None before they are taken."""
        if self.pending:
            return None
        return "engine" if self._taker is None else "kernel"

    @property
    def captured(self) -> bool:
        """Whether a graph makes the copies, too, at each replay."""
        return self._graph is not None

    def signals_in(self, graph: int) -> torch.Tensor | None:
        """The signals, ``int32[chunks]``, of the graph's launch that makes the copies; None without such a launch."""
        return self._graph[1] if self._graph is not None and self._graph[0] == graph else None

    def follow(self, stream: torch.cuda.Stream, signals: Signals) -> None:
        """Ensure that the chunks come for a launch on ``stream``, the current stream, that waits for them."""
        with self._lock:
            if self.pending:
                self.by_engine(signals)
            elif self._taker is None and self._begun is not None:
                # An engine needs no SM, so gates wait for its chunks. The work before its copies may need one, though.
                stream.wait_event(self._begun)
            else:
                self._wait_for_taker(stream)

    def by_engine(self, signals: Signals, timeout: float | None = None) -> bool:
        """Have the copies made by the copy engine, unless a launch has taken them.

        Returns
        -------
        bool
            False if another thread has been launching a kernel for ``timeout`` seconds; that kernel may take the
            copies.
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
                    self.begin()  # the next copies follow those already issued
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
        """Zero the counts of eager launches on the current stream. A graph zeroes its own at each replay."""
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
        """Wait at most ``timeout`` seconds for the copies that were taken. False if they are not done, or not taken."""
        end = math.inf if timeout is None else time.perf_counter() + timeout
        while not self.pending:  # read before `_taken`: a new epoch's launch sets them in the other order
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
        """Record the event after the launch on ``stream`` that took the copies, and return it."""
        self._taken = torch.cuda.Event()
        self._taken.record(stream)
        # Torch's allocator of pinned memory knows only of torch's own copies. So a copy of one word, which nothing
        # reads, keeps the source until the launch has ended (invariant 9). It is on a separate stream, because the
        # caller's stream would have to wait for the copy engine.
        if self._source.numel():
            self._beside.wait_event(self._taken)
            with torch.cuda.stream(self._beside), torch.inference_mode():
                self._mark.copy_(self._source[:1], non_blocking=True)
        return self._taken

    def _wait_for_taker(self, stream: torch.cuda.Stream) -> None:
        """Order ``stream`` after this epoch's copies; before they are taken, after the previous epoch's."""
        if self._taken is not None and (self._taker is None or self._taker.cuda_stream != stream.cuda_stream):
            stream.wait_event(self._taken)

    def _settle(self, stream: torch.cuda.Stream) -> None:
        """Before ``stream`` first uses our memory: have it wait until that is filled, and tell the allocator."""
        if stream.cuda_stream in self._known:
            return
        stream.wait_event(self._made)
        for store in (self._words, self._table, self._target):
            store.record_stream(stream)
        self._known.add(stream.cuda_stream)
