"""Plans with forced tiles, run by the CPU backend: coverage, determinism, traces."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter

import pytest
import torch

import tilestream as ts
from error_rule import Maths, check, nans, rand
from streaming import Feeder, fed, from_pivot, late, no_thread_left, workers_at_work
from tilestream.kernels.cpu.gemm import GemmBody
from tilestream.launch.cpu.workers import Pool
from tilestream.plan.policy import cpu


@pytest.fixture(autouse=True)
def _short_k_steps(small_tiles):
    """K steps of 8, so that stream-K has something to cut."""
    assert cpu.BLOCK_K == 8


def run(plan: ts.Plan, a, b, **options):
    shape = (a.shape[0], a.shape[1], b.shape[2]) if a.dim() == 3 else (a.shape[0], b.shape[1])
    return plan.run(a, b, out=nans(*shape, dtype=a.dtype), **options)


@pytest.mark.parametrize("workers", [*range(1, 9), 20])
@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
def test_invariant_1_every_worker_count_computes_each_tile_once(schedule, workers, monkeypatch):
    done = Counter()
    real = GemmBody.compute

    def compute(self, item):
        done[item.tile, item.part] += 1
        real(self, item)

    monkeypatch.setattr(GemmBody, "compute", compute)
    a, b = rand(50, 70), rand(70, 33)
    plan = ts.plan(50, 33, 70, tile=(16, 16), schedule=schedule, workers=workers)
    for _ in range(3):
        done.clear()
        with no_thread_left():
            check(run(plan, a, b), Maths(a, b))
        assert set(done.values()) == {1}
        assert {(i.tile, i.part) for i in plan.schedule.items()} == set(done)


@pytest.mark.parametrize(("schedule", "items"), [("static", 12), ("dynamic", 12), ("stream_k", 108)])
def test_workers_that_would_find_no_item_are_not_started(schedule, items, monkeypatch):
    started, offer = [], Pool.offer

    def counted(self, *more):
        started.append(more)
        offer(self, *more)

    monkeypatch.setattr(Pool, "offer", counted)
    a, b = rand(50, 70), rand(70, 33)  # 12 tiles, 9 K steps
    with no_thread_left():
        check(ts.matmul(a, b, workers=4000, schedule=schedule), Maths(a, b))
    assert len(started) == items
    q = rand(1, 20, 2, 16)
    started.clear()
    assert ts.attention(q, q, q, workers=4000).isfinite().all()
    assert 0 < len(started) < 100


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("queues", [1, 2, 3, 7])
def test_queues(queues, workers):
    a, b = rand(3, 50, 20), rand(3, 20, 70)
    plan = ts.plan(50, 70, 20, batch=3, tile=(16, 16), queues=queues, workers=workers)
    check(run(plan, a, b), Maths(a, b))


@pytest.mark.parametrize("shares", [1, 2, 3, 4, 5, 6, 7, 11, 27, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_stream_k_has_the_same_bits_each_run(shares, dtype):
    a, b, bias = rand(50, 70, dtype=dtype), rand(70, 33, dtype=dtype), rand(33, dtype=dtype)
    plan = ts.plan(50, 33, 70, dtype=dtype, tile=(16, 16), shares=shares, workers=5)
    assert plan.schedule.remainder == 2
    first = run(plan, a, b, bias=bias, activation="silu")
    check(first, Maths(a, b, bias, activation="silu"))
    for _ in range(15):
        assert torch.equal(first, run(plan, a, b, bias=bias, activation="silu"))


@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
def test_the_bits_do_not_depend_on_who_was_slow(schedule, monkeypatch):
    a, b = rand(50, 70), rand(70, 33)
    plan = ts.plan(50, 33, 70, tile=(16, 16), schedule=schedule, workers=4)
    first = run(plan, a, b)
    chance, real = random.Random(0), GemmBody.compute

    def slow(self, item):
        time.sleep(chance.random() * 0.002)
        real(self, item)

    monkeypatch.setattr(GemmBody, "compute", slow)
    for _ in range(5):
        assert torch.equal(first, run(plan, a, b))


@pytest.mark.parametrize("tile", [(1, 1), (1, 33), (50, 1), (7, 5), (64, 64), (16, 33), (50, 16)], ids=str)
@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
def test_odd_tiles(tile, schedule):
    m, n, k = (9, 8, 20) if tile == (1, 1) else (50, 33, 70)
    a, b = rand(m, k), rand(k, n)
    check(run(ts.plan(m, n, k, tile=tile, schedule=schedule, workers=3), a, b), Maths(a, b))


def test_an_order_of_the_callers_own():
    a, b = rand(50, 20), rand(20, 70)
    backwards = [(3 - m, 4 - n) for m in range(4) for n in range(5)]
    for order in (backwards, lambda t, num_m, num_n: (t % num_m, t // num_m)):
        plan = ts.plan(50, 70, 20, tile=(16, 16), order=order, workers=1)
        with ts.trace.record() as recorder:
            check(run(plan, a, b), Maths(a, b))
        taken = [(span.pm, span.pn) for span in recorder.launches[0].spans]
        assert taken == (backwards if order is backwards else [(t % 4, t // 4) for t in range(20)])


# Arrival --------------------------------------------------------------------------------------------------------------

#: Bounds of 50 rows, in tiles of 16.
BOUNDS = {
    "aligned": (0, 16, 32, 48, 50),
    "inside tiles": (0, 5, 9, 14, 50),
    "straddling": (0, 15, 17, 33, 50),
    "empty chunks": (0, 0, 20, 20, 20, 50, 50),
    "one chunk": (0, 50),
}


def arriving(bounds, pivot):
    uniform = bounds == (0, 16, 32, 48, 50)
    return ts.Arrival.uniform(16, 4, pivot=pivot) if uniform else ts.Arrival.ragged(bounds, pivot=pivot)


def fed_plan(arrival, source, b, *, schedule, workers, batch=1, **how) -> torch.Tensor:
    """What a plan for this arrival makes of rows that come in while it runs; by default from the pivot on."""
    m, k = source.shape[-2:]
    made = {"batch": batch, "tile": (16, 16), "schedule": schedule, "workers": workers, "arrival": arrival}
    plan = ts.plan(m, b.shape[-1], k, **made)
    how = {"order": from_pivot(arrival), **how}
    return fed(lambda x: run(plan, x, b, arrival=arrival), arrival, source, **how)


@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
@pytest.mark.parametrize("chunks", BOUNDS)
def test_each_chunk_late_in_turn_all_pivots(chunks, schedule):
    # What has not arrived is NaN, so that a read before the gate shows in the answer.
    count = len(BOUNDS[chunks]) - 1
    source, b = rand(50, 24), rand(24, 40)
    maths = Maths(source, b)
    for pivot, workers in itertools.product(range(count), (1, 2, 3, 4)):
        for slow in range(count) if workers == 2 else (pivot,):
            arrival = arriving(BOUNDS[chunks], pivot)
            check(
                fed_plan(arrival, source, b, schedule=schedule, workers=workers, before=late(slow, 0.002)), maths
            )  # fmt: skip
    assert not workers_at_work()


@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_chunks_of_one_row(schedule, workers):
    source, b, arrival = rand(50, 24), rand(24, 40), ts.Arrival.uniform(1, 50, pivot=31)
    check(fed_plan(arrival, source, b, schedule=schedule, workers=workers, before=late(7)), Maths(source, b))


@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
def test_chunks_that_come_in_the_worst_order(schedule):
    source, b = rand(50, 24), rand(24, 40)
    for seed in range(10):
        order = torch.randperm(7, generator=torch.Generator().manual_seed(seed)).tolist()
        arrival, before = ts.Arrival.uniform(8, 7, pivot=seed % 7), late(order[-1], 0.002)
        answer = fed_plan(arrival, source, b, schedule=schedule, workers=3, order=order, before=before)
        check(answer, Maths(source, b))


@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
def test_invariant_2_chunks_of_several_batches_by_the_rows_they_bring(schedule):
    # 3 batches of 50 rows are 150 rows: chunks of 40 straddle the batches' ends.
    source, b = rand(3, 50, 24), rand(3, 24, 40)
    for pivot, slow in itertools.product(range(4), range(4)):
        arrival, before = ts.Arrival.uniform(40, 4, pivot=pivot), late(slow, 0.002)
        answer = fed_plan(arrival, source, b, schedule=schedule, workers=3, batch=3, order=range(4), before=before)
        check(answer, Maths(source, b))


def test_what_has_arrived_is_computed_while_the_last_chunk_is_missing():
    # The chunk that comes last in the raster is held back until every tile that does not read it is done.
    source, b, x = rand(64, 24), rand(24, 48), nans(64, 24)
    arrival = ts.Arrival.uniform(16, 4, pivot=1)
    plan = ts.plan(64, 48, 24, tile=(16, 16), schedule="dynamic", workers=3, arrival=arrival)
    seen = []
    with ts.trace.record() as recorder:

        def before(chunk):
            if chunk != 0:
                return
            end = time.monotonic() + 300
            while not (recorder.launches and recorder.launches[0].tiles_done == 9) and time.monotonic() < end:
                time.sleep(0.001)
            seen.append(recorder.launches[0].tiles_done)

        with Feeder(arrival, x, source, order=[1, 2, 3, 0], before=before):
            check(run(plan, x, b, arrival=arrival, deadline=600), Maths(source, b))
    assert seen == [9]


def test_a_plan_refuses_another_arrival_than_its_own():
    arrival = ts.Arrival.uniform(16, 4)
    plan = ts.plan(50, 40, 24, arrival=arrival)
    x, b = rand(50, 24), rand(24, 40)
    for other in (ts.Arrival.uniform(16, 4, pivot=1), ts.Arrival.uniform(25, 2), None):
        with pytest.raises(ValueError, match="arrival: not the chunks and pivot that the plan was made for"):
            plan.run(x, b, arrival=other)


def test_a_plan_refuses_an_arrival_that_others_copy(monkeypatch):
    arrival = ts.Arrival.uniform(16, 4)
    plan = ts.plan(50, 40, 24, arrival=arrival)
    monkeypatch.setattr(type(arrival._signals), "copied", 16)
    text = "arrival: copies offered to the kernel, in words of 16 bytes, and the plan was made for others' copies"
    with pytest.raises(ValueError, match=f"^{text}; make a plan with this arrival"):
        plan.run(rand(50, 24), rand(24, 40), arrival=arrival)


def test_a_plan_does_not_drop_gradients_silently():
    x, b = rand(20, 24).requires_grad_(), rand(24, 30)
    plan = ts.plan(20, 30, 24)
    with pytest.raises(RuntimeError, match=r"plan.run: has no autograd, .* or torch.no_grad\(\)"):
        plan.run(x, b)
    with torch.no_grad():
        check(plan.run(x, b), Maths(x, b))


# Trace ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
def test_spans_cover_each_tile_once(schedule):
    a, b = rand(50, 70), rand(70, 33)
    plan = ts.plan(50, 33, 70, tile=(16, 16), schedule=schedule, workers=5)
    with ts.trace.record() as recorder:
        run(plan, a, b)
        run(plan, a, b)
    assert len(recorder.launches) == 2
    for launch in recorder.launches:
        finished = Counter((s.batch, s.pm, s.pn) for s in launch.spans if s.kind in ("tile", "reduce"))
        assert finished == Counter((0, m, n) for m in range(4) for n in range(3))
        assert launch.tiles_done == launch.tiles == 12
        steps = Counter((s.pm, s.pn, k) for s in launch.spans if s.kind != "reduce" for k in range(s.k_begin, s.k_end))
        assert set(steps.values()) == {1}
        assert len(steps) == 12 * 9
        parts = [s for s in launch.spans if s.kind == "part"]
        assert bool(parts) == (schedule == "stream_k")
        assert all(0 <= s.worker < 5 and launch.begin <= s.begin <= s.end <= launch.end for s in launch.spans)
        assert all(s.chunk == -1 for s in launch.spans)
        assert launch.waited == 0
        assert not launch.arrivals
        for spans in launch.by_worker:
            assert all(one.end <= two.begin for one, two in itertools.pairwise(spans)), "a worker did two at once"


def test_waits_and_arrivals_are_recorded():
    source, b, x = rand(50, 24), rand(24, 40), nans(50, 24)
    arrival = ts.Arrival.uniform(16, 4)
    plan = ts.plan(50, 40, 24, tile=(16, 16), schedule="dynamic", workers=2, arrival=arrival)
    with ts.trace.record() as recorder, Feeder(arrival, x, source, before=late(2, 0.05)):
        run(plan, x, b, arrival=arrival)
    (launch,) = recorder.launches
    arrived = launch.arrivals[0]
    assert set(launch.arrivals) == {0}
    assert all(time is not None for time in arrived)
    waits = [s for s in launch.spans if s.kind == "wait"]
    assert {s.chunk for s in waits} == {0, 1, 2, 3}
    assert max(s.end - s.begin for s in waits if s.chunk == 2) > 0.02
    assert launch.waited >= max(s.end - s.begin for s in waits)
    for span in launch.spans:
        if span.kind == "tile":
            assert span.chunk == span.pm
            assert span.begin >= arrived[span.chunk], "a tile began before its chunk had arrived"
        elif span.kind == "wait":
            assert span.end >= arrived[span.chunk]


def test_nothing_is_recorded_unless_asked_for():
    a, b = rand(20, 24), rand(24, 30)
    with ts.trace.record() as outer:
        ts.matmul(a, b, workers=2)
        with ts.trace.record() as inner:
            ts.matmul(a, b, workers=2)
    ts.matmul(a, b, workers=2)
    assert len(outer.launches) == len(inner.launches) == 1


def test_an_inline_call_is_recorded_too():
    a, b = rand(3, 20, 24), rand(3, 24, 30)
    with ts.trace.record() as recorder:
        ts.matmul(a, b)
    (launch,) = recorder.launches
    assert launch.tiles_done == launch.tiles > 0
