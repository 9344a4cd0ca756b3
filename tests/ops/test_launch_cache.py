"""Launches and calls that are looked up, without a GPU: tensors that say they are on one, launches that are noted."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import tilestream as ts
from on_gpu import OnGpu, on_gpu
from tilestream.arrival import Arrival
from tilestream.arrival.flat import FlatArrival
from tilestream.core.chunks import Chunks, Incoming
from tilestream.core.operands import AttentionOperands, Epilogue, GemmOperands
from tilestream.launch import cache
from tilestream.ops import attention_gpu, attention_library, attention_request, gpu, request
from tilestream.ops.attention_operands import Settings
from tilestream.runtime.properties import allows_tf32
from tilestream.trace import record


@pytest.fixture
def units(monkeypatch):
    """An empty cache on the current device; the SMs of the current context, to be changed."""
    found, made = [0], cache.LaunchCache()
    for module in (request, gpu, attention_gpu, attention_request):
        monkeypatch.setattr(module, "launch_cache", made)
    for module in (request, attention_request):
        monkeypatch.setattr(module, "check_device", lambda index: None)
    monkeypatch.setattr(cache, "context_units", lambda index: found[0])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return found


# The signature --------------------------------------------------------------------------------------------------------


def at(offset: int, shape=(4, 8), dtype=torch.float32, strides=(8, 1)):
    """A tensor at so many elements behind a multiple of 64 bytes."""
    room = torch.zeros(256, dtype=dtype)
    start = -room.data_ptr() % 64 // room.element_size() + offset
    return room[start:].as_strided(shape, strides)


def signature(op="gemm", x=None, settings=("auto", 0), limit=None):
    return cache.signature(op, (at(0) if x is None else x, None), settings, limit)


@pytest.mark.parametrize(
    "other",
    [
        {"op": "call"}, {"x": at(1)}, {"x": at(0, (8, 4))}, {"x": at(0, strides=(9, 1))},
        {"x": at(0, dtype=torch.bfloat16)}, {"settings": ("static", 0)}, {"limit": 7}, {"x": at(0).as_subclass(OnGpu)},
    ],
    ids=["op", "alignment", "shape", "strides", "dtype", "settings", "limit", "device"],
)  # fmt: skip
def test_what_decides_a_launch_is_in_its_signature(units, other):
    assert signature() == signature() == signature(x=at(4)), "another address that is a multiple of 16"
    assert hash(signature()) == hash(signature())
    assert signature(**other) != signature()


def test_so_are_the_settings_of_the_process(units, monkeypatch):
    x = at(0).as_subclass(OnGpu)
    first = signature(x=x)
    with ts.worker_limit(5):
        assert signature(x=x) == signature(x=x, limit=5) != first
    units[0] = 96
    assert signature(x=x) != first
    units[0] = 0
    monkeypatch.setattr(cache, "allows_tf32", lambda: not allows_tf32())
    assert signature(x=x) != first


def test_the_cache_does_not_grow_for_ever(monkeypatch):
    monkeypatch.setattr(cache, "_MOST", 3)
    known = cache.LaunchCache()
    assert [known.insert(("op", i), i) for i in range(7)] == [*range(7)]
    assert list(known) == [("op", 6)]
    assert known.of("op") == [6]


# Launches by canonical operands ---------------------------------------------------------------------------------------


def find_gemm(how=None, **more):
    return gpu.find(GemmOperands(*OPERANDS), gpu.How(**(how or {})), **more)


def find_attention(how=None):
    settings = Settings(False, "bottom_right", -1, -1, 0.0, 0.3)
    return attention_gpu.find(AttentionOperands(*HEADS, 0.3), settings, None, **(how or {}))


OPERANDS = [on_gpu(*shape, dtype=torch.float32) for shape in ((4, 3), (3, 2), (4, 2))]
HEADS = [on_gpu(1, 4, 2, 8, dtype=torch.float32) for _ in range(4)]


@pytest.mark.parametrize(("module", "find"), [(gpu, find_gemm), (attention_gpu, find_attention)])
def test_a_launch_is_for_its_context_its_limit_and_its_precision(units, monkeypatch, module, find):
    monkeypatch.setattr(module, "_make", lambda *args: object())
    whole, limited = find(), find({"limit": 96})
    units[0] = 96
    green = find()
    units[0] = 0
    with monkeypatch.context() as patch:
        patch.setattr(cache, "allows_tf32", lambda: not allows_tf32())
        rounded = find()
    assert len({id(one) for one in (whole, limited, green, rounded)}) == 4
    assert find() is whole
    assert find({"limit": 96}) is limited


def test_a_launch_is_for_its_schedule_its_arrival_and_what_it_publishes(units, monkeypatch):
    monkeypatch.setattr(gpu, "_make", lambda *args: object())
    arrivals = [FlatArrival.of(Arrival.uniform(2, 2, pivot)) for pivot in (0, 1)]
    others = [
        *({"how": how} for how in ({"schedule": "static"}, {"workers": 3}, {"fast_accum": False})),
        *({"rows": flat} for flat in arrivals), {"columns": arrivals[0]},
        {"publishes": Incoming(Chunks.uniform(4, 2))}, {"publishes": Incoming(Chunks.uniform(4, 2), 1)},
    ]  # fmt: skip
    made = [find_gemm(), *(find_gemm(**other) for other in others)]
    assert len({id(one) for one in made}) == len(made)
    assert [find_gemm(**other) for other in others] == made[1:]
    assert find_gemm(rows=arrivals[0]._replace(key=99, epoch=7)) is made[4], "of another epoch"


# Equal calls ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(units, monkeypatch):
    """What was launched, and how: the long way through the registered op, or at once with these operands."""
    found = []
    monkeypatch.setattr(cache, "is_plain", lambda x: type(x) is OnGpu)
    monkeypatch.setattr(request, "_multiply", lambda r: (r.check(), found.append("long"), on_gpu(4, 2))[-1])
    monkeypatch.setattr(attention_library, "_run", lambda *args: found.append("long"))
    monkeypatch.setattr(gpu, "_make", lambda *args: found.append)
    monkeypatch.setattr(attention_gpu, "find", lambda *args: found.append)
    return found


def qkv(layout="bshd", heads_kv=2):
    shapes = [(2, 5, heads, 8) if layout == "bshd" else (2, heads, 5, 8) for heads in (4, heads_kv, heads_kv)]
    return tuple(on_gpu(*shape) for shape in shapes)


def how_they_went(calls) -> str:
    """A letter a call: the long way, or at once."""
    return "".join("l" if call == "long" else "c" for call in calls)


def test_the_second_product_is_a_launch_and_nothing_else(calls):
    a, b = on_gpu(4, 3), on_gpu(3, 2)
    ts.matmul(a, b)
    out = ts.matmul(a, b)
    first, (*tensors, epilogue) = calls
    assert first == "long"
    assert [x is y for x, y in zip(tensors, (a, b, out), strict=True)] == [True] * 3
    assert epilogue == Epilogue()
    assert out.shape == (4, 2)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_the_second_attention_is_a_launch_and_nothing_else(calls, layout):
    q, k, v = qkv(layout)
    how = {"causal": True, "layout": layout, "return_lse": True}
    answers = [ts.attention(q, k, v, **how) for _ in range(2)]
    first, second = calls
    assert first == "long"
    assert all(x is y for x, y in zip((*second[:3], second.out, second.lse), (q, k, v, *answers[1]), strict=True))
    for one, other in zip(*answers, strict=True):
        assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
    assert second.scale == pytest.approx(8**-0.5)


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
        ({"window": (1, -5)}, ValueError, r"window=\(1, -5\)"),
        ({"splits": 0}, ValueError, "splits=0"),
        ({"deadline": 1.0, "causal": False}, ValueError, r"attention: deadline=1\.0 without arrival="),
    ],
    ids=str,
)
def test_wrong_arguments_raise_behind_right_ones(calls, wrong, error, says):
    attends = {"window", "splits", "causal"} & wrong.keys()
    op, operands = (ts.attention, qkv()) if attends else (ts.matmul, (on_gpu(4, 3), on_gpu(3, 2)))
    op(*operands)
    with pytest.raises(error, match=says):
        op(*operands, **wrong)
    assert calls == ["long"]


@pytest.mark.parametrize("columns", [8, 16])
def test_an_output_of_other_columns_and_dtype(calls, columns):
    q, k, v = (on_gpu(2, 5, 4, dim, dtype=torch.float8_e4m3fn) for dim in (16, 16, columns))
    for _ in range(2):
        out = ts.attention(q, k, v)
        assert out.shape == (2, 5, 4, columns)
        assert out.dtype == torch.bfloat16
    assert how_they_went(calls) == "lc"


def test_queries_that_lie_otherwise_have_the_outputs_own_layout(calls):
    q = on_gpu(2, 4, 5, 8).transpose(1, 2)
    outs = [ts.attention(q, q, q) for _ in range(2)]
    assert how_they_went(calls) == "lc"
    assert outs[0].stride() == outs[1].stride() == (160, 32, 8, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"causal": True}, {"window": (3, 0)}, {"softcap": 2.0}, {"scale": 1.0}, {"return_lse": True}, {"workers": 3},
        {"schedule": "static"}, {"sinks": (4,)}, {"scale_k": (1,)}, {"seqlens_k": (2,)}, {"causal": "top_left"},
        {"layout": "bhsd"},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_another_call_goes_the_long_way(calls, change):
    for name, shape in change.items():
        if isinstance(shape, tuple) and name != "window":
            change = {name: on_gpu(*shape, dtype=torch.int32 if name == "seqlens_k" else torch.float32)}
    q, k, v = qkv()
    ts.attention(q, k, v)
    ts.attention(q, k, v, **change)
    ts.attention(q, k, v, **change)
    assert how_they_went(calls) == "llc"


@pytest.mark.parametrize(
    "name", ["traced", "a gradient", "autocast", "half sinks", "a list", "another device", "out", "unaligned"]
)
def test_what_always_goes_the_long_way(calls, monkeypatch, name):
    q, k, v = qkv()
    how, given = {}, [q, q]
    if name == "half sinks":  # they are converted first
        how["sinks"] = on_gpu(4)
    if name == "a list":
        how["window"] = [3, 0]
    if name == "out":  # in the columns that q leaves free, which only the long way sees
        room = on_gpu(2, 5, 4, 16)
        given, how["out"] = [room[..., :8]] * 2, room[..., 8:]
    if name == "unaligned":  # not a multiple of 16
        given = [q, on_gpu(2 * 5 * 4 * 8 + 1)[1:].view(2, 5, 4, 8)]
    if name == "a gradient":
        q.requires_grad_()
    if name == "autocast":
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
        monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: q.dtype)
    if name == "another device":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for one in given:
        with record() if name == "traced" else nullcontext():
            ts.attention(one, k, v, **how)
    assert calls == ["long", "long"]


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_an_output_that_is_given(calls, layout):
    q, k, v = qkv(layout)
    outs = [torch.empty_like(q) for _ in range(3)]
    for out in outs:
        found, lse = ts.attention(q, k, v, layout=layout, out=out, return_lse=True)
        assert found is out
        assert lse.shape == (2, 4, 5)
    assert how_they_went(calls) == "lcc"
    assert all(call.out is out for call, out in zip(calls[1:], outs[1:], strict=True))
    with pytest.raises(ValueError, match="out: overlaps q in memory"):
        ts.attention(q, k, v, layout=layout, out=q)
