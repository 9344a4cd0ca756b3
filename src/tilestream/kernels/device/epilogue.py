"""The epilogue on the device: what happens to the accumulator of a tile, in fp32, and its store."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from tilestream.kernels.device.jit import INTERPRETED


@triton.jit
def _reciprocal_on_device(x):
    if is_cuda():
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = 1.0 / x
    return y


@triton.jit
def _power_of_2_on_device(x):
    if is_cuda():
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        y = tl.exp2(x)
    return y


def _reciprocal_on_host(x):
    return 1.0 / x


def _power_of_2_on_host(x):
    return tl.exp2(x)


#: To the last bit or the one before, of numbers that are neither tiny nor huge: without the steps that the compiler
#: takes around the instruction for those that are.
reciprocal = _reciprocal_on_host if INTERPRETED else _reciprocal_on_device
power_of_2 = _power_of_2_on_host if INTERPRETED else _power_of_2_on_device


@triton.jit
def sigmoid(x):
    """``1 / (1 + exp(-x))``."""
    return reciprocal(1.0 + power_of_2(-1.4426950408889634 * x))


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """`tilestream.launch.epilogue.ACTIVATIONS`, on fp32. NaN stays NaN, in relu too, as torch has it."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "gelu":
        # x Phi(x) = max(x, 0) - |x| / 2 erfc(|x| / sqrt(2)): no cancellation where x is negative. erfc by Abramowitz
        # and Stegun, Handbook of Mathematical Functions, 7.1.26, to 1.5e-7: 15 instructions and no branch; in a
        # library's erf both of its branches are done for every element. Beyond 20 it is 0, and must meet no infinity.
        z = tl.minimum(tl.abs(x), 20.0)
        t = reciprocal(1.0 + 0.23164189 * z)
        p = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        x = tl.where(x < 0, 0.0, x) - 0.5 * z * p * power_of_2(-0.7213475204444817 * z * z)
    elif ACTIVATION == "gelu_tanh":
        # 0.5 x (1 + tanh(y)) = x sigmoid(2 y): one exponential, and no overflow at either end.
        x = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        x = x * sigmoid(x)
    return x


@triton.jit
def scale(
    x, batch, rows, cols, m, n, scale_a, stride_sab, stride_sam, scale_b, stride_sbb, stride_sbn, SCALES: tl.constexpr
):
    """``scale_a * scale_b * x``; a scale that is None is 1."""
    if SCALES == "tensor":
        factor = 1.0
        if scale_a is not None:
            factor = factor * tl.load(scale_a)
        if scale_b is not None:
            factor = factor * tl.load(scale_b)
        x = x * factor
    elif SCALES == "row":
        # x = (x * a) * b could overflow where x * (a * b) does not, and costs as many multiplications.
        factor = tl.full((x.shape[0], x.shape[1]), 1.0, tl.float32)
        if scale_a is not None:
            at = scale_a + batch.to(tl.int64) * stride_sab + rows * stride_sam
            factor = factor * tl.load(at, mask=rows < m, other=0.0)[:, None]
        if scale_b is not None:
            at = scale_b + batch.to(tl.int64) * stride_sbb + cols * stride_sbn
            factor = factor * tl.load(at, mask=cols < n, other=0.0)[None, :]
        x = x * factor
    return x


@triton.jit
def finish(
    acc, batch, pm, first_column, m, n,
    out, stride_ob, stride_om, stride_on, bias, stride_bias, residual, stride_rb, stride_rm, stride_rn,
    scale_a, stride_sab, stride_sam, scale_b, stride_sbb, stride_sbn, alpha, beta,
    BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, STRIP: tl.constexpr, WIDE: tl.constexpr,
    SCALED: tl.constexpr, SCALES: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """``activation(alpha * scale_a * scale_b * acc + bias + beta * residual)``, stored where the output has elements.

    In strips of ``STRIP`` columns, one after the other: the addresses of a whole tile do not fit the registers beside
    its accumulator.
    """
    if WIDTH > STRIP:
        low, high = acc.reshape(BLOCK_M, 2, WIDTH // 2).permute(0, 2, 1).split()
        finish(
            low, batch, pm, first_column, m, n, out, stride_ob, stride_om, stride_on, bias, stride_bias,
            residual, stride_rb, stride_rm, stride_rn,
            scale_a, stride_sab, stride_sam, scale_b, stride_sbb, stride_sbn, alpha, beta,
            BLOCK_M, WIDTH // 2, STRIP, WIDE, SCALED, SCALES, BIAS, RESIDUAL, ACTIVATION,
        )  # fmt: skip
        finish(
            high, batch, pm, first_column + WIDTH // 2, m, n, out, stride_ob, stride_om, stride_on, bias, stride_bias,
            residual, stride_rb, stride_rm, stride_rn,
            scale_a, stride_sab, stride_sam, scale_b, stride_sbb, stride_sbn, alpha, beta,
            BLOCK_M, WIDTH // 2, STRIP, WIDE, SCALED, SCALES, BIAS, RESIDUAL, ACTIVATION,
        )  # fmt: skip
    else:
        rows = pm * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = first_column + tl.arange(0, WIDTH)
        inside = (rows < m)[:, None] & (cols < n)[None, :]
        x = acc
        if WIDE:
            rows = rows.to(tl.int64)
            cols = cols.to(tl.int64)
        x = scale(
            x, batch, rows, cols, m, n, scale_a, stride_sab, stride_sam, scale_b, stride_sbb, stride_sbn, SCALES
        )  # fmt: skip
        if SCALED:
            x = x * alpha
        if BIAS:
            x = x + tl.load(bias + cols * stride_bias, mask=cols < n, other=0.0).to(tl.float32)[None, :]
        if RESIDUAL:
            at = residual + batch.to(tl.int64) * stride_rb + rows[:, None] * stride_rm + cols[None, :] * stride_rn
            x = x + beta * tl.load(at, mask=inside, other=0.0).to(tl.float32)
        x = activate(x, ACTIVATION)
        at = out + batch.to(tl.int64) * stride_ob + rows[:, None] * stride_om + cols[None, :] * stride_on
        tl.store(at, x.to(out.dtype.element_ty), mask=inside)
