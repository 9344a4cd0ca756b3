"""The timeline of a replay: a graph copies a pinned tensor to the GPU, and its matmul begins with the first chunk.

The graph is captured with its trace, and replayed `CALLS` times; the replay of median length is kept. Tiles and waits
are those of `tilestream.trace`, copies those of torch's profiler. The two are laid over each other by the kernel,
which both have. Answers must be those of an eager call, bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.distributed.ranks import Activity, kernel_of, seen_by_profiler

SHAPE = "12288x8192x8192"
CALLS = 5
#: Copies of less than this are words, not rows.
_ROWS_BYTES = 1 << 16


def laid_over(launch: ts.trace.LaunchTrace, found: Sequence[Activity], count: int, pivot: int) -> None:
    """Give ``launch`` the moments at which its ``count`` chunks were there, from what the GPU did in that replay.

    Raises
    ------
    RuntimeError
        If the copies seen are not one a chunk.
    """
    copies = [one for one in found if one.size >= _ROWS_BYTES and "htod" in one.name.lower()]
    if len(copies) != count:
        names = sorted({one.name for one in found})
        raise RuntimeError(f"{len(copies)} copies of rows to the GPU; there are {count} chunks. Seen: {names}")
    kernel, first = kernel_of(found), min(span.begin for own in launch.by_worker for span in own[:1])
    ends: list[float | None] = [None] * count
    for i, copy in enumerate(copies):  # from the pivot on
        ends[(pivot + i) % count] = first + 1e-9 * (copy.end - kernel.begin)
    launch.arrivals[0] = tuple(ends)
    launch.started[0] = first + 1e-9 * (copies[0].begin - kernel.begin)


def captured_timeline(session: Session) -> None:
    m, n, k = map(int, (session.options.shapes or SHAPE).split("x"))
    torch.manual_seed(1)
    source = torch.randn(m, k).to(torch.bfloat16).pin_memory()
    w = torch.randn(n, k, device="cuda").to(torch.bfloat16).t() / k**0.5
    x = ts.stream_in(source)
    chunks, pivot = x.arrival.num_chunks, x.arrival.pivot
    right = ts.matmul(x, w)
    x.restart()
    with ts.trace.record():  # compiled
        ts.matmul(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with ts.trace.record() as recorder, torch.cuda.graph(graph):
        x.restart()
        out = ts.matmul(x, w)

    def replay() -> ts.trace.LaunchTrace:
        graph.replay()
        (launch,) = recorder.replayed()
        return launch

    seen_by_profiler(replay)  # the profiler is begun
    calls = []
    for _ in range(CALLS):
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        launch, found = seen_by_profiler(replay)
        assert torch.equal(out, right), "a replay's answer is another than an eager call's"
        laid_over(launch, found, chunks, pivot)
        calls.append(launch)
    ts.check()
    kept = sorted(calls, key=lambda launch: launch.end - launch.begin)[CALLS // 2]
    device = torch.cuda.get_device_name().removeprefix("NVIDIA ")
    kept.label = f"{device}, {m} x {n} x {k}, replayed: {kept.label}"
    share = kept.waited / ((kept.end - kept.begin) * kept.workers)
    print(f"{kept.label}: {1e3 * (kept.end - kept.begin):.3f} ms, {share:.1%} of it at the gate", flush=True)
    session.export(kept, "trace_captured_stream")
