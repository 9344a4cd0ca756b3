"""Numbers: shapes x layouts x dtypes x schedules x workers against the error rule."""

from __future__ import annotations

import pytest
import torch
from gpu_cases import BF16, CASES, E4M3, E5M2, F16, F32, FP8_CASES, WORKER_CASES, Case, by_name
from gpu_runs import nan, randn

import tilestream as ts
import tilestream.ops  # registers torch.ops.tilestream
from error_rule import Maths, check


@pytest.fixture
def tf32():
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def run(case: Case) -> None:
    operands, scales = case.operands("cuda"), case.scale("cuda")
    out = case.output("cuda")
    torch.ops.tilestream.gemm_out(
        *operands.values(), case.alpha, case.beta, case.activation or "none", case.out_dtype, case.schedule,
        case.workers or 0, out, *scales.values(), case.fast_accum,
    )  # fmt: skip
    check(out, case.maths(operands, **scales))


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
    tokens, rows = torch.rand(3, 50, 1, device="cuda"), torch.rand(96, 1, device="cuda")
    maths = Maths(x.view(150, 64), weight.t(), scale_a=tokens.view(150, 1), scale_b=rows.t(), activation="gelu")
    answer = ts.linear(x, weight, scale_a=tokens, scale_b=rows, activation="gelu")
    check(answer.view(150, 96), maths)
    flat = {"scale_a": tokens.view(150), "scale_b": rows.view(96)}
    check(ts.mm(x.view(150, 64), weight.t(), **flat, activation="gelu"), maths)
    made = ts.plan(50, 50, 64, batch=3, dtype=E4M3, scales="row", device="cuda")
    scales = {"scale_a": tokens, "scale_b": tokens.mT}
    check(made.run(x, x.mT, **scales), Maths(x, x.mT, **scales))
    check(ts.bmm(x, x.mT, **scales), Maths(x, x.mT, **scales))


@pytest.mark.parametrize("fast_accum", [True, False])
def test_a_long_k_of_8_bits(fast_accum):
    out_dtype = None if fast_accum else F32
    run(Case(2048, 2048, 8192, E4M3, "nt", out_dtype=out_dtype, scales="row", fast_accum=fast_accum))


def test_added_up_in_float32_is_finer():
    a, b = (torch.rand(s, device="cuda").to(E4M3) for s in ((256, 16384), (512, 16384)))  # positive: sums grow
    want = a.double() @ b.t().double()
    fast, precise = ((ts.mm(a, b.t(), out_dtype=F32, use_fast_accum=how) - want).abs().max() for how in (True, False))
    assert precise <= fast


def test_8_bit_operands_that_torch_does_not_multiply_here():
    a, b = randn(64, 64, dtype=E5M2), randn(64, 64, dtype=E5M2)
    answer = ts.matmul(a, b)
    assert answer.dtype == BF16
    check(answer, Maths(a, b))


@pytest.mark.parametrize("case", WORKER_CASES, ids=by_name)
def test_every_number_of_workers(case):
    run(case)


def test_every_number_of_workers_from_1_to_132():
    case = Case(700, 900, 256)
    a, b, *_ = case.operands("cuda").values()
    want = a.double() @ b.double()
    for workers in range(1, 133):
        for schedule in ("static", "dynamic", "stream_k"):
            out = case.output("cuda")
            ts.matmul(a, b, out=out, schedule=schedule, workers=workers)
            assert (out - want).abs().max() < 0.3, (workers, schedule)


def test_without_tf32_float32_is_exact_to_float32():
    a, b, *_ = Case(300, 300, 300, F32).operands("cuda").values()
    error = (ts.matmul(a, b) - a.double() @ b.double()).abs().max()
    assert error < 1e-4


FORMS = [
    ((7,), (7,)), ((5, 7), (7,)), ((7,), (7, 6)), ((2, 3, 5, 7), (7, 6)), ((2, 1, 5, 7), (3, 7, 6)),
    ((4, 5, 7), (4, 7, 6)),
]  # fmt: skip


@pytest.mark.parametrize("shapes", FORMS, ids=str)
def test_torchs_forms(shapes):
    a, b = (randn(*shape, dtype=F16) for shape in shapes)
    check(ts.matmul(a, b), Maths(a, b))


def test_linear_addmm_bmm_and_mm():
    x, w, bias = randn(3, 50, 64), randn(96, 64), randn(96)
    check(ts.linear(x, w, bias, activation="gelu"), Maths(x, w.t(), bias, activation="gelu"))
    check(ts.mm(x[0], w.t()), Maths(x[0], w.t()))
    check(ts.bmm(x, x.mT), Maths(x, x.mT))
    maths = Maths(x[0], w.t(), residual=bias.expand(50, 96), alpha=3, beta=2)
    check(ts.addmm(bias, x[0], w.t(), beta=2, alpha=3), maths)


def test_more_than_2_to_the_31_elements():
    # A of 2**31 + 2**21 elements: the last rows lie past 31 bits, and so do the output's.
    rows, k, n = 2**20 + 1024, 2048, 2304
    a = torch.empty(rows, k, dtype=BF16, device="cuda").normal_()
    b, out = randn(k, n), nan(rows, n)
    assert min(a.numel(), out.numel()) > 2**31
    ts.matmul(a, b, out=out)
    assert not any(part.isnan().any() for part in out.split(2**17))
    for at in (0, 2**20 - 64, rows - 64):
        check(out[at : at + 64], Maths(a[at : at + 64], b))
