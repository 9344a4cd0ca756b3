"""The error rule itself: what it must refuse, it refuses."""

from __future__ import annotations

import pytest
import torch

import tilestream as ts
from error_rule import DTYPES, Maths, check, errors, nans, one_ulp, passes, rand

M, N, K = 96, 80, 200


def maths(dtype):
    return Maths(rand(M, K, dtype=dtype, seed=1), rand(K, N, dtype=dtype, seed=2))


def written(x: torch.Tensor, place, value) -> torch.Tensor:
    x[place] = value
    return x


#: What a kernel may get wrong. Half a percent is more than bf16's ulp at the result's scale (1/128 of it at most).
SPOILT = {
    "zeros": torch.zeros_like,
    "wrong tile": lambda x: written(x, (slice(32, 48), slice(16, 32)), x[48:64, 16:32].clone()),
    "tile left out": lambda x: written(x, (slice(32, 48), slice(16, 32)), float("nan")),
    "shifted row": lambda x: written(x, (40, slice(1, None)), x[40, :-1].clone()),
    "swapped rows": lambda x: written(x, [3, 4], x[[4, 3]]),
    "one element": lambda x: written(x, (M - 1, N - 1), x[M - 1, N - 1] + 1.0),
    "half a percent": lambda x: x * (1.005 if x.dtype in (torch.float32, torch.float64) else 1.05),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", SPOILT)
def test_refuses_what_is_wrong(how, dtype):
    problem = maths(dtype)
    right = problem.by_torch()
    check(right.clone(), problem)
    with pytest.raises(AssertionError):
        check(SPOILT[how](right.clone()), problem)


def test_refuses_an_epilogue_left_out():
    given = {"bias": rand(N), "residual": rand(M, N), "beta": 0.5, "activation": "silu"}
    a, b = rand(M, K, seed=1), rand(K, N, seed=2)
    whole = Maths(a, b, **given)
    check(whole.by_torch(), whole)
    for change in ({"activation": None}, {"residual": None}, {"bias": None}, {"beta": 1.0}, {"activation": "gelu"}):
        with pytest.raises(AssertionError):
            check(Maths(a, b, **{**given, **change}).by_torch(), whole)


def test_refuses_sums_in_bfloat16():
    problem = maths(torch.bfloat16)
    total = torch.zeros(M, N, dtype=torch.bfloat16)
    for k in range(K):
        total += problem.a[:, k : k + 1] * problem.b[k : k + 1]
    assert not passes(total, problem.finer(), problem.by_torch())


def test_refuses_another_shape_or_dtype():
    problem = maths(torch.float32)
    right = problem.by_torch()
    for wrong in (right[:-1], right.unsqueeze(0), right.double()):
        with pytest.raises(AssertionError):
            check(wrong, problem)


def test_is_not_tied_to_torchs_own_bits():
    problem = maths(torch.float32)
    check(problem.a.double().matmul(problem.b.double()).float(), problem)
    check(torch.mm(problem.b.t().contiguous(), problem.a.t().contiguous()).t(), problem)


def test_one_ulp_and_nan():
    assert one_ulp(torch.tensor([0.5, 3.0]), torch.float32) == 2 * torch.finfo(torch.float32).eps
    assert one_ulp(torch.zeros(3), torch.float16) == torch.finfo(torch.float16).tiny
    assert all(error != error for error in errors(nans(2, 2), torch.zeros(2, 2)))


def test_float64_has_a_reference_finer_than_itself():
    # The product of float64 operands is accumulated in long double: errors of torch's own are not all zero.
    problem = maths(torch.float64)
    assert errors(problem.by_torch(), problem.finer())[0] > 0


@pytest.mark.usefixtures("small_tiles")
def test_notices_a_tile_that_a_kernel_leaves_out(monkeypatch):
    from tilestream.kernels.cpu.gemm import GemmBody

    problem = maths(torch.float32)
    real = GemmBody.compute
    monkeypatch.setattr(GemmBody, "compute", lambda self, item: item.tile != 7 and real(self, item))
    with pytest.raises(AssertionError):
        check(ts.matmul(problem.a, problem.b, out=nans(M, N), workers=2, schedule="dynamic"), problem)


def test_tf32_may_be_as_far_off_as_its_bits_and_no_further():
    a, b = rand(M, K, seed=1), rand(K, N, seed=2)
    rounded = Maths(a, b, tf32=True)
    check(torch.matmul(a, b), rounded)
    check(rounded.by_torch(), rounded)
    with pytest.raises(AssertionError):
        check(rounded.by_torch(), Maths(a, b))
    with pytest.raises(AssertionError):
        check(torch.matmul(a.bfloat16().float(), b.bfloat16().float()), rounded)
