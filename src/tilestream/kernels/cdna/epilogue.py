"""The epilogue on CDNA: what happens to the accumulator of a tile, in fp32, and its store.

In pieces of a few columns and rows, straight from the registers that the multiplication leaves them in: a lane has four
neighbouring columns of a row. Offsets are from the piece's own corner, within a buffer's 32 bits; where they are not
(``FAR``), addresses have 64.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.cdna.compat import barrier, buffer_load, buffer_store, nothing
from tilestream.kernels.device.epilogue import activate


@gluon.constexpr_function
def math_layout(version, shape, across):
    """How the warps hold an accumulator: a lane has neighbours of a row."""
    return gl.amd.AMDMFMALayout(version, list(shape), True, list(across))


@gluon.jit
def halves(acc, ROWS: gl.constexpr, WIDTH: gl.constexpr, MATH: gl.constexpr):
    """The columns of an accumulator in two halves: no data moves."""
    low, high = acc.reshape([ROWS, 2, WIDTH // 2]).permute(0, 2, 1).split()
    return gl.convert_layout(low, MATH, assert_trivial=True), gl.convert_layout(high, MATH, assert_trivial=True)


@gluon.jit
def upper_and_lower(acc, ROWS: gl.constexpr, WIDTH: gl.constexpr, MATH: gl.constexpr):
    """The rows of an accumulator in two halves, likewise."""
    upper, lower = acc.reshape([2, ROWS // 2, WIDTH]).permute(1, 2, 0).split()
    return gl.convert_layout(upper, MATH, assert_trivial=True), gl.convert_layout(lower, MATH, assert_trivial=True)


@gluon.jit
def within(stride_row, stride_column, i, j, GRAIN: gl.constexpr, FAR: gl.constexpr):
    """Offsets of a piece from its corner, of which ``GRAIN`` side by side are one vector."""
    i = i[:, None]
    if FAR:
        i = i.to(gl.int64)
    at = i * stride_row + j[None, :] * stride_column
    if GRAIN > 1:
        at = gl.max_contiguous(gl.multiple_of(at, [1, GRAIN]), [1, GRAIN])
    return at


@gluon.jit
def corner(at, batch, batch_stride, row, stride_row, column, stride_column):
    """Where a piece begins in something that has its rows, its columns or both."""
    at = at + batch.to(gl.int64) * batch_stride
    return at + gl.cast(row, gl.int64) * stride_row + gl.cast(column, gl.int64) * stride_column


@gluon.jit
def load_from(at, offsets, inside, FAR: gl.constexpr):
    """Elements at offsets from a corner, zeros where there are none."""
    if FAR:
        return gl.load(at + offsets, mask=inside, other=0.0)
    else:
        return buffer_load(at, offsets, mask=inside, other=0.0)


@gluon.jit
def scaled(
    x, i, j, batch, row, column, rows_left, columns_left, row_scale, stride_sb, stride_sr, column_scale, stride_tb,
    stride_tc, SCALES: gl.constexpr,
):  # fmt: skip
    """``row_scale * column_scale * x``; a scale that is None is 1."""
    if SCALES == "tensor":
        factor = 1.0
        if row_scale is not None:
            factor = factor * gl.load(row_scale)
        if column_scale is not None:
            factor = factor * gl.load(column_scale)
        x = x * factor
    elif SCALES == "row":
        # (x * a) * b could overflow where x * (a * b) does not, and costs as many multiplications.
        factor = gl.full(x.shape, 1.0, gl.float32, x.type.layout)
        if row_scale is not None:
            at = corner(row_scale, batch, stride_sb, row, stride_sr, 0, 0) + i * stride_sr
            factor = factor * gl.load(at, mask=i < rows_left, other=0.0)[:, None]
        if column_scale is not None:
            at = corner(column_scale, batch, stride_tb, 0, 0, column, stride_tc) + j * stride_tc
            factor = factor * gl.load(at, mask=j < columns_left, other=0.0)[None, :]
        x = x * factor
    return x


@gluon.jit
def finish(
    acc, batch, row, column, rows, columns, out, stride_ob, stride_or, stride_oc, bias, stride_bias,
    residual, stride_rb, stride_rr, stride_rc, row_scale, stride_sb, stride_sr, column_scale, stride_tb, stride_tc,
    alpha, beta,
    ROWS: gl.constexpr, WIDTH: gl.constexpr, STRIP: gl.constexpr, TALL: gl.constexpr, MATH: gl.constexpr,
    FAR: gl.constexpr, GRAIN: gl.constexpr, RESIDUAL_GRAIN: gl.constexpr, SCALED: gl.constexpr, SCALES: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """``activation(alpha * row_scale * column_scale * acc + bias + beta * residual)``, stored where the output is.

    Parameters
    ----------
    acc
        ``[ROWS, WIDTH]``, from ``row`` and ``column`` on.
    STRIP, TALL
        Columns, and rows, that are finished at a time.
    GRAIN, RESIDUAL_GRAIN
        Neighbouring columns that are one aligned vector, all of it inside or none.
    """
    if WIDTH > STRIP:
        low, high = halves(acc, ROWS, WIDTH, MATH)
        finish(
            low, batch, row, column, rows, columns, out, stride_ob, stride_or, stride_oc, bias, stride_bias,
            residual, stride_rb, stride_rr, stride_rc, row_scale, stride_sb, stride_sr, column_scale, stride_tb,
            stride_tc, alpha, beta, ROWS, WIDTH // 2, STRIP, TALL, MATH, FAR, GRAIN, RESIDUAL_GRAIN, SCALED, SCALES,
            BIAS, RESIDUAL, ACTIVATION,
        )  # fmt: skip
        finish(
            high, batch, row, column + WIDTH // 2, rows, columns, out, stride_ob, stride_or, stride_oc, bias,
            stride_bias, residual, stride_rb, stride_rr, stride_rc, row_scale, stride_sb, stride_sr, column_scale,
            stride_tb, stride_tc, alpha, beta, ROWS, WIDTH // 2, STRIP, TALL, MATH, FAR, GRAIN, RESIDUAL_GRAIN, SCALED,
            SCALES, BIAS, RESIDUAL, ACTIVATION,
        )  # fmt: skip
    elif ROWS > TALL:
        upper, lower = upper_and_lower(acc, ROWS, WIDTH, MATH)
        finish(
            upper, batch, row, column, rows, columns, out, stride_ob, stride_or, stride_oc, bias, stride_bias,
            residual, stride_rb, stride_rr, stride_rc, row_scale, stride_sb, stride_sr, column_scale, stride_tb,
            stride_tc, alpha, beta, ROWS // 2, WIDTH, STRIP, TALL, MATH, FAR, GRAIN, RESIDUAL_GRAIN, SCALED, SCALES,
            BIAS, RESIDUAL, ACTIVATION,
        )  # fmt: skip
        finish(
            lower, batch, row + ROWS // 2, column, rows, columns, out, stride_ob, stride_or, stride_oc, bias,
            stride_bias, residual, stride_rb, stride_rr, stride_rc, row_scale, stride_sb, stride_sr, column_scale,
            stride_tb, stride_tc, alpha, beta, ROWS // 2, WIDTH, STRIP, TALL, MATH, FAR, GRAIN, RESIDUAL_GRAIN, SCALED,
            SCALES, BIAS, RESIDUAL, ACTIVATION,
        )  # fmt: skip
    else:
        i = gl.arange(0, ROWS, gl.SliceLayout(1, MATH)) + nothing()
        j = gl.arange(0, WIDTH, gl.SliceLayout(0, MATH))
        rows_left = rows - row
        columns_left = columns - column
        x = scaled(
            acc, i, j, batch, row, column, rows_left, columns_left, row_scale, stride_sb, stride_sr, column_scale,
            stride_tb, stride_tc, SCALES,
        )  # fmt: skip
        if SCALED:
            x = x * alpha
        if BIAS:
            at = corner(bias, batch, 0, 0, 0, column, stride_bias) + j * stride_bias
            x = x + gl.load(at, mask=j < columns_left, other=0.0).to(gl.float32)[None, :]
        if RESIDUAL:
            at = within(stride_rr, stride_rc, i, j, RESIDUAL_GRAIN, FAR)
            inside = (i < rows_left)[:, None] & (j // RESIDUAL_GRAIN * RESIDUAL_GRAIN < columns_left)[None, :]
            place = corner(residual, batch, stride_rb, row, stride_rr, column, stride_rc)
            x = x + beta * load_from(vector_at(place, RESIDUAL_GRAIN), at, inside, FAR).to(gl.float32)
        x = activate(x, ACTIVATION).to(out.dtype.element_ty)
        at = within(stride_or, stride_oc, i, j, GRAIN, FAR)
        inside = (i < rows_left)[:, None] & (j // GRAIN * GRAIN < columns_left)[None, :]
        place = vector_at(corner(out, batch, stride_ob, row, stride_or, column, stride_oc), GRAIN)
        if FAR:
            gl.store(place + at, x, mask=inside)
        else:
            buffer_store(x, place, at, mask=inside)


@gluon.jit
def vector_at(at, GRAIN: gl.constexpr):
    """An address of which is known that it is a vector's."""
    if GRAIN > 1:
        at = gl.multiple_of(at, GRAIN * at.dtype.element_ty.primitive_bitwidth // 8)
    return at


@gluon.jit
def hand_in(acc, at, ROWS: gl.constexpr, WIDTH: gl.constexpr, STRIP: gl.constexpr, MATH: gl.constexpr):
    """Store a partial result at ``at``: strips ``[ROWS, STRIP]``, one behind the other."""
    if WIDTH > STRIP:
        low, high = halves(acc, ROWS, WIDTH, MATH)
        hand_in(low, at, ROWS, WIDTH // 2, STRIP, MATH)
        hand_in(high, at + ROWS * (WIDTH // 2), ROWS, WIDTH // 2, STRIP, MATH)
    else:
        buffer_store(acc, gl.multiple_of(at, 16), in_strip(ROWS, WIDTH, MATH))


@gluon.jit
def in_strip(ROWS: gl.constexpr, STRIP: gl.constexpr, MATH: gl.constexpr):
    """Offsets of a partial result's strip."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, MATH)) + nothing()
    j = gl.arange(0, STRIP, gl.SliceLayout(0, MATH))
    return i[:, None] * STRIP + j[None, :]


@gluon.jit
def drain():
    """Wait until this warp's stores are in the cache that the XCD shares."""
    gl.inline_asm_elementwise("s_waitcnt vmcnt(0)\n\ts_mov_b32 $0, 0", "=s", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def count_in(count, parts):
    """Count a partial result that was handed in; whether it was the last. He restores the count.

    As the portable kernel's, but each warp first waits for its own stores: the release of the one lane that adds
    speaks for what has left the other warps, and a barrier waits for no store.
    """
    drain()
    barrier()
    last = gl.atomic_add(count, 1, sem="acq_rel", scope="gpu") == parts - 1
    barrier()
    if last:
        gl.store(count, 0)
    return last


@gluon.jit
def add_up(at, parts, SIZE: gl.constexpr, ROWS: gl.constexpr, STRIP: gl.constexpr, MATH: gl.constexpr):
    """One strip of a tile's partial results, added in K order; past the first-level cache, which may be stale."""
    offsets = in_strip(ROWS, STRIP, MATH)
    acc = buffer_load(gl.multiple_of(at, 16), offsets, cache=".cg")
    for _ in range(1, parts):
        at += SIZE
        acc += buffer_load(gl.multiple_of(at, 16), offsets, cache=".cg")
    return acc
