"""The quick sweep holds; what is swept is what is claimed."""

from __future__ import annotations

import inspect

import pytest

from tilestream.core.exchange import CLUSTERS
from tilestream_tools import verify
from tilestream_tools.cli import verify as command
from tilestream_tools.verify import sweep
from tilestream_tools.verify.attention import AttentionCase
from tilestream_tools.verify.cluster import ClusterCase
from tilestream_tools.verify.copies import CopyCase
from tilestream_tools.verify.dispatch import DispatchCase
from tilestream_tools.verify.experts import ExpertsCase
from tilestream_tools.verify.gather import GatherCase
from tilestream_tools.verify.one_shot import OneShotCase
from tilestream_tools.verify.pair import PairCase
from tilestream_tools.verify.product import ProductCase
from tilestream_tools.verify.publish import PublishCase
from tilestream_tools.verify.replay import ReplayCase
from tilestream_tools.verify.ring import RingCase
from tilestream_tools.verify.sources import SourcesCase
from tilestream_tools.verify.sums import SumCase
from tilestream_tools.verify.workers import WorkersCase

#: Of these models the quick level takes long: it is swept in so many parts, of which one is among the quick tests.
PARTS = {"workers": 3, "ring": 3, "product": 3}
#: States that a model's quick level has at most, of some 45,000 a second: `tilestream verify --quick` says the time.
MOST_STATES = {
    "workers": 720_000, "ring": 1_450_000, "product": 740_000, "shared": 10_000, "attention": 670_000,
    "gather": 110_000, "publish": 10_000, "sums": 20_000, "copies": 120_000, "reduce": 20_000,
    "replay": 20_000, "dispatch": 40_000, "experts": 60_000, "sources": 240_000, "cluster": 20_000,
    "pair": 20_000,
}  # fmt: skip
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
    assert report.states <= MOST_STATES[model], "it takes longer than the command line says"


def test_the_command_line_says_how_long_that_many_states_take():
    """At the rate of one core of an AMD EPYC that other processes share: 4,126,240 states in 239 s of CPU time."""
    said = inspect.signature(command.verify).parameters["quick"].annotation.__metadata__[0].help
    assert said == "Check a subset, in three to four minutes of CPU time."
    assert 180 <= sum(MOST_STATES.values()) / (4_126_240 / 239) <= 250


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
    triple = [c.ring for level in ("quick", "full") for c in sweep.rings(level) if c.ring.consumers == "triple"]
    assert {ring.depth for ring in triple} == {1, 2, 3}
    assert {ring.strips for ring in triple} == {0, 1, 2, 3}
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


def ends(c):
    """Whether a kernel of a case may expire, and whether a rank may be lost."""
    return bool(c.expires), c.lost is not None


def awaited(c):
    return c.gate is not None and c.gate.rows is not None, c.gate is not None and c.gate.columns is not None


def first_batch(c):
    """The schedule's kind and its first batch, where rows of three batches arrive."""
    return (c.schedule.kind, c.schedule.first_batch) if awaited(c)[0] and c.schedule.grid.batch == 3 else None


def has_no_k(c):
    """Whether the last share of a cluster is past the end of K."""
    return c.cluster.k_steps <= (c.cluster.size - 1) * c.cluster.steps


KINDS = ("static", "dynamic", "stream_k")
ONE, BOTH = (False, True), {(False, False), (True, False), (True, True)}
#: Of each model: something of a case, and what of it the quick level must contain.
CONTAINED = [
    ("workers", lambda c: c.schedule.kind, {*KINDS}),
    ("workers", lambda c: c.schedule.split, {"items", "columns", "rows", "chunks", "strides"}),
    ("workers", lambda c: c.schedule.raster.order, {"row_major", "grouped", "chunk_major", "longest_first", "table"}),
    ("workers", lambda c: c.drain, {"leave", "poison", "reset"}),
    ("workers", awaited, {(False, False), (True, False), (False, True), (True, True)}),
    ("workers", first_batch, {(kind, first) for kind in KINDS for first in (1, 2)}),
    ("gather", lambda c: c.world, {2, 3}),
    ("gather", lambda c: c.epochs, {1, 2, 3, 4, 5}),  # more than there are slots
    ("gather", lambda c: c.streams, {1, 2}),
    ("gather", lambda c: frozenset(map(c.way_of, range(1, c.epochs + 1))), {
        frozenset({"push"}), frozenset({"pull"}), frozenset({"push", "pull"})
    }),
    ("gather", lambda c: (c.strided, c.local, c.brought), {
        (False, False, False), (True, False, False), (False, True, False), (False, False, True)
    }),
    ("gather", lambda c: c.chunks, {(1,), (2,), (2, 1)}),
    ("gather", ends, BOTH),
    ("sums", lambda c: c.world, {2, 3}),
    ("sums", lambda c: c.epochs, {1, 2, 3}),
    ("sums", lambda c: c.streams, {1, 2}),
    ("sums", lambda c: c.chunks, {1, 2}),
    ("sums", ends, BOTH),
    ("reduce", lambda c: c.world, {2, 3}),
    ("reduce", lambda c: c.epochs, {1, 2, 3}),
    ("reduce", ends, BOTH),
    ("publish", lambda c: (c.block, c.per_chunk), {(1, 2), (2, 2), (2, 1), (1, 1)}),
    ("publish", lambda c: c.columns, {1, 2}),
    ("publish", lambda c: c.workers, {1, 2}),
    ("copies", lambda c: (c.workers, c.copiers), {(w, n) for w in (1, 2, 3, 4) for n in range(1, w + 1)}),
    ("copies", lambda c: (c.expires, c.reset), {(x, y) for x in ONE for y in ONE}),
    ("copies", lambda c: c.pivot, {0, 1}),
    ("copies", lambda c: bool(c.running), {*ONE}),
    ("attention", lambda c: (c.ring.depth, c.ring.queries), {(1, 1), (2, 1), (2, 2)}),
    ("attention", lambda c: (c.ring.ordered, c.ring.arriving, c.ring.converting), {
        (False, False, False), (True, False, False), (False, True, False), (False, False, True), (True, False, True)
    }),
    ("attention", lambda c: c.ring.own, {"", "first", "both"}),
    ("shared", lambda c: c.text.__name__, {"direct", "staged", "attend_direct", "attend_staged"}),
    ("shared", lambda c: c.ring.depth, {1, 2, 3, 4}),
    ("shared", lambda c: any(rest for _, rest in c.items), {*ONE}),
    ("cluster", lambda c: c.cluster.size, {*CLUSTERS}),
    ("cluster", lambda c: c.cluster.warps, {1, 2}),
    ("cluster", lambda c: (bool(c.cluster.k), bool(c.cluster.pieces)), BOTH),
    ("cluster", has_no_k, {*ONE}),
    ("pair", lambda c: c.ring.depth, {1, 2}),
    ("pair", lambda c: any(steps > c.ring.depth for steps in c.items), {*ONE}),
]  # fmt: skip


@pytest.mark.parametrize(("model", "what", "contained"), CONTAINED)
def test_the_quick_level_contains(model, what, contained):
    assert set(map(what, verify.configurations(model, "quick"))) >= contained


def test_quick_sources_signal_twice_beside_two_workers():
    of_two = [c for c in verify.configurations("sources", "quick") if len(c.counts) == c.workers == 2]
    assert {c.twice for c in of_two if not c.expires} == {*ONE}


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
        ("dispatch", DispatchCase),
        ("experts", ExpertsCase),
        ("sources", SourcesCase),
        ("copies", CopyCase),
        ("cluster", ClusterCase),
        ("pair", PairCase),
    ):
        cases = verify.configurations(model, "quick")
        assert all(isinstance(case, kind) for case in cases)
        assert len(set(map(str, cases))) > 0.9 * len(cases), "mostly different"
    counts = [c.schedule.workers for c in sweep.workers("quick")]
    assert counts[0] == 1
    assert counts[-1] == 4
    for model, size in (
        ("ring", lambda c: c.ring.depth * c.ring.items),
        ("gather", lambda c: (c.world, c.epochs, *c.chunks)),
        ("sums", lambda c: (c.world, c.epochs, c.chunks)),
        ("copies", lambda c: (c.workers, c.copiers)),
    ):
        sizes = [size(case) for case in verify.configurations(model, "quick")]
        assert sizes[0] == min(sizes), "the smallest comes first"
        assert model in ("gather", "sums") or sizes[-1] == max(sizes)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: verify.run("slow"), "level='slow'; it must be one of quick, full"),
        (
            lambda: verify.run("quick", models=["rings"]),
            "model='rings'; it must be one of workers, ring, product, shared, attention, gather, publish, sums, "
            "copies, reduce, replay, dispatch, experts, sources",
        ),
        (lambda: verify.run("quick", jobs=0), "jobs=0"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
