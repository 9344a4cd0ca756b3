"""A call of attention like an earlier one, without a GPU: tensors that say they are on one, launches that are noted."""

from __future__ import annotations

import pytest
import torch

import tilestream as ts
from on_gpu import OnGpu, on_gpu
from tilestream.launch import cache
from tilestream.ops import attention_gpu, attention_library, attention_request
from tilestream.trace import record


@pytest.fixture
def calls(monkeypatch):
    """What was launched, and how: the long way through the registered op, or at once."""
    found = []

    def long_way(*args):
        found.append("long")

    class Launch:
        def __call__(self, operands):
            found.append(operands)

    monkeypatch.setattr(attention_library, "_run", long_way)
    monkeypatch.setattr(attention_gpu, "find", lambda *args: Launch())
    monkeypatch.setattr(attention_request, "launch_cache", cache.LaunchCache())
    monkeypatch.setattr(attention_request, "check_device", lambda index: None)
    monkeypatch.setattr(cache, "is_plain", lambda x: type(x) is OnGpu)
    monkeypatch.setattr(cache, "context_units", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return found


def qkv(layout="bshd", heads_kv=2):
    shapes = [(2, 5, heads, 8) if layout == "bshd" else (2, heads, 5, 8) for heads in (4, heads_kv, heads_kv)]
    return tuple(on_gpu(*shape) for shape in shapes)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_the_second_call_is_a_launch_and_nothing_else(calls, layout):
    q, k, v = qkv(layout)
    how = {"causal": True, "layout": layout, "return_lse": True}
    out, lse = ts.attention(q, k, v, **how)
    again_out, again_lse = ts.attention(q, k, v, **how)
    first, second = calls
    assert first == "long"
    assert all(x is y for x, y in zip(second[:3], (q, k, v), strict=True))
    assert second.out is again_out
    assert second.lse is again_lse
    for one, other in ((out, again_out), (lse, again_lse)):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    assert second.scale == pytest.approx(8**-0.5)


def test_an_output_of_other_columns_and_dtype(calls):
    q, k, v = (on_gpu(2, 5, 4, dim, dtype=torch.float8_e4m3fn) for dim in (16, 16, 8))
    for _ in range(2):
        out = ts.attention(q, k, v)
        assert out.shape == (2, 5, 4, 8)
        assert out.dtype == torch.bfloat16
    assert [type(x) is str for x in calls] == [True, False]


def test_queries_that_lie_otherwise_have_the_outputs_own_layout(calls):
    q = on_gpu(2, 4, 5, 8).transpose(1, 2)
    outs = [ts.attention(q, q, q) for _ in range(2)]
    assert len(calls) == 2
    assert outs[0].stride() == outs[1].stride() == (160, 32, 8, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True}, {"window": (3, 0)}, {"softcap": 2.0}, {"scale": 1.0}, {"return_lse": True}, {"workers": 3},
        {"schedule": "static"}, {"sinks": (4,)}, {"scale_k": (1,)}, {"seqlens_k": (2,)}, {"causal": "top_left"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_another_call_goes_the_long_way(calls, change):
    dtypes = {"seqlens_k": torch.int32}
    for name, shape in change.items():
        if isinstance(shape, tuple) and name != "window":
            change = {name: on_gpu(*shape, dtype=dtypes.get(name, torch.float32))}
    q, k, v = qkv()
    ts.attention(q, k, v)
    ts.attention(q, k, v, **change)
    assert calls == ["long", "long"]
    ts.attention(q, k, v, **change)
    assert len(calls) == 3
    assert calls[2] != "long"


def test_an_address_that_is_no_multiple_of_16_is_another_call(calls):
    room = on_gpu(2 * 5 * 4 * 8 + 1)
    q, k, v = qkv(heads_kv=4)
    ts.attention(q, k, v)
    ts.attention(room[1:].view(2, 5, 4, 8), k, v)
    assert calls == ["long", "long"]


@pytest.mark.parametrize("name", ["traced", "a gradient", "autocast", "half sinks", "a list", "another device", "out"])
def test_what_always_goes_the_long_way(calls, monkeypatch, name):
    q, k, v = qkv()
    how = {}
    if name == "half sinks":  # they are converted first
        how["sinks"] = on_gpu(4)
    if name == "a list":
        how["window"] = [3, 0]
    if name == "out":  # in the columns that q leaves free, which only the long way sees
        room = on_gpu(2, 5, 4, 16)
        q, how["out"] = room[..., :8], room[..., 8:]
    if name == "a gradient":
        q.requires_grad_()
    if name == "autocast":
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: q.dtype)
    if name == "another device":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for _ in range(2):
        if name == "traced":
            with record():
                ts.attention(q, k, v, **how)
        else:
            ts.attention(q, k, v, **how)
    assert calls == ["long", "long"]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_an_output_that_is_given(calls, layout):
    q, k, v = qkv(layout)
    outs = [torch.empty_like(q) for _ in range(3)]
    for out in outs:
        found, lse = ts.attention(q, k, v, layout=layout, out=out, return_lse=True)
        assert found is out
        assert lse.shape == (2, 4, 5)
    assert calls[0] == "long"
    assert [call.out is out for call, out in zip(calls[1:], outs[1:], strict=True)] == [True, True]
    with pytest.raises(ValueError, match="out: overlaps q in memory"):
        ts.attention(q, k, v, layout=layout, out=q)


def test_wrong_arguments_raise_behind_right_ones(calls):
    q, k, v = qkv()
    ts.attention(q, k, v)
    with pytest.raises(ValueError, match=r"deadline=1\.0 without arrival="):
        ts.attention(q, k, v, deadline=1.0)
    with pytest.raises(ValueError, match=r"window=\(1, -5\)"):
        ts.attention(q, k, v, window=(1, -5))
