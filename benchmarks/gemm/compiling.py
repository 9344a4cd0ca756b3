"""The process that compiles a share of what the GEMM sections will launch: the section ``_compile``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

import tilestream as ts
from benchmarks.gemm import pitch, queues
from benchmarks.gemm.bench import FP8_WAYS, every_plan, fp8_operands, kernel_of, planned
from benchmarks.gemm.shapes import Shape, parse


def compile_share(arguments: list[str]) -> None:
    """A process of `core.compiling.compile_ahead`: its share of the kernels."""
    what, shapes, within, index, count = arguments
    torch.set_grad_enabled(False)
    compile_part(what, parse(shapes), int(index), int(count), float(within))


def compile_part(what: str, shapes: list[Shape], index: int, count: int, within: float = float("inf")) -> None:
    """Compile each kernel that falls to process ``index`` of ``count``.

    ``what`` is ``mm``, ``fp8``, ``linear`` with either activation, ``space`` for all plans of each shape, or
    ``queues`` and ``pitch`` for those of these sections.
    """
    tasks: dict[str, Callable[[], object]] = {}
    for shape in shapes:
        asked = planned(shape, "cuda")
        if what in ("space", "queues", "pitch"):
            of = {"queues": queues.ways, "pitch": pitch.ways}.get(what)
            found = of(shape, "cuda") if of is not None else every_plan(asked.problem, asked.device, within)
            plans = dict(found).values() if of is not None else found
            tasks |= {kernel_of(plan): functools.partial(_run, shape, plan.run) for plan in plans}
        elif what == "fp8":
            tasks |= {f"{shape} {way}": functools.partial(_run_fp8, shape, *way) for way in FP8_WAYS}
        elif what == "mm":
            tasks[kernel_of(asked)] = functools.partial(_run, shape, ts.mm)
        else:
            for activation in ("gelu", "gelu_tanh"):
                run = functools.partial(_run, shape, ts.mm, activation=activation, biased=True)
                tasks[kernel_of(asked) + activation] = run
    failed = 0
    for key in sorted(tasks)[index::count]:
        try:
            tasks[key]()
            torch.cuda.synchronize()
        except Exception as error:
            failed += 1
            if failed <= 2:
                print(f"compiling ahead, {key}: {error}"[:400], file=sys.stderr)
        torch.cuda.empty_cache()


def _run(shape: Shape, function: Callable[..., object], biased: bool = False, **options: Any) -> None:
    a, w = (torch.empty(rows, shape.k, device="cuda", dtype=torch.bfloat16) for rows in (shape.m, shape.n))
    if biased:
        options["bias"] = torch.empty(shape.n, device="cuda", dtype=a.dtype)
    function(a, w.t(), **options)


def _run_fp8(shape: Shape, scales: str, fast: bool) -> None:
    a, b, given = fp8_operands(shape, "cuda", scales, fast)
    ts.matmul(a, b, **given)
