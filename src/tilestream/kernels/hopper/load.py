"""What the load warp of the Hopper GEMM loads: K steps of a tile, each into a stage of the ring.

Rows of x may stand apart from the others, in a tensor of their own (`Apart`): of what ranks gather, a rank's own rows
stand where its caller has them, and need not be copied to where those of the others arrive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilestream.kernels.hopper.compat import tma_load, viewed
from tilestream.kernels.hopper.epilogue import start_of
from tilestream.kernels.hopper.ring import step


class Apart(NamedTuple):
    """Row tiles of x that stand apart: of each ``period`` of them ``tiles``, from the one numbered ``first`` on.

    In ``map``, K-major, they stand one behind the other.
    """

    map: Any
    first: Any
    tiles: Any
    period: Any


@gluon.jit
def stands(apart, tile):
    """``(is_apart, at)``: whether a row tile stands apart, and which tile it is where it stands."""
    at = tile % apart.period - apart.first
    is_apart = (at >= 0) & (at < apart.tiles)
    return is_apart, tl.where(is_apart, tile // apart.period * apart.tiles + at, tile)


@gluon.jit
def load_operand(tensor_map, bar, stages, at, batch, row, k, HALVES: gl.constexpr, HALF_ROWS: gl.constexpr,
                 K_MAJOR: gl.constexpr, BATCHED: gl.constexpr):  # fmt: skip
    """Start the copies of one operand's part of a stage: a copy for each consumer that has a half of its own."""
    for half in gl.static_range(HALVES):
        first = row + half * HALF_ROWS
        if K_MAJOR:
            outer, inner = first, k
        else:
            outer, inner = k, first
        buffer = stages.index(at * HALVES + half)
        if BATCHED:
            tma_load(tensor_map, [batch, outer, inner], bar, viewed(buffer, tensor_map))
        else:
            tma_load(tensor_map, [outer, inner], bar, buffer)


@gluon.jit
def load_steps(begin, end, loads, ring, stage, phase, batch, is_apart, row, column, C: gl.constexpr):
    """Load K steps [begin, end) of a tile into the ring: ``(stage, phase)`` behind them.

    ``is_apart``: whether ``row`` is one of those of x that stand apart.
    """
    BYTES: gl.constexpr = (
        (C.ROWS * loads.x.dtype.primitive_bitwidth + C.COLUMNS * loads.y[0].dtype.primitive_bitwidth) * C.BLOCK_K // 8
    )
    x_batch, y_batch = batch * loads.x_batched, batch * loads.y_batched
    for k in range(begin, end):
        mbarrier.wait(ring.empty.index(stage), phase ^ 1)
        bar = ring.full.index(stage)
        mbarrier.expect(bar, BYTES)
        at = k * C.BLOCK_K
        if C.APART:
            # One instruction, whose map the compiler selects in front of the loop.
            if is_apart:
                load_operand(loads.apart.map, bar, ring.x, stage, 0, row, at, C.HALVES, C.HALF_ROWS, True, False)
            else:
                load_operand(loads.x, bar, ring.x, stage, 0, row, at, C.HALVES, C.HALF_ROWS, True, False)
        else:
            load_operand(loads.x, bar, ring.x, stage, x_batch, row, at, C.HALVES, C.HALF_ROWS, C.X_K_MAJOR, C.BATCHED)
        for i in gl.static_range(len(C.WIDTHS)):
            load_operand(
                loads.y[i], bar, ring.y[i], stage, y_batch, column + start_of(C.WIDTHS, i), at, 1, 0, C.Y_K_MAJOR,
                C.BATCHED,
            )  # fmt: skip
        stage, phase = step(stage, phase, C.STAGES)
    return stage, phase
