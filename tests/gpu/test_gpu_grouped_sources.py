"""Rows by source on a GPU, by both kernels: late by a side stream, or never; replays of a graph; two streams."""

from __future__ import annotations

import pytest
import torch
from gpu_runs import captured, expired, nan, rand, randn, settle

import tilestream as ts
from error_rule import Maths, check
from tilestream.launch.cache import launch_cache
from tilestream.runtime.driver import stream_wait, stream_write

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
SOURCES, GROUPS, CAPACITY, K, N = 4, 8, 700, 192, 328
#: Rows of each group: uneven; none; all in one; one a group.
COUNTS = ((3, 0, 300, 1, 64, 127, 5, 0), (0,) * 8, (0, 0, 0, 700, 0, 0, 0, 0), (1,) * 8)
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_reported")]


@pytest.fixture(autouse=True)
def taken(kernel):
    """The kernel that all launches of the test are of."""
    yield
    assert {launch.plan.backend for launch in launch_cache.of("sources")} == {kernel}


class Sources:
    """Rows and counts in pinned memory, their places on the GPU, and streams that bring them."""

    def __init__(self, signals: torch.Tensor | None = None, pivot: int = 1) -> None:
        self.rows = torch.randn(SOURCES * CAPACITY, K).to(BF16).pin_memory()
        self.host = torch.tensor(COUNTS, dtype=torch.int32).pin_memory()
        self.a, self.b = nan(SOURCES * CAPACITY, K), randn(GROUPS, N, K).mT
        self.counts = torch.full((SOURCES, GROUPS), -7, dtype=torch.int32, device="cuda")
        self.arrival = ts.SourceArrival(self.counts, CAPACITY, pivot=pivot, signals=signals)
        self.streams = [torch.cuda.Stream() for _ in range(SOURCES)]
        torch.cuda.synchronize()

    def bring(self, source: int, *, rows: bool = True) -> None:
        with torch.cuda.stream(self.streams[source]):
            place = slice(source * CAPACITY, (source + 1) * CAPACITY)
            self.counts[source].copy_(self.host[source], non_blocking=True)
            self.arrival.signal_counts(source)
            if rows:
                self.a[place].copy_(self.rows[place], non_blocking=True)
                self.arrival.signal_rows(source)

    def check(self, out: torch.Tensor, *but: int) -> None:
        rows = self.rows.cuda()
        for source, counts in enumerate(COUNTS):
            begin = source * CAPACITY
            if source in but:
                continue
            for group, count in enumerate(counts):
                run = slice(begin, begin + count)
                check(out[run], Maths(rows[run], self.b[group]))
                begin += count
            assert (out[begin : (source + 1) * CAPACITY] == 7).all(), "rows behind the last one are written"


def sevens() -> torch.Tensor:
    return torch.full((SOURCES * CAPACITY, N), 7.0, dtype=BF16, device="cuda")


def test_everything_is_there():
    x = Sources()
    x.a.copy_(x.rows)
    x.counts.copy_(x.host)
    x.check(ts.grouped_mm(x.a, x.b, counts=x.counts, out=sevens()))


def test_sources_that_come_behind_the_launch():
    x = Sources()
    for epoch in range(3):
        if epoch:
            x.arrival.advance()
        out = sevens()
        ts.grouped_mm(x.a, x.b, arrival=x.arrival, out=out)
        for source in (3, 0, 2, 1):
            x.bring(source)
        torch.cuda.synchronize()
        x.check(out)


def test_a_trace_has_each_tile_once():
    x = Sources()
    out = sevens()
    with ts.trace.record() as recorder:
        ts.grouped_mm(x.a, x.b, arrival=x.arrival, out=out)
        for source in (3, 0, 2, 1):
            x.bring(source)
    x.check(out)
    (launch,) = recorder.launches
    done = [(span.batch, span.pm, span.pn) for span in launch.spans if span.kind == "tile"]
    assert len(done) == len(set(done)) == launch.tiles_done
    block = launch_cache.of("sources")[0].plan.block
    for source, counts in enumerate(COUNTS):
        of_source = [tile for tile in done if tile[0] == source]
        assert len(of_source) == sum(-(-rows // block[0]) for rows in counts) * -(-N // block[1])
    assert {span.unit >= 0 for span in launch.spans} == {True}
    assert any(span.kind == "wait" and span.batch == 3 for span in launch.spans), "the first one that came"


@pytest.mark.parametrize("rows", [False, True])
def test_a_source_that_is_lost(rows):
    """Source 2 is behind a word that is written after the deadline: its counts, or its rows alone."""
    x = Sources()
    for source in range(SOURCES):
        x.bring(source)
    x.check(ts.grouped_mm(x.a, x.b, arrival=x.arrival, out=sevens()))  # compiled: the deadline is the kernel's alone
    settle()
    x.arrival.advance()
    word, other = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    if rows:
        x.bring(2, rows=False)
    stream_wait(x.streams[2].cuda_stream, word.data_ptr(), 1)
    try:
        x.bring(2)
        for source in (0, 1, 3):
            x.bring(source)
        out = sevens()
        ts.grouped_mm(x.a, x.b, arrival=x.arrival, out=out, deadline=0.1)
        torch.cuda.current_stream().synchronize()
        with pytest.raises(ts.ArrivalTimeout, match="source 2") as caught:
            ts.check()
        assert (caught.value.source, caught.value.group) == (2, 3 if rows else None)
        assert out[2 * CAPACITY : 3 * CAPACITY].isnan().all()
        x.check(out, 2)
    finally:  # else nothing ever ends
        stream_write(other.cuda_stream, word.data_ptr(), 1)
    torch.cuda.synchronize()
    x.check(ts.grouped_mm(x.a, x.b, arrival=x.arrival, out=sevens()))


def test_counts_that_are_none_make_a_place_nan():
    x = Sources()
    x.a.copy_(x.rows)
    x.counts.copy_(x.host)
    x.counts[1, 0] = CAPACITY + 1
    out = ts.grouped_mm(x.a, x.b, counts=x.counts, out=sevens())
    assert out[CAPACITY : 2 * CAPACITY].isnan().all()
    x.check(out, 1)


def test_a_graph_waits_anew_at_each_replay():
    words = torch.zeros(SOURCES, GROUPS + 1, dtype=torch.int32, device="cuda")
    x, out = Sources(words), sevens()
    x.a.copy_(x.rows)
    x.counts.copy_(x.host)
    words.fill_(1)
    ts.grouped_mm(x.a, x.b, arrival=x.arrival, out=out)
    settle()
    assert not words.any(), "the call that has seen all words zeroes them"
    with captured() as graph:
        ts.grouped_mm(x.a, x.b, arrival=x.arrival, out=out, deadline=0.5)
    for _ in range(3):
        out.fill_(7.0)
        words.fill_(1)
        graph.replay()
        settle()
        x.check(out)
        assert not words.any()
    words[:3] = 1
    graph.replay()
    error = expired("counts of source 3")
    assert error.source == 3
    x.check(out, 3)
    x.arrival.reset()
    out.fill_(7.0)
    words.fill_(1)
    graph.replay()
    settle()
    x.check(out)


def test_two_streams():
    xs, streams = [Sources(pivot=pivot) for pivot in (0, 3)], [torch.cuda.Stream() for _ in range(2)]
    outs = [sevens() for _ in xs]
    torch.cuda.synchronize()
    for x in xs:
        for source in range(SOURCES):
            x.bring(source)
    for x, stream, out in zip(xs, streams, outs, strict=True):
        with torch.cuda.stream(stream):
            ts.grouped_mm(x.a, x.b, arrival=x.arrival, out=out)
    torch.cuda.synchronize()
    for x, out in zip(xs, outs, strict=True):
        x.check(out)


def test_sources_are_published():
    x, publish = Sources(), ts.Arrival.uniform(CAPACITY, SOURCES, device="cuda")
    x.a.copy_(x.rows)
    x.counts.copy_(x.host)
    for epoch in range(2):
        if epoch:
            publish.advance()
        x.check(ts.grouped_mm(x.a, x.b, counts=x.counts, publish=publish, out=sevens()))
        assert all(publish.arrived(source) for source in range(SOURCES))


class There:
    """Operands of 3 sources whose rows are all there, of counts that differ by source; groups without rows too."""

    def __init__(self, capacity: int, n: int, k: int, groups: int, dtype: torch.dtype = BF16) -> None:
        self.capacity, self.groups = capacity, groups
        shares = torch.rand(3, groups, generator=torch.Generator().manual_seed(capacity)) ** 3
        shares[:, 1::3] = 0
        self.host = (shares / shares.sum(1, keepdim=True) * (capacity - 1)).int()
        self.counts = self.host.cuda()
        self.a, self.b = randn(3 * capacity, k, dtype=dtype), randn(groups, n, k, dtype=dtype).mT

    def check(self, out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias=None, **more) -> None:
        for source, counts in enumerate(self.host.tolist()):
            begin = source * self.capacity
            for group, count in enumerate(counts):
                run = slice(begin, begin + count)
                check(out[run], Maths(a[run], b[group], None if bias is None else bias[group], **more))
                begin += count
            assert (out[begin : (source + 1) * self.capacity] == 7).all(), "rows behind the last one are written"

    def out(self, columns: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.full((len(self.a), columns), 7.0, dtype=dtype, device="cuda")


#: Few rows a group, and many; one K step, and many; several groups a lane; columns that no tile divides.
SHAPES = [(40, 512, 1024, 8), (4096, 1024, 2048, 4), (900, 200, 64, 3), (1500, 264, 320, 60), (300, 136, 96, 200)]


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, arrives):
    x = There(*shape)
    out = x.out(shape[1])
    if arrives:
        arrival = ts.SourceArrival(x.counts, shape[0])
        for source in range(3):
            arrival.signal_counts(source)
            arrival.signal_rows(source)
        ts.grouped_mm(x.a, x.b, arrival=arrival, out=out)
    else:
        ts.grouped_mm(x.a, x.b, counts=x.counts, out=out)
    x.check(out, x.a, x.b)


def test_epilogues():
    x = There(700, 328, 192, 8)
    bias = randn(8, 328)
    out = x.out(328)
    ts.grouped_mm(x.a, x.b, counts=x.counts, bias=bias, activation="gelu", out=out)
    x.check(out, x.a, x.b, bias, activation="gelu")
    out = x.out(164)
    ts.grouped_mm(x.a, x.b, counts=x.counts, bias=bias, activation="swiglu", out=out)
    x.check(out, x.a, x.b, bias, activation="swiglu")


@pytest.mark.parametrize("use_fast_accum", [True, False])
def test_operands_of_8_bits_with_a_scale_a_row(use_fast_accum):
    x = There(700, 336, 320, 8, E4M3)
    scale_a, scale_b, out = rand(len(x.a)) + 0.1, rand(8, 336) + 0.1, x.out(336)
    ts.grouped_mm(x.a, x.b, counts=x.counts, scale_a=scale_a, scale_b=scale_b, use_fast_accum=use_fast_accum, out=out)
    for source, counts in enumerate(x.host.tolist()):
        begin = source * x.capacity
        for group, count in enumerate(counts):
            run = slice(begin, begin + count)
            check(out[run], Maths(x.a[run], x.b[group], scale_a=scale_a[run, None], scale_b=scale_b[group, None]))
            begin += count


def test_scales_of_blocks():
    x = There(700, 256, 384, 8, E4M3)
    scale_a, scale_b, out = rand(3, len(x.a)).t() + 0.1, rand(8, 2, 3).mT + 0.1, x.out(256)
    ts.grouped_mm(x.a, x.b, counts=x.counts, scale_a=scale_a, scale_b=scale_b, out=out)
    depth, column = (torch.arange(extent, device="cuda") // 128 for extent in (384, 256))
    a, b = x.a.float() * scale_a[:, depth], x.b.float() * scale_b[:, depth[:, None], column]
    x.check(out, a, b, out_dtype=BF16)
