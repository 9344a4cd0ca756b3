"""Worker threads that stay between launches.

::

    launch:   for each worker offer the crew to an idle thread, or else to a new one; sleep until all have left
    thread:   take the crew's next number, do that worker's work, become idle, leave the crew; sleep until an offer

A launch waits for no other launch: a worker that waits at its gate holds its thread, and another launch gets other
threads. So there are as many threads as there were workers at work at once. A thread that was idle for `IDLE_SECONDS`
ends.

Why they stay: MKL keeps memory of each thread that has multiplied, and a child that is forked while a thread begins or
ends can hang in its first product.

A launch does not see that its threads are kept. A worker begins with an empty context, with the trace and profile
functions of `threading`, and with torch's modes off. What a new thread inherits from its creator is as in the caller:
see `_inherited`. An idle thread refers to nothing of a launch.

A thread is claimed without a lock. So a signal handler or a finalizer may launch, too, and an interrupt between any two
statements leaves the pool usable.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable

from tilestream.core.forks import in_child
from tilestream.runtime import shutdown

#: Seconds until an idle thread ends.
IDLE_SECONDS = 60.0

Inherited = tuple[frozenset[int], int, bool]


class Crew:
    """The workers of one launch.

    Parameters
    ----------
    work
        Is called with the number of each worker, 0 to ``count - 1``, each in a thread of its own. It must not raise.
    count
        The number of workers.
    """

    def __init__(self, work: Callable[[int], None], count: int) -> None:
        self._work, self._count = work, count
        self._changed = threading.Condition()  # guards the next three
        self._begun, self._left, self._closed = 0, 0, False

    def start(self) -> None:
        """Have a thread for each worker.

        Raises
        ------
        RuntimeError
            If a thread cannot be started. Those that were are at work.
        """
        inherited = _inherited()
        for _ in range(self._count):
            pool.offer(self, inherited)

    def wait(self) -> None:
        """Wait until all workers have done their work."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == self._count)
        self._work = _nothing

    def wait_for_begun(self, timeout: float) -> None:
        """Wait until those that have begun have left, at most ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == self._begun, timeout)

    def close(self) -> None:
        """Keep further workers from beginning, and wait until those that have begun have left.

        A thread whose start was interrupted may or may not run; this covers both.
        """
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._left == self._begun)
        self._work = _nothing

    def serve(self, rest: Callable[[], None]) -> None:
        """Do the work of the next worker in the calling thread, if there is one. ``rest`` makes the thread idle."""
        with self._changed:
            if is_late := self._closed or self._begun == self._count:
                number = -1
            else:
                number, self._begun = self._begun, self._begun + 1
        if is_late:
            rest()
            return
        try:
            _as_in_a_new_thread(self._work, number)
            rest()  # before the launch ends, so that its caller's next launch finds this thread idle
        finally:
            with self._changed:
                self._left += 1
                self._changed.notify_all()


def _nothing(number: int) -> None:
    """The work of a crew that has ended: it keeps no launch alive."""


def _as_in_a_new_thread(work: Callable[[int], None], number: int) -> None:
    """``work(number)``, with what `threading.Thread` and contexts give a new thread; nothing of it remains."""
    trace, profile = threading.gettrace(), threading.getprofile()
    if trace is not None:
        sys.settrace(trace)
    if profile is not None:
        sys.setprofile(profile)
    try:
        contextvars.Context().run(work, number)
    finally:
        if trace is not None:
            sys.settrace(None)
        if profile is not None:
            sys.setprofile(None)


def _inherited() -> Inherited:
    """What a new thread inherits from the calling one: its CPUs, its niceness, and whether denormals become zero.

    ``os.sched_setaffinity``, ``os.nice`` and ``torch.set_flush_denormal`` change the calling thread alone.
    """
    cpus = frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
    nice = os.getpriority(os.PRIO_PROCESS, 0) if hasattr(os, "getpriority") else 0
    return cpus, nice, sys.float_info.min / 2 == 0.0


class Worker:
    """A thread that serves one crew after the other.

    Attributes
    ----------
    thread
        The thread.
    inherited
        What it inherited from the thread that started it.
    offers
        Crews to serve; None ends an idle thread.
    has_ended
        It takes no further offer. Who offers looks at this afterwards.
    """

    def __init__(self, owner: Pool, inherited: Inherited) -> None:
        self._owner, self.inherited, self.has_ended = owner, inherited, False
        self.offers: queue.SimpleQueue[Crew | None] = queue.SimpleQueue()
        name = f"tilestream-worker-{next(owner.numbers)}"
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        _leave_signals_to_others()
        try:
            while (crew := self._next()) is not None:
                crew.serve(self._rest)
                del crew
        finally:
            self.has_ended = True
            self._owner.withdraw(self)

    def _rest(self) -> None:
        if not self.has_ended:
            self._owner.add_idle(self)

    def _next(self) -> Crew | None:
        """Sleep until the next offer; None if there is to be none."""
        if self.has_ended:
            return None
        with contextlib.suppress(queue.Empty):
            if (crew := self.offers.get(timeout=IDLE_SECONDS)) is not None:
                return crew
        if self._owner.withdraw(self):
            return None
        # A launch has claimed this thread. Either its offer comes, or it was interrupted before it could make it.
        self.has_ended = True
        with contextlib.suppress(queue.Empty):
            return self.offers.get_nowait()
        return None


class Pool:
    """The threads of all launches of a process."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self._idle: dict[Inherited, list[Worker]] = {}
        self._is_ending = False

    @property
    def idle(self) -> list[Worker]:
        """The idle threads."""
        return [worker for workers in list(self._idle.values()) for worker in list(workers)]

    def offer(self, crew: Crew, inherited: Inherited) -> None:
        """Have one thread serve ``crew``: an idle one, or a new one.

        Raises
        ------
        RuntimeError
            If a thread is needed and cannot be started.
        """
        # The last to become idle, whose caches are warm; so the first can end if they are not needed.
        with contextlib.suppress(KeyError, IndexError):
            worker = self._idle[inherited].pop()
            worker.offers.put(crew)
            if not worker.has_ended:
                return
        shutdown.register(self)
        worker = Worker(self, inherited)
        worker.offers.put(crew)
        worker.thread.start()

    def add_idle(self, worker: Worker) -> None:
        """The thread waits for an offer, or is about to."""
        self._idle.setdefault(worker.inherited, []).append(worker)
        if self._is_ending:
            worker.offers.put(None)

    def withdraw(self, worker: Worker) -> bool:
        """Take an idle thread out. Returns False if a launch has claimed it."""
        try:
            self._idle[worker.inherited].remove(worker)
        except (KeyError, ValueError):
            return False
        return True

    def stop_at_exit(self, timeout: float) -> None:
        """End the idle threads. The others end when their launches do. See `tilestream.runtime.shutdown`."""
        self._is_ending = True
        end = time.perf_counter() + timeout
        idle = self.idle
        for worker in idle:
            worker.offers.put(None)
        for worker in idle:
            worker.thread.join(max(0.0, end - time.perf_counter()))

    def forget(self) -> None:
        """Forget the threads, which a forked child does not have."""
        self._idle.clear()


#: Signals that a thread causes itself, and those that measure it.
_OWN_SIGNALS = ("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS", "SIGPROF")


def _leave_signals_to_others() -> None:
    """Block the process's signals in the calling thread.

    A program that blocks a signal to wait for it knows nothing of idle threads. One of them would get the signal.
    """
    if hasattr(signal, "pthread_sigmask"):
        own = {getattr(signal, name) for name in _OWN_SIGNALS if hasattr(signal, name)}
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - own)


pool = Pool()
in_child(lambda: pool.forget())
