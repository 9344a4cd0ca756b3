"""Operands of 8 bits in float16, on a GPU: all 256 values of each kind, those of the kinds that it cannot load too."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from error_rule import NARROW
from tilestream.kernels.portable.convert import to_float16


@triton.jit
def convert(bits, halves, KIND: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(halves + i, to_float16(tl.load(bits + i), KIND))


@triton.jit
def product(bits, eye, out, KIND: tl.constexpr):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    tl.store(out + at, tl.dot(to_float16(tl.load(bits + at), KIND), tl.load(eye + at)))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_each_of_the_256_values_is_a_float16_and_the_matrix_units_keep_the_small_ones(dtype):
    kind = str(dtype).removeprefix("torch.")
    every = torch.arange(256, dtype=torch.uint8)
    right = every.view(dtype).float()
    halves = torch.full((256,), 7.0, dtype=torch.float16, device="cuda")
    convert[(1,)](every.cuda(), halves, kind)
    torch.testing.assert_close(halves.cpu().float(), right, rtol=0, atol=0, equal_nan=True)
    there = ~right.isnan()
    assert torch.equal(torch.signbit(halves.cpu())[there], torch.signbit(right)[there]), "of zero, too"
    # Times one: what is below float16's normal numbers is not taken for zero.
    every[~right.isfinite()] = 0
    out = torch.full((16, 16), 7.0, device="cuda")
    product[(1,)](every.cuda(), torch.eye(16, dtype=torch.float16, device="cuda"), out, kind)
    assert torch.equal(out.cpu(), every.view(dtype).float().view(16, 16))
