"""Products of 8 bits whose operands have a scale for 128 of K: each K step is one such block.

::

    factor = scales of step 0
    for step in ring:
        factor of the next step: loads, which the step's multiplication hides
        acc += (x[step] @ y[step]) * factor of the step

One operand has a scale a row, the other one for 128 of its rows. So of the accumulator's rows and columns, one has a
vector of scales. The other has a number for each part of a tile, which lies in one block (`tilestream.plan.grouped`).
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from tilestream.core.operands import SCALE_BLOCK as BLOCK
from tilestream.core.structs import Place
from tilestream.kernels.hopper.epilogue import mma_layout, start_of
from tilestream.kernels.hopper.multiply import mma_operand, poison, zero, zeros
from tilestream.kernels.hopper.ring import step

SCALE_BLOCK = gl.constexpr(BLOCK)


@gluon.jit
def of_block(m, batch, first, k):
    """The scale of the 128 rows that ``first`` is one of, at block ``k`` of K."""
    at = m.at + tl.cast(batch, tl.int64) * m.batch + tl.cast(first // SCALE_BLOCK, tl.int64) * m.row
    return gl.load(at + tl.cast(k, tl.int64) * m.column)


@gluon.jit
def of_each(m, i, end, k):
    """The scales of rows ``i`` at block ``k`` of K; behind ``end``, of the last one before it."""
    return gl.load(m.at + gl.minimum(i, end - 1).to(gl.int64) * m.row + tl.cast(k, tl.int64) * m.column)


@gluon.jit
def load_factors(scales, k, C: gl.constexpr):
    """What scales the products of step ``k``: a vector, or with ``SWAP_AB`` a number of each, for each part."""
    LAYOUT: gl.constexpr = mma_layout(C.WIDTHS[0], 32)
    factors = ()
    if C.SWAP_AB:
        of_rows = of_block(scales.rows, scales.batch, scales.row, k)
        for i in gl.static_range(len(C.WIDTHS)):
            j = scales.column + start_of(C.WIDTHS, i) + gl.arange(0, C.WIDTHS[i], gl.SliceLayout(0, LAYOUT))
            factors = factors + (of_each(scales.columns, j, scales.column_end, k) * of_rows,)
    else:
        of_rows = of_each(
            scales.rows, scales.row + gl.arange(0, C.HALF_ROWS, gl.SliceLayout(1, LAYOUT)), scales.row_end, k
        )  # fmt: skip
        for i in gl.static_range(len(C.WIDTHS)):
            first = scales.column + (i * scales.column_end if C.TWO_HALVES else start_of(C.WIDTHS, i))
            factors = factors + (of_rows * of_block(scales.columns, scales.batch, first, k),)
    return factors


@gluon.jit
def multiply_scaled(ring, order, place, steps, scales, WHO: gl.constexpr, C: gl.constexpr):
    """`tilestream.kernels.hopper.multiply.multiply_promoted`, with scales of blocks."""
    WIDTHS: gl.constexpr = C.WIDTHS
    HALF: gl.constexpr = WHO if C.HALVES == 2 else 0
    stage, phase = place
    BITS: gl.constexpr = ring.x.dtype.primitive_bitwidth
    accs = zeros(C.HALF_ROWS, WIDTHS, BITS)
    coming = load_factors(scales, steps * 0, C)
    for k in range(steps):
        factors = coming
        coming = load_factors(scales, tl.minimum(k + 1, steps - 1), C)
        mbarrier.wait(ring.full.index(stage), phase)
        x = mma_operand(ring.x, stage * C.HALVES + HALF, C.X_K_MAJOR, False)
        sums = ()
        for i in gl.static_range(len(C.WIDTHS)):
            part = zero(C.HALF_ROWS, C.WIDTHS[i], BITS)
            y = mma_operand(ring.y[i], stage, C.Y_K_MAJOR, True)
            part = warpgroup_mma(x, y, part, is_async=True, use_acc=False)
            if C.CONSUMERS == "ping_pong" and i == len(C.WIDTHS) - 1:
                if k == steps - 1:
                    mbarrier.arrive(order.index(1 - WHO))
            part = warpgroup_mma_wait(0, (part,))
            sums = sums + (accs[i] + part * gl.expand_dims(factors[i], 0 if C.SWAP_AB else 1),)
        mbarrier.arrive(ring.empty.index(stage))
        accs = sums
        stage, phase = step(stage, phase, C.STAGES)
    return accs, Place(stage, phase)


@gluon.jit
def scaled_product(ring, order, place, steps, scales, WHO: gl.constexpr, C: gl.constexpr):
    """`tilestream.kernels.hopper.multiply.product`, with scales of blocks."""
    if steps < 0:
        accs = poison(order, WHO, ring.x.dtype.primitive_bitwidth, C)
    else:
        accs, place = multiply_scaled(ring, order, place, steps, scales, WHO, C)
    return accs, place
