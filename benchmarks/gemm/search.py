"""The plan's choice beside every plan there is, on shapes that the cost model was not fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from benchmarks.core.timing import Call
from benchmarks.gemm.bench import Bench, Row, operands, plan_fields, rounded, space
from benchmarks.gemm.shapes import SEARCH, Shape, refuse_impossible
from tilestream_tools.sweep.check import Check
from tilestream_tools.sweep.tune import right

#: Plans that are measured once more, side by side with the plan's own choice.
FINALISTS = 8


def launches(
    plans: Sequence[Any], a: torch.Tensor, b: torch.Tensor, check: Check, **given: torch.Tensor
) -> tuple[dict[str, Call], list[dict[str, str]]]:
    """Calls of the plans that are right, by their index, and what is wrong with the others. ``given``: scales."""
    wrong: list[dict[str, str]] = []

    def failed(_: int, plan: Any, error: Exception) -> None:
        wrong.append({"plan": plan.label, "error": f"{type(error).__name__}: {error}"[:200]})

    functions = right(plans, a, b, check, failed, **given)
    if not functions:
        raise RuntimeError(f"none of {len(plans)} plans gives an answer: {wrong[:2]}")
    return functions, wrong


def beside_cublas(
    shape: Shape, ways: Iterable[tuple[str, Any]], device: str
) -> tuple[dict[str, Call], list[dict[str, str]]]:
    """Calls of the named plans that are right, and of ``"cublas"``; and what is wrong with the others."""
    a, w = operands(shape, device)
    b = w.t()
    peer = torch.mm(a, b)
    plans = dict(ways)
    found, wrong = launches(list(plans.values()), a, b, Check.of_product(a, b, peer))
    names = list(plans)
    calls = {names[int(index)]: call for index, call in found.items()}
    return {**calls, "cublas": lambda: torch.mm(a, b, out=peer)}, wrong


def search(bench: Bench) -> None:
    """The plan's choice beside the best of its whole space, for shapes that the cost model was not fitted to."""
    shapes = bench.shapes(SEARCH)
    bench.compile_ahead("space", shapes)
    bench.measure("search", shapes, lambda shape: search_row(bench, shape))


def search_row(bench: Bench, shape: Shape) -> Row:
    """All plans in a few rounds, then the fastest and the plan's own in many."""
    a, w = operands(shape, bench.device)
    b = w.t()
    peer = torch.mm(a, b)
    own, plans = space(a, b, bench.options.within)
    functions, wrong = launches([own, *plans], a, b, Check.of_product(a, b, peer))
    if "0" not in functions:
        raise AssertionError(f"the plan's own choice: {wrong[0]}")
    first = bench.clock.interleave(functions, rounds=5, warmup=1)
    ranked = sorted((name for name in functions if name != "0"), key=first.median)
    final = {name: functions[name] for name in ("0", *ranked[:FINALISTS])}
    timing = bench.clock.interleave({**final, "cublas": lambda: torch.mm(a, b, out=peer)}, rounds=25)
    refuse_impossible(shape, bench.peaks, timing.medians())
    best = min(final, key=timing.median)
    chosen = plans[int(best) - 1] if best != "0" else own
    us = {"plan": timing.median("0"), "best": timing.median(best), "cublas": timing.median("cublas")}
    return {
        "shape": str(shape),
        "space": len(plans),
        "wrong": wrong,
        "us": rounded(us),
        "of_best": round(us["best"] / us["plan"], 4),
        "ratio": round(us["cublas"] / us["plan"], 4),
        "plan": own.label,
        "best": chosen.label,
        "differs": {name: [mine, theirs] for name, mine, theirs in differences(plan_fields(own), plan_fields(chosen))},
    }


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Knobs in which two plans differ."""
    names = [name for name in {**mine, **theirs} if name != "predicted"]
    return [(name, mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)]
