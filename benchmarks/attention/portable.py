"""Which tile the portable attention should have, and how many workers an SM: the plan's table is made from this.

One worker of 8 warps may take all registers of an SM. With 128 registers a thread, and blocks of 32 keys, two workers
fit, and one hides the start and end of the other's tiles: the first run had 478 TFLOP/s at 16k causal and 318 at 4k
(D = 128, H100), so a tile costs some 10 us beside its blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.attention.bench import SHAPES, Calls, Run, Shape, cudnn, launched, operands_of, problem_of_shape
from tilestream.kernels.attention import Operands
from tilestream.plan.attention_plan import AttentionPlan, of_candidate
from tilestream.plan.device import DeviceProperties
from tilestream.plan.portable_attention import candidates


class Variant(NamedTuple):
    """A tile, registers a thread at most, and workers an SM."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int
    workers: int

    @property
    def name(self) -> str:
        """For the record."""
        return f"{self.block_m}x{self.block_n}, {self.warps} warps, {self.stages} stages, {self.workers} an SM"


#: None spills in Triton 3.7, but for some bytes outside of the loops.
VARIANTS: dict[int, tuple[Variant, ...]] = {
    128: (
        Variant(128, 64, 8, 3, 255, 1),
        Variant(128, 32, 8, 3, 128, 2),
        Variant(128, 32, 8, 4, 255, 1),
        Variant(64, 64, 8, 3, 128, 2),
        Variant(64, 64, 4, 3, 255, 2),
    ),
    64: (
        Variant(128, 64, 8, 3, 255, 1),
        Variant(128, 32, 8, 4, 128, 2),
        Variant(128, 64, 8, 3, 128, 2),
        Variant(64, 64, 4, 3, 168, 3),
    ),
    256: (Variant(64, 32, 8, 3, 255, 1),),
}


def plans(shape: Shape, device: DeviceProperties) -> Iterator[tuple[Variant, AttentionPlan]]:
    """Each variant as a plan."""
    problem, _ = problem_of_shape(shape)
    for variant in VARIANTS[shape.dim]:
        found = next(candidates(problem, device, variant.workers * device.workers, kind="dynamic"))
        blocks = -(-shape.length // variant.block_m)
        grid = replace(found.schedule.grid, num_m=blocks)
        found = replace(
            found, block=(variant.block_m, variant.block_n), warps=variant.warps, stages=variant.stages, pack=1,
            schedule=replace(found.schedule, grid=grid),
        )  # fmt: skip
        yield variant, of_candidate(problem, device, "portable", found, "a benchmark's", ())


def portable(run: Run) -> None:
    """Every variant beside cuDNN, at few lengths."""
    from tilestream.kernels.portable.attention_launch import AttentionLaunch
    from tilestream.runtime.properties import cuda_properties

    device = cuda_properties(torch.cuda.current_device())

    def calls(shape: Shape) -> Calls:
        q, k, v = operands_of(shape)
        made: Calls = {"cudnn": lambda: cudnn(q, k, v, shape.causal)}
        for variant, plan in plans(shape, device):
            launch = AttentionLaunch(plan, problem_of_shape(shape)[1])
            launch._arguments.options["maxnreg"] = variant.registers
            x = Operands(q, k, v, torch.full_like(q, math.nan), 1 / math.sqrt(shape.dim))
            made[variant.name] = launched(launch, x)
        return made

    shapes = (shape for shape in SHAPES if shape.length in (1024, 4096, 16384))
    run.measure("portable", shapes, calls, "attention_portable")
