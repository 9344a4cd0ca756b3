"""The Hopper kernel on the GPU: numbers by the error rule, order of work, launches, graphs, what it leaves alone."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from gpu_runs import ON_HOPPER, Differences, captured, check_allocations, on_two_streams, poison, randn

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

import hopper_cases as cases
from gpu_cases import BF16, E4M3, E5M2, F16, F32, Case, by_name
from hopper_cases import CASES, FEW, REPEATED, UNALIGNED, HopperCase, worker_cases

import tilestream as ts
from device_order import check_order
from error_rule import Maths, check, errors, passes
from streaming import run_together
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.launch.hopper.launch import GemmLaunch
from tilestream.launch.launch import Probe
from tilestream.ops import gpu
from tilestream.plan.plan import Plan
from tilestream.runtime import device_workspace as workspaces
from tilestream.runtime.properties import cuda_properties

Operands = dict[str, torch.Tensor | None]


def in_float64(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product of operands of 8 bits."""
    return a.float().double() @ w.float().double().t()


def plan_of(case: HopperCase) -> Plan:
    return case.plan(cuda_properties())[0]


def launch(case: HopperCase, plan: Plan, operands: Operands, out: torch.Tensor | None = None) -> torch.Tensor:
    return plan.run(**operands, out=out, alpha=case.alpha, beta=case.beta, activation=case.activation)


def poison_scratch() -> None:
    """A launch must not pass because an earlier one left the right numbers there."""
    for space in workspaces._workspaces.values():
        if space._partials is not None:
            poison(space._partials)


def check_case(case: HopperCase, operands: Operands, out: torch.Tensor) -> None:
    reference = check(out, case.maths(operands))
    if out.dtype == F32 and not case.fp8 and not case.tf32:
        worst, _ = errors(out, reference)
        assert worst <= 2e-4 * reference.abs().max().item(), f"{worst}: rounded to 16 bits on its way?"


def check_untouched(out: torch.Tensor, around: torch.Tensor) -> None:
    """All around the output is still NaN."""
    outside = torch.ones_like(around, dtype=torch.bool)
    outside.as_strided(out.shape, out.stride(), out.storage_offset()).fill_(False)
    assert around[outside].isnan().all(), "written outside of the output"


@pytest.fixture(autouse=True)
def _tf32(request):
    """torch's flag says what a case of ops does; a forced plan, and what it is compared with, do not ask it."""
    case = request.node.callspec.params.get("case") if hasattr(request.node, "callspec") else None
    flags = torch.backends.cuda.matmul  # not by monkeypatch, which wants to see an attribute that is listed
    before, flags.allow_tf32 = flags.allow_tf32, isinstance(case, Case) and case.tf32
    yield
    flags.allow_tf32 = before


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_error_rule(case):
    plan = plan_of(case)
    operands, (out, around) = case.operands("cuda"), case.output("cuda")
    poison_scratch()
    assert launch(case, plan, operands, out) is out
    check_case(case, operands, out)
    check_untouched(out, around)


# Plans that are asked for, and ops that make their own ---------------------------------------------------------------


@pytest.mark.parametrize("case", cases.FORCED_CASES, ids=by_name)
def test_a_plan_with_everything_forced(case):
    plan = ts.plan(
        case.m, case.n, case.k, dtype=BF16, device="cuda", backend="hopper", variant=case.variant, tile=case.tile,
        schedule=case.schedule, stages=case.stages, layout=case.layout, workers=case.workers,
    )  # fmt: skip
    assert (plan.backend, plan.variant, plan.tile, plan.stages) == ("hopper", case.variant, case.tile, 3)
    assert (plan.schedule.kind, plan.workers) == (case.schedule, 7)
    a, w = randn(case.m, case.k), randn(case.n, case.k)
    check(plan.run(a, w.t()), Maths(a, w.t()))


def backend_of(a, b, out, **how) -> str:
    """Which kernel an op launches for these operands."""
    return gpu.find(GemmOperands(a, b, out, Epilogue(**how)), gpu.How()).plan.backend


@pytest.mark.parametrize("case", cases.AUTO, ids=by_name)
def test_matmul(case):
    operands = case.operands("cuda")
    maths = case.maths(operands)
    arguments = (
        *operands.values(), case.alpha, case.beta, case.activation or "none", case.out_dtype, case.schedule, 0
    )  # fmt: skip
    check(torch.ops.tilestream.gemm(*arguments), maths)
    out = case.output("cuda")
    torch.ops.tilestream.gemm_out(*arguments, out)
    check(out, maths)
    assert backend_of(operands["a"], operands["b"], out) == "hopper"


def test_matmul_mm_bmm_linear_and_addmm():
    x, y, w, bias, c = randn(520, 640), randn(640, 264), randn(776, 640), randn(776), randn(520, 264)
    for _ in range(3):  # the second is looked up
        x.normal_()
        check(ts.matmul(x, y), Maths(x, y))
        check(ts.mm(x, y), Maths(x, y))
        check(ts.linear(x, w), Maths(x, w.t()))
        check(ts.linear(x, w, bias, activation="gelu"), Maths(x, w.t(), bias, activation="gelu"))
        check(ts.addmm(c, x, y, beta=2, alpha=3), Maths(x, y, residual=c, alpha=3, beta=2))
        check(ts.bmm(x.view(4, 130, 640), y.expand(4, 640, 264)), Maths(x.view(4, 130, 640), y.expand(4, 640, 264)))
    assert backend_of(x, w.t(), randn(520, 776), bias=bias) == "hopper"


@pytest.mark.parametrize("case", list(UNALIGNED), ids=by_name)
def test_what_tma_cannot_address_goes_to_the_portable_kernel(case):
    a, b, *_ = case.operands("cuda").values()
    out = case.output("cuda")
    check(ts.matmul(a, b, out=out), Maths(a, b))
    plan = gpu.find(GemmOperands(a, b, out, Epilogue()), gpu.How()).plan
    assert plan.backend == "portable"
    assert f"refused   hopper: {UNALIGNED[case]}" in plan.explain()
    forced = ts.plan(512, 768, 640, dtype=BF16, device="cuda", backend="hopper")
    if (case.m, case.n, case.k, case.dtype) == (512, 768, 640, BF16):
        with pytest.raises(ValueError, match=rf"plan\.run: {UNALIGNED[case]}.*backend='portable'"):
            forced.run(a, b)


def test_a_plan_says_why_it_is_not_hoppers():
    assert "hopper: b has strides (777, 1)" in ts.plan(520, 777, 640, dtype=BF16, device="cuda").explain()
    with pytest.raises(NotImplementedError, match=r"backend='hopper': b has strides \(777, 1\)"):
        ts.plan(520, 777, 640, dtype=BF16, device="cuda", backend="hopper")
    assert ts.plan(520, 777, 640, dtype=BF16, device="cuda", layout="nt").backend == "hopper"


# 8 bits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "precise"])
@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_beside_torchs_scaled_mm(dtypes, scales, fast):
    m, n, k = 528, 784, 1024
    a, w = (randn(rows, k, dtype=t) for rows, t in zip((m, n), dtypes, strict=True))
    shapes = ((m, 1), (1, n)) if scales == "row" else ((), ())
    scale_a, scale_b = (torch.rand(shape, device="cuda") + 0.5 for shape in shapes)
    try:
        theirs = torch._scaled_mm(a, w.t(), scale_a, scale_b, out_dtype=BF16, use_fast_accum=fast)
    except RuntimeError as error:
        pytest.skip(f"torch: {error}"[:200])
    reference = in_float64(a, w) * scale_a * scale_b
    for _ in range(2):
        mine = ts.matmul(a, w.t(), scale_a=scale_a, scale_b=scale_b, use_fast_accum=fast)
        assert mine.dtype == BF16
        assert passes(mine, reference, theirs), (errors(mine, reference), errors(theirs, reference))
    linear = ts.linear(a, w, scale_a=scale_a, scale_b=scale_b.reshape(-1, 1), use_fast_accum=fast)
    assert torch.equal(linear, mine)


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
    scale = torch.rand((300, 1) if which == "scale_a" else (1, 400), device="cuda") + 0.5
    product = in_float64(a, w)
    out = ts.matmul(a, w.t(), **{which: scale})
    assert passes(out, product * scale, (product.float() * scale).bfloat16())


def test_scales_and_biases_at_any_address_and_stride():
    # A kernel that was compiled for what lies at multiples of 16 is not launched on what does not.
    a, w = randn(300, 512, dtype=E4M3), randn(400, 512, dtype=E4M3)
    product = in_float64(a, w)
    rows, columns, biases = (torch.rand(2000, device="cuda") + 0.5 for _ in range(3))
    biases = biases.bfloat16()
    for at, step in ((0, 1), (1, 1), (4, 1), (3, 2), (0, 4)):
        scale_a, scale_b, bias = (
            x[at:][::step][:extent] for x, extent in ((rows, 300), (columns, 400), (biases, 400))
        )  # fmt: skip
        out = ts.matmul(a, w.t(), scale_a=scale_a, scale_b=scale_b, bias=bias)
        scaled = product * scale_a[:, None] * scale_b
        assert passes(out, scaled + bias.double(), (scaled.float() + bias).bfloat16()), (at, step)


# The order of work ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 5, 37, 132])
@pytest.mark.parametrize("case", cases.PROBE_CASES, ids=by_name)
def test_device_order_is_the_hosts(case, workers):
    case = replace(case, workers=workers)
    plan, layout = case.plan(cuda_properties())
    operands = case.operands("cuda")
    for _ in range(3):  # on counters as the launch before left them
        out, around = case.output("cuda")
        probe = Probe(plan.workers, 1024 if workers < 30 else 256, out.device)
        GemmLaunch(plan, layout)(GemmOperands(operands["a"], operands["b"], out, Epilogue()), probe=probe)
        check_order(plan.schedule, [probe.log(worker) for worker in range(plan.workers)])
        check_case(case, operands, out)
        check_untouched(out, around)


def test_every_number_of_workers_from_1_to_132():
    first = next(worker_cases(range(1, 133)))
    operands = first.operands("cuda")
    want = first.maths(operands).finer()
    wrong = {}
    for case in worker_cases(range(1, 133)):
        out, _ = case.output("cuda")
        launch(case, plan_of(case), operands, out)
        wrong[case.name] = ((out - want).abs().nan_to_num(1e9) > 0.3).any()
    torch.cuda.synchronize()
    assert not [name for name, one in wrong.items() if one], "[700, 256] @ [256, 904]"


# Launches ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", REPEATED, ids=by_name)
def test_a_hundred_launches_give_the_same_bits(case):
    plan, operands = plan_of(case), case.operands("cuda")
    first = launch(case, plan, operands)
    check_case(case, operands, first)
    poison_scratch()
    differ, out = Differences(), torch.empty_like(first)
    for _ in range(100):
        differ.add(launch(case, plan, operands, poison(out)) != first)
    assert differ.none()


def test_many_launches_of_all_kinds_on_one_workspace():
    plans = [(case, plan_of(case), case.operands("cuda")) for case in REPEATED]
    wants = [launch(*one) for one in plans]
    before = len(workspaces._workspaces)
    differ = Differences()
    for i in range(900):
        at = i * 7 % len(plans)
        differ.add(launch(*plans[at]) != wants[at])
    assert differ.none()
    assert len(workspaces._workspaces) == before


@pytest.mark.parametrize("variant", [row.variant for row in FEW])
def test_a_chain_in_which_each_launch_reads_what_the_one_before_wrote(variant):
    # Launches overlap by programmatic dependent launch: none may read, or overwrite, before the one before has ended.
    size = cases.CHAINED_CASES[0].m
    weight = randn(size, size, dtype=F32).mul(size**-0.5).to(BF16)
    plans = [plan_of(case) for case in cases.CHAINED_CASES if case.variant in (variant, FEW[0].variant)]
    start = randn(size, size)

    def chain(wait: bool) -> torch.Tensor:
        x, y = start.clone(), torch.empty_like(start)
        for i in range(60):
            plans[i % len(plans)].run(x, weight, out=y)
            x, y = y, x
            if i % 10 == 9:
                x.mul_(0.5).add_(start)  # torch's kernels read and write it as well
            if wait:
                torch.cuda.synchronize()
        return x

    want = chain(True)
    assert torch.isfinite(want).all()
    for _ in range(5):
        assert torch.equal(chain(False), want)


@pytest.mark.parametrize("workers", [60, None])
def test_two_streams(kind, workers):
    two = [replace(case, workers=workers) for case in REPEATED if case.schedule == kind][:2]
    plans = [(case, plan_of(case), case.operands("cuda")) for case in two]
    wants = [launch(*one) for one in plans]
    results = on_two_streams([functools.partial(launch, *one) for one in plans])
    for (case, _, operands), want, outs in zip(plans, wants, results, strict=True):
        check_case(case, operands, want)
        assert all(torch.equal(out, want) for out in outs)


@pytest.mark.parametrize("case", REPEATED, ids=by_name)
def test_a_hundred_replays_of_a_graph(case):
    plan, operands = plan_of(case), case.operands("cuda")
    other, second = plan_of(REPEATED[-1]), REPEATED[-1].operands("cuda")
    want = launch(REPEATED[-1], other, second)
    launch(case, plan, operands)  # compiled before it is captured
    out = torch.empty(case.m, case.n, dtype=BF16, device="cuda")
    with captured() as graph:
        launch(case, plan, operands, out)
        again = launch(case, plan, operands)
    wrong = Differences()
    for i in range(100):
        operands["a"].normal_()
        poison(out)
        poison(again)
        graph.replay()
        wrong.add(out != again)
        if i % 3 == 0:  # eager launches in between: a different one, and the same
            wrong.add(launch(REPEATED[-1], other, second) != want)
            wrong.add(launch(case, plan, operands) != out)
        if i % 20 == 0:
            check_case(case, operands, out)
    assert wrong.none()
    check_case(case, operands, out)


def test_a_fresh_thread():
    case = REPEATED[0]
    plan, operands = plan_of(case), case.operands("cuda")
    want, found = launch(case, plan, operands), []
    torch.cuda.synchronize()
    run_together(1, lambda _: found.append(launch(case, plan, operands)))
    assert torch.equal(found[0], want)


@pytest.mark.parametrize("case", REPEATED, ids=by_name)
def test_a_call_allocates_its_output_and_nothing_else(case):
    plan, operands = plan_of(case), case.operands("cuda")
    out = launch(case, plan, operands)
    check_allocations(lambda: launch(case, plan, operands, out), lambda: launch(case, plan, operands))


@pytest.mark.parametrize("case", cases.OWN_RESIDUAL_CASES, ids=by_name)
def test_out_may_be_the_residual(case):
    plan, operands = plan_of(case), case.operands("cuda")
    mine = operands["residual"].clone()
    launch(case, plan, {**operands, "residual": mine}, mine)
    check_case(case, operands, mine)


@pytest.mark.parametrize("which", ["bias", "residual"])
def test_addends_at_odd_addresses(which):
    case = replace(REPEATED[0], bias=which == "bias", residual="rows" if which == "residual" else "")
    plan, operands = plan_of(case), case.operands("cuda")
    for at in (0, 1, 8, 3):
        there = torch.empty(operands[which].numel() + 8, dtype=BF16, device="cuda")[at:]
        operands[which] = there[: operands[which].numel()].view_as(operands[which]).normal_()
        check_case(case, operands, launch(case, plan, operands))


# Large ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", list(cases.LARGE))
def test_more_than_2_to_the_31_elements(which):
    case = cases.LARGE[which]
    operands, (out, around) = case.operands("cuda"), case.output("cuda")
    a, b = operands["a"], operands["b"]
    assert (a if which == "operand" else around).numel() > 2**31
    launch(case, plan_of(case), operands, out)
    assert not any(part.isnan().any() for part in out.split(2**14))
    rows = around[out.storage_offset() :][: case.m * out.stride(0)].view(case.m, -1)
    assert rows[:, case.n :].isnan().all(), "written between the rows"
    for at in (0, case.m // 2, 2**31 // case.n - 32 if which != "operand" else 2**20 - 32, case.m - 64):
        part = {**operands, "a": a[at : at + 64]}
        check_case(case, part, out[at : at + 64])
    del operands, out, around, a, b, rows, part
    torch.cuda.empty_cache()


def test_float16_saturates_as_torchs_does():
    # A sum beyond float16's range is infinite, not a number of the wrong sign, and no NaN.
    a, b = (torch.full(shape, 60.0, device="cuda", dtype=F16) for shape in ((128, 512), (512, 136)))
    assert torch.equal(ts.matmul(a, b), torch.matmul(a, b))
    assert torch.isinf(ts.matmul(a, b)).all()


def test_not_a_number_stays_where_it_belongs():
    for case in (CASES[0], CASES[-1]):
        plan, operands = plan_of(case), case.operands("cuda")
        operands["a"][7].fill_(float("nan"))
        operands["b"][:, 3].fill_(float("inf"))
        out = launch(case, plan, operands)
        assert out[7].isnan().all()
        keep = torch.ones_like(out, dtype=torch.bool)
        keep[7], keep[:, 3] = False, False
        assert torch.isfinite(out[keep]).all()
