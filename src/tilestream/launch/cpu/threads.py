"""Intra-op threads: a worker has its own number, independent of the process's.

``torch.set_num_threads`` sets two numbers: that of the calling thread, and the default of threads that first ask later.
A worker must not change the default: a user's thread that starts at that moment would keep one intra-op thread for its
life. Torch has no call for the first number alone, but its libraries have: ``omp_set_num_threads`` and MKL's
``MKL_Set_Num_Threads_Local`` set the calling thread's number. If torch is not built on those (`own_setters` is None),
the default is changed and restored while the workers start.
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
    """The functions that set the calling thread's number of intra-op threads; None if there are none."""
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
    """The workers of one launch. Each calls `pin` before it computes."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pinned = threading.Semaphore(0)

    def pin(self, threads: int) -> None:
        """Give ``threads`` intra-op threads to the calling thread alone."""
        setters = own_setters()
        if setters is None:
            try:
                torch.set_num_threads(threads)
            finally:
                self._pinned.release()
            return
        torch.get_num_threads()  # a thread takes the default when it first asks, so it must not ask later
        for set_own in setters:
            set_own(threads)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """The block in which the workers are started. After it other threads' numbers are as before."""
        if own_setters() is not None:
            yield
            return
        with _changing_default:  # one launch at a time: a second would take the first one's setting for the default
            before = torch.get_num_threads()
            try:
                yield
                for _ in range(self._workers):
                    self._pinned.acquire()
            finally:
                torch.set_num_threads(before)


_changing_default = free_in_child(threading.Lock())
