"""Pauses Python's cyclic garbage collector while many objects are made and none becomes garbage.

A collection visits every object of the process: 0.1 s once torch is imported. Importing this package's ops, and
compiling a kernel, would each start several.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from tilestream.core.forks import free_in_child, in_child

_lock = free_in_child(threading.Lock())
_depth = 0  # open blocks of all threads
_was_enabled = False
_here = threading.local()  # ``depth``: open blocks of this thread


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """A block in which no collection begins, in any thread."""
    global _depth, _was_enabled
    with _lock:
        if _depth == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _depth += 1
        _here.depth = getattr(_here, "depth", 0) + 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            _here.depth -= 1
            if _depth == 0 and _was_enabled:
                gc.enable()


def _in_forked_child() -> None:
    """Count only this thread's open blocks: a forked child has none of the parent's other threads."""
    global _depth
    blocks = _depth
    _depth = getattr(_here, "depth", 0)
    if blocks and not _depth and _was_enabled:
        gc.enable()


in_child(_in_forked_child)
