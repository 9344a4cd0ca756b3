"""What operands of 8 bits and scales must not be raises before anything is computed, and says what it should be."""

# ruff: noqa: E501  # a line of the table is a case

from __future__ import annotations

import pytest
import torch

import tilestream as ts
import tilestream.ops  # registers torch.ops.tilestream
from error_rule import FP8, Maths, check, nans, rand

E4M3 = FP8[0]
gemm = torch.ops.tilestream.gemm.default

A, B = rand(6, 5, dtype=E4M3), rand(5, 4, dtype=E4M3)
ROW, COLUMN = torch.ones(6, 1), torch.ones(1, 4)


def wanting(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


BAD = [
    ("one of 8 bits", lambda: ts.matmul(A, B.float()), TypeError, r"matmul: a is torch.float8_e4m3fn, b is torch.float32; they have one dtype, or two of float8_e4m3fn, float8_e5m2"),
    ("of two kinds", lambda: ts.matmul(A.to(torch.float8_e4m3fnuz), B), TypeError, r"matmul: a is torch.float8_e4m3fnuz, b is torch.float8_e4m3fn; they have one dtype, or two of float8_e4m3fn, float8_e5m2, or two of float8_e4m3fnuz, float8_e5m2fnuz"),
    ("a scale's kind", lambda: ts.matmul(A.view(torch.uint8).view(torch.float8_e8m0fnu), B), TypeError, r"matmul: a: dtype: torch.float8_e8m0fnu; tilestream multiplies .*float8_e5m2fnuz: convert first"),
    ("8 bits out", lambda: ts.matmul(A, B, out_dtype=E4M3), TypeError, r"out_dtype=float8_e4m3fn: results have 16 bits or more.*take bfloat16 and convert the result"),
    ("64 bits out", lambda: ts.matmul(A, B, out_dtype=torch.float64), TypeError, r"out_dtype=float64: float8_e4m3fn operands are added up in float32"),
    ("out of 8 bits", lambda: ts.matmul(A, B, out=nans(6, 4).to(E4M3)), TypeError, r"matmul: out is torch.float8_e4m3fn; of 8 bits are operands only: out.to\(torch.bfloat16\)"),
    ("bias of 8 bits", lambda: ts.matmul(A, B, bias=B[0]), TypeError, r"matmul: bias is torch.float8_e4m3fn; of 8 bits are operands only"),
    ("residual of 8 bits", lambda: ts.matmul(A, B, residual=nans(6, 4).to(E4M3)), TypeError, r"matmul: residual is torch.float8_e4m3fn"),
    ("scale's dtype", lambda: ts.matmul(A, B, scale_a=ROW.double()), TypeError, r"matmul: scale_a is torch.float64; scales are torch.float32: scale_a.float\(\)"),
    ("scale of bf16", lambda: ts.linear(A, B.t(), scale_b=COLUMN.bfloat16()), TypeError, r"linear: scale_b is torch.bfloat16; scales are torch.float32"),
    ("scale of integers", lambda: ts.matmul(A, B, scale_a=ROW.int()), TypeError, r"matmul: scale_a is torch.int32; scales are torch.float32"),
    ("scale is a number", lambda: ts.matmul(A, B, scale_a=2.0), TypeError, r"matmul: scale_a is a float; it is a torch.Tensor"),
    ("scale elsewhere", lambda: ts.matmul(A, B, scale_b=COLUMN.to("meta")), ValueError, r"matmul: scale_b is on meta, the others on cpu"),
    ("a's shape", lambda: ts.matmul(A, B, scale_a=torch.ones(5)), ValueError, r"matmul: scale_a has shape \[5\]; it has one element, or one a row of a: \[6\], or what broadcasts to \[6, 1\]"),
    ("a's as a row", lambda: ts.matmul(A, B, scale_a=ROW.t()), ValueError, r"matmul: scale_a has shape \[1, 6\]"),
    ("b's as a column", lambda: ts.matmul(A, B, scale_b=COLUMN.t()), ValueError, r"matmul: scale_b has shape \[4, 1\]; it has one element, or one a column of b: \[4\], or what broadcasts to \[1, 4\]"),
    ("weight's shape", lambda: ts.linear(A, B.t(), scale_b=torch.ones(6, 1)), ValueError, r"linear: scale_b has shape \[1, 6\]; it has one element, or one a row of weight: \[4\]"),
    ("blocks of K", lambda: ts.matmul(A, B, scale_a=torch.ones(6, 5)), ValueError, r"matmul: scale_a has shape \[6, 5\]"),
    ("too many dimensions", lambda: ts.mm(A, B, scale_a=torch.ones(2, 6, 1)), ValueError, r"mm: scale_a has shape \[2, 6, 1\]"),
    ("no scale", lambda: ts.matmul(A, B, scale_a=torch.ones(0)), ValueError, r"matmul: scale_a has shape \[0\]"),
    ("batches", lambda: ts.bmm(A[None], B[None], scale_a=torch.ones(2, 6, 1)), ValueError, r"bmm: scale_a has shape \[2, 6, 1\]; .*broadcasts to \[1, 6, 1\]"),
    ("use_fast_accum", lambda: ts.matmul(A, B, use_fast_accum=1), TypeError, r"matmul: use_fast_accum=1; it is True or False"),
    ("a's gradient", lambda: ts.matmul(wanting(A), B), RuntimeError, r"matmul: a is torch.float8_e4m3fn and requires a gradient; operands of 8 bits get none: pass a.detach\(\)"),
    ("b's gradient", lambda: ts.mm(A, wanting(B)), RuntimeError, r"mm: b is torch.float8_e4m3fn and requires a gradient"),
    ("scale's gradient", lambda: ts.matmul(A, B, scale_a=wanting(ROW)), RuntimeError, r"matmul: scale_a requires a gradient; scales get none: pass scale_a.detach\(\), or multiply by it outside"),
    ("scale's gradient, more bits", lambda: ts.matmul(A.float(), B.float(), scale_b=wanting(COLUMN)), RuntimeError, r"matmul: scale_b requires a gradient"),
    ("overlap", lambda: ts.matmul(A, B, scale_a=(x := torch.ones(6, 4))[:, :1], out=x, out_dtype=torch.float32), ValueError, r"out: overlaps scale_a in memory"),
    ("b_dtype", lambda: ts.plan(6, 4, 5, dtype=E4M3, b_dtype="float16"), TypeError, r"b_dtype='float16': A is float8_e4m3fn; they have one dtype, or two of float8_e4m3fn, float8_e5m2, or two of float8_e4m3fnuz"),
    ("b_dtype's kind", lambda: ts.plan(6, 4, 5, dtype=E4M3, b_dtype="float8_e5m2fnuz"), TypeError, r"b_dtype='float8_e5m2fnuz': A is float8_e4m3fn; they have one dtype, or two of"),
    ("plan's scales", lambda: ts.plan(6, 4, 5, scales="block"), ValueError, r"scales='block'; it is one of none, tensor, row"),
    ("plan's use_fast_accum", lambda: ts.plan(6, 4, 5, use_fast_accum="no"), TypeError, r"use_fast_accum='no'; it is True or False"),
    ("plan's out_dtype", lambda: ts.plan(6, 4, 5, dtype=E4M3, out_dtype=E4M3), TypeError, r"out_dtype=float8_e4m3fn: results have 16 bits or more"),
    ("the registered op's scale", lambda: gemm(A, B, None, None, 1.0, 1.0, "none", None, "auto", 0, torch.ones(6)), ValueError, r"scale_a: shape \[6\]; it has one element, or \[6, 1\]"),
    ("the registered op's gradient", lambda: gemm(wanting(A), B, None, None, 1.0, 1.0, "none", None, "auto", 0), RuntimeError, r"gemm: a is torch.float8_e4m3fn and requires a gradient"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
def test_bad_argument(call, error, message, monkeypatch):
    def nothing(*args, **kwargs):
        raise AssertionError("computed before the arguments were checked")

    if "registered" not in message and "gemm:" not in message:
        monkeypatch.setattr("tilestream.ops.execute.GemmBody", nothing)
    with pytest.raises(error, match=message):
        call()


def test_without_gradients_they_are_taken():
    with torch.no_grad():
        answer = ts.matmul(wanting(A), B, scale_a=wanting(ROW))
    check(answer, Maths(A, B, scale_a=ROW))


def test_forward_mode_is_refused():
    from torch.autograd import forward_ad

    with forward_ad.dual_level():
        scale = forward_ad.make_dual(ROW.clone(), ROW.clone())
        with pytest.raises(NotImplementedError, match="matmul: no forward-mode derivative"):
            ts.matmul(A, B, scale_a=scale)
