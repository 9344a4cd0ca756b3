"""The process that compiles a share of what the GEMM sections will launch: the section ``_compile``."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

import tilestream as ts
from benchmarks.gemm import board, grouped, grouped_search, grouped_sources, pitch, queues, sweep
from benchmarks.gemm.bench import FP8_WAYS, every_plan, fp8_operands, kernel_of, planned
from benchmarks.gemm.shapes import Shape, parse
from tilestream.core.device import DeviceProperties
from tilestream.plan.api import device_properties
from tilestream_tools.warm.ahead import compile_call, kernels_of

if TYPE_CHECKING:
    from tilestream_tools.warm.calls import Call


def compile_share(arguments: list[str]) -> None:
    """A process of `core.compiling.compile_ahead`: its share of the kernels."""
    what, shapes, within, index, count = arguments
    torch.set_grad_enabled(False)
    if what in ("sweep", "random", "grouped_search", "grouped_sources"):
        device = device_properties("cuda")
        compile_calls(calls_of(what, shapes.split(","), float(within), device), device, int(index), int(count))
    else:
        compile_part(what, parse(shapes) if shapes else [], int(index), int(count), float(within))


def calls_of(what: str, names: Sequence[str], within: float, device: DeviceProperties) -> list[Call]:
    """The calls of a section, on the meta device. A random problem's name is its seed and its number."""
    if what == "sweep":
        return of_sweep(names, within, device)
    if what == "grouped_search":
        return grouped_search.launches(device)
    if what == "grouped_sources":
        return list(grouped_sources.launches(device))
    return [board.on_meta(*map(int, name.split(":"))) for name in names]


def compile_calls(calls: Iterable[Call], device: DeviceProperties, index: int, count: int) -> int:
    """Compile, launching nothing, the kernels of calls that fall to process ``index``; how many these are."""
    kernels = kernels_of(calls, device)
    mine = sorted(kernels)[index::count]
    for key in mine:
        compile_call(kernels[key], device)
    return len(mine)


def compile_part(what: str, shapes: list[Shape], index: int, count: int, within: float = float("inf")) -> None:
    """Compile each kernel that falls to process ``index`` of ``count``.

    ``what`` is ``mm``, ``fp8``, ``linear`` with either activation, ``space`` for all plans of each shape, or
    ``queues`` and ``pitch`` for those of these sections, or ``grouped``, which has shapes of its own.
    """
    tasks: dict[str, Callable[[], object]] = grouped.launches() if what == "grouped" else {}
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
    run_parts(tasks, index, count)


def of_sweep(names: Sequence[str], within: float, device: DeviceProperties) -> list[Call]:
    """The launches of a sweep, on the meta device, of problems by name."""
    return [
        functools.partial(sweep.compile_plan, problem, plan, device)
        for problem in sweep.named(names)
        for plan in sweep.candidates(problem, device, within)
    ]


def run_parts(tasks: dict[str, Callable[[], object]], index: int, count: int) -> None:
    """Call those that fall to process ``index`` of ``count``, and say of two at most that they fail."""
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
