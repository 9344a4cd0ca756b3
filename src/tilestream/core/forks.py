"""What a forked child makes anew.

A child of ``os.fork`` has one thread, the one that forked. A lock that another thread of the parent held stays held in
the child for ever, unless the child frees it. The words that such a lock guards are as the fork found them: so what a
thread does under a lock of `free_in_child` leaves them usable at each step.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Lock = TypeVar("Lock")  # a Lock, an RLock, a Condition or an Event

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def in_child(function: Callable[[], object]) -> None:
    """Call ``function`` in each forked child, where the system forks."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def free_in_child(lock: Lock) -> Lock:
    """``lock``, which no thread holds in a forked child, unless the thread that forked holds it."""
    _locks.add(lock)
    return lock


def _free() -> None:
    for lock in list(_locks):
        is_owned = getattr(lock, "_is_owned", None)  # a lock that one thread may take again knows its thread
        if is_owned is None or not is_owned():
            lock._at_fork_reinit()


in_child(_free)
