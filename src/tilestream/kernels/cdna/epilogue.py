"""The epilogue on CDNA, in fp32 on a tile's accumulator, and its store.

It works on pieces of a few columns and rows, in the registers of the multiplication's result, where a lane has four
neighbouring columns of a row. Offsets from the piece's corner fit a buffer's 32 bits; otherwise (``OFFSETS_64BIT``)
addresses have 64 bits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.core.structs import Region
from tilestream.kernels.cdna.compat import buffer_load, buffer_store, opaque_zero
from tilestream.kernels.device.epilogue import finished


@gluon.constexpr_function
def math_layout(version, shape, across):
    """The layout of an accumulator, in which a lane has neighbouring columns of a row."""
    return gl.amd.AMDMFMALayout(version, list(shape), True, list(across))


@gluon.jit
def halves(acc, ROWS: gl.constexpr, WIDTH: gl.constexpr, MATH: gl.constexpr):
    """The columns of an accumulator in two halves, without a move of data."""
    low, high = acc.reshape([ROWS, 2, WIDTH // 2]).permute(0, 2, 1).split()
    return gl.convert_layout(low, MATH, assert_trivial=True), gl.convert_layout(high, MATH, assert_trivial=True)


@gluon.jit
def upper_and_lower(acc, ROWS: gl.constexpr, WIDTH: gl.constexpr, MATH: gl.constexpr):
    """The rows of an accumulator in two halves, without a move of data."""
    upper, lower = acc.reshape([2, ROWS // 2, WIDTH]).permute(1, 2, 0).split()
    return gl.convert_layout(upper, MATH, assert_trivial=True), gl.convert_layout(lower, MATH, assert_trivial=True)


@gluon.jit
def within(stride_row, stride_column, i, j, VECTOR: gl.constexpr, OFFSETS_64BIT: gl.constexpr):
    """Offsets of a piece's elements from its corner; ``VECTOR`` neighbours are one vector."""
    i = i[:, None]
    if OFFSETS_64BIT:
        i = i.to(gl.int64)
    at = i * stride_row + j[None, :] * stride_column
    if VECTOR > 1:
        at = gl.max_contiguous(gl.multiple_of(at, [1, VECTOR]), [1, VECTOR])
    return at


@gluon.jit
def corner(m, batch, row, column):
    """The address of a piece's corner in a `Matrix`."""
    at = m.at + batch.to(gl.int64) * m.batch
    return at + gl.cast(row, gl.int64) * m.row + gl.cast(column, gl.int64) * m.column


@gluon.jit
def load_along(v, batch, first, i, count):
    """``count`` elements of a `Vector` from ``first`` on, float32."""
    at = v.at + batch.to(gl.int64) * v.batch + gl.cast(first, gl.int64) * v.step + i * v.step
    return gl.load(at, mask=i < count, other=0.0).to(gl.float32)


@gluon.jit
def load_rows(v, e, region, C: gl.constexpr):
    """A `Vector` along the region's rows."""
    return load_along(v, region.batch, region.row, region.i, region.inside[0])


@gluon.jit
def load_columns(v, e, region, C: gl.constexpr):
    """A `Vector` along the region's columns."""
    return load_along(v, region.batch, region.column, region.j, region.inside[1])


@gluon.jit
def inside_of(region, VECTOR: gl.constexpr):
    """Which elements of the region are inside the output; all or none of a vector."""
    rows_left, columns_left = region.inside
    return (region.i < rows_left)[:, None] & (region.j // VECTOR * VECTOR < columns_left)[None, :]


@gluon.jit
def load_tile(m, e, region, C: gl.constexpr):
    """The region of a `Matrix`, float32; zeros outside of it."""
    at = within(m.row, m.column, region.i, region.j, C.VECTOR_RESIDUAL, C.OFFSETS_64BIT)
    inside = inside_of(region, C.VECTOR_RESIDUAL)
    place = vector_at(corner(m, region.batch, region.row, region.column), C.VECTOR_RESIDUAL)
    if C.OFFSETS_64BIT:
        return gl.load(place + at, mask=inside, other=0.0).to(gl.float32)
    else:
        return buffer_load(place, at, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def store_tile(
    acc, e, batch, row, column, ROWS: gl.constexpr, WIDTH: gl.constexpr, MATH: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """Finish an accumulator, and store the part of it that is inside the output.

    It does so in pieces of ``STRIP_M`` rows and ``STRIP`` columns, one after the other.

    Parameters
    ----------
    acc
        float32 ``[ROWS, WIDTH]``, of layout ``MATH``.
    e
        `tilestream.core.structs.Epilogue`.
    batch, row, column
        The place of its first element in the output.
    """
    if WIDTH > C.STRIP:
        low, high = halves(acc, ROWS, WIDTH, MATH)
        store_tile(low, e, batch, row, column, ROWS, WIDTH // 2, MATH, C)
        store_tile(high, e, batch, row, column + WIDTH // 2, ROWS, WIDTH // 2, MATH, C)
    elif ROWS > C.STRIP_M:
        upper, lower = upper_and_lower(acc, ROWS, WIDTH, MATH)
        store_tile(upper, e, batch, row, column, ROWS // 2, WIDTH, MATH, C)
        store_tile(lower, e, batch, row + ROWS // 2, column, ROWS // 2, WIDTH, MATH, C)
    else:
        i = gl.arange(0, ROWS, gl.SliceLayout(1, MATH)) + opaque_zero()
        j = gl.arange(0, WIDTH, gl.SliceLayout(0, MATH))
        region = Region(batch, row, column, i, j, (e.rows - row, e.columns - column))
        x = finished(acc, e, region, C, load_rows, load_columns, load_tile).to(e.out.at.dtype.element_ty)
        at = within(e.out.row, e.out.column, i, j, C.VECTOR_C, C.OFFSETS_64BIT)
        inside = inside_of(region, C.VECTOR_C)
        place = vector_at(corner(e.out, batch, row, column), C.VECTOR_C)
        if C.OFFSETS_64BIT:
            gl.store(place + at, x, mask=inside)
        else:
            buffer_store(x, place, at, mask=inside)


@gluon.jit
def vector_at(at, VECTOR: gl.constexpr):
    """An address, marked as aligned to a vector."""
    if VECTOR > 1:
        at = gl.multiple_of(at, VECTOR * at.dtype.element_ty.primitive_bitwidth // 8)
    return at


@gluon.jit
def store_partial(acc, at, ROWS: gl.constexpr, WIDTH: gl.constexpr, STRIP: gl.constexpr, MATH: gl.constexpr):
    """Store a partial result, float32 ``[ROWS, WIDTH]``, at ``at``, as consecutive strips."""
    if WIDTH > STRIP:
        low, high = halves(acc, ROWS, WIDTH, MATH)
        store_partial(low, at, ROWS, WIDTH // 2, STRIP, MATH)
        store_partial(high, at + ROWS * (WIDTH // 2), ROWS, WIDTH // 2, STRIP, MATH)
    else:
        buffer_store(acc, gl.multiple_of(at, 16), in_strip(ROWS, WIDTH, MATH))


@gluon.jit
def in_strip(ROWS: gl.constexpr, STRIP: gl.constexpr, MATH: gl.constexpr):
    """Offsets of a partial result's strip."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, MATH)) + opaque_zero()
    j = gl.arange(0, STRIP, gl.SliceLayout(0, MATH))
    return i[:, None] * STRIP + j[None, :]


@gluon.jit
def reduce_partials(at, parts, ROWS: gl.constexpr, COLUMNS: gl.constexpr, STRIP: gl.constexpr, MATH: gl.constexpr):
    """One strip of a tile's ``parts`` partial results, added in K order.

    Loads bypass the first-level cache, which may be stale.
    """
    offsets = in_strip(ROWS, STRIP, MATH)
    acc = buffer_load(gl.multiple_of(at, 16), offsets, cache=".cg")
    for _ in range(1, parts):
        at += ROWS * COLUMNS
        acc += buffer_load(gl.multiple_of(at, 16), offsets, cache=".cg")
    return acc
