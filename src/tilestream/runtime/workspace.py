"""Workspaces of the CPU backend: queue counters, stream-K counts and partial results, kept from call to call.

Invariants 4 and 8: a workspace belongs to one launch at a time; it is made on first use, sized by need and reused, and
nothing in it is ever cleared for a launch. Queue counters go on from where the launch before may have left them (see
`tilestream.schedule.queues`). A launch that failed hands its workspace back like any other: all its workers have left,
and its counters are below the next base whatever it did; only its stream-K counts are forgotten.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import Iterator, Sequence

import torch

from tilestream.schedule.queues import next_base
from tilestream.schedule.schedule import Schedule

#: Bytes of the largest temporary that a workspace keeps for the next tile, and how many it keeps.
_LARGEST_KEPT = 32 * 2**20
_MOST_KEPT = 64


class Counter:
    """A word with the two atomic operations that a queue needs."""

    def __init__(self) -> None:
        self._value = 0
        self._lock = threading.Lock()

    def add(self, base: int) -> int:
        """Raise to ``base`` if below, add one; the value before, counted from ``base``."""
        with self._lock:
            value = max(self._value, base)
            self._value = value + 1
            return value - base

    def peek(self, base: int) -> int:
        """The value counted from ``base``; 0 if nobody has added since."""
        return max(self._value - base, 0)


class Workspace:
    """What one launch needs beside its operands."""

    def __init__(self) -> None:
        self.counters: list[Counter] = []
        self.bases: list[int] = []
        self._next: list[int] = []
        self._counts: dict[int, int] = {}
        self._count_lock = threading.Lock()
        self._scratch: torch.Tensor | None = None
        self._spare: list[torch.Tensor] = []
        self._spare_lock = threading.Lock()

    def open(self, schedule: Schedule) -> None:
        """Make ready for a launch: counters enough, and the base from which each counts."""
        missing = schedule.queues - len(self.counters)
        self.counters += [Counter() for _ in range(missing)]
        self._next += [0] * missing
        self.bases = list(self._next)
        for queue in range(schedule.queues):
            self._next[queue] = next_base(self.bases[queue], schedule.queue_size(queue), schedule.workers)
        self._counts.clear()  # empty already, unless the launch before was drained

    def count(self, tile: int, parts: int) -> int:
        """Count a partial result of ``tile``; the count before. The last of ``parts`` restores it."""
        with self._count_lock:
            before = self._counts.get(tile, 0)
            if before == parts - 1:
                del self._counts[tile]
            else:
                self._counts[tile] = before + 1
            return before

    @contextlib.contextmanager
    def borrow(self, shape: Sequence[int], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """A tensor for the length of the block, from what earlier tiles left behind where that is large enough.

        What is in it is anything. Very large ones are not kept.
        """
        size = math.prod(shape)
        with self._spare_lock:
            fits = [i for i, spare in enumerate(self._spare) if spare.dtype == dtype and spare.numel() >= size]
            taken = self._spare.pop(fits[0]) if fits else None
        if taken is None:
            taken = torch.empty(size, dtype=dtype)
        try:
            yield taken[:size].view(*shape)
        finally:
            if taken.numel() * taken.element_size() <= _LARGEST_KEPT:
                with self._spare_lock:
                    self._spare.append(taken)
                    del self._spare[:-_MOST_KEPT]

    def slots(self, count: int, block_m: int, block_n: int, dtype: torch.dtype) -> torch.Tensor:
        """``[count, block_m, block_n]`` of scratch for partial results; what is in it is anything."""
        size = count * block_m * block_n
        if self._scratch is None or self._scratch.dtype != dtype or self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=dtype)
        return self._scratch[:size].view(count, block_m, block_n)


class _Pool:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.free: list[Workspace] = []


_pool = _Pool()
#: Workspaces kept for reuse; more are made when more launches run at once, and dropped afterwards.
_KEPT = 8


def _after_fork() -> None:
    global _pool
    _pool = _Pool()  # the parent's lock may have been held, and its workspaces in use


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@contextlib.contextmanager
def workspace() -> Iterator[Workspace]:
    """A workspace that is nobody else's for the length of the block. On return all who used it must have left."""
    with _pool.lock:
        taken = _pool.free.pop() if _pool.free else None
    taken = taken or Workspace()
    try:
        yield taken
    finally:
        with _pool.lock:
            if len(_pool.free) < _KEPT:
                _pool.free.append(taken)
