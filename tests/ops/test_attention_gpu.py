"""What `attention_gpu` looks up and says, without a GPU: tensors that say they are on one, launches that do nothing."""

from __future__ import annotations

import logging

import pytest
import torch

from tilestream.kernels.attention import Operands
from tilestream.ops import attention_gpu
from tilestream.ops.attention_operands import Settings, Tensors
from tilestream.plan.known import named
from tilestream.trace import record

SETTINGS = Settings(False, "bottom_right", -1, -1, 0.0, 0.3)


class OnGpu(torch.Tensor):
    """A tensor whose device is a GPU, for who asks."""

    device = torch.device("cuda", 0)


def operands() -> tuple[Operands, Tensors]:
    q, k, v, out = (torch.zeros(1, 4, 2, 8).as_subclass(OnGpu) for _ in range(4))
    return Operands(q, k, v, out, 0.3, None), Tensors(q, k, v)


@pytest.fixture
def units(monkeypatch):
    """The SMs of the current context, to be changed; launches are made by nobody."""
    found = [0]
    monkeypatch.setattr(attention_gpu, "context_units", lambda index: found[0])
    monkeypatch.setattr(attention_gpu, "_launches", {})
    monkeypatch.setattr(attention_gpu, "_make", lambda *args: lambda operands, incoming: None)
    monkeypatch.setattr(attention_gpu, "check_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return found


def test_a_launch_is_for_its_context_and_its_limit(units):
    x, t = operands()

    def find(limit=0):
        return attention_gpu.find(x, t, SETTINGS, None, limit)

    whole, limited = find(), find(96)
    units[0] = 96
    green = find()
    assert len({id(one) for one in (whole, limited, green)}) == 3
    assert find() is green
    units[0] = 0
    assert find() is whole
    assert find(96) is limited


def test_the_limit_reaches_the_plan(monkeypatch):
    seen = []

    def plan(*args, limit, **how):
        seen.append(limit)
        raise NotImplementedError

    monkeypatch.setattr(attention_gpu, "context_units", lambda index: 0)
    monkeypatch.setattr(attention_gpu, "cuda_properties", lambda index: named("h100"))
    monkeypatch.setattr(attention_gpu, "plan_attention", plan)
    pytest.importorskip("triton")
    with pytest.raises(NotImplementedError):
        attention_gpu.find(*operands(), SETTINGS, None, 7)
    assert seen == [7]


def test_who_records_is_told_that_attention_is_not(units, caplog):
    def run():
        attention_gpu.run(*operands(), SETTINGS, None, 1.0)

    with caplog.at_level(logging.WARNING):
        run()
        assert not caplog.records
        with record() as recorder:
            run()
            run()
    assert [r.getMessage() for r in caplog.records] == ["attention: a launch on a GPU is not recorded"] * 2
    assert not recorder.launches
