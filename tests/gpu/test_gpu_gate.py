"""The gate of both kernels: each chunk late in turn, missing; words of the caller's own; graphs; rows that stand apart.

Plans are forced, so that Hopper's has each variant both ways round. `test_gpu_arrival` has what ops do with an arrival.
"""

from __future__ import annotations

import gc
import time
from itertools import pairwise

import pytest
import torch
from feeds import GatedRun, launch_first, refused_in_quarantine
from gpu_cases import BF16, CHUNKINGS, KINDS, Case, K, M, N, by_name
from gpu_runs import ON_HOPPER, Differences, captured, expired, nan, poison, randn
from hopper_cases import APART, ARRIVING, GATED, ApartCase

import tilestream as ts
from device_order import check_gates, check_order
from tilestream.arrival.device import LocalRows
from tilestream.arrival.flat import Awaited, FlatArrival
from tilestream.core.operands import GemmOperands
from tilestream.launch.launch import Probe
from tilestream.ops import gpu
from tilestream.runtime.streams import lend_to

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_reported")]
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")

#: Half of the SMs stay free, for the copies.
PORTABLE = [
    Case(M, N, K, schedule=kind, rows=bounds, pivot=1, backend="portable", workers=60)
    for bounds in CHUNKINGS.values()
    for kind in KINDS
]
HOPPER = GATED if ON_HOPPER else []
gated = pytest.mark.parametrize("case", [*HOPPER, *PORTABLE], ids=by_name)


@launch_first
@pytest.mark.parametrize("case", [*(ARRIVING if ON_HOPPER else []), *PORTABLE], ids=by_name)
def test_each_chunk_late_in_turn(case):
    run = GatedRun(case)
    want = run.whole()
    for name, one in run.feeds.items():
        for late in one.order:
            run.again()
            out = run.launch()
            for other, rest in run.feeds.items():
                rest(*(chunk for chunk in rest.order if (other, chunk) != (name, late)))
            one.stream.synchronize()
            time.sleep(0.001)
            one(late)
            assert torch.equal(out, want), f"chunk {late} of {name}: other bits than with everything there"


@gated
def test_a_chunk_that_never_comes_and_the_call_after_it(case):
    run = GatedRun(case)
    want = run.whole()
    one = run.feeds["arrival"]
    for missing in one.order:
        rows = one.rows(missing)
        run.again()
        one.but(missing)
        begin = time.perf_counter()
        out = run.launch(deadline=0.03)
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        if rows.start == rows.stop:  # no tile reads it
            assert torch.equal(out, want)
            ts.check()
            continue
        assert 0.02 < took < 60, "the host's; the kernel's own wait is below"
        # What reads the chunk is NaN, whole tiles of it; what is a number is right.
        assert out[rows].isnan().all()
        there = ~out.isnan()
        assert torch.equal(out[there], want[there])
        error = expired(r"within the deadline of 0\.03 s")
        assert (error.op, error.chunk, error.argument) == ("plan.run", missing, "arrival")
        assert 0 < error.waited < 1.03
        assert 0 <= error.worker < run.plan.workers
        assert error.item.startswith("tile ")
        ts.check()  # an expiry is reported once
        run.again()
        run.feed_all()
        assert torch.equal(run.launch(), want)


@gated
def test_callers_own_words_and_their_quarantine(case):
    words = torch.zeros(len(case.rows) - 1, dtype=torch.int32, device="cuda")
    run = GatedRun(case, words)
    one = run.feeds["arrival"]
    one.copy(*one.order)
    one.stream.synchronize()
    for value in (1, 3, -2):
        words.fill_(value)
        want = run.launch()
        run.check(want)
        assert not words.any(), "zeroed by the call that has seen them"
    missing = one.order[-1]
    words.fill_(1)
    words[missing] = 0
    lacking = run.launch(deadline=0.03)
    torch.cuda.synchronize()
    assert words.tolist() == [int(chunk != missing) for chunk in range(len(words))], "left as they are"
    expired()
    assert lacking[one.rows(missing)].isnan().all()
    words.fill_(1)  # they may be of the launch that missed a chunk
    assert run.launch().isnan().all(), "in quarantine"
    refused_in_quarantine()
    one.arrival.reset()
    assert not words.any()
    words.fill_(1)
    assert torch.equal(run.launch(), want)
    assert not words.any()


@launch_first
@gated
def test_replays_with_the_copies_in_the_graph(case):
    run = GatedRun(case)
    want = run.whole()
    one = run.feeds["arrival"]
    torch.cuda.synchronize()

    def capture(*chunks: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        gc.collect()  # a graph that is freed during a capture ends it
        with captured() as graph:
            poison(one.tensor)
            one.stream.wait_stream(torch.cuda.current_stream())
            out = run.launch(deadline=0.5)
            one(*chunks)
            torch.cuda.current_stream().wait_stream(one.stream)
        return graph, out

    graph, out = capture(*one.order)
    for _ in range(20):
        poison(out)
        graph.replay()
        assert torch.equal(out, want)
    one.source.normal_()
    graph.replay()
    run.check(out)
    ts.check()
    lacking, lost = capture(*one.order[:-1])
    lacking.replay()
    torch.cuda.synchronize()
    assert lost.isnan().any()
    expired()
    for advances in (False, True):  # which changes nothing for captured launches
        if advances:
            one.arrival.advance()
        graph.replay()
        torch.cuda.synchronize()
        assert out.isnan().all()
        refused_in_quarantine()
    one.arrival.reset()
    graph.replay()
    run.check(out)


@launch_first
@gated
def test_the_gate_waits_for_what_the_host_says(case):
    run = GatedRun(case)
    run.whole()
    feed, plan = run.feeds["arrival"], run.plan
    for _ in range(3):
        run.again()
        out, _ = case.output("cuda")
        x = GemmOperands(feed.tensor, run.operands["b"], out)
        probe = Probe(plan.workers, 512, out.device)
        signals = FlatArrival.of(feed.arrival).signals("matmul", out.device)
        gpu.find(x, gpu.How(), plan)(x, Awaited(signals, None, 5.0, "matmul"), probe)
        feed(*feed.order, pause=0.0003)
        logs = [probe.log(worker) for worker in range(plan.workers)]
        check_order(plan.schedule, logs)
        check_gates(plan.gate, plan.schedule, logs)
        assert torch.equal(out, run.want)


# Of the Hopper kernel alone ------------------------------------------------------------------------------------------


def stand_apart(run: GatedRun, of: ApartCase) -> list[str]:
    """Move these rows apart, and leave NaN in their place. The list grows whenever they are brought back."""
    one, brought = run.feeds["arrival"], []
    batches = one.source.view(-1, of.period, one.source.shape[1])
    mine = batches[:, of.first : of.first + of.height]
    around = poison(torch.empty(mine.numel() + 2 * 64, dtype=mine.dtype, device="cuda"))
    rows = around[64:-64].view(-1, mine.shape[2])
    rows.copy_(mine.reshape(rows.shape))

    def bring() -> None:
        one.tensor.view(batches.shape)[:, of.first : of.first + of.height].copy_(rows.view(mine.shape))
        brought.append("brought")

    one.arrival._signals.local_rows = LocalRows(rows, of.first, of.height, of.period, bring)
    return brought


@on_hopper
@launch_first
@pytest.mark.parametrize("of", APART, ids=lambda of: of.case.name)
def test_rows_that_stand_apart(of):
    run = GatedRun(of.case)
    want = run.whole()
    one = run.feeds["arrival"]
    brought = stand_apart(run, of)

    def feed_others(but: int | None = None) -> None:
        """Signal all chunks but one, and copy those that do not stand apart."""
        for chunk in one.order:
            if chunk != but:
                (one.signal if of.has(one.bounds[chunk]) else one)(chunk)

    for again in range(3):
        run.again()
        out = run.launch()
        time.sleep(0.001 * again)
        feed_others()
        assert torch.equal(out, want), "other bits than with all rows in one place"
    assert brought == ([] if of.there else ["brought"] * 3)
    missing = next(chunk for chunk in one.order if not of.has(one.bounds[chunk]))
    run.again()
    feed_others(missing)
    out = run.launch(deadline=0.03)
    assert out[one.rows(missing)].isnan().all()
    there = ~out.isnan()
    assert there.any()
    assert torch.equal(out[there], want[there])
    expired()


@on_hopper
@launch_first
def test_between_launches_that_do_not_wait():
    """Such launches are chained: each begins before the one ahead has ended, and waits before it touches memory."""
    run = GatedRun(GATED[1])
    run.whole()
    w = randn(run.case.n, run.case.n) / 20
    want = ts.matmul(run.want, w)
    x = randn(2048, 2048)
    for _ in range(30):
        run.again()
        ts.matmul(x, x)
        out = ts.matmul(run.launch(), w)
        run.feed_all()
        assert torch.equal(out, want)


@on_hopper
@launch_first
def test_what_was_signalled_is_what_is_multiplied():
    """Copy, signal, poll, load by TMA, 3000 times: each product has the numbers of its own turn (invariant 7)."""
    m, k, size = 512, 64, 128
    arrival = ts.Arrival.uniform(size, m // size, device="cuda")
    plan = ts.plan(m, 64, k, dtype=BF16, device="cuda", backend="hopper", arrival=arrival, workers=8)
    eye = torch.eye(k, device="cuda", dtype=BF16)
    sources = [torch.full((m, k), float(i), device="cuda", dtype=BF16) for i in range(64)]
    tensor = nan(m, k)
    stream = lend_to(arrival, tensor.device)
    out, wrong = nan(m, 64), Differences()
    for i in range(3000):
        stream.wait_stream(torch.cuda.current_stream())
        plan.run(tensor, eye, out=out, arrival=arrival)
        with torch.cuda.stream(stream):
            for chunk, (begin, end) in enumerate(pairwise(range(0, m + 1, size))):
                tensor[begin:end].copy_(sources[i % 64][begin:end])
                arrival.signal(chunk)
        wrong.add(out != i % 64)
        arrival.advance()
    assert wrong.none()
