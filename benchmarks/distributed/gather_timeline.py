"""The timeline of one all-gather + matmul across GPUs: copies and tiles on one time axis, as a trace.

Rank 0's call is drawn. Its tiles and waits are those of `tilestream.trace`; the copies that bring the others' rows are
what torch's profiler saw, of each rank on its own GPU. The two are laid over each other by the kernel, which both have,
and ranks by the host's clock. The call is traced `CALLS` times, and the one of median length is kept; its answer must
be the same as without a trace, bit by bit. Writes ``trace_gather_x<world>*.json.gz``, for https://ui.perfetto.dev, and
prints when each copy of each rank's began and ended, and how fast it was. ``--ways``: a call in each of them, whatever
the table says.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import tilestream as ts
from benchmarks.core.records import folder_of
from benchmarks.core.session import Session
from benchmarks.distributed.ranks import DEADLINE, Activity, on_each_gpu, profiled
from tilestream import distributed as tsd
from tilestream.distributed.dispatch import trial
from tilestream.distributed.protocol import peers, receivers

SHAPE = "8192x3584x8192"
#: Cycles in which the host issues a call, before the ranks meet on their streams: some milliseconds.
_PAUSE = 20_000_000
CALLS = 5


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

    def call() -> tuple[ts.trace.LaunchTrace, torch.Tensor]:
        torch.cuda._sleep(_PAUSE)
        dist.all_reduce(meet)
        with ts.trace.record() as recorder:
            out = tsd.all_gather_matmul(a, w, deadline=DEADLINE)
        torch.cuda.synchronize()
        (launch,) = recorder.launches
        return launch, out

    (launch, out), found = profiled(call)
    return launch, out, behind_meeting(found)


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


def gather_timeline(session: Session) -> None:
    """A call, or one in each of ``--ways``."""
    on_each_gpu(session, rank_main)


def rank_main(rank: int, world: int, session: Session) -> None:
    """One rank."""
    m, n, k = map(int, (session.options.shapes or SHAPE).split("x"))
    torch.manual_seed(rank)
    a = torch.randn(m // world, k, device="cuda").to(torch.bfloat16)
    w = (torch.randn(n, k, device="cuda") * k**-0.5).to(torch.bfloat16).t()
    meet = torch.zeros(1, device="cuda")
    right = tsd.all_gather_matmul(a, w, form="fused", deadline=DEADLINE)
    plan = tsd.plan_all_gather_matmul(a, w, form="fused")
    chunks = plan.chunks
    size = a.numel() * a.element_size() // chunks
    ways = session.options.ways
    for way in ways or [plan.decision.way]:
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
            name = f"trace_gather_x{world}" + (f"_{way}" if ways else "")
            folder = session.out / folder_of(device)
            folder.mkdir(parents=True, exist_ok=True)
            print(ts.trace.export(kept, folder / f"{name}.json.gz"))
