"""The softmax of attention, online and in base 2, on scores in registers: caps, masks, sums, weights, sinks.

Scores are multiplied by ``scale`` where the exponent is formed, in the instruction that subtracts the row's largest:
``scale`` holds the factor of base 2 too. A row that has seen no key has a largest score of -inf, and sums of 0.

*Lazily.* What is subtracted of a row's scores need not be the largest: it is so that weights are neither huge nor all
tiny. So the largest is replaced when it is more than a factor of ``2 ** LAZY`` too small, which is in a row's first
blocks and seldom after them, and only then a sum of many columns is multiplied (`shrunk`). Weights are that factor
larger at most, sums too, and the output is their ratio; each row decides by its own scores. (FlashAttention-4 does it
on Blackwell.) With 256 columns an H200, which is short of power there, does 833 TFLOP/s so, and 778 without; with 128
and with 64 it is 2 % slower, where the multiplications run under the exponentials for nothing.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.device.epilogue import power_of_2, sigmoid
from tilestream.kernels.hopper.epilogue import mma_layout

LOG2_E: gl.constexpr = gl.constexpr(1.4426950408889634)
LN_2: gl.constexpr = gl.constexpr(0.6931471805599453)
#: Powers of 2 that weights may have, where it saves multiplications: in 16 bits they are as exact as below 1.
LAZY: gl.constexpr = gl.constexpr(8.0)
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
    `tilestream.core.attention.seen_keys` in numbers that have a sign), of ``keys``.

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
def peaks(scores, top, scale, MASKED: gl.constexpr, LAZILY: gl.constexpr):
    """``(top, shift, shrink)``: what is subtracted from now on, also scaled, and what earlier sums are multiplied by.

    ``MASKED``: a row may have seen no key yet; there is nothing to subtract from -inf then. The largest of a row is
    found one score after the other, as the compiler has it; by halves it took as long or 1 % longer (H200).
    """
    top_now = gl.maximum(top, gl.max(scores, 1))
    if LAZILY:
        top_now = gl.where((top_now - top) * scale > LAZY, top_now, top)  # no number, between two infinities: stays
    shift = top_now * scale
    if MASKED:
        shift = gl.where(top_now == float("-inf"), 0.0, shift)
    shrink = power_of_2(top * scale - shift)
    if LAZILY:
        shrink = gl.where(top_now == top, 1.0, shrink)  # and not one to a bit, by which nobody need multiply
    return top_now, shift, shrink


@gluon.jit
def weighed(scores, total, scale, shift, shrink):
    """``(weights, total)``, by what `peaks` has found."""
    weights = power_of_2(scores * scale - shift[:, None])
    return weights, total * shrink + gl.sum(weights, 1)


@gluon.constexpr_function
def product_or_nothing(count):
    """PTX that multiplies a thread's sums in place by what belongs to each, if some row of the warp has another than 1.

    A thread has two rows, in turns two columns of the one and two of the other: see `mma_layout`.
    """
    sums = range(count)
    return "\n".join([
        "{ .reg .pred other, any;",
        f"setp.neu.f32 other, ${2 * count}, 0f3F800000;",
        f"setp.neu.or.f32 other, ${2 * count + 2}, 0f3F800000, other;",
        "vote.sync.any.pred any, other, -1;",
        "@!any bra.uni DONE;",
        *(f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in sums),
        "DONE: }",
    ])  # fmt: skip


@gluon.constexpr_function
def product_operands(count):
    """Constraints of `product_or_nothing`'s operands: products, sums (the same registers), factors."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def shrunk(o, shrink, COLUMNS: gl.constexpr, LAZILY: gl.constexpr):
    """Sums of weighted values, times what `peaks` says of their rows."""
    shrink = gl.convert_layout(shrink, gl.SliceLayout(1, mma_layout(COLUMNS)))[:, None]
    if LAZILY:
        COUNT: gl.constexpr = COLUMNS // 2
        PTX: gl.constexpr = product_or_nothing(COUNT)
        OPERANDS: gl.constexpr = product_operands(COUNT)
        o, shrink = gl.broadcast(o, shrink)
        return gl.inline_asm_elementwise(PTX, OPERANDS, [o, shrink], dtype=gl.float32, is_pure=True, pack=COUNT)
    else:
        return o * shrink


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
