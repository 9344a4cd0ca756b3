"""The plan of a grouped matmul beside its other candidates: what the cost model's choice gives away."""

from __future__ import annotations

import functools
import itertools

import torch

import tilestream as ts
from benchmarks.core.compiling import compile_ahead
from benchmarks.core.records import Row
from benchmarks.core.timing import Call
from benchmarks.gemm.bench import Bench, rounded
from benchmarks.gemm.grouped import LAYERS, Layer, drawn, operands, sizes, small
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import Epilogue
from tilestream.ops import grouped_library
from tilestream.ops.grouped_library import GroupedOperands
from tilestream.plan.api import device_properties
from tilestream.plan.candidate import Asked
from tilestream.plan.grouped import hopper_candidates, plan_groups
from tilestream.plan.limit import workers_of
from tilestream.plan.plan import Plan, of_candidate

SKEWS = ("uniform", "mild")
#: Candidates that are timed: those that the cost model expects to be fastest.
MOST = 8


def candidates(x: GroupedOperands, device: DeviceProperties) -> list[Plan]:
    """The plan's own, and the next best of the Hopper kernel by the cost model, one of each tile."""
    problem = grouped_library.problem_of(x)
    own = plan_groups(problem, device=device)
    if own.backend != "hopper":
        return [own]
    workers, _, _ = workers_of(device, None, None, 0, "")
    found = sorted(hopper_candidates(problem, device, workers, Asked(device=device)), key=lambda one: one.predicted)
    return [own, *(
        of_candidate(problem, device, "hopper", one, "a benchmark asks for it") for one in found[:MOST]
        if (one.variant, one.block, one.swap_ab) != (own.variant, own.block, own.swap_ab)
    )]  # fmt: skip


def written(layer: Layer, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> GroupedOperands:
    """Operands with an output of their own."""
    shape = (layer.rows, layer.n) if b.dim() == 3 else (layer.experts, layer.k, layer.n)
    return GroupedOperands(a, b, torch.empty(shape, device=a.device, dtype=a.dtype), Epilogue(), offsets)


def name_of(plan: Plan) -> str:
    """A candidate's name among those of its problem."""
    return f"{plan.variant} {plan.block[0]}x{plan.block[1]}"


def call_of(plan: Plan, x: GroupedOperands) -> Call:
    """What launches a plan; the CPU has one plan, which the public call takes."""
    if plan.backend == "cpu":
        return functools.partial(ts.grouped_mm, x.a, x.b, x.offsets, out=x.out)
    return functools.partial(grouped_library.launch_of(plan, x), x, None)


def row(bench: Bench, layer: Layer, skew: str, gradient: bool) -> Row:
    """One product: of each candidate the model's microseconds, and the clock's."""
    given = sizes(layer.rows, layer.experts, skew)
    x = written(layer, *drawn(layer, given, gradient, bench.device))
    theirs = torch._grouped_mm(x.a, x.b, x.offsets)
    plans = candidates(x, device_properties(bench.device))
    functions: dict[str, Call] = {"torch": lambda: torch._grouped_mm(x.a, x.b, x.offsets)}
    wrong = []
    for plan in plans:
        call, name = call_of(plan, x), name_of(plan)
        x.out.fill_(float("nan"))
        call()
        if not (x.out.float() - theirs.float()).abs().max() <= 0.02 * theirs.float().abs().max():
            wrong.append(name)
            continue
        functions[name] = call
    timing = bench.clock.interleave(functions, rounds=bench.options.rounds or 7, warmup=1)
    medians = timing.medians()
    names = [name_of(plan) for plan in plans]
    best = min((name for name in names if name in medians), key=medians.__getitem__)
    expected = {name: round(1e6 * plan.predicted, 1) for name, plan in zip(names, plans, strict=True)}
    return {
        "layer": layer.name, "shape": f"{layer.rows}x{layer.n}x{layer.k}, {layer.experts} experts", "skew": skew,
        "kind": "gradient of weights" if gradient else "product", "us": rounded(medians), "expected_us": expected,
        "plan": names[0], "best": best, "of_best": round(medians[best] / medians[names[0]], 4), "wrong": wrong,
    }  # fmt: skip


def launches(device: DeviceProperties) -> list[Call]:
    """What the section launches, on the meta device."""
    found: list[Call] = []
    make = functools.partial(torch.empty, device="meta", dtype=torch.bfloat16)
    for layer, gradient in itertools.product(LAYERS, (False, True)):
        offsets = torch.empty(layer.experts, device="meta", dtype=torch.int32)
        x = written(layer, *operands(layer, gradient, make), offsets)
        found += [call_of(plan, x) for plan in candidates(x, device)]
    return found


def grouped_search(bench: Bench) -> None:
    """Products, then the gradients of weights."""
    layers = [small(layer) for layer in LAYERS[:2]] if bench.dry else LAYERS
    if not bench.dry:
        compile_ahead("gemm", "grouped_search", "", str(bench.options.within), limit=60)
    items = [(layer, skew, gradient) for gradient, layer, skew in itertools.product((False, True), layers, SKEWS)]
    bench.measure("grouped_search", items, lambda item: row(bench, *item))
