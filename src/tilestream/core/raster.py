"""Rasters: the order of the tiles of a ``num_m`` x ``num_n`` grid, as arithmetic on the position ``t``.

Each is a bijection from the positions [0, num_m * num_n) to the tiles ``(pm, pn)`` (invariant 3, *In range*), and a
leaf in the sense of `tilestream.core.integers`. They are:

=================  =====================================================================================
``row_major``      in the order of memory; the baseline of comparisons
``grouped``        groups of row tiles swept column by column, so that A's group and B's column stay in L2
``chunk_major``    all tiles of the pivot's chunk, then of the next, wrapping around; grouped inside a chunk
``longest_first``  rows from the last to the first, columns in groups: causal attention, where cost grows with the row
=================  =====================================================================================
"""

from __future__ import annotations


def row_major(t: int, num_m: int, num_n: int) -> tuple[int, int]:
    """Tile at position ``t``, row by row."""
    return t // num_n, t % num_n


def grouped(t: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    """Tile at position ``t``: groups of ``group`` row tiles, column by column; the last group may be shorter."""
    per_group = group * num_n
    g = t // per_group
    r = t % per_group
    rows = min(group, num_m - g * group)
    return g * group + r % rows, r // rows


def chunk_major(t: int, num_m: int, num_n: int, first: int, band: int, group: int) -> tuple[int, int]:
    """Tile at position ``t``: bands of ``band`` row tiles, starting at row tile ``first``.

    Row tiles [first, num_m) come before [0, first). Each of the two ranges is cut into bands separately, so that no
    band has both the last chunk's tail and the first chunk: with 5 row tiles, bands of 2 and first = 2 the bands are
    (2, 3), (4), (0, 1). The order inside a band is `grouped` with ``group``, since a whole band may exceed L2.

    Parameters
    ----------
    first
        The first row tile, in [0, num_m): see `tilestream.core.chunks.pivot_tile`.
    band
        Row tiles per chunk, at least 1.
    group
        Row tiles per group inside a band, at least 1.
    """
    head = (num_m - first) * num_n
    if t < head:
        base = first
        rows = num_m - first
        r = t
    else:
        base = 0
        rows = first
        r = t - head
    b = r // (band * num_n)
    r = r % (band * num_n)
    rows = min(band, rows - b * band)
    g = r // (group * num_n)
    r = r % (group * num_n)
    rows = min(group, rows - g * group)
    return base + b * band + g * group + r % rows, r // rows


def longest_first(t: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    """Tile at position ``t``: groups of ``group`` columns, in each group the rows from the last to the first.

    It is for work that grows with the row (causal attention: rows are query blocks, columns are heads). A group's
    longest items come first, so that none is left for the end, and its heads share K and V in L2. ``group = num_n`` is
    longest first over all tiles.
    """
    per_group = group * num_m
    g = t // per_group
    r = t % per_group
    cols = min(group, num_n - g * group)
    return num_m - 1 - r // cols, g * group + r % cols
