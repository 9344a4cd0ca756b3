"""The epilogue: finishes the accumulator of a math loop in fp32, and stores it.

It works in strips of columns, one after the other. A strip's C buffer is small, which leaves room for another stage of
the ring. With two buffers one strip is written while the previous one drains. TMA stores a strip from shared memory,
and clips it at the output's extents. Outputs that TMA cannot address are stored line by line from registers.

Rows and columns are those of the accumulator. If the output's contiguous dimension is the rows (``FLIPPED``), a strip
is transposed when it is written to its buffer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilestream.core.structs import Region
from tilestream.kernels.device.epilogue import finished, swiglu
from tilestream.kernels.hopper.compat import barrier, tma_store, viewed

#: The extent of rows of a tensor map that clips at any row: `BEYOND` times its stride, and one more, is 2**34 elements.
#: See `tilestream.kernels.hopper.attention_load`.
BEYOND: gl.constexpr = gl.constexpr(2**30)


@gluon.constexpr_function
def mma_layout(width, depth=16):
    """Four warps' layout of an accumulator of ``width`` columns; ``depth``: elements of K of an instruction."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, depth])


@gluon.constexpr_function
def start_of(widths, i):
    """The first column of part ``i`` of a tile with parts of ``widths`` columns."""
    return sum(widths[:i])


@gluon.constexpr_function
def pending(i, strips, buffers):
    """The number of stores that may be in flight when strip ``i`` is written to its buffer, ``i % buffers``.

    With an odd number of strips a tile begins with the last buffer of the previous tile.
    """
    return 0 if i == 0 and strips % buffers else buffers - 1


@gluon.constexpr_function
def part_of(widths, column):
    """The part of a tile, with parts of ``widths`` columns, that has a column."""
    return next(i for i in range(len(widths)) if column < sum(widths[: i + 1]))


@gluon.jit
def columns_of(acc, START: gl.constexpr, WIDTH: gl.constexpr, STRIP: gl.constexpr, ROWS: gl.constexpr):
    """Columns [START, START + STRIP) of an accumulator. No data moves."""
    x = gl.convert_layout(acc, mma_layout(WIDTH), assert_trivial=True)
    if WIDTH == STRIP:
        return x
    else:
        HALF: gl.constexpr = WIDTH // 2
        low, high = x.reshape([ROWS, 2, HALF]).permute(0, 2, 1).split()
        if START < HALF:
            return columns_of(low, START, HALF, STRIP, ROWS)
        else:
            return columns_of(high, START - HALF, HALF, STRIP, ROWS)


@gluon.jit
def strip_of(accs, START: gl.constexpr, WIDTHS: gl.constexpr, STRIP: gl.constexpr, ROWS: gl.constexpr):
    """Columns [START, START + STRIP) of a tile with parts of ``WIDTHS`` columns."""
    PART: gl.constexpr = part_of(WIDTHS, START)
    WIDTH: gl.constexpr = WIDTHS[PART]
    return columns_of(accs[PART], START - start_of(WIDTHS, PART), WIDTH, STRIP, ROWS)


@gluon.jit
def load_alpha(e, C: gl.constexpr):
    """The factor of a worker's products: alpha, or the product of the scales, if these have one element each.

    Vectors of scales are read by each strip, at an address for each of its rows and columns. With few K steps that is
    most of what a tile takes: an accumulator of 64 x 256 finishes in 1,170 instructions of a warp so, in 270 with a
    factor that was loaded once, in 160 without scales.
    """
    if C.LOADS_ALPHA:
        alpha = 1.0
        if e.row_scale.at is not None:
            alpha = alpha * gl.load(e.row_scale.at)
        if e.column_scale.at is not None:
            alpha = alpha * gl.load(e.column_scale.at)
        return alpha
    else:
        return e.alpha


@gluon.jit
def prefetched(v, batch, first, count, WIDTH: gl.constexpr):
    """Elements [first, first + WIDTH) of a `Vector`; 0 from ``count`` on."""
    layout: gl.constexpr = gl.BlockedLayout([max(1, WIDTH // 128)], [32], [4], [0])
    at = v.at + batch.to(gl.int64) * v.batch
    i = first + gl.arange(0, WIDTH, layout)
    return gl.load(at + i.to(gl.int64) * v.step, mask=i < count, other=0.0).to(gl.float32)


@gluon.jit
def prefetch_residual(e, batch, row, column, WIDTH: gl.constexpr, C: gl.constexpr):
    """Prefetch a tile of the residual into L2, with a request for each 64 elements along the output's lines."""
    at = e.residual.at + batch.to(gl.int64) * e.residual.batch
    SIDE: gl.constexpr = 64
    LONG: gl.constexpr = C.HALF_ROWS if C.FLIPPED else WIDTH
    OTHER: gl.constexpr = WIDTH if C.FLIPPED else C.HALF_ROWS
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
    i = gl.arange(0, max(1, LONG // SIDE), gl.SliceLayout(1, layout))[:, None] * SIDE
    j = gl.arange(0, OTHER, gl.SliceLayout(0, layout))[None, :]
    if C.FLIPPED:
        r, c = row + i + j * 0, column + j + i * 0
    else:
        r, c = row + j + i * 0, column + i + j * 0
    r = gl.minimum(r, e.rows - 1)
    c = gl.minimum(c, e.columns - 1)
    place = (at + r.to(gl.int64) * e.residual.row + c.to(gl.int64) * e.residual.column).to(gl.int64)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def prefetch_epilogue(e, batch, row, column, C: gl.constexpr):
    """Prefetch the operands of a tile's epilogue before its K loop.

    ``row``, ``column``: the tile's first row and column in the accumulator's dimensions.

    Vectors are loaded, which leaves them in the first-level cache. After the K loop the caller passes their values to
    `await_prefetch`. The residual is prefetched into L2.
    """
    early = ()
    if C.SCALES != "none":
        if e.row_scale.at is not None:
            early = early + (prefetched(e.row_scale, batch, row, e.rows, C.HALF_ROWS),)
    if C.BIAS == "rows":
        early = early + (prefetched(e.bias, batch, row, e.rows, C.HALF_ROWS),)
    for i in gl.static_range(len(C.WIDTHS)):
        first, end = column + start_of(C.WIDTHS, i), e.columns
        if C.TWO_HALVES:
            first, end = column + i * e.columns, (i + 1) * e.columns
        if C.SCALES != "none":
            if e.column_scale.at is not None:
                early = early + (prefetched(e.column_scale, batch, first, end, C.WIDTHS[i]),)
        if C.BIAS == "columns":
            early = early + (prefetched(e.bias, batch, first, end, C.WIDTHS[i]),)
        if C.RESIDUAL:
            prefetch_residual(e, batch, row, first, C.WIDTHS[i], C)
    return early


@gluon.jit
def await_prefetch(early):
    """Wait for the loads of `prefetch_epilogue`."""
    for i in gl.static_range(len(early)):
        gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [early[i]], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_vector(v, batch, i, inside):
    """Elements ``i`` of a `Vector` as float32."""
    at = v.at + batch.to(gl.int64) * v.batch + i.to(gl.int64) * v.step
    return gl.load(at, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def load_rows(v, e, region, C: gl.constexpr):
    """The elements of a `Vector` along the region's rows."""
    return load_vector(v, region.batch, region.i, region.inside[0])


@gluon.jit
def load_columns(v, e, region, C: gl.constexpr):
    """The elements of a `Vector` along the region's columns."""
    return load_vector(v, region.batch, region.j, region.inside[1])


@gluon.jit
def in_matrix(m, region, C: gl.constexpr):
    """The addresses of the region's elements in a `Matrix`, and the mask of those inside it."""
    below, left = region.inside
    inside = below[:, None] & left[None, :]
    row, column = region.i, region.j
    if C.OFFSETS_64BIT:
        row = row.to(gl.int64)
        column = column.to(gl.int64)
    at = m.at + region.batch.to(gl.int64) * m.batch + row[:, None] * m.row + column[None, :] * m.column
    return at, inside


@gluon.jit
def load_tile(m, e, region, C: gl.constexpr):
    """The region's elements of a `Matrix` as float32."""
    at, inside = in_matrix(m, region, C)
    return gl.load(at, mask=inside, other=0.0).to(gl.float32)


@gluon.constexpr_function
def line_layout(columns, flipped):
    """Four warps' layout of a strip of ``columns``. A warp stores consecutive elements of the output."""
    if flipped:
        return gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
    across = min(32, columns)
    return gl.BlockedLayout([1, 1], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def store_lines(x, e, batch, row, column, C: gl.constexpr):
    """Store a strip line by line of the output, by way of shared memory.

    From the accumulator's layout a store would be of 8 pieces of 16 bytes, and L2 writes parts of sectors slowly.
    """
    layout: gl.constexpr = line_layout(C.STRIP, C.FLIPPED)
    i = row + gl.arange(0, C.HALF_ROWS, gl.SliceLayout(1, layout))
    j = column + gl.arange(0, C.STRIP, gl.SliceLayout(0, layout))
    at, inside = in_matrix(e.out, Region(batch, row, column, i, j, (i < e.rows, j < e.columns)), C)
    gl.store(at, gl.convert_layout(x, layout), mask=inside)


@gluon.jit
def store_strip(acc, e, batch, row, column, BUFFER: gl.constexpr, PENDING: gl.constexpr, C: gl.constexpr):
    """Finish a strip of an accumulator, and store it.

    Parameters
    ----------
    acc
        float32 ``[HALF_ROWS, STRIP]``; for two halves, a strip of each.
    row, column
        The place of its first element in the output.
    BUFFER
        The C buffer for its store.
    PENDING
        The number of stores that may still be in flight when that buffer is written.
    """
    layout: gl.constexpr = mma_layout(C.STRIP)
    i = row + gl.arange(0, C.HALF_ROWS, gl.SliceLayout(1, layout))
    j = column + gl.arange(0, C.STRIP, gl.SliceLayout(0, layout))
    below, left = i < e.rows, j < e.columns
    if C.N_DIVISIBLE_BY_8:  # so that the compiler sees that a vector never straddles the end
        left = j // 8 * 8 < e.columns
    region = Region(batch, row, column, i, j, (below, left))
    if C.TWO_HALVES:
        x = swiglu(acc[0], acc[1], e, region, C, load_rows, load_columns, load_tile)
    else:
        x = finished(acc, e, region, C, load_rows, load_columns, load_tile)
    if C.STORE == "direct":
        at, inside = in_matrix(e.out, region, C)
        gl.store(at, x.to(e.out.at.dtype.element_ty), mask=inside)
    elif C.STORE == "lines":
        store_lines(x.to(e.out.at.dtype.element_ty), e, batch, row, column, C)
    else:
        buffer = e.buffers.index(BUFFER)
        tma.store_wait(PENDING)
        if C.FLIPPED:
            buffer.permute((1, 0)).store(x.to(e.map.dtype))
        else:
            buffer.store(x.to(e.map.dtype))
        fence_async_shared()
        if C.FLIPPED:
            at_outer, at_inner = column, row
        else:
            at_outer, at_inner = row, column
        if C.CLIPPED:
            end = e.columns if C.FLIPPED else e.rows
            tma_store(e.map, [BEYOND, end, BEYOND - end + at_outer, at_inner], viewed(buffer, e.map))
        elif C.BATCHED:
            tma_store(e.map, [batch, at_outer, at_inner], viewed(buffer, e.map))
        else:
            tma_store(e.map, [at_outer, at_inner], buffer)


@gluon.jit
def place_in_partial(ROWS: gl.constexpr, START: gl.constexpr, WIDTH: gl.constexpr, STRIP: gl.constexpr):
    """The offsets of columns [START, START + WIDTH) in a partial result's strip, which has consecutive 8 x 8 blocks.

    A warp has a block in two registers of each thread, so its loads and stores are contiguous.
    """
    layout: gl.constexpr = mma_layout(WIDTH)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = START + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    return (row // 8 * (STRIP // 8) + column // 8) * 64 + row % 8 * 8 + column % 8


@gluon.jit
def store_partial(accs, at, C: gl.constexpr):
    """Store a partial result at ``at``, as consecutive strips ``[HALF_ROWS, STRIP]`` of float32."""
    WIDTHS: gl.constexpr = C.WIDTHS
    place = place_in_partial(C.HALF_ROWS, 0, C.STRIP, C.STRIP)
    for i in gl.static_range(start_of(C.WIDTHS, len(C.WIDTHS)) // C.STRIP):
        gl.store(
            at + i * C.HALF_ROWS * C.STRIP + place, strip_of(accs, i * C.STRIP, WIDTHS, C.STRIP, C.HALF_ROWS)
        )  # fmt: skip


@gluon.jit
def first_partial(words, item, WHO: gl.constexpr, C: gl.constexpr):
    """The address of a consumer's first partial result of a tile. The other contributors' follow in K order."""
    HALF: gl.constexpr = WHO if C.HALVES > 1 else 0
    size: gl.constexpr = C.ROWS * C.COLUMNS
    return words.partials + (item.slot - item.part).to(gl.int64) * size + HALF * C.HALF_ROWS * C.COLUMNS


@gluon.jit
def fixup(accs, at, words, item, WHO: gl.constexpr, C: gl.constexpr):
    """Contribute a part of a tile. Returns whether this consumer is the last contributor, which finishes the tile.

    The last contributor keeps its own part in its registers, and restores the count. If all others have counted before
    it, it is the last, and does not store its part. The protocol is `tilestream_tools.verify.gpu_loop.fixup`. Each half
    of a tile has its own count, so that no consumer waits for the other.

    The barriers extend one thread's operation (a release at device scope, and an acquire) to the whole consumer: to its
    earlier stores and to its later loads.

    ``at``: see `first_partial`.
    """
    HALF: gl.constexpr = WHO if C.HALVES > 1 else 0
    size: gl.constexpr = C.ROWS * C.COLUMNS
    count = words.counts + (item.slot - item.part) * 2 + HALF
    last = gl.atomic_add(count, 0, sem="acquire", scope="gpu") == item.parts - 1
    if not last:
        store_partial(accs, at + item.part.to(gl.int64) * size, C)
        barrier()
        last = gl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == item.parts - 1
    barrier()
    if last:
        gl.store(count, 0)
    return last


@gluon.constexpr_function
def together(rows, columns, strip, full):
    """The number of strips of partial results whose loads are in flight at once, for an accumulator of ``columns``.

    They, their sum and the accumulator may take 192 of a thread's registers. A ``full`` epilogue, with vectors and a
    residual, leaves fewer: otherwise Triton 3.6 spills.
    """
    kept = 32 if full else 0
    return max(1, min((112 - kept) * 128 // rows, (192 - kept) * 128 // rows - columns) // strip - 1)


@gluon.jit
def reduce_partials(mine, at, item, C: gl.constexpr):
    """The sum of a strip of a tile's partial results, in K order. This consumer's part is ``mine``, in registers.

    Strips of more than 16 registers a thread are reduced in two halves, so that more loads are in flight.
    """
    HALF: gl.constexpr = C.STRIP // 2
    if C.HALF_ROWS * C.STRIP > 2048 and HALF >= 16:
        low, high = mine.reshape([C.HALF_ROWS, 2, HALF]).permute(0, 2, 1).split()
        low = gl.convert_layout(low, mma_layout(HALF), assert_trivial=True)
        high = gl.convert_layout(high, mma_layout(HALF), assert_trivial=True)
        low = reduce_columns(low, at, item, 0, HALF, C)
        high = reduce_columns(high, at, item, HALF, HALF, C)
        acc = gl.join(low, high).permute(0, 2, 1).reshape([C.HALF_ROWS, C.STRIP])
        return gl.convert_layout(acc, mma_layout(C.STRIP), assert_trivial=True)
    else:
        return reduce_columns(mine, at, item, 0, C.STRIP, C)


@gluon.jit
def reduce_columns(mine, at, item, START: gl.constexpr, WIDTH: gl.constexpr, C: gl.constexpr):
    """The sum of columns [START, START + WIDTH) of a strip, in K order.

    Loads of the other parts bypass the first-level cache, which may be stale. Several are in flight, because L2's
    latency is long.
    """
    layout: gl.constexpr = mma_layout(WIDTH)
    TOGETHER: gl.constexpr = together(C.HALF_ROWS, C.COLUMNS, WIDTH, C.FULL)
    size: gl.constexpr = C.ROWS * C.COLUMNS
    at = at + place_in_partial(C.HALF_ROWS, START, WIDTH, C.STRIP)
    TILE: gl.constexpr = (C.HALF_ROWS, WIDTH)
    acc = gl.zeros(TILE, gl.float32, layout)
    for first in range(0, item.parts, TOGETHER):
        others = ()
        for i in gl.static_range(TOGETHER):
            there = (first + i < item.parts) & (first + i != item.part)
            inside = gl.full([C.HALF_ROWS, WIDTH], there, gl.int1, layout)
            others = others + (gl.load(at + i * size, mask=inside, other=0.0, cache_modifier=".cg"),)
        for i in gl.static_range(TOGETHER):
            if first + i == item.part:
                acc += mine
            else:
                acc += others[i]
        at += TOGETHER * size
    return acc


@gluon.jit
def store_tile(accs, at, e, item, row, column, WHO: gl.constexpr, C: gl.constexpr):
    """Finish and store a consumer's part of a tile, strip by strip.

    ``row``, ``column``: its first row and column in the accumulator's dimensions. ``at``: see `first_partial`; for a
    tile in parts.
    """
    WIDTHS: gl.constexpr = C.WIDTHS
    STRIPS: gl.constexpr = C.OUT_COLUMNS // C.STRIP
    for i in gl.static_range(STRIPS):
        x = strip_of(accs, i * C.STRIP, WIDTHS, C.STRIP, C.HALF_ROWS)
        if C.TWO_HALVES:
            x = (x, strip_of(accs, C.OUT_COLUMNS + i * C.STRIP, WIDTHS, C.STRIP, C.HALF_ROWS))
        if C.KIND == "stream_k":
            if item.parts > 1:
                x = reduce_partials(x, at + i * C.HALF_ROWS * C.STRIP, item, C)
        store_strip(
            x, e, item.batch, row, column + i * C.STRIP, WHO * C.BUFFERS + i % C.BUFFERS,
            pending(i, STRIPS, C.BUFFERS), C,
        )  # fmt: skip
