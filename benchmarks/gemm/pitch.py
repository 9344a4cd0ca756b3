"""Row pitches that are no multiples of 128 bytes: tiles of fewer bytes, pairs of CTAs, copies of a few elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.gemm.bench import Bench, Row, planned, rounded
from benchmarks.gemm.search import beside_cublas
from benchmarks.gemm.shapes import PITCHES, Shape, refuse_impossible
from tilestream.core.schedule import Kind
from tilestream.plan import plan_problem, realign
from tilestream.plan.candidate import FREE, Forced
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy import hopper

#: Beside the plan's own.
TILES = (
    ("cooperative", (128, 256)), ("cooperative", (256, 192)), ("cooperative", (192, 256)), ("paired", (256, 256)),
    ("paired", (512, 192)), ("paired", (192, 512)),
)  # fmt: skip


def ways(shape: Shape, device: str) -> Iterator[tuple[str, Any]]:
    """The plan's own; operands copied first; static grids by variant and tile, or elements and vectors, as they lie."""
    own = planned(shape, device)
    problem, properties = own.problem, own.device

    def best(kinds: tuple[Kind, ...], forced: Forced, operands: str = "") -> Plan:
        left = realign.realigned(problem, operands)
        before = realign.seconds(problem, properties, operands)
        found = hopper.candidates(
            left, properties, properties.workers, kinds=kinds, forced=forced, realigned=operands, before=before
        )
        one = min(found, key=lambda candidate: candidate.predicted)
        return of_candidate(problem, properties, "hopper", one, "the benchmark's")

    yield "plan", own
    for operands in ("a", "b", "ab"):
        if set(problem.not_by_tma) <= set(operands) and min(problem.row_multiples) < hopper.LINE:
            yield f"{' and '.join(operands.upper())} first", best(("dynamic", "stream_k"), FREE, operands)
    if problem.no_tma:
        for vector in sorted({1, problem.vector}):
            one = dataclasses.replace(problem, vectors=(vector, vector))
            yield f"vectors of {vector}", plan_problem(one, device=properties, backend="portable", consult=False)
        return
    for variant, tile in TILES:
        yield f"{variant} {tile[0]}x{tile[1]}", best(("static",), Forced(tile, variant=variant))


def pitch(bench: Bench) -> None:
    shapes = bench.shapes(PITCHES)
    bench.compile_ahead("pitch", shapes)
    bench.measure("pitch", shapes, lambda shape: pitch_row(bench, shape))


def pitch_row(bench: Bench, shape: Shape) -> Row:
    """One shape: microseconds and TFLOP/s of each way that is right, and their ratio to cuBLAS."""
    functions, wrong = beside_cublas(shape, ways(shape, "cuda"), bench.device)
    timing = bench.clock.interleave(functions, rounds=bench.options.rounds or 15)
    refuse_impossible(shape, bench.peaks, timing.medians())
    medians = timing.medians()
    return {
        "shape": str(shape),
        "pitch": 2 * shape.k % 128,
        "us": rounded(medians),
        "tflops": {name: round(shape.operations / seconds * 1e-12, 1) for name, seconds in medians.items()},
        "ratio": {name: round(medians["cublas"] / seconds, 4) for name, seconds in medians.items()},
        "wrong": wrong,
    }
