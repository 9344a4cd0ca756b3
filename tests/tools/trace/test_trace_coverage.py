"""Coverage from a trace: of real launches on the CPU, and of traces that were changed."""

from __future__ import annotations

import pytest
import torch

import tilestream as ts
from tilestream.trace import draw, export, faults, load, record


def run(m, n, k, **how):
    """A recorded launch of this product, and its schedule."""
    plan = ts.plan(m, n, k, workers=2, **how)
    with record() as recorder:
        plan.run(torch.randn(m, k), torch.randn(k, n))
    return recorder.launches[0], plan.schedule


@pytest.mark.parametrize("kind", ["static", "dynamic", "stream_k"])
def test_what_was_not_done_done_twice_or_is_not_of_the_schedule(kind):
    launch, schedule = run(130, 200, 1000, schedule=kind, tile=(64, 64))
    assert faults(launch, schedule) == []
    spans = next(spans for spans in launch.by_worker if spans)
    span = next(span for span in spans if span.kind in ("tile", "part"))
    item = f"tile ({span.pm}, {span.pn}) of batch 0, K steps {span.k_begin} to {span.k_end}"
    spans.append(span)
    assert faults(launch, schedule) == [f"{item}: done 2 times"]
    spans[:] = [one for one in spans if one is not span]
    assert faults(launch, schedule) == [f"{item}: done never"]
    spans += [span, span._replace(kind="tile", pm=7)]
    (line,) = faults(launch, schedule)
    assert line.startswith("tile (7, ")
    assert line.endswith("done once, and is none of the schedule's")


def test_parts_that_were_not_added_up():
    launch, schedule = run(64, 192, 2000, schedule="stream_k", tile=(64, 64))
    assert schedule.remainder == 1
    for spans in launch.by_worker:
        spans[:] = [span for span in spans if span.kind != "reduce"]
    assert faults(launch, schedule) == ["all items were done, and 1 tiles were not completed"]


def test_many_faults_are_summed_up():
    launch, schedule = run(256, 256, 64, schedule="dynamic", tile=(32, 32))
    launch.by_worker[:] = [[], []]
    found = faults(launch, schedule)
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
