"""Shutdown: no thread is left inside torch when the interpreter exits.

A daemon thread that is inside torch's C++ code when the interpreter goes away is unwound through frames that do not
allow it, and the process aborts. An object that runs threads registers here. At exit each is told to stop, and is
waited for a bounded time. A producer that is blocked in a caller's own code is left there, which is harmless.

A caller's daemon thread that enters or leaves a call then sleeps until the process is gone, as all daemon threads do
from Python 3.14 on: it would else abort in torch code of its caller's, even where it frees a result without the GIL.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

from tilestream.core.errors import TilestreamError

#: Seconds that each is waited for.
GRACE_SECONDS = 5.0


class Stoppable(Protocol):
    """Something that runs threads."""

    def stop_at_exit(self, timeout: float) -> None:
        """Stop, and wait until the threads have left, but not longer than ``timeout`` seconds."""


_exiting = threading.Event()
_changed = threading.Condition()
_calls = 0
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


@contextlib.contextmanager
def call() -> Iterator[None]:
    """Around a call of an op: at exit, threads inside one are waited for.

    Raises
    ------
    TilestreamError
        If the interpreter exits already. A daemon thread sleeps instead.
    """
    global _calls
    with _changed:
        exiting = _exiting.is_set()
        _calls += not exiting
    if exiting:
        _stay_if_left_behind()
        raise TilestreamError("the interpreter exits; nothing is launched any more")
    try:
        yield
    finally:
        with _changed:
            _calls -= 1
            _changed.notify_all()
        if _exiting.is_set():
            _stay_if_left_behind()


def _stay_if_left_behind() -> None:
    """Sleep for good, in a daemon thread."""
    if threading.current_thread().daemon:
        threading.Event().wait()


def _stop_all() -> None:
    with _changed:
        _exiting.set()
    for stoppable in list(_running):
        stoppable.stop_at_exit(GRACE_SECONDS)
    with _changed:
        _changed.wait_for(lambda: not _calls, GRACE_SECONDS)


def _after_fork() -> None:
    global _changed, _calls
    _changed, _calls = threading.Condition(), 0  # the parent's other threads are not here


atexit.register(_stop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
