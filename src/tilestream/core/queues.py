"""Queues: which positions a queue holds, where a worker goes next, and counters that nobody has to clear.

A queue is one counter, handing out tickets 0, 1, 2, ... by an atomic add; tickets at or past its size are void. A
worker takes from its own queue while that lasts and then from the fullest, so a queue that nobody calls his own is
emptied all the same (invariant 1, *Coverage*).

Counters are never cleared (invariant 4): a launch is given a *base* by the host, raises the counter to it with an
atomic max before its first add, and counts from there. The host adds the most a launch can take to get the next base,
so a launch that was drained or failed half way cannot spoil the one after it.

Leaves in the sense of `tilestream.core.integers`, but for `next_base`, which only the host computes: bases grow for
ever, so counters are 64-bit words, and what a worker counts in 31 bits is the difference to its launch's base.
"""

from __future__ import annotations

#: Queues that `rank` tells apart.
MOST_QUEUES = 1024


def home_queue(worker: int, queues: int) -> int:
    """The queue a worker calls its own.

    Neighbouring program ids land on different XCDs of an AMD GPU: with as many queues, an XCD has a queue of its own.
    """
    return worker % queues


def neighbour(worker: int, workers: int, groups: int) -> int:
    """Worker ``worker``'s number where workers of one group are neighbours: a bijection on [0, workers).

    Program ids go round the ``groups`` XCDs of an AMD GPU, each with an L2 of its own. Where positions go by the
    worker's number (``static``), those of one XCD are so brought next to each other, and share what they read.
    """
    group = worker % groups
    return (workers // groups) * group + min(group, workers % groups) + worker // groups


def left(size: int, taken: int) -> int:
    """Tickets still valid in a queue of ``size`` of which ``taken`` (void ones included) were handed out."""
    return size - min(size, taken)


def rank(queue_left: int, queue: int, home: int) -> int:
    """How good a victim a queue is, of `MOST_QUEUES` at most: the fullest is the best; see `ranked`.

    Of queues that are as full as each other the workers of each ``home`` prefer another one: many look at the same
    time, and of those who go to the same queue most come too late. Multiplying by an odd number mixes low bits into
    high ones, by which is compared, and can be undone: ``633 * 969 % 1024 == 1``.
    """
    return min(queue_left, 1048576) * 1024 + (queue ^ home) * 633 % 1024


def ranked(best: int, home: int) -> tuple[int, int]:
    """``(queue, some)``: the queue of this rank for ``home``, and whether there is anything left in it: 1 or 0."""
    return (best % 1024 * 969 % 1024) ^ home, min(best // 1024, 1)


def next_base(base: int, size: int, workers: int) -> int:
    """First value of the counter that no worker of the launch counting from ``base`` can have reached.

    A worker that draws a void ticket from a queue never asks that queue again, so ``workers`` bounds the void tickets.
    """
    return base + size + workers
