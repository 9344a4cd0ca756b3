"""A filling of a stream's tensor: the threads of one epoch that read its chunks, and land and signal them in order.

`Issued` is a filling that has no threads, and `tilestream.arrival.routed.Routed` one that has a native thread. All have
the same few methods.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.landing import Landing
from tilestream.arrival.sources import Job, Source, ignore
from tilestream.core.chunks import Chunks
from tilestream.core.errors import ProducerStopped
from tilestream.runtime import shutdown

#: See `Filling`.
Order = Callable[[], tuple[Sequence[int], int]]


class Filling:
    """One filling of the tensor: the threads that read its chunks, and land and signal them in order.

    The order holds even if a later chunk is read first: a page that two chunks share is read with the chunk that was
    claimed first, so the later chunk is complete only when both are.

    ``order`` is called by the first thread. It returns the order of the chunks, and the number of them that are wanted.
    The other chunks are not read: see `Signals.leave_out`. None: all chunks, from the pivot's on.
    """

    def __init__(
        self, arrival: Arrival, chunks: Chunks, source: Source, landing: Landing, order: Order | None = None
    ) -> None:  # fmt: skip
        self._arrival, self._chunks, self._source, self._landing = arrival, chunks, source, landing
        self._epoch = arrival.epoch
        self._order: Sequence[int] = [(arrival.pivot + step) % chunks.count for step in range(chunks.count)]
        self._wanted, self._ask = chunks.count, order
        self._lock = threading.Lock()
        self._claimed = 0
        self._brought: set[int] = set()
        self._signalled = 0
        self.stop = threading.Event()
        self.cpu_seconds = 0.0
        readers = min(source.readers, chunks.count)
        self._running = max(readers, 1)
        self.threads: list[threading.Thread] = []
        arrival._signals.issuing_since, arrival._signals.longest_issue = None, 0.0
        landing.begin()
        if not readers:
            self._run()
            return
        shutdown.register(self)
        try:
            for i in range(readers):
                thread = threading.Thread(target=self._run, name=f"tilestream-producer-{i}", daemon=True)
                thread.start()
                self.threads.append(thread)
        except BaseException:  # a thread could not start: the others must not outlive the source
            self.stop.set()
            self.join(None)
            raise

    def halt(self) -> None:
        """Have the threads end after their present chunks."""
        self.stop.set()

    def stop_at_exit(self, timeout: float) -> None:
        """See `tilestream.runtime.shutdown`."""
        self.stop.set()
        self.join(timeout)

    def finish_issuing(self) -> None:
        """Wait for the threads, without the copies that they have issued."""
        for thread in self.threads:
            thread.join()

    @property
    def left_out(self) -> Sequence[int]:
        """The chunks that are not brought, once a thread has asked for the order."""
        return () if self._ask is not None else self._order[self._wanted :]

    @property
    def issued(self) -> bool:
        """Whether the threads have ended."""
        return not any(thread.is_alive() for thread in self.threads)

    @property
    def done(self) -> bool:
        """Whether the threads have ended, and the copies that they issued are done."""
        return self.issued and self._landing.settled(0.0)

    def join(self, timeout: float | None) -> bool:
        """Wait for the threads, and for the copies that they issued; whether all have ended.

        If a thread of this filling calls it, it waits for the other threads only.
        """
        left = countdown(timeout)
        others = [thread for thread in self.threads if thread is not threading.current_thread()]
        for thread in others:
            thread.join(left())
        return not any(thread.is_alive() for thread in others) and self._landing.settled(left())

    def _run(self) -> None:
        cpu = time.thread_time()
        try:
            while (claim := self._claim()) is not None:
                step, job = claim
                job()
                self._deliver(step)
        except BaseException as error:  # any error must reach the call that waits for the rest
            try:
                self._arrival.fail(error, epoch=self._epoch)  # before another reader reports ProducerStopped
            finally:
                self.stop.set()
        finally:
            with self._lock:
                self.cpu_seconds += time.thread_time() - cpu
                self._running -= 1
                if not self._running:
                    self._landing.end()
                    self._source.close()  # no file stays open if the stream is never closed

    def _claim(self) -> tuple[int, Job] | None:
        with self._lock:
            if self._ask is not None:
                (self._order, self._wanted), self._ask = self._ask(), None
            step = self._claimed
            if step == self._chunks.count:
                return None
            chunk = self._order[step]
            if self.stop.is_set():
                raise ProducerStopped(f"stream_in: closed before chunk {chunk} was delivered")
            self._claimed += 1
            return step, self._source.claim(*self._chunks.range_of(chunk)) if step < self._wanted else ignore

    def _deliver(self, step: int) -> None:
        with self._lock:
            self._brought.add(step)
            with self._landing.issuing():
                while self._signalled in self._brought:
                    chunk = self._order[self._signalled]
                    if self._signalled < self._wanted:
                        self._land(chunk)
                    else:
                        self._arrival._signals.leave_out(chunk, self._epoch)
                    self._signalled += 1
            last = self._signalled == self._chunks.count
        if last:
            self._source.end()

    def _land(self, chunk: int) -> None:
        """Land and signal a chunk. The driver may hold this thread up meanwhile: see `Signals.held`."""
        signals = self._arrival._signals
        signals.issuing_since = begin = time.perf_counter()
        try:
            self._landing.land(*self._chunks.range_of(chunk))
            self._arrival.signal(chunk, epoch=self._epoch)
        finally:
            signals.issuing_since = None
            signals.longest_issue = max(signals.longest_issue, time.perf_counter() - begin)


class Issued:
    """A filling whose copies and signals were all issued when it began."""

    cpu_seconds, issued, left_out = 0.0, True, ()

    def __init__(self, landing: Landing) -> None:
        self._landing = landing

    @property
    def done(self) -> bool:
        """Whether the copies are done."""
        return self._landing.settled(0.0)

    def join(self, timeout: float | None) -> bool:
        """Wait for the copies; whether they are done."""
        return self._landing.settled(timeout)

    def finish_issuing(self) -> None:
        """Do nothing: no thread runs."""

    halt = finish_issuing


def countdown(timeout: float | None) -> Callable[[], float | None]:
    """A function that returns the seconds left of ``timeout``; None without a bound."""
    if timeout is not None and not (hasattr(timeout, "__float__") and math.isfinite(timeout)):
        raise ValueError(f"stream_in: timeout={timeout!r}; it must be a finite number of seconds, or None for no bound")
    end = time.perf_counter() + (timeout or 0.0)
    return lambda: None if timeout is None else max(0.0, end - time.perf_counter())
