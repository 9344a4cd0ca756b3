"""Workspaces of the CPU backend: queue counters, stream-K counts and partial results, kept from call to call.

Invariants 4 and 8: a workspace belongs to one launch at a time, and nothing in it is cleared for a launch. Queue
counters continue above all that the previous launch can have counted to (see `tilestream.core.queues`). A failed launch
returns its workspace, too: its workers have left, and its counters are below the next base. Only its stream-K counts
are dropped.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Sequence

import torch

from tilestream.core.forks import in_child
from tilestream.core.queues import next_base
from tilestream.core.schedule import Schedule

#: Bytes of scratch that a workspace keeps between launches. Scratch beyond that is freed after its launch.
_KEPT_BYTES = 64 * 2**20


class Counter:
    """A word with the two atomic operations of a queue."""

    def __init__(self) -> None:
        self._value = 0
        self._lock = threading.Lock()

    def add(self, base: int) -> int:
        """Raise the word to ``base`` if it is below, then add one. Returns the previous value minus ``base``."""
        with self._lock:
            value = max(self._value, base)
            self._value = value + 1
            return value - base

    def peek(self, base: int) -> int:
        """The value minus ``base``; 0 if nothing was added since."""
        return max(self._value - base, 0)


class Workspace:
    """The scratch of one launch."""

    def __init__(self) -> None:
        self.counters: list[Counter] = []
        self.bases: list[int] = []
        self._next: list[int] = []
        self._counts: dict[int, int] = {}
        self._count_lock = threading.Lock()
        self._partials: torch.Tensor | None = None
        self._spare: list[torch.Tensor] = []
        self._spare_lock = threading.Lock()

    def open(self, schedule: Schedule) -> None:
        """Prepare a launch: enough counters, and the base of each."""
        missing = schedule.queues - len(self.counters)
        self.counters += [Counter() for _ in range(missing)]
        self._next += [0] * missing
        self.bases = list(self._next)
        for queue in range(schedule.queues):
            self._next[queue] = next_base(self.bases[queue], schedule.queue_size(queue), schedule.workers)
        self._counts.clear()  # not empty only after a failed launch

    def count(self, tile: int, parts: int) -> int:
        """Count a partial result of ``tile``. Returns the previous count. The last of ``parts`` resets it to 0."""
        with self._count_lock:
            before = self._counts.get(tile, 0)
            if before == parts - 1:
                del self._counts[tile]
            else:
                self._counts[tile] = before + 1
            return before

    @contextlib.contextmanager
    def borrow(self, shape: Sequence[int], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """A block with an uninitialised tensor, from the scratch of earlier tiles if that is large enough."""
        size = math.prod(shape)
        with self._spare_lock:
            fits = [i for i, spare in enumerate(self._spare) if spare.dtype == dtype and spare.numel() >= size]
            taken = self._spare.pop(fits[0]) if fits else None
        if taken is None:
            taken = _scratch(size, dtype)
        try:
            yield taken[:size].view(*shape)
        finally:
            with self._spare_lock:
                self._spare.append(taken)

    def trim(self) -> None:
        """Free scratch beyond `_KEPT_BYTES`, the largest first."""
        pieces = sorted([*self._spare, *([] if self._partials is None else [self._partials])], key=torch.Tensor.numel)
        kept: list[torch.Tensor] = []
        for piece in pieces:
            if sum(x.nbytes for x in kept) + piece.nbytes > _KEPT_BYTES:
                break
            kept.append(piece)
        self._partials = next((piece for piece in kept if piece is self._partials), None)
        self._spare = [piece for piece in kept if piece is not self._partials]

    def slots(self, count: int, block_m: int, block_n: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised scratch for partial results: ``[count, block_m, block_n]``."""
        size = count * block_m * block_n
        if self._partials is None or self._partials.dtype != dtype or self._partials.numel() < size:
            self._partials = _scratch(size, dtype)
        return self._partials[:size].view(count, block_m, block_n)


def _scratch(size: int, dtype: torch.dtype) -> torch.Tensor:
    # On the CPU whatever torch's default device is; no inference tensor, since it outlives the mode.
    with torch.inference_mode(False):
        return torch.empty(size, dtype=dtype, device="cpu")


class _Pool:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.free: list[Workspace] = []


_pool = _Pool()
#: The number of workspaces kept for reuse. If more launches run at once, their workspaces are dropped afterwards.
_KEPT = 8


def _after_fork() -> None:
    global _pool
    _pool = _Pool()  # in the parent the lock may have been held, and workspaces in use


in_child(_after_fork)


@contextlib.contextmanager
def workspace() -> Iterator[Workspace]:
    """A block with a workspace of its own. All workers must have left at its end."""
    with _pool.lock:
        taken = _pool.free.pop() if _pool.free else None
    taken = taken or Workspace()
    try:
        yield taken
    finally:
        taken.trim()
        with _pool.lock:
            if len(_pool.free) < _KEPT:
                _pool.free.append(taken)
