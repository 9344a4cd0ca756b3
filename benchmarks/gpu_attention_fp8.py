"""Attention in 8 bits on a Hopper GPU, beside cuDNN (through SDPA) on the same numbers in bfloat16.

``python benchmarks/gpu_attention_fp8.py [folder] [seconds]``

Ours are two: the Hopper kernel, which calls get, and the portable one, which they got before. 16k tokens, D = 64 and
128, causal and full. Scales are powers of two, one a sequence and head, so that what cuDNN is given is the same to the
bit. Every answer keeps the error rule, on sampled rows of the last sequence against float64, with cuDNN's as torch's;
what does not is named and not timed.
``python tests/gpu/precompile_attention.py benchmark`` before it saves compiling one by one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tilestream as ts
from gpu_attention import Run, Shape, cudnn, launched, problem_of_shape
from harness import GPU_PEAK, RESULTS, errors
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import Operands
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.ops.attention_gpu import launch_of, layout_of
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.attention_problem import AttentionProblem
from tilestream_tools.sweep.check import sampled_rows

SHAPES = [
    Shape(dim, heads, length, causal)
    for dim, heads in ((128, 16), (64, 32))
    for causal in (True, False)
    for length in (1024, 4096, 16384)
]
BACKENDS = ("hopper", "portable")
#: TFLOP/s: half of the multiplications at twice the rate of 16 bits, half at once.
PEAK = GPU_PEAK * 4 / 3
#: Rows of queries that are compared with float64.
ROWS = 64

Calls = dict[str, Callable[[], torch.Tensor]]


class Numbers(NamedTuple):
    """A call's operands: e4m3 with scales, and the same in bfloat16."""

    operands: Operands
    wide: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def problem_of(shape: Shape) -> AttentionProblem:
    """As the plan sees it."""
    return replace(problem_of_shape(shape)[0], dtype="float8_e4m3fn", scaled=True)


def numbers(shape: Shape, device: str = "cuda") -> Numbers:
    """Fresh ones."""
    narrow, scales, wide = [], [], []
    for _ in range(3):
        x = torch.randn(shape.batch, shape.length, shape.heads, shape.dim, device=device).to(torch.float8_e4m3fn)
        scale = torch.randint(-1, 2, (shape.batch, shape.heads), device=device).float().exp2()
        narrow.append(x)
        scales.append(scale)
        wide.append(x.bfloat16() * scale.bfloat16()[:, None, :, None])
    out = torch.full_like(wide[0], math.nan)
    named = dict(zip(("scale_q", "scale_k", "scale_v"), scales, strict=True))
    return Numbers(Operands(*narrow, out, 1 / math.sqrt(shape.dim), **named), tuple(wide))


def finer(shape: Shape, wide: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the last sequence, and what they are in float64: ``[rows, H, D]``."""
    rows = sampled_rows(shape.length, ROWS).to(wide[0].device)
    q, k, v = (x[-1].double() for x in wide)
    scores = torch.einsum("rhd,khd->hrk", q[rows], k) / math.sqrt(shape.dim)
    if shape.causal:
        scores = scores.masked_fill(torch.arange(shape.length, device=rows.device) > rows[:, None], -math.inf)
    return rows, torch.einsum("hrk,khd->rhd", scores.softmax(-1), v)


def launches(shape: Shape, device: DeviceProperties) -> dict[str, tuple[Any, AttentionLayout]]:
    """A plan of each backend, and how the operands lie."""
    layout = layout_of(numbers(shape, "meta").operands)
    return {name: (plan_attention(problem_of(shape), device=device, backend=name), layout) for name in BACKENDS}


def checked(run: Run, name: str, shape: Shape, given: Numbers, calls: Calls) -> tuple[Calls, dict[str, Any]]:
    """Those of ``calls`` whose answers keep the rule, and by how much; the first is torch's."""
    rows, reference = finer(shape, given.wide)
    kept: Calls = {}
    found: dict[str, Any] = {}
    peer = None
    for what, call in calls.items():
        try:
            answer = call()[-1][rows]
            ts.check()
            peer = answer if peer is None else peer
            found[what] = {key: float(f"{x:.3g}") for key, x in errors(answer, peer, reference).items()}
        except Exception as error:
            run.record.data["failures"].append(f"{name} {what}: {type(error).__name__}: {error}"[:300])
            continue
        kept[what] = call
    return kept, found


def measure(run: Run, shape: Shape, device: DeviceProperties) -> None:
    """A row."""
    name = f"fp8 D{shape.dim} {'causal' if shape.causal else 'full'} S{shape.length}"
    if not run.left(name):
        return
    given = numbers(shape)
    calls: Calls = {"cudnn": lambda: cudnn(*given.wide, shape.causal)}
    for backend, (plan, layout) in launches(shape, device).items():
        x = given.operands._replace(out=torch.full_like(given.wide[0], math.nan))
        calls[backend] = launched(launch_of(plan, layout), x)
    kept, found = checked(run, name, shape, given, calls)
    rates = {what: round(shape.operations / ms * 1e-9, 1) for what, ms in run.time(kept).items()}
    for what in [what for what, rate in rates.items() if rate > PEAK]:
        run.record.data["failures"].append(f"{name} {what}: {rates.pop(what)} TFLOP/s is above the peak")
    run.record.rows.append({"name": name, "tflops": rates, "errors": found, **shape._asdict()})
    run.record.write()
    print(f"{name}: " + "  ".join(f"{what} {rate:.0f}" for what, rate in rates.items()), flush=True)


def main() -> None:
    from tilestream.runtime.properties import cuda_properties

    given = sys.argv[1:]
    run = Run(
        Path(given[0]) if given else RESULTS, float(given[1]) if len(given) > 1 else 120.0, "gpu_attention_fp8"
    )  # fmt: skip
    run.record.data["dtype"] = "float8_e4m3fn, output bfloat16"
    for shape in SHAPES:
        measure(run, shape, cuda_properties(torch.cuda.current_device()))
    run.record.write()
    print(f"failures: {run.record.data['failures']}; missing: {run.record.data['missing']}")


if __name__ == "__main__":
    main()
