"""Operands that arrive on a GPU: each chunk late in turn, every pivot, ragged, missing; graphs; streams.

Each test runs the kernel that the plan picks, and the portable one. `test_gpu_hopper_arrival` has more of Hopper's.
"""

from __future__ import annotations

import gc
import time

import pytest
import torch
from feeds import Feed, check_gate, in_order, launch_first, pinned, refused_in_quarantine
from gpu_cases import BF16, BOUNDS_N, E4M3, KINDS, K, M, N, arrivals
from gpu_runs import Differences, allocations, captured, expired, nan, poison, randn, run_apart, settle

import tilestream as ts
from error_rule import Maths, check
from tilestream.runtime.streams import lend_to

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("backend", "nothing_reported")]


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """A in pinned memory, B on the GPU."""
    return pinned(M, K), randn(K, N)


@launch_first
def test_every_pivot_with_the_kernel_waiting(chunking, kind):
    source, b = operands()
    maths = Maths(source.cuda(), b)
    for arrival in arrivals(chunking):
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
def test_every_layout_with_the_kernel_waiting(layout, kind):
    """A's rows arrive, row- and column-major, B either way; the last chunk is late."""
    source, b = randn(M, K), randn(K, N)
    maths = Maths(source, b)
    b = turned(b) if layout[1] == "t" else b
    for arrival in arrivals("odd"):
        a = turned(nan(M, K))
        a = a if layout[0] == "t" else a.contiguous()
        bounds, stream = arrival.chunks(M).bounds, lend_to(a, a.device)
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(stream):  # strided copies need an SM, so all of them come before the launch
            *soon, late = in_order(arrival)
            for chunk in soon:
                a[bounds[chunk] : bounds[chunk + 1]] = source[bounds[chunk] : bounds[chunk + 1]]
                arrival.signal(chunk)
            a[bounds[late] : bounds[late + 1]] = source[bounds[late] : bounds[late + 1]]
        out = nan(M, N)
        ts.matmul(a, b, out=out, arrival=arrival, schedule=kind)
        with torch.cuda.stream(stream):
            arrival.signal(late)
        check(out, maths)


@launch_first
@pytest.mark.parametrize("scaled", ["tensor", "row"])
def test_rows_of_8_bits(scaled, kind):
    source, b = pinned(M, K, dtype=E4M3), randn(N, K, dtype=E4M3).t()
    scales = {"scale_a": torch.rand(M, 1, device="cuda"), "scale_b": torch.rand(1, N, device="cuda")}
    if scaled == "tensor":
        scales = {name: scale.flatten()[0] for name, scale in scales.items()}
    maths = Maths(source.cuda(), b, **scales)
    for arrival in arrivals("odd"):
        feed = Feed(arrival, source)
        out = ts.matmul(feed.tensor, b, **scales, arrival=arrival, schedule=kind)
        feed.all()
        check(out, maths)


@launch_first
def test_each_chunk_late_in_turn(chunking, kind):
    source, b = operands()
    maths = Maths(source.cuda(), b)
    feed = Feed(next(arrivals(chunking)), source)
    for late in range(feed.arrival.num_chunks):
        out = nan(M, N)
        ts.matmul(feed.tensor, b, out=out, arrival=feed.arrival, schedule=kind)
        feed.but(late)
        time.sleep(0.003)
        feed(late)
        check(out, maths)
        feed.again()


def test_a_chunk_that_never_comes_and_the_call_after_it(chunking, kind):
    source, b = operands()
    want = source.cuda().float() @ b.float()
    arrival = next(arrivals(chunking))
    plan, feed = ts.plan(M, N, K, dtype=BF16, device="cuda", schedule=kind, arrival=arrival), Feed(arrival, source)
    for missing in range(arrival.num_chunks):
        rows = feed.rows(missing)
        if rows.start == rows.stop:
            continue
        feed.but(missing)
        out = torch.zeros(M, N, dtype=BF16, device="cuda")
        begin = time.perf_counter()
        plan.run(feed.tensor, b, out=out, arrival=arrival, deadline=0.05)
        torch.cuda.synchronize()
        assert 0.04 < time.perf_counter() - begin < 5
        # What reads the chunk is NaN, whole tiles of it; what is a number is right.
        assert out[rows].isnan().all()
        there = ~out.isnan()
        assert ((out.float() - want)[there].abs() < 0.02 * want.abs().max()).all()
        error = expired(r"within the deadline of 0\.05 s")
        assert (error.op, error.chunk, error.argument) == ("plan.run", missing, "arrival")
        assert 0 < error.waited < 5
        assert 0 <= error.worker < plan.workers
        assert error.item.startswith("tile ")
        ts.check()  # an expiry is reported once
        feed.again()
        feed.all()
        check(plan.run(feed.tensor, b, arrival=arrival), Maths(source.cuda(), b))
        feed.again()


def test_what_was_reported_is_raised_by_the_next_call_before_it_launches():
    source, b = operands()
    arrival = next(arrivals("uniform"))
    feed = Feed(arrival, source)(0)
    ts.matmul(feed.tensor, b, arrival=arrival, deadline=0.02)
    torch.cuda.synchronize()
    x, out = randn(M, K), torch.full((M, N), 7.0, dtype=BF16, device="cuda")
    with pytest.raises(ts.ArrivalTimeout):
        ts.matmul(x, b, out=out)
    torch.cuda.synchronize()
    assert (out == 7).all()
    check(ts.matmul(x, b, out=out), Maths(x, b))


@launch_first
def test_many_epochs_of_one_arrival():
    source, b = operands()
    arrival = next(arrivals("odd"))
    want = ts.matmul(source.cuda(), b, schedule="static")
    feed = Feed(arrival, source)
    wrong = Differences()
    for i in range(200):
        if i % 2:
            feed.all()
        out = ts.matmul(feed.tensor, b, arrival=arrival, schedule=KINDS[i % 3])
        if not i % 2:
            feed.all()
        wrong.add((out - want).abs().nan_to_num(1e9) > 1)
        feed.again()
    assert wrong.none()


@launch_first
def test_the_gate_on_the_device_looks_at_what_the_host_says(kind):
    from tilestream.launch.gemm_arguments import Layout
    from tilestream.launch.portable.launch import GemmLaunch

    source, b = operands()
    for chunking in ("uniform", "ragged"):
        for arrival in list(arrivals(chunking))[:2]:
            plan = ts.plan(
                M, N, K, dtype=BF16, device="cuda", schedule=kind, arrival=arrival, workers=37, backend="portable"
            )
            assert plan.workers == 37
            feed, out = Feed(arrival, source), nan(M, N)
            launch = GemmLaunch(plan, Layout((0, *feed.tensor.stride()), (0, *b.stride()), (0, *out.stride())))
            check_gate(launch, feed, b, out, pause=0.0003)
            check(out, Maths(source.cuda(), b))


@pytest.mark.parametrize("workers", [1, 2, 7, 64, 131, 132])
def test_workers(kind, workers):
    source, b = operands()
    feed = Feed(next(arrivals("uniform")), source).all()
    check(ts.matmul(feed.tensor, b, arrival=feed.arrival, schedule=kind, workers=workers), Maths(source.cuda(), b))


def test_weights_that_arrive_and_batches(kind):
    w, x, bias = pinned(N, K), randn(3, 70, K), randn(N)
    uniform = ts.Arrival.uniform(256, -(-N // 256), 2, device="cuda")
    for arrival in (uniform, ts.Arrival.ragged(BOUNDS_N, device="cuda")):
        feed = Feed(arrival, w).all()
        out = ts.linear(x, feed.tensor, bias, activation="gelu", weight_arrival=arrival, schedule=kind)
        check(out, Maths(x, w.cuda().t(), bias, activation="gelu"))
    a, b = pinned(5, 130, K), randn(5, K, 140)
    for pivot in range(5):
        arrival = ts.Arrival.uniform(150, 5, pivot, device="cuda")
        feed = Feed(arrival, a).all()
        check(ts.bmm(feed.tensor, b, arrival=arrival, schedule=kind), Maths(a.cuda(), b))


@launch_first
def test_two_streams_and_both_operands():
    sources, weights = [pinned(M, K) for _ in range(2)], [pinned(N, K) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(10):
        results, feeds = [], []
        for source, w, stream in zip(sources, weights, streams, strict=True):
            rows, columns = ts.Arrival.uniform(128, 8, 3, device="cuda"), ts.Arrival.uniform(100, 11, device="cuda")
            with torch.cuda.stream(stream):
                feeds += [Feed(rows, source), Feed(columns, w)]
                results.append(
                    ts.linear(feeds[-2].tensor, feeds[-1].tensor, arrival=rows, weight_arrival=columns, workers=60)
                )
        for feed in reversed(feeds):
            feed.all()
        torch.cuda.synchronize()
        for source, w, out in zip(sources, weights, results, strict=True):
            check(out, Maths(source.cuda(), w.cuda().t()))


def test_callers_own_words(kind):
    source, b = operands()
    words = torch.zeros(8, dtype=torch.int32, device="cuda")
    arrival = ts.Arrival.uniform(128, 8, 5, signals=words)
    for value in (1, 3, -2):
        tensor = source.cuda()
        words.fill_(value)
        check(ts.matmul(tensor, b, arrival=arrival, schedule=kind), Maths(tensor, b))
        assert not words.any()
    words[:7] = 1
    out = ts.matmul(tensor, b, arrival=arrival, schedule=kind, deadline=0.02)
    torch.cuda.synchronize()
    assert out[7 * 128 :].isnan().all()
    assert words.tolist() == [1] * 7 + [0], "left as they are"
    expired()
    words.fill_(1)  # they may be of the launch that missed a chunk
    assert ts.matmul(tensor, b, arrival=arrival, schedule=kind).isnan().all()
    refused_in_quarantine()
    arrival.reset()
    assert not words.any()
    words.fill_(1)
    check(ts.matmul(tensor, b, arrival=arrival, schedule=kind), Maths(tensor, b))
    # The launch waits for a chunk without rows too, which no tile reads.
    words = torch.tensor([1, 0, 1, 1], dtype=torch.int32, device="cuda")
    arrival = ts.Arrival.ragged([0, 512, 512, 600, M], signals=words)
    check(ts.matmul(tensor, b, arrival=arrival, schedule=kind, deadline=0.02), Maths(tensor, b))
    assert words.tolist() == [1, 0, 1, 1]
    expired("no tile reads")


@launch_first
@pytest.mark.parametrize("chunking", ["uniform", "ragged"])
def test_a_hundred_replays_with_the_copies_in_the_graph(chunking, kind):
    source, b = operands()
    arrival = list(arrivals(chunking))[1]
    feed = Feed(arrival, source).all()
    ts.matmul(feed.tensor, b, arrival=arrival, schedule=kind)  # compiled before it is captured
    torch.cuda.synchronize()

    def capture(*chunks):
        gc.collect()  # a graph that is freed during a capture ends it
        with captured() as graph:
            poison(feed.tensor)
            feed.stream.wait_stream(torch.cuda.current_stream())
            feed(*chunks)
            out = ts.matmul(feed.tensor, b, arrival=arrival, schedule=kind, deadline=0.2)
            torch.cuda.current_stream().wait_stream(feed.stream)
        return graph, out

    graph, out = capture(*in_order(arrival))
    for i in range(100):
        source.normal_()
        graph.replay()
        torch.cuda.synchronize()
        if i % 20 == 0:
            check(out, Maths(source.cuda(), b))
        assert not out.isnan().any()
    ts.check()
    lacking, lost = capture(*in_order(arrival)[:-1])
    lacking.replay()
    torch.cuda.synchronize()
    assert lost.isnan().any()
    expired()
    for advances in (False, True):  # which changes nothing for captured launches
        if advances:
            arrival.advance()
        graph.replay()
        torch.cuda.synchronize()
        assert out.isnan().all()
        refused_in_quarantine()
    arrival.reset()
    graph.replay()
    torch.cuda.synchronize()
    check(out, Maths(source.cuda(), b))


@launch_first
def test_one_launch_a_graph_waits_for_an_arrival():
    source, b = operands()
    arrival = next(arrivals("uniform"))
    feed = Feed(arrival, source).all()
    ts.matmul(feed.tensor, b, arrival=arrival)
    torch.cuda.synchronize()
    with captured() as graph:
        feed.stream.wait_stream(torch.cuda.current_stream())
        feed.all()
        out = ts.matmul(feed.tensor, b, arrival=arrival)
        torch.cuda.current_stream().wait_stream(feed.stream)
        with pytest.raises(RuntimeError, match="a launch of this graph waits for these signals already"):
            ts.matmul(feed.tensor, b, arrival=arrival)
    del arrival, feed.arrival
    gc.collect()
    filler = [torch.full((64,), 3, dtype=torch.int32, device="cuda") for _ in range(200)]  # where its words were
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        check(out, Maths(source.cuda(), b))
    assert all((one == 3).all() for one in filler)
    ts.check()


@launch_first
@pytest.mark.parametrize("in_a_graph", [False, True])
def test_signals_need_no_sm(in_a_graph):
    """All workers wait for one chunk, and no SM is free; then it comes."""
    m, n, k = 128 * 17, 256 * 16, 512
    source, b = pinned(m, k), randn(k, n)
    arrival = ts.Arrival.uniform(m, 1, device="cuda")
    plan = ts.plan(m, n, k, dtype=BF16, device="cuda", tile=(128, 256), arrival=arrival)
    assert plan.schedule.grid.tiles >= plan.workers == torch.cuda.get_device_properties(0).multi_processor_count
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
            after = out * 2  # a successor on the kernel's stream
            x.wait(10)
            settle()
            check(after / 2, Maths(source.cuda(), b))


class TestStreamIn:
    def test_pinned(self, kind):
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
            out = ts.matmul(x.tensor, b, arrival=x.arrival)
            torch.cuda.synchronize()
        assert time.perf_counter() - begin < 5
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

    def test_refused_under_capture(self):
        source = pinned(256, 64)
        torch.cuda.synchronize()
        with captured():
            torch.zeros(1, device="cuda")
            with pytest.raises(RuntimeError, match="captured"):
                ts.stream_in(source)
            with pytest.raises(RuntimeError, match="captured"):
                ts.Arrival.uniform(64, 4, device="cuda")


def test_gradients_and_compilation():
    source, b = operands()
    b.requires_grad_()
    with ts.stream_in(source, rows_per_chunk=128) as x:
        ts.matmul(x.tensor, b, arrival=x.arrival).float().sum().backward()
        x.wait(5)
        want = source.cuda().float().sum(0)[:, None].expand(K, N)
        torch.testing.assert_close(b.grad.float(), want, rtol=2e-2, atol=0.02 * want.abs().max().item())
        compiled = torch.compile(
            lambda t, w, arrival: ts.matmul(t, w, arrival=arrival, activation="relu") * 2, backend="aot_eager"
        )
        for _ in range(3):
            x.restart()
            out = compiled(x.tensor, b.detach(), x.arrival)
            check(out / 2, Maths(source.cuda(), b.detach(), activation="relu"))


def test_nothing_is_allocated_but_the_output():
    source, b = operands()
    with ts.stream_in(source, rows_per_chunk=128) as x:
        kept = [ts.matmul(x.tensor, b, arrival=x.arrival) for _ in range(2)]
        torch.cuda.synchronize()
        before = allocations()
        kept += [ts.matmul(x.tensor, b, arrival=x.arrival) for _ in range(5)]
        assert allocations() == before + 5


@launch_first
def test_a_signal_behind_its_launch_is_refused():
    a, b = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    arrival = ts.Arrival.uniform(32, 2, device="cuda")
    ts.matmul(a, b, arrival=arrival, deadline=0.05)
    with pytest.raises(RuntimeError, match="on the stream on which a launch already waits"):
        arrival.signal(0)
    expired()


def test_signals_elsewhere_are_refused():
    a, b = torch.randn(64, 64, device="cuda"), torch.randn(64, 64, device="cuda")
    message = r"signals are on cpu, the operands on cuda:0; make the arrival with\s+device="
    with pytest.raises(ValueError, match=message):
        ts.matmul(a, b, arrival=ts.Arrival.uniform(32, 2))
    with pytest.raises(ValueError, match="signals are on cuda:0, the operands on cpu"):
        ts.matmul(a.cpu(), b.cpu(), arrival=ts.Arrival.uniform(32, 2, device="cuda"))
    with pytest.raises(ValueError, match="not the chunks"):
        ts.plan(64, 64, 64, device="cuda").run(a, b, arrival=ts.Arrival.uniform(32, 2, device="cuda"))


def test_an_empty_output_still_sees_the_callers_signals():
    words = torch.ones(2, dtype=torch.int32, device="cuda")
    a, b = torch.zeros(64, 8, device="cuda"), torch.zeros(8, 0, device="cuda")
    out = ts.matmul(a, b, arrival=ts.Arrival.uniform(32, 2, signals=words))
    assert out.shape == (64, 0)
    assert not words.any()
