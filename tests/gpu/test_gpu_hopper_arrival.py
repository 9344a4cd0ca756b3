"""The gate of the Hopper kernel on the GPU: its variants, both ways round, each chunk late in turn, missing; graphs.

`test_gpu_arrival` has what the ops do with an arrival, on the kernel that the plan picks.
"""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from gpu_runs import ON_HOPPER, Differences, captured, expired, nan, poison, randn

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from feeds import Feed, check_gate, launch_first, refused_in_quarantine
from gpu_cases import BF16, by_name
from hopper_cases import APART, ARRIVING, GATED, ApartCase, HopperCase, chunks_of

import tilestream as ts
from error_rule import Maths, check
from tilestream.arrival.device import LocalRows
from tilestream.launch.hopper.launch import GemmLaunch
from tilestream.runtime.properties import cuda_properties
from tilestream.runtime.streams import lend_to

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_reported")]


def feed_of(bounds: tuple[int, ...], pivot: int, whole: torch.Tensor, signals: torch.Tensor | None = None) -> Feed:
    """Chunks of such bounds: uniform where they are all of one size, but for the last."""
    size, count = chunks_of(bounds).rows_per_chunk, len(bounds) - 1
    where = {"pivot": pivot, "signals": signals, "device": None if signals is not None else "cuda"}
    arrival = ts.Arrival.uniform(size, count, **where) if size else ts.Arrival.ragged(bounds, **where)
    return Feed(arrival, whole)


class Run:
    """A case with its operands, of which some arrive; ``want``: the answer when all are there."""

    def __init__(self, case: HopperCase, rows_signals: torch.Tensor | None = None) -> None:
        self.case, (self.plan, self.layout) = case, case.plan(cuda_properties())
        assert "hopper" in self.plan.explain()
        self.operands = case.operands("cuda")
        self.coming: dict[str, Feed] = {}
        if case.rows:
            self.coming["arrival"] = feed_of(case.rows, case.pivot, self.operands["a"], rows_signals)
        if case.columns:
            self.coming["weight_arrival"] = feed_of(case.columns, case.pivot, self.operands["b"].mT)
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
            one.all()

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
                rest(*(chunk for chunk in rest.order if (other, chunk) != (name, late)))
            one.stream.synchronize()
            time.sleep(0.001)
            one(late)
            assert torch.equal(out, want), f"chunk {late} of {name}: other bits than with everything there"


@pytest.mark.parametrize("case", GATED, ids=by_name)
def test_a_chunk_that_never_comes_and_the_call_after_it(case):
    run = Run(case)
    want = run.whole()
    one = run.coming["arrival"]
    for missing in one.order:
        rows = one.rows(missing)
        run.again()
        one.but(missing)
        begin = time.perf_counter()
        out = run(deadline=0.03)
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        if rows.start == rows.stop:  # no tile reads it
            assert torch.equal(out, want)
            ts.check()
            continue
        assert 0.02 < took < 1.03
        assert out[rows].isnan().all()
        there = ~out.isnan()
        assert torch.equal(out[there], want[there])
        error = expired(r"within the deadline of 0\.03 s")
        assert (error.op, error.chunk, error.argument) == ("plan.run", missing, "arrival")
        assert 0 <= error.worker < run.plan.workers
        ts.check()
        run.again()
        run.feed_all()
        assert torch.equal(run(), want)


def stand_apart(run: Run, of: ApartCase) -> list[str]:
    """Move these rows apart, and leave NaN in their place. The list grows whenever they are brought back."""
    one, brought = run.coming["arrival"], []
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


def feed_others(one: Feed, of: ApartCase, but: int | None = None) -> None:
    """Signal all chunks but one, and copy those that do not stand apart."""
    for chunk in one.order:
        if chunk == but:
            continue
        if of.has(one.bounds[chunk]):
            with torch.cuda.stream(one.stream):
                one.arrival.signal(chunk)
        else:
            one(chunk)


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
    assert out[one.rows(missing)].isnan().all()
    there = ~out.isnan()
    assert there.any()
    assert torch.equal(out[there], want[there])
    expired()


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
    expired()
    assert lacking[one.rows(missing)].isnan().all()
    words.fill_(1)
    assert run().isnan().all(), "in quarantine"
    refused_in_quarantine()
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
    with captured() as graph:
        poison(one.tensor)
        one.stream.wait_stream(torch.cuda.current_stream())
        out = run()
        one.all()
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
    out, launch = case.output("cuda")[0], GemmLaunch(run.plan, run.layout)
    for _ in range(3):
        run.again()
        poison(out)
        check_gate(launch, run.coming["arrival"], run.operands["b"], out)
        assert torch.equal(out, run.want)


@launch_first
def test_between_launches_that_do_not_wait():
    """Such launches are chained: each begins before the one ahead has ended, and waits before it touches memory."""
    run = Run(GATED[1])
    run.whole()
    one, w = run.coming["arrival"], randn(run.case.n, run.case.n) / 20
    want = ts.matmul(run.want, w)
    x = randn(2048, 2048)
    for _ in range(30):
        run.again()
        ts.matmul(x, x)
        out = ts.matmul(run(), w)
        one.all()
        assert torch.equal(out, want)


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


def test_every_op_takes_it():
    """As a user calls it, the picked kernel is this one."""
    arrival = ts.Arrival.uniform(512, 4, 1, device="cuda")
    made = ts.plan(2048, 2048, 1024, dtype=BF16, device="cuda", arrival=arrival)
    assert made.backend == "hopper"
    assert "a tile waits for the chunks it reads" in made.explain()
    a, b = randn(2048, 1024), randn(1024, 2048)
    for chunk in range(4):
        arrival.signal(chunk)
    check(ts.matmul(a, b, arrival=arrival), Maths(a, b))
