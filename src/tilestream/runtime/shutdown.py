"""Shutdown: no thread is left inside torch when the interpreter exits.

If a daemon thread is inside torch's C++ code when the interpreter ends, Python unwinds it through frames that do not
allow this, and the process aborts. So objects that run threads register here. At exit each is stopped and waited for,
for a bounded time. A producer that blocks in the caller's own code is left there, which is harmless.

A caller's daemon thread that enters or leaves a call at exit sleeps until the process has ended, as all daemon threads
do from Python 3.14 on. Otherwise it could abort in the caller's torch code, even while it frees a result.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import Protocol

from tilestream.core.errors import TilestreamError
from tilestream.core.forks import in_child

#: Seconds to wait for each.
GRACE_SECONDS = 5.0


class Stoppable(Protocol):
    """An object that runs threads."""

    def stop_at_exit(self, timeout: float) -> None:
        """Stop, and wait at most ``timeout`` seconds until the threads have left."""


_exiting = threading.Event()
#: The calls in progress.
_inside: set[call] = set()
_running: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def register(stoppable: Stoppable) -> None:
    """Stop ``stoppable`` at exit, if it is still alive then.

    Raises
    ------
    TilestreamError
        If the interpreter is already exiting.
    """
    if _exiting.is_set():
        raise TilestreamError("the interpreter exits; nothing is launched any more")
    _running.add(stoppable)


class call:  # noqa: N801 -- read as `with shutdown.call():`
    """A block around a call of an op. At exit the interpreter waits for threads inside such blocks.

    A lock would cost more than a small product on the CPU. Instead a thread enters and then checks whether the
    interpreter exits; `_stop_all` first sets that flag and then checks which threads are inside.

    Raises
    ------
    TilestreamError
        If the interpreter is already exiting. A daemon thread sleeps instead.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        _inside.add(self)
        if _exiting.is_set():
            _inside.discard(self)
            _stay_if_left_behind()
            raise TilestreamError("the interpreter exits; nothing is launched any more")

    def __exit__(self, *error: object) -> None:
        _inside.discard(self)
        if _exiting.is_set():
            _stay_if_left_behind()


def _stay_if_left_behind() -> None:
    """Sleep until the process ends, in a daemon thread."""
    if threading.current_thread().daemon:
        threading.Event().wait()


def _stop_all() -> None:
    _exiting.set()
    for stoppable in list(_running):
        stoppable.stop_at_exit(GRACE_SECONDS)
    end = time.perf_counter() + GRACE_SECONDS
    while _inside and time.perf_counter() < end:
        time.sleep(1e-3)


atexit.register(_stop_all)
# A forked child has none of the parent's other threads: at its exit there is nothing of them to stop or to wait for.
in_child(_inside.clear)
in_child(_running.clear)
