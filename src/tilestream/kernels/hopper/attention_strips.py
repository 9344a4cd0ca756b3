"""The weights of a key block, by the Hopper kernel's softmax: see `tilestream.kernels.portable.attention_strips`.

A row's weights are added by the threads that have them, so the sum's bits depend on the layout. It is that of
`tilestream.kernels.hopper.attention_math`: a consumer's 64 rows. Few of them are real.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tilestream.core.attention_structs import Extents
from tilestream.kernels.device.softmax import exp_scores, update_max
from tilestream.kernels.hopper.attention_load import ROWS
from tilestream.kernels.hopper.epilogue import mma_layout
from tilestream.kernels.portable.attention_strips import NUMBERS, place_of_block, tile_of


@gluon.jit
def running_max(maxima, of_tile, block, blocks, end, real, C: gl.constexpr):
    """Each row's maximum in the key blocks that come before ``block``, which are those behind it."""
    layout: gl.constexpr = mma_layout(C.BLOCK)
    other = gl.arange(0, C.BLOCK, gl.SliceLayout(0, layout))
    row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, layout))
    for first in range(block + 1, end, C.BLOCK):
        behind = first + other
        x = gl.load(
            maxima + ((of_tile * blocks)[:, None] + behind[None, :]), mask=real[:, None] & (behind < end)[None, :],
            other=float("-inf"),
        )  # fmt: skip
        row_max = gl.maximum(row_max, gl.max(x, 1))
    return row_max


@gluon.jit(do_not_specialize=(*NUMBERS[:-3], "scale"), do_not_specialize_on_alignment=("seqlens_k",))
def weigh_blocks(
    seqlens_k, partials, maxima, weights, rescales, sums, tops, scale, sequences, seqlen_q, seqlen_k, head_tiles,
    q_heads_per_kv, left, right, blocks, C: gl.constexpr,
):  # fmt: skip
    """The weights of a tile's rows and a key block, their sums, and the factors of earlier sums.

    The grid is ``(blocks, tiles)``. The program of a tile's first block, which comes last, stores the rows' maxima
    (``tops``).
    """
    gdc_wait()
    gdc_launch_dependents()
    extents = Extents(
        None, None, sequences, None, None, seqlens_k, 0, 0, seqlen_q, seqlen_k, head_tiles, q_heads_per_kv, 1, left,
        right, 0, 0,
    )  # fmt: skip
    block, number = gl.program_id(0), gl.program_id(1)
    tile = tile_of(number, extents, C)
    if (block >= tile.begin) & (block < tile.end):
        layout: gl.constexpr = mma_layout(C.BLOCK)
        row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        column = gl.arange(0, C.BLOCK, gl.SliceLayout(0, layout))
        rows = tile.queries * C.PACK
        real = row < rows
        inside = real[:, None] & (column >= 0)[None, :]
        place = place_of_block(number, block, blocks, tile, C) + row
        at = place[:, None] * C.BLOCK + column[None, :]
        x = gl.load(partials + at, mask=inside, other=float("-inf"))
        of_tile = number.to(tl.int64) * rows + row
        row_max = running_max(maxima, of_tile, block, blocks, tile.end, real, C)
        row_max, shift, rescale = update_max(x, row_max, scale, True, False, C.LEFT)
        p = exp_scores(x, scale, shift)
        gl.store(weights + at, p.to(weights.dtype.element_ty), mask=inside)
        gl.store(rescales + place, rescale, mask=real)
        gl.store(sums + place, gl.sum(p, 1), mask=real)
        gl.store(tops + of_tile, row_max, mask=real & (block == tile.begin))
