"""Hopper's pieces of the softmax (`tilestream.kernels.device.softmax`): masks, rescaling O, weights two to a register.

*Lazily*: a warp skips the multiplications of its sums where no row's maximum was replaced (`rescale_o`). With 256
columns an H200, limited by power there, does 833 TFLOP/s with this and 778 without. With 128 and with 64 columns it is
2 % slower, because the multiplications run under the exponentials at no cost.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilestream.kernels.hopper.epilogue import mma_layout

#: The bits of a column that say which of four threads of a row has it: see `mma_layout`.
LANES: gl.constexpr = gl.constexpr(6)


@gluon.jit
def masked(scores, mask, first_key, C: gl.constexpr):
    """Scores of the key block from ``first_key`` on, -inf where a row does not see the key: `sees` of a `Mask`.

    After capping, which would make -inf -1.

    A thread's columns are 8 apart, in pairs that begin at twice its place among four. Compared as they are, each is a
    sum that the loop does not change, which the compiler keeps in a register (Triton 3.9 spilled 13 of a thread in the
    largest kernels), and a masked step of 128 columns was 855 instructions. Without their place they are constants, and
    what is left of them is one number: 597.
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
def lazy_operands(count):
    """Constraints of `lazy_product`'s operands: products, sums (the same registers), factors."""
    return ",".join(["=f"] * count + [str(i) for i in range(count)] + ["f"] * count)


@gluon.jit
def rescale_o(o, rescale, COLUMNS: gl.constexpr, LAZILY: gl.constexpr):
    """Sums of weighted values, rescaled as `update_max` says of their rows."""
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
    """PTX that rounds two numbers to 16 bits, the first into the lower half of a register."""
    return f"cvt.rn.{'bf16x2' if dtype == gl.bfloat16 else 'f16x2'}.f32 $0, $2, $1;"


@gluon.jit
def pack_p(weights, COLUMNS: gl.constexpr, dtype: gl.constexpr, PAIRS: gl.constexpr):
    """Weights in 16 bits, as a loop carries them: ``PAIRS`` of neighbours a register, or as `as_operand` gives them.

    Without pairs the compiler takes each register apart and puts it together in every step where there are several
    loops: 64 of the 525 instructions of a plain step of 128 columns, causal (Triton 3.6). An H100 does 698 TFLOP/s so,
    740 with pairs. Where scores are capped or cut off at the left too, pairs cost registers that are not there.
    """
    if PAIRS:
        NARROWER: gl.constexpr = narrower(dtype)
        left, right = weights.reshape([weights.shape[0], weights.shape[1] // 2, 2]).split()
        return gl.inline_asm_elementwise(NARROWER, "=r,f,f", [left, right], dtype=gl.int32, is_pure=True, pack=1)
    else:
        return gl.convert_layout(weights.to(dtype), gl.DotOperandLayout(0, mma_layout(COLUMNS), 2))


@gluon.jit
def as_operand(p, COLUMNS: gl.constexpr, dtype: gl.constexpr):
    """Weights, as `pack_p`, as the multiplication by V takes them, from registers: no data moves."""
    if p.dtype == gl.int32:
        left, right = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
        weights = gl.join(left, right).reshape([p.shape[0], 2 * p.shape[1]]).to(dtype, bitcast=True)
        return gl.convert_layout(weights, gl.DotOperandLayout(0, mma_layout(COLUMNS), 2), assert_trivial=True)
    else:
        return p
