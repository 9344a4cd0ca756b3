"""A product like an earlier one, without a GPU: tensors that say they are on one, launches that are noted."""

from __future__ import annotations

import pytest
import torch

import tilestream as ts
from tilestream.ops import again
from tilestream.ops.operands import Options


class OnGpu(torch.Tensor):
    """A tensor whose device is a GPU, for who asks."""

    device = torch.device("cuda", 0)
    is_cuda = True


@pytest.fixture
def launched(monkeypatch):
    """Operands whose product went through before, and what was launched since."""
    found = []
    a, b = (torch.zeros(*shape, dtype=torch.bfloat16).as_subclass(OnGpu) for shape in ((4, 3), (3, 2)))
    monkeypatch.setattr(again, "_known", again.Known())
    monkeypatch.setattr(again, "is_plain", lambda x: type(x) is OnGpu)
    monkeypatch.setattr(again, "context_units", lambda index: 0)
    monkeypatch.setattr(again, "check_device", lambda index: None)
    monkeypatch.setattr(again, "allows_tf32", lambda: False)
    monkeypatch.setattr(again.gpu, "find", lambda *args, **more: lambda *operands: found.append(operands))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    again.remember(a, b, Options("matmul"), torch.zeros(4, 2))
    return a, b, found


def test_the_second_call_is_a_launch_and_nothing_else(launched):
    a, b, found = launched
    out = ts.matmul(a, b)
    assert found == [(a, b, out, found[0][3], None)]
    assert out.shape == (4, 2)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"deadline": 5}, ValueError, "deadline=5 without arrival="),
        ({"deadline": -1.0}, ValueError, r"deadline=-1\.0 without arrival="),
        ({"beta": "1"}, TypeError, "beta='1'; it is a number"),
        ({"activation": "tanh"}, ValueError, "activation='tanh'"),
        ({"schedule": "eager"}, ValueError, "schedule='eager'"),
        ({"workers": 0}, ValueError, "workers=0"),
        ({"out_dtype": "float16"}, TypeError, "out_dtype='float16'"),
    ],
    ids=str,
)
def test_wrong_arguments_raise_behind_right_ones(launched, wrong, error, says):
    a, b, found = launched
    with pytest.raises(error, match=says):
        ts.matmul(a, b, **wrong)
    assert not found
