"""The softmax of attention, online and in base 2, on scores in registers: caps, masks, sums, weights, sinks.

Scores are multiplied by ``scale`` where the exponent is formed, in the instruction that subtracts the row's largest:
``scale`` holds the factor of base 2 too. A row that has seen no key has a largest score of -inf, and sums of 0.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.hopper.epilogue import mma_layout
from tilestream.kernels.portable.epilogue import power_of_2, sigmoid

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
#: The bits of a column that say which of four threads of a row has it: see `mma_layout`.
LANES: gl.constexpr = gl.constexpr(6)


@gluon.jit
def capped(scores, inner):
    """``tanh(inner * scores)``: the cap itself is in the scale. To a bit or two of fp32, which tanh.approx is not."""
    return 2.0 * sigmoid(2.0 * inner * scores) - 1.0


@gluon.jit
def masked(scores, position, first_key, keys, until, since, BLOCK: gl.constexpr, LEFT: gl.constexpr,
           RIGHT: gl.constexpr):  # fmt: skip
    """Scores of a key block, -inf where a row does not see the key. After capping, which would make that -1.

    A query position sees keys from ``position + since`` on, up to before ``position + until`` (which may be negative:
    `tilestream.schedule.attention.seen_keys` in numbers that have a sign), of ``keys``.

    A thread's columns are 8 apart, in pairs that begin at twice its place among four. Compared as they are, each is a
    sum that the loop does not change, which the compiler keeps in a register (Triton 3.9 spilled 13 of a thread in the
    largest kernels), and a masked step of 128 columns was 855 instructions. Without their place they are constants, and
    what is left of them is one number: 597.
    """
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, mma_layout(BLOCK)))
    apart = (first_key + (column & LANES))[None, :]
    column = (column & ~LANES)[None, :]
    if RIGHT:
        seen = column < gl.minimum(position + until, keys)[:, None] - apart
    else:
        seen = column < keys - apart
    if LEFT:
        seen = seen & (column >= (position + since)[:, None] - apart)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def softmax(scores, top, total, scale, MASKED: gl.constexpr):
    """``(weights, top, total, shrink)``: what came before is to be multiplied by ``shrink``.

    ``MASKED``: a row may have seen no key yet; there is nothing to subtract from -inf then.
    """
    top_now = gl.maximum(top, gl.max(scores, 1))
    shift = top_now * scale
    if MASKED:
        shift = gl.where(top_now == float("-inf"), 0.0, shift)
    shrink = power_of_2(top * scale - shift)
    weights = power_of_2(scores * scale - shift[:, None])
    return weights, top_now, total * shrink + gl.sum(weights, 1), shrink


@gluon.constexpr_function
def narrower(dtype):
    """PTX that rounds two numbers to 16 bits, the first into the lower half of a register."""
    return f"cvt.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}.f32 $0, $2, $1;"


@gluon.jit
def carried(weights, COLUMNS: gl.constexpr, dtype: gl.constexpr, APART: gl.constexpr):
    """Weights in 16 bits, as a loop carries them: two neighbours a register, or ``APART``, as `as_operand` gives them.

    Carried apart, each pair is taken apart and put together in every step where there are several loops, 64 of the 525
    instructions of a plain step of 128 columns, causal (Triton 3.6); an H100 does 698 TFLOP/s with them, 740 without.
    Where scores are capped or cut off at the left too, pairs cost registers that are not there.
    """
    if APART:
        return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, mma_layout(COLUMNS), 2))
    else:
        NARROWER: gl.constexpr = narrower(dtype)
        left, right = weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]).split()
        return gl.inline_asm_elementwise(NARROWER, "=r,f,f", [left, right], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def as_operand(p, COLUMNS: gl.constexpr, dtype: gl.constexpr):
    """Weights, as `carried`, as the multiplication by V takes them, from registers: no data moves."""
    if p.dtype == gl.int32:
        left, right = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        weights = gl.join(left, right).reshape([p.shape[0], 2 * p.shape[1]]).to(dtype, bitcast=True)
        return gl.convert_layout(weights, gl.DotOperandLayout(0, mma_layout(COLUMNS), 2), assert_trivial=True)
    else:
        return p


@gluon.jit
def finished(top, total, sinks, head, row, scale, PACK: gl.constexpr):
    """``(factor, log-sum-exp)`` of each row: its sum of weighted values is to be multiplied by ``factor``.

    A sink takes part in the sum, and has no value. NaN stays NaN.
    """
    top = top * scale
    factor = gl.full(top.shape, 1.0, gl.float32, top.type.layout)
    if sinks is not None:
        sink = gl.load(sinks + head + row % PACK) * LOG2_E
        highest = gl.maximum(top, sink)
        shift = gl.where(highest == float("-inf"), 0.0, highest)
        factor = power_of_2(top - shift)
        total = total * factor + power_of_2(sink - shift)
        top = highest
    factor = gl.where(total == 0.0, 0.0, factor / total)
    return factor, (top + gl.log2(total)) * LN_2
