"""The gate of the Hopper kernel on the GPU: its variants, both ways round, each chunk late in turn, missing; graphs.

What an op makes of an arrival, on whichever kernel its plan picks, is in `test_gpu_arrival`.
"""

from __future__ import annotations

import os
import time
from itertools import pairwise

import pytest
import torch

if not (torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from gpu_cases import BF16
from hopper_cases import APART, ARRIVING, GATED, ApartCase, HopperCase, chunks_of

import tilestream as ts
from device_order import check_gates, check_order
from error_rule import Maths, check
from tilestream.arrival.device import Apart
from tilestream.arrival.flat import Awaited, FlatArrival
from tilestream.core.operands import GemmOperands
from tilestream.launch.hopper.launch import GemmLaunch
from tilestream.launch.launch import Probe
from tilestream.runtime.properties import cuda_properties
from tilestream.runtime.streams import lend_to

#: A launch that waits for what is issued after it cannot be had where each launch is waited for: it expires.
launch_first = pytest.mark.skipif(
    os.environ.get("CUDA_LAUNCH_BLOCKING") == "1", reason="launches before its chunks are issued"
)
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_reported")]


def by_name(case: HopperCase) -> str:
    return case.name


def poison(x: torch.Tensor) -> torch.Tensor:
    if x.element_size() == 1:
        x.view(torch.uint8).fill_(0x7F)
    else:
        x.fill_(float("nan"))
    return x


class Coming:
    """One operand that arrives: a tensor of NaN, filled chunk by chunk on a stream of its own."""

    def __init__(self, bounds: tuple[int, ...], pivot: int, whole: torch.Tensor, signals=None) -> None:
        chunks, count = chunks_of(bounds), len(bounds) - 1
        where = {"pivot": pivot, "signals": signals, "device": None if signals is not None else "cuda"}
        if chunks.rows_per_chunk:
            self.arrival = ts.Arrival.uniform(chunks.rows_per_chunk, count, **where)
        else:
            self.arrival = ts.Arrival.ragged(bounds, **where)
        self.bounds, self.whole = bounds, whole
        self.tensor = poison(torch.empty_strided(whole.shape, whole.stride(), dtype=whole.dtype, device="cuda"))
        self.stream = lend_to(self, self.tensor.device)
        self.stream.wait_stream(torch.cuda.current_stream())

    def parts(self, x: torch.Tensor, chunk: int) -> list[torch.Tensor]:
        """What a chunk is of a tensor, batch by batch."""
        begin, end = self.bounds[chunk : chunk + 2]
        planes = x if x.dim() == 3 else x[None]
        m = planes.shape[1]
        return [plane[max(0, begin - i * m) : max(0, end - i * m)] for i, plane in enumerate(planes)]

    def copy(self, chunk: int) -> None:
        with torch.cuda.stream(self.stream):
            for into, source in zip(self.parts(self.tensor, chunk), self.parts(self.whole, chunk), strict=True):
                into.copy_(source)

    def feed(self, *chunks: int) -> None:
        for chunk in chunks:
            self.copy(chunk)
            with torch.cuda.stream(self.stream):
                self.arrival.signal(chunk)

    def again(self) -> None:
        """The next epoch, with nothing there."""
        self.arrival.advance()
        poison(self.tensor)
        self.stream.wait_stream(torch.cuda.current_stream())

    @property
    def order(self) -> list[int]:
        count, pivot = self.arrival.num_chunks, self.arrival.pivot
        return [(pivot + i) % count for i in range(count)]


class Run:
    """A case, with its operands, of which some arrive; whole, they give ``want``."""

    def __init__(self, case: HopperCase, rows_signals: torch.Tensor | None = None) -> None:
        self.case, (self.plan, self.layout) = case, case.plan(cuda_properties())
        assert "hopper" in self.plan.explain()
        self.operands = case.operands("cuda")
        self.coming: dict[str, Coming] = {}
        if case.rows:
            self.coming["arrival"] = Coming(case.rows, case.pivot, self.operands["a"], rows_signals)
        if case.columns:
            self.coming["weight_arrival"] = Coming(case.columns, case.pivot, self.operands["b"].mT)
        self.want = torch.empty(0)

    def __call__(self, deadline: float = 5.0) -> torch.Tensor:
        given, case = dict(self.operands), self.case
        if "arrival" in self.coming:
            given["a"] = self.coming["arrival"].tensor
        if "weight_arrival" in self.coming:
            given["b"] = self.coming["weight_arrival"].tensor.mT
        out, _ = case.output("cuda")
        arrivals = {name: one.arrival for name, one in self.coming.items()}
        return self.plan.run(
            **given, out=out, alpha=case.alpha, beta=case.beta, activation=case.activation, **arrivals,
            deadline=deadline,
        )  # fmt: skip

    def whole(self) -> torch.Tensor:
        """The result with everything there, checked."""
        self.feed_all()
        self.want = self()
        check(self.want, self.case.maths(self.operands))
        return self.want

    def feed_all(self) -> None:
        for one in self.coming.values():
            one.feed(*one.order)

    def again(self) -> None:
        for one in self.coming.values():
            one.again()


@launch_first
@pytest.mark.parametrize("case", ARRIVING, ids=by_name)
def test_each_chunk_late_in_turn(case):
    run = Run(case)
    want = run.whole()
    for name, one in run.coming.items():
        for late in one.order:
            run.again()
            out = run()
            for other, rest in run.coming.items():
                rest.feed(*(chunk for chunk in rest.order if (other, chunk) != (name, late)))
            one.stream.synchronize()
            time.sleep(0.001)
            one.feed(late)
            assert torch.equal(out, want), f"chunk {late} of {name}: other bits than with everything there"


@pytest.mark.parametrize("case", GATED, ids=by_name)
def test_a_chunk_that_never_comes_and_the_call_after_it(case):
    run = Run(case)
    want = run.whole()
    one = run.coming["arrival"]
    for missing in one.order:
        first, last = one.bounds[missing : missing + 2]
        run.again()
        one.feed(*(chunk for chunk in one.order if chunk != missing))
        begin = time.perf_counter()
        out = run(deadline=0.03)
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        if first == last:  # nobody reads it
            assert torch.equal(out, want)
            ts.check()
            continue
        assert 0.02 < took < 1.03
        assert out[first:last].isnan().all()
        there = ~out.isnan()
        assert torch.equal(out[there], want[there])
        with pytest.raises(ts.ArrivalTimeout, match=r"within the deadline of 0\.03 s") as caught:
            ts.check()
        error = caught.value
        assert (error.op, error.chunk, error.argument) == ("plan.run", missing, "arrival")
        assert 0 <= error.worker < run.plan.workers
        ts.check()
        run.again()
        run.feed_all()
        assert torch.equal(run(), want)


def stand_apart(run: Run, of: ApartCase) -> list[str]:
    """From now on these rows are NaN where the others arrive, and stand apart; to the list: when they are brought."""
    one, brought = run.coming["arrival"], []
    batches = one.whole.view(-1, of.period, one.whole.shape[1])
    mine = batches[:, of.first : of.first + of.height]
    around = poison(torch.empty(mine.numel() + 2 * 64, dtype=mine.dtype, device="cuda"))
    rows = around[64:-64].view(-1, mine.shape[2])
    rows.copy_(mine.reshape(rows.shape))

    def bring() -> None:
        one.tensor.view(batches.shape)[:, of.first : of.first + of.height].copy_(rows.view(mine.shape))
        brought.append("brought")

    one.arrival._signals.apart = Apart(rows, of.first, of.height, of.period, bring)
    return brought


def feed_others(one: Coming, of: ApartCase, but: int | None = None) -> None:
    """Signal all chunks but one, and copy those that do not stand apart."""
    for chunk in one.order:
        if chunk == but:
            continue
        if of.has(one.bounds[chunk]):
            with torch.cuda.stream(one.stream):
                one.arrival.signal(chunk)
        else:
            one.feed(chunk)


@launch_first
@pytest.mark.parametrize("of", APART, ids=lambda of: of.case.name)
def test_rows_that_stand_apart(of):
    run = Run(of.case)
    want = run.whole()
    one = run.coming["arrival"]
    brought = stand_apart(run, of)
    for again in range(3):
        run.again()
        out = run()
        time.sleep(0.001 * again)
        feed_others(one, of)
        assert torch.equal(out, want), "other bits than with all rows in one place"
    assert brought == ([] if of.there else ["brought"] * 3)
    missing = next(chunk for chunk in one.order if not of.has(one.bounds[chunk]))
    run.again()
    feed_others(one, of, missing)
    out = run(deadline=0.03)
    first, last = one.bounds[missing : missing + 2]
    assert out[first:last].isnan().all()
    there = ~out.isnan()
    assert there.any()
    assert torch.equal(out[there], want[there])
    with pytest.raises(ts.ArrivalTimeout):
        ts.check()


@pytest.mark.parametrize("case", GATED, ids=by_name)
def test_callers_own_words_and_their_quarantine(case):
    words = torch.zeros(len(case.rows) - 1, dtype=torch.int32, device="cuda")
    run = Run(case, words)
    one = run.coming["arrival"]
    for chunk in one.order:
        one.copy(chunk)
    one.stream.synchronize()
    words.fill_(3)
    want = run()
    check(want, case.maths(run.operands))
    assert not words.any(), "zeroed by the call that has seen them"
    missing = one.order[-1]
    words.fill_(1)
    words[missing] = 0
    lacking = run(deadline=0.03)
    torch.cuda.synchronize()
    assert words.sum() == len(words) - 1, "left as they are"
    with pytest.raises(ts.ArrivalTimeout):
        ts.check()
    first, last = one.bounds[missing : missing + 2]
    assert lacking[first:last].isnan().all()
    words.fill_(1)
    assert run().isnan().all(), "under quarantine"
    with pytest.raises(ts.TilestreamError, match=r"arrival\.reset"):
        ts.check()
    one.arrival.reset()
    words.fill_(1)
    assert torch.equal(run(), want)
    assert not words.any()


@launch_first
@pytest.mark.parametrize("case", GATED, ids=by_name)
def test_replays_with_the_copies_in_the_graph(case):
    run = Run(case)
    want = run.whole()
    one = run.coming["arrival"]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        poison(one.tensor)
        one.stream.wait_stream(torch.cuda.current_stream())
        out = run()
        one.feed(*one.order)
        torch.cuda.current_stream().wait_stream(one.stream)
    for _ in range(20):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want)


@launch_first
@pytest.mark.parametrize("case", GATED, ids=by_name)
def test_the_load_warp_looks_at_what_the_host_says(case):
    run = Run(case)
    run.whole()
    one, out = run.coming["arrival"], case.output("cuda")[0]
    launch = GemmLaunch(run.plan, run.layout)
    for _ in range(3):
        run.again()
        out.fill_(float("nan"))
        probe = Probe(run.plan.workers, 512, out.device)
        signals = FlatArrival.of(one.arrival).signals("matmul", out.device)
        launch(GemmOperands(one.tensor, run.operands["b"], out), Awaited(signals, None, 5.0, "matmul"), probe)
        one.feed(*one.order)
        assert torch.equal(out, run.want)
        logs = [probe.log(worker) for worker in range(run.plan.workers)]
        check_order(run.plan.schedule, logs)
        check_gates(run.plan.gate, run.plan.schedule, logs)


@launch_first
def test_between_launches_that_do_not_wait():
    """Those are chained: they begin before the launch ahead has ended, and wait for it before they touch memory."""
    run = Run(GATED[1])
    run.whole()
    one, w = run.coming["arrival"], torch.randn(run.case.n, run.case.n, device="cuda", dtype=BF16) / 20
    want = ts.matmul(run.want, w)
    x = torch.randn(2048, 2048, device="cuda", dtype=BF16)
    for _ in range(30):
        run.again()
        ts.matmul(x, x)
        out = ts.matmul(run(), w)
        one.feed(*one.order)
        assert torch.equal(out, want)


@launch_first
def test_what_was_signalled_is_what_is_multiplied():
    """Copy, signal, look, copy by TMA, over and over: each time the numbers of that time (invariant 7)."""
    m, k, size = 512, 64, 128
    arrival = ts.Arrival.uniform(size, m // size, device="cuda")
    plan = ts.plan(m, 64, k, dtype=BF16, device="cuda", backend="hopper", arrival=arrival, workers=8)
    eye = torch.eye(k, device="cuda", dtype=BF16)
    sources = [torch.full((m, k), float(i), device="cuda", dtype=BF16) for i in range(64)]
    tensor = torch.full((m, k), float("nan"), device="cuda", dtype=BF16)
    stream = lend_to(arrival, tensor.device)
    out, wrong = torch.empty(m, 64, device="cuda", dtype=BF16), torch.zeros((), device="cuda", dtype=torch.int64)
    for i in range(3000):
        stream.wait_stream(torch.cuda.current_stream())
        plan.run(tensor, eye, out=out, arrival=arrival)
        with torch.cuda.stream(stream):
            for chunk, (begin, end) in enumerate(pairwise(range(0, m + 1, size))):
                tensor[begin:end].copy_(sources[i % 64][begin:end])
                arrival.signal(chunk)
        wrong += (out != i % 64).sum()
        arrival.advance()
    assert wrong.item() == 0


def test_every_op_takes_it():
    """As a user calls it, the picked kernel is this one."""
    arrival = ts.Arrival.uniform(512, 4, 1, device="cuda")
    made = ts.plan(2048, 2048, 1024, dtype=BF16, device="cuda", arrival=arrival)
    assert made.backend == "hopper"
    assert "a tile waits for the chunks it reads" in made.explain()
    a, b = (torch.randn(s, device="cuda", dtype=BF16) for s in ((2048, 1024), (1024, 2048)))
    for chunk in range(4):
        arrival.signal(chunk)
    check(ts.matmul(a, b, arrival=arrival), Maths(a, b))
