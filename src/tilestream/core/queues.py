"""Queues: a queue's positions, the queue that a worker takes from next, and counters that are never cleared.

A queue is one counter, which hands out tickets 0, 1, 2, ... by an atomic add. Tickets at or above its size are void. A
worker takes from its own queue until that is empty and then from the fullest. So a queue whose owner does not run is
emptied, too (invariant 1, *Coverage*).

Counters are never cleared (invariant 4). The host gives a launch a *base*. The launch raises the counter to the base by
an atomic max before its first add, and counts from there. The next base is higher by the largest number of tickets that
the launch can take, so a launch that was aborted half way does not affect the next.

The functions are leaves in the sense of `tilestream.core.integers`, except `next_base`, which only the host computes.
Bases grow without bound, so counters are 64-bit words; the difference to a launch's base stays in 31 bits.
"""

from __future__ import annotations

#: The largest number of queues for `rank`.
MOST_QUEUES = 1024


def home_queue(worker: int, queues: int) -> int:
    """A worker's own queue.

    Neighbouring program ids run on different XCDs of an AMD GPU. With one queue for each XCD, an XCD has its own.
    """
    return worker % queues


def neighbour(worker: int, workers: int, groups: int) -> int:
    """A numbering of workers in which those of one group are neighbours: a bijection on [0, workers).

    Program ids go round the ``groups`` XCDs of an AMD GPU, each of which has its own L2. A ``static`` schedule derives
    positions from this number, so the workers of one XCD have neighbouring positions and share their reads.
    """
    group = worker % groups
    return (workers // groups) * group + min(group, workers % groups) + worker // groups


def left(size: int, taken: int) -> int:
    """Valid tickets left in a queue of ``size`` that has handed out ``taken`` tickets, including void ones."""
    return size - min(size, taken)


def rank(queue_left: int, queue: int, home: int) -> int:
    """A queue's rank as a victim, for at most `MOST_QUEUES` queues. The fullest ranks highest; see `ranked`.

    Among equally full queues the workers of each ``home`` prefer a different one. Many workers look at the same time,
    and most of those that chose the same queue would find it empty. Multiplication by an odd number mixes low bits into
    the high ones, which decide, and is invertible: ``633 * 969 % 1024 == 1``.
    """
    return min(queue_left, 1048576) * 1024 + (queue ^ home) * 633 % 1024


def ranked(best: int, home: int) -> tuple[int, int]:
    """``(queue, some)``: the queue of this rank for ``home``, and 1 if tickets are left in it, else 0."""
    return (best % 1024 * 969 % 1024) ^ home, min(best // 1024, 1)


def next_base(base: int, size: int, workers: int) -> int:
    """The first counter value above all that the launch with ``base`` can count to.

    A worker draws at most one void ticket from a queue, so ``workers`` bounds the void tickets.
    """
    return base + size + workers
