"""What the load warp of the Hopper GEMM loads: K steps of a tile, each into a stage of the ring.

Some row tiles of x may lie in a tensor of their own (`tilestream.core.structs.LocalRows`): of the rows that ranks
gather, a rank's own are read in its caller's tensor, and need not be copied beside those that arrive.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilestream.core.structs import Place
from tilestream.kernels.hopper.compat import tma_load, viewed
from tilestream.kernels.hopper.epilogue import start_of
from tilestream.kernels.hopper.pair import begin_multicast, end_multicast, find_half, rank
from tilestream.kernels.hopper.ring import step


class Source(NamedTuple):
    """A tile of the operands."""

    #: x_batch, y_batch: its batch of x and of y.
    x_batch: Any
    y_batch: Any
    #: row, column: its first row of x, or of the rows that lie elsewhere, and its first row of y.
    row: Any
    column: Any
    is_local: Any  # whether its rows of x are of `tilestream.core.structs.LocalRows`


@gluon.jit
def locate(loads, item, C: gl.constexpr):
    """Where an item's tile is loaded from: `Source`."""
    pr, pc = item.pm, item.pn
    if C.SWAP_AB:
        pr, pc = item.pn, item.pm
    is_local, row = False, pr
    if C.LOCAL_ROWS:
        is_local, row = find_local(loads.local, pr)
    x_batch, y_batch = item.batch * loads.x_batched, item.batch * loads.y_batched
    if C.CTAS > 1:
        row = row * C.CTAS + rank(C)
    return Source(x_batch, y_batch, row * C.ROWS, pc * C.COLUMNS, is_local)


@gluon.jit
def find_local(local, tile):
    """``(is_local, at)``: whether a row tile is of `LocalRows`, and which tile it is in its tensor."""
    at = tile % local.period - local.first
    is_local = (at >= 0) & (at < local.tiles)
    return is_local, tl.where(is_local, tile // local.period * local.tiles + at, tile)


@gluon.jit
def load_operand(tensor_map, bar, buffer, batch, row, k, K_MAJOR: gl.constexpr, BATCHED: gl.constexpr):
    """Start the copy of a box of an operand, from ``row`` and ``k`` on, into ``buffer``; it arrives at ``bar``."""
    if K_MAJOR:
        outer, inner = row, k
    else:
        outer, inner = k, row
    if BATCHED:
        tma_load(tensor_map, [batch, outer, inner], bar, viewed(buffer, tensor_map))
    else:
        tma_load(tensor_map, [outer, inner], bar, buffer)


@gluon.jit
def load_x(tensor_map, ring, stage, source, batch, k, K_MAJOR: gl.constexpr, BATCHED: gl.constexpr, C: gl.constexpr):
    """Start the copies of x's part of a stage: one for each consumer that has a half of its own."""
    HALVES: gl.constexpr = C.HALVES
    for half in gl.static_range(HALVES):
        row = source.row + half * C.HALF_ROWS
        buffer = ring.x.index(stage * HALVES + half)
        load_operand(tensor_map, ring.full.index(stage), buffer, batch, row, k, K_MAJOR, BATCHED)


@gluon.jit
def load_steps(begin, end, source, loads, ring, place, C: gl.constexpr):
    """Load K steps [begin, end) of a tile into the ring: the `Place` behind them."""
    BYTES: gl.constexpr = (
        (C.ROWS * loads.x.dtype.primitive_bitwidth + C.COLUMNS * loads.y[0].dtype.primitive_bitwidth) * C.BLOCK_K // 8
    )
    stage, phase = place
    for k in range(begin, end):
        mbarrier.wait(ring.empty.index(stage), phase ^ 1)
        bar = ring.full.index(stage)
        mbarrier.expect(bar, BYTES)
        at = k * C.BLOCK_K
        if C.LOCAL_ROWS:
            # One instruction, whose map the compiler selects in front of the loop.
            if source.is_local:
                load_x(loads.local.map, ring, stage, source, 0, at, True, False, C)
            else:
                load_x(loads.x, ring, stage, source, 0, at, True, False, C)
        else:
            load_x(loads.x, ring, stage, source, source.x_batch, at, C.X_K_MAJOR, C.BATCHED, C)
        for i in gl.static_range(len(C.WIDTHS)):
            first = source.column + start_of(C.WIDTHS, i)
            if C.TWO_HALVES:
                first = source.column + i * loads.half
            at_stage, at_k = stage, at
            if C.CTAS > 1:
                at_stage = stage * C.CTAS + rank(C)
                first, at_k = find_half(loads.y[i], first, at, C.WIDTHS[i], C)
                begin_multicast()
            buffer = ring.y[i].index(at_stage)
            load_operand(loads.y[i], bar, buffer, source.y_batch, first, at_k, C.Y_K_MAJOR, C.BATCHED)
            if C.CTAS > 1:
                end_multicast()
        stage, phase = step(stage, phase, C.STAGES)
    return Place(stage, phase)
