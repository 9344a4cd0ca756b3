"""Launches on a GPU, without one: what they are planned with, and which are traced.

Those inside a `record` block are traced, but for captured ones and for kernels that write no trace: a warning names
them.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from on_gpu import on_gpu
from tilestream.core.gpu_specs import named
from tilestream.core.operands import AttentionOperands, GemmOperands
from tilestream.launch import cache
from tilestream.launch.trace import SpanLog
from tilestream.ops import attention_gpu, gpu
from tilestream.ops.attention_operands import Settings
from tilestream.plan import DeviceProperties, Problem
from tilestream.plan.planner import plan_problem
from tilestream.trace import faults, record

SETTINGS = Settings(False, "bottom_right", -1, -1, 0.0, 0.3)


class Launch:
    """A launch that does all items in its worker 0, a microsecond each."""

    def __init__(self, backend: str) -> None:
        device = DeviceProperties("a stub", "portable", 4, 1e12, 1e12, "", "sm_90", 232448)
        plan = plan_problem(Problem(512, 512, 512, 1, "bfloat16", "bfloat16"), device=device, backend="portable")
        self.plan = replace(plan, backend=backend)
        self.given: list[object] = []

    def __call__(self, x, awaited=None, probe=None) -> None:
        self.given.append(probe)
        if isinstance(probe, SpanLog):
            for place in range(self.plan.schedule.grid.tiles):
                begin = 1000 * (place + 1)
                probe.words[place] = torch.tensor([1, 0, 5, begin, begin, 2 * (begin + 1000) + 1, 0, 0, 0])


@pytest.fixture
def issue(monkeypatch):
    """Issue the launch of a backend's plan."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the CPU's index

    def call(launch: Launch) -> None:
        x = torch.zeros(1)
        gpu.issue(launch, GemmOperands(x, x, x), None, "linear")

    return call


def test_inside_a_block_each_launch_has_a_log_that_is_read_at_its_end(issue):
    launch = Launch("hopper")
    issue(launch)
    assert launch.given == [None], "outside of a block"
    with record() as recorder:
        issue(launch)
        issue(launch)
        assert [one.tiles_done for one in recorder.launches] == [0, 0]
    assert [isinstance(log, SpanLog) for log in launch.given] == [False, True, True]
    for one in recorder.launches:
        assert one.op == "linear"
        assert not faults(one, launch.plan.schedule)
        assert one.end - one.begin == pytest.approx(1e-6 * one.tiles, rel=1e-3)


@pytest.mark.parametrize(
    ("backend", "captured", "why"),
    [
        ("cdna", False, "the CDNA kernel writes no trace"),
        ("portable", True, "a launch that is captured into a graph is not recorded"),
    ],
)
def test_a_launch_that_is_not_recorded_is_named(issue, monkeypatch, caplog, backend, captured, why):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    launch = Launch(backend)
    with caplog.at_level(logging.WARNING), record() as recorder:
        issue(launch)
    assert launch.given == [None]
    assert not recorder.launches
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.startswith("linear: ")
    assert why in said


def test_attention_is_planned_with_the_limit_and_issued(monkeypatch):
    seen, planned, device = [], attention_gpu.plan_attention, named("h100")
    monkeypatch.setattr(cache, "context_units", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(attention_gpu, "launch_cache", cache.LaunchCache())
    monkeypatch.setattr(attention_gpu, "check_device", lambda index: None)
    monkeypatch.setattr(attention_gpu, "cuda_properties", lambda index: device)
    monkeypatch.setattr(
        attention_gpu, "plan_attention", lambda *args, limit, **how: seen.append(limit) or planned(*args, **how)
    )
    monkeypatch.setattr(attention_gpu, "launch_of", lambda plan, layout, aligned: plan)
    monkeypatch.setattr(attention_gpu, "issue", lambda *args: seen.append(args))
    x = AttentionOperands(*(on_gpu(1, 4, 2, 8, dtype=torch.float32) for _ in range(4)), 0.3)
    attention_gpu.run(x, SETTINGS, None, 1.0, 7)
    limit, (plan, operands, awaited, op) = seen
    assert (limit, plan.device, operands, awaited, op) == (7, device, x, None, "attention")
