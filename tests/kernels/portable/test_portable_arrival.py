"""The gate in Triton's interpreter: what has come, what never comes, and the words that are left behind.

Programs run one after the other there, so all signals are set before the launch, or never.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from interpreted import DEVICE, KINDS, Words, crossed, nan_like, run, small_tiles

from device_order import check_gates, check_order
from error_rule import Maths, check, rand
from tilestream.core.chunks import Chunks
from tilestream.core.errors import ArrivalTimeout, ProducerStopped, TilestreamError
from tilestream.core.operands import Epilogue
from tilestream.plan.plan import Plan
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import Incoming as Chunked
from tilestream.plan.problem import Problem
from tilestream.runtime.channel import channel
from tilestream.runtime.device_workspace import LINE, DeviceWorkspace, captured_words

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    small_tiles(monkeypatch)


@pytest.fixture(autouse=True)
def _nothing_pending():
    yield
    assert not channel(CPU).pending


def plan_for(
    m: int, n: int, k: int, kind: str, *, batch: int = 1, rows=None, columns=None, pivot=0, workers=3, **how
) -> Plan:
    problem = Problem(
        m, n, k, batch, "float32", "float32",
        None if rows is None else Chunked(rows, pivot), None if columns is None else Chunked(columns, pivot), **how,
    )  # fmt: skip
    return plan_problem.__wrapped__(problem, workers, kind, device=DEVICE)


def incoming(rows=None, columns=None, deadline=0.05):
    from tilestream.arrival.flat import Awaited

    return Awaited(rows, columns, deadline, "matmul")


def tiles_of(plan: Plan, out: torch.Tensor, chunk: int, operand: int = 0) -> torch.Tensor:
    """Where ``out`` reads chunk ``chunk``, by tiles."""
    gate = plan.gate
    mask = torch.zeros_like(out, dtype=torch.bool).view(plan.problem.batch, plan.problem.m, plan.problem.n)
    for item in plan.schedule.items():
        if any(wait.chunk == chunk and wait.operand == operand for wait in gate.needs(item)):
            block = plan.tile
            mask[item.batch, item.pm * block[0] :, item.pn * block[1] :][: block[0], : block[1]] = True
    return mask.view(out.shape)


CHUNKS = {
    "tiles": Chunks.uniform(70, 16),
    "odd": Chunks.uniform(70, 13),
    "wide": Chunks.uniform(70, 48),
    "ragged": Chunks((0, 5, 5, 37, 38, 70)),
    "empty ends": Chunks((0, 0, 33, 70, 70)),
}


@crossed("chunks, kind", [*CHUNKS], KINDS)
def test_every_pivot_and_the_order_of_the_gate(chunks, kind):
    from tilestream.launch.launch import Probe

    a, b = rand(70, 40), rand(40, 33)
    for pivot in range(CHUNKS[chunks].count):
        plan = plan_for(70, 33, 40, kind, rows=CHUNKS[chunks], pivot=pivot)
        probe, out = Probe(plan.workers, 400, CPU), nan_like(a, b)
        run(plan, a, b, out, probe=probe, incoming=incoming(Words(CHUNKS[chunks].count, 3).arrive()))
        check(out, Maths(a, b))
        logs = [probe.log(worker) for worker in range(plan.workers)]
        check_gates(plan.gate, plan.schedule, logs)
        check_order(plan.schedule, logs)


@crossed("chunks, kind", ["tiles", "odd", "ragged"], KINDS)
def test_a_chunk_that_never_comes(chunks, kind):
    cut = CHUNKS[chunks]
    b = rand(40, 33)
    for missing in range(cut.count):
        begin, end = cut.range_of(missing)
        source = rand(70, 40, seed=missing)
        a = source.clone()
        a[begin:end] = float("nan")
        plan = plan_for(70, 33, 40, kind, rows=cut, pivot=min(1, missing))
        out, words = torch.zeros(70, 33), Words(cut.count, 7).arrive(missing)
        run(plan, a, b, out, Epilogue(activation="relu"), incoming=incoming(words))
        late = tiles_of(plan, out, missing)
        assert out[late].isnan().all(), "a tile of the missing chunk is a number"
        there = ~out.isnan()
        want = torch.relu(source @ b)
        torch.testing.assert_close(out[there], want[there])
        if begin == end:
            assert there.all(), "nobody waits for a chunk without rows"
            continue
        with pytest.raises(ArrivalTimeout, match=r"did not arrive within the deadline of 0\.05 s") as caught:
            channel(CPU).check()
        error = caught.value
        assert (error.op, error.chunk, error.argument) == ("matmul", missing, "arrival")
        assert 0 < error.waited < 5
        assert 0 <= error.worker < 3
        assert error.item in {
            f"tile {i.tile} (row tile {i.pm}, column tile {i.pn})" for i in plan.schedule.items() if missing in
            {need.chunk for need in plan.gate.needs(i)}
        }  # fmt: skip
        # The next call on the same words is right.
        words.arrive(value=8)
        run(plan, source, b, out, incoming=incoming(replace_epoch(words, 8)))
        check(out, Maths(source, b))


@pytest.mark.parametrize("chunks", ["tiles", "ragged"])
def test_a_chunk_of_tiles_in_parts_that_never_comes(chunks):
    """A part that is not multiplied makes its whole tile NaN, whichever contributor adds the parts."""
    cut = CHUNKS[chunks]
    source, b = rand(70, 40), rand(40, 33)
    split = 0
    for missing in range(cut.count):
        begin, end = cut.range_of(missing)
        a = source.clone()
        a[begin:end] = 7.0  # a number: a part that is computed all the same must be found by the answer
        # The chunk is taken last, and the last tiles are those in parts.
        plan = plan_for(70, 33, 40, "stream_k", rows=cut, pivot=(missing + 1) % cut.count, workers=4)
        assert plan.schedule.slots, "no tile is in parts"
        out = torch.zeros(70, 33)
        run(plan, a, b, out, incoming=incoming(Words(cut.count, 7).arrive(missing)))
        late = tiles_of(plan, out, missing)
        assert out[late].isnan().all(), "a tile of the missing chunk is a number"
        split += any(item.parts > 1 and late[item.pm * 16, item.pn * 16] for item in plan.schedule.items())
        there = ~out.isnan()
        torch.testing.assert_close(out[there], (source @ b)[there])
        if begin < end:
            with pytest.raises(ArrivalTimeout):
                channel(CPU).check()
    assert split, "no tile of a missing chunk is in parts"


def test_a_launch_has_one_deadline_for_all_its_waits(monkeypatch):
    """Each wait is shorter than the deadline, and all together are longer: the launch is over (invariant 5)."""
    a, b = rand(32, 16), rand(16, 16)
    words, due = Words(2, 7), {0: 0.25, 1: 0.75}
    seconds = 1.0

    def sleep(_: float) -> None:
        nonlocal seconds
        seconds += 0.1
        for chunk, at in due.items():
            if seconds - 1.0 >= at:
                words.words[chunk] = 7

    clock = SimpleNamespace(perf_counter_ns=lambda: int(seconds * 1e9), sleep=sleep)
    monkeypatch.setattr("tilestream.kernels.device.clock.time", clock)
    # The launch's clock is a word that only rises, and other tests of this process have told it the real time.
    channel(CPU).claims[LINE] = 0
    plan, out = plan_for(32, 16, 16, "static", rows=Chunks.uniform(32, 16), workers=1), torch.zeros(32, 16)
    run(plan, a, b, out, incoming=incoming(words, deadline=0.5))
    torch.testing.assert_close(out[:16], (a @ b)[:16])
    assert out[16:].isnan().all()
    with pytest.raises(ArrivalTimeout) as caught:
        channel(CPU).check()
    assert (caught.value.chunk, 0.0 < caught.value.waited < 0.5) == (1, True)


@pytest.mark.parametrize("chunks", ["odd", "ragged"])
def test_in_arrival_order_a_missing_chunk_costs_no_tile_but_its_own(chunks):
    cut = CHUNKS[chunks]
    source, b = rand(70, 16), rand(16, 16)
    for missing in (0, cut.count - 1):
        plan = plan_for(70, 16, 16, "dynamic", rows=cut, pivot=missing, workers=2)
        assert plan.schedule.split == "chunks"
        out = torch.zeros(70, 16)
        run(plan, source, b, out, incoming=incoming(Words(cut.count).arrive(missing)))
        late = tiles_of(plan, out, missing)
        assert out[late].isnan().all()
        torch.testing.assert_close(out[~late], (source @ b)[~late])
        with pytest.raises(ArrivalTimeout) as caught:
            channel(CPU).check()
        assert caught.value.chunk == missing


def test_a_record_counts_what_was_waited_for_several_queues():
    a, b = rand(70, 16), rand(16, 16)
    plan = plan_for(70, 16, 16, "dynamic", rows=CHUNKS["tiles"], workers=1)
    out = torch.zeros(70, 16)
    run(plan, a, b, out, incoming=incoming(Words(CHUNKS["tiles"].count), deadline=0.4))
    assert out.isnan().all()
    with pytest.raises(ArrivalTimeout) as caught:
        channel(CPU).check()
    assert (caught.value.chunk, caught.value.waited >= 0.1) == (0, True)


@pytest.mark.parametrize("chunks", ["tiles", "odd"])
def test_every_pivot_with_every_chunk_missing(chunks):
    cut = CHUNKS[chunks]
    source, b = rand(70, 16), rand(16, 16)
    want = source @ b
    for pivot in range(cut.count):
        plan = plan_for(70, 16, 16, "dynamic", rows=cut, pivot=pivot, workers=2)
        for missing in range(cut.count):
            begin, end = cut.range_of(missing)
            a = source.clone()
            a[begin:end] = 7.0  # a number: who reads too early must be found by the answer
            out = torch.zeros(70, 16)
            run(plan, a, b, out, incoming=incoming(Words(cut.count).arrive(missing), deadline=1e-3))
            assert out[tiles_of(plan, out, missing)].isnan().all(), (pivot, missing)
            there = ~out.isnan()
            torch.testing.assert_close(out[there], want[there])
            with pytest.raises(ArrivalTimeout):
                channel(CPU).check()


def replace_epoch(words: Words, epoch: int) -> Words:
    words.epoch = epoch
    return words


def test_signals_of_an_earlier_epoch_have_not_arrived():
    a, b = rand(40, 20), rand(20, 20)
    plan = plan_for(40, 20, 20, "dynamic", rows=Chunks.uniform(40, 20))
    out = nan_like(a, b)
    run(plan, a, b, out, incoming=incoming(Words(2, 5).arrive(value=4)))
    assert out.isnan().all()
    with pytest.raises(ArrivalTimeout):
        channel(CPU).check()
    run(plan, a, b, out, incoming=incoming(Words(2, 5).arrive(value=6)))
    check(out, Maths(a, b))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_columns(kind):
    a, b = rand(3, 20, 24), rand(3, 24, 37)
    rows, columns = Chunks.uniform(60, 13), Chunks((0, 16, 16, 37))
    for pivot in range(5):
        plan = plan_for(20, 37, 24, kind, batch=3, rows=rows, pivot=pivot)
        out = nan_like(a, b)
        run(plan, a, b, out, incoming=incoming(Words(5).arrive()))
        check(out, Maths(a, b))
    plan = plan_for(20, 37, 24, kind, batch=3, columns=columns)
    out = torch.zeros(3, 20, 37)
    run(plan, a, b, out, incoming=incoming(columns=Words(3).arrive(2)))
    late = tiles_of(plan, out, 2, operand=1)
    assert out[late].isnan().all()
    with pytest.raises(ArrivalTimeout, match="weight_arrival's chunk 2") as caught:
        channel(CPU).check()
    assert "batch " in caught.value.item
    both = replace(plan.problem, rows=Chunked(rows))
    plan = plan_problem.__wrapped__(both, 3, kind, device=DEVICE)
    run(plan, a, b, out, incoming=incoming(Words(5).arrive(), Words(3).arrive()))
    check(out, Maths(a, b))


def test_shared_rows():
    a, b = rand(1, 20, 24).expand(3, -1, -1), rand(3, 24, 17)
    plan = plan_for(20, 17, 24, "dynamic", batch=3, rows=Chunks.uniform(20, 7), shared_rows=True)
    out = nan_like(a, b)
    run(plan, a, b, out, incoming=incoming(Words(3).arrive()))
    check(out, Maths(a, b))


@pytest.mark.parametrize("kind", KINDS)
def test_callers_words_are_zeroed_once_all_were_seen(kind):
    a, b = rand(40, 20), rand(20, 20)
    chunks = Chunks((0, 20, 20, 40))
    plan = plan_for(40, 20, 20, kind, rows=chunks)
    for value in (1, -5):
        out, words = nan_like(a, b), Words(3, 0).arrive(value=value)
        run(plan, a, b, out, incoming=incoming(words))
        check(out, Maths(a, b))
        assert not words.words.any()
        assert not words.quarantine.any()
    # A chunk without rows: no tile waits for it, but nobody may zero the words before it has come.
    out, words = nan_like(a, b), Words(3, 0).arrive(1)
    run(plan, a, b, out, incoming=incoming(words))
    check(out, Maths(a, b))
    assert words.words.tolist() == [1, 0, 1]
    with pytest.raises(ArrivalTimeout, match="no tile reads") as caught:
        channel(CPU).check()
    assert caught.value.chunk == 1
    # What is left of them may be of the launch that missed a chunk.
    run(plan, a, b, out, incoming=incoming(words.arrive()))
    assert out.isnan().all()
    with pytest.raises(TilestreamError, match=r"call arrival\.reset"):
        channel(CPU).check()
    words.quarantine.zero_()
    run(plan, a, b, out, incoming=incoming(words))
    check(out, Maths(a, b))
    assert not words.words.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_launch_restores_its_words_and_quarantines_its_signals(kind, monkeypatch):
    a, b = rand(40, 33), rand(33, 40)
    plan = plan_for(40, 40, 33, kind, rows=Chunks((0, 20, 20, 40)))
    own = captured_words(CPU, plan.schedule, plan.block)
    space = DeviceWorkspace(CPU)
    monkeypatch.setattr(space, "open", lambda *_: own)
    monkeypatch.setattr("tilestream.launch.launch.device_workspace", lambda *_: space)
    words, out = Words(3, 0), nan_like(a, b)
    for _ in range(3):
        out.fill_(float("nan"))
        run(plan, a, b, out, incoming=incoming(words.arrive()))
        check(out, Maths(a, b))
        assert not words.words.any()
        assert not own.counters.any()
    run(plan, a, b, out, incoming=incoming(words.arrive(0)))
    assert words.words.tolist() == [0, 1, 1], "left as they are"
    assert not own.counters.any()
    assert own.counts is None or not own.counts.any()
    with pytest.raises(ArrivalTimeout):
        channel(CPU).check()
    for _ in range(2):  # what is left behind must not be taken for news
        run(plan, a, b, out, incoming=incoming(words.arrive()))
        assert out.isnan().all()
        assert words.words.all()
        with pytest.raises(TilestreamError, match=r"call arrival\.reset"):
            channel(CPU).check()
    words.quarantine.zero_()
    run(plan, a, b, out, incoming=incoming(words.arrive()))
    check(out, Maths(a, b))


def test_a_failed_producer_ends_the_launch_at_once():
    a, b = rand(40, 20), rand(20, 20)
    plan = plan_for(40, 20, 20, "dynamic", rows=Chunks.uniform(40, 20))
    words, out = Words(2, 4).arrive(), nan_like(a, b)
    words.words[1] = -4
    run(plan, a, b, out, incoming=incoming(words, deadline=1000.0))
    assert out[:16].isfinite().all() or out.isnan().all()
    assert out[20:].isnan().all()
    with pytest.raises(ProducerStopped, match="its exception went with its Arrival"):  # nobody knows these signals
        channel(CPU).check()


def test_more_expiries_than_the_ring_holds():
    from tilestream.core.error_record import RECORDS

    a, b = rand(16, 16), rand(16, 16)
    plan = plan_for(16, 16, 16, "dynamic", rows=Chunks.uniform(16, 16), workers=1)
    for _ in range(RECORDS + 3):
        run(plan, a, b, nan_like(a, b), incoming=incoming(Words(1), deadline=1e-6))
    raised = 0
    while channel(CPU).pending:
        with pytest.raises(ArrivalTimeout):
            channel(CPU).check()
        raised += 1
        assert raised <= RECORDS
    assert raised == RECORDS
    out = nan_like(a, b)
    run(plan, a, b, out, incoming=incoming(Words(1).arrive()))
    check(out, Maths(a, b))
