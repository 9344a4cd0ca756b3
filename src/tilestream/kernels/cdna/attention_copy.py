"""The copies of CDNA's attention: queries into registers, key blocks into the ring of `tilestream.kernels.cdna.ring`.

A head's columns are cut into parts of a power of two, each of which is a tile (`Columns`, here ``F``): 192 columns are
three parts of 64. Rows of queries and keys have one length, rows of values may have another, and each has its own
swizzle. Past a head's last column the last part is zero in queries and keys, and undefined in values, where it is not
stored.

Only keys that some query of the tile sees, ``[low, high)`` of `Keys`, are read. In place of another key the nearest of
these is read again, and its scores are masked: keys that no row sees may be NaN.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.core.attention_structs import KeyCopies
from tilestream.kernels.cdna.attention_softmax import math_of
from tilestream.kernels.cdna.compat import as_loaded, barrier, commit, copy_to_shared, load_scalar
from tilestream.kernels.cdna.ring import (
    copy_layout,
    cut_off,
    fetch,
    fetch_layout,
    indices,
    landed,
    make_stages,
    operand,
    put,
    swizzled,
)

#: 16-bit elements of a cell, which a lane reads from shared memory, or fetches, at a time.
VECTOR: gl.constexpr = gl.constexpr(8)


@gluon.jit
def copied_columns(i, j, SWIZZLE: gl.constexpr):
    """The column that each lane copies past the registers: the inverse swizzle of the place that it writes."""
    cell = swizzled(i[:, None], (j // SWIZZLE[0])[None, :], SWIZZLE[1], SWIZZLE[2])
    return cell * SWIZZLE[0] + (j % SWIZZLE[0])[None, :]


@gluon.jit
def fetched_columns(i, j, COLUMNS: gl.constexpr, WIDTH: gl.constexpr):
    """The column of the part that each lane fetches into registers; past the last of ``COLUMNS``, the last cell."""
    cell = j // VECTOR
    if COLUMNS < WIDTH:
        cell = gl.minimum(cell, COLUMNS // VECTOR - 1)
    return (cell * VECTOR + j % VECTOR)[None, :] + i[:, None] * 0


@gluon.jit
def element_offsets(rows, columns, LANE: gl.constexpr):
    """Offsets of elements; a lane's ``LANE`` elements are neighbours, which the compiler cannot see by itself."""
    return gl.max_contiguous(gl.multiple_of(rows[:, None] + columns, [1, LANE]), [1, LANE])


@gluon.jit
def make_parts(dtype: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr):
    """Shared memory for the stages, separate for each part, so that accesses of different parts need no order."""
    parts = ()
    for _part in gl.static_range(PARTS):
        parts += (make_stages(dtype, STAGES, S),)
    return parts


@gluon.jit
def copies_past_registers(x, S: gl.constexpr, F: gl.constexpr, C: gl.constexpr):
    """`KeyCopies` of keys or values (`Rows`) for `copy_block`."""
    SWIZZLE: gl.constexpr = F.SWIZZLE
    stages = make_parts(x.at.dtype.element_ty, F.PARTS, C.STAGES, S)
    i, j = indices(copy_layout(F.WIDTH, F.LANE, C.WARPS), C.BLOCK, F.WIDTH)
    return KeyCopies(x, i, copied_columns(i, j, SWIZZLE), i, stages)


@gluon.jit
def copies_by_registers(x, stages, LAYOUT: gl.constexpr, F: gl.constexpr, C: gl.constexpr):
    """`KeyCopies` of keys or values (`Rows`) for `fetch_block`."""
    i, j = indices(LAYOUT, C.BLOCK, F.WIDTH)
    columns = fetched_columns(i, j, F.WIDTH, F.WIDTH)
    return KeyCopies(x, i, columns, fetched_columns(i, j, F.REST, F.WIDTH), stages)


@gluon.constexpr_function
def values_layout(config):
    """The layout in which a block of values is fetched into registers."""
    return fetch_layout(config.V.WIDTH, config.BLOCK, False, config.TRANSPOSED_V, VECTOR, config.WARPS)


@gluon.jit
def page_of(first, keys, C: gl.constexpr):
    """The page of the key block that begins at key ``first``; 0 without pages, or if the block spans several."""
    page = first * 0
    if C.PAGE >= C.BLOCK:
        page = gl.minimum(gl.maximum(load_scalar(keys.table + first // C.PAGE), 0), keys.pages - 1)
    return page


@gluon.jit
def entries_of(i, first, keys, page, C: gl.constexpr):
    """The page of each row if rows are gathered; else ``page``, that of all rows.

    A wait counts loads from the oldest on. An entry that were loaded after a block's fetches would be waited for with
    all of them. So it is loaded before them, one block ahead, and used when its rows are fetched.
    """
    if C.GATHERED:
        return gl.load(keys.table + gl.minimum(gl.maximum(first + i, keys.low), keys.high - 1) // C.PAGE)
    else:
        return page


@gluon.jit
def block_start(x, first, page, C: gl.constexpr):
    """The origin of the row offsets of a key block of ``x`` (`Rows`): see `block_rows`."""
    at = x.at
    if C.PAGE == 0:
        at = at + first.to(tl.int64) * x.row
    elif C.PAGE >= C.BLOCK:
        at = at + page.to(tl.int64) * x.batch + (first % C.PAGE).to(tl.int64) * x.row
    return gl.multiple_of(at, 16)


@gluon.jit
def block_rows(x, i, first, keys, page, OFFSETS_64BIT: gl.constexpr, C: gl.constexpr):
    """The offset, from `block_start`, of row ``i`` of the key block from ``first`` on. ``page``: see `entries_of`."""
    key = gl.minimum(gl.maximum(first + i, keys.low), keys.high - 1)
    if C.GATHERED:
        page = gl.minimum(gl.maximum(as_loaded(page), 0), keys.pages - 1)
        return page.to(tl.int64) * x.batch + (key % C.PAGE).to(tl.int64) * x.row
    else:
        row = key - first
        if OFFSETS_64BIT:
            row = row.to(tl.int64)
        return row * x.row


@gluon.jit
def copy_block(copies, first, keys, page, stage, F: gl.constexpr, C: gl.constexpr):
    """Start the copies of K or V of the key block from key ``first`` on into a stage."""
    PARTS: gl.constexpr = F.PARTS
    at = block_start(copies.x, first, page, C)
    rows = block_rows(copies.x, copies.i, first, keys, page, False, C)
    offsets = element_offsets(rows, copies.columns, F.LANE)
    for part in gl.static_range(PARTS):
        copy_to_shared(copies.stages[part].index(stage), at + part * F.WIDTH, offsets)


@gluon.jit
def fetch_block(copies, first, keys, page, LANE: gl.constexpr, F: gl.constexpr, C: gl.constexpr):
    """Fetch K or V of a key block into registers, in parts.

    ``page``: see `entries_of`. ``LANE``: elements of a lane.
    """
    PARTS: gl.constexpr = F.PARTS
    ANYWHERE: gl.constexpr = C.KEYS_64BIT or C.GATHERED
    at = block_start(copies.x, first, page, C)
    rows = block_rows(copies.x, copies.i, first, keys, page, C.KEYS_64BIT, C)
    tiles = ()
    for part in gl.static_range(PARTS - 1):
        tiles += (fetch(at + part * F.WIDTH, element_offsets(rows, copies.columns, LANE), ANYWHERE),)
    tiles += (fetch(at + (F.PARTS - 1) * F.WIDTH, element_offsets(rows, copies.rest, LANE), ANYWHERE),)
    return tiles


@gluon.jit
def put_keys(tiles, stages, C: gl.constexpr):
    """Write a fetched block of keys to its stage, with zeros past the last column."""
    F: gl.constexpr = C.K
    S: gl.constexpr = C.KEY_STAGE
    PARTS: gl.constexpr = F.PARTS
    for part in gl.static_range(PARTS):
        tile = tiles[part]
        if part == F.PARTS - 1 and F.REST < F.WIDTH:
            tile = cut_off(as_loaded(tile), F.REST, S)
        put(tile, stages[part].index(0), S)


@gluon.jit
def put_values(tiles, stages, C: gl.constexpr):
    """Write a fetched block of values to its stage, transposed if it cannot be read transposed."""
    S: gl.constexpr = C.VALUE_STAGE
    PARTS: gl.constexpr = C.V.PARTS
    for part in gl.static_range(PARTS):
        tile = tiles[part]
        if S.TURNED:
            tile = as_loaded(tile)
        put(tile, stages[part].index(0), S)


@gluon.jit
def query_rows(q, i, last, OFFSETS_64BIT: gl.constexpr, C: gl.constexpr):
    """Offsets of a tile's rows of ``q`` (`Rows`); the heads of a position are neighbours. Past ``last``: that again."""
    position = gl.minimum(i // C.PACK, last)
    head = i % C.PACK
    if OFFSETS_64BIT:
        position = position.to(tl.int64)
        head = head.to(tl.int64)
    return position * q.row + head * q.head


@gluon.jit
def as_operand(tile, COLUMNS: gl.constexpr, C: gl.constexpr):
    """A part of queries with ``COLUMNS`` columns, from the layout of its fetch to that of an operand."""
    S: gl.constexpr = C.QUERY_STAGE
    if COLUMNS < S.K:
        tile = cut_off(tile, COLUMNS, S)
    stages = make_stages(tile.dtype, 1, S)
    put(tile, stages.index(0), S)
    return operand(stages.index(0), S, 0, math_of(C), VECTOR, False)


@gluon.jit
def load_queries(q, tile, last, C: gl.constexpr):
    """A tile's queries up to position ``last``, as operands of the multiplication, in parts.

    They go through shared memory, so that global memory is read in whole rows. All loads are in flight before the first
    wait. They use the memory of the stages, which are filled afterwards.
    """
    F: gl.constexpr = C.Q
    S: gl.constexpr = C.QUERY_STAGE
    SWIZZLE: gl.constexpr = F.SWIZZLE
    PARTS: gl.constexpr = F.PARTS
    row = (tile.origin_q + tile.first).to(tl.int64)
    at = q.at + tile.batch.to(tl.int64) * q.batch + row * q.row + (tile.head * C.PACK).to(tl.int64) * q.head
    at = gl.multiple_of(at, 16)
    parts = ()
    if C.DIRECT:
        i, j = indices(copy_layout(F.WIDTH, F.LANE, C.WARPS), C.ROWS, F.WIDTH)
        rows = query_rows(q, i, last, False, C)
        offsets = element_offsets(rows, copied_columns(i, j, SWIZZLE), F.LANE)
        stages = make_parts(q.at.dtype.element_ty, F.PARTS, 1, S)
        for part in gl.static_range(PARTS):
            copy_to_shared(stages[part].index(0), at + part * F.WIDTH, offsets)
        commit()
        landed(0)
        for part in gl.static_range(PARTS):
            parts += (operand(stages[part].index(0), S, 0, math_of(C), VECTOR, True),)
    else:
        LAYOUT: gl.constexpr = fetch_layout(C.ROWS, F.WIDTH, True, False, VECTOR, C.WARPS)
        i, j = indices(LAYOUT, C.ROWS, F.WIDTH)
        rows = query_rows(q, i, last, C.Q_64BIT, C)
        tiles = ()
        for part in gl.static_range(PARTS):
            columns = fetched_columns(i, j, F.REST if part == F.PARTS - 1 else F.WIDTH, F.WIDTH)
            offsets = element_offsets(rows, columns, VECTOR)
            tiles += (fetch(at + part * F.WIDTH, offsets, C.Q_64BIT),)
        for part in gl.static_range(PARTS):
            parts += (as_operand(tiles[part], F.REST if part == F.PARTS - 1 else F.WIDTH, C),)
    # Following copies need a barrier against waves that still read; puts have one in each block's loop.
    barrier()
    return parts
