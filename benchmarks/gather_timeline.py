"""The timeline of one all-gather + matmul across GPUs: copies and tiles on one time axis, as a record for the docs.

    PYTHONPATH=src:benchmarks python benchmarks/gather_timeline.py [FOLDER] [MxNxK] [--ways push pull]

One process a GPU; rank 0's call is drawn. Its tiles and waits are those of `tilestream.trace`; the copies that bring
the others' rows are what torch's profiler saw, of each rank on its own GPU. The two are laid over each other by the
kernel, which both have, and ranks by the host's clock. The call is traced `CALLS` times, and the one of median length
is kept; its answer must be the same as without a trace, bit by bit. Writes ``gpu_trace_gather_x<world>*.json.gz``,
which https://ui.perfetto.dev opens; ``python benchmarks/render.py`` draws it. Prints beside that when each copy of each
rank's began and ended, and how fast it was. ``--ways``: a call in each of them, whatever
the table says.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import tilestream as ts
from harness import RESULTS, device_suffix
from ranks import on_each_gpu
from tilestream import distributed as tsd
from tilestream.core.protocols.gather import peers, receivers
from tilestream.distributed.dispatch import WAYS, trial

SHAPE = "8192x3584x8192"
#: Cycles in which the host issues a call, before the ranks meet on their streams: some milliseconds.
_PAUSE = 20_000_000
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


def arrivals(
    rank: int, copies: list[list[Activity]], own: list[Activity], parts: int, pulled: bool = False
) -> list[float | None]:
    """When each chunk was there: the end of the copy that brought it.

    Parameters
    ----------
    copies
        By each rank, in order: ``parts`` to each peer; or, ``pulled``, from each.
    own
        Into the own slot, on the kernel's stream.
    """
    there: list[float | None] = []
    world = len(copies)
    for source in range(world):
        mine = own
        if source != rank:
            by, order = (rank, list(peers(rank, world))) if pulled else (source, receivers(source, world))
            first = order.index(source if pulled else rank) * parts
            mine = copies[by][first : first + parts]
        # Copied in one piece, an own shard is there at once.
        ends = [one.end for one in mine]
        there += [ends[min(i, len(ends) - 1)] if ends else None for i in range(parts)]
    return there


def behind_meeting(found: list[Activity]) -> list[Activity]:
    """What a GPU did when it had met the others, by a collective of NCCL's."""
    last = max((i for i, one in enumerate(found) if "nccl" in one.name.lower()), default=-1)
    return found[last + 1 :]


def traced(
    a: torch.Tensor, w: torch.Tensor, meet: torch.Tensor
) -> tuple[ts.trace.LaunchTrace, torch.Tensor, list[Activity]]:
    """One call, as is on trial: its launch, its answer, and what this GPU did."""
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(_PAUSE)
        dist.all_reduce(meet)
        with ts.trace.record() as recorder:
            out = tsd.all_gather_matmul(a, w, deadline=_DEADLINE)
        torch.cuda.synchronize()
    ts.check()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/trace.json"
        profiler.export_chrome_trace(path)
        found = behind_meeting(activities(json.loads(Path(path).read_text(encoding="utf-8"))))
    (launch,) = recorder.launches
    return launch, out, found


def kernel_of(found: list[Activity]) -> Activity:
    """The matmul of what a GPU did."""
    return max((one for one in found if not one.size), key=lambda one: one.end - one.begin)


def beside(found: list[Activity], size: int) -> list[Activity]:
    """The copies of chunks of ``size`` bytes, on another stream than the kernel's."""
    return [one for one in found if one.size == size and one.stream != kernel_of(found).stream]


def laid_over(
    launch: ts.trace.LaunchTrace, found: list[list[Activity]], rank: int, size: int, parts: int, pulled: bool = False
) -> ts.trace.LaunchTrace:
    """``launch`` of ``rank`` with the arrivals of its chunks of ``size`` bytes, from what the ranks' GPUs did."""
    kernel = kernel_of(found[rank])
    first = min(span.begin for spans in launch.by_worker for span in spans[:1])
    own = [one for one in found[rank] if one.size == size * parts and one.stream == kernel.stream]
    copies = [beside(one, size) for one in found]
    there = arrivals(rank, copies, own, parts, pulled)
    launch.arrivals[0] = tuple(None if when is None else first + 1e-9 * (when - kernel.begin) for when in there)
    begun = [one.begin for some in (own, *copies) for one in some]
    if begun:
        launch.started[0] = first + 1e-9 * (min(begun) - kernel.begin)
    return launch


def say(launch: ts.trace.LaunchTrace, found: list[list[Activity]], size: int) -> str:
    """A call in lines: the launch, and of each rank its kernel and its copies, microseconds after rank 0's kernel."""
    zero, length = kernel_of(found[0]).begin, launch.end - launch.begin
    share = launch.waited / (length * launch.workers)
    lines = [f"{launch.label}: {1e3 * length:.3f} ms, {share:.1%} of it at the gate"]
    for rank, one in enumerate(found):
        for what in (kernel_of(one), *beside(one, size)):
            begin, end = (1e-3 * (when - zero) for when in (what.begin, what.end))
            speed = f"{what.size / (what.end - what.begin):.0f} GB/s" if what.size else "kernel"
            lines.append(f"  rank {rank} {begin:8.1f} to {end:8.1f}: {speed}, stream {what.stream}")
    return "\n".join(lines)


def rank_main(rank: int, world: int, arguments: argparse.Namespace) -> None:
    """One rank."""
    m, n, k = map(int, arguments.shape.split("x"))
    torch.manual_seed(rank)
    a = torch.randn(m // world, k, device="cuda").to(torch.bfloat16)
    w = (torch.randn(n, k, device="cuda") * k**-0.5).to(torch.bfloat16).t()
    meet = torch.zeros(1, device="cuda")
    right = tsd.all_gather_matmul(a, w, form="fused", deadline=_DEADLINE)
    plan = tsd.plan_all_gather_matmul(a, w, form="fused")
    chunks = plan.chunks
    size = a.numel() * a.element_size() // chunks
    for way in arguments.ways or [plan.decision.way]:
        with trial(True, chunks, way):
            traced(a, w, meet)  # compiled, and the profiler begun
            calls = []
            for _ in range(CALLS):
                launch, out, own = traced(a, w, meet)
                assert torch.equal(out, right), "a trace changed the answer"
                found: list[list[Activity]] = [[] for _ in range(world)]
                dist.all_gather_object(found, own)
                calls.append((laid_over(launch, found, rank, size, chunks, way == "pull"), found))
        if rank == 0:
            kept, found = sorted(calls, key=lambda call: call[0].end - call[0].begin)[CALLS // 2]
            device = torch.cuda.get_device_name()
            kept.label = f"rank 0 of {world} x {device.removeprefix('NVIDIA ')}, {m} x {n} x {k}: {kept.label}"
            print(f"{way}:", say(kept, found, size), flush=True)
            name = f"gpu_trace_gather_x{world}" + (f"_{way}" if arguments.ways else "")
            print(ts.trace.export(kept, Path(arguments.folder) / f"{name}{device_suffix(device)}.json.gz"))


def main() -> None:
    """All ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default=str(RESULTS))
    parser.add_argument("shape", nargs="?", default=SHAPE, help="MxNxK")
    parser.add_argument("--ways", nargs="*", choices=WAYS)
    arguments = parser.parse_args()
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    on_each_gpu(rank_main, arguments)


if __name__ == "__main__":
    main()
