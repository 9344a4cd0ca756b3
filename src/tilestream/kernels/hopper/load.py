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
def load_operand(
    tensor_map, bar, stages, at, batch, row, k, HALVES: gl.constexpr, HALF_ROWS: gl.constexpr, K_MAJOR: gl.constexpr,
    BATCHED: gl.constexpr,
):  # fmt: skip
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
def load_steps(
    begin, end, x_map, apart, is_apart, y_maps, x_stages, y_stages, full, empty, stage, phase, x_batch, y_batch,
    row, column,
    WIDTHS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, HALVES: gl.constexpr, HALF_ROWS: gl.constexpr,
    BYTES: gl.constexpr, X_K_MAJOR: gl.constexpr, Y_K_MAJOR: gl.constexpr, BATCHED: gl.constexpr, APART: gl.constexpr,
):  # fmt: skip
    """Load K steps [begin, end) of a tile into the ring: ``(stage, phase)`` behind them.

    ``is_apart``: whether ``row`` is one of those of x that stand apart.
    """
    for k in range(begin, end):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        if APART:
            # One instruction, whose map the compiler selects in front of the loop.
            if is_apart:
                load_operand(apart.map, bar, x_stages, stage, 0, row, k * BLOCK_K, HALVES, HALF_ROWS, True, False)
            else:
                load_operand(x_map, bar, x_stages, stage, 0, row, k * BLOCK_K, HALVES, HALF_ROWS, True, False)
        else:
            load_operand(x_map, bar, x_stages, stage, x_batch, row, k * BLOCK_K, HALVES, HALF_ROWS, X_K_MAJOR, BATCHED)
        for i in gl.static_range(len(WIDTHS)):
            load_operand(
                y_maps[i], bar, y_stages[i], stage, y_batch, column + start_of(WIDTHS, i), k * BLOCK_K, 1, 0,
                Y_K_MAJOR, BATCHED,
            )  # fmt: skip
        stage, phase = step(stage, phase, STAGES)
    return stage, phase
