"""Copy items on a GPU: the matmul copies its own operand from pinned memory; graphs, neighbours, streams.

Each test runs the kernel that the plan picks, and the portable one.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from feeds import BLOCKING, pinned
from gpu_cases import BF16, BOUNDS_N, CHUNKINGS, K, M, N
from gpu_runs import captured, expired, nan, poison, randn, run_apart

import tilestream as ts
from error_rule import Maths, check
from tilestream.runtime.properties import cuda_properties
from tilestream_tools.sweep.contention import Neighbour

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("backend", "nothing_reported")]

CUTS = {"uniform": {"rows_per_chunk": 128}, "odd": {"rows_per_chunk": 150}, "ragged": {"bounds": CHUNKINGS["ragged"]}}


class Offer:
    """A matrix in pinned memory, a stream of NaN that a kernel fills with it, and what it is multiplied by."""

    def __init__(self, m: int = M, n: int = N, k: int = K, pivot: int = 0, **cut: Any) -> None:
        self.source, self.b = pinned(m, k), randn(k, n)
        self.x = ts.stream_in(self.source, pivot=pivot, copies="kernel", **(cut or CUTS["uniform"]))
        poison(self.x.tensor)

    def again(self) -> None:
        """The next epoch, with nothing there."""
        self.x.restart()
        poison(self.x.tensor)

    def matmul(self, **how: Any) -> torch.Tensor:
        return ts.matmul(self.x.tensor, self.b, arrival=self.x.arrival, **how)

    def check(self, *outs: torch.Tensor) -> None:
        """All rows are there and signalled, the launch's counters are 0 again, and the answers are right."""
        torch.cuda.synchronize()
        assert torch.equal(self.x.tensor.cpu(), self.source)
        assert all(self.x.arrival.arrived(chunk) for chunk in range(self.x.arrival.num_chunks))
        assert not self.x.arrival._signals.copies._words.any()
        assert self.x.done
        for out in outs:
            check(out, Maths(self.source.cuda(), self.b))


def test_every_pivot(chunking, kind):
    for pivot in range(len(CHUNKINGS[chunking]) - 1):
        one, out = Offer(pivot=pivot, **CUTS[chunking]), nan(M, N)
        one.matmul(out=out, schedule=kind)
        one.check(out)


@pytest.mark.parametrize("workers", [None, 37, 3, 1])
def test_workers(workers):
    one = Offer(pivot=2, **CUTS["odd"])
    plan = ts.plan(M, N, K, dtype=BF16, device="cuda", workers=workers, arrival=one.x.arrival)
    assert "rows by the kernel" in plan.explain()
    one.check(plan.run(one.x.tensor, one.b, out=nan(M, N), arrival=one.x.arrival))


def test_many_epochs_of_one_stream_and_launches_after_the_first():
    one = Offer(pivot=1, **CUTS["odd"])
    for epoch in range(50):
        out, again = nan(M, N), nan(M, N)
        one.matmul(out=out)
        one.matmul(out=again)
        if epoch % 10 == 0:
            one.check(out)
            one.source.normal_()
        one.again()
        torch.cuda.current_stream().synchronize()
        assert torch.equal(out, again)


@pytest.mark.parametrize("cut", [{"rows_per_chunk": 256}, {"bounds": BOUNDS_N}], ids=str)
def test_a_weights_rows(cut):
    one, a, bias = Offer(N, pivot=1, **cut), randn(210, K), randn(N)
    out = ts.linear(a, one.x.tensor, bias, weight_arrival=one.x.arrival)
    one.check()
    check(out, Maths(a, one.source.cuda().t(), bias=bias))


@pytest.mark.parametrize("k", [500, 203])
def test_rows_that_are_no_multiple_of_sixteen_bytes(k):
    one = Offer(300, 136, k, rows_per_chunk=77)
    one.check(one.matmul())


def test_both_operands_the_second_by_an_engine():
    one, w = Offer(), Offer(N, rows_per_chunk=256)
    arrivals = {"arrival": one.x.arrival, "weight_arrival": w.x.arrival}
    plan = ts.plan(M, N, K, dtype=BF16, device="cuda", layout="nt", **arrivals)
    assert "a copy engine copies the columns" in plan.explain()
    out = plan.run(one.x.tensor, w.x.tensor.mT, **arrivals)
    one.check()
    check(out, Maths(one.source.cuda(), w.source.cuda().mT))


def test_the_operand_is_copied_to_its_end_where_the_launch_expires():
    one, never = Offer(), ts.Arrival.uniform(N, 1, device="cuda")
    arrivals = {"arrival": one.x.arrival, "weight_arrival": never}
    plan = ts.plan(M, N, K, dtype=BF16, device="cuda", layout="nt", **arrivals)
    out = plan.run(one.x.tensor, randn(N, K).mT, **arrivals, deadline=0.05)
    torch.cuda.synchronize()
    assert out.isnan().all()
    assert expired().argument == "weight_arrival"
    one.check()
    one.check(one.matmul())


def test_a_graph_that_makes_its_own_copies(kind):
    one = Offer(pivot=3, **CUTS["ragged"])
    one.matmul(schedule=kind)  # compiled before it is captured
    torch.cuda.synchronize()
    gc.collect()
    with captured() as graph:
        poison(one.x.tensor)
        out = one.matmul(schedule=kind)
    for i in range(50):
        one.source.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(one.x.tensor.cpu(), one.source)
        if i % 10 == 0:
            one.check(out)
        assert not out.isnan().any()
    for _ in range(20):  # one behind the other
        graph.replay()
    one.check(out)
    ts.check()


def test_the_target_is_not_handed_out_again_while_a_launch_writes_it():
    b, stream = randn(1024, 256), torch.cuda.Stream()
    source = torch.full((8192, 1024), 2.0, dtype=BF16).pin_memory()
    for _ in range(5):
        x = ts.stream_in(source, rows_per_chunk=2048, copies="kernel")
        with torch.cuda.stream(stream):
            torch.cuda._sleep(200_000_000)  # the launch begins 100 ms later
            ts.matmul(x.tensor, b, arrival=x.arrival)
        del x
        fresh = torch.zeros_like(source, device="cuda")  # of the same size
        torch.cuda.synchronize()
        assert not fresh.any()
        del fresh


def test_the_source_is_not_handed_out_again_while_a_launch_reads_it():
    b, other = randn(1024, 256), torch.full((8192, 1024), float("nan"), dtype=BF16)
    for _ in range(5):
        source = torch.full((8192, 1024), 2.0, dtype=BF16).pin_memory()
        x = ts.stream_in(source, rows_per_chunk=2048, copies="kernel")
        torch.cuda._sleep(20_000_000)  # the launch begins 10 ms later
        out = ts.matmul(x.tensor, b, arrival=x.arrival)
        tensor = x.tensor
        del x, source
        gc.collect()
        fresh = other.pin_memory()  # of the same size
        torch.cuda.synchronize()
        assert (tensor == 2).all()
        assert not out.isnan().any()
        del fresh


@pytest.mark.skipif(BLOCKING, reason="a neighbour's launch would return when it has left")
def test_with_a_neighbour_that_holds_sms():
    """Most of the 132 workers begin after others have ended, and any of them may have to copy."""
    neighbour = Neighbour(cuda_properties(0))
    one = Offer(4096, 4096, 1024, rows_per_chunk=256)
    out = one.matmul()
    torch.cuda.synchronize()
    for taken in (1, 4, neighbour.units // 2, neighbour.units - 1):
        one.again()
        poison(out)
        torch.cuda.current_stream().synchronize()
        done = torch.cuda.Event()
        with neighbour.taking(taken):  # nothing is allocated meanwhile
            one.matmul(out=out, deadline=20.0)
            done.record()
            done.synchronize()
        one.check(out)


@pytest.mark.parametrize("variables", [{"CUDA_LAUNCH_BLOCKING": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}], ids=str)
def test_in_whatever_order_the_driver_runs_streams(variables, backend):
    """Engine copies beside a kernel need a stream that runs beside it; the kernel's own need nothing."""
    if backend == "portable":
        pytest.skip("the process that is started takes the kernel that is picked")
    run_apart("test_gpu_copy_items", "in_one_row()", **variables)


def in_one_row() -> None:
    one = Offer()
    for _ in range(3):
        out = one.matmul(deadline=5.0)
        one.check(out)
        ts.check()
        one.again()
