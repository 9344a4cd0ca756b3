"""Shutdown: no thread is left inside torch when the interpreter exits.

A daemon thread that is inside torch's C++ code when the interpreter goes away is unwound through frames that do not
allow it, and the process aborts. An object that runs threads registers here. At exit each is told to stop, and is
waited for a bounded time. A producer that is blocked in a caller's own code is left there, which is harmless.

A caller's daemon thread that enters or leaves a call then sleeps until the process is gone, as all daemon threads do
from Python 3.14 on: it would else abort in torch code of its caller's, even where it frees a result without the GIL.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import Protocol

from tilestream.core.errors import TilestreamError
from tilestream.core.forks import in_child

#: Seconds that each is waited for.
GRACE_SECONDS = 5.0


class Stoppable(Protocol):
    """Something that runs threads."""

    def stop_at_exit(self, timeout: float) -> None:
        """Stop, and wait until the threads have left, but not longer than ``timeout`` seconds."""


_exiting = threading.Event()
#: The calls that are under way.
_inside: set[call] = set()
_running: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def register(stoppable: Stoppable) -> None:
    """Stop ``stoppable`` at exit, if it is still alive then.

    Raises
    ------
    TilestreamError
        If that moment has passed: nothing may begin any more.
    """
    if _exiting.is_set():
        raise TilestreamError("the interpreter exits; nothing is launched any more")
    _running.add(stoppable)


class call:  # noqa: N801 -- read as `with shutdown.call():`
    """Around a call of an op: at exit, threads inside one are waited for.

    Without a lock, which would cost a call on the CPU more than a small product: a thread enters and then looks whether
    the interpreter exits; `_stop_all` says so and then looks who is inside.

    Raises
    ------
    TilestreamError
        If the interpreter exits already. A daemon thread sleeps instead.
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
    """Sleep for good, in a daemon thread."""
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
in_child(_inside.clear)  # the parent's other threads are not here
