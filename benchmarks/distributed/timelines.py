"""Timelines across GPUs: one all-gather + matmul as a trace, and one MLP block as a record, on the ranks' time axis.

What each GPU did is what torch's profiler saw: kernels and copies, by stream, in nanoseconds of the host's clock, which
all ranks share. The ranks meet on their streams before, behind a pause in which the hosts issue the call. `CALLS` calls
are profiled, and that of median length on rank 0 is kept. Answers must be those without a profile, bit by bit.

Of the gather rank 0's call is drawn. Its tiles and waits are those of `tilestream.trace`; the copies that bring the
others' rows are the profiler's, of each rank. The two are laid over each other by the kernel, which both have.
`captured_timeline` does the same to a replay of a gather that was captured with its trace; the device counts its calls
(TILESTREAM_GRAPH_RANKS=1). In a dry run there are no graphs: it makes an eager call, and the trace alone.

The block is Llama-3 70B's (8192 columns, 28672 of them hidden), bf16, forward: tokens are gathered into w1 and w3,
silu(.) * ., and w2's product is summed and scattered.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import tilestream as ts
from benchmarks.core.records import Record
from benchmarks.core.session import Session
from benchmarks.distributed.mlp import DIM, HIDDEN
from benchmarks.distributed.ranks import (
    DEADLINE,
    Activity,
    kernel_of,
    operands,
    pause,
    profiled,
    record_of,
    small,
)
from tilestream import distributed as tsd
from tilestream.core.protocols.gather import peers, receivers
from tilestream.distributed.dispatch import trial

SHAPE = "8192x3584x8192"
CALLS = 5
#: Cycles in which the host issues a call: 10 ms and more.
PAUSE = 20_000_000
#: Copies of less than this are no rows: descriptors, tables.
_ROWS_BYTES = 1 << 20


# A gather -------------------------------------------------------------------------------------------------------------


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
        # An own shard is copied in one piece.
        ends = [one.end for one in mine]
        there += [ends[min(i, len(ends) - 1)] if ends else None for i in range(parts)]
    return there


def behind_meeting(found: list[Activity]) -> list[Activity]:
    """A GPU's activities behind the NCCL collective by which the ranks have met."""
    last = max((i for i, one in enumerate(found) if "nccl" in one.name.lower()), default=-1)
    return found[last + 1 :]


Call = tuple[ts.trace.LaunchTrace, torch.Tensor]


def traced(a: torch.Tensor, w: torch.Tensor) -> Call:
    """One call, by the decision on trial: its launch, and its answer."""
    with ts.trace.record() as recorder:
        out = tsd.all_gather_matmul(a, w, deadline=DEADLINE)
    (launch,) = recorder.launches
    return launch, out


def seen(call: Callable[[], Call], meet: torch.Tensor) -> tuple[ts.trace.LaunchTrace, torch.Tensor, list[Activity]]:
    """What a call gives once all ranks have met, and this GPU's activities."""

    def together() -> Call:
        pause(PAUSE)
        dist.all_reduce(meet)
        return call()

    (launch, out), found = profiled(together)
    return launch, out, behind_meeting(found)


def watched(
    call: Callable[[], Call], right: torch.Tensor, rank: int, world: int, size: int, parts: int, pulled: bool = False
) -> tuple[ts.trace.LaunchTrace, list[list[Activity]]]:  # fmt: skip
    """Of `CALLS` calls that of median length on rank 0, with its arrivals, and what each rank's GPU did.

    ``size``, ``parts``: bytes of a chunk, and chunks of a shard.
    """
    meet = torch.zeros(1, device="cuda")
    seen(call, meet)  # compiled, and the profiler begun
    calls = []
    for _ in range(CALLS):
        launch, out, own = seen(call, meet)
        assert torch.equal(out, right), "a trace changed the answer"
        found: list[list[Activity]] = [[] for _ in range(world)]
        dist.all_gather_object(found, own)
        calls.append((laid_over(launch, found, rank, size, parts, pulled), found))
    return sorted(calls, key=lambda one: one[0].end - one[0].begin)[CALLS // 2]


def beside(found: list[Activity], size: int) -> list[Activity]:
    """The copies of chunks of ``size`` bytes, on another stream than the kernel's; of a replay maybe on the same."""
    copies = [one for one in found if one.size == size]
    return [one for one in copies if one.stream != kernel_of(found).stream] or copies


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


def gather_timeline(rank: int, world: int, session: Session) -> None:
    m, n, k = map(int, (session.options.shapes or SHAPE).split("x"))
    torch.manual_seed(rank)
    a, w = operands(m // world, n, k)
    right = tsd.all_gather_matmul(a, w, form="fused", deadline=DEADLINE)
    plan = tsd.plan_all_gather_matmul(a, w, form="fused")
    chunks = plan.chunks
    size = a.numel() * a.element_size() // chunks
    ways = session.options.ways
    for way in ways or [plan.decision.way]:
        with trial(True, chunks, way):
            kept, found = watched(lambda: traced(a, w), right, rank, world, size, chunks, way == "pull")
        if rank == 0:
            kept.label = f"{ran_on(world)}, {m} x {n} x {k}: {kept.label}"
            print(f"{way}:", say(kept, found, size), flush=True)
            session.export(kept, f"trace_gather_x{world}" + (f"_{way}" if ways else ""))


def ran_on(world: int) -> str:
    """What a drawing's title says of a call's ranks."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"rank 0 of {world} x {name.removeprefix('NVIDIA ')}"


def captured_timeline(rank: int, world: int, session: Session) -> None:
    os.environ["TILESTREAM_GRAPH_RANKS"] = "1"
    m, n, k = (small(session, int(extent)) for extent in (session.options.shapes or SHAPE).split("x"))
    torch.manual_seed(rank)
    a, w = operands(m // world, n, k)

    def call() -> torch.Tensor:
        out: torch.Tensor = tsd.all_gather_matmul(a, w, form="fused", deadline=DEADLINE)
        return out

    with ts.trace.record() as recorder:  # the traced kernel is compiled, and slots are made
        right = call()
    if session.dry:
        kept, told = recorder.launches[-1], f"{recorder.launches[-1].tiles_done} tiles"
    else:
        torch.cuda.synchronize()
        plan, graph = tsd.plan_all_gather_matmul(a, w, form="fused"), torch.cuda.CUDAGraph()
        with ts.trace.record() as recorder, torch.cuda.graph(graph):
            out = call()

        def replay() -> Call:
            out.fill_(float("nan"))
            graph.replay()
            (launch,) = recorder.replayed()
            return launch, out

        size = a.numel() * a.element_size() // plan.chunks
        kept, found = watched(replay, right, rank, world, size, plan.chunks)
        told = say(kept, found, size)
        if all(when is None for when in kept.arrivals[0]):
            names = sorted({(one.name[:40], one.size) for one in found[rank]})
            raise RuntimeError(f"rank {rank}: the profiler saw no copy of {size} bytes: {names}")
    if rank == 0:
        kept.label = f"{ran_on(world)}, {m} x {n} x {k}, replayed: {kept.label}"
        print(told, flush=True)
        session.export(kept, f"trace_captured_gather_x{world}")


# A block --------------------------------------------------------------------------------------------------------------


def lanes(found: Sequence[Activity], rank: int) -> dict[str, list[Activity]]:
    """A GPU's activities by purpose, in order.

    Parameters
    ----------
    found
        Of one block, behind NCCL's kernel by which the ranks have met: two gated matmuls, what is between, a matmul
        that publishes, a sum; copies that gather on one side stream, and copies of partial sums on another.

    Raises
    ------
    RuntimeError
        If it is not that: what is missing, and what was seen.
    """
    met = max((one.end for one in found if "nccl" in one.name.lower()), default=0.0)
    found = [one for one in found if one.begin >= met]
    kernels = [one for one in found if not one.size]
    matmuls = [one for one in kernels if "gemm" in one.name]
    copies = [one for one in found if one.size >= _ROWS_BYTES]
    if len(matmuls) != 3 or not copies:
        names = sorted({one.name[:60] for one in kernels})
        raise RuntimeError(
            f"rank {rank}: {len(matmuls)} matmuls and {len(copies)} copies of rows; a block has 3, and some. Kernels: "
            f"{names}"
        )
    calling, last = matmuls[0].stream, matmuls[2]
    beside = [one for one in copies if one.stream != calling]
    return {
        "gather: w1, w3": matmuls[:2],
        "w2, and publish": matmuls[2:],
        "silu, sum": [one for one in kernels if one not in matmuls and one.stream == calling],
        "own rows": [one for one in copies if one.stream == calling],
        "rows of others": [one for one in beside if one.begin < last.begin],
        "sums of others": [one for one in beside if one.begin >= last.begin],
    }


def mlp_timeline(rank: int, world: int, session: Session) -> None:
    tokens = session.options.tokens
    torch.manual_seed(rank)
    x = torch.randn(tokens // world, DIM, device="cuda").to(torch.bfloat16)
    w1, w3 = (torch.randn(HIDDEN // world, DIM, device="cuda").to(torch.bfloat16).t() / DIM**0.5 for _ in range(2))
    w2 = torch.randn(DIM, HIDDEN // world, device="cuda").to(torch.bfloat16).t() / HIDDEN**0.5

    def block() -> torch.Tensor:
        gate, up = tsd.all_gather_matmul(x, [w1, w3], form="fused", deadline=DEADLINE)
        hidden = torch.nn.functional.silu(gate) * up
        return tsd.matmul_reduce_scatter(hidden, w2, form="fused", deadline=DEADLINE)

    record = record_of(session, rank, "mlp_timeline")
    everybody = typical_call(block, lambda found: lanes(found, rank), rank, world)
    ts.check()
    if record is not None:
        write_call(record, everybody, tokens=tokens)


def typical_call(
    call: Callable[[], torch.Tensor], lanes_of: Callable[[list[Activity]], dict[str, list[Activity]]], rank: int,
    world: int,
) -> list[dict[str, list[Activity]]]:  # fmt: skip
    """All ranks' activities, by lane, of that of `CALLS` calls which has the median length on rank 0."""
    meet = torch.zeros(1, device="cuda")

    def together() -> torch.Tensor:
        pause(PAUSE)
        dist.all_reduce(meet)
        return call()

    right = together()
    profiled(together)  # compiled, and the profiler begun
    calls = []
    for i in range(CALLS):
        out, found = profiled(together)
        assert torch.equal(out, right), "a profile changed the answer"
        calls.append(lanes_of(found))
        print(f"rank {rank}: call {i + 1} of {CALLS}, {len(found)} activities", flush=True)
    lengths = torch.tensor([end_of(one) - begin_of(one) for one in calls], dtype=torch.float64)
    kept = torch.tensor(int(lengths.argsort()[CALLS // 2]), device="cuda")
    dist.broadcast(kept, 0)
    everybody: list[dict[str, list[Activity]]] = [{} for _ in range(world)]
    dist.all_gather_object(everybody, calls[int(kept.item())])
    return everybody


def write_call(record: Record, everybody: Sequence[dict[str, list[Activity]]], **more: Any) -> None:
    """Write all ranks' activities of a call, by lane, with ``more`` of it."""
    zero = min(map(begin_of, everybody))
    for other, call in enumerate(everybody):
        for lane, of in call.items():
            spans = [microseconds(one, zero) for one in of]
            record.rows.append({"rank": other, "lane": lane, "spans": spans})
    record.data |= {**more, "ms": round((max(map(end_of, everybody)) - zero) / 1e6, 4)}
    record.write()
    print(record.path, record.data["ms"], "ms", flush=True)


def begin_of(call: dict[str, list[Activity]]) -> float:
    """When a block's first activity began."""
    return min(one.begin for of in call.values() for one in of)


def end_of(call: dict[str, list[Activity]]) -> float:
    """When its last one ended."""
    return max(one.end for of in call.values() for one in of)


def microseconds(one: Activity, zero: float) -> list[float]:
    """Its begin and end behind ``zero``."""
    return [round((when - zero) / 1e3, 2) for when in (one.begin, one.end)]
