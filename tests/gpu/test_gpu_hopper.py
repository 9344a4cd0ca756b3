"""The Hopper GEMM on the GPU: numbers by the error rule, what it leaves alone, and what it leaves to other kernels."""

from __future__ import annotations

import pytest
import torch
from gpu_runs import ON_HOPPER, Run, poison_scratch, rand, randn

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

import hopper_cases as cases
from gpu_cases import BF16, E4M3, F16, F32, by_name
from hopper_cases import CASES, UNALIGNED

import tilestream as ts
from error_rule import Maths, check, passes
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.ops import gpu
from tilestream.plan.plan import Plan


def in_float64(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product of operands of 8 bits."""
    return a.float().double() @ w.float().double().t()


@pytest.fixture(autouse=True)
def _tf32(request):
    """torch's flag says what a case of ops does; a forced plan, and what it is compared with, do not ask it."""
    case = request.node.callspec.params.get("case") if hasattr(request.node, "callspec") else None
    flags = torch.backends.cuda.matmul  # not by monkeypatch, which wants to see an attribute that is listed
    before, flags.allow_tf32 = flags.allow_tf32, case is not None and case.tf32
    yield
    flags.allow_tf32 = before


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_error_rule(case):
    run, (out, around) = Run(case), case.output("cuda")
    poison_scratch()
    assert run(out) is out
    run.check(out, around)


# Plans that are asked for, and ops that make their own ---------------------------------------------------------------


def picked(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Plan:
    """The plan by which an op multiplies these operands."""
    return gpu.find(GemmOperands(a, b, out, Epilogue()), gpu.How()).plan


def test_what_tma_addresses_goes_to_this_kernel():
    a, b = randn(2080, 640), randn(640, 3080)  # a smaller product may be quicker with a program for each tile
    assert picked(a, b, torch.empty(2080, 3080, dtype=BF16, device="cuda")).backend == "hopper"


@pytest.mark.parametrize("case", list(UNALIGNED), ids=by_name)
def test_what_tma_cannot_address_is_copied_first_or_goes_to_the_portable_kernel(case):
    a, b, *_ = case.operands("cuda").values()
    out, _ = case.output("cuda")
    check(ts.matmul(a, b, out=out), Maths(a, b))
    plan = picked(a, b, out)
    assert plan.realigned or plan.backend == "portable"
    assert UNALIGNED[case] in plan.explain()
    forced = ts.plan(512, 768, 640, dtype=BF16, device="cuda", backend="hopper")
    if (case.m, case.n, case.k, case.dtype) == (512, 768, 640, BF16):
        with pytest.raises(ValueError, match=rf"plan\.run: {UNALIGNED[case]}.*backend='portable'"):
            forced.run(a, b)


# 8 bits --------------------------------------------------------------------------------------------------------------


def test_precise_accumulation_is():
    # Positive numbers: the sum grows with K, and what a narrow accumulator drops adds up.
    a, w = (torch.rand(rows, 8192, device="cuda").to(E4M3) for rows in (256, 384))
    reference = in_float64(a, w)
    error = {}
    for fast in (True, False):
        out = ts.matmul(a, w.t(), out_dtype=F32, use_fast_accum=fast)
        error[fast] = ((out - reference).abs() / reference).max().item()
    assert error[False] < 2e-3, error
    assert error[False] < error[True], error


@pytest.mark.parametrize("which", ["scale_a", "scale_b"])
def test_one_scale_of_the_two(which):
    a, w = randn(300, 512, dtype=E4M3), randn(400, 512, dtype=E4M3)
    scale = rand(*((300, 1) if which == "scale_a" else (1, 400)))
    product = in_float64(a, w)
    out = ts.matmul(a, w.t(), **{which: scale})
    assert passes(out, product * scale, (product.float() * scale).bfloat16())


def test_scales_and_biases_at_any_address_and_stride():
    # A kernel that was compiled for what lies at multiples of 16 is not launched on what does not.
    a, w = randn(300, 512, dtype=E4M3), randn(400, 512, dtype=E4M3)
    product = in_float64(a, w)
    rows, columns, biases = rand(2000), rand(2000), rand(2000).bfloat16()
    for at, step in ((0, 1), (1, 1), (4, 1), (3, 2), (0, 4)):
        scale_a, scale_b, bias = (
            x[at:][::step][:extent] for x, extent in ((rows, 300), (columns, 400), (biases, 400))
        )  # fmt: skip
        out = ts.matmul(a, w.t(), scale_a=scale_a, scale_b=scale_b, bias=bias)
        scaled = product * scale_a[:, None] * scale_b
        assert passes(out, scaled + bias.double(), (scaled.float() + bias).bfloat16()), (at, step)


# Large operands, special numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", list(cases.LARGE))
def test_more_than_2_to_the_31_elements(which):
    case = cases.LARGE[which]
    run, (out, around) = Run(case), case.output("cuda")
    a = run.operands["a"]
    assert (a if which == "operand" else around).numel() > 2**31
    run(out)
    assert not any(part.isnan().any() for part in out.split(2**14))
    rows = around[out.storage_offset() :][: case.m * out.stride(0)].view(case.m, -1)
    assert rows[:, case.n :].isnan().all(), "written between the rows"
    for at in (0, case.m // 2, 2**31 // case.n - 32 if which != "operand" else 2**20 - 32, case.m - 64):
        run.operands["a"] = a[at : at + 64]
        run.check(out[at : at + 64])
    del run, out, around, a, rows
    torch.cuda.empty_cache()


def test_float16_saturates_as_torchs_does():
    # A sum beyond float16's range is infinite, not a number of the wrong sign, and no NaN.
    a, b = (torch.full(shape, 60.0, device="cuda", dtype=F16) for shape in ((128, 512), (512, 136)))
    assert torch.equal(ts.matmul(a, b), torch.matmul(a, b))
    assert torch.isinf(ts.matmul(a, b)).all()


@pytest.mark.parametrize("case", cases.SPOILED, ids=by_name)
def test_not_a_number_stays_where_it_belongs(case):
    run = Run(case)
    cases.spoil(run.operands["a"], run.operands["b"])
    out = run()
    assert out[7].isnan().all()
    keep = torch.ones_like(out, dtype=torch.bool)
    keep[7], keep[:, 3] = False, False
    assert torch.isfinite(out[keep]).all()
