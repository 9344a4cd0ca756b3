"""The portable epilogue: loads of what it reads, the store of a tile, and partial results of stream-K."""

from __future__ import annotations

import triton
import triton.language as tl

from tilestream.core.structs import Region
from tilestream.kernels.device.epilogue import finished, swiglu


@triton.jit
def load_rows(v, e, region, C: tl.constexpr):
    """A `Vector` along the region's rows, float32."""
    at = v.at + region.batch.to(tl.int64) * v.batch + region.i * v.step
    return tl.load(at, mask=region.i < e.rows, other=0.0).to(tl.float32)


@triton.jit
def load_columns(v, e, region, C: tl.constexpr):
    """A `Vector` along the region's columns, float32."""
    at = v.at + region.batch.to(tl.int64) * v.batch + region.j * v.step
    return tl.load(at, mask=region.j < e.columns, other=0.0).to(tl.float32)


@triton.jit
def addresses(m, region):
    """Where a `Matrix` has the region's elements."""
    return m.at + region.batch.to(tl.int64) * m.batch + region.i[:, None] * m.row + region.j[None, :] * m.column


@triton.jit
def load_tile(m, e, region, C: tl.constexpr):
    """The region of a `Matrix`, float32."""
    return tl.load(addresses(m, region), mask=region.inside, other=0.0).to(tl.float32)


@triton.jit
def store_tile(acc, e, batch, row, column, WIDTH: tl.constexpr, C: tl.constexpr):
    """Finish an accumulator, and store what of it is inside the output.

    In strips of ``STRIP`` columns, one after the other: the addresses of a whole tile do not fit the registers beside
    its accumulator.

    Parameters
    ----------
    acc
        float32 ``[BLOCK_M, WIDTH]``, or fewer rows.
    e
        `tilestream.core.structs.Epilogue`.
    batch, row, column
        Where its first element is in the output.
    """
    if WIDTH > C.STRIP:
        low, high = halves(acc, WIDTH, C)
        store_tile(low, e, batch, row, column, WIDTH // 2, C)
        store_tile(high, e, batch, row, column + WIDTH // 2, WIDTH // 2, C)
    else:
        region = region_of(e, batch, row, column, acc.shape[0], WIDTH, C)
        x = finished(acc, e, region, C, load_rows, load_columns, load_tile)
        tl.store(addresses(e.out, region), x.to(e.out.at.dtype.element_ty), mask=region.inside)


@triton.jit
def store_halves(gate, up, e, batch, row, column, WIDTH: tl.constexpr, C: tl.constexpr):
    """`store_tile` of two accumulators, whose columns are those of the two halves of B."""
    if WIDTH > C.STRIP:
        low_gate, high_gate = halves(gate, WIDTH, C)
        low_up, high_up = halves(up, WIDTH, C)
        store_halves(low_gate, low_up, e, batch, row, column, WIDTH // 2, C)
        store_halves(high_gate, high_up, e, batch, row, column + WIDTH // 2, WIDTH // 2, C)
    else:
        region = region_of(e, batch, row, column, C.BLOCK_M, WIDTH, C)
        x = swiglu(gate, up, e, region, C, load_rows, load_columns, load_tile)
        tl.store(addresses(e.out, region), x.to(e.out.at.dtype.element_ty), mask=region.inside)


@triton.jit
def halves(acc, WIDTH: tl.constexpr, C: tl.constexpr):
    """The first and the last half of an accumulator's columns."""
    return acc.reshape(C.BLOCK_M, 2, WIDTH // 2).permute(0, 2, 1).split()


@triton.jit
def region_of(e, batch, row, column, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, C: tl.constexpr):
    """The `Region` of ``HEIGHT`` rows and ``WIDTH`` columns of a tile."""
    i = row + tl.arange(0, HEIGHT)
    j = column + tl.arange(0, WIDTH)
    inside = (i < e.rows)[:, None] & (j < e.columns)[None, :]
    if C.OFFSETS_64BIT:
        i = i.to(tl.int64)
        j = j.to(tl.int64)
    return Region(batch, row, column, i, j, inside)


@triton.jit
def store_partial(acc, at, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, STRIP: tl.constexpr):
    """Store a partial result, float32 ``[BLOCK_M, WIDTH]``, at ``at``: strips, one behind the other."""
    if WIDTH > STRIP:
        low, high = acc.reshape(BLOCK_M, 2, WIDTH // 2).permute(0, 2, 1).split()
        store_partial(low, at, BLOCK_M, WIDTH // 2, STRIP)
        store_partial(high, at + BLOCK_M * (WIDTH // 2), BLOCK_M, WIDTH // 2, STRIP)
    else:
        tl.store(at + tl.arange(0, BLOCK_M)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :], acc)


@triton.jit
def reduce_partials(at, parts, size, BLOCK_M: tl.constexpr, STRIP: tl.constexpr):
    """One strip of a tile's ``parts`` partial results, ``size`` elements apart, added in K order.

    Loads bypass the first-level cache, which may be stale.
    """
    at = at + tl.arange(0, BLOCK_M)[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    acc = tl.load(at, cache_modifier=".cg")
    for _ in range(1, parts):
        at += size
        acc += tl.load(at, cache_modifier=".cg")
    return acc
