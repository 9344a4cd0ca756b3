"""What hypothesis draws: grids, rasters, schedules, chunks; small ones, and large ones up to the edge of 31 bits."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from tilestream.core.chunks import Chunks
from tilestream.schedule import Grid, Raster, Schedule, table_raster

TOP = 2**31 - 1

seeds = st.integers(0, 2**32)


@st.composite
def int31(draw, least: int = 0, most: int = TOP) -> int:
    """An integer in [least, most], as often near a power of two or an end as anywhere; of any magnitude."""
    bits = draw(st.integers(0, 31))
    value = (1 << bits) + draw(st.integers(-3, 3)) if draw(st.booleans()) else draw(st.integers(0, 1 << bits))
    value = most - value if draw(st.booleans()) else least + value
    return min(max(value, least), most)


@st.composite
def planes(draw) -> tuple[int, int]:
    """``num_m`` x ``num_n`` tiles, of any proportions, fewer than 2**31 in all."""
    num_m = draw(int31(1))
    num_n = draw(int31(1, TOP // num_m))
    return (num_m, num_n) if draw(st.booleans()) else (num_n, num_m)


@st.composite
def rasters(draw, grid: Grid, tables: bool = True) -> Raster:
    orders = ["row_major", "grouped", "chunk_major", "longest_first"] + ["table"] * tables
    order = draw(st.sampled_from(orders))
    if order == "table":
        return table_raster(draw(st.permutations(range(grid.plane))), grid.num_m, grid.num_n)
    transposed = draw(st.booleans())
    outer = grid.num_n if transposed else grid.num_m
    first = draw(st.integers(0, max(outer - 1, 0))) if order == "chunk_major" else 0
    return Raster(order, draw(st.integers(1, 5)), first, draw(st.integers(1, 5)), transposed)


@st.composite
def small_grids(draw, most_tiles: int = 48) -> Grid:
    grid = Grid(*(draw(st.integers(0 if dim else 1, 9)) for dim in range(3)), draw(st.integers(1, 6)))
    assume(grid.tiles <= most_tiles)
    return grid


@st.composite
def schedules(draw, *kinds: str) -> Schedule:
    """Any schedule of a small grid, of one of ``kinds``."""
    kind = draw(st.sampled_from(kinds))
    grid = draw(small_grids())
    raster = draw(rasters(grid))
    workers, first = draw(st.integers(1, 9)), draw(st.integers(0, 2))
    if kind == "stream_k":
        return Schedule(kind, grid, raster, workers, shares=draw(st.integers(0, 12)), first_batch=first)
    if kind == "static":
        return Schedule(kind, grid, raster, workers, first_batch=first)
    splits = ["items"]
    if raster.order != "table":
        if not (raster.order == "chunk_major" and raster.transposed):
            splits.append("columns")
        if not (raster.order == "chunk_major" and not raster.transposed):
            splits.append("rows")
    queues, split = draw(st.integers(1, 11)), draw(st.sampled_from(splits))
    return Schedule(kind, grid, raster, workers, queues, split, first_batch=first)


@st.composite
def chunkings(draw, rows: int, most: int = 8) -> Chunks:
    """``rows`` rows in uniform chunks, or in ragged ones, some of them empty."""
    if draw(st.booleans()):
        return Chunks.uniform(rows, draw(st.integers(max(1, -(-rows // most)), max(1, rows + 2))))
    cuts = draw(st.lists(st.integers(0, rows), max_size=most - 1))
    return Chunks((0, *sorted(cuts), rows))
