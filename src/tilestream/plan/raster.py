"""Raster, first batch and queues of a problem whose operands may arrive, for all backends' policies."""

from __future__ import annotations

import functools
from typing import NamedTuple

from tilestream.core.grid import Grid
from tilestream.core.order import Raster, TileOrder, by_arrival, table_raster
from tilestream.core.queues import MOST_QUEUES
from tilestream.core.schedule import Kind, Split
from tilestream.plan.problem import Incoming, Problem


class _Cut(NamedTuple):
    """The chunks of the output's rows (``dimension`` 0) or columns (1) that a raster goes by."""

    incoming: Incoming
    extent: int
    dimension: int
    published: bool = False

    def is_whole(self, block: tuple[int, int, int]) -> bool:
        """Whether the chunks are whole numbers of tiles, so that a raster of them is arithmetic."""
        rows = self.incoming.chunks.rows_per_chunk
        return rows > 0 and rows % block[self.dimension] == 0


def _cut_of(problem: Problem) -> _Cut | None:
    if problem.rows is not None and problem.m:
        return _Cut(problem.rows, problem.m, 0)
    if problem.columns is not None and problem.n:
        return _Cut(problem.columns, problem.n, 1)
    if problem.publishes is not None and problem.m:
        return _Cut(problem.publishes, problem.m, 0, published=True)
    return None


def _of_batches(problem: Problem) -> bool:
    """Whether chunks are of several batches, which share one raster, but begin inside different chunks."""
    return bool(problem.rows is not None and problem.row_of_batch) or (
        problem.publishes is not None and problem.batch > 1
    )


def raster_of(
    problem: Problem, grid: Grid, block: tuple[int, int, int], group: int, order: TileOrder | None = None
) -> Raster:
    """The caller's ``order``, or chunks outermost from the pivot if they arrive or are published, or groups of rows."""
    if order is not None:
        return table_raster(order, grid.num_m, grid.num_n)
    if _of_batches(problem):  # only the batches begin at the pivot's
        return Raster("chunk_major", group=group, band=1)
    cut = _cut_of(problem)
    return _grouped(group) if cut is None else _by_chunks(cut, block, grid, group)


def group_in(problem: Problem, block: tuple[int, int, int], group: int) -> int:
    """The group of the raster that `raster_of` makes without a caller's order: 1 if that is a table.

    It is known without the raster. A table takes up to 10 ms to make.
    """
    cut = _cut_of(problem)
    return group if cut is None or cut.is_whole(block) or _of_batches(problem) else 1


@functools.cache
def _grouped(group: int) -> Raster:
    return Raster("grouped", group=group)


def first_batch_of(problem: Problem) -> int:
    """The first batch of a schedule: the batch of the pivot's first row."""
    cut = problem.rows if problem.row_of_batch and problem.rows is not None else problem.publishes
    if cut is None or not problem.m:
        return 0
    row, _ = cut.chunks.range_of(cut.pivot)
    return min(row // problem.m, problem.batch - 1)


def _by_chunks(cut: _Cut, block: tuple[int, int, int], grid: Grid, group: int) -> Raster:
    """A chunk-major raster from the pivot: by arithmetic if chunks are whole numbers of tiles, else by a table.

    A tile of several chunks is ranked with the last of them, for which it waits. Where chunks are published it is
    ranked with the first of them, which is published only after the tile.
    """
    chunks, pivot, rows, size = cut.incoming.chunks, cut.incoming.pivot, cut.extent, block[cut.dimension]
    num, others = (grid.num_n, grid.num_m) if cut.dimension else (grid.num_m, grid.num_n)
    transposed = cut.dimension == 1
    if cut.is_whole(block):
        begin = chunks.pivot_tile(pivot, size, num)
        return Raster("chunk_major", group, begin, min(chunks.rows_per_chunk // size, num), transposed)
    needs = [chunks.of_rows(tile * size, min(rows, (tile + 1) * size)) for tile in range(num)]
    of_tile = min if cut.published else max
    # Tiles with one last chunk but different sets of chunks are ranked apart: in arrival order each set is a queue.
    when = [
        (of_tile((chunk - pivot) % chunks.count for chunk in need), () if cut.published else need) for need in needs
    ]
    ranks = {key: rank for rank, key in enumerate(sorted(set(when)))}
    return by_arrival([ranks[key] for key in when], others, group, transposed)


def split_of(raster: Raster) -> Split:
    """The split among several queues: the dimension that does not arrive, so that a late chunk idles no queue."""
    if raster.order == "table":
        return "items"
    return "rows" if raster.transposed else "columns"


def has_own_queues(problem: Problem, forced: int | None, workers: int) -> bool:
    """Whether each worker of a dynamic schedule has a queue, with that worker's tiles of a static grid.

    Neighbouring SMs then work on neighbouring tiles and share the operands in L2. The tickets of a single queue soon
    reach SMs in random order. If chunks arrive there is one queue, because a worker's own could wait for a late chunk.
    """
    return forced is None and 1 < workers <= MOST_QUEUES and not problem.arriving


def queues_of(problem: Problem, kind: Kind, forced: int | None, raster: Raster, workers: int) -> tuple[int, Split]:
    """The number of queues, and their split: those that are forced, one for each worker, or one."""
    if kind != "dynamic":
        return 1, "items"
    if forced is not None:
        return forced, split_of(raster)
    return (workers, "strides") if has_own_queues(problem, forced, workers) else (1, "items")
