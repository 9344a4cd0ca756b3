"""Copy items on a GPU: the matmul copies its own operand from pinned memory; graphs, neighbours, streams.

Each test runs the kernel that the plan picks, and the portable one.
"""

from __future__ import annotations

import gc

import pytest
import torch
from feeds import BLOCKING, pinned
from gpu_cases import BF16, BOUNDS, BOUNDS_N, UNIFORM, K, M, N
from gpu_runs import captured, expired, nan, poison, randn, run_apart

import tilestream as ts
from error_rule import Maths, check
from tilestream.runtime.properties import cuda_properties
from tilestream_tools.sweep.contention import Neighbour

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("backend", "nothing_reported")]


CUTS = {"ragged": {"bounds": BOUNDS}} | {name: {"rows_per_chunk": size} for name, size in UNIFORM.items()}


def offered(source: torch.Tensor, chunking: str = "uniform", pivot: int = 0, **cut) -> ts.Stream:
    """A stream of NaN that a kernel fills."""
    x = ts.stream_in(source, pivot=pivot, copies="kernel", **(cut or CUTS[chunking]))
    poison(x.tensor)
    return x


def offer_again(x: ts.Stream) -> None:
    """The next epoch, with nothing there."""
    x.restart()
    poison(x.tensor)


def check_copied(x: ts.Stream, source: torch.Tensor) -> None:
    """All rows are there and signalled, and the launch's counters are 0 again."""
    torch.cuda.synchronize()
    assert torch.equal(x.tensor.cpu(), source)
    assert all(x.arrival.arrived(chunk) for chunk in range(x.arrival.num_chunks))
    assert not x.arrival._signals.copies._words.any()
    assert x.done


def test_every_pivot(chunking, kind):
    source, b = pinned(M, K), randn(K, N)
    maths = Maths(source.cuda(), b)
    for pivot in range(len(BOUNDS) - 1 if chunking == "ragged" else -(-M // UNIFORM[chunking])):
        x, out = offered(source, chunking, pivot), nan(M, N)
        ts.matmul(x.tensor, b, out=out, arrival=x.arrival, schedule=kind)
        check_copied(x, source)
        check(out, maths)


@pytest.mark.parametrize("workers", [None, 37, 3, 1])
def test_workers(workers):
    source, b = pinned(M, K), randn(K, N)
    x = offered(source, "odd", 2)
    plan = ts.plan(M, N, K, dtype=BF16, device="cuda", workers=workers, arrival=x.arrival)
    assert "rows by the kernel" in plan.explain()
    out = plan.run(x.tensor, b, out=nan(M, N), arrival=x.arrival)
    check_copied(x, source)
    check(out, Maths(source.cuda(), b))


def test_many_epochs_of_one_stream_and_launches_after_the_first():
    source, b = pinned(M, K), randn(K, N)
    x = offered(source, "odd", 1)
    for epoch in range(50):
        out, again = nan(M, N), nan(M, N)
        ts.matmul(x.tensor, b, out=out, arrival=x.arrival)
        ts.matmul(x.tensor, b, out=again, arrival=x.arrival)
        if epoch % 10 == 0:
            check_copied(x, source)
            check(out, Maths(source.cuda(), b))
            source.normal_()
        offer_again(x)
        torch.cuda.current_stream().synchronize()
        assert torch.equal(out, again)


def test_a_weights_rows():
    source, a, bias = pinned(N, K), randn(210, K), randn(N)
    want = Maths(a, source.cuda().t(), bias=bias)
    for cut in ({"rows_per_chunk": 256}, {"bounds": BOUNDS_N}):
        x = offered(source, pivot=1, **cut)
        out = ts.linear(a, x.tensor, bias, weight_arrival=x.arrival)
        check_copied(x, source)
        check(out, want)


@pytest.mark.parametrize("k", [500, 203])
def test_rows_that_are_no_multiple_of_sixteen_bytes(k):
    source, b = pinned(300, k), randn(k, 136)
    x = offered(source, rows_per_chunk=77)
    out = ts.matmul(x.tensor, b, arrival=x.arrival)
    check_copied(x, source)
    check(out, Maths(source.cuda(), b))


def test_a_later_launch_in_another_stream_waits_for_the_one_that_copies():
    source, b = pinned(M, K), randn(K, N)
    other = torch.cuda.Stream()
    for _ in range(10):
        x = offered(source)
        other.wait_stream(torch.cuda.current_stream())
        first = ts.matmul(x.tensor, b, arrival=x.arrival)
        with torch.cuda.stream(other):
            second = ts.matmul(x.tensor, b, arrival=x.arrival)
        torch.cuda.current_stream().wait_stream(other)
        check_copied(x, source)
        check(first, Maths(source.cuda(), b))
        assert torch.equal(first, second)


def test_a_reader_without_a_kernel_that_copies_has_the_engine_copy():
    source, b = pinned(M, K), randn(K, N)
    x = offered(source)
    assert not x.done
    assert torch.equal(x.wait(10).cpu(), source)
    offer_again(x)  # a kernel makes the next epoch's copies again
    out = ts.matmul(x.tensor, b, arrival=x.arrival)
    check_copied(x, source)
    check(out, Maths(source.cuda(), b))
    x.restart()
    plan = ts.plan(M, N, K, dtype=BF16, device="cuda", arrival=x.arrival)
    assert "rows by the kernel" in plan.explain()
    begun = ts.stream_in(source, rows_per_chunk=UNIFORM["uniform"])  # chunks as the plan's, but an engine's
    with pytest.raises(ValueError, match="make a plan with this arrival"):
        plan.run(begun.tensor, b, arrival=begun.arrival)
    begun.wait(10)


def test_both_operands_the_second_by_an_engine():
    source, weights = pinned(M, K), pinned(N, K)
    x, w = offered(source), offered(weights, rows_per_chunk=256)
    plan = ts.plan(M, N, K, dtype=BF16, device="cuda", layout="nt", arrival=x.arrival, weight_arrival=w.arrival)
    assert "a copy engine copies the columns" in plan.explain()
    out = plan.run(x.tensor, w.tensor.mT, arrival=x.arrival, weight_arrival=w.arrival)
    check_copied(x, source)
    check(out, Maths(source.cuda(), weights.cuda().mT))


def test_the_operand_is_copied_to_its_end_where_the_launch_expires():
    source, weights = pinned(M, K), pinned(N, K)
    x, never = offered(source), ts.Arrival.uniform(N, 1, device="cuda")
    plan = ts.plan(M, N, K, dtype=BF16, device="cuda", layout="nt", arrival=x.arrival, weight_arrival=never)
    out = plan.run(x.tensor, weights.cuda().mT, arrival=x.arrival, weight_arrival=never, deadline=0.05)
    torch.cuda.synchronize()
    assert out.isnan().all()
    assert expired().argument == "weight_arrival"
    check_copied(x, source)
    b = randn(K, N)
    check(ts.matmul(x.tensor, b, arrival=x.arrival), Maths(source.cuda(), b))


def test_a_graph_that_makes_its_own_copies(kind):
    source, b = pinned(M, K), randn(K, N)
    x = offered(source, "ragged", 3)
    ts.matmul(x.tensor, b, arrival=x.arrival, schedule=kind)  # compiled before it is captured
    torch.cuda.synchronize()
    gc.collect()
    with captured() as graph:
        poison(x.tensor)
        out = ts.matmul(x.tensor, b, arrival=x.arrival, schedule=kind)
    for i in range(50):
        source.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(x.tensor.cpu(), source)
        if i % 10 == 0:
            check(out, Maths(source.cuda(), b))
        assert not out.isnan().any()
    for _ in range(20):  # one behind the other
        graph.replay()
    check_copied(x, source)
    ts.check()
    check(out, Maths(source.cuda(), b))


def test_two_graphs_of_one_stream_replayed_at_once():
    """Each counts and signals for itself; both write the same rows."""
    source, b = pinned(M, K), randn(K, N)
    x = offered(source, "odd", 1)
    ts.matmul(x.tensor, b, arrival=x.arrival, workers=40)
    torch.cuda.synchronize()
    gc.collect()
    graphs, outs, streams = [], [], [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in streams:
        with captured() as graph:
            outs.append(ts.matmul(x.tensor, b, arrival=x.arrival, workers=40, deadline=5.0))
        graphs.append(graph)
    for _ in range(5):
        source.normal_()
        for _ in range(20):
            for graph, stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
        check_copied(x, source)
        ts.check()
        for out in outs:
            check(out, Maths(source.cuda(), b))


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
    m, n, k = 4096, 4096, 1024
    source, b = pinned(m, k), randn(k, n)
    maths = Maths(source.cuda(), b)
    x = ts.stream_in(source, rows_per_chunk=256, copies="kernel")
    out = ts.matmul(x.tensor, b, arrival=x.arrival)
    torch.cuda.synchronize()
    for taken in (1, 4, neighbour.units // 2, neighbour.units - 1):
        offer_again(x)
        poison(out)
        torch.cuda.current_stream().synchronize()
        done = torch.cuda.Event()
        with neighbour.taking(taken):  # nothing is allocated meanwhile
            ts.matmul(x.tensor, b, out=out, arrival=x.arrival, deadline=20.0)
            done.record()
            done.synchronize()
        check_copied(x, source)
        check(out, maths)


@pytest.mark.parametrize("variables", [{"CUDA_LAUNCH_BLOCKING": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}], ids=str)
def test_in_whatever_order_the_driver_runs_streams(variables, backend):
    """Engine copies beside a kernel need a stream that runs beside it; the kernel's own need nothing."""
    if backend == "portable":
        pytest.skip("the process that is started takes the kernel that is picked")
    run_apart("test_gpu_copy_items", "in_one_row()", **variables)


def in_one_row() -> None:
    source, b = pinned(M, K), randn(K, N)
    x = offered(source)
    for _ in range(3):
        out = ts.matmul(x.tensor, b, arrival=x.arrival, deadline=5.0)
        check_copied(x, source)
        ts.check()
        check(out, Maths(source.cuda(), b))
        offer_again(x)
