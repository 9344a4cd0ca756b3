"""The epilogue on the device, in fp32 on a tile's accumulator."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from tilestream.core.structs import Epilogue, Vector
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
    """`tilestream.core.operands.ACTIVATIONS`, on fp32. NaN stays NaN, in relu too, as torch has it."""
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
def finished(x, e, region, C: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, TILE: tl.constexpr):
    """``activation(alpha * row_scale * column_scale * x + bias + beta * residual)``: the epilogue of every GEMM.

    Parameters as of `affine`.
    """
    ACTIVATION: tl.constexpr = C.ACTIVATION
    return activate(affine(x, e, region, C, ROW, COLUMN, TILE), ACTIVATION)


@triton.jit
def swiglu(gate, up, e, region, C: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, TILE: tl.constexpr):
    """``silu(gate) * up``, each scaled and with its bias: the epilogue of the two halves of B's columns.

    The vectors of ``up`` begin ``e.columns`` behind those of ``gate``. Other parameters as of `affine`.
    """
    bias, scale = e.bias, e.column_scale
    if C.BIAS == "columns":
        bias = Vector(bias.at + tl.cast(e.columns, tl.int64) * bias.step, bias.batch, bias.step)
    if C.SCALES == "row":
        if scale.at is not None:
            scale = Vector(scale.at + tl.cast(e.columns, tl.int64) * scale.step, scale.batch, scale.step)
    behind = Epilogue(
        e.out, e.residual, bias, e.row_scale, scale, e.alpha, e.beta, e.rows, e.columns, e.map, e.buffers
    )  # fmt: skip
    gate = affine(gate, e, region, C, ROW, COLUMN, TILE)
    return gate * sigmoid(gate) * affine(up, behind, region, C, ROW, COLUMN, TILE)


@triton.jit
def affine(x, e, region, C: tl.constexpr, ROW: tl.constexpr, COLUMN: tl.constexpr, TILE: tl.constexpr):
    """``alpha * row_scale * column_scale * x + bias + beta * residual``.

    Parameters
    ----------
    x
        float32 ``[rows, columns]``: an accumulator, or a strip of it.
    e
        `tilestream.core.structs.Epilogue`; a scale that is None is 1.
    region
        `tilestream.core.structs.Region`, that of ``x``.
    ROW, COLUMN, TILE
        A backend's loads, ``(operand, e, region, C)``: of a `Vector` float32 ``[rows]`` and ``[columns]``, of a
        `Matrix` float32 ``[rows, columns]``; of what lies outside the output, anything.
    """
    if C.SCALES == "tensor":
        factor = 1.0
        if e.row_scale.at is not None:
            factor = factor * tl.load(e.row_scale.at)
        if e.column_scale.at is not None:
            factor = factor * tl.load(e.column_scale.at)
        x = x * factor
    elif C.SCALES == "row":
        # (x * r) * c could overflow where x * (r * c) does not, and costs as many multiplications.
        factor = 1.0
        if e.row_scale.at is not None:
            factor = factor * ROW(e.row_scale, e, region, C)[:, None]
        if e.column_scale.at is not None:
            factor = factor * COLUMN(e.column_scale, e, region, C)[None, :]
        x = x * factor
    if C.SCALED:
        x = x * e.alpha
    if C.BIAS == "columns":
        x = x + COLUMN(e.bias, e, region, C)[None, :]
    elif C.BIAS == "rows":
        x = x + ROW(e.bias, e, region, C)[:, None]
    if C.RESIDUAL:
        # Of two products a compiler may fuse either one with the addition, in one kernel so and in another otherwise.
        x = tl.fma(TILE(e.residual, e, region, C), e.beta, x)
    return x
