"""Every candidate of drawn problems, measured: what cost models are fitted to, and what the plan's choice costs."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch

from benchmarks.gemm.bench import Bench, Row, every_plan, rounded
from benchmarks.gemm.board import checked, operands, peer, tell
from benchmarks.gemm.draw import Draw, fit_draws, one_named, small_draws
from benchmarks.gemm.plans import key_of, planned
from benchmarks.gemm.search import launches
from benchmarks.gemm.shapes import refuse_impossible
from benchmarks.report import gemm_random
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.ops import gpu
from tilestream.plan.candidate import ONE_TILE

#: Rounds of all candidates of a problem; problems of a sweep, where no other number is given.
ROUNDS, COUNT = 7, 64
#: How many times as long as the best of all a model's best may be expected to take.
FAR = 2.0
#: What the names of `small_draws` begin with.
SMALL = "small:"


def sweep(bench: Bench) -> None:
    """The problems of ``--shapes``, or of ``--seed``, counted from `FITTED_FROM`; those of ``--resume`` left out.

    ``--small``: problems of few operations, to which the portable kernels' models are fitted.
    """
    seed, count, shapes = bench.options.seed, bench.options.count or COUNT, bench.options.shapes
    small = SMALL if bench.options.small else ""
    names = shapes.split(",") if shapes else [f"{small}{seed}:{count}:{number}" for number in range(count)]
    every = {problem.small() if bench.dry else problem: name for name, problem in zip(names, named(names), strict=True)}
    which = "shapes" if shapes else f"{'small_' if small else ''}{seed}"
    record = bench.gemm_record(f"sweep_{which}", seed=seed, dtype="as drawn", planned=len(every))
    left = bench.unmeasured(record, every)
    bench.compile_ahead("sweep", left.values())
    try:
        bench.rows(record, left, lambda problem: sweep_row(bench, problem))
    finally:
        tell(record, gemm_random.sweep)


def named(names: Iterable[str]) -> list[Draw]:
    """Problems by name.

    ``"MxNxK"``; or a seed, how many it draws, and the number of one of them: ``"1:64:0"``, and ``"small:1:64:0"``.
    """
    return [
        one_named(name.removeprefix(SMALL), small_draws if name.startswith(SMALL) else fit_draws) for name in names
    ]  # fmt: skip


def candidates(problem: Draw, device: str | DeviceProperties, within: float) -> list[Any]:
    """The plan's choice, and the other plans of the search space; one of each key.

    Each cost model is fitted to its own candidates, so ``within`` is beside the best of these, unless that is expected
    to take `FAR` times as long as the best of all.
    """
    own = planned(problem, device)
    found, best = {key_of(own): own}, {model_of(own): own.predicted}
    plans = sorted(every_plan(own.problem, own.device), key=attrgetter("predicted"))
    for plan in plans:
        least = best.setdefault(model_of(plan), plan.predicted)
        if plan.predicted <= within * least and least <= FAR * plans[0].predicted:
            found.setdefault(key_of(plan), plan)
    return list(found.values())


def model_of(plan: Any) -> tuple[str, bool]:
    """The cost model that expects a plan's time."""
    return plan.backend, plan.variant == ONE_TILE


def compile_plan(problem: Draw, plan: Any, device: DeviceProperties) -> None:
    """Compile what a plan launches, in a block of `tilestream_tools.warm.ahead.ahead`."""
    a, b, given = operands(problem, "meta")
    out = torch.empty(*a.shape[:-1], b.shape[-1], device="meta", dtype=given.get("out_dtype", a.dtype))
    epilogue = Epilogue(scale_a=given.get("scale_a"), scale_b=given.get("scale_b"))
    a, b, out = (x if x.dim() == 3 else x[None] for x in (a, b, out))
    gpu.compile_ahead(GemmOperands(a, b, out, epilogue), gpu.How(), device, plan=plan)


def sweep_row(bench: Bench, problem: Draw) -> Row:
    """One problem: of each candidate its key, the model's microseconds, and the clock's."""
    a, b, given = operands(problem, bench.device)
    theirs = peer(a, b, given)
    scales = {name: value for name, value in given.items() if name.startswith("scale")}
    plans = candidates(problem, bench.device, bench.options.within)
    chosen = key_of(plans[0])
    functions, wrong = launches(plans, a, b, checked(a, b, given, theirs()), **scales)
    timing = bench.clock.interleave({**functions, "torch": theirs}, rounds=ROUNDS, warmup=1)
    refuse_impossible(problem, bench.peaks, timing.medians(), problem.itemsize)
    measured = {key_of(plans[int(name)]): (plans[int(name)], timing.median(name)) for name in functions}
    if chosen not in measured:
        raise AssertionError(f"the plan's own choice: {wrong}")
    best = min(measured, key=lambda key: measured[key][1])
    us = {"torch": timing.median("torch"), "plan": measured[chosen][1], "best": measured[best][1]}
    return {
        "shape": str(problem),
        "problem": list(problem),
        "kind": problem.kind,
        "us": rounded(us),
        "of_best": round(us["best"] / us["plan"], 4),
        "plan": plans[0].label,
        "chosen": chosen,
        "best": best,
        "plans": [
            [key, round(1e6 * plan.predicted, 2), round(1e6 * seconds, 2)] for key, (plan, seconds) in measured.items()
        ],
        "wrong": wrong,
    }
