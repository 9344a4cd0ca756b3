"""The gate in Triton's interpreter: what has come, what never comes, and the words that are left behind.

Programs run one after the other there, so all signals are set before the launch, or never.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from interpreted import DEVICE, KINDS, Words, awaited, captured, check_product, crossed, plan_of, voided

from device_order import check_gates, check_order
from error_rule import rand
from tilestream.core.chunks import Chunks
from tilestream.core.errors import ArrivalTimeout, ProducerStopped, TilestreamError
from tilestream.core.operands import Epilogue
from tilestream.plan.plan import Plan
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import Incoming
from tilestream.runtime.channel import channel
from tilestream.runtime.device_workspace import LINE

CPU = torch.device("cpu")


def expired(match: str | None = None) -> ArrivalTimeout:
    """The error of a launch whose deadline expired."""
    with pytest.raises(ArrivalTimeout, match=match) as caught:
        channel(CPU).check()
    return caught.value


def in_quarantine() -> None:
    with pytest.raises(TilestreamError, match=r"call arrival\.reset"):
        channel(CPU).check()


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


def check_missing(
    plan: Plan, a: torch.Tensor, b: torch.Tensor, want: torch.Tensor, missing: int, *, epoch: int = 1,
    deadline: float = 0.05, epilogue: Epilogue | None = None,
) -> tuple[torch.Tensor, ArrivalTimeout | None]:  # fmt: skip
    """Where tiles read the chunk that never comes, and the error. These tiles are NaN, and the others void or right."""
    cut = plan.problem.rows.chunks
    words = Words(cut.count, epoch).arrive(missing)
    out = voided(plan, a, b, epilogue, incoming=awaited(words, deadline=deadline))
    late, there = tiles_of(plan, out, missing), ~out.isnan()
    assert not (late & there).any(), "a tile of the missing chunk is a number"
    torch.testing.assert_close(out[there], want[there])
    begin, end = cut.range_of(missing)
    if begin == end:
        assert there.all(), "no tile waits for a chunk without rows"
        return late, None
    return late, expired("did not arrive within the deadline")


@crossed("chunks, kind", [*CHUNKS], KINDS)
def test_every_pivot_and_the_order_of_the_gate(chunks, kind):
    from tilestream.launch.launch import Probe

    a, b = rand(70, 40), rand(40, 33)
    for pivot in range(CHUNKS[chunks].count):
        plan = plan_of(70, 33, 40, kind, rows=CHUNKS[chunks], pivot=pivot)
        probe = Probe(plan.workers, 400, CPU)
        check_product(plan, a, b, probe=probe, incoming=awaited(Words(CHUNKS[chunks].count, 3).arrive()))
        logs = [probe.log(worker) for worker in range(plan.workers)]
        check_gates(plan.gate, plan.schedule, logs)
        check_order(plan.schedule, logs)


@crossed("chunks, kind", ["tiles", "odd", "ragged"], KINDS)
def test_a_chunk_that_never_comes(chunks, kind):
    cut, b = CHUNKS[chunks], rand(40, 33)
    for missing in range(cut.count):
        begin, end = cut.range_of(missing)
        source = rand(70, 40, seed=missing)
        a = source.clone()
        a[begin:end] = float("nan")
        plan = plan_of(70, 33, 40, kind, rows=cut, pivot=min(1, missing))
        want = torch.relu(source @ b)
        began = time.perf_counter()
        _, error = check_missing(plan, a, b, want, missing, epoch=7, epilogue=Epilogue(activation="relu"))
        if error is None:
            continue
        assert (error.op, error.chunk, error.argument) == ("matmul", missing, "arrival")
        assert "0.05 s" in str(error)
        assert 0 < error.waited <= time.perf_counter() - began
        assert 0 <= error.worker < 3
        assert error.item in {
            f"tile {i.tile} (row tile {i.pm}, column tile {i.pn})" for i in plan.schedule.items() if missing in
            {need.chunk for need in plan.gate.needs(i)}
        }  # fmt: skip
        check_product(plan, source, b, incoming=awaited(Words(cut.count, 8).arrive()))


@pytest.mark.parametrize("chunks", ["tiles", "ragged"])
def test_a_chunk_of_tiles_in_parts_that_never_comes(chunks):
    """A part that is not multiplied makes its whole tile NaN, whichever contributor adds the parts."""
    cut, source, b = CHUNKS[chunks], rand(70, 40), rand(40, 33)
    split = 0
    for missing in range(cut.count):
        a = source.clone()
        a[slice(*cut.range_of(missing))] = 7.0  # a number: a part that is computed all the same shows in the answer
        # The chunk is taken last, and the last tiles are those in parts.
        plan = plan_of(70, 33, 40, "stream_k", rows=cut, pivot=(missing + 1) % cut.count, workers=4)
        assert plan.schedule.slots, "no tile is in parts"
        late, _ = check_missing(plan, a, b, source @ b, missing, epoch=7)
        split += any(item.parts > 1 and late[item.pm * 16, item.pn * 16] for item in plan.schedule.items())
    assert split, "no tile of a missing chunk is in parts"


@pytest.mark.parametrize("chunks", ["tiles", "odd"])
def test_every_pivot_with_every_chunk_missing(chunks):
    cut, source, b = CHUNKS[chunks], rand(70, 16), rand(16, 16)
    for pivot in range(cut.count):
        plan = plan_of(70, 16, 16, rows=cut, pivot=pivot, workers=2)
        for missing in range(cut.count):
            a = source.clone()
            a[slice(*cut.range_of(missing))] = 7.0  # a number: a tile that is read too early shows in the answer
            check_missing(plan, a, b, source @ b, missing, deadline=1e-3)


@pytest.mark.parametrize("chunks", ["odd", "ragged"])
def test_in_arrival_order_a_missing_chunk_costs_no_tile_but_its_own(chunks):
    cut, a, b = CHUNKS[chunks], rand(70, 16), rand(16, 16)
    for missing in (0, cut.count - 1):
        plan = plan_of(70, 16, 16, rows=cut, pivot=missing, workers=2)
        assert plan.schedule.split == "chunks"
        out = voided(plan, a, b, incoming=awaited(Words(cut.count).arrive(missing)))
        assert torch.equal(out.isnan(), tiles_of(plan, out, missing))
        assert expired().chunk == missing


def use_a_clock(monkeypatch, paused=lambda seconds: None) -> None:
    """Launches have a clock of their own, on which a tenth of a second passes at each pause of a wait.

    ``paused`` is called then, with the seconds since the beginning. The machine's clock goes on while a test is held.
    """
    seconds = 1.0

    def sleep(_: float) -> None:
        nonlocal seconds
        seconds += 0.1
        paused(seconds - 1.0)

    clock = SimpleNamespace(perf_counter_ns=lambda: int(seconds * 1e9), sleep=sleep)
    monkeypatch.setattr("tilestream.kernels.device.clock.time", clock)
    # The launch's clock is a word that only rises, and other tests of this process have told it the real time.
    channel(CPU).claims[LINE] = 0


def test_a_launch_has_one_deadline_for_all_its_waits(monkeypatch):
    """Each wait is shorter than the deadline, and all together are longer: the launch is over (invariant 5)."""
    a, b = rand(32, 16), rand(16, 16)
    words, due = Words(2, 7), {0: 0.25, 1: 0.75}

    def signal(seconds: float) -> None:
        for chunk, at in due.items():
            if seconds >= at:
                words.words[chunk] = 7

    use_a_clock(monkeypatch, signal)
    plan = plan_of(32, 16, 16, "static", rows=Chunks.uniform(32, 16), workers=1)
    out = voided(plan, a, b, incoming=awaited(words, deadline=0.5))
    torch.testing.assert_close(out[:16], (a @ b)[:16])
    assert out[16:].isnan().all()
    error = expired()
    assert (error.chunk, 0.0 < error.waited < 0.5) == (1, True)


def test_a_record_counts_what_was_waited_for_several_queues(monkeypatch):
    use_a_clock(monkeypatch)
    a, b = rand(70, 16), rand(16, 16)
    plan = plan_of(70, 16, 16, rows=CHUNKS["tiles"], workers=1)
    assert voided(plan, a, b, incoming=awaited(Words(CHUNKS["tiles"].count), deadline=0.4)).isnan().all()
    error = expired()
    assert (error.chunk, error.waited >= 0.1) == (0, True)


def test_signals_of_an_earlier_epoch_have_not_arrived():
    a, b = rand(40, 20), rand(20, 20)
    plan = plan_of(40, 20, 20, rows=Chunks.uniform(40, 20))
    assert voided(plan, a, b, incoming=awaited(Words(2, 5).arrive(value=4))).isnan().all()
    expired()
    check_product(plan, a, b, incoming=awaited(Words(2, 5).arrive(value=6)))


@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_columns(kind):
    a, b = rand(3, 20, 24), rand(3, 24, 37)
    rows, columns = Chunks.uniform(60, 13), Chunks((0, 16, 16, 37))
    for pivot in range(5):
        plan = plan_of(20, 37, 24, kind, batch=3, rows=rows, pivot=pivot)
        check_product(plan, a, b, incoming=awaited(Words(5).arrive()))
    plan = plan_of(20, 37, 24, kind, batch=3, columns=columns)
    out = voided(plan, a, b, incoming=awaited(columns=Words(3).arrive(2)))
    assert out[tiles_of(plan, out, 2, operand=1)].isnan().all()
    assert "batch " in expired("weight_arrival's chunk 2").item
    both = replace(plan.problem, rows=Incoming(rows))
    plan = plan_problem.__wrapped__(both, 3, kind, device=DEVICE)
    check_product(plan, a, b, incoming=awaited(Words(5).arrive(), Words(3).arrive()))


def test_shared_rows():
    a, b = rand(1, 20, 24).expand(3, -1, -1), rand(3, 24, 17)
    plan = plan_of(20, 17, 24, batch=3, rows=Chunks.uniform(20, 7), shared_rows=True)
    check_product(plan, a, b, incoming=awaited(Words(3).arrive()))


@pytest.mark.parametrize("kind", KINDS)
def test_callers_words_are_zeroed_once_all_were_seen(kind):
    a, b = rand(40, 20), rand(20, 20)
    plan = plan_of(40, 20, 20, kind, rows=Chunks((0, 20, 20, 40)))
    for value in (1, -5):
        words = Words(3, 0).arrive(value=value)
        check_product(plan, a, b, incoming=awaited(words))
        assert not words.words.any()
        assert not words.quarantine.any()
    # A chunk without rows: no tile waits for it, but the words may not be zeroed before it has come.
    words = Words(3, 0).arrive(1)
    check_product(plan, a, b, incoming=awaited(words))
    assert words.words.tolist() == [1, 0, 1]
    assert expired("no tile reads").chunk == 1
    # What is left of them may be of the launch that missed a chunk.
    assert voided(plan, a, b, incoming=awaited(words.arrive())).isnan().all()
    in_quarantine()
    words.quarantine.zero_()
    check_product(plan, a, b, incoming=awaited(words))
    assert not words.words.any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_launch_restores_its_words_and_quarantines_its_signals(kind, monkeypatch):
    a, b = rand(40, 33), rand(33, 40)
    plan = plan_of(40, 40, 33, kind, rows=Chunks((0, 20, 20, 40)))
    own, words = captured(monkeypatch, plan), Words(3, 0)
    for _ in range(3):
        check_product(plan, a, b, incoming=awaited(words.arrive()))
        assert not words.words.any()
        assert not own.counters.any()
    voided(plan, a, b, incoming=awaited(words.arrive(0)))
    assert words.words.tolist() == [0, 1, 1], "left as they are"
    assert not own.counters.any()
    assert own.counts is None or not own.counts.any()
    expired()
    for _ in range(2):  # what is left behind must not be taken for news
        assert voided(plan, a, b, incoming=awaited(words.arrive())).isnan().all()
        assert words.words.all()
        in_quarantine()
    words.quarantine.zero_()
    check_product(plan, a, b, incoming=awaited(words.arrive()))


def test_a_failed_producer_ends_the_launch_at_once():
    a, b = rand(40, 20), rand(20, 20)
    plan, words = plan_of(40, 20, 20, rows=Chunks.uniform(40, 20)), Words(2, 4).arrive()
    words.words[1] = -4
    out = voided(plan, a, b, incoming=awaited(words, deadline=1000.0))
    assert out[:16].isfinite().all() or out.isnan().all()
    assert out[20:].isnan().all()
    with pytest.raises(ProducerStopped, match="its exception went with its Arrival"):  # these signals have no Arrival
        channel(CPU).check()


def test_more_expiries_than_the_ring_holds():
    from tilestream.core.error_record import RECORDS

    a, b = rand(16, 16), rand(16, 16)
    plan = plan_of(16, 16, 16, rows=Chunks.uniform(16, 16), workers=1)
    for _ in range(RECORDS + 3):
        voided(plan, a, b, incoming=awaited(Words(1), deadline=1e-6))
    raised = 0
    while channel(CPU).pending:
        with nullcontext() if raised else pytest.warns(RuntimeWarning, match="lost reports .*: 3"):
            expired()
        raised += 1
        assert raised <= RECORDS
    assert raised == RECORDS
    check_product(plan, a, b, incoming=awaited(Words(1).arrive()))
