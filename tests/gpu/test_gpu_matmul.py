"""What ops give: shapes x layouts x dtypes x schedules by the error rule, and under the names of torch."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import BF16, CASES, E4M3, F16, FP8_CASES, Case, by_name
from gpu_runs import check_untouched, nan, rand, randn

import tilestream as ts
import tilestream.ops  # registers torch.ops.tilestream
from error_rule import Maths, check

pytestmark = pytest.mark.usefixtures("way")


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def run(case: Case) -> None:
    operands, (out, around) = case.operands("cuda"), case.output("cuda")
    a, b, bias, residual, scale_a, scale_b = operands.values()
    if case.alpha == 1:
        ts.matmul(
            **operands, out=out, beta=case.beta, activation=case.activation, out_dtype=case.out_dtype,
            use_fast_accum=case.fast_accum, schedule=case.schedule, workers=case.workers,
        )  # fmt: skip
    else:  # which no public op has with all else
        torch.ops.tilestream.gemm_out(
            a, b, bias, residual, case.alpha, case.beta, case.activation or "none", case.out_dtype, case.schedule,
            case.workers or 0, out, scale_a, scale_b, case.fast_accum,
        )  # fmt: skip
    check(out, case.maths(operands))
    check_untouched(out, around)


@pytest.mark.parametrize("case", [case for case in CASES if not case.tf32], ids=by_name)
def test_error_rule(case):
    run(case)


@pytest.mark.usefixtures("portable")
@pytest.mark.parametrize("case", [case for case in CASES if not case.tf32], ids=by_name)
def test_error_rule_of_the_portable_kernel(case):
    run(case)


@pytest.mark.usefixtures("tf32")
@pytest.mark.parametrize("case", [case for case in CASES if case.tf32], ids=by_name)
def test_error_rule_where_torch_allows_tf32(case):
    run(case)


@pytest.mark.parametrize("case", FP8_CASES, ids=by_name)
def test_8_bit_operands_and_scales(case):
    run(case)


def test_8_bit_operands_by_the_public_names():
    x, weight = randn(3, 50, 64, dtype=E4M3), randn(96, 64, dtype=E4M3)
    tokens, rows = rand(3, 50, 1), rand(96, 1)
    maths = Maths(x.view(150, 64), weight.t(), scale_a=tokens.view(150, 1), scale_b=rows.t(), activation="gelu")
    answer = ts.linear(x, weight, scale_a=tokens, scale_b=rows, activation="gelu")
    check(answer.view(150, 96), maths)
    flat = {"scale_a": tokens.view(150), "scale_b": rows.view(96)}
    check(ts.mm(x.view(150, 64), weight.t(), **flat, activation="gelu"), maths)
    made = ts.plan(50, 50, 64, batch=3, dtype=E4M3, scales="row", device="cuda")
    scales = {"scale_a": tokens, "scale_b": tokens.mT}
    check(made.run(x, x.mT, **scales), Maths(x, x.mT, **scales))
    check(ts.bmm(x, x.mT, **scales), Maths(x, x.mT, **scales))


FORMS = [
    ((7,), (7,)), ((5, 7), (7,)), ((7,), (7, 6)), ((2, 3, 5, 7), (7, 6)), ((2, 1, 5, 7), (3, 7, 6)),
    ((4, 5, 7), (4, 7, 6)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", FORMS, ids=str)
def test_torchs_forms(shapes):
    a, b = (randn(*shape, dtype=F16) for shape in shapes)
    check(ts.matmul(a, b), Maths(a, b))


def test_linear_addmm_bmm_and_mm():
    x, w, bias, c = randn(3, 52, 64), randn(96, 64), randn(96), randn(52, 96)
    for _ in range(3):  # from the second on calls are looked up
        x.normal_()
        check(ts.linear(x, w), Maths(x, w.t()))
        check(ts.linear(x, w, bias, activation="gelu"), Maths(x, w.t(), bias, activation="gelu"))
        check(ts.mm(x[0], w.t()), Maths(x[0], w.t()))
        check(ts.bmm(x, x.mT), Maths(x, x.mT))
        check(ts.bmm(x, w.t().expand(3, 64, 96)), Maths(x, w.t().expand(3, 64, 96)))
        for residual in (bias, c):
            maths = Maths(x[0], w.t(), residual=residual.expand(52, 96), alpha=3, beta=2)
            check(ts.addmm(residual, x[0], w.t(), beta=2, alpha=3), maths)


def test_more_than_2_to_the_31_elements(portable):
    # A of 2**31 + 2**21 elements: the last rows lie past 31 bits, and so do the output's. Hopper's: test_gpu_hopper.
    rows, k, n = 2**20 + 1024, 2048, 2304
    a = torch.empty(rows, k, dtype=BF16, device="cuda").normal_()
    b, out = randn(k, n), nan(rows, n)
    assert min(a.numel(), out.numel()) > 2**31
    ts.matmul(a, b, out=out)
    assert not any(part.isnan().any() for part in out.split(2**17))
    for at in (0, 2**20 - 64, rows - 64):
        check(out[at : at + 64], Maths(a[at : at + 64], b))
