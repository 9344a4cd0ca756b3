"""`Raster`: an order of `tilestream.core.raster`, or a table, which the host chooses and checks."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tilestream.core import raster as rasters
from tilestream.core.grid import INT31, Grid

Order = Literal["row_major", "grouped", "chunk_major", "longest_first", "table"]
ORDERS = get_args(Order)

#: A caller's own order: a function ``(t, num_m, num_n) -> (pm, pn)``, or a list of the tiles, as pairs ``(pm, pn)`` or
#: as ids ``pm * num_n + pn``.
TileOrder = Callable[[int, int, int], tuple[int, int]] | Sequence[int] | Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Raster:
    """The order in which a schedule goes through the tiles of one batch.

    Parameters
    ----------
    order
        Which function of `tilestream.core.raster`, or ``"table"``.
    group
        Row tiles (``longest_first``: columns) per group.
    first, band
        ``chunk_major``: the first row tile, and row tiles per chunk.
    transposed
        Whether rows and columns are swapped, for a problem whose columns arrive (a weight's rows).
    table
        ``"table"``: tile ids ``pm * num_n + pn`` by position.
    """

    order: Order = "row_major"
    group: int = 1
    first: int = 0
    band: int = 1
    transposed: bool = False
    table: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"Raster: order={self.order!r}; it must be one of {', '.join(ORDERS)}")
        if self.order == "table" and self.transposed:
            raise ValueError("Raster: transposed=True with a table; write the table in the order that is meant")
        for name, least in (("group", 1), ("band", 1), ("first", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"Raster: {name}={getattr(self, name)}; it must be at least {least}")
        if (self.order == "table") != (self.table is not None):
            raise ValueError("Raster: a table goes with order='table', and only with it")

    def check(self, grid: Grid) -> None:
        """Raise `ValueError` unless this raster is a bijection on the tiles of ``grid`` (invariant 3)."""
        rows = grid.num_n if self.transposed else grid.num_m
        if self.order == "chunk_major" and grid.plane and self.first >= rows:
            raise ValueError(f"Raster: first={self.first}; the pivot's row tile is one of the {rows} there are")
        widest = max(self.group, self.band) * (rows if self.order == "longest_first" else grid.plane // max(rows, 1))
        if self.order in ("grouped", "chunk_major", "longest_first") and widest >= INT31:
            raise ValueError(
                f"Raster: group={self.group}, band={self.band} for {grid.num_m} x {grid.num_n} tiles; a group's and a "
                "band's tiles are counted in 31 bits: take no more rows than there are"
            )
        if self.table is not None and sorted(self.table) != list(range(grid.plane)):
            raise ValueError(_not_a_permutation(self.table, grid))

    def tile(self, t: int, num_m: int, num_n: int) -> tuple[int, int]:
        """The tile ``(pm, pn)`` at position ``t`` of a ``num_m`` x ``num_n`` grid."""
        rows, columns = (num_n, num_m) if self.transposed else (num_m, num_n)
        if self.table is not None:
            at = self.table[t] // columns, self.table[t] % columns
        elif self.order == "chunk_major":
            at = rasters.chunk_major(t, rows, columns, self.first, self.band, self.group)
        elif self.order == "grouped":
            at = rasters.grouped(t, rows, columns, self.group)
        elif self.order == "longest_first":
            at = rasters.longest_first(t, rows, columns, self.group)
        else:
            at = rasters.row_major(t, rows, columns)
        return (at[1], at[0]) if self.transposed else at


#: The simplest order.
ROW_MAJOR = Raster()


def table_raster(order: TileOrder, num_m: int, num_n: int) -> Raster:
    """A caller's own tile order as a `Raster`.

    Parameters
    ----------
    order
        See `TileOrder`. A function is called once for each position.

    Raises
    ------
    ValueError
        Unless the order has each tile of the grid exactly once.
    TypeError
        If ``order`` is neither a function nor a list of ids or pairs.
    """
    tiles: Iterable[object] = order if not callable(order) else (order(t, num_m, num_n) for t in range(num_m * num_n))
    raster = Raster("table", table=tuple(_tile_id(tile, num_m, num_n) for tile in tiles))
    raster.check(Grid(1, num_m, num_n))
    return raster


def by_arrival(ready: Sequence[int], others: int, group: int, transposed: bool = False) -> Raster:
    """The tiles in the order in which their rows arrive, as a table, for chunks that `raster.chunk_major` cannot do.

    That raster needs chunks of a whole number of row tiles. In ragged chunks, or chunks that end inside a tile, a row
    tile follows the last chunk that it reads.

    Parameters
    ----------
    ready
        For each row tile, a number that grows with the time at which its last chunk arrives.
    others
        Number of column tiles.
    group
        Row tiles per group inside a chunk, as in `raster.grouped`.
    transposed
        Whether ``ready`` is for column tiles, and ``others`` counts row tiles.
    """
    table: list[int] = []
    rows = sorted(range(len(ready)), key=lambda row: (ready[row], row))
    for _, chunk in itertools.groupby(rows, key=lambda row: ready[row]):
        band = list(chunk)
        for first in range(0, len(band), group):  # as `raster.grouped`
            near = band[first : first + group]
            if transposed:
                table += [other * len(ready) + row for other in range(others) for row in near]
            else:
                table += [row * others + other for other in range(others) for row in near]
    return Raster("table", table=tuple(table))


def by_cost(costs: Sequence[float]) -> tuple[int, ...]:
    """Tile ids from the most to the least costly, ties by id. For costs that do not depend on the row alone."""
    return tuple(sorted(range(len(costs)), key=lambda i: (-costs[i], i)))


def _tile_id(tile: object, num_m: int, num_n: int) -> int:
    if hasattr(tile, "__index__"):
        return operator.index(tile)
    if isinstance(tile, tuple | list) and len(tile) == 2:
        pm, pn = tile
        if not (0 <= pm < num_m and 0 <= pn < num_n):
            raise ValueError(f"order: tile {(pm, pn)}; the grid has {num_m} x {num_n} tiles")
        return int(pm * num_n + pn)
    raise TypeError(f"order: {tile!r}; a tile is an id pm * num_n + pn or a pair (pm, pn)")


def _not_a_permutation(table: Sequence[int], grid: Grid) -> str:
    outside = [x for x in table if not 0 <= x < grid.plane]
    missing = sorted(set(range(grid.plane)) - set(table))
    twice = sorted({x for x in table if table.count(x) > 1}) if len(table) <= 4096 else []
    what = [f"{len(table)} entries"]
    what += [f"{name} {ids[:4]}" for name, ids in (("outside", outside), ("missing", missing), ("twice", twice)) if ids]
    return (
        f"order: {'; '.join(what)}; each of the {grid.num_m} x {grid.num_n} tiles (ids 0 to {grid.plane - 1}) "
        "comes exactly once"
    )
