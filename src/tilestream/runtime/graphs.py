"""CUDA graphs under capture: branches beside the later work of a stream, and objects that a graph keeps alive."""

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
    """A block whose work, captured on a stream, runs beside the stream's later work.

    It comes behind the stream's earlier work and behind the nodes ``behind``. Nothing has to be joined: a replay ends
    when all branches of the graph have ended.

    Attributes
    ----------
    stream
        Its handle.
    begin, end
        Nodes of the graph: those in front of the block's work, and the last of that work.
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
        # The driver refuses all questions about a failed capture: `error`, which failed it, is raised instead.
        with contextlib.nullcontext() if error is None else contextlib.suppress(RuntimeError):
            self.end = driver.captured_nodes(self.stream)
            driver.follow_nodes(self.stream, self.begin, True)


def keep(stream: int, *objects: object) -> None:
    """Keep ``objects`` until the graph that ``stream`` is captured into is destroyed and its last replay has ended.

    The next call of this function or of `let_go` drops them then. If the driver does not report the end of graphs, they
    are kept for ever.
    """
    let_go()
    semaphore = _libc().calloc(1, _SEMAPHORE)
    with _lock:
        _kept[semaphore] = objects
    with contextlib.suppress(RuntimeError, AttributeError):
        # The driver's own thread calls it, maybe after Python's end: so a C function, and memory that is not Python's.
        driver.call_when_gone(stream, ctypes.cast(_libc().sem_post, ctypes.c_void_p).value or 0, semaphore)


def let_go() -> None:
    """Drop what was kept for graphs that are gone."""
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
