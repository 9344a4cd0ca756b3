"""GEMM while other kernels hold SMs: `tilestream_tools.sweep` over the shapes and neighbours of docs/performance.

A dry run is on the CPU, with small extents and neighbours on its cores.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from benchmarks.core.compiling import compile_ahead
from benchmarks.core.records import folder_of
from benchmarks.core.session import Session
from tilestream_tools.sweep import run as sweeping
from tilestream_tools.sweep.collective_overlap import sweep_beside
from tilestream_tools.sweep.contention import taker
from tilestream_tools.sweep.record import Sweep
from tilestream_tools.sweep.run import Runner, Way, ways
from tilestream_tools.sweep.suite import Shape, Suite


class Case(NamedTuple):
    """What is measured, who takes SMs, and how many of them."""

    by: str
    taken: tuple[int, ...]
    ways: tuple[str, ...]
    shapes: tuple[Shape, ...]
    queues: tuple[int, ...] = (1,)


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(map(Shape.parse, text.split()))


#: The issue's four: whole waves, few waves, short K, long K.
FOUR = _shapes("8192x8192x8192 4096x4096x4096 8192x8192x1024 4096x8192x28672")
CASES = {
    "held": Case(
        "neighbour", (0, 4, 8, 16, 32, 64), ("static", "dynamic", "stream_k", "torch", "quack", "quack-dynamic"),
        FOUR,
    ),
    "idle": Case(
        "neighbour", (0,), ("static", "dynamic", "auto", "torch"),
        _shapes(
            "8192x8192x8192 8192x8192x1024 8192x8192x512 8192x8192x2048 16384x4096x4096 16384x6144x4096 "
            "4096x14336x4096 4096x28672x4096 16384x8192x8192"
        ),
    ),
    "split": Case(
        "neighbour", (0,), ("static", "dynamic", "stream_k", "auto", "torch"),
        _shapes("4096x4096x4096 2048x2560x8192 3072x3072x8192 2304x4096x16384 2816x4096x8192 1536x4096x16384"),
    ),
    "green": Case("green", (0, 36, 68, 100), ("dynamic", "told", "torch"), FOUR),
    "queues": Case(
        "neighbour", (0, 8, 32), ("dynamic", "torch"), _shapes("4096x4096x4096 8192x8192x1024"), (1, 2, 8)
    ),
    "nccl": Case("nccl", (4, 8, 16), ("static", "dynamic", "told", "torch"), FOUR),
    "together": Case("nccl", (4, 8, 16), ("static", "dynamic", "told", "torch"), FOUR[:1] + FOUR[3:]),
}  # fmt: skip


def dry(case: Case) -> Case:
    shapes = tuple(Shape(max(s.m // 64, 16), max(s.n // 64, 16), max(s.k // 64, 16)) for s in case.shapes[:2])
    taken = (0, 1) if len(case.taken) > 1 else (0,)
    return case._replace(by="nccl" if case.by == "nccl" else "busy", taken=taken, shapes=shapes)


def todo_of(case: Case) -> list[Way]:
    return ways((name for name in case.ways if sweeping.installed(name)), case.queues)


def measure(session: Session, name: str) -> None:
    """Measure one section, as JSON and CSV that are written after each point."""
    torch.set_grad_enabled(False)
    case = dry(CASES[name]) if session.dry else CASES[name]
    if not session.dry:
        compile_ahead("contention", name, limit=0.4 * session.left)
    device = sweeping.device_of("cpu" if session.dry else "gpu")
    path = session.out / folder_of("no GPU" if session.dry else device.name) / f"neighbours_{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if case.by == "nccl":
        how: dict[str, Any] = {"backend": "gloo", "megabytes": 1, "rounds": 3} if session.dry else {}
        if name == "together":
            how["head_start"] = 0.0
        made = sweep_beside(Suite(name, "bfloat16", case.shapes), case.taken, todo_of(case), **how)
        made.about |= {"section": name}
    else:
        made = Sweep({**sweeping.about(device), "section": name, "by": case.by, "missing": []})
        rounds = 3 if session.dry else None
        runner = Runner(taker(case.by, device), device, rounds, lambda line: print(line, flush=True))
        for shape in case.shapes:
            if session.left < 0:
                made.about["missing"].append(str(shape))
                continue
            suite = Suite(name, "bfloat16", (shape,))
            runner.run(made, suite, case.taken, todo_of(case), lambda: made.write(path))
    made.write(path)
    for refused in made.refused:
        print(f"refused: {refused}", flush=True)
    session.bad += len(made.refused)


held, idle, split, green, queues, nccl, together = (functools.partial(measure, name=name) for name in CASES)


def compile_share(arguments: list[str]) -> None:
    """A process of `core.compiling.compile_ahead`: its share of a section's kernels."""
    name, index, count = arguments[0], int(arguments[1]), int(arguments[2])
    torch.set_grad_enabled(False)
    case, device = CASES[name], sweeping.device_of("gpu")
    jobs = {
        (shape, way, device.workers - taken if way.implementation == "told" else device.workers)
        for shape in case.shapes
        for way in todo_of(case)
        if way.implementation in sweeping.OURS
        for taken in (case.taken if way.implementation == "told" else (0,))
    }
    for shape, way, left in sorted(jobs, key=str)[index::count]:
        a, w = (torch.empty(rows, shape.k, device="cuda", dtype=torch.bfloat16) for rows in (shape.m, shape.n))
        sweeping.prepare(way, shape, "bfloat16", left, a, w.t()).call()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
