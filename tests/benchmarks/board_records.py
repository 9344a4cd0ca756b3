"""Records of a board and of a sweep, made up: the cost model's own times, with noise, of problems that seeds draw."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.core.records import text_of
from benchmarks.gemm.board import reasons
from benchmarks.gemm.draw import draws, fit_draws
from benchmarks.gemm.plans import key_of, planned

from tilestream.core.gpu_specs import named
from tilestream.plan.planner import search_space

ABOUT = {
    "device": "NVIDIA H100 80GB HBM3", "python": "3", "torch": "2", "triton": "3", "tilestream": "1", "commit": "c",
    "date": "d", "dtype": "as drawn", "flush": "reads", "empty_us": {"eager": 3.0, "graph": 3.0}, "failures": [],
    "missing": [], "seed": 1,
}  # fmt: skip


def board_record(count: int = 30) -> dict[str, Any]:
    """A board's."""
    chance, rows = random.Random(0), []
    for problem in draws(1, count):
        plan, ratio = planned(problem, "h100"), chance.uniform(0.6, 2.5)
        ours = 1e6 * plan.predicted
        rows.append({
            "classes": problem.classes, "kind": problem.kind, "plan": plan.label, "why": reasons(plan),
            "expected_us": ours, "shape": str(problem), "us": {"ours": ours, "torch": ratio * ours}, "ratio": ratio,
            "band": [0.98 * ratio, 1.02 * ratio], "operations": problem.operations, "host_us": {"ours": 9, "torch": 8},
        })  # fmt: skip
    return {"name": "gemm_random_1", **ABOUT, "planned": count, "rows": rows}


def sweep_record(count: int = 4) -> dict[str, Any]:
    """A sweep's, of the twenty candidates that the model puts first."""
    chance, rows = random.Random(0), []
    for problem in fit_draws(1, count):
        found = search_space(planned(problem, "h100").problem, named("h100"))
        plans = sorted(found, key=lambda plan: plan.predicted)[:20]
        timed = [
            [key_of(plan), 1e6 * plan.predicted, 1e6 * plan.predicted * chance.uniform(1.0, 1.1)] for plan in plans
        ]
        of_best = min(us for *_, us in timed) / timed[0][2]
        rows.append({"shape": str(problem), "problem": list(problem), "kind": problem.kind, "of_best": of_best,
                     "plans": timed})  # fmt: skip
    return {"name": "gemm_sweep_1", **ABOUT, "planned": count, "rows": rows}


def written(results: Path, *records: dict[str, Any]) -> list[Path]:
    """The files of records in a folder of results."""
    found = []
    for record in records:
        path = results / "h100" / f"{record['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(json.loads(json.dumps(record))), encoding="utf-8")
        found.append(path)
    return found


def promise_records(failures: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """What the promise of equal bits costs, and pairs of calls of which one differs."""

    def row(what: str, shape: str, **ratios: float) -> dict[str, Any]:
        us = {name: round(10 * ratio, 3) for name, ratio in ratios.items()}
        return {"what": what, "shape": shape, "us": {**us, "invariant": 10.0}, "ratios": ratios, "plan": "a plan"}

    costs = [
        row("product", "16x32x64", free=0.9, cublas=1.1), row("product", "16x64x64", free=0.4, cublas=1.1),
        row("product", "1x32x64", free=1.0, cublas=0.7), row("attention", "1x512x512", free=0.97),
        row("attention", "4x1x512", free=0.8),
    ]  # fmt: skip
    pairs = [{"what": "all", "pairs": 10000, "numbers": 5, "differing": 1}, {"what": "static", "calls": 1234}]
    return [
        {"name": "invariance_cost", **ABOUT, "rows": costs},
        {"name": "invariance_pairs", **ABOUT, "failures": list(failures), "rows": pairs},
    ]
