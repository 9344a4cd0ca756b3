"""The epilogue: what happens to the accumulator of a math loop, in fp32, and its way out.

In strips of columns, one after the other: the C buffer of a strip leaves room for another stage of the ring, and two of
them let one strip be written while the one before it drains. A strip goes through shared memory and is stored by TMA,
which clips what lies outside; what TMA cannot address is stored from registers.

Rows and columns are the accumulator's. Where the output lies the other way round (``FLIPPED``: its contiguous dimension
is the rows'), a strip is written to its buffer transposed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilestream.kernels.device.epilogue import activate
from tilestream.kernels.hopper.compat import barrier, tma_store, viewed


@gluon.constexpr_function
def mma_layout(width, depth=16):
    """How four warps hold an accumulator of ``width`` columns; ``depth``: elements of K that an instruction takes."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, depth])


@gluon.constexpr_function
def start_of(widths, i):
    """The first column of part ``i`` of a tile whose parts are ``widths`` wide."""
    return sum(widths[:i])


@gluon.constexpr_function
def pending(i, strips, buffers):
    """Stores that may be under way when strip ``i`` is written to its buffer, ``i % buffers``.

    With an odd number of strips a tile begins with the buffer that the one before ended with.
    """
    return 0 if i == 0 and strips % buffers else buffers - 1


@gluon.constexpr_function
def part_of(widths, column):
    """Which part of such a tile a column is in."""
    return next(i for i in range(len(widths)) if column < sum(widths[: i + 1]))


@gluon.jit
def columns_of(acc, START: gl.constexpr, WIDTH: gl.constexpr, STRIP: gl.constexpr, ROWS: gl.constexpr):
    """Columns [START, START + STRIP) of an accumulator: no data moves."""
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
    """Columns [START, START + STRIP) of a tile whose parts are ``WIDTHS`` wide."""
    PART: gl.constexpr = part_of(WIDTHS, START)
    WIDTH: gl.constexpr = WIDTHS[PART]
    return columns_of(accs[PART], START - start_of(WIDTHS, PART), WIDTH, STRIP, ROWS)


@gluon.jit
def touched(v, batch, first, count, WIDTH: gl.constexpr):
    """Elements [first, first + WIDTH) of a vector, those below ``count``."""
    layout: gl.constexpr = gl.BlockedLayout([max(1, WIDTH // 128)], [32], [4], [0])
    i = first + gl.arange(0, WIDTH, layout)
    at = v.at + batch.to(gl.int64) * v.batch + i.to(gl.int64) * v.step
    return gl.load(at, mask=i < count, other=0.0).to(gl.float32)


@gluon.jit
def fetch(m, batch, row, column, rows, columns, WIDTH: gl.constexpr, C: gl.constexpr):
    """Have L2 bring a tile of the residual: a request for each 64 elements that lie side by side, or nearly so."""
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
    r = gl.minimum(r, rows - 1)
    c = gl.minimum(c, columns - 1)
    at = m.at + batch.to(gl.int64) * m.batch
    place = (at + r.to(gl.int64) * m.row + c.to(gl.int64) * m.column).to(gl.int64)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [place], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def touch(e, batch, row, column, C: gl.constexpr):
    """Read once what a tile's epilogue will read, before its K loop: then it is near when it is needed.

    Vectors are loaded, which leaves them in the first-level cache; whoever calls passes the values to `hold` after the
    K loop, which waits for them. Of the residual L2 is told.
    """
    early = ()
    if C.SCALES:
        if e.row_scale.at is not None:
            early = early + (touched(e.row_scale, batch, row, e.rows, C.HALF_ROWS),)
    if C.BIAS == "rows":
        early = early + (touched(e.bias, batch, row, e.rows, C.HALF_ROWS),)
    for i in gl.static_range(len(C.WIDTHS)):
        first = column + start_of(C.WIDTHS, i)
        if C.SCALES:
            if e.column_scale.at is not None:
                early = early + (touched(e.column_scale, batch, first, e.columns, C.WIDTHS[i]),)
        if C.BIAS == "columns":
            early = early + (touched(e.bias, batch, first, e.columns, C.WIDTHS[i]),)
        if C.RESIDUAL:
            fetch(e.residual, batch, row, first, e.rows, e.columns, C.WIDTHS[i], C)
    return early


@gluon.jit
def hold(early):
    """Wait for what `touch` has read."""
    for i in gl.static_range(len(early)):
        gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [early[i]], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def vector(v, batch, i, inside):
    """Elements ``i`` of a vector, in float32."""
    at = v.at + batch.to(gl.int64) * v.batch + i.to(gl.int64) * v.step
    return gl.load(at, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def at_tile(m, batch, row, column):
    """Where a matrix has these rows and columns."""
    return m.at + batch.to(gl.int64) * m.batch + row[:, None] * m.row + column[None, :] * m.column


@gluon.jit
def finish_strip(acc, e, batch, first_row, first_column, BUFFER: gl.constexpr, PENDING: gl.constexpr, C: gl.constexpr):
    """``activation(alpha * row_scale * column_scale * acc + bias + beta * residual)``, stored.

    ``PENDING``: stores that may still be under way when ``BUFFER`` is written.
    """
    layout: gl.constexpr = mma_layout(C.STRIP)
    row = first_row + gl.arange(0, C.HALF_ROWS, gl.SliceLayout(1, layout))
    column = first_column + gl.arange(0, C.STRIP, gl.SliceLayout(0, layout))
    below, left = row < e.rows, column < e.columns
    if C.EIGHTS:  # said so that the compiler sees that a vector never straddles the end
        left = column // 8 * 8 < e.columns
    x = acc
    if C.SCALES:
        # x = (x * r) * c could overflow where x * (r * c) does not, and costs as many multiplications.
        factor = gl.full([C.HALF_ROWS, C.STRIP], 1.0, gl.float32, layout)
        if e.row_scale.at is not None:
            factor = factor * vector(e.row_scale, batch, row, below)[:, None]
        if e.column_scale.at is not None:
            factor = factor * vector(e.column_scale, batch, column, left)[None, :]
        x = x * factor
    if C.SCALED:
        x = x * e.alpha
    if C.BIAS == "columns":
        x = x + vector(e.bias, batch, column, left)[None, :]
    if C.BIAS == "rows":
        x = x + vector(e.bias, batch, row, below)[:, None]
    if C.RESIDUAL or C.STORE == "direct":
        inside = below[:, None] & left[None, :]
        if C.WIDE:
            row = row.to(gl.int64)
            column = column.to(gl.int64)
    if C.RESIDUAL:
        x = x + e.beta * gl.load(at_tile(e.residual, batch, row, column), mask=inside, other=0.0).to(gl.float32)
    x = activate(x, C.ACTIVATION)
    if C.STORE == "direct":
        gl.store(at_tile(e.out, batch, row, column), x.to(e.out.at.dtype.element_ty), mask=inside)
    else:
        buffer = e.buffers.index(BUFFER)
        tma.store_wait(PENDING)
        if C.FLIPPED:
            buffer.permute((1, 0)).store(x.to(e.map.dtype))
        else:
            buffer.store(x.to(e.map.dtype))
        fence_async_shared()
        if C.FLIPPED:
            at_outer, at_inner = first_column, first_row
        else:
            at_outer, at_inner = first_row, first_column
        if C.BATCHED:
            tma_store(e.map, [batch, at_outer, at_inner], viewed(buffer, e.map))
        else:
            tma_store(e.map, [at_outer, at_inner], buffer)


@gluon.jit
def place_in_partial(ROWS: gl.constexpr, START: gl.constexpr, WIDTH: gl.constexpr, STRIP: gl.constexpr):
    """Where a partial result's strip keeps columns [START, START + WIDTH): in 8 x 8 blocks, one behind the other.

    A warp holds such a block in two registers of each thread, so what it stores or loads at once is contiguous.
    """
    layout: gl.constexpr = mma_layout(WIDTH)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    column = START + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))[None, :]
    return (row // 8 * (STRIP // 8) + column // 8) * 64 + row % 8 * 8 + column % 8


@gluon.jit
def hand_in(accs, at, ROWS: gl.constexpr, WIDTHS: gl.constexpr, STRIP: gl.constexpr):
    """Store a partial result at ``at``: strips ``[ROWS, STRIP]``, one behind the other."""
    place = place_in_partial(ROWS, 0, STRIP, STRIP)
    for i in gl.static_range(start_of(WIDTHS, len(WIDTHS)) // STRIP):
        gl.store(at + i * ROWS * STRIP + place, strip_of(accs, i * STRIP, WIDTHS, STRIP, ROWS))


@gluon.jit
def settle(accs, count, at, parts, ROWS: gl.constexpr, WIDTHS: gl.constexpr, STRIP: gl.constexpr):
    """Hand in a partial result, unless all others have been handed in; whether this one is the last.

    Whoever is the last finishes the tile, with his own part in his registers, and restores the count. He need not have
    written it: where the others have counted already, nobody else can be the last. That is the protocol of
    `tilestream.core.loop.settle`, which the checker explores.

    The barriers make one thread's operation (a release at the device's scope, and an acquire) speak for the whole
    consumer: for its stores before, for its loads after.
    """
    last = gl.atomic_add(count, 0, sem="acquire", scope="gpu") == parts - 1
    if not last:
        hand_in(accs, at, ROWS, WIDTHS, STRIP)
        barrier()
        last = gl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == parts - 1
    barrier()
    if last:
        gl.store(count, 0)
    return last


@gluon.constexpr_function
def together(rows, columns, strip, full):
    """Strips of partial results whose loads are under way at once, beside an accumulator of so many columns.

    Of a thread's registers 192 may hold all of them, their sum, and the accumulator; fewer where the epilogue is
    ``full``, and has vectors and a residual to keep: Triton 3.6 spills else.
    """
    kept = 32 if full else 0
    return max(1, min((112 - kept) * 128 // rows, (192 - kept) * 128 // rows - columns) // strip - 1)


@gluon.jit
def add_up(
    mine, at, part, parts, size, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STRIP: gl.constexpr, FULL: gl.constexpr
):
    """One strip of a tile's partial results, added in K order, this consumer's from its registers.

    Half of its columns after the other where that is more than 16 registers of a thread: more can be under way then.
    """
    HALF: gl.constexpr = STRIP // 2
    if ROWS * STRIP > 2048 and HALF >= 16:
        low, high = mine.reshape([ROWS, 2, HALF]).permute(0, 2, 1).split()
        low = gl.convert_layout(low, mma_layout(HALF), assert_trivial=True)
        high = gl.convert_layout(high, mma_layout(HALF), assert_trivial=True)
        low = add_columns(low, at, part, parts, size, 0, ROWS, COLUMNS, HALF, STRIP, FULL)
        high = add_columns(high, at, part, parts, size, HALF, ROWS, COLUMNS, HALF, STRIP, FULL)
        acc = gl.join(low, high).permute(0, 2, 1).reshape([ROWS, STRIP])
        return gl.convert_layout(acc, mma_layout(STRIP), assert_trivial=True)
    else:
        return add_columns(mine, at, part, parts, size, 0, ROWS, COLUMNS, STRIP, STRIP, FULL)


@gluon.jit
def add_columns(
    mine, at, part, parts, size, START: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr,
    WIDTH: gl.constexpr, STRIP: gl.constexpr, FULL: gl.constexpr,
):  # fmt: skip
    """Columns [START, START + WIDTH) of a strip, added in K order.

    The others' come past the first-level cache, which may be stale; several at once, as the way to L2 is long.
    """
    layout: gl.constexpr = mma_layout(WIDTH)
    TOGETHER: gl.constexpr = together(ROWS, COLUMNS, WIDTH, FULL)
    at = at + place_in_partial(ROWS, START, WIDTH, STRIP)
    acc = gl.zeros((ROWS, WIDTH), gl.float32, layout)
    for first in range(0, parts, TOGETHER):
        others = ()
        for i in gl.static_range(TOGETHER):
            there = (first + i < parts) & (first + i != part)
            inside = gl.full([ROWS, WIDTH], there, gl.int1, layout)
            others = others + (gl.load(at + i * size, mask=inside, other=0.0, cache_modifier=".cg"),)
        for i in gl.static_range(TOGETHER):
            if first + i == part:
                acc += mine
            else:
                acc += others[i]
        at += TOGETHER * size
    return acc
