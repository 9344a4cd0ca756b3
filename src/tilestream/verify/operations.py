"""Operations that only other programs than `tilestream.kernels.loop.work` use: the seeded bugs, and counters that clear themselves."""

from __future__ import annotations

from typing import NamedTuple

from tilestream.schedule import WorkItem


class Store(NamedTuple):
    """Write a queue's counter, plainly. No answer."""

    queue: int
    value: int


class Leave(NamedTuple):
    """Count a worker that leaves. Answer: how many had left before."""


class Add(NamedTuple):
    """A partial result is visible: add one to the tile's count, and restore nothing. Answer: the count before."""

    item: WorkItem


class AwaitCount(NamedTuple):
    """Spin until the count of the item's tile is ``count``, watching nothing else. Answered when it is."""

    item: WorkItem
    count: int


class AwaitTile(NamedTuple):
    """Spin until a tile is finished, watching nothing else. Answered when it is."""

    tile: int


class WaitForever(NamedTuple):
    """Wait for a chunk with neither deadline nor abort word. Answered when it has arrived."""

    operand: int
    chunk: int
