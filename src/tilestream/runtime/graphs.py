"""CUDA graphs under capture: branches that their stream does not wait for, and what a graph keeps alive."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from tilestream.core.forks import free_in_child
from tilestream.runtime import driver

#: Bytes that hold a ``sem_t``.
_SEMAPHORE = 64
_lock = free_in_child(threading.Lock())
#: What graphs keep alive, by the address of the semaphore that is posted when the graph is gone.
_kept: dict[int, tuple[object, ...]] = {}


class Branch:
    """Work of a stream under capture that what the stream is given later does not wait for.

    The block's work comes behind what the stream was given before it, and behind the nodes ``behind``. A graph's replay
    ends when all its branches have: nothing has to be joined.

    Attributes
    ----------
    stream
        Its handle.
    begin, end
        The nodes of the graph that the block's work comes behind, and the last of that work.
    """

    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()

    def __init__(self, stream: int, behind: Sequence[int] = ()) -> None:
        self.stream, self._behind = stream, behind

    def __enter__(self) -> Branch:
        self.begin = driver.captured_nodes(self.stream)
        if self._behind:
            driver.follow_nodes(self.stream, self._behind, False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A capture that has failed answers nothing any more; what failed it is raised.
        with contextlib.nullcontext() if error is None else contextlib.suppress(RuntimeError):
            self.end = driver.captured_nodes(self.stream)
            driver.follow_nodes(self.stream, self.begin, True)


def keep(stream: int, *objects: object) -> None:
    """Keep ``objects`` until the graph that ``stream`` is captured into is destroyed and its last replay has ended.

    They are let go of by the next call of this function or of `let_go`. Where the driver cannot say that a graph is
    gone, they are kept for ever.
    """
    let_go()
    semaphore = _libc().calloc(1, _SEMAPHORE)
    with _lock:
        _kept[semaphore] = objects
    with contextlib.suppress(RuntimeError, AttributeError):
        # The driver calls it in a thread of its own, perhaps when Python is gone: so no Python, and no memory of its.
        driver.call_when_gone(stream, ctypes.cast(_libc().sem_post, ctypes.c_void_p).value or 0, semaphore)


def let_go() -> None:
    """Let go of what the graphs have kept that are gone."""
    if not _kept:
        return
    with _lock:
        gone = [semaphore for semaphore in _kept if not _libc().sem_trywait(semaphore)]
        found = [_kept.pop(semaphore) for semaphore in gone]
    for semaphore in gone:
        _libc().free(semaphore)
    del found  # out of the lock: what it frees may come here


@functools.cache
def _libc() -> Any:
    """The C library: a semaphore that is all zeros has the value 0, and is this process's own."""
    found = ctypes.CDLL(None)
    found.calloc.argtypes, found.calloc.restype = (ctypes.c_size_t, ctypes.c_size_t), ctypes.c_void_p
    for name in ("free", "sem_post", "sem_trywait"):
        getattr(found, name).argtypes = (ctypes.c_void_p,)
    found.free.restype = None
    return found
