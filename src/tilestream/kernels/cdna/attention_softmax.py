"""CDNA's pieces of the softmax (`tilestream.kernels.device.softmax`): caps, masks, weights as operands, and their sums.

A row is in two lanes, which exchange its largest score once a block; of the sum of its weights each keeps its half
until the item ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.cdna.compat import opaque_zero, reciprocal, settled
from tilestream.kernels.device.epilogue import power_of_2
from tilestream.kernels.device.softmax import LOG2_E, exp_scores, update_max

#: Keys that a lane has of an operand of P V: as many neighbours as it has of the scores.
KEYS: gl.constexpr = gl.constexpr(4)


@gluon.constexpr_function
def math_of(config):
    """How the warps hold scores, and sums of weighted values: 32 rows a warp, a row in two lanes."""
    return gl.amd.AMDMFMALayout(config.VERSION, list(config.SHAPE), True, [config.WARPS, 1])


@gluon.jit
def softcap(scores, softcap_scale):
    """``tanh(softcap_scale * scores)``, as of `tilestream.kernels.device.softmax`, by the hardware's reciprocal."""
    return 1.0 - 2.0 * reciprocal(1.0 + power_of_2(2.0 * LOG2_E * softcap_scale * scores))


@gluon.jit
def masked(x, first, tile, C: gl.constexpr):
    """Scores of the key block from key ``first`` on, -inf where a row of the `Tile` does not see the key."""
    MATH: gl.constexpr = math_of(C)
    position = tile.first + (gl.arange(0, C.ROWS, gl.SliceLayout(1, MATH)) + opaque_zero()) // C.PACK
    key = first + gl.arange(0, C.BLOCK, gl.SliceLayout(0, MATH))
    # Not `sees` of `tilestream.kernels.device.attention_tile`: a second number a column spills here (Triton 3.9).
    if C.RIGHT:
        seen = key[None, :] < gl.minimum(position + tile.causal_offset_right, tile.keys)[:, None]
    else:
        seen = (key < tile.keys)[None, :]
    if C.LEFT:
        seen = seen & (key[None, :] >= (position + tile.causal_offset_left)[:, None])
    return gl.where(seen, x, float("-inf"))


@gluon.constexpr_function
def pair_layout(warps):
    """``[rows, 2]``: what the two lanes of each row have."""
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [0, 1]]
    warp_bases = []
    rows = 32
    while rows < 32 * warps:
        warp_bases.append([rows, 0])
        rows *= 2
    return gl.DistributedLinearLayout([], lanes, warp_bases, [], [32 * warps, 2])


@gluon.jit
def halves_of_sum(weights, PAIR: gl.constexpr):
    """What each of a row's two lanes has of the sum of its weights: these meet once an item, not once a block."""
    ROWS: gl.constexpr = weights.shape[0]
    BLOCK: gl.constexpr = weights.shape[1]
    own = gl.sum(gl.sum(weights.reshape([ROWS, BLOCK // 8, 2, 4]), 3), 1)
    return gl.convert_layout(own, PAIR, assert_trivial=True)


@gluon.jit
def narrowed(weights, dtype: gl.constexpr, VERSION: gl.constexpr):
    """Weights as operands of the multiplication.

    gfx942 has no instruction for bfloat16, and five go into rounding to nearest even. Weights have no sign: half a unit
    is added, and the upper half taken, which is nearest too, with ties up. NaN stays NaN.
    """
    if VERSION == 3 and dtype == gl.bfloat16:
        bits = (weights.to(gl.int32, bitcast=True) + 0x8000) >> 16
        return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
    else:
        return weights.to(dtype)


@gluon.jit
def weigh(x, softmax, first, tile, scores, dtype: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Weights of the products ``x`` of a key block, as an operand, and the `Softmax` with them, but for ``o``.

    No data moves from lane to lane. ``row_sum`` has the halves of `halves_of_sum`, ``[rows, 2]``.

    Returns
    -------
    (weights, row_max, row_sum, rescale)
    """
    MATH: gl.constexpr = math_of(C)
    if C.CAPPED:
        x = softcap(x, scores.softcap_scale)
    if MASKED:
        x = masked(x, first, tile, C)
    PAIR: gl.constexpr = pair_layout(C.WARPS)
    row_max, shift, rescale = update_max(x, softmax.row_max, scores.scale, MASKED, False)
    weights = exp_scores(x, scores.scale, shift)
    row_sum = softmax.row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, PAIR))[:, None] + halves_of_sum(
        weights, PAIR
    )
    weights = gl.convert_layout(narrowed(weights, dtype, C.VERSION), gl.DotOperandLayout(0, MATH, KEYS))
    return weights, settled(row_max), row_sum, rescale
