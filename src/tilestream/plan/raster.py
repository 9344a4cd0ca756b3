"""Raster, first batch and queues of a problem whose operands may arrive, for all backends' policies."""

from __future__ import annotations

import functools

from tilestream.core.grid import Grid
from tilestream.core.order import Raster, TileOrder, by_arrival, table_raster
from tilestream.core.queues import MOST_QUEUES
from tilestream.core.schedule import Kind, Split
from tilestream.plan.problem import Incoming, Problem


def raster_of(
    problem: Problem, grid: Grid, block: tuple[int, int, int], group: int, order: TileOrder | None = None
) -> Raster:
    """The caller's ``order``, or chunks outermost from the pivot if they arrive or are published, or groups of rows."""
    if order is not None:
        return table_raster(order, grid.num_m, grid.num_n)
    # Batches share one raster, but begin inside different chunks. So only the batches begin at the pivot's.
    if (problem.rows is not None and problem.row_of_batch) or (problem.publishes is not None and problem.batch > 1):
        return Raster("chunk_major", group=group, band=1)
    if problem.rows is not None and grid.num_m:
        return _by_chunks(problem.rows, problem.m, block[0], grid.num_m, grid.num_n, group)
    if problem.columns is not None and grid.num_n:
        return _by_chunks(problem.columns, problem.n, block[1], grid.num_n, grid.num_m, group, transposed=True)
    if problem.publishes is not None and grid.num_m:
        return _by_chunks(problem.publishes, problem.m, block[0], grid.num_m, grid.num_n, group, first=True)
    return _grouped(group)


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


def _by_chunks(
    incoming: Incoming, rows: int, block: int, num: int, others: int, group: int, *, transposed: bool = False,
    first: bool = False,
) -> Raster:  # fmt: skip
    """A chunk-major raster from the pivot: by arithmetic if chunks are whole numbers of tiles, else by a table.

    A tile of several chunks is ranked with the last of them, for which it waits. If ``first``, it is ranked with the
    first of them, which is published only after the tile.
    """
    chunks, pivot = incoming.chunks, incoming.pivot
    if chunks.rows_per_chunk and chunks.rows_per_chunk % block == 0:
        begin = chunks.pivot_tile(pivot, block, num)
        return Raster("chunk_major", group, begin, min(chunks.rows_per_chunk // block, num), transposed)
    needs = [chunks.of_rows(tile * block, min(rows, (tile + 1) * block)) for tile in range(num)]
    of_tile = min if first else max
    # Tiles with one last chunk but different sets of chunks are ranked apart: in arrival order each set is a queue.
    when = [(of_tile((chunk - pivot) % chunks.count for chunk in need), () if first else need) for need in needs]
    ranks = {key: rank for rank, key in enumerate(sorted(set(when)))}
    return by_arrival([ranks[key] for key in when], others, group, transposed)


def split_of(raster: Raster) -> Split:
    """The split among several queues: the dimension that does not arrive, so that a late chunk idles no queue."""
    if raster.order == "table":
        return "items"
    return "rows" if raster.transposed else "columns"


def queues_of(problem: Problem, kind: Kind, forced: int | None, raster: Raster, workers: int) -> tuple[int, Split]:
    """The number of queues, and their split: a queue for each worker, with that worker's tiles of a static grid.

    Neighbouring SMs then work on neighbouring tiles and share the operands in L2. The tickets of a single queue soon
    reach SMs in random order. If chunks arrive there is one queue, because a worker's own could wait for a late chunk.
    """
    if kind != "dynamic":
        return 1, "items"
    if forced is not None:
        return forced, split_of(raster)
    if problem.arriving or workers == 1 or workers > MOST_QUEUES:
        return 1, "items"
    return workers, "strides"
