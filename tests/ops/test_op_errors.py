"""Bad arguments raise before anything is computed, and say which argument, what it is, and what it should be."""

# ruff: noqa: E501  # a line of the table is a case

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilestream as ts
import tilestream.ops  # registers torch.ops.tilestream
from error_rule import FP8, Maths, check, nans, rand
from tilestream.arrival.flat import FlatArrival
from tilestream.ops.operands import _may_meet

E4M3 = FP8[0]
A, B = rand(6, 5), rand(5, 4)
A8, B8 = rand(6, 5, dtype=E4M3), rand(5, 4, dtype=E4M3)
ROW, COLUMN = torch.ones(6, 1), torch.ones(1, 4)
with warnings.catch_warnings():  # torch is to give them up
    warnings.simplefilter("ignore")
    QUANTIZED = torch.quantize_per_tensor(A, 0.1, 0, torch.qint8)
with torch.inference_mode():
    FROZEN = torch.zeros(6, 4)
gemm = torch.ops.tilestream.gemm.default


def wanting(x: torch.Tensor) -> torch.Tensor:
    return x.clone().requires_grad_()


#: (name, call, exception, what the message says)
BAD = [
    ("K differs", lambda: ts.matmul(A, A), ValueError, r"matmul: a \[6, 5\] and b \[6, 5\] differ in K: 5 columns of a, 6 rows of b"),
    ("K of vectors", lambda: ts.matmul(A[0], B[:3, 0]), ValueError, r"differ in K: 5 columns of a, 3 rows of b"),
    ("batches", lambda: ts.matmul(rand(2, 6, 5), rand(3, 5, 4)), ValueError, r"matmul: batch dimensions \[2\] of a and \[3\] of b do not broadcast"),
    ("scalar", lambda: ts.matmul(torch.tensor(1.0), B), ValueError, r"matmul: a has 0 and b 2 dimensions; both have at least 1"),
    ("dtypes", lambda: ts.matmul(A, B.double()), TypeError, r"matmul: a is torch.float32, b is torch.float64; they have one dtype"),
    ("integers", lambda: ts.matmul(A.int(), B.int()), TypeError, r"matmul: a: dtype: torch.int32; tilestream multiplies float16, bfloat16, float32, float64"),
    ("complex", lambda: ts.matmul(A, B.to(torch.complex64)), TypeError, r"matmul: b: dtype: torch.complex64"),
    ("NumPy", lambda: ts.matmul(A.numpy(), B), TypeError, r"matmul: a is a NumPy array; it must be a torch.Tensor: torch.from_numpy\(a\)"),
    ("no tensor", lambda: ts.matmul([[1.0]], B), TypeError, r"matmul: a is a list; it must be a torch.Tensor"),
    ("sparse", lambda: ts.matmul(A, B.to_sparse()), TypeError, r"matmul: b has layout torch.sparse_coo; dense tensors are multiplied: b.to_dense\(\)"),
    ("two devices", lambda: ts.matmul(A, B.to("meta")), ValueError, r"matmul: b is on meta, the others on cpu; all are on one device"),
    ("bias shape", lambda: ts.matmul(A, B, bias=rand(6)), ValueError, r"matmul: bias has shape \[6\]; it has one element a column: \[4\]"),
    ("bias as a row", lambda: ts.matmul(A, B, bias=rand(1, 4)), ValueError, r"matmul: bias has shape \[1, 4\]"),
    ("bias number", lambda: ts.matmul(A, B, bias=1.0), TypeError, r"matmul: bias is a float; it must be a torch.Tensor"),
    ("bias dtype", lambda: ts.matmul(A, B, bias=torch.ones(4, dtype=torch.int64)), TypeError, r"matmul: bias: dtype: torch.int64"),
    ("residual shape", lambda: ts.matmul(A, B, residual=rand(6, 5)), ValueError, r"matmul: residual has shape \[6, 5\]; it broadcasts to the result's \[6, 4\]"),
    ("residual too large", lambda: ts.matmul(A, B, residual=rand(2, 6, 4)), ValueError, r"matmul: residual has shape \[2, 6, 4\]"),
    ("residual number", lambda: ts.addmm(1.0, A, B), TypeError, r"addmm: input is a float"),
    ("no input", lambda: ts.addmm(None, A, B), TypeError, r"addmm: input is None; it must be a torch.Tensor"),
    ("no matrix", lambda: ts.addmm(rand(6, 4), A, None), TypeError, r"addmm: b is None; it must be a torch.Tensor"),
    ("no a", lambda: ts.matmul(None, B), TypeError, r"matmul: a is None; it must be a torch.Tensor"),
    ("no b", lambda: ts.matmul(A, None), TypeError, r"matmul: b is None; it must be a torch.Tensor"),
    ("no x", lambda: ts.linear(None, B.t()), TypeError, r"linear: x is None; it must be a torch.Tensor"),
    ("a layer", lambda: ts.linear(A, torch.nn.Linear(5, 4)), TypeError, r"linear: weight is a Linear; it must be a torch.Tensor: weight.weight"),
    ("no weight", lambda: ts.linear(A, None), TypeError, r"linear: weight is None; it must be a torch.Tensor"),
    ("weight's K", lambda: ts.linear(A, rand(4, 7)), ValueError, r"linear: x \[6, 5\] and weight \[4, 7\] differ in K: 5 columns of x, 7 columns of weight"),
    ("weight's vector", lambda: ts.linear(A[0], rand(7)), ValueError, r"linear: x \[5\] and weight \[7\] differ in K"),
    ("weight's dtype", lambda: ts.linear(A, B.t().double()), TypeError, r"linear: x is torch.float32, weight is torch.float64; they have one dtype"),
    ("weight is sparse", lambda: ts.linear(A, B.t().to_sparse()), TypeError, r"linear: weight has layout torch.sparse_coo; dense tensors are multiplied: weight.to_dense\(\), or torch.nn.functional.linear"),
    ("integers of x", lambda: ts.linear(A.int(), B.t()), TypeError, r"linear: x: dtype: torch.int32"),
    ("a scalar x", lambda: ts.linear(torch.tensor(1.0), B.t()), ValueError, r"linear: x has 0 and weight 2 dimensions; both have at least 1"),
    ("x arrives in pieces", lambda: ts.linear(rand(3, 2, 6, 5).transpose(0, 1), B.t(), arrival=ts.Arrival.uniform(6, 6)), ValueError, r"linear: x \[2, 3, 6, 5\] arrives and would have to be copied"),
    ("input's shape", lambda: ts.addmm(rand(6, 5), A, B), ValueError, r"addmm: input has shape \[6, 5\]; it broadcasts to the result's \[6, 4\]"),
    ("input's dtype", lambda: ts.addmm(rand(6, 4).int(), A, B), TypeError, r"addmm: input: dtype: torch.int32"),
    ("out is x", lambda: ts.linear(x := rand(4, 4), rand(4, 4), out=x), ValueError, r"linear: out: overlaps x in memory"),
    ("out is the weight", lambda: ts.linear(rand(4, 4), w := rand(4, 4), out=w), ValueError, r"linear: out: overlaps weight in memory"),
    ("out is a part of the input", lambda: ts.addmm((y := rand(7, 4))[1:], A, B, out=y[:-1]), ValueError, r"addmm: out: overlaps input in memory"),
    ("gradient of an 8-bit weight", lambda: ts.linear(A8, wanting(B8.t())), RuntimeError, r"linear: weight is torch.float8_e4m3fn and requires a gradient"),
    ("too many workers", lambda: ts.matmul(A, B, workers=2**70), ValueError, r"workers=1180591620717411303424; it must be a positive whole number, at most 2\*\*30"),
    ("activation", lambda: ts.matmul(A, B, activation="tanh"), ValueError, r"matmul: activation='tanh'; it must be None or one of relu, gelu, gelu_tanh, silu"),
    ("schedule", lambda: ts.matmul(A, B, schedule="greedy"), ValueError, r"matmul: schedule='greedy'; it must be one of auto, static, dynamic, stream_k"),
    ("no workers", lambda: ts.matmul(A, B, workers=0), ValueError, r"matmul: workers=0; it must be a positive"),
    ("fewer workers", lambda: ts.matmul(A, B, workers=-3), ValueError, r"matmul: workers=-3"),
    ("out_dtype integer", lambda: ts.matmul(A, B, out_dtype=torch.int32), TypeError, r"torch.int32; tilestream multiplies"),
    ("out_dtype too fine", lambda: ts.matmul(A, B, out_dtype=torch.float64), TypeError, r"out_dtype=float64: float32 operands are added up in float32"),
    ("deadline alone", lambda: ts.matmul(A, B, deadline=3), ValueError, r"matmul: deadline=3 without arrival=; nothing is waited for"),
    ("deadline 0", lambda: ts.matmul(A, B, arrival=ts.Arrival.uniform(3, 2), deadline=0), ValueError, r"deadline=0; it must be a positive, finite number of seconds \(default 30\)"),
    ("deadline infinite", lambda: ts.matmul(A, B, arrival=ts.Arrival.uniform(3, 2), deadline=float("inf")), ValueError, r"deadline=inf"),
    ("deadline NaN", lambda: ts.matmul(A, B, arrival=ts.Arrival.uniform(3, 2), deadline=float("nan")), ValueError, r"deadline=nan"),
    ("no arrival", lambda: ts.matmul(A, B, arrival=3), TypeError, r"matmul: arrival is an int; it must be a tilestream.Arrival"),
    ("weights' no arrival", lambda: ts.linear(A, B.t(), weight_arrival="x"), TypeError, r"linear: weight_arrival is a str; it must be a tilestream.Arrival"),
    ("arrival's rows", lambda: ts.matmul(A, B, arrival=ts.Arrival.uniform(2, 4)), ValueError, r"arrival: 4 chunks of 2 rows bring 7 to 8 rows, the input has 6; it takes num_chunks=3"),
    ("bounds", lambda: ts.matmul(A, B, arrival=ts.Arrival.ragged([0, 2, 5])), ValueError, r"arrival: its bounds end at row 5, the input has 6 rows"),
    ("weights' rows", lambda: ts.linear(A, B.t(), weight_arrival=ts.Arrival.uniform(2, 3)), ValueError, r"arrival: 3 chunks of 2 rows bring 5 to 6 rows, the input has 4"),
    ("signals elsewhere", lambda: ts.matmul(A, B, arrival=ts.Arrival.uniform(3, 2, signals=torch.zeros(2, dtype=torch.int32, device="meta"))), ValueError, r"signals: on the meta device, which has no memory; they are on the input's device"),
    ("arriving copy", lambda: ts.matmul(rand(2, 1, 6, 5), rand(1, 3, 5, 4), arrival=ts.Arrival.uniform(6, 2)), ValueError, r"matmul: a \[2, 1, 6, 5\] arrives and would have to be copied for the batches \[2, 3\]"),
    ("arriving in pieces", lambda: ts.matmul(rand(2, 6, 3, 5).transpose(1, 2), rand(2, 3, 5, 4), arrival=ts.Arrival.uniform(6, 6)), ValueError, r"matmul: a \[2, 3, 6, 5\] arrives and would have to be copied for the batches \[2, 3\]"),
    ("arriving batches turned", lambda: ts.matmul(rand(2, 3, 6, 5).transpose(0, 1), rand(3, 2, 5, 4), arrival=ts.Arrival.uniform(6, 6)), ValueError, r"matmul: a \[3, 2, 6, 5\] arrives and would have to be copied"),
    ("mm of batches", lambda: ts.mm(rand(2, 6, 5), B), ValueError, r"mm: a has shape \[2, 6, 5\]; it has 2 dimensions: use matmul for others"),
    ("mm of a vector", lambda: ts.mm(A, B[:, 0]), ValueError, r"mm: b has shape \[5\]"),
    ("bmm of matrices", lambda: ts.bmm(A, B), ValueError, r"bmm: a has shape \[6, 5\]; it has 3 dimensions"),
    ("bmm batches", lambda: ts.bmm(rand(2, 6, 5), rand(1, 5, 4)), ValueError, r"bmm: a has 2 batches, b has 1; bmm does not broadcast, matmul does"),
    ("addmm of batches", lambda: ts.addmm(A, rand(2, 6, 5), B), ValueError, r"addmm: a has shape \[2, 6, 5\]; it has 2 dimensions: \[M, K\] and \[K, N\]"),
    ("weight", lambda: ts.linear(A, rand(2, 4, 5)), ValueError, r"linear: weight has shape \[2, 4, 5\]; it must be \[N, K\]"),
    ("unknown option", lambda: ts.matmul(A, B, block=3), TypeError, r"block"),
    ("nested", lambda: ts.matmul(torch.nested.nested_tensor([rand(2, 3), rand(4, 3)]), rand(3, 4)), TypeError, r"a is nested"),
    ("out negated", lambda: ts.matmul(A, B, out=torch._neg_view(rand(6, 4))), ValueError, r"matmul: out is a negated view"),
    ("nested weight", lambda: ts.linear(A, torch.nested.nested_tensor([rand(2, 5), rand(4, 5)])), TypeError, r"linear: weight is nested; dense tensors are multiplied"),
    ("jagged weight", lambda: ts.linear(A, torch.nested.nested_tensor([rand(2, 5)], layout=torch.jagged)), TypeError, r"linear: weight is nested"),
    ("beta beyond float32", lambda: ts.addmm(B[0], A, B, beta=1e308), ValueError, r"addmm: beta=1e\+308; it is applied in float32, and at most 3\.4e\+38"),
    ("alpha beyond every float", lambda: ts.addmm(B[0], A, B, alpha=10**400), ValueError, r"addmm: alpha=10{400}; it is applied in float32, and at most 3\.4e\+38"),
    ("alpha beyond float64", lambda: ts.addmm(B[0].double(), A.double(), B.double(), alpha=-(10**400)), ValueError, r"addmm: alpha=-10{400}; it is applied in float64, and at most 1\.8e\+308"),
    ("an array of names", lambda: ts.matmul(A, B, activation=np.ones(2)), ValueError, r"matmul: activation=array\(\[1\., 1\.\]\); it must be None or one of relu"),
    ("a nested second operand", lambda: ts.matmul(A, torch.nested.nested_tensor([B, B]), residual=A), TypeError, r"matmul: b is nested"),
    ("a nested operand of addmm", lambda: ts.addmm(A, torch.nested.nested_tensor([A, A]), B), TypeError, r"addmm: a is nested"),
    ("a nested operand of bmm", lambda: ts.bmm(A[None], torch.nested.nested_tensor([B, B])), TypeError, r"bmm: b is nested"),
    ("no shape", lambda: ts.stream_in(iter([]), shape=3, dtype=torch.float32), TypeError, r"stream_in: shape=3; it must be a sequence of whole numbers"),
    ("no device", lambda: ts.stream_in(A, device="gpu"), ValueError, r"stream_in: device='gpu'; it must be a device as torch names them"),
    ("no device of signals", lambda: ts.Arrival.uniform(2, 2, device="gpu"), ValueError, r"device='gpu'; it must be a device as torch names them"),
    ("too many chunks", lambda: ts.Arrival.uniform(1, 2**31 - 1), ValueError, r"num_chunks=2147483647: an arrival has at most 16777216 chunks"),
    ("a tensor for a number", lambda: ts.Arrival.uniform(A, 2), ValueError, r"rows_per_chunk=tensor\("),
    ("a tensor for a row count", lambda: ts.stream_in(A, rows_per_chunk=A), ValueError, r"stream_in: rows_per_chunk=tensor\("),
    ("a pivot that is no number", lambda: ts.stream_in(A, pivot=[0]), ValueError, r"stream_in: pivot=\[0\]; it must be the number of a chunk"),
    ("a name with a zero", lambda: ts.stream_in("a\0.npy"), ValueError, r"no file has a zero in its name"),
    ("layouts of keys", lambda: ts.attention_plan(8, layout=np.ones(2)), ValueError, r"layout=array\(\[1\., 1\.\]\); it must be one of bshd"),
    ("a list of backends", lambda: ts.attention_plan(8, backend=["portable"]), ValueError, r"backend=\['portable'\]; attention has"),
    ("compressed rows", lambda: ts.matmul(A.to_sparse_csr(), B), TypeError, r"matmul: a has layout torch.sparse_csr; dense tensors are multiplied: a.to_dense\(\)"),
    ("a tensor of oneDNN", lambda: ts.addmm(rand(6, 4).to_mkldnn(), A, B), TypeError, r"addmm: input has layout torch._mkldnn; .*input.to_dense\(\)"),
    ("quantized", lambda: ts.matmul(QUANTIZED, B), TypeError, r"matmul: a is torch.qint8, a quantized tensor: a.dequantize\(\)"),
    ("quantized weight", lambda: ts.linear(rand(4, 5), QUANTIZED), TypeError, r"linear: weight is torch.qint8, a quantized tensor"),
    ("quantized out", lambda: ts.mm(rand(6, 4), rand(4, 5), out=QUANTIZED), TypeError, r"mm: out is torch.qint8, a quantized tensor"),
    ("out of inference mode", lambda: ts.mm(A, B, out=FROZEN), RuntimeError, r"mm: out: Inplace update to inference tensor outside InferenceMode is not allowed; give an out that was made outside"),
    ("out of inference mode, fp8", lambda: ts.mm(A8, B8, scale_a=ROW, out_dtype=torch.float32, out=FROZEN), RuntimeError, r"mm: out: Inplace update to inference tensor outside"),
    ("the registered op's out of inference mode", lambda: torch.ops.tilestream.gemm_out(A, B, None, None, 1.0, 1.0, "none", None, "auto", 0, FROZEN), RuntimeError, r"gemm: out: Inplace update to inference tensor outside"),
    # Wrong in type: the message still names the argument and the rule.
    ("workers is a string", lambda: ts.matmul(A, B, workers="2"), ValueError, r"workers='2'; it must be a positive"),
    ("workers is no whole number", lambda: ts.matmul(A, B, workers=2.5), ValueError, r"workers=2\.5; it must be a positive"),
    ("beta is a string", lambda: ts.matmul(A, B, residual=rand(6, 4), beta="x"), TypeError, r"beta='x'; it must be a number"),
    ("alpha is complex", lambda: ts.addmm(rand(6, 4), A, B, alpha=2j), TypeError, r"alpha=2j; it must be a number"),
    ("beta is a tensor", lambda: ts.mm(A, B, residual=rand(6, 4), beta=torch.tensor(2.0)), TypeError, r"beta=tensor\(2\.\); it must be a number"),
    ("beta is an array", lambda: ts.mm(A, B, residual=rand(6, 4), beta=np.array(2.0)), TypeError, r"beta=array\(2\.\); it must be a number"),
    ("alpha is None", lambda: ts.addmm(rand(6, 4), A, B, alpha=None), TypeError, r"alpha=None; it must be a number"),
    ("out_dtype is a string", lambda: ts.matmul(A, B, out_dtype="float32"), TypeError, r"out_dtype='float32'; it must be a torch.dtype"),
    ("deadline is a string", lambda: ts.matmul(A, B, arrival=ts.Arrival.uniform(3, 2), deadline="1"), ValueError, r"deadline='1'; it must be a positive"),
    ("bmm of a list", lambda: ts.bmm([1], rand(1, 5, 4)), TypeError, r"bmm: a is a list; it must be a torch.Tensor"),
    ("unknown option of mm", lambda: ts.mm(A, B, block=3), TypeError, r"^mm\(\) got an unexpected keyword .*block"),
    ("stride of an expanded out", lambda: ts.mm(A, B, out=nans(1, 4).expand(6, 4)), ValueError, r"out: stride \(0, 1\)"),
    # Operands of 8 bits, and scales.
    ("one of 8 bits", lambda: ts.matmul(A8, B8.float()), TypeError, r"matmul: a is torch.float8_e4m3fn, b is torch.float32; they have one dtype, or two of float8_e4m3fn, float8_e5m2"),
    ("of two kinds", lambda: ts.matmul(A8.to(torch.float8_e4m3fnuz), B8), TypeError, r"matmul: a is torch.float8_e4m3fnuz, b is torch.float8_e4m3fn; they have one dtype, or two of float8_e4m3fn, float8_e5m2, or two of float8_e4m3fnuz, float8_e5m2fnuz"),
    ("a scale's kind", lambda: ts.matmul(A8.view(torch.uint8).view(torch.float8_e8m0fnu), B8), TypeError, r"matmul: a: dtype: torch.float8_e8m0fnu; tilestream multiplies .*float8_e5m2fnuz: convert first"),
    ("8 bits out", lambda: ts.matmul(A8, B8, out_dtype=E4M3), TypeError, r"out_dtype=float8_e4m3fn: results have 16 bits or more.*take bfloat16 and convert the result"),
    ("64 bits out", lambda: ts.matmul(A8, B8, out_dtype=torch.float64), TypeError, r"out_dtype=float64: float8_e4m3fn operands are added up in float32"),
    ("out of 8 bits", lambda: ts.matmul(A8, B8, out=nans(6, 4).to(E4M3)), TypeError, r"matmul: out is torch.float8_e4m3fn; of 8 bits are operands only: out.to\(torch.bfloat16\)"),
    ("bias of 8 bits", lambda: ts.matmul(A8, B8, bias=B8[0]), TypeError, r"matmul: bias is torch.float8_e4m3fn; of 8 bits are operands only"),
    ("residual of 8 bits", lambda: ts.matmul(A8, B8, residual=nans(6, 4).to(E4M3)), TypeError, r"matmul: residual is torch.float8_e4m3fn"),
    ("scale's dtype", lambda: ts.matmul(A8, B8, scale_a=ROW.double()), TypeError, r"matmul: scale_a is torch.float64; scales are torch.float32: scale_a.float\(\)"),
    ("scale of bf16", lambda: ts.linear(A8, B8.t(), scale_b=COLUMN.bfloat16()), TypeError, r"linear: scale_b is torch.bfloat16; scales are torch.float32"),
    ("scale of integers", lambda: ts.matmul(A8, B8, scale_a=ROW.int()), TypeError, r"matmul: scale_a is torch.int32; scales are torch.float32"),
    ("scale is a number", lambda: ts.matmul(A8, B8, scale_a=2.0), TypeError, r"matmul: scale_a is a float; it must be a torch.Tensor"),
    ("scale elsewhere", lambda: ts.matmul(A8, B8, scale_b=COLUMN.to("meta")), ValueError, r"matmul: scale_b is on meta, the others on cpu"),
    ("a's shape", lambda: ts.matmul(A8, B8, scale_a=torch.ones(5)), ValueError, r"matmul: scale_a has shape \[5\]; it has one element, or one a row of a: \[6\], or what broadcasts to \[6, 1\]"),
    ("a's as a row", lambda: ts.matmul(A8, B8, scale_a=ROW.t()), ValueError, r"matmul: scale_a has shape \[1, 6\]"),
    ("b's as a column", lambda: ts.matmul(A8, B8, scale_b=COLUMN.t()), ValueError, r"matmul: scale_b has shape \[4, 1\]; it has one element, or one a column of b: \[4\], or what broadcasts to \[1, 4\]"),
    ("weight's shape", lambda: ts.linear(A8, B8.t(), scale_b=torch.ones(6, 1)), ValueError, r"linear: scale_b has shape \[1, 6\]; it has one element, or one a row of weight: \[4\]"),
    ("blocks of K", lambda: ts.matmul(A8, B8, scale_a=torch.ones(6, 5)), ValueError, r"matmul: scale_a has shape \[6, 5\]"),
    ("too many dimensions", lambda: ts.mm(A8, B8, scale_a=torch.ones(2, 6, 1)), ValueError, r"mm: scale_a has shape \[2, 6, 1\]"),
    ("no scale", lambda: ts.matmul(A8, B8, scale_a=torch.ones(0)), ValueError, r"matmul: scale_a has shape \[0\]"),
    ("batches", lambda: ts.bmm(A8[None], B8[None], scale_a=torch.ones(2, 6, 1)), ValueError, r"bmm: scale_a has shape \[2, 6, 1\]; .*broadcasts to \[1, 6, 1\]"),
    ("use_fast_accum", lambda: ts.matmul(A8, B8, use_fast_accum=1), TypeError, r"matmul: use_fast_accum=1; it must be True or False"),
    ("a's gradient", lambda: ts.matmul(wanting(A8), B8), RuntimeError, r"matmul: a is torch.float8_e4m3fn and requires a gradient; operands of 8 bits get none: pass a.detach\(\)"),
    ("b's gradient", lambda: ts.mm(A8, wanting(B8)), RuntimeError, r"mm: b is torch.float8_e4m3fn and requires a gradient"),
    ("scale's gradient", lambda: ts.matmul(A8, B8, scale_a=wanting(ROW)), RuntimeError, r"matmul: scale_a requires a gradient; scales get none: pass scale_a.detach\(\), or multiply by it outside"),
    ("scale's gradient, more bits", lambda: ts.matmul(A8.float(), B8.float(), scale_b=wanting(COLUMN)), RuntimeError, r"matmul: scale_b requires a gradient"),
    ("overlap", lambda: ts.matmul(A8, B8, scale_a=(x := torch.ones(6, 4))[:, :1], out=x, out_dtype=torch.float32), ValueError, r"out: overlaps scale_a in memory"),
    ("b_dtype", lambda: ts.plan(6, 4, 5, dtype=E4M3, b_dtype="float16"), TypeError, r"b_dtype='float16': A is float8_e4m3fn; they have one dtype, or two of float8_e4m3fn, float8_e5m2, or two of float8_e4m3fnuz"),
    ("b_dtype's kind", lambda: ts.plan(6, 4, 5, dtype=E4M3, b_dtype="float8_e5m2fnuz"), TypeError, r"b_dtype='float8_e5m2fnuz': A is float8_e4m3fn; they have one dtype, or two of"),
    ("plan's scales", lambda: ts.plan(6, 4, 5, scales="block"), ValueError, r"scales='block'; it must be one of none, tensor, row"),
    ("plan's use_fast_accum", lambda: ts.plan(6, 4, 5, use_fast_accum="no"), TypeError, r"use_fast_accum='no'; it must be True or False"),
    ("plan's out_dtype", lambda: ts.plan(6, 4, 5, dtype=E4M3, out_dtype=E4M3), TypeError, r"out_dtype=float8_e4m3fn: results have 16 bits or more"),
    ("the registered op's scale", lambda: gemm(A8, B8, None, None, 1.0, 1.0, "none", None, "auto", 0, torch.ones(6)), ValueError, r"scale_a: shape \[6\]; it has one element, or \[6, 1\]"),
    ("the registered op's gradient", lambda: gemm(wanting(A8), B8, None, None, 1.0, 1.0, "none", None, "auto", 0), RuntimeError, r"gemm: a is torch.float8_e4m3fn and requires a gradient"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), [bad[1:] for bad in BAD], ids=[bad[0] for bad in BAD])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_bad_argument(call, error, message, monkeypatch):
    def nothing(*args, **kwargs):
        raise AssertionError("computed before the arguments were checked")

    if "requires a gradient" not in message or "gemm:" not in message:  # that one is refused by autograd, behind
        monkeypatch.setattr("tilestream.ops.execute.GemmBody", nothing)
    with pytest.raises(error, match=message):
        call()


OPS = {
    "matmul": lambda a, b: ts.matmul(a, b),
    "mm": lambda a, b: ts.mm(a, b),
    "bmm": lambda a, b: ts.bmm(a.unsqueeze(0), b.unsqueeze(0)),
    "addmm": lambda a, b: ts.addmm(torch.zeros(6, 4), a, b),
    "linear": lambda a, b: ts.linear(a, b.t()),
}


@pytest.mark.parametrize("device", ["xpu", "mps"])
@pytest.mark.parametrize("op", OPS)
def test_tensors_elsewhere_raise_with_the_way_out(op, device):
    name = {"linear": "x"}.get(op, "a")
    with FakeTensorMode():
        a, b = torch.empty(6, 5, device=device), torch.empty(5, 4, device=device)
        with pytest.raises(
            NotImplementedError,
            match=rf"{op}: {name} is on {device}:0; .* and ROCm GPUs: use torch\.\S*{op} there, or {name}\.cpu\(\)",
        ):
            OPS[op](a, b)


@pytest.mark.parametrize("op", OPS)
def test_gpu_operands_are_taken(op):
    with FakeTensorMode(allow_non_fake_inputs=True):
        a, b = torch.empty(6, 5, device="cuda"), torch.empty(5, 4, device="cuda")
        assert OPS[op](a, b).device.type == "cuda" if op != "addmm" else True


def test_signals_elsewhere_are_named_with_the_way_out():
    arrival = ts.Arrival.uniform(3, 2)
    flat = FlatArrival.of(arrival)
    told = r'linear: the arrival.s signals are on cpu, the operands on cuda:1; .*device="cuda:1"'
    with pytest.raises(ValueError, match=told):
        flat.signals("linear", torch.device("cuda:1"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_an_arrival_on_a_gpu_that_is_not_there():
    with pytest.raises(NotImplementedError, match="device='cuda:3'; torch sees no GPU here"):
        ts.Arrival.uniform(3, 2, device="cuda:3")
    with pytest.raises(NotImplementedError, match="device='xpu'; inputs arrive on the CPU and on CUDA and ROCm GPUs"):
        ts.Arrival.ragged([0, 3], device="xpu")
    with pytest.raises(ValueError, match="device='cuda': the signals are on cpu"):
        ts.Arrival.uniform(3, 2, device="cuda", signals=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(NotImplementedError, match="stream_in: device='cuda'; torch sees no GPU here"):
        ts.stream_in(torch.zeros(3, 2), device="cuda")
    with pytest.raises(NotImplementedError, match="stream_in: device='xpu'"):
        ts.stream_in(torch.zeros(3, 2), device="xpu")


@pytest.mark.parametrize("which", ["b", "bias", "residual", "out"])
def test_any_operand_elsewhere_raises(which):
    with FakeTensorMode(allow_non_fake_inputs=True):
        shapes = {"a": (6, 5), "b": (5, 4), "bias": (4,), "residual": (6, 4), "out": (6, 4)}
        tensors = {name: torch.empty(shape, device="xpu" if name == which else "cpu") for name, shape in shapes.items()}
        with pytest.raises(NotImplementedError, match=rf"matmul: {which} is on xpu:0; .* {which}\.cpu\(\)"):
            ts.matmul(**tensors)


def test_the_way_out_of_linear_exists():
    with FakeTensorMode(), pytest.raises(NotImplementedError, match=r"torch\.nn\.functional\.linear"):
        OPS["linear"](torch.empty(6, 5, device="xpu"), torch.empty(5, 4, device="xpu"))


def test_a_bad_call_leaves_out_and_signals_alone():
    words = torch.ones(2, dtype=torch.int32)
    arrival = ts.Arrival.uniform(3, 2, signals=words)
    out = nans(6, 4)
    for bad in (
        {"activation": "tanh"},
        {"workers": 0},
        {"bias": rand(5)},
        {"deadline": -1.0},
        {"residual": rand(7, 4)},
        {"out_dtype": torch.float16},
    ):
        with pytest.raises((ValueError, TypeError)):
            ts.matmul(A, B, out=out, arrival=arrival, **bad)
        assert out.isnan().all()
        assert words.tolist() == [1, 1]


def test_a_dead_arrival_is_named():
    # Only the registered op can meet one: an Arrival that is passed is alive.
    arrival = ts.Arrival.uniform(3, 2)
    ints = [arrival.key, 1, 0, 2, 3]
    del arrival
    with pytest.raises(ValueError, match=r"mm: no arrival with key \d+ is alive; keep the Arrival"):
        torch.ops.tilestream.gemm_arriving(
            A, B, None, None, 1.0, 1.0, "none", None, "auto", 0, None, ints, None, [], 1.0, "mm"
        )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": rand(5)}, ValueError, r"gemm: a has 1 and b 2 dimensions; both have 2, or both 3"),
        ({"a": rand(1, 6, 5)}, ValueError, r"gemm: a has 3 and b 2 dimensions"),
        ({"a": rand(6, 7)}, RuntimeError, r"gemm: a \[6, 7\] and b \[5, 4\] differ in K"),
        ({"b": B.double()}, TypeError, r"gemm: a is torch.float32, b is torch.float64"),
        ({"bias": rand(3)}, ValueError, r"bias: shape \[3\]; it has one element a column: \[4\]"),
        ({"residual": rand(4)}, ValueError, r"residual: shape \[4\]; it has the output's: \[6, 4\]"),
        ({"activation": "tanh"}, ValueError, r"activation='tanh'; it must be one of relu, gelu, gelu_tanh, silu"),
        ({"schedule": "greedy"}, ValueError, r"schedule='greedy'"),
    ],
)
def test_the_registered_op_checks_for_itself(change, error, message):
    operands = {"a": A, "b": B, "bias": None, "residual": None} | {
        k: v for k, v in change.items() if k in ("a", "b", "bias", "residual")
    }
    with pytest.raises(error, match=message):
        torch.ops.tilestream.gemm(
            *operands.values(), 1.0, 1.0, change.get("activation", "none"), None, change.get("schedule", "auto"), 0
        )


def test_without_gradients_operands_that_want_one_are_taken():
    with torch.no_grad():
        answer = ts.matmul(wanting(A8), B8, scale_a=wanting(ROW))
    check(answer, Maths(A8, B8, scale_a=ROW))


def test_operands_meet_from_the_first_byte_that_both_have():
    x = torch.zeros(64, dtype=torch.uint8)
    for one, other, meet in ((x[:33], x[32:], True), (x[:32], x[32:], False), (x[:34], x[33:], True)):
        assert _may_meet(one, other) == _may_meet(other, one) == meet
