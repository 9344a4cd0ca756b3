"""Operations that `tilestream.kernels.loop.work` has no use for, and others have: `clearing`, and the seeded bugs."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

from tilestream.arrival.gate import Gate
from tilestream.kernels.loop import WorkerState, work
from tilestream.schedule import Schedule, WorkItem


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
    """Spin until the count of the item's tile is ``wanted``, watching nothing else; then set it back to 0."""

    item: WorkItem
    wanted: int


class AwaitTile(NamedTuple):
    """Spin until a tile is finished, watching nothing else. Answered when it is."""

    tile: int


class WaitForever(NamedTuple):
    """Wait for a chunk with neither deadline nor abort word. Answered when it has arrived."""

    operand: int
    chunk: int


def clearing(
    schedule: Schedule, gate: Gate | None, worker: int, state: WorkerState
) -> Generator[Any, int, WorkerState | None]:
    """`work` for a launch that is captured in a graph: the last worker out, drained ones too, clears the counters."""
    after = yield from work(schedule, gate, worker, state)
    if after is None and (yield Leave()) == schedule.workers - 1:
        for queue in range(schedule.queues):
            yield Store(queue, 0)
    return after
