"""The trace of the portable kernel: each item once, with its worker and times; off, nothing is written."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch
from interpreted import KINDS, Words, awaited, check_product, nan_like, plan_for, recorded, run
from test_portable_arrival import expired
from test_portable_grouped_sources import COUNTS, Case

from error_rule import rand
from tilestream.core.chunks import Chunks
from tilestream.launch import trace as log_of
from tilestream.launch.trace import SpanLog
from tilestream.ops.grouped_library import launch_of
from tilestream.trace import Recorder, faults
from tilestream.trace.record import Zero

#: Clocks as a GPU has them: nanoseconds since 1970.
EPOCH = 1_790_000_000_123_456_789
ZERO = Zero(0.0, EPOCH)


def record(plan, a, b, recorder=None):
    return recorded("matmul", plan, lambda log: check_product(plan, a, b, probe=log), recorder)


@pytest.mark.parametrize(("kind", "more"), [*((kind, {}) for kind in KINDS), ("dynamic", {"queues": 3})])
def test_each_item_once_and_its_worker(kind, more):
    a, b = rand(2, 70, 80), rand(2, 80, 50)
    plan = plan_for(a, b, kind, 7, **more)
    launch = record(plan, a, b)
    assert not faults(launch, plan.schedule)
    assert launch.tiles_done == plan.schedule.grid.tiles
    for worker, own in enumerate(launch.by_worker):
        assert all(span.worker == worker and span.unit == -1 for span in own)
        edges = [edge for span in own for edge in (span.begin, span.end)]
        assert edges == sorted(edges), "a worker does one thing at a time"
        assert all(launch.begin <= edge <= launch.end for edge in edges)
    if kind == "static":
        mine = [(s.batch, s.pm, s.pn) for s in launch.by_worker[2]]
        items = [plan.schedule.ticket(0, at)[0] for at in range(2, plan.schedule.grid.tiles, 7)]
        assert mine == [(item.batch, item.pm, item.pn) for item in items]
    if kind == "stream_k":
        assert sum(span.kind == "reduce" for span in launch.spans) == plan.schedule.remainder > 0


def test_launches_of_one_recorder_share_a_clock():
    a, b = rand(40, 40), rand(40, 40)
    recorder = Recorder()
    first, second = (record(plan_for(a, b), a, b, recorder) for _ in range(2))
    assert first.begin < first.end < second.begin < second.end
    assert len(recorder.zeros) == 1


def test_pools_that_nobody_visits_are_seen(monkeypatch):
    """Five queues and three workers: without stealing, two queues are nobody's, and their tiles stay NaN."""
    from tilestream.launch.portable.arguments import Arguments

    made = Arguments._config
    monkeypatch.setattr(Arguments, "_config", lambda *given, **logs: replace(made(*given, **logs), STEAL=False))
    a, b = rand(70, 40), rand(40, 60)
    plan, out = plan_for(a, b, "dynamic", 3, queues=5), nan_like(a, b)
    found = faults(recorded("matmul", plan, lambda log: run(plan, a, b, out, probe=log)), plan.schedule)
    assert found
    assert all("done never" in line or line.startswith("and ") for line in found)
    assert torch.isnan(out).any()


def test_no_output_no_spans():
    a, b = rand(0, 40), rand(40, 40)
    launch = record(plan_for(a, b), a, b)
    assert launch.end == launch.begin
    assert not launch.spans


# Rows by source -----------------------------------------------------------------------------------------------------


def by_source(case, plan, incoming=None):
    return recorded("grouped_mm", plan, lambda log: launch_of(plan, case.x)(case.x, incoming, log))


@pytest.mark.parametrize("arrives", [False, True])
@pytest.mark.parametrize("name", COUNTS)
def test_each_tile_of_a_source_once(name, arrives):
    case = Case(COUNTS[name])
    plan = case.plan(workers=3, arrives=arrives)
    launch = by_source(case, plan, awaited(Words(case.words, 3).arrive()) if arrives else None)
    case.check()
    tiles = [(span.batch, span.pm, span.pn) for span in launch.spans if span.kind == "tile"]
    wanted = [
        (source, pm, pn)
        for source, counts in enumerate(case.counts)
        for pm in range(sum(-(-rows // 16) for rows in counts))
        for pn in range(plan.schedule.grid.num_n)
    ]
    assert sorted(tiles) == wanted
    assert launch.tiles_done == len(wanted)
    assert {span.chunk >= 0 for span in launch.spans} <= {arrives}
    if arrives and wanted:
        assert {0: case.words} == {operand: len(of) for operand, of in launch.arrivals.items()}


def test_a_source_that_is_late_is_waited_for_and_its_tiles_come_last():
    case = Case(COUNTS["ragged"], n=16)
    words = Words(case.words, 3).arrive()
    late = [case.word(1, group) for group in range(-1, 4)]
    words.words[late] = 0
    others = [case.x.out[case.rows(source, group)] for source in (0, 2) for group in range(4)]

    def bring() -> None:
        while any((rows == 7).any() for rows in others):  # what they hold before they are computed
            time.sleep(0.01)
        words.words[late] = 3

    thread = threading.Thread(target=bring)
    thread.start()
    launch = by_source(case, case.plan(workers=2, pivot=1), awaited(words, deadline=600.0))
    thread.join()
    case.check()
    tiles = [span.batch for span in sorted(launch.spans, key=lambda span: span.end) if span.kind == "tile"]
    assert tiles.index(1) == len(tiles) - tiles.count(1), "what is there is computed before"
    waits = [span for span in launch.spans if span.kind == "wait" and span.batch == 1]
    assert waits
    assert {span.chunk for span in waits} <= {case.word(1, group) for group in range(4)}


def test_what_a_lost_source_leaves_is_no_tile():
    case = Case(COUNTS["ragged"], n=16)
    words = Words(case.words, 3).arrive()
    words.words[[case.word(2, group) for group in range(-1, 4)]] = 0
    launch = by_source(case, case.plan(workers=2), awaited(words))
    expired()
    case.check((2, -1))
    assert {span.batch for span in launch.spans if span.kind == "tile"} == {0, 1}
    assert {span.kind for span in launch.spans if span.batch == 2} == {"wait"}


# What is made of the device's log -----------------------------------------------------------------------------------


def done(plan, **more):
    """The plan's first items as worker 0 did them, 100 ns each, taken one item ahead."""
    items = list(plan.schedule.items())[:3]
    return [
        log_of.Done(item, 1, 0, 17, *[EPOCH + 1000 + 100 * (i - 1)] * 2, EPOCH + 1100 + 100 * i, 1)._replace(**more)
        for i, item in enumerate(items)
    ]


def times(spans):
    return [(span.kind, round(1e9 * span.begin), round(1e9 * span.end)) for span in spans]


def test_items_that_were_taken_ahead_do_not_overlap():
    plan = plan_for(rand(64, 32), rand(32, 64))
    spans = list(log_of.spans(done(plan), None, ZERO))
    assert times(spans) == [("tile", 900, 1100), ("tile", 1100, 1200), ("tile", 1200, 1300)]
    assert {span.unit for span in spans} == {17}


def test_an_item_that_was_taken_twice_has_two_spans():
    plan = plan_for(rand(64, 32), rand(32, 64))
    assert len(list(log_of.spans(done(plan, times=2), None, ZERO))) == 6


def test_waits_are_told_from_work(monkeypatch):
    from tilestream.core.gate import Gate

    plan = plan_for(rand(64, 32), rand(32, 64))
    gate = Gate(64, 64, 16, 16, Chunks.uniform(64, 32), None)
    late = [one._replace(ready=one.ready + 150) for one in done(plan)]
    spans = list(log_of.spans(late, gate, ZERO))
    assert times(spans)[:2] == [("wait", 900, 1050), ("tile", 1050, 1100)]
    assert spans[0].chunk == 0
    void = list(log_of.spans(done(plan, complete=0), gate, ZERO))
    assert {span.kind for span in void} == {"wait"}, "what was handed in as NaN was not done"


def test_half_tiles_are_ended_by_the_later_one():
    plan = plan_for(rand(16, 32), rand(32, 16))
    log = SpanLog(plan, torch.device("cpu"))
    log.words[0] = torch.tensor([1, 3, 9, 10, 11, 2 * 20 + 1, 2 * 30 + 1, 0, 0])
    (one,) = log.done()
    assert one[1:] == (1, 3, 9, 10, 11, 30, 2, -1)


def test_an_item_may_say_which_chunk_it_waited_for():
    plan = plan_for(rand(64, 32), rand(32, 64))
    late = [one._replace(ready=one.ready + 150, chunk=4) for one in done(plan)]
    spans = list(log_of.spans(late, None, ZERO))
    assert times(spans)[:2] == [("wait", 900, 1050), ("tile", 1050, 1100)]
    assert {span.chunk for span in spans} == {4}
    void = list(log_of.spans([one._replace(complete=0) for one in late], None, ZERO))
    assert {span.kind for span in void} == {"wait"}


def test_a_tile_whose_halves_two_workers_complete_is_completed_once():
    plan = plan_for(rand(16, 64), rand(64, 16), "stream_k", 2)
    parts = list(plan.schedule.items())
    assert [item.parts for item in parts] == [2, 2]
    made = [log_of.Done(item, 1, at, 17, 100, 100, 200 + at, 1) for at, item in enumerate(parts)]
    kinds = [(span.kind, span.worker) for span in log_of.spans(made, None, ZERO, halves=2)]
    assert kinds == [("part", 0), ("part", 1), ("reduce", 1)]
    made[1] = made[1]._replace(complete=0)
    assert "reduce" not in [span.kind for span in log_of.spans(made, None, ZERO, halves=2)]
