"""Locks and state of a forked child.

A child of ``os.fork`` has one thread, the one that forked. A lock that another thread of the parent held stays held in
the child unless the child frees it. The state that such a lock guards is as it was at the fork. So code under a lock of
`free_in_child` must keep that state usable after each step.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

Lock = TypeVar("Lock")  # a Lock, an RLock, a Condition or an Event

_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def in_child(function: Callable[[], object]) -> None:
    """Call ``function`` in each forked child, if the system can fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def free_in_child(lock: Lock) -> Lock:
    """Free ``lock`` in each forked child, unless the forking thread holds it. Returns ``lock``."""
    _locks.add(lock)
    return lock


def _free() -> None:
    for lock in list(_locks):
        is_owned = getattr(lock, "_is_owned", None)  # a reentrant lock knows its thread
        if is_owned is None or not is_owned():
            lock._at_fork_reinit()


in_child(_free)
