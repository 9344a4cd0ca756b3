"""Groups on the device: the number of tiles, and the rows (or K) of each tile.

``offsets`` has the end of each group. A group begins at the end of the previous one, the first at 0. The host does not
read them. A worker reads all of them at once, one a lane:

::

    before the first item:   row tiles of each group, added up: the grid of this launch    count_rows
    for each item:           behind[g] = row tiles of groups 0 to g;  pm is of the first with pm < behind   find_rows

If the groups' matrices of B arrive, those with most rows come first, and so do their tiles: `tiles_by_load`,
`find_loaded`.

Rows past the last group belong to none, and are zero in the output.

Offsets that fall, or that leave [0, extent], are invalid: then all rows form one group, whose result is NaN. So no
memory outside the operands is accessed, no worker counts more tiles than the host has planned for (invariant 4), and
the wrong result is visible.

``lane`` is int32 ``[LANES]``: 0, 1, ...; its layout is the caller's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core.structs import Span
from tilestream.kernels.device.schedule import cdiv


@triton.jit
def bounds(groups, lane):
    """``(begins, ends)`` of all groups. Lanes past the last group have an empty group."""
    begins = tl.load(groups.offsets + tl.minimum(lane, groups.count) - 1, mask=lane > 0, other=0)
    ends = tl.load(groups.offsets + tl.minimum(lane, groups.count - 1))
    return begins, ends


@triton.jit
def are_valid(begins, ends, extent):
    """1 if the offsets rise from 0 to at most ``extent``, else 0."""
    return tl.min(((begins >= 0) & (begins <= ends) & (ends <= extent)).to(tl.int32), 0)


@triton.jit
def count_rows(groups, lane, BLOCK: tl.constexpr):
    """``(tiles, last, valid)``: the number of row tiles; the end of the last group; whether the offsets are valid."""
    begins, ends = bounds(groups, lane)
    valid = are_valid(begins, ends, groups.extent)
    tiles = tl.where(valid != 0, tl.sum(cdiv(ends - begins, BLOCK), 0), cdiv(groups.extent, BLOCK))
    return tiles, tl.where(valid != 0, tl.max(ends, 0), groups.extent), valid


@triton.jit
def find_longest(groups, lane):
    """``(longest, valid)``: the longest group, to begin with it; whether the offsets are valid."""
    begins, ends = bounds(groups, lane)
    valid = are_valid(begins, ends, groups.extent)
    sizes = tl.where(valid != 0, ends - begins, 0)
    return tl.min(tl.where(sizes == tl.max(sizes, 0), lane, groups.count - 1), 0), valid


@triton.jit
def row_tiles(groups, lane, BLOCK: tl.constexpr):
    """``(behind, ends)``: for each group, the row tiles up to its end, and its end."""
    begins, ends = bounds(groups, lane)
    return tl.cumsum(cdiv(ends - begins, BLOCK), 0), ends


@triton.jit
def find_rows(pm, behind, ends, extent, valid):
    """``(span, pm)``: the group of row tile ``pm``, and the row tile's number in that group."""
    before = (behind <= pm) & (valid != 0)
    group = tl.sum(before.to(tl.int32), 0)
    first = tl.max(tl.where(before, behind, 0), 0)
    begin = tl.max(tl.where(before, ends, 0), 0)
    end = tl.min(tl.where(before | (valid == 0), extent, ends), 0)
    return Span(group, begin, end), pm - first


@triton.jit
def tiles_by_load(groups, lane, BLOCK: tl.constexpr):
    """Row tiles of each group and of those before it, in the order of `tilestream.core.groups.by_load`; 0: no rows."""
    begins, ends = bounds(groups, lane)
    size = ends - begins
    behind = cdiv(size, BLOCK)
    for other in range(groups.count):
        begin = tl.load(groups.offsets + other - 1, mask=other > 0, other=0)
        rows = tl.load(groups.offsets + other) - begin
        is_before = (rows > size) | ((rows == size) & (other < lane))
        behind += tl.where(is_before, cdiv(rows, BLOCK), 0)
    return tl.where(size > 0, behind, 0)


@triton.jit
def find_loaded(pm, behind, lane, groups, valid, BLOCK: tl.constexpr):
    """Like `find_rows`, with ``behind`` from `tiles_by_load`."""
    LAST: tl.constexpr = 2147483647
    end = tl.min(tl.where(behind > pm, behind, LAST), 0)
    group = tl.where(valid != 0, tl.sum(tl.where(behind == end, lane, 0), 0), 0)
    span = k_of_group(group, groups, valid)
    rows = span.end - span.begin
    first = tl.where(valid != 0, end - cdiv(rows, BLOCK), 0)
    return Span(group, span.begin, tl.where(valid != 0, span.end, groups.extent)), pm - first


@triton.jit
def k_of_group(group, groups, valid):
    """The `Span` of K of a group."""
    begin = tl.load(groups.offsets + group - 1, mask=group > 0, other=0)
    end = tl.load(groups.offsets + group)
    return Span(group, tl.where(valid != 0, begin, 0), tl.where(valid != 0, end, 0))
