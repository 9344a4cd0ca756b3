"""Python's cyclic garbage collector, kept from running where much is made and nothing is dropped.

A collection visits every object of the process: 0.1 s once torch is imported. Importing this package's ops, and
compiling a kernel, would each set off several.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

from tilestream.core.forks import free_in_child, in_child

_lock = free_in_child(threading.Lock())
_depth = 0  # blocks that are open, of all threads
_was_enabled = False
_here = threading.local()  # its depth: blocks that are open in this thread


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No collection begins before the last such block of any thread has ended."""
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
    """Of the parent's threads, and the blocks open in them, the child has the one that forked."""
    global _depth
    blocks = _depth
    _depth = getattr(_here, "depth", 0)
    if blocks and not _depth and _was_enabled:
        gc.enable()


in_child(_in_forked_child)
