"""Operands by torch's keyword names."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import tilestream as ts

A, B, C = torch.randn(6, 5), torch.randn(5, 4), torch.randn(6, 4)
AS, BS, W = torch.randn(2, 6, 5), torch.randn(2, 5, 4), torch.randn(4, 5)


@pytest.mark.parametrize(
    ("op", "peer", "operands"),
    [
        (ts.matmul, torch.matmul, {"input": A, "other": B}),
        (ts.mm, torch.mm, {"input": A, "mat2": B}),
        (ts.bmm, torch.bmm, {"input": AS, "mat2": BS}),
        (ts.addmm, torch.addmm, {"input": C, "mat1": A, "mat2": B}),
        (ts.linear, F.linear, {"input": A, "weight": W, "bias": C[0]}),
    ],
    ids=["matmul", "mm", "bmm", "addmm", "linear"],
)
def test_a_call_by_torchs_names_is_torchs(op, peer, operands):
    torch.testing.assert_close(op(**operands), peer(**operands))
    compiled = torch.compile(op, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**operands), peer(**operands))
    first, *others = operands
    torch.testing.assert_close(op(operands[first], **{name: operands[name] for name in others}), peer(**operands))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ts.matmul(A, B, input=A), r"matmul: input= and a are the same operand; give one of them"),
        (lambda: ts.mm(A, B, mat2=B), r"mm: mat2= and b are the same operand"),
        (lambda: ts.linear(A, W, input=A), r"linear: input= and x are the same operand"),
        (lambda: ts.matmul(A, other=None), r"matmul: b is None; it must be a torch\.Tensor"),
        (lambda: ts.matmul(A), r"matmul: b is None; it must be a torch\.Tensor"),
        (lambda: ts.mm(A, other=B), r"mm\(\) got an unexpected keyword argument 'other'"),
        (lambda: ts.matmul(A, B, actvation="relu"), r"matmul\(\) got an unexpected keyword argument 'actvation'"),
        (lambda: ts.addmm(C, A, B, mat1=A), r"addmm: mat1= and a are the same operand"),
    ],
)
def test_what_is_not_a_name_or_given_twice_raises(call, says):
    with pytest.raises(TypeError, match=says):
        call()
