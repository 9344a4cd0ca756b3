"""Which launches of a GPU are traced: those inside a `record` block, but for captured ones, which a warning names."""

from __future__ import annotations

import logging

import pytest
import torch

pytest.importorskip("triton")

from tilestream.core.operands import GemmOperands
from tilestream.launch.trace import SpanLog
from tilestream.ops import gpu
from tilestream.plan import DeviceProperties, Problem
from tilestream.plan.planner import plan_problem
from tilestream.trace import faults, record


class Launch:
    """A launch that does all items in its worker 0, a microsecond each."""

    def __init__(self) -> None:
        device = DeviceProperties("a stub", "portable", 4, 1e12, 1e12, "", "sm_90", 232448)
        self.plan = plan_problem(Problem(512, 512, 512, 1, "bfloat16", "bfloat16"), device=device, backend="portable")
        self.given: list[object] = []

    def __call__(self, x, awaited=None, probe=None) -> None:
        self.given.append(probe)
        if isinstance(probe, SpanLog):
            for place in range(self.plan.schedule.grid.tiles):
                begin = 1000 * (place + 1)
                probe.words[place] = torch.tensor([1, 0, 5, begin, begin, 2 * (begin + 1000) + 1, 0, 0, 0])


@pytest.fixture
def launch(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the CPU's index
    return Launch()


def issue(launch) -> None:
    x = torch.zeros(1)
    gpu.issue(launch, GemmOperands(x, x, x), None, "linear")


def test_outside_a_block_nothing_is_written_down(launch):
    issue(launch)
    assert launch.given == [None]


def test_inside_a_block_each_launch_has_a_log_that_is_read_at_its_end(launch):
    with record() as recorder:
        issue(launch)
        issue(launch)
        assert [one.tiles_done for one in recorder.launches] == [0, 0]
    assert all(isinstance(log, SpanLog) for log in launch.given)
    for one in recorder.launches:
        assert one.op == "linear"
        assert not faults(one, launch.plan.schedule)
        assert one.end - one.begin == pytest.approx(1e-6 * one.tiles, rel=1e-3)


def test_a_launch_that_is_captured_is_named_not_recorded(launch, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with caplog.at_level(logging.WARNING), record() as recorder:
        issue(launch)
    assert launch.given == [None]
    assert not recorder.launches
    assert "linear: a launch that is captured into a graph is not recorded" in caplog.text
