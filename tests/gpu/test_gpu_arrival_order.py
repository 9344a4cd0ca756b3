"""Arrival order on a GPU: a late chunk delays its own tiles alone, in any order of chunks, beside other kernels.

Of the kernel that the plan picks, and of the portable one. That the device takes what the host's text takes is in
`test_gpu_gate`, whose probes write it down.
"""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
from feeds import Feed, arrival_of, launch_first, pinned, pivots
from gpu_cases import BF16, CHUNKINGS, K, M, N
from gpu_runs import nan, poison, randn, run_apart, settle

import tilestream as ts
from error_rule import Maths, check
from tilestream.runtime.properties import cuda_properties
from tilestream.runtime.streams import lend_to
from tilestream_tools.sweep.contention import Neighbour

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("backend", "nothing_reported")]


class Fed:
    """A matmul in arrival order whose rows a `Feed` brings, launched once with everything there."""

    def __init__(self, arrival: ts.Arrival, backend: str | None = None, **how: Any) -> None:
        self.b, self.source, self.arrival = randn(K, N), pinned(M, K), arrival
        self.plan = ts.plan(
            M, N, K, dtype=BF16, device="cuda", schedule="dynamic", arrival=arrival, backend=backend, **how
        )
        self.chunks = range(arrival.num_chunks)
        self.feed = Feed(arrival, self.source)(*self.chunks)
        self.out = nan(M, N)
        self.run()  # compiled
        self.check()
        self.first = self.out.clone()

    def run(self) -> None:
        self.plan.run(self.feed.tensor, self.b, out=self.out, arrival=self.arrival, deadline=10.0)

    def again(self) -> None:
        """The next epoch, with nothing there."""
        self.feed.again()
        poison(self.out)
        torch.cuda.synchronize()

    def check(self) -> None:
        check(self.out, Maths(self.source.cuda(), self.b))


def without(plan: ts.Plan, chunk: int) -> torch.Tensor:
    """The rows of the output that no tile of the chunk is in."""
    rows = torch.ones(M, dtype=torch.bool)
    for item in plan.schedule.items():
        if any(need.chunk == chunk for need in plan.gate.needs(item)):
            rows[item.pm * plan.tile[0] : (item.pm + 1) * plan.tile[0]] = False
    return rows


@launch_first
@pytest.mark.parametrize("chunking", ["uniform", "ragged"])
def test_a_late_chunk_holds_up_no_tile_but_its_own(chunking):
    host = torch.empty(M, N, dtype=BF16).pin_memory()
    beside = lend_to(host, torch.device("cuda", torch.cuda.current_device()))

    def seen() -> torch.Tensor:
        """What is in the output now, while the kernel runs."""
        with torch.cuda.stream(beside):
            host.copy_(one.out, non_blocking=True)
        beside.synchronize()
        return host

    for late, arrival in enumerate(pivots(chunking)):  # the raster begins with what comes last
        one = Fed(arrival, workers=60)
        assert one.plan.schedule.split == "chunks"
        one.again()
        one.run()
        others = [chunk for chunk in one.chunks if chunk != late]
        random.Random(late).shuffle(others)
        one.feed(*others)
        rows, end = without(one.plan, late), time.perf_counter() + 8
        while (now := seen())[rows].isnan().any():
            assert time.perf_counter() < end, f"chunk {late} is late, and holds up tiles of others"
        assert rows.all() or now[~rows].isnan().all(), "computed before it came"
        one.feed(late)
        torch.cuda.synchronize()
        one.check()


@launch_first
@pytest.mark.parametrize("workers", [1, 3, None])
@pytest.mark.parametrize("order", ["arrival", "chunk_major"])
def test_chunks_in_any_order(order, workers):
    one = Fed(arrival_of(CHUNKINGS["ragged"], 2), workers=workers, order=order)
    for chunks in random.Random(0).sample(list(itertools.permutations(one.chunks)), 24):
        one.again()
        one.run()
        one.feed(*chunks)
        assert torch.equal(one.out, one.first), f"chunks in the order {chunks}"


@launch_first
@pytest.mark.parametrize("held", [64, 128])
def test_beside_a_neighbour_that_holds_sms(held):
    one = Fed(arrival_of(CHUNKINGS["uniform"], 3))
    neighbour = Neighbour(cuda_properties())
    for _ in range(3):
        one.again()
        with neighbour.taking(held):
            one.run()
            one.feed(*reversed(one.chunks))
            torch.cuda.current_stream().synchronize()
        assert torch.equal(one.out, one.first)


@launch_first
@pytest.mark.parametrize("connections", [1, 8])
def test_more_streams_than_connections(connections, backend):
    """All streams' work goes to the device through few queues, in the order of its issue."""
    call = f"many_streams({backend if backend == 'portable' else None!r})"
    run_apart("test_gpu_arrival_order", call, CUDA_DEVICE_MAX_CONNECTIONS=str(connections))


def many_streams(backend: str | None) -> None:
    """12 launches, each on a stream of its own and fed by another, the last first; then fed before they are issued."""
    calls = [Fed(arrival, backend, workers=8) for arrival in (*pivots("uniform"), *pivots("uniform")[:4])]
    assert all(one.plan.schedule.split == "chunks" for one in calls)
    streams = [lend_to(one, one.out.device) for one in calls]
    for launched_first in (True, False, True):
        for one in calls:
            one.again()

        def launch() -> None:
            for stream, one in zip(streams, calls, strict=True):
                with torch.cuda.stream(stream):
                    one.run()

        if launched_first:
            launch()
        for one in reversed(calls):
            one.feed(*reversed(one.chunks))
        if not launched_first:
            launch()
        settle()
        for one in calls:
            one.check()
