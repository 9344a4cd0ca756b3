"""CDNA's pieces of the softmax (`tilestream.kernels.device.softmax`): caps, masks, weights as operands, and their sums.

Two lanes have a row. They exchange its largest score once a block. Each keeps its half of the sum of weights until the
item ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.cdna.compat import opaque_zero, reciprocal, settled
from tilestream.kernels.device.epilogue import power_of_2
from tilestream.kernels.device.softmax import LOG2_E, exp_scores, update_max

#: Neighbouring keys of a lane in an operand of P V: as many as it has of the scores.
KEYS: gl.constexpr = gl.constexpr(4)


@gluon.constexpr_function
def math_of(config):
    """The layout of scores, and of sums of weighted values: 32 rows a warp, two lanes a row."""
    return gl.amd.AMDMFMALayout(config.VERSION, list(config.SHAPE), True, [config.WARPS, 1])


@gluon.jit
def softcap(scores, softcap_scale):
    """`softcap` of `tilestream.kernels.device.softmax`, by the hardware's reciprocal."""
    return 1.0 - 2.0 * reciprocal(1.0 + power_of_2(2.0 * LOG2_E * softcap_scale * scores))


@gluon.jit
def masked(x, first, tile, C: gl.constexpr):
    """Scores of the key block from key ``first`` on; -inf for keys that a row of the `Tile` does not see."""
    MATH: gl.constexpr = math_of(C)
    position = tile.first + (gl.arange(0, C.ROWS, gl.SliceLayout(1, MATH)) + opaque_zero()) // C.PACK
    key = first + gl.arange(0, C.BLOCK, gl.SliceLayout(0, MATH))
    # `sees` of `tilestream.kernels.device.attention_tile` has a second number a column, which spills (Triton 3.9).
    if C.RIGHT:
        seen = key[None, :] < gl.minimum(position + tile.causal_offset_right, tile.keys)[:, None]
    else:
        seen = (key < tile.keys)[None, :]
    if C.LEFT:
        seen = seen & (key[None, :] >= (position + tile.causal_offset_left)[:, None])
    return gl.where(seen, x, float("-inf"))


@gluon.constexpr_function
def pair_layout(warps):
    """The layout of ``[rows, 2]``: one element for each of a row's two lanes."""
    lanes = [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [0, 1]]
    warp_bases = []
    rows = 32
    while rows < 32 * warps:
        warp_bases.append([rows, 0])
        rows *= 2
    return gl.DistributedLinearLayout([], lanes, warp_bases, [], [32 * warps, 2])


@gluon.jit
def halves_of_sum(weights, PAIR: gl.constexpr):
    """The sums of weights of a row's two lanes, which are added once an item, not once a block."""
    ROWS: gl.constexpr = weights.shape[0]
    BLOCK: gl.constexpr = weights.shape[1]
    own = gl.sum(gl.sum(weights.reshape([ROWS, BLOCK // 8, 2, 4]), 3), 1)
    return gl.convert_layout(own, PAIR, assert_trivial=True)


@gluon.jit
def narrowed(weights, dtype: gl.constexpr, VERSION: gl.constexpr):
    """Weights as operands of the multiplication.

    gfx942 has no instruction that rounds to bfloat16, and rounding to nearest even takes five. Weights are not
    negative, so half a unit is added and the upper half taken: to nearest, with ties up. NaN stays NaN.
    """
    if VERSION == 3 and dtype == gl.bfloat16:
        bits = (weights.to(gl.int32, bitcast=True) + 0x8000) >> 16
        return bits.to(gl.int16).to(gl.bfloat16, bitcast=True)
    else:
        return weights.to(dtype)


@gluon.jit
def weigh(x, softmax, first, tile, scores, dtype: gl.constexpr, MASKED: gl.constexpr, C: gl.constexpr):
    """Weights of the products ``x`` of a key block, as an operand, and the updated `Softmax`, except ``o``.

    No data moves between lanes. ``row_sum`` has the halves of `halves_of_sum`, ``[rows, 2]``.

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
    # Blocks of which a row sees no key come after its own at the diagonal.
    row_max, shift, rescale = update_max(x, softmax.row_max, scores.scale, MASKED, False, C.RIGHT)
    weights = exp_scores(x, scores.scale, shift)
    row_sum = softmax.row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, PAIR))[:, None] + halves_of_sum(
        weights, PAIR
    )
    weights = gl.convert_layout(narrowed(weights, dtype, C.VERSION), gl.DotOperandLayout(0, MATH, KEYS))
    return weights, settled(row_max), row_sum, rescale
