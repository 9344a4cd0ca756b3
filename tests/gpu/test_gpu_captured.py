"""Streams in CUDA graphs on a GPU: each replay copies its source anew, and its launches wait for the chunks.

Every graph first fills the stream's tensor with NaN, so that a launch that does not wait shows it. About 40 s in all.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from feeds import launch_first, pinned
from gpu_cases import K, M, N
from gpu_runs import Differences, captured, expired, nan, poison, randn, settle

import tilestream as ts
from error_rule import Maths, check
from tilestream.arrival import landing
from tilestream.launch.trace import SpanLog
from tilestream.plan.plan import Plan
from tilestream.runtime import graphs
from tilestream.runtime.properties import cuda_properties
from tilestream.runtime.sequence import CopyIn, Sequence, Write
from tilestream.trace import Recorder, faults, record

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_reported")]

ROWS_PER_CHUNK = 128


class Kept:
    """A stream that is kept, what it is multiplied by, and outputs; everything is compiled."""

    def __init__(self, m: int = M, n: int = N, k: int = K, **how: Any) -> None:
        self.source, self.b = pinned(m, k), randn(k, n)
        self.x = ts.stream_in(self.source, **(how or {"rows_per_chunk": ROWS_PER_CHUNK}))
        self.n = n
        self.eager()
        settle()

    def eager(self, **how: Any) -> torch.Tensor:
        self.x.restart()
        return ts.matmul(self.x, self.b, **how)

    def graph(self, pool: Any = None, **how: Any) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph of a filling and a product, and the product."""
        out, made = nan(self.source.shape[0], self.n), torch.cuda.CUDAGraph()
        with torch.cuda.graph(made, pool=pool):
            poison(self.x.tensor)
            poison(out)
            self.x.restart()
            ts.matmul(self.x, self.b, out=out, **how)
        return made, out

    def check(self, *outs: torch.Tensor) -> None:
        torch.cuda.synchronize()
        for out in outs:
            check(out, Maths(self.source.cuda(), self.b))


def changed(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Any]], list[Any]]) -> None:
    """Have captured fillings be what ``change`` makes of their operations."""
    made = landing.filling

    def other(*how: Any, in_graph: bool = False) -> Any:
        sequences, done = made(*how, in_graph=in_graph)
        if not in_graph:
            return sequences, done
        return tuple(Sequence(8, change(list(one._operations))) for one in sequences), done

    monkeypatch.setattr(landing, "filling", other)


def test_each_replay_copies_what_the_source_holds(kind, backend):
    one = Kept()
    graph, out = one.graph(schedule=kind)
    for i in range(30):
        one.source.normal_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(one.x.tensor.cpu(), one.source)
        assert not out.isnan().any()
        if i % 10 == 0:
            one.check(out)
    for _ in range(20):  # one behind the other
        graph.replay()
    one.check(out)


def test_the_same_bits_as_an_eager_call_over_many_replays(backend):
    one, wrong = Kept(), Differences()
    graph, out = one.graph()
    want = one.eager()
    for _ in range(300):
        graph.replay()
        wrong.add(out != want)
    assert wrong.none()
    one.check(out)


def test_two_graphs_and_eager_calls_by_turns(backend):
    one, turns = Kept(), torch.Generator().manual_seed(1)
    made = [one.graph(), one.graph(schedule="static")]
    for _ in range(40):
        one.source.normal_()
        which = int(torch.randint(3, (), generator=turns))
        if which == 2:
            one.check(one.eager())
            continue
        graph, out = made[which]
        graph.replay()
        one.check(out)
    for _ in range(10):  # the host far ahead: the source stays as it is
        outs = [one.eager(), *(out for graph, out in made if not graph.replay())]
    one.check(*outs)


@launch_first
def test_all_workers_may_be_at_a_gate_before_the_first_chunk_comes(monkeypatch):
    """No SM is free then; copies and signals of a graph need none."""
    m, n, k = 128 * 17, 256 * 16, 512
    one = Kept(m, n, k, rows_per_chunk=m)
    plan = ts.plan(m, n, k, dtype=torch.bfloat16, device="cuda", tile=(128, 256), arrival=one.x.arrival)
    assert plan.schedule.grid.tiles >= plan.workers == cuda_properties().workers
    changed(monkeypatch, lambda made: [made[0]] * 40 + made)
    out = nan(m, n)
    one.x.restart()
    plan.run(one.x.tensor, one.b, out=out, arrival=one.x.arrival)  # compiled
    settle()
    with captured() as graph:
        poison(one.x.tensor)
        one.x.restart()
        plan.run(one.x.tensor, one.b, out=out, arrival=one.x.arrival, deadline=5.0)
    for _ in range(5):
        one.source.normal_()
        graph.replay()
        settle()
        one.check(out)


@launch_first
@pytest.mark.parametrize("lost", [0, 3, 7])
def test_a_chunk_that_is_lost_ends_each_replay_in_its_deadline(monkeypatch, backend, lost):
    one = Kept()
    whole, right = one.graph()
    with monkeypatch.context() as patch:
        signals = range(-(-M // ROWS_PER_CHUNK))
        changed(patch, lambda made: [x for x in made if not (type(x) is Write and x.address.plus == 4 * signals[lost])])
        graph, out = one.graph(deadline=0.05)
    rows = slice(lost * ROWS_PER_CHUNK, (lost + 1) * ROWS_PER_CHUNK)
    for _ in range(3):
        one.source.normal_()
        begin = time.perf_counter()
        graph.replay()
        error = expired(f"matmul: arrival's chunk {lost} did not arrive")
        assert time.perf_counter() - begin < 20
        assert error.chunk == lost
        assert out[rows].isnan().all()
        there = ~out.isnan().any(1)
        torch.testing.assert_close(out[there], one.source.cuda()[there] @ one.b, rtol=0.02, atol=0.5)
        whole.replay()  # nothing is left of it, neither in a graph nor for an eager call
        one.check(right, one.eager())
        settle()


def test_a_graph_that_fills_twice_and_writes_the_source_itself(backend):
    """As an offloaded activation is written and brought back: the second filling sees what the graph has written."""
    one = Kept()
    outs, fresh = [nan(M, N), nan(M, N)], randn(M, K)
    with captured() as graph:
        one.x.restart()
        ts.matmul(one.x, one.b, out=outs[0])
        one.source.copy_(fresh, non_blocking=True)
        poison(one.x.tensor)
        one.x.restart()
        ts.matmul(one.x, one.b, out=outs[1])
    for _ in range(10):
        one.source.normal_()
        first = one.source.cuda()
        graph.replay()
        settle()
        check(outs[0], Maths(first, one.b))
        check(outs[1], Maths(fresh, one.b))


def test_launches_of_one_filling_on_several_streams():
    one, side = Kept(), torch.cuda.Stream()
    outs = [nan(M, N), nan(M, N), nan(M, N)]
    with captured() as graph:
        poison(one.x.tensor)
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        one.x.restart()
        with torch.cuda.stream(side):  # it does not come behind the restart by itself
            ts.matmul(one.x, one.b, out=outs[0], workers=40)
        for out in outs[1:]:
            ts.matmul(one.x, one.b, out=out, workers=40)
        here.wait_stream(side)
    streams = [torch.cuda.Stream() for _ in range(2)]
    for i in range(20):
        one.source.normal_()
        with torch.cuda.stream(streams[i % 2]):
            graph.replay()
        one.check(*outs)


def test_two_streams_of_one_graph_and_a_weight():
    x, w = Kept(), Kept(N, M, K)
    out = nan(M, N)
    ts.linear(x.x, w.x, out=out)
    settle()
    with captured() as graph:
        poison(x.x.tensor)
        poison(w.x.tensor)
        x.x.restart()
        w.x.restart()
        ts.linear(x.x, w.x, out=out)
    for _ in range(10):
        x.source.normal_()
        w.source.normal_()
        graph.replay()
        settle()
        check(out, Maths(x.source.cuda(), w.source.cuda().mT))


@pytest.mark.parametrize("rows_per_chunk", [128, 100])
def test_keys_that_arrive(rows_per_chunk, backend):
    s, h, d = 1024, 4, 128
    source, q = pinned(s, 2 * h * d), randn(1, 256, h, d)
    x = ts.stream_in(source, rows_per_chunk=rows_per_chunk)
    k, v = x.tensor.view(1, s, 2, h, d).unbind(2)
    ts.attention(q, k, v, arrival=x.arrival)
    settle()
    out = nan(1, 256, h, d)
    with captured() as graph:
        poison(x.tensor)
        x.restart()
        ts.attention(q, k, v, arrival=x.arrival, out=out)
    for _ in range(10):
        source.normal_()
        graph.replay()
        settle()
        keys, values = source.cuda().view(1, s, 2, h, d).unbind(2)
        torch.testing.assert_close(out, ts.attention(q, keys, values), rtol=0.02, atol=0.02)


def test_a_graph_that_is_destroyed_while_its_replay_runs():
    one = Kept()
    for _ in range(5):
        graph, out = one.graph()
        one.source.normal_()
        want = one.source.cuda()
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        graph.replay()
        del graph
        gc.collect()
        spoilers = [nan(M, K) for _ in range(4)]
        torch.cuda.synchronize()
        check(out, Maths(want, one.b))
        del spoilers
    one.check(one.eager())


def test_a_graph_keeps_the_source_and_the_tensor_and_lets_go_of_them():
    one, others_kept = Kept(), set(graphs._kept)
    graph, out = one.graph()
    (kept,) = set(graphs._kept) - others_kept
    want, b = one.source.cuda(), one.b
    torch.cuda.synchronize()
    del one
    gc.collect()
    spoilers = [torch.full((M, K), 7.0, dtype=torch.bfloat16).pin_memory() for _ in range(4)]
    others = [torch.full((M, K), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
    for _ in range(3):
        graph.replay()
    settle()
    check(out, Maths(want, b))
    assert all((x == 7).all() for x in (*spoilers, *others)), "the graph has written to memory that was another's"
    del graph
    gc.collect()
    end = time.perf_counter() + 30.0
    while kept in graphs._kept and time.perf_counter() < end:
        graphs.let_go()
        time.sleep(0.01)
    assert kept not in graphs._kept, "the driver has not said that the graph is gone"


def test_a_compiled_function_that_is_captured():
    one, compiled = Kept(), torch.compile(lambda x, b: ts.matmul(x, b) + 1, backend="aot_eager", fullgraph=True)
    for _ in range(3):
        one.x.restart()
        compiled(one.x, one.b)
    settle()
    with captured() as graph:
        poison(one.x.tensor)
        one.x.restart()
        out = compiled(one.x, one.b)
    for _ in range(5):
        one.source.normal_()
        graph.replay()
        settle()
        torch.testing.assert_close(out, one.source.cuda() @ one.b + 1, rtol=0.02, atol=0.5)


def traced_graph(one: Kept, plan: Plan, out: torch.Tensor, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Recorder]:
    """A graph of a filling and a product by ``plan`` into ``out``, captured with its trace; the kernel is compiled."""
    with record():
        one.x.restart()
        plan.run(one.x.tensor, one.b, out=out, arrival=one.x.arrival)
    settle()
    made = torch.cuda.CUDAGraph()
    with record() as recorder, torch.cuda.graph(made, pool=pool):
        poison(one.x.tensor)
        poison(out)
        one.x.restart()
        plan.run(one.x.tensor, one.b, out=out, arrival=one.x.arrival)
    return made, recorder


def plan_of(one: Kept, backend: str) -> Plan:
    m, k = one.source.shape
    forced = None if backend == "picked" else backend
    return ts.plan(m, one.n, k, dtype=torch.bfloat16, device="cuda", backend=forced, arrival=one.x.arrival)


def test_the_trace_of_each_replay(backend):
    """Each tile once; none before its chunk is passed; one clock for all replays; the product is right."""
    one = Kept()
    plan, out, read = plan_of(one, backend), nan(M, N), []
    graph, recorder = traced_graph(one, plan, out)
    assert not recorder.launches
    assert [launch.spans for launch in recorder.replayed()] == [[]], "no replay yet"
    for _ in range(3):
        one.source.normal_()
        graph.replay()
        (launch,) = recorder.replayed()
        assert not faults(launch, plan.schedule)
        assert len(launch.arrivals[0]) == one.x.arrival.num_chunks
        assert {span.chunk for span in launch.spans} <= {*range(one.x.arrival.num_chunks)}
        assert all(launch.begin <= span.begin <= span.end <= launch.end for span in launch.spans)
        read.append(launch)
        one.check(out)
    assert all(before.end <= behind.begin for before, behind in itertools.pairwise(read))


def test_a_replay_after_its_recorder_is_gone_writes_to_no_others_memory(backend):
    """Logs are of the graph's pool, and of host memory that the graph keeps."""
    one, before = Kept(), set(graphs._kept)
    plan, out = plan_of(one, backend), nan(M, N)
    graph, recorder = traced_graph(one, plan, out)
    kept = {number for number in set(graphs._kept) - before if isinstance(graphs._kept[number][0], SpanLog)}
    assert len(kept) == 1
    graph.replay()
    del recorder
    gc.collect()
    size = plan.schedule.grid.tiles, 9
    on_gpu = [torch.full(size, 7, device="cuda") for _ in range(64)]
    on_host = [torch.full(size, 7).pin_memory() for _ in range(64)]
    for _ in range(20):
        graph.replay()
    one.check(out)
    assert all((x == 7).all() for x in (*on_gpu, *on_host)), "a replay has written to memory that was another's"
    del graph
    gc.collect()
    end = time.perf_counter() + 30.0
    while kept & set(graphs._kept) and time.perf_counter() < end:
        graphs.let_go()
        time.sleep(0.01)
    assert not kept & set(graphs._kept), "the driver has not said that the graph is gone"


def test_a_trace_is_read_when_its_graph_is_gone(backend):
    one = Kept()
    plan = plan_of(one, backend)
    graph, recorder = traced_graph(one, plan, nan(M, N))
    graph.replay()
    del graph
    gc.collect()
    (launch,) = recorder.replayed()
    assert not faults(launch, plan.schedule)


def test_traces_of_graphs_that_share_a_pool(backend):
    """Another graph of the pool uses a log's memory, too, but only between replays."""
    one, pool = Kept(), torch.cuda.graph_pool_handle()
    plan = plan_of(one, backend)
    outs = [nan(M, N) for _ in range(3)]
    made = [traced_graph(one, plan, out, pool) for out in outs]
    for _ in range(3):
        for (graph, recorder), out in zip(made, outs, strict=True):
            one.source.normal_()
            graph.replay()
            (launch,) = recorder.replayed()
            assert not faults(launch, plan.schedule)
            one.check(out)
    for graph, _ in made:  # all, and then all are read
        graph.replay()
    for _, recorder in made:
        assert not faults(recorder.replayed()[0], plan.schedule)


def test_graphs_that_share_a_pool_of_memory():
    one, pool = Kept(), torch.cuda.graph_pool_handle()
    made = [one.graph(pool) for _ in range(3)]
    for _ in range(2):
        for graph, out in made:
            one.source.normal_()
            graph.replay()
            one.check(out)
        made.pop(0)  # what it had of the pool is free
        gc.collect()
        made.append(one.graph(pool))


def test_what_is_refused_leaves_the_capture_whole():
    one, y = Kept(), None
    with captured() as graph:
        with pytest.raises(RuntimeError, match="make the Stream before the capture"):
            ts.stream_in(one.source)
        with pytest.raises(RuntimeError, match="call the Stream's restart"):
            ts.matmul(one.x, one.b)
        with pytest.raises(RuntimeError, match="wait"):
            one.x.wait()
        assert not one.x.close()
        one.x.restart()
        with pytest.raises(ValueError, match=r"a is a tensor that ts\.stream_in has not filled yet"):
            ts.matmul(one.x.tensor, one.b)
        y = ts.matmul(one.x, one.b)
        z = ts.matmul(one.x.tensor, one.b)  # behind it
    one.source.normal_()
    graph.replay()
    one.check(y, z)


def test_copies_are_issued_in_the_pivots_order_in_a_graph():
    one = Kept(rows_per_chunk=ROWS_PER_CHUNK, pivot=3)
    sequences, _ = landing.filling(one.x._chunks, 3, K * 2, in_graph=True)
    copies = [x for x in sequences[0]._operations if type(x) is CopyIn]
    assert copies[0].source.plus == 3 * ROWS_PER_CHUNK * K * 2
    graph, out = one.graph()
    graph.replay()
    one.check(out)
