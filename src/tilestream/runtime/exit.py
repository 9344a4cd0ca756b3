"""Leaving nobody inside torch when the interpreter exits.

A daemon thread that is inside torch's C++ code when the interpreter goes away is unwound through frames that do not
allow it, and the process aborts. So whoever runs threads registers here; at exit they are told to stop and waited for,
each for a bounded time: a producer that is blocked in a caller's own code is left to it, which is harmless.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Protocol

#: Seconds that each is waited for.
GRACE_SECONDS = 5.0


class Stoppable(Protocol):
    """Something that runs threads."""

    def stop_at_exit(self, timeout: float) -> None:
        """Stop, and wait until the threads have left, but not longer than ``timeout`` seconds."""


_running: weakref.WeakSet[Stoppable] = weakref.WeakSet()


def register(stoppable: Stoppable) -> None:
    """Stop ``stoppable`` at exit, if it is still alive then."""
    _running.add(stoppable)


def _stop_all() -> None:
    for stoppable in list(_running):
        stoppable.stop_at_exit(GRACE_SECONDS)


atexit.register(_stop_all)
