"""Arrival order on a GPU: a late chunk delays its own tiles alone, in any order of chunks, beside other kernels.

Of the kernel that the plan picks, and of the portable one. That the device takes what the host's text takes is in
`test_gpu_arrival` and `test_gpu_hopper_arrival`, whose probes write it down.
"""

from __future__ import annotations

import itertools
import random
import time

import pytest
import torch
from feeds import Feed, launch_first, pinned
from gpu_cases import BF16, BOUNDS, K, M, N
from gpu_runs import nan, poison, randn, run_apart, settle

import tilestream as ts
from error_rule import Maths, check
from tilestream.runtime.properties import cuda_properties
from tilestream.runtime.streams import lend_to
from tilestream_tools.sweep.contention import Neighbour

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("backend", "nothing_reported")]
WORKERS = 60


def planned(arrival: ts.Arrival, workers: int | None = WORKERS, order: str | None = None) -> ts.Plan:
    return ts.plan(
        M, N, K, dtype=BF16, device="cuda", schedule="dynamic", workers=workers, order=order, arrival=arrival
    )


def without(plan: ts.Plan, chunk: int) -> torch.Tensor:
    """The rows of the output that no tile of the chunk is in."""
    rows = torch.ones(M, dtype=torch.bool)
    for item in plan.schedule.items():
        if any(need.chunk == chunk for need in plan.gate.needs(item)):
            rows[item.pm * plan.tile[0] : (item.pm + 1) * plan.tile[0]] = False
    return rows


def seen(out: torch.Tensor, beside: torch.cuda.Stream, host: torch.Tensor) -> torch.Tensor:
    """What is in the output now, while the kernel runs."""
    with torch.cuda.stream(beside):
        host.copy_(out, non_blocking=True)
    beside.synchronize()
    return host


@launch_first
@pytest.mark.parametrize("chunking", ["uniform", "ragged"])
def test_a_late_chunk_holds_up_no_tile_but_its_own(chunking):
    source, b = pinned(M, K), randn(K, N)
    count = len(BOUNDS) - 1 if chunking == "ragged" else -(-M // 128)
    host = torch.empty(M, N, dtype=BF16).pin_memory()
    beside = lend_to(source, torch.device("cuda", torch.cuda.current_device()))
    for late in range(count):
        if chunking == "ragged":
            arrival = ts.Arrival.ragged(BOUNDS, late, device="cuda")  # the raster begins with what comes last
        else:
            arrival = ts.Arrival.uniform(128, count, late, device="cuda")
        plan = planned(arrival)
        assert plan.schedule.split == "chunks"
        others = [chunk for chunk in range(count) if chunk != late]
        feed, out = Feed(arrival, source)(*range(count)), nan(M, N)
        plan.run(feed.tensor, b, out=out, arrival=arrival)  # compiled
        torch.cuda.synchronize()
        feed.again()
        poison(out)
        torch.cuda.synchronize()
        plan.run(feed.tensor, b, out=out, arrival=arrival, deadline=20.0)
        random.Random(late).shuffle(others)
        feed(*others)
        rows, end = without(plan, late), time.perf_counter() + 10
        while (now := seen(out, beside, host))[rows].isnan().any():
            assert time.perf_counter() < end, f"chunk {late} is late, and holds up tiles of others"
        assert rows.all() or now[~rows].isnan().all(), "computed before it came"
        feed(late)
        torch.cuda.synchronize()
        check(out, Maths(source.cuda(), b))


@launch_first
@pytest.mark.parametrize("workers", [1, 3, None])
@pytest.mark.parametrize("order", ["arrival", "chunk_major"])
def test_chunks_in_any_order(order, workers):
    source, b = pinned(M, K), randn(K, N)
    want = torch.mm(source.cuda(), b)
    arrival = ts.Arrival.ragged(BOUNDS, 2, device="cuda")
    plan, feed = planned(arrival, workers, order), Feed(arrival, source)(*range(len(BOUNDS) - 1))
    first = plan.run(feed.tensor, b, arrival=arrival)
    check(first, Maths(source.cuda(), b))
    orders = list(itertools.permutations(range(len(BOUNDS) - 1)))
    for chunks in random.Random(0).sample(orders, 24):
        feed.again()
        torch.cuda.synchronize()
        out = plan.run(feed.tensor, b, arrival=arrival, deadline=10.0)
        feed(*chunks)
        assert torch.equal(out, first), f"chunks in the order {chunks}"
    assert (first - want).abs().max() < 1


@launch_first
@pytest.mark.parametrize("held", [64, 128])
def test_beside_a_neighbour_that_holds_sms(held):
    source, b = pinned(M, K), randn(K, N)
    arrival = ts.Arrival.uniform(128, -(-M // 128), 3, device="cuda")
    plan, feed = planned(arrival, None), Feed(arrival, source)(*range(-(-M // 128)))
    first = plan.run(feed.tensor, b, arrival=arrival)
    check(first, Maths(source.cuda(), b))
    neighbour = Neighbour(cuda_properties())
    for _ in range(3):
        feed.again()
        torch.cuda.synchronize()
        with neighbour.taking(held):
            out = plan.run(feed.tensor, b, arrival=arrival, deadline=10.0)
            feed(*reversed(range(-(-M // 128))))
            torch.cuda.current_stream().synchronize()
        assert torch.equal(out, first)


@launch_first
@pytest.mark.parametrize("connections", [1, 8])
def test_more_streams_than_connections(connections, backend):
    """All streams' work goes to the device through few queues, in the order of its issue."""
    call = f"many_streams({backend == 'portable'})"
    run_apart("test_gpu_arrival_order", call, CUDA_DEVICE_MAX_CONNECTIONS=str(connections))


def many_streams(portable: bool) -> None:
    """12 launches, each on a stream of its own and fed by another, the last first; then fed before they are issued."""
    b, count, launches = randn(K, N), -(-M // 128), 12
    sources = [pinned(M, K) for _ in range(launches)]
    arrivals = [ts.Arrival.uniform(128, count, i % count, device="cuda") for i in range(launches)]
    plans = [
        ts.plan(
            M, N, K, dtype=BF16, device="cuda", schedule="dynamic", workers=8, arrival=arrival,
            backend="portable" if portable else None,
        )
        for arrival in arrivals
    ]  # fmt: skip
    assert all(plan.schedule.split == "chunks" for plan in plans)
    feeds = [Feed(arrival, source)(*range(count)) for arrival, source in zip(arrivals, sources, strict=True)]
    streams = [lend_to(feed, feed.tensor.device) for feed in feeds]
    outs = [nan(M, N) for _ in range(launches)]
    for feed, one, arrival in zip(feeds, plans, arrivals, strict=True):
        one.run(feed.tensor, b, arrival=arrival)  # compiled
    torch.cuda.synchronize()
    for launched_first in (True, False, True):
        for feed, out in zip(feeds, outs, strict=True):
            feed.again()
            poison(out)
        torch.cuda.synchronize()

        def launch() -> None:
            for stream, one, feed, arrival, out in zip(streams, plans, feeds, arrivals, outs, strict=True):
                with torch.cuda.stream(stream):
                    one.run(feed.tensor, b, out=out, arrival=arrival, deadline=10.0)

        if launched_first:
            launch()
        for feed in reversed(feeds):
            feed(*reversed(range(count)))
        if not launched_first:
            launch()
        settle()
        for source, out in zip(sources, outs, strict=True):
            check(out, Maths(source.cuda(), b))
