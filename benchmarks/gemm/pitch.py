"""Row pitches that are no multiples of 128 bytes: tiles of fewer bytes, pairs of CTAs, copies of a few elements."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.gemm.bench import Bench, Row, planned, rounded
from benchmarks.gemm.search import beside_cublas
from benchmarks.gemm.shapes import PITCHES, Shape, refuse_impossible
from tilestream.plan import plan as ask
from tilestream.plan import plan_problem

#: Beside the plan's own.
TILES = (
    ("cooperative", (128, 256)), ("cooperative", (256, 192)), ("cooperative", (192, 256)), ("paired", (256, 256)),
    ("paired", (512, 192)), ("paired", (192, 512)),
)  # fmt: skip


def ways(shape: Shape, device: str) -> Iterator[tuple[str, Any]]:
    """The plan's own, and static grids by variant and tile; of what TMA cannot address, elements and vectors."""
    own = planned(shape, device)
    if own.problem.no_tma:
        for vector in sorted({1, own.problem.vector}):
            problem = dataclasses.replace(own.problem, vector=vector)
            yield f"vectors of {vector}", plan_problem(problem, device=own.device, consult=False)
        return
    yield "plan", own
    for variant, tile in TILES:
        made = ask(
            *shape[:3], dtype="bfloat16", device=device, layout="nt", schedule="static", tile=tile, variant=variant
        )  # fmt: skip
        yield f"{variant} {tile[0]}x{tile[1]}", made


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
