"""The softmax of CDNA's attention, on scores in registers: caps, masks, weights as operands, and their sums.

By the rules of `tilestream.kernels.hopper.attention_softmax`. A row is in two lanes, which exchange its largest score
once a block; of the sum of its weights each keeps its half until the item ends.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.cdna.compat import opaque_zero, reciprocal, settled
from tilestream.kernels.device.epilogue import power_of_2
from tilestream.kernels.hopper.attention_softmax import LOG2_E, peaks, weighed

#: Keys that a lane has of an operand of P V: as many neighbours as it has of the scores.
KEYS: gl.constexpr = gl.constexpr(4)


@gluon.jit
def capped(scores, inner):
    """``tanh(inner * scores)``: the cap itself is in the scale."""
    return 1.0 - 2.0 * reciprocal(1.0 + power_of_2(2.0 * LOG2_E * inner * scores))


@gluon.jit
def sees(position, key, keys, until, since, LEFT: gl.constexpr, RIGHT: gl.constexpr):
    """Which positions see which keys, by the rule of `tilestream.kernels.hopper.attention_softmax.masked`."""
    if RIGHT:
        seen = key[None, :] < gl.minimum(position + until, keys)[:, None]
    else:
        seen = (key < keys)[None, :]
    if LEFT:
        seen = seen & (key[None, :] >= (position + since)[:, None])
    return seen


@gluon.jit
def masked(
    scores, first, mask, PACK: gl.constexpr, MATH: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr
):  # fmt: skip
    """Scores of the key block from key ``first`` on, -inf where a row does not see the key.

    ``mask`` is ``(first_query, keys, until, since)``, in the sense of `tilestream.kernels.hopper.attention_softmax`.
    """
    first_query, keys, until, since = mask
    ROWS: gl.constexpr = scores.shape[0]
    BLOCK: gl.constexpr = scores.shape[1]
    position = first_query + (gl.arange(0, ROWS, gl.SliceLayout(1, MATH)) + opaque_zero()) // PACK
    key = first + gl.arange(0, BLOCK, gl.SliceLayout(0, MATH))
    return gl.where(sees(position, key, keys, until, since, LEFT, RIGHT), scores, float("-inf"))


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
def weights_of(
    scores, top, total, first, mask, scale, inner, dtype: gl.constexpr, PACK: gl.constexpr, MATH: gl.constexpr,
    MASKED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """``(weights, top, total, shrink)``; the weights as an operand: no data moves from lane to lane."""
    if CAPPED:
        scores = capped(scores, inner)
    if MASKED:
        scores = masked(scores, first, mask, PACK, MATH, LEFT, RIGHT)
    PAIR: gl.constexpr = pair_layout(scores.shape[0] // MATH.instr_shape[0])
    top, shift, shrink = peaks(scores, top, scale, MASKED, False)
    weights, _ = weighed(scores, top, scale, shift, shrink)
    total = total * gl.convert_layout(shrink, gl.SliceLayout(1, PAIR))[:, None] + halves_of_sum(weights, PAIR)
    weights = gl.convert_layout(narrowed(weights, dtype, MATH.version), gl.DotOperandLayout(0, MATH, KEYS))
    return weights, settled(top), total, shrink
