"""Hopper's parts of the softmax (`tilestream.kernels.device.softmax`): masks, rescaling of O, packing of weights.

*Lazy rescaling*: a warp skips the multiplications of its sums if no row's maximum was replaced (`rescale_o`). With 256
columns an H200 is limited by power, and reaches 833 TFLOP/s with this and 778 without. With 128 and with 64 columns it
is 2 % slower, because the multiplications overlap with the exponentials at no cost.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.hopper.epilogue import mma_layout

#: The bits of a column that give its thread, among a row's four: see `mma_layout`.
LANES: gl.constexpr = gl.constexpr(6)


@gluon.jit
def masked(scores, mask, first_key, C: gl.constexpr):
    """Scores of the key block that begins at ``first_key``; -inf for keys that a row does not see: `sees` of a `Mask`.

    Scores are masked after capping, which would turn -inf into -1.

    A thread's columns are 8 apart, in pairs that begin at twice its place among four. A direct comparison has a
    loop-invariant sum for each column, which the compiler keeps in a register (Triton 3.9 spilled 13 of a thread in the
    largest kernels), and a masked step of 128 columns was 855 instructions. Without the thread's place the columns are
    constants, and the comparison needs one more number: the step is 597 instructions.
    """
    column = gl.arange(0, C.BLOCK, gl.SliceLayout(0, mma_layout(C.BLOCK)))
    place = (first_key + (column & LANES))[None, :]
    column = (column & ~LANES)[None, :]
    if C.RIGHT:
        seen = column < gl.minimum(mask.position + mask.causal_offset_right, mask.keys)[:, None] - place
    else:
        seen = column < mask.keys - place
    if C.LEFT:
        seen = seen & (column >= (mask.position + mask.causal_offset_left)[:, None] - place)
    return gl.where(seen, scores, float("-inf"))


@gluon.constexpr_function
def lazy_product(count):
    """PTX that multiplies a thread's sums in place by their rows' factors, unless all rows of the warp have 1.

    A thread has two rows. Its sums alternate between two columns of one row and two of the other: see `mma_layout`.
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
def lazy_operands(count):
    """The constraints of `lazy_product`'s operands: products, sums (the same registers), factors."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescale_o(o, rescale, COLUMNS: gl.constexpr, LAZILY: gl.constexpr):
    """The sums of weighted values, multiplied by their rows' factors from `update_max`."""
    rescale = gl.convert_layout(rescale, gl.SliceLayout(1, mma_layout(COLUMNS)))[:, None]
    if LAZILY:
        COUNT: gl.constexpr = COLUMNS // 2
        PTX: gl.constexpr = lazy_product(COUNT)
        OPERANDS: gl.constexpr = lazy_operands(COUNT)
        o, rescale = gl.broadcast(o, rescale)
        return gl.inline_asm_elementwise(PTX, OPERANDS, [o, rescale], dtype=gl.float32, is_pure=True, pack=COUNT)
    else:
        return o * rescale


@gluon.constexpr_function
def narrower(dtype):
    """PTX that rounds two numbers to 16 bits; the first is the lower half of the register."""
    return f"cvt.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}.f32 $0, $2, $1;"


@gluon.jit
def pack_p(weights, COLUMNS: gl.constexpr, dtype: gl.constexpr, PAIRS: gl.constexpr):
    """Weights in 16 bits for a loop: pairs of neighbours in a register (``PAIRS``), or the form of `as_operand`.

    Without pairs, and with several loops, the compiler unpacks and packs each register in every step: 64 of the 525
    instructions of a plain step of 128 columns, causal (Triton 3.6). An H100 reaches 698 TFLOP/s without pairs, 740
    with them. If scores are capped or have a left bound, there are no registers for pairs.
    """
    if PAIRS:
        NARROWER: gl.constexpr = narrower(dtype)
        left, right = weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]).split()
        return gl.inline_asm_elementwise(NARROWER, "=r,f,f", [left, right], dtype=gl.int32, is_pure=True, pack=1)
    else:
        return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, mma_layout(COLUMNS), 2))


@gluon.jit
def as_operand(p, COLUMNS: gl.constexpr, dtype: gl.constexpr):
    """Weights from `pack_p` as a register operand of the product with V. No data moves."""
    if p.dtype == gl.int32:
        left, right = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        weights = gl.join(left, right).reshape([p.shape[0], 2 * p.shape[1]]).to(dtype, bitcast=True)
        return gl.convert_layout(weights, gl.DotOperandLayout(0, mma_layout(COLUMNS), 2), assert_trivial=True)
    else:
        return p
