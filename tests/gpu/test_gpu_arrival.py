"""Ops whose operands arrive: every pivot, layouts, 8 bits, weights, batches; epochs; streams and graphs; `stream_in`.

Most tests run the kernel that the plan picks, and the portable one. `test_gpu_gate` has late and missing chunks.
"""

from __future__ import annotations

import gc
import time

import pytest
import torch
from feeds import Feed, arrival_of, launch_first, pinned, pivots
from gpu_cases import BF16, BOUNDS_N, E4M3, KINDS, K, M, N, uniform
from gpu_runs import Differences, captured, check_allocations, expired, nan, rand, randn, run_apart, settle

import tilestream as ts
from error_rule import Maths, check
from tilestream.runtime.properties import cuda_properties

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_reported")]


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """A in pinned memory, B on the GPU."""
    return pinned(M, K), randn(K, N)


@launch_first
def test_every_pivot_with_the_kernel_waiting(chunking, kind, backend):
    source, b = operands()
    maths = Maths(source.cuda(), b)
    for arrival in pivots(chunking):
        feed, out = Feed(arrival, source), nan(M, N)
        ts.matmul(feed.tensor, b, out=out, arrival=arrival, schedule=kind)
        feed(*feed.order, pause=0.0005)
        check(out, maths)
        assert all(arrival.arrived(chunk) for chunk in range(arrival.num_chunks))


def turned(source: torch.Tensor) -> torch.Tensor:
    """The same numbers, the other dimension contiguous."""
    return source.t().contiguous().t()


@launch_first
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_every_layout_with_the_kernel_waiting(layout, kind, portable):
    """A's rows arrive, row- and column-major, B either way; the last chunk is late. `ARRIVING` has Hopper's."""
    a, b = randn(M, K), randn(K, N)
    maths = Maths(a, b)
    a, b = (turned(x) if how == "t" else x for x, how in zip((a, b), layout, strict=True))
    for arrival in pivots("odd"):
        feed, out = Feed(arrival, a), nan(M, N)
        *soon, late = feed.order
        torch.cuda.synchronize()
        feed.copy(*feed.order)  # strided copies need an SM, so all of them come before the launch
        feed.signal(*soon)
        ts.matmul(feed.tensor, b, out=out, arrival=arrival, schedule=kind)
        feed.signal(late)
        check(out, maths)


@launch_first
@pytest.mark.parametrize("scaled", ["tensor", "row"])
def test_rows_of_8_bits(scaled, kind, backend):
    source, b = pinned(M, K, dtype=E4M3), randn(N, K, dtype=E4M3).t()
    shapes = ((), ()) if scaled == "tensor" else ((M, 1), (1, N))
    scales = dict(zip(("scale_a", "scale_b"), (rand(*shape) for shape in shapes), strict=True))
    maths = Maths(source.cuda(), b, **scales)
    for arrival in pivots("odd"):
        feed = Feed(arrival, source)
        out = ts.matmul(feed.tensor, b, **scales, arrival=arrival, schedule=kind)
        feed.all()
        check(out, maths)


def test_what_was_reported_is_raised_by_the_next_call_before_it_launches():
    source, b = operands()
    feed = Feed(pivots("uniform")[0], source)(0)
    ts.matmul(feed.tensor, b, arrival=feed.arrival, deadline=0.02)
    torch.cuda.synchronize()
    x, out = randn(M, K), torch.full((M, N), 7.0, dtype=BF16, device="cuda")
    with pytest.raises(ts.ArrivalTimeout):
        ts.matmul(x, b, out=out)
    torch.cuda.synchronize()
    assert (out == 7).all()
    check(ts.matmul(x, b, out=out), Maths(x, b))


@launch_first
def test_many_epochs_of_one_arrival(backend):
    source, b = operands()
    want = ts.matmul(source.cuda(), b, schedule="static")
    feed = Feed(pivots("odd")[0], source)
    wrong = Differences()
    for i in range(200):
        if i % 2:
            feed.all()
        out = ts.matmul(feed.tensor, b, arrival=feed.arrival, schedule=KINDS[i % 3])
        if not i % 2:
            feed.all()
        wrong.add((out - want).abs().nan_to_num(1e9) > 1)
        feed.again()
    assert wrong.none()


@pytest.mark.parametrize("workers", [1, 2, 7, 64, 131, 132])
def test_workers(kind, workers, backend):
    source, b = operands()
    feed = Feed(pivots("uniform")[0], source).all()
    check(ts.matmul(feed.tensor, b, arrival=feed.arrival, schedule=kind, workers=workers), Maths(source.cuda(), b))


def test_weights_that_arrive_and_batches(kind, backend):
    w, x, bias = pinned(N, K), randn(3, 70, K), randn(N)
    for arrival in (arrival_of(uniform(N, 256), 2), arrival_of(BOUNDS_N)):
        feed = Feed(arrival, w).all()
        out = ts.linear(x, feed.tensor, bias, activation="gelu", weight_arrival=arrival, schedule=kind)
        check(out, Maths(x, w.cuda().t(), bias, activation="gelu"))
    a, b = pinned(5, 130, K), randn(5, K, 140)
    for pivot in range(5):
        feed = Feed(arrival_of(uniform(650, 150), pivot), a).all()
        check(ts.bmm(feed.tensor, b, arrival=feed.arrival, schedule=kind), Maths(a.cuda(), b))


@launch_first
def test_two_streams_and_both_operands(backend):
    sources, weights = [pinned(M, K) for _ in range(2)], [pinned(N, K) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(10):
        results, feeds = [], []
        for source, w, stream in zip(sources, weights, streams, strict=True):
            with torch.cuda.stream(stream):
                x, y = Feed(arrival_of(uniform(M, 128), 3), source), Feed(arrival_of(uniform(N, 100)), w)
                feeds += [x, y]
                results.append(ts.linear(x.tensor, y.tensor, arrival=x.arrival, weight_arrival=y.arrival, workers=60))
        for feed in reversed(feeds):
            feed.all()
        torch.cuda.synchronize()
        for source, w, out in zip(sources, weights, results, strict=True):
            check(out, Maths(source.cuda(), w.cuda().t()))


def test_callers_words_of_a_chunk_without_rows(kind, backend):
    """The launch waits for it, too, though no tile reads it."""
    source, b = operands()
    words = torch.tensor([1, 0, 1, 1], dtype=torch.int32, device="cuda")
    arrival = arrival_of((0, 512, 512, 600, M), signals=words)
    tensor = source.cuda()
    check(ts.matmul(tensor, b, arrival=arrival, schedule=kind, deadline=0.02), Maths(tensor, b))
    assert words.tolist() == [1, 0, 1, 1]
    expired("no tile reads")


@launch_first
@pytest.mark.parametrize("in_a_graph", [False, True])
def test_signals_need_no_sm(in_a_graph, backend):
    """All workers wait for one chunk, and no SM is free; then it comes."""
    m, n, k = 128 * 17, 256 * 16, 512
    source, b = pinned(m, k), randn(k, n)
    arrival = ts.Arrival.uniform(m, 1, device="cuda")
    plan = ts.plan(m, n, k, dtype=BF16, device="cuda", tile=(128, 256), arrival=arrival)
    assert plan.schedule.grid.tiles >= plan.workers == cuda_properties().workers
    feed = Feed(arrival, source)(0)
    plan.run(feed.tensor, b, arrival=arrival)  # compiled
    torch.cuda.synchronize()
    arrival.advance()
    out = nan(m, n)
    if not in_a_graph:
        plan.run(feed.tensor, b, out=out, arrival=arrival, deadline=5.0)
        time.sleep(0.02)
        feed(0)
    else:
        with captured() as graph:
            feed.stream.wait_stream(torch.cuda.current_stream())
            plan.run(feed.tensor, b, out=out, arrival=arrival, deadline=5.0)
            with torch.cuda.stream(feed.stream):
                for _ in range(40):  # long enough for every worker to be there first
                    feed.tensor.copy_(source, non_blocking=True)
            feed(0)
            torch.cuda.current_stream().wait_stream(feed.stream)
        for _ in range(5):
            graph.replay()
    settle()
    check(out, Maths(source.cuda(), b))


@launch_first
def test_one_connection_to_the_device():
    """As Megatron sets it: the work of all streams goes to the device through one queue, in order of issue."""
    run_apart("test_gpu_arrival", "one_connection()", CUDA_DEVICE_MAX_CONNECTIONS="1")


def one_connection() -> None:
    source, b = operands()
    for _ in range(3):
        with ts.stream_in(source, rows_per_chunk=128) as x:
            out = ts.matmul(x.tensor, b, arrival=x.arrival, deadline=5.0)
            after = out * 2  # the kernel's successor stands in the queue, too
            x.wait(10)
            settle()
            check(after / 2, Maths(source.cuda(), b))


class TestStreamIn:
    def test_pinned(self, kind, backend):
        source, b = operands()
        with ts.stream_in(source, rows_per_chunk=128, pivot=3) as x:
            assert x.tensor.device == b.device
            assert "copied to cuda:0" in x.explain()
            for i in range(20):
                out = ts.matmul(x.tensor, b, arrival=x.arrival, schedule=kind)
                check(out, Maths(source.cuda(), b)) if i % 10 == 0 else x.wait(5)
                assert not out.isnan().any()
                source.normal_()
                x.restart()

    def test_other_sources(self, tmp_path):
        import numpy as np

        data, b = torch.randn(M, K), torch.randn(K, N, device="cuda")
        np.save(tmp_path / "x.npy", data.numpy())
        blocks = (data[i : i + 100] for i in range(0, M, 100))
        for stream in (
            ts.stream_in(data, device="cuda"),
            ts.stream_in(tmp_path / "x.npy", device="cuda"),
            ts.stream_in(blocks, shape=(M, K), dtype=torch.float32, device="cuda"),
        ):
            with stream as x:
                out = ts.matmul(x.tensor, b, arrival=x.arrival)
                check(out, Maths(data.cuda(), b))
                x.wait(5)

    @launch_first
    @pytest.mark.parametrize("first", [512, 0])
    def test_a_producer_that_fails_ends_the_launch_at_once(self, first):
        def blocks():
            if first:
                yield torch.randn(first, K)
            time.sleep(0.05)
            raise OSError("the disk is gone")

        b = torch.randn(K, N, device="cuda")
        begin = time.perf_counter()
        with ts.stream_in(blocks(), shape=(M, K), dtype=torch.float32, device="cuda", rows_per_chunk=128) as x:
            out = ts.matmul(x.tensor, b, arrival=x.arrival, deadline=120)
            torch.cuda.synchronize()
        assert time.perf_counter() - begin < 60, "the launch does not wait for its deadline"
        assert out[first:].isnan().all()
        with pytest.raises(OSError, match="the disk is gone"):
            ts.check()

    def test_memory_is_not_taken_back_while_the_copies_are_in_flight(self):
        source = pinned(4096, 4096)
        for _ in range(5):
            x = ts.stream_in(source, rows_per_chunk=64)
            del x
            gc.collect()
            fresh = torch.zeros(4096, 4096, device="cuda", dtype=BF16)
            torch.cuda.synchronize()
            assert not fresh.any()


def test_nothing_is_allocated_but_the_output(backend):
    source, b = operands()
    with ts.stream_in(source, rows_per_chunk=128) as x:
        kept = [ts.matmul(x.tensor, b, arrival=x.arrival) for _ in range(2)]
        torch.cuda.synchronize()
        check_allocations(lambda: ts.matmul(x.tensor, b, arrival=x.arrival))
        del kept


def test_an_empty_output_still_sees_the_callers_signals():
    words = torch.ones(2, dtype=torch.int32, device="cuda")
    a, b = torch.zeros(64, 8, device="cuda"), torch.zeros(8, 0, device="cuda")
    out = ts.matmul(a, b, arrival=ts.Arrival.uniform(32, 2, signals=words))
    assert out.shape == (64, 0)
    assert not words.any()
