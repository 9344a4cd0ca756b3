"""Producers and probes that tests of the CPU backend share."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch

import tilestream as ts
from tilestream.launch.cpu import workers


class Feeder:
    """Brings ``source``'s rows into ``target``, which starts as NaN, chunk by chunk, from a thread; signals each.

    ``before(chunk)`` runs in that thread before a chunk is written: it may sleep, wait, or raise.
    """

    def __init__(
        self, arrival: ts.Arrival, target: torch.Tensor, source: torch.Tensor, *, order: Iterable[int] | None = None,
        before: Callable[[int], None] = lambda chunk: None,
    ) -> None:  # fmt: skip
        rows = source.reshape(-1, source.shape[-1])
        self._arrival, self._source, self._target, self._before = arrival, rows, target, before
        # Leading dimensions count as rows, whatever the strides.
        self._places = list(itertools.product(*map(range, target.shape[:-1])))
        self._chunks = arrival.chunks(rows.shape[0])
        self._order = list(range(arrival.num_chunks) if order is None else order)
        self._epoch = arrival.epoch
        self._thread = threading.Thread(target=self._run, name="test-feeder", daemon=True)
        self._error: BaseException | None = None

    def _run(self) -> None:
        try:
            for chunk in self._order:
                self._before(chunk)
                for row in range(*self._chunks.range_of(chunk)):
                    self._target[self._places[row]] = self._source[row]
                self._arrival.signal(chunk, epoch=self._epoch)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._thread.join(300)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error


def fed(
    call: Callable[[torch.Tensor], torch.Tensor], arrival: ts.Arrival, source: torch.Tensor,
    into: torch.Tensor | None = None, **how,
) -> torch.Tensor:  # fmt: skip
    """What ``call`` makes of rows that come in while it runs, into a tensor that is NaN until then; see `Feeder`."""
    x = torch.full(source.shape, float("nan")).to(source.dtype) if into is None else into
    with Feeder(arrival, x, source, **how):
        return call(x)


def from_pivot(arrival: ts.Arrival) -> list[int]:
    """The chunks in order, beginning with the pivot."""
    return [(arrival.pivot + i) % arrival.num_chunks for i in range(arrival.num_chunks)]


def late(chunk: int, seconds: float = 0.01) -> Callable[[int], None]:
    """``before`` that holds up one chunk."""
    return lambda c: time.sleep(seconds) if c == chunk else None


#: Pools that `new_workers` has replaced: their threads are idle until they end.
_replaced: list[workers.Pool] = []


def threads_at_work() -> set[threading.Thread]:
    """All threads but the package's idle workers, which stay between launches."""
    running = set(threading.enumerate())  # first: a thread that is new and idle is not at work
    return running - {worker.thread for pool in (workers.pool, *_replaced) for worker in pool.idle}


def workers_at_work() -> list[threading.Thread]:
    """The package's worker threads that serve a launch."""
    return [thread for thread in threads_at_work() if thread.name.startswith("tilestream-worker")]


def rest(threads: Sequence[threading.Thread], seconds: float = 300.0) -> bool:
    """Whether these threads come to take no CPU time for 0.2 s, in time. One that polls takes some each time."""

    def spent() -> list[float]:
        return [time.clock_gettime(time.pthread_getcpuclockid(one.ident)) for one in threads]

    if not hasattr(time, "pthread_getcpuclockid"):
        pytest.skip("no clock of a thread's CPU time here")
    end, before = time.monotonic() + seconds, spent()
    while time.monotonic() < end:
        time.sleep(0.2)
        if before == (now := spent()):
            return True
        before = now
    return False


@contextlib.contextmanager
def no_thread_left(grace: float = 0.0) -> Iterator[None]:
    """No thread more is at work after the block (and ``grace`` seconds) than before it."""
    before = threads_at_work()
    yield
    end = time.monotonic() + grace
    while (left := threads_at_work() - before) and time.monotonic() < end:
        time.sleep(0.005)
    assert not left, f"threads left behind: {left}"


@contextlib.contextmanager
def new_workers(patch: pytest.MonkeyPatch) -> Iterator[workers.Pool]:
    """No worker thread is kept from earlier launches in the block, and none is kept from the block."""
    made = workers.Pool()
    _replaced.append(workers.pool)
    with patch.context() as inside:
        inside.setattr(workers, "pool", made)
        try:
            yield made
        finally:
            made.stop_at_exit(60)
            _replaced.pop()


def intra_op_threads_of_a_new_thread() -> int:
    """What a thread started now finds as its number of intra-op threads."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def run_together(count: int, task: Callable[[int], None], seconds: float = 60.0) -> None:
    """``task(0)`` to ``task(count - 1)``, each in a thread, begun at once; raises what the first to fail raised."""
    barrier = threading.Barrier(count)
    errors: list[BaseException] = []

    def run(i: int) -> None:
        try:
            torch.get_num_threads()  # a thread takes the default number when it first asks; not while it is changed
            barrier.wait(seconds)
            task(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "a call did not return"
    if errors:
        raise errors[0]
