"""The quick sweep holds; what is swept is what is claimed."""

from __future__ import annotations

import pytest

from tilestream_tools import verify
from tilestream_tools.verify import sweep
from tilestream_tools.verify.attention import AttentionCase
from tilestream_tools.verify.copies import CopyCase
from tilestream_tools.verify.gather import GatherCase
from tilestream_tools.verify.one_shot import OneShotCase
from tilestream_tools.verify.product import ProductCase
from tilestream_tools.verify.publish import PublishCase
from tilestream_tools.verify.replay import ReplayCase
from tilestream_tools.verify.ring import RingCase
from tilestream_tools.verify.sums import SumCase
from tilestream_tools.verify.workers import WorkersCase

#: Of these models the quick level takes long: it is swept in so many parts, of which one is among the quick tests.
PARTS = {"workers": 3, "ring": 3, "product": 3}
SWEPT = [
    pytest.param(model, part, marks=pytest.mark.slow if part else ())
    for model in verify.MODELS
    for part in range(PARTS.get(model, 1))
]


@pytest.mark.parametrize(("model", "part"), SWEPT)
def test_quick_sweep_finds_no_violation(model, part, monkeypatch):
    cases = verify.configurations(model, "quick")[part :: PARTS.get(model, 1)]
    monkeypatch.setattr("tilestream_tools.verify.report.configurations", lambda model, level: cases)
    seen = []
    report = verify.run("quick", lambda result, done, total: seen.append((done, total)), models=[model])
    assert report.ok, str(report)
    assert len(report.results) == len(cases)
    assert seen[-1] == (len(cases), len(cases))
    assert all(result.states > 1 for result in report.results)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_full_sweep_finds_no_violation():
    report = verify.run("full", jobs=2)
    assert report.ok, str(report)


def test_jobs_explore_the_same(monkeypatch):
    few = {"workers": [sweep.matmul("dynamic", 2, n, bounds=sweep.LAYOUTS[n][0]) for n in (1, 2, 3)]}
    monkeypatch.setattr("tilestream_tools.verify.report.configurations", lambda model, level: few[model])
    alone = verify.run("quick", models=["workers"])
    shared = verify.run("quick", models=["workers"], jobs=2)
    assert [(r.configuration, r.states) for r in alone.results] == [(r.configuration, r.states) for r in shared.results]


def test_full_workers_reach_four_workers_eight_items_three_chunks_and_all_pivots():
    cases = [c for c in sweep.workers("full") if c.schedule.workers == 4 and not c.running and c.gate is not None]
    seen = {
        (c.schedule.kind, c.schedule.queues, c.schedule.split, c.schedule.raster.first)
        for c in cases
        if len(list(c.schedule.items())) >= 8 and (c.gate.rows or c.gate.columns).count >= 3
    }
    for kind, queues, split in (
        ("static", 1, "items"), ("stream_k", 1, "items"), ("dynamic", 1, "items"),
        *(("dynamic", q, s) for q in (2, 3) for s in ("items", "columns", "rows")),
    ):  # fmt: skip
        pivots = {first for k, q, s, first in seen if (k, q, s) == (kind, queues, split)}
        assert len(pivots) >= (3 if split != "rows" else 1), (kind, queues, split, pivots)


def test_drained_launches_are_swept_with_every_schedule_pivot_and_sort_of_chunks():
    cases = [c for c in sweep.workers("quick") if c.drain != "leave"]
    gated = [c for c in cases if c.gate is not None]
    assert {(c.drain, c.schedule.kind, c.quarantined) for c in gated} >= {
        (drain, kind, found)
        for drain in ("poison", "reset")
        for kind in ("static", "dynamic", "stream_k")
        for found in (False, True)
    }
    rows = [c.gate.rows for c in gated if c.gate.rows is not None]
    assert any(len(set(chunks.bounds)) < len(chunks.bounds) for chunks in rows), "chunks without rows"
    assert {c.schedule.raster.first for c in gated} == {0, 1, 2}
    assert {c.schedule.workers for c in cases} == {1, 2, 3, 4}
    assert any(c.gate.rows is not None and c.gate.columns is not None for c in gated)
    assert any(c.schedule.slots and c.drain == "reset" for c in gated)
    assert all(not c.running for c in cases if c.drain == "reset"), "the last one out is the last of all workers"
    assert any(c.running for c in cases)
    full = [c for c in sweep.workers("full") if c.drain == "reset" and c.schedule.workers == 4 and c.gate is not None]
    assert {c.schedule.kind for c in full} == {"static", "dynamic", "stream_k"}


def test_full_rings_reach_every_depth_way_of_consuming_and_k_count():
    seen = {(c.ring.depth, c.ring.consumers) for c in sweep.rings("full") if c.k_counts == (1, 2, 3, 4, 5)}
    assert seen == {(d, who) for d in (1, 2, 3, 4) for who in ("single", "cooperative", "ping_pong")}


@pytest.mark.parametrize("level", ["quick", "full"])
def test_rings_store_every_way_that_kernels_do(level):
    cases = list(sweep.rings(level))
    assert all(c.ring.promoted for c in cases if c.ring.depth == 1), "one stage needs the promoted form"
    for who in ("single", "cooperative", "ping_pong"):
        own = [c for c in cases if c.ring.consumers == who]
        assert {c.ring.buffers for c in own if c.ring.strips and c.split} == {1, 2}
        assert any(c.ring.strips % 2 and c.ring.buffers == 2 for c in own if c.split)
        assert {c.ring.promoted for c in own if c.ring.strips} == {False, True}
        assert any(c.ring.promoted and c.ring.depth > 1 for c in own)


def test_products_are_of_two_workers_and_two_k_steps_or_three_parts():
    cases = list(sweep.products("full"))
    assert {c.workers.schedule.kind for c in cases} == {"static", "dynamic", "stream_k"}
    schedules = [c.workers.schedule for c in cases if c.workers.schedule.split != "chunks"]  # of one step there
    assert all(s.grid.k_steps == 2 + (s.num_shares == 3) for s in schedules)
    assert len(cases) - 1 <= len(schedules) < len(cases)
    assert {c.ring.consumers for c in cases if c.workers.fixup} == {"single", "ping_pong"}
    assert sum(c.workers.schedule.workers == 2 for c in cases) >= len(cases) - 1


def test_sizes_grow():
    for model, kind in (
        ("workers", WorkersCase),
        ("ring", RingCase),
        ("product", ProductCase),
        ("attention", AttentionCase),
        ("gather", GatherCase),
        ("publish", PublishCase),
        ("sums", SumCase),
        ("reduce", OneShotCase),
        ("replay", ReplayCase),
        ("copies", CopyCase),
    ):
        cases = verify.configurations(model, "quick")
        assert all(isinstance(case, kind) for case in cases)
        assert len(set(map(str, cases))) > 0.9 * len(cases), "mostly different"
    counts = [c.schedule.workers for c in sweep.workers("quick")]
    assert counts[0] == 1
    assert counts[-1] == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: verify.run("slow"), "level='slow'; it is one of quick, full"),
        (
            lambda: verify.run("quick", models=["rings"]),
            "model='rings'; it is one of workers, ring, product, shared, attention, gather, publish, sums, copies, "
            "reduce, replay",
        ),
        (lambda: verify.run("quick", jobs=0), "jobs=0"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
