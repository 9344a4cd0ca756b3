"""Coverage from a trace: of real launches on the CPU, and of traces that were changed."""

from __future__ import annotations

import pytest
import torch

import tilestream as ts
from tilestream.trace import draw, export, faults, load, record

KINDS = ("static", "dynamic", "stream_k")


@pytest.fixture(params=KINDS)
def recorded(request):
    plan = ts.plan(130, 200, 1000, workers=2, schedule=request.param, tile=(64, 64))
    with record() as recorder:
        plan.run(torch.randn(130, 1000), torch.randn(1000, 200))
    return recorder.launches[0], plan.schedule


def worker_with_work(launch):
    return next(spans for spans in launch.by_worker if spans)


def test_a_launch_that_did_all(recorded):
    assert faults(*recorded) == []


def test_what_was_not_done(recorded):
    launch, schedule = recorded
    spans = worker_with_work(launch)
    span = next(span for span in spans if span.kind in ("tile", "part"))
    spans.remove(span)
    (line,) = faults(launch, schedule)
    assert line == (f"tile ({span.pm}, {span.pn}) of batch 0, K steps {span.k_begin} to {span.k_end}: done never")


def test_what_was_done_twice(recorded):
    launch, schedule = recorded
    spans = worker_with_work(launch)
    spans.append(next(span for span in spans if span.kind in ("tile", "part")))
    (line,) = faults(launch, schedule)
    assert line.endswith("done 2 times")


def test_what_is_not_of_the_schedule(recorded):
    launch, schedule = recorded
    spans = worker_with_work(launch)
    spans.append(spans[0]._replace(kind="tile", pm=7))
    (line,) = faults(launch, schedule)
    assert line.startswith("tile (7, ")
    assert line.endswith("done once, and is none of the schedule's")


def test_parts_that_nobody_added_up():
    plan = ts.plan(64, 192, 2000, workers=2, schedule="stream_k", tile=(64, 64))
    assert plan.schedule.remainder == 1
    with record() as recorder:
        plan.run(torch.randn(64, 2000), torch.randn(2000, 192))
    launch = recorder.launches[0]
    for spans in launch.by_worker:
        spans[:] = [span for span in spans if span.kind != "reduce"]
    assert faults(launch, plan.schedule) == ["all items were done, and 1 tiles were not completed"]


def test_many_faults_are_summed_up():
    plan = ts.plan(256, 256, 64, workers=2, schedule="dynamic", tile=(32, 32))
    with record() as recorder:
        plan.run(torch.randn(256, 64), torch.randn(64, 256))
    launch = recorder.launches[0]
    launch.by_worker[:] = [[], []]
    found = faults(launch, plan.schedule)
    assert len(found) == 9
    assert found[-1] == "and 56 more"


def test_a_launch_whose_arrivals_are_unknown_is_drawn_and_exported(make_launch, tmp_path):
    """A GPU says when a gate was passed, not when each chunk's signal was written."""
    pytest.importorskip("matplotlib")
    launch = make_launch()
    launch.arrivals = {0: (None,) * 8}
    launch.started = {}
    assert draw(launch, tmp_path / "launch.png").stat().st_size > 5000
    (back,) = load(export(launch, tmp_path / "launch.json"))
    assert back.arrivals == launch.arrivals
    assert [span.kind for span in back.spans] == [span.kind for span in launch.spans]
    assert launch.waited > 0
