"""GEMM when the GPU is not all ours: `tilestream.sweep` over the shapes and neighbours that docs/performance.md shows.

    PYTHONPATH=src python benchmarks/gpu_neighbours.py SECTION[,SECTION...] FOLDER [--budget SECONDS]

| section | what                                                                                       | seconds |
|---------|--------------------------------------------------------------------------------------------|---------|
| `held`  | a neighbour on 0, 4, 8, 16, 32, 64 SMs: static, dynamic, stream_k, torch (quack if there)  | 45      |
| `idle`  | what a queue costs on an idle GPU: shapes of many waves, static beside dynamic             | 15      |
| `split` | what stream_k gains there: shapes of fewer than four waves, beside the better of the two   | 15      |
| `green` | green contexts of 96, 64 and 32 SMs, beside a kernel that is told the number               | 20      |
| `queues`| 1, 2 and 8 queues, with and without a neighbour                                            | 10      |
| `nccl`  | beside an all-reduce of 256 MiB that is under way; two GPUs                                | 25      |
| `together` | the same, both possible at once                                                         | 15      |

Each writes ``FOLDER/gpu_neighbours_SECTION.json`` (``..._h200.json`` on an H200) and a CSV anew after each point, and
ends before the budget does. What will be launched is compiled beforehand, on all cores at once. quack: see `gpu_gemm`.
``--dry`` tries everything on the CPU, with small extents and neighbours on its cores.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.core.harness import device_suffix
from benchmarks.core.paths import command
from tilestream.sweep import run as sweeping
from tilestream.sweep.beside import sweep_beside
from tilestream.sweep.record import Sweep
from tilestream.sweep.run import Runner, Way, ways
from tilestream.sweep.suite import Shape, Suite
from tilestream.sweep.takers import taker


class Section(NamedTuple):
    """What is measured, by whom SMs are taken, and how many."""

    by: str
    taken: tuple[int, ...]
    ways: tuple[str, ...]
    shapes: tuple[Shape, ...]
    seconds: int
    queues: tuple[int, ...] = (1,)


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(map(Shape.parse, text.split()))


#: The issue's four: whole waves, few waves, short K, long K.
FOUR = _shapes("8192x8192x8192 4096x4096x4096 8192x8192x1024 4096x8192x28672")
SECTIONS = {
    "held": Section(
        "neighbour", (0, 4, 8, 16, 32, 64), ("static", "dynamic", "stream_k", "torch", "quack", "quack-dynamic"),
        FOUR, 45,
    ),
    "idle": Section(
        "neighbour", (0,), ("static", "dynamic", "auto", "torch"),
        _shapes(
            "8192x8192x8192 8192x8192x1024 8192x8192x512 8192x8192x2048 16384x4096x4096 16384x6144x4096 "
            "4096x14336x4096 4096x28672x4096 16384x8192x8192"
        ),
        15,
    ),
    "split": Section(
        "neighbour", (0,), ("static", "dynamic", "stream_k", "auto", "torch"),
        _shapes("4096x4096x4096 2048x2560x8192 3072x3072x8192 2304x4096x16384 2816x4096x8192 1536x4096x16384"), 15,
    ),
    "green": Section("green", (0, 36, 68, 100), ("dynamic", "told", "torch"), FOUR, 20),
    "queues": Section(
        "neighbour", (0, 8, 32), ("dynamic", "torch"), _shapes("4096x4096x4096 8192x8192x1024"), 10, (1, 2, 8)
    ),
    "nccl": Section("nccl", (4, 8, 16), ("static", "dynamic", "told", "torch"), FOUR, 25),
    "together": Section("nccl", (4, 8, 16), ("static", "dynamic", "told", "torch"), FOUR[:1] + FOUR[3:], 15),
}  # fmt: skip


def dry(section: Section) -> Section:
    """Small, on the CPU."""
    shapes = tuple(Shape(max(s.m // 64, 16), max(s.n // 64, 16), max(s.k // 64, 16)) for s in section.shapes[:2])
    taken = (0, 1) if len(section.taken) > 1 else (0,)
    return section._replace(by="nccl" if section.by == "nccl" else "busy", taken=taken, shapes=shapes)


def todo_of(section: Section) -> list[Way]:
    """Its ways that can be run here."""
    return ways((name for name in section.ways if sweeping.installed(name)), section.queues)


def measure(name: str, section: Section, folder: Path, end: float, is_dry: bool) -> int:
    """One section; how many points were refused."""
    device = sweeping.device_of("cpu" if is_dry else "gpu")
    path = folder / f"gpu_neighbours_{name}{'' if is_dry else device_suffix(device.name)}.json"
    if section.by == "nccl":
        how: dict[str, Any] = {"backend": "gloo", "megabytes": 1, "rounds": 3} if is_dry else {}
        if name == "together":
            how["head_start"] = 0.0
        made = sweep_beside(Suite(name, "bfloat16", section.shapes), section.taken, todo_of(section), **how)
        made.about |= {"section": name}
        made.write(path)
        return len(made.refused)
    made = Sweep({**sweeping.about(device), "section": name, "by": section.by, "missing": []})
    runner = Runner(taker(section.by, device), device, 3 if is_dry else None, lambda line: print(line, flush=True))
    for shape in section.shapes:
        if time.monotonic() > end:
            made.about["missing"].append(str(shape))
            continue
        suite = Suite(name, "bfloat16", (shape,))
        runner.run(made, suite, section.taken, todo_of(section), lambda: made.write(path))
    made.write(path)
    for refused in made.refused:
        print(f"refused: {refused}", flush=True)
    return len(made.refused)


def compile_ahead(names: Sequence[str], limit: float) -> None:
    """Have every kernel of the sections compiled on all cores at once, into Triton's cache. Saves time, no more."""
    begin, count = time.monotonic(), min(os.cpu_count() or 1, 16)
    own = command("contention", "neighbours", ",".join(names), ".", "--compile")
    running = [
        subprocess.Popen([*own, str(i), str(count)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for i in range(count)
    ]
    try:
        for process in running:
            process.wait(max(begin + limit - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        print("compiling ahead was cut off", flush=True)
    finally:
        for process in running:
            process.kill()
            process.wait()
    print(f"{time.monotonic() - begin:.1f} s to compile ahead", flush=True)


def compile_share(names: Sequence[str], index: int, count: int) -> None:
    """The part of `compile_ahead` that one of ``count`` processes does."""
    device = sweeping.device_of("gpu")
    jobs = {
        (shape, way, device.workers - taken if way.implementation == "told" else device.workers)
        for name in names
        for shape in SECTIONS[name].shapes
        for way in todo_of(SECTIONS[name])
        if way.implementation in sweeping.OURS
        for taken in (SECTIONS[name].taken if way.implementation == "told" else (0,))
    }
    for shape, way, left in sorted(jobs, key=str)[index::count]:
        a, w = (torch.empty(rows, shape.k, device="cuda", dtype=torch.bfloat16) for rows in (shape.m, shape.n))
        sweeping.prepare(way, shape, "bfloat16", left, a, w.t()).call()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", help=f"of {', '.join(SECTIONS)}, with commas")
    parser.add_argument("folder", type=Path, help="where the records go")
    parser.add_argument("--budget", type=float, default=120, help="seconds for all (default: 120)")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with small extents")
    parser.add_argument("--compile", nargs=2, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    names = given.sections.split(",")
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"sections: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    torch.set_grad_enabled(False)
    if given.compile:
        compile_share(names, *given.compile)
        return 0
    begin, refused = time.monotonic(), 0
    given.folder.mkdir(parents=True, exist_ok=True)
    if not given.dry:
        compile_ahead(names, 0.4 * given.budget)
    for at, name in enumerate(names):
        left = given.budget - (time.monotonic() - begin)
        share = SECTIONS[name].seconds / sum(SECTIONS[other].seconds for other in names[at:])
        print(f"== {name}, {share * left:.0f} s", flush=True)
        section = dry(SECTIONS[name]) if given.dry else SECTIONS[name]
        refused += measure(name, section, given.folder, time.monotonic() + share * left, given.dry)
    print(f"{time.monotonic() - begin:.0f} s, {refused} points refused")
    return 1 if refused else 0
