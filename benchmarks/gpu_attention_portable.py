"""Which tile the portable attention should have, and how many workers an SM: what its plan's table is to be made of.

``python benchmarks/gpu_attention_portable.py [folder] [seconds]``

One worker of 8 warps may take all registers of an SM. With 128 a thread, and blocks of 32 keys, two fit, and one's
start and end of a tile would be hidden behind the other's blocks: the first run had 478 TFLOP/s at 16k causal and 318
at 4k (D = 128, H100), so a tile costs some 10 us beside its blocks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from gpu_attention import SHAPES, Run, Shape, cudnn, launched, operands_of, problem_of_shape
from harness import RESULTS
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import Operands
from tilestream.plan.attention_plan import AttentionPlan, of_candidate
from tilestream.plan.policy.portable_attention import candidates


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


def main() -> None:
    """Every variant beside cuDNN, at few lengths."""
    from tilestream.launch.portable.attention_launch import AttentionLaunch
    from tilestream.runtime.properties import cuda_properties

    given = sys.argv[1:]
    folder, seconds = Path(given[0]) if given else RESULTS, float(given[1]) if len(given) > 1 else 60.0
    run = Run(folder, seconds, "attention_portable")
    device = cuda_properties(torch.cuda.current_device())
    for shape in (s for s in SHAPES if s.length in (1024, 4096, 16384)):
        name = f"portable D{shape.dim} {'causal' if shape.causal else 'full'} S{shape.length}"
        if not run.left(name):
            continue
        q, k, v = operands_of(shape)
        calls = {"cudnn": lambda q=q, k=k, v=v, c=shape.causal: cudnn(q, k, v, c)}
        for variant, plan in plans(shape, device):
            launch = AttentionLaunch(plan, problem_of_shape(shape)[1])
            launch._arguments.options["maxnreg"] = variant.registers
            x = Operands(q, k, v, torch.full_like(q, math.nan), 1 / math.sqrt(shape.dim))
            calls[variant.name] = launched(launch, x)
        run.row(name, shape.operations, calls, **shape._asdict())
    run.record.write()
    print(f"failures: {run.record.data['failures']}; missing: {run.record.data['missing']}")


if __name__ == "__main__":
    main()
