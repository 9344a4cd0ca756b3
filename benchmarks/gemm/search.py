"""Sections that run every plan there is: search, and variants, which the cost model is fitted to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from benchmarks.core.timing import Call
from benchmarks.gemm.bench import Bench, Row, operands, plan_fields, rounded, space
from benchmarks.gemm.shapes import SEARCH, VARIANTS, Shape, refuse_impossible
from tilestream_tools.sweep.check import Check
from tilestream_tools.sweep.tune import right

#: Plans that are measured once more, side by side with the plan's own choice.
FINALISTS = 8


def launches(
    plans: Sequence[Any], a: torch.Tensor, b: torch.Tensor, check: Check
) -> tuple[dict[str, Call], list[dict[str, str]]]:
    """Calls of the plans that are right, by their index, and what is wrong with the others."""
    wrong: list[dict[str, str]] = []

    def failed(_: int, plan: Any, error: Exception) -> None:
        wrong.append({"plan": plan.label, "error": f"{type(error).__name__}: {error}"[:200]})

    functions = right(plans, a, b, check, failed)
    if not functions:
        raise RuntimeError(f"none of {len(plans)} plans gives an answer: {wrong[:2]}")
    return functions, wrong


def search(bench: Bench) -> None:
    """The plan's choice beside the best of its whole space, for shapes that the cost model was not fitted to."""
    _every_plan(bench, "search", SEARCH, search_row)


def variants(bench: Bench) -> None:
    _every_plan(bench, "variants", VARIANTS, variants_row)


def _every_plan(bench: Bench, section: str, usual: Iterable[Shape], row: Callable[[Bench, Shape], Row]) -> None:
    shapes = bench.shapes(usual)
    bench.compile_ahead("space", shapes)
    bench.measure(section, shapes, lambda shape: row(bench, shape))


def launched(
    bench: Bench, shape: Shape, chosen: bool = False
) -> tuple[Any, list[Any], dict[str, Call], Call, list[dict[str, str]]]:
    """The plan's choice, every plan, calls of those that are right (``chosen``: the choice too, first), and cuBLAS."""
    a, w = operands(shape, bench.device)
    b = w.t()
    peer = torch.mm(a, b)
    own, plans = space(a, b, bench.options.within)
    functions, wrong = launches([own, *plans] if chosen else plans, a, b, Check.of_product(a, b, peer))
    return own, plans, functions, lambda: torch.mm(a, b, out=peer), wrong


def search_row(bench: Bench, shape: Shape) -> Row:
    """All plans in a few rounds, then the fastest and the plan's own in many."""
    own, plans, functions, cublas, wrong = launched(bench, shape, chosen=True)
    if "0" not in functions:
        raise AssertionError(f"the plan's own choice: {wrong[0]}")
    first = bench.clock.interleave(functions, rounds=5, warmup=1)
    ranked = sorted((name for name in functions if name != "0"), key=first.median)
    final = {name: functions[name] for name in ("0", *ranked[:FINALISTS])}
    timing = bench.clock.interleave({**final, "cublas": cublas}, rounds=25)
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


def variants_row(bench: Bench, shape: Shape) -> Row:
    """One shape: a table of the knobs in which its plans differ, the model's microseconds and the clock's last."""
    own, plans, functions, cublas, wrong = launched(bench, shape)
    timing = bench.clock.interleave({**functions, "cublas": cublas}, rounds=7, warmup=1)
    refuse_impossible(shape, bench.peaks, timing.medians())
    rows = [(plan_fields(plans[int(name)]), timing.median(name)) for name in functions]
    columns, constant, table = compact(rows)
    best = min(functions, key=timing.median)
    return {
        "shape": str(shape),
        "plan": own.label,
        "us": rounded({"cublas": timing.median("cublas"), "best": timing.median(best)}),
        "best": plans[int(best)].label,
        "constant": constant,
        "columns": columns,
        "table": table,
        "wrong": wrong,
    }


def compact(rows: Sequence[tuple[dict[str, Any], float]]) -> tuple[list[str], dict[str, Any], list[list[Any]]]:
    """Columns, what is the same in all rows, and the rows: knobs, predicted and measured microseconds."""
    names = list(dict.fromkeys(name for knobs, _ in rows for name in knobs if name != "predicted"))
    constant = {name: rows[0][0].get(name) for name in names if len({knobs.get(name) for knobs, _ in rows}) == 1}
    varying = [name for name in names if name not in constant]
    table = [
        [*(knobs.get(name) for name in varying), round(1e6 * knobs.get("predicted", 0.0), 2), round(1e6 * seconds, 2)]
        for knobs, seconds in rows
    ]
    return [*varying, "predicted_us", "us"], constant, table
