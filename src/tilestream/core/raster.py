"""Rasters: the order of the tiles of a ``num_m`` x ``num_n`` grid, as arithmetic on the position ``t``.

Each is a bijection from positions [0, num_m * num_n) to tiles ``(pm, pn)`` (invariant 3, *In range*), and a leaf in
the sense of `tilestream.core.integers`.

What each is for:

=================  =====================================================================================
``row_major``      as the output lies in memory; the plain one to compare with
``grouped``        groups of row tiles swept column by column, so that A's group and B's column stay in L2
``chunk_major``    all tiles of the pivot's chunk, then of the next, wrapping around; grouped inside a chunk
``longest_first``  rows from the last to the first, columns in groups: causal attention, where cost grows with the row
=================  =====================================================================================
"""

from __future__ import annotations


def row_major(t: int, num_m: int, num_n: int) -> tuple[int, int]:
    """Tile at position ``t``, rows outside, columns inside."""
    return t // num_n, t % num_n


def grouped(t: int, num_m: int, num_n: int, group: int) -> tuple[int, int]:
    """Tile at position ``t``: ``group`` row tiles at a time, columns outside, rows inside; the last group is short."""
    per_group = group * num_n
    g = t // per_group
    r = t % per_group
    rows = min(group, num_m - g * group)
    return g * group + r % rows, r // rows


def chunk_major(t: int, num_m: int, num_n: int, first: int, band: int, group: int) -> tuple[int, int]:
    """Tile at position ``t``: bands of ``band`` row tiles, the band that begins at row tile ``first`` first.

    Row tiles [first, num_m) come before [0, first). Each of the two stretches is cut into bands of its own, so that no
    band holds both the last chunk's tail and the first chunk: with 5 row tiles, bands of 2 and first = 2 the bands are
    (2, 3), (4), (0, 1). Inside a band, `grouped` with ``group``: a band of many row tiles swept column by column
    falls out of L2.

    Parameters
    ----------
    first
        Row tile the raster starts from, in [0, num_m): see `tilestream.core.chunks.pivot_tile`.
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
    """Tile at position ``t``: ``group`` columns at a time, and in each group the rows from the last to the first.

    For work that grows with the row (causal attention: rows are query blocks, columns are heads): the longest item of
    a group comes first, so that none is left for the end, and a group's heads share their K and V in L2.
    ``group = num_n`` is longest first over everything.
    """
    per_group = group * num_m
    g = t // per_group
    r = t % per_group
    cols = min(group, num_n - g * group)
    return num_m - 1 - r // cols, g * group + r % cols
