"""Attention in 8 bits on a Hopper GPU, beside cuDNN (through SDPA) on the same numbers in bfloat16.

Ours are two: the Hopper kernel, which calls get, and the portable one. Scales are powers of two, one a sequence and
head, so that cuDNN is given the same numbers to the bit. Every answer keeps the error rule, on sampled rows of the last
sequence against float64, with cuDNN's as torch's; an answer that does not is named and not timed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

import tilestream as ts
from benchmarks.attention.bench import Calls, Run, Shape, cudnn, launched, problem_of_shape
from benchmarks.core.records import Record, Row
from benchmarks.core.timing import HOPPER_PEAK
from tilestream.core.device import DeviceProperties
from tilestream.core.operands import AttentionOperands
from tilestream.launch.attention_arguments import AttentionLayout
from tilestream.ops.attention_gpu import launch_of, layout_of
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.attention_problem import AttentionProblem
from tilestream_tools.sweep.check import errors, sampled_rows

SHAPES = [
    Shape(dim, heads, length, causal)
    for dim, heads in ((128, 16), (64, 32))
    for causal in (True, False)
    for length in (1024, 4096, 16384)
]
BACKENDS = ("hopper", "portable")
#: TFLOP/s: half of the multiplications at twice the rate of 16 bits, half at once.
PEAK = HOPPER_PEAK * 4 / 3
#: Rows of queries that are compared with float64.
ROWS = 64


class Numbers(NamedTuple):
    """A call's operands: e4m3 with scales, and the same in bfloat16."""

    operands: AttentionOperands
    wide: tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def problem_of(shape: Shape) -> AttentionProblem:
    return replace(problem_of_shape(shape)[0], dtype="float8_e4m3fn", scaled=True)


def numbers(shape: Shape, device: str = "cuda") -> Numbers:
    narrow, scales, wide = [], [], []
    for _ in range(3):
        x = torch.randn(shape.batch, shape.length, shape.heads, shape.dim, device=device).to(torch.float8_e4m3fn)
        scale = torch.randint(-1, 2, (shape.batch, shape.heads), device=device).float().exp2()
        narrow.append(x)
        scales.append(scale)
        wide.append(x.bfloat16() * scale.bfloat16()[:, None, :, None])
    out = torch.full_like(wide[0], math.nan)
    named = dict(zip(("scale_q", "scale_k", "scale_v"), scales, strict=True))
    return Numbers(AttentionOperands(*narrow, out, 1 / math.sqrt(shape.dim), **named), tuple(wide))


def finer(shape: Shape, wide: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of sampled rows of the last sequence, and the rows in float64: ``[rows, H, D]``."""
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


def checked(record: Record, name: str, shape: Shape, given: Numbers, calls: Calls) -> tuple[Calls, dict[str, Any]]:
    """The calls whose answers keep the error rule, and their errors; the first call is torch's."""
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
            record.fail(f"{name} {what}: {type(error).__name__}: {error}")
            continue
        kept[what] = call
    return kept, found


def fp8(run: Run) -> None:
    from tilestream.runtime.properties import cuda_properties

    device = cuda_properties(torch.cuda.current_device())
    record = run.attention_record("attention_fp8", dtype="float8_e4m3fn, output bfloat16")
    items = {f"fp8 {shape.name}": shape for shape in SHAPES}
    run.each(record, items, lambda name, shape: measure(run, record, name, shape, device))


def measure(run: Run, record: Record, name: str, shape: Shape, device: DeviceProperties) -> Row:
    given = numbers(shape)
    calls: Calls = {"cudnn": lambda: cudnn(*given.wide, shape.causal)}
    for backend, (plan, layout) in launches(shape, device).items():
        x = given.operands._replace(out=torch.full_like(given.wide[0], math.nan))
        calls[backend] = launched(launch_of(plan, layout), x)
    kept, found = checked(record, name, shape, given, calls)
    return run.rated(record, name, shape.operations, kept, PEAK, errors=found, **shape._asdict())
