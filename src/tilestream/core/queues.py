"""Queues: which positions a queue holds, where a worker goes next, and counters that are never cleared.

A queue is one counter, which hands out tickets 0, 1, 2, ... by an atomic add; tickets at or past its size are void. A
worker takes from its own queue until that is empty and then from the fullest, so a queue that no running worker owns is
emptied, too (invariant 1, *Coverage*).

Counters are never cleared (invariant 4): the host gives a launch a *base*; the launch raises the counter to it with an
atomic max before its first add, and counts from there. The host adds the most that a launch can take to get the next
base, so a launch that was drained or failed half way cannot affect the next.

Leaves in the sense of `tilestream.core.integers`, except `next_base`, which only the host computes: bases grow without
bound, so counters are 64-bit words, and a worker counts the difference to its launch's base in 31 bits.
"""

from __future__ import annotations

#: Queues that `rank` tells apart.
MOST_QUEUES = 1024


def home_queue(worker: int, queues: int) -> int:
    """A worker's own queue.

    Neighbouring program ids land on different XCDs of an AMD GPU: with as many queues, an XCD has a queue of its own.
    """
    return worker % queues


def neighbour(worker: int, workers: int, groups: int) -> int:
    """Worker ``worker``'s number where workers of one group are neighbours: a bijection on [0, workers).

    Program ids go round the ``groups`` XCDs of an AMD GPU, each with an L2 of its own. Where the worker's number gives
    its positions (``static``), the workers of one XCD get neighbouring positions, and share what they read.
    """
    group = worker % groups
    return (workers // groups) * group + min(group, workers % groups) + worker // groups


def left(size: int, taken: int) -> int:
    """Valid tickets left in a queue of ``size`` that has handed out ``taken``, void ones included."""
    return size - min(size, taken)


def rank(queue_left: int, queue: int, home: int) -> int:
    """A victim's rank among `MOST_QUEUES` at most: the fullest queue ranks highest; see `ranked`.

    Among equally full queues the workers of each ``home`` prefer a different one: many look at the same time, and most
    of those that choose the same queue would come too late. Multiplying by an odd number mixes low bits into the high
    ones, which decide, and can be undone: ``633 * 969 % 1024 == 1``.
    """
    return min(queue_left, 1048576) * 1024 + (queue ^ home) * 633 % 1024


def ranked(best: int, home: int) -> tuple[int, int]:
    """``(queue, some)``: the queue of this rank for ``home``, and whether tickets are left in it: 1 or 0."""
    return (best % 1024 * 969 % 1024) ^ home, min(best // 1024, 1)


def next_base(base: int, size: int, workers: int) -> int:
    """The first counter value that no worker of the launch that counts from ``base`` can reach.

    A worker that draws a void ticket from a queue never draws there again, so ``workers`` bounds the void tickets.
    """
    return base + size + workers
