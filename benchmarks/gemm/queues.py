"""How items are handed out: a static grid, one queue, a queue a worker."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.gemm.bench import Bench, Row, planned, rounded
from benchmarks.gemm.search import beside_cublas
from benchmarks.gemm.shapes import QUEUES, Shape, refuse_impossible
from tilestream.plan import plan as ask

#: Rows of tiles that a raster's group has, beside those of the plan's own.
GROUPS = (2, 4, 8, 16)
#: SMs that a neighbour holds.
HELD = 16
#: Tiles beside the plan's own.
OTHERS = (("ping_pong", (128, 128)), ("cooperative", (256, 128)))


def ways(shape: Shape, device: str) -> Iterator[tuple[str, Any]]:
    """Plans by variant, tile, schedule and group."""
    own = planned(shape, device)
    for variant, tile in dict.fromkeys([(own.variant, own.tile), *OTHERS]):
        for name, kind, queues in (("static", "static", None), ("queue", "dynamic", 1), ("queues", "dynamic", None)):
            schedule = (made := ask(
                *shape[:3], dtype="bfloat16", device=device, layout="nt", schedule=kind, tile=tile, variant=variant,
                queues=queues,
            )).schedule  # fmt: skip
            for group in sorted({*GROUPS, schedule.raster.group}):
                if group > schedule.grid.num_m:
                    continue
                raster = dataclasses.replace(schedule.raster, group=group)
                yield (
                    f"{variant} {tile[0]}x{tile[1]} {name} {group}",
                    dataclasses.replace(made, schedule=dataclasses.replace(schedule, raster=raster)),
                )


def queues(bench: Bench) -> None:
    from tilestream.kernels.hopper.queues import EARLY  # needs Triton

    shapes = bench.shapes(QUEUES)
    bench.compile_ahead("queues", shapes)
    bench.measure("queues", shapes, lambda shape: queues_row(bench, shape), held=HELD, early=EARLY.value)


def queues_row(bench: Bench, shape: Shape) -> Row:
    """One shape: microseconds of each way, idle and beside a neighbour. All ways have launched before."""
    from tilestream.runtime.properties import cuda_properties
    from tilestream_tools.sweep.contention import Neighbour
    from tilestream_tools.sweep.run import StreamClock

    functions, wrong = beside_cublas(shape, ways(shape, "cuda"), bench.device)
    idle = bench.clock.interleave(functions, rounds=15)
    refuse_impossible(shape, bench.peaks, idle.medians())
    clock, neighbour = StreamClock(), Neighbour(cuda_properties())
    clock.interleave(functions, rounds=1)
    with neighbour.taking(HELD):
        held = clock.interleave(functions, rounds=9, warmup=1)
    return {
        "shape": str(shape),
        "us": rounded(idle.medians()),
        "held_us": rounded(held.medians()),
        "wrong": wrong,
    }
