"""What `attention_gpu` looks up and says, without a GPU: tensors that say they are on one, launches that do nothing."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from on_gpu import on_gpu
from tilestream.core.gpu_specs import named
from tilestream.core.operands import AttentionOperands
from tilestream.launch import cache
from tilestream.ops import attention_gpu
from tilestream.ops.attention_operands import Settings
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.trace import record

SETTINGS = Settings(False, "bottom_right", -1, -1, 0.0, 0.3)


def operands() -> AttentionOperands:
    return AttentionOperands(*(on_gpu(1, 4, 2, 8, dtype=torch.float32) for _ in range(4)), 0.3)


@pytest.fixture
def gpu(monkeypatch):
    """The current device, which reports nothing."""
    monkeypatch.setattr(cache, "context_units", lambda index: 0)
    monkeypatch.setattr(attention_gpu, "check_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def test_the_limit_reaches_the_plan(monkeypatch):
    seen = []

    def plan(*args, limit, **how):
        seen.append(limit)
        raise NotImplementedError

    monkeypatch.setattr(cache, "context_units", lambda index: 0)
    monkeypatch.setattr(attention_gpu, "cuda_properties", lambda index: named("h100"))
    monkeypatch.setattr(attention_gpu, "plan_attention", plan)
    pytest.importorskip("triton")
    with pytest.raises(NotImplementedError):
        attention_gpu.find(operands(), SETTINGS, None, 7)
    assert seen == [7]


class Launch:
    """Writes down what it is given."""

    def __init__(self, backend: str) -> None:
        problem = AttentionProblem(1, 2, 2, 512, 512, 64)
        plan = plan_attention(problem, device=named("h100"), backend="portable")
        self.plan, self.logs = replace(plan, backend=backend), []

    def __call__(self, operands, incoming=None, log=None) -> None:
        self.logs.append(log)


@pytest.fixture
def launched(gpu, monkeypatch):
    """A call on a launch of a backend: the launch, what was recorded of it, and what was said."""
    pytest.importorskip("triton")
    from tilestream.launch import trace as spans

    def call(backend, captured=False):
        launch = Launch(backend)
        monkeypatch.setattr(attention_gpu, "launch_cache", cache.LaunchCache())
        monkeypatch.setattr(attention_gpu, "_make", lambda *args: launch)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
        monkeypatch.setattr(spans, "traced", lambda recorder, op, plan, device, issue: issue((recorder, op, plan)))
        attention_gpu.run(operands(), SETTINGS, None, 1.0)
        with record() as recorder:
            attention_gpu.run(operands(), SETTINGS, None, 1.0)
        return launch, recorder

    return call


@pytest.mark.parametrize("backend", ["hopper", "portable"])
def test_who_records_has_a_log_of_the_launch(launched, backend, caplog):
    launch, recorder = launched(backend)
    assert launch.logs == [None, (recorder, "attention", launch.plan)]
    assert not caplog.records


@pytest.mark.parametrize(
    ("backend", "captured", "why"),
    [("cdna", False, "the CDNA kernel writes no trace"), ("hopper", True, "captured into a graph is not recorded")],
)
def test_a_launch_that_is_not_recorded_is_named(launched, backend, captured, why, caplog):
    with caplog.at_level(logging.WARNING):
        launch, _ = launched(backend, captured)
    assert launch.logs in ([], [None, None])
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.startswith("attention: ")
    assert why in said
