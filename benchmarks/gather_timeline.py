"""The timeline of one all-gather + matmul across GPUs: copies and tiles on one time axis, as a record for the docs.

    PYTHONPATH=src:benchmarks python benchmarks/gather_timeline.py [FOLDER] [MxNxK]

One process a GPU; rank 0's call is drawn. Its tiles and waits are those of `tilestream.trace`; the copies that bring
the others' rows are what torch's profiler saw. The two are laid over each other by the kernel, which both have. The
call is traced `CALLS` times, and the one of median length is kept; its answer must be the same as without a trace, bit
by bit. Writes ``gpu_trace_gather_x<world>*.json.gz``, which https://ui.perfetto.dev opens; ``python
benchmarks/render.py`` draws it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tilestream as ts
from harness import RESULTS, device_suffix
from ranks import on_each_gpu
from tilestream import distributed as tsd

SHAPE = (8192, 3584, 8192)
CALLS = 5
_DEADLINE = 10.0


class Activity(NamedTuple):
    """What a GPU did from ``begin`` to ``end``, nanoseconds by the host's clock; ``size`` of a copy, else 0."""

    name: str
    stream: int
    begin: float
    end: float
    size: int


def activities(document: dict[str, Any]) -> list[Activity]:
    """Kernels and copies of torch's profiler, from its Chrome trace, in order."""
    base = float(document.get("baseTimeNanoseconds", 0))
    found = []
    for event in document["traceEvents"]:
        if event.get("cat") in ("kernel", "gpu_memcpy"):
            begin, more = base + 1e3 * event["ts"], event.get("args", {})
            size = int(more.get("bytes", 0)) if event["cat"] == "gpu_memcpy" else 0
            found.append(Activity(event["name"], int(more.get("stream", -1)), begin, begin + 1e3 * event["dur"], size))
    return sorted(found, key=lambda one: one.begin)


def arrivals(rank: int, world: int, pulled: list[Activity], own: list[Activity], parts: int) -> list[float | None]:
    """When each chunk was there: the end of the copy that brought it.

    Parameters
    ----------
    pulled
        From the peers, on the side stream, in the order of `tilestream.distributed.protocol`: the next rank's first;
        ``parts`` of each.
    own
        Into the own slot, on the kernel's stream.
    """
    there: list[float | None] = []
    for source in range(world):
        step = (source - rank) % world
        mine = own if step == 0 else pulled[(step - 1) * parts : step * parts]
        # Copied in one piece, an own shard is there at once.
        ends = [one.end for one in mine]
        there += [ends[min(i, len(ends) - 1)] if ends else None for i in range(parts)]
    return there


def traced(a: torch.Tensor, w: torch.Tensor) -> tuple[ts.trace.LaunchTrace, torch.Tensor, list[Activity]]:
    """One call: its launch, its answer, and what this GPU did."""
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        with ts.trace.record() as recorder:
            out = tsd.all_gather_matmul(a, w, form="fused", deadline=_DEADLINE)
        torch.cuda.synchronize()
    ts.check()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        profiler.export_chrome_trace(path)
        found = activities(json.loads(Path(path).read_text(encoding="utf-8")))
    (launch,) = recorder.launches
    return launch, out, found


def laid_over(
    launch: ts.trace.LaunchTrace, found: list[Activity], rank: int, world: int, size: int, parts: int
) -> ts.trace.LaunchTrace:
    """``launch`` of ``rank`` with the arrivals of its chunks of ``size`` bytes, from what its GPU did."""
    kernel = max((one for one in found if not one.size), key=lambda one: one.end - one.begin)
    first = min(span.begin for spans in launch.by_worker for span in spans[:1])
    own = [one for one in found if one.size == size * parts and one.stream == kernel.stream]
    pulled = [one for one in found if one.size == size and one.stream != kernel.stream]
    launch.arrivals[0] = tuple(
        None if when is None else first + 1e-9 * (when - kernel.begin)
        for when in arrivals(rank, world, pulled, own, parts)
    )
    begun = [one.begin for one in (*own, *pulled)]
    if begun:
        launch.started[0] = first + 1e-9 * (min(begun) - kernel.begin)
    return launch


def rank_main(rank: int, world: int, folder: str, shape: tuple[int, int, int]) -> None:
    """One rank."""
    m, n, k = shape
    torch.manual_seed(rank)
    a = torch.randn(m // world, k, device="cuda").to(torch.bfloat16)
    w = (torch.randn(n, k, device="cuda") * k**-0.5).to(torch.bfloat16).t()
    right = tsd.all_gather_matmul(a, w, form="fused", deadline=_DEADLINE)
    traced(a, w)  # compiled, and the profiler begun
    plan = tsd.plan_all_gather_matmul(a, w, form="fused")
    calls, size = [], a.numel() * a.element_size() // plan.chunks
    for _ in range(CALLS):
        launch, out, found = traced(a, w)
        assert torch.equal(out, right), "a trace changed the answer"
        calls.append(laid_over(launch, found, rank, world, size, plan.chunks))
    if rank == 0:
        kept = sorted(calls, key=lambda launch: launch.end - launch.begin)[CALLS // 2]
        device = torch.cuda.get_device_name()
        kept.label = f"rank 0 of {world} x {device.removeprefix('NVIDIA ')}, {m} x {n} x {k}: {kept.label}"
        print(kept.label, f"{1e3 * (kept.end - kept.begin):.3f} ms", kept.arrivals)
        print(ts.trace.export(kept, Path(folder) / f"gpu_trace_gather_x{world}{device_suffix(device)}.json.gz"))


def main() -> None:
    """All ranks."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    m, n, k = map(int, sys.argv[2].split("x")) if len(sys.argv) > 2 else SHAPE
    folder.mkdir(parents=True, exist_ok=True)
    on_each_gpu(rank_main, str(folder), (m, n, k))


if __name__ == "__main__":
    main()
