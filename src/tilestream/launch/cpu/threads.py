"""Intra-op threads: a worker has one, whatever the rest of the process has.

``torch.set_num_threads`` sets two things at once: the calling thread's number, and the default of every thread that
asks for the first time later. A worker must change the first and not the second, or a thread of the user's that happens
to start at the wrong moment is left with one intra-op thread for good. torch has no call for that; what it calls itself
has: ``omp_set_num_threads`` and MKL's ``MKL_Set_Num_Threads_Local`` set the calling thread's number alone. Where torch
is not built on those (`own_setters` is None), the default is changed and put back while the workers start.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from tilestream.core.forks import free_in_child

Setter = Callable[[int], None]


@functools.cache
def own_setters() -> tuple[Setter, ...] | None:
    """The functions by which a thread sets its own number of intra-op threads; None where there are none."""
    info = torch.__config__.parallel_info()
    if "ATen parallel backend: OpenMP" not in info:
        return None
    names = ["omp_set_num_threads"]
    if torch.backends.mkl.is_available():
        names.append("MKL_Set_Num_Threads_Local")
    prototype = ctypes.CFUNCTYPE(None, ctypes.c_int)
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return tuple(prototype((name, library)) for name in names)
    except (OSError, AttributeError):
        return None


class Pinning:
    """One launch's workers, each of which calls `pin` before it computes anything."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pinned = threading.Semaphore(0)

    def pin(self, threads: int) -> None:
        """Give the calling thread ``threads`` intra-op threads, and no other thread."""
        setters = own_setters()
        if setters is None:
            try:
                torch.set_num_threads(threads)
            finally:
                self._pinned.release()
            return
        torch.get_num_threads()  # a thread takes the default when it first asks: not after this, then
        for set_own in setters:
            set_own(threads)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """The block in which the workers are started; at its end the other threads' numbers are as before."""
        if own_setters() is not None:
            yield
            return
        with _changing_default:  # one launch at a time, or a second takes the first one's setting for the default
            before = torch.get_num_threads()
            try:
                yield
                for _ in range(self._workers):
                    self._pinned.acquire()
            finally:
                torch.set_num_threads(before)


_changing_default = free_in_child(threading.Lock())
