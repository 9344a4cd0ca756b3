"""Publishing on the CPU: each chunk of the output's rows is signalled when all its tiles are complete.

It performs the operations of `core.loop.publish`: a worker counts the rows of its tile, and the worker that completes a
chunk's count signals the chunk. Chunks have any sizes, and are chunks of the rows of all batches.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from tilestream.core.chunks import Chunks
from tilestream.core.grid import Grid, WorkItem
from tilestream.core.loop import Announce, CountRows, Landed, Share, publish


class Publisher:
    """The counts of one launch.

    Parameters
    ----------
    chunks
        Chunks of the output's rows, batch after batch.
    grid, block_m, m
        The launch's tiles, the rows of one, and the rows of a batch.
    announce
        Signals a chunk. A reader that sees the signal sees the worker's earlier stores.
    """

    def __init__(self, chunks: Chunks, grid: Grid, block_m: int, m: int, announce: Callable[[int], None]) -> None:
        self._chunks, self._columns, self._block_m, self._m = chunks, grid.num_n, block_m, m
        self._counts, self._announced = [0] * chunks.count, [False] * chunks.count
        self._announce, self._lock = announce, threading.Lock()

    def stored(self, item: WorkItem) -> None:
        """Count the tile of ``item``, which is complete."""
        turn = publish(item.tile, self._shares(item))
        with contextlib.suppress(StopIteration):
            operation = next(turn)
            while True:
                operation = turn.send(self._perform(operation))

    def finish(self) -> None:
        """Signal the chunks without a tile, once all of the output is complete."""
        for chunk, done in enumerate(self._announced):
            if not done:
                self._perform(Announce(chunk))

    def _shares(self, item: WorkItem) -> Iterator[Share]:
        begin = item.batch * self._m + item.pm * self._block_m
        end = min(begin + self._block_m, (item.batch + 1) * self._m)
        for chunk in self._chunks.of_rows(begin, end):
            first, last = self._chunks.range_of(chunk)
            yield Share(chunk, min(end, last) - max(begin, first), (last - first) * self._columns)

    def _perform(self, operation: object) -> int:
        if isinstance(operation, Landed):
            return 0  # a store of the CPU is complete when the next statement runs
        if isinstance(operation, CountRows):
            with self._lock:
                before = self._counts[operation.chunk]
                self._counts[operation.chunk] = before + operation.rows
            return before
        if isinstance(operation, Announce):
            self._announced[operation.chunk] = True
            self._announce(operation.chunk)
        return 0  # RestoreRows: the next launch has counts of its own
