"""Sequences and lanes on a GPU: what is issued at once arrives in order, and kept words serve stream after stream."""

from __future__ import annotations

import gc

import pytest
import torch
from feeds import launch_first
from gpu_runs import held

import tilestream as ts
from tilestream.arrival import landing, lanes
from tilestream.runtime import sequence
from tilestream.runtime.extension import library
from tilestream.runtime.sequence import (
    CopyAcross,
    CopyIn,
    Event,
    Record,
    Sequence,
    SequenceError,
    Slot,
    Wait,
    WaitEvent,
    Write,
)
from tilestream.runtime.streams import lend

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_reported")]

M, N, K = 2048, 512, 1024


@pytest.fixture(params=["native", "by Python"])
def issued(request, monkeypatch):
    """How sequences are issued."""
    if request.param == "native" and library() is None:
        pytest.skip("no extension")
    if request.param == "by Python":
        monkeypatch.setattr(sequence, "library", lambda: None)
    landing.filling.cache_clear()
    yield request.param
    landing.filling.cache_clear()


@pytest.fixture
def operands():
    host = torch.randn(M, K).to(torch.bfloat16).pin_memory()
    w = (torch.randn(K, N, device="cuda") / K**0.5).to(torch.bfloat16)
    return host, w


def check(y: torch.Tensor, host: torch.Tensor, w: torch.Tensor) -> None:
    torch.testing.assert_close(y, host.cuda() @ w)


def test_a_sequence_does_what_its_operations_say_in_order(issued):
    device = torch.device("cuda", torch.cuda.current_device())
    first, second = (lend(device).cuda_stream for _ in range(2))
    host = torch.arange(1 << 20, dtype=torch.int32).pin_memory()
    there, copy, words = (
        torch.zeros(1 << 20, dtype=torch.int32).cuda(),
        torch.zeros_like(host).cuda(),
        torch.zeros(4, dtype=torch.int32).cuda(),
    )
    came, done = Event(), Event()
    half = host.nbytes // 2
    one, other, to, source, onward, at, epoch = map(Slot, range(7))
    made = Sequence(7, [
        CopyIn(one, to, source, half), Write(one, at, epoch),
        CopyIn(one, to + half, source + half, half), Write(one, at + 4, epoch + 1), Record(one, came),
        Wait(other, at, epoch), CopyAcross(other, onward, to, half),
        WaitEvent(other, came), CopyAcross(other, onward + half, to + half, half), Record(other, done),
    ])  # fmt: skip
    assert (made._native is not None) == (issued == "native")
    torch.cuda.synchronize()
    for value in (1, 5, 2**31 - 8):
        host += value
        made.issue(first, second, there.data_ptr(), host.data_ptr(), copy.data_ptr(), words.data_ptr(), value)
        done.synchronize()
        assert done.query()
        assert torch.equal(copy.cpu(), host)
        assert words.tolist() == [value, value + 1, 0, 0]


def test_a_refused_operation_is_named(issued):
    stream = lend(torch.device("cuda", torch.cuda.current_device())).cuda_stream
    words = torch.zeros(2, dtype=torch.int32).cuda()
    torch.cuda.synchronize()
    first, second = words.data_ptr(), words.data_ptr() + 4
    made = Sequence(1, [Write(stream, first, 3), WaitEvent(stream, Slot(0)), Write(stream, second, 4)])
    with pytest.raises(SequenceError, match=r"refused the wait for an event: .*; this is operation 1 of 3") as refused:
        made.issue(0)  # no event
    assert refused.value.done == 1
    torch.cuda.synchronize()
    assert words.tolist() == [3, 0]


def test_stream_after_stream_on_one_lane(issued, operands):
    host, w = operands
    made = []
    for i in range(20):
        host.fill_(i + 1)
        with ts.stream_in(host, rows_per_chunk=256) as x:
            made.append((x._landing._lane, ts.matmul(x, w)))
        check(made[-1][1], host, w)
        del x
    gc.collect()
    assert len({id(lane) for lane, _ in made}) == 1, "each took the lane that the one before had left"


def test_the_host_far_ahead_of_streams_on_one_lane(issued, operands):
    """Nothing is waited for: launches wait for words that later streams write, too."""
    _, w = operands
    hosts = [torch.randn(M, K).to(torch.bfloat16).pin_memory() for _ in range(6)]
    torch.cuda._sleep(20_000_000)
    made = []
    for host in hosts * 3:
        x = ts.stream_in(host, rows_per_chunk=256)
        made.append((host, ts.matmul(x, w)))
        del x
    torch.cuda.synchronize()
    for host, y in made:
        check(y, host, w)


def test_lanes_under_two_streams(issued, operands):
    _, w = operands
    hosts = [torch.randn(M, K).to(torch.bfloat16).pin_memory() for _ in range(4)]
    calling, made = [torch.cuda.Stream() for _ in range(2)], []
    torch.cuda.synchronize()
    for i in range(16):
        with torch.cuda.stream(calling[i % 2]):
            x = ts.stream_in(hosts[i % 4], rows_per_chunk=256)
            made.append((hosts[i % 4], ts.matmul(x, w, workers=8)))  # two such launches wait at once
            del x
    torch.cuda.synchronize()
    for host, y in made:
        check(y, host, w)
    assert all(len(idle) <= 8 for idle in lanes._idle.values())


def test_restarts_behind_their_readers(issued, operands):
    host, w = operands
    stream = ts.stream_in(host, rows_per_chunk=256)
    ys = [ts.matmul(stream, w)]
    for _ in range(30):
        stream.restart()
        ys.append(ts.matmul(stream, w))
    torch.cuda.synchronize()
    for y in ys:
        check(y, host, w)


def test_a_dropped_source_is_not_reused_before_it_is_copied(issued, operands):
    _, w = operands
    for value in range(6):
        host = torch.full((8 * M, K), float(value), dtype=torch.bfloat16).pin_memory()
        torch.cuda._sleep(5_000_000)
        y = ts.matmul(ts.stream_in(host), w)
        del host
        spoiler = torch.full((8 * M, K), 77.0, dtype=torch.bfloat16).pin_memory()  # the same memory, if it is free
        torch.testing.assert_close(y, torch.full((8 * M, K), float(value), dtype=torch.bfloat16, device="cuda") @ w)
        del spoiler


def test_captures_are_refused_or_made_by_the_kernel_and_leave_lanes_whole(issued, operands):
    host, w = operands
    with ts.stream_in(host, rows_per_chunk=256) as x:
        check(ts.matmul(x, w), host, w)
    offered = ts.stream_in(host, rows_per_chunk=256, copies="kernel")
    ts.matmul(offered, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="a CUDA graph is being captured"):
            ts.stream_in(host)
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            offered.restart()
        y = ts.matmul(offered, w)
    for value in (1.0, 2.0):
        host.fill_(value)
        graph.replay()
        with ts.stream_in(host, rows_per_chunk=256) as again:  # a lane of as many chunks, between replays
            check(ts.matmul(again, w), host, w)
        torch.cuda.synchronize()
        check(y, host, w)


@launch_first
def test_the_forgotten_arrival_is_refused_before_a_launch(issued, operands):
    host, w = operands
    with ts.stream_in(host):  # its lane is there for the next, and what fills it is loaded
        pass
    torch.cuda.synchronize()
    with held():
        x = ts.stream_in(host)
        for views in (x.tensor, x.tensor[:256], x.tensor.detach()):
            with pytest.raises(ValueError, match=r"matmul: a is a tensor that ts\.stream_in has not filled yet"):
                ts.matmul(views, w)
    y = ts.matmul(x, w)
    z = ts.matmul(x.tensor, w)  # behind it on this stream
    torch.cuda.synchronize()
    check(y, host, w)
    check(z, host, w)
    with torch.cuda.stream(torch.cuda.Stream()):
        check(ts.matmul(x.tensor, w), host, w)
