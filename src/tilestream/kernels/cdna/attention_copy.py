"""The copies of CDNA's attention: queries into registers, key blocks into the ring of `tilestream.kernels.cdna.ring`.

A head's columns are cut into parts of a power of two, each a tile of its own: 192 columns are three parts of 64. So
queries and keys lie in rows of one length, values in rows of another, and each has its own swizzle. What is left of the
last part behind a head's last column is zeros in queries and keys, and anything in values: it is not stored.

Rows are read where some query of the tile sees the key, ``[low, high)``, and nowhere else: in place of the others the
nearest of these comes once more, and its scores are masked. What nobody sees may be NaN.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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

#: Elements of a cell, of 16 bits each: what a lane reads of shared memory, and fetches, in one go.
VECTOR: gl.constexpr = gl.constexpr(8)


@gluon.jit
def copied_columns(i, j, HOW: gl.constexpr):
    """Which column each lane copies past the registers: the inverse swizzle of where it writes."""
    cell = swizzled(i[:, None], (j // HOW[0])[None, :], HOW[1], HOW[2])
    return cell * HOW[0] + (j % HOW[0])[None, :]


@gluon.jit
def fetched_columns(i, j, COLUMNS: gl.constexpr, WIDTH: gl.constexpr):
    """Which column of its part each lane fetches into registers; behind the last of ``COLUMNS``, the last cell."""
    cell = j // VECTOR
    if COLUMNS < WIDTH:
        cell = gl.minimum(cell, COLUMNS // VECTOR - 1)
    return (cell * VECTOR + j % VECTOR)[None, :] + i[:, None] * 0


@gluon.jit
def element_offsets(rows, columns, LANE: gl.constexpr):
    """Offsets of elements, of which a lane's ``LANE`` are neighbours: no compiler sees that behind a permutation."""
    return gl.max_contiguous(gl.multiple_of(rows[:, None] + columns, [1, LANE]), [1, LANE])


@gluon.jit
def make_parts(dtype: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr,
               K_MAJOR: gl.constexpr):  # fmt: skip
    """Room for the stages of each part. Of its own: what is written to one part's is not kept from another's."""
    parts = ()
    for _part in gl.static_range(PARTS):
        parts += (make_stages(dtype, STAGES, ROWS, WIDTH, K_MAJOR),)
    return parts


@gluon.constexpr_function
def gathered(block, page):
    """Whether rows of a key block lie in several pages."""
    return 0 < page < block


@gluon.jit
def page_of(first, table, pages, BLOCK: gl.constexpr, PAGE: gl.constexpr):
    """The page that the key block from key ``first`` on lies in; 0 where it lies in none, or in several."""
    page = first * 0
    if PAGE >= BLOCK:
        page = gl.minimum(gl.maximum(load_scalar(table + first // PAGE), 0), pages - 1)
    return page


@gluon.jit
def entries_of(i, first, seen, page, table, BLOCK: gl.constexpr, PAGE: gl.constexpr):
    """What the table says of each row's page, where rows are gathered; else ``page``, that of all rows.

    A wait counts loads from the oldest on: an entry that is asked for behind a block's fetches, and needed by the next
    ones, would be waited for with all of them. So it is asked for before them, a block ahead, and looked at where the
    rows are fetched.
    """
    if gathered(BLOCK, PAGE):
        low, high = seen
        return gl.load(table + gl.minimum(gl.maximum(first + i, low), high - 1) // PAGE)
    else:
        return page


@gluon.jit
def block_start(x, first, stride, page, stride_page, BLOCK: gl.constexpr, PAGE: gl.constexpr):
    """Where the rows of a key block are counted from: see `block_rows`."""
    if PAGE == 0:
        x = x + first.to(tl.int64) * stride
    elif PAGE >= BLOCK:
        x = x + page.to(tl.int64) * stride_page + (first % PAGE).to(tl.int64) * stride
    return gl.multiple_of(x, 16)


@gluon.jit
def block_rows(
    i, first, seen, stride, pages, page, stride_page, BLOCK: gl.constexpr, PAGE: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    """Where row ``i`` of the key block from key ``first`` on lies, from `block_start`. ``page``: see `entries_of`."""
    low, high = seen
    key = gl.minimum(gl.maximum(first + i, low), high - 1)
    if gathered(BLOCK, PAGE):
        page = gl.minimum(gl.maximum(as_loaded(page), 0), pages - 1)
        return page.to(tl.int64) * stride_page + (key % PAGE).to(tl.int64) * stride
    else:
        row = key - first
        if FAR:
            row = row.to(tl.int64)
        return row * stride


@gluon.jit
def copy_block(
    source, first, seen, pages, page, stages, stage, FORM: gl.constexpr, BLOCK: gl.constexpr, PAGE: gl.constexpr
):  # fmt: skip
    """Start the copies of a key block, of K or of V, into a stage.

    Parameters
    ----------
    source
        ``(x, stride, stride_page, i, columns)``: the head's address; from row to row, and page to page; rows and
        columns of what each lane copies.
    seen
        ``(low, high)``.
    FORM
        ``(parts, width, rest, how, lane)``: parts of the columns, those of one, those of the last that there are;
        swizzle; elements of a lane in a copy past the registers.
    """
    PARTS: gl.constexpr = FORM[0]
    WIDTH: gl.constexpr = FORM[1]
    x, stride, stride_page, i, columns = source
    x = block_start(x, first, stride, page, stride_page, BLOCK, PAGE)
    rows = block_rows(i, first, seen, stride, pages, page, stride_page, BLOCK, PAGE, False)
    offsets = element_offsets(rows, columns, FORM[4])
    for part in gl.static_range(PARTS):
        copy_to_shared(stages[part].index(stage), x + part * WIDTH, offsets)


@gluon.jit
def fetch_block(
    source, rest_columns, first, seen, pages, page, FORM: gl.constexpr, BLOCK: gl.constexpr, PAGE: gl.constexpr,
    LANE: gl.constexpr, FAR: gl.constexpr,
):  # fmt: skip
    """A key block, of K or of V, into registers: its parts.

    ``page``: see `entries_of`. ``LANE``: elements of a lane; else as `copy_block`.
    """
    PARTS: gl.constexpr = FORM[0]
    WIDTH: gl.constexpr = FORM[1]
    x, stride, stride_page, i, columns = source
    ANYWHERE: gl.constexpr = FAR or gathered(BLOCK, PAGE)
    x = block_start(x, first, stride, page, stride_page, BLOCK, PAGE)
    rows = block_rows(i, first, seen, stride, pages, page, stride_page, BLOCK, PAGE, FAR)
    tiles = ()
    for part in gl.static_range(PARTS - 1):
        tiles += (fetch(x + part * WIDTH, element_offsets(rows, columns, LANE), ANYWHERE),)
    tiles += (fetch(x + (PARTS - 1) * WIDTH, element_offsets(rows, rest_columns, LANE), ANYWHERE),)
    return tiles


@gluon.jit
def put_keys(tiles, stages, FORM: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Write what was fetched of a block of keys to its stage, zeros behind the last column."""
    PARTS: gl.constexpr = FORM[0]
    WIDTH: gl.constexpr = FORM[1]
    HOW: gl.constexpr = FORM[3]
    for part in gl.static_range(PARTS):
        tile = tiles[part]
        if part == PARTS - 1 and FORM[2] < WIDTH:
            tile = cut_off(as_loaded(tile), FORM[2], BLOCK, WIDTH, True, False, VECTOR, WARPS)
        put(tile, stages[part].index(0), BLOCK, WIDTH, False, True, HOW)


@gluon.jit
def put_values(tiles, stages, FORM: gl.constexpr, BLOCK: gl.constexpr, TURNED: gl.constexpr):
    """Write what was fetched of a block of values to its stage, transposed where it cannot be read across."""
    PARTS: gl.constexpr = FORM[0]
    WIDTH: gl.constexpr = FORM[1]
    HOW: gl.constexpr = FORM[3]
    for part in gl.static_range(PARTS):
        tile = tiles[part]
        if TURNED:
            tile = as_loaded(tile)
        put(tile, stages[part].index(0), WIDTH, BLOCK, TURNED, False, HOW)


@gluon.jit
def query_rows(i, last, stride_row, stride_head, PACK: gl.constexpr, FAR: gl.constexpr):
    """Where a tile's rows of queries lie: heads of a position side by side. Behind the ``last``, that one again."""
    position = gl.minimum(i // PACK, last)
    head = i % PACK
    if FAR:
        position = position.to(tl.int64)
        head = head.to(tl.int64)
    return position * stride_row + head * stride_head


@gluon.jit
def as_operand(
    tile, COLUMNS: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, HOW: gl.constexpr, MATH: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """A part of queries, of which ``COLUMNS`` are there, from how it was fetched to how it is multiplied."""
    if COLUMNS < WIDTH:
        tile = cut_off(tile, COLUMNS, ROWS, WIDTH, True, False, VECTOR, WARPS)
    stages = make_stages(tile.dtype, 1, ROWS, WIDTH, True)
    put(tile, stages.index(0), ROWS, WIDTH, False, True, HOW)
    return operand(stages.index(0), ROWS, WIDTH, True, HOW, 0, MATH, VECTOR, False)


@gluon.jit
def load_queries(
    q, last, stride_row, stride_head, PACK: gl.constexpr, ROWS: gl.constexpr, PARTS: gl.constexpr, WIDTH: gl.constexpr,
    REST: gl.constexpr, DIRECT: gl.constexpr, LANE: gl.constexpr, HOW: gl.constexpr, FAR: gl.constexpr,
    MATH: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """An item's queries as operands of the multiplication, a part each.

    By way of shared memory, so that global memory is read in whole rows: all of it is under way before any is waited
    for. Their room is that of the stages, which begin to be filled afterwards.
    """
    parts = ()
    if DIRECT:
        i, j = indices(copy_layout(WIDTH, LANE, WARPS), ROWS, WIDTH)
        rows = query_rows(i, last, stride_row, stride_head, PACK, False)
        offsets = element_offsets(rows, copied_columns(i, j, HOW), LANE)
        stages = make_parts(q.dtype.element_ty, PARTS, 1, ROWS, WIDTH, True)
        for part in gl.static_range(PARTS):
            copy_to_shared(stages[part].index(0), q + part * WIDTH, offsets)
        commit()
        landed(0)
        for part in gl.static_range(PARTS):
            parts += (operand(stages[part].index(0), ROWS, WIDTH, True, HOW, 0, MATH, VECTOR, True),)
    else:
        LAYOUT: gl.constexpr = fetch_layout(ROWS, WIDTH, True, False, VECTOR, WARPS)
        i, j = indices(LAYOUT, ROWS, WIDTH)
        rows = query_rows(i, last, stride_row, stride_head, PACK, FAR)
        tiles = ()
        for part in gl.static_range(PARTS):
            columns = fetched_columns(i, j, REST if part == PARTS - 1 else WIDTH, WIDTH)
            offsets = element_offsets(rows, columns, VECTOR)
            tiles += (fetch(q + part * WIDTH, offsets, FAR),)
        for part in gl.static_range(PARTS):
            parts += (
                as_operand(tiles[part], REST if part == PARTS - 1 else WIDTH, ROWS, WIDTH, HOW, MATH, WARPS),
            )  # fmt: skip
    # Copies that follow are not kept from what others still read, and puts are by a barrier in each block's loop.
    barrier()
    return parts
