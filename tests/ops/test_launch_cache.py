"""Launches that are looked up, without a GPU: tensors that say they are on one, launches that are noted."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import tilestream as ts
from on_gpu import OnGpu, on_gpu
from tilestream.arrival import Arrival
from tilestream.arrival.flat import FlatArrival
from tilestream.core.chunks import Chunks, Incoming
from tilestream.core.operands import AttentionOperands, Epilogue, GemmOperands, GroupedOperands
from tilestream.launch import cache
from tilestream.ops import attention_gpu, gpu, grouped_sources
from tilestream.ops.attention_operands import Settings
from tilestream.runtime.properties import allows_tf32


@pytest.fixture
def units(monkeypatch):
    """An empty cache on the current device; the SMs of the current context, to be changed."""
    found, made = [0], cache.LaunchCache()
    for module in (gpu, attention_gpu):
        monkeypatch.setattr(module, "launch_cache", made)
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
        {"op": "attention"}, {"x": at(1)}, {"x": at(0, (8, 4))}, {"x": at(0, strides=(9, 1))},
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
    assert [known.insert(("op", i), i, known.generation) for i in range(7)] == [*range(7)]
    assert list(known) == [("op", 6)]
    assert known.of("op") == [6]


def test_what_was_decided_before_a_clearing_is_not_kept():
    known = cache.LaunchCache()
    generation = known.generation
    known.clear()
    assert known.insert("stale", 1, generation) == 1, "this call goes on with it"
    assert not known
    with known.unless_cleared_since(generation) as may_keep:
        assert not may_keep
    known.insert("new", 2, known.generation)
    assert known == {"new": 2}


def test_nothing_is_cleared_while_something_is_kept():
    known, cleared = cache.LaunchCache(), threading.Event()
    thread = threading.Thread(target=lambda: (known.clear(), cleared.set()))
    with known.unless_cleared_since(0) as may_keep:
        assert may_keep
        thread.start()
        assert not cleared.wait(0.05)
        known["kept"] = 1
    thread.join()
    assert not known


@pytest.mark.parametrize(("module", "find"), [("gpu", "find_gemm"), ("attention_gpu", "find_attention")])
def test_no_collection_begins_while_a_launch_is_made(units, monkeypatch, module, find):
    """The first one imports the kernels, which set off a collection of 0.1 s."""
    of = {"gpu": gpu, "attention_gpu": attention_gpu}[module]
    monkeypatch.setattr(of, "_make", lambda *args: gc.isenabled())
    assert globals()[find]() is False
    assert gc.isenabled()


@pytest.mark.parametrize(("module", "find"), [("gpu", "find_gemm"), ("attention_gpu", "find_attention")])
def test_a_launch_that_was_planned_before_a_clearing_is_not_kept(units, monkeypatch, module, find):
    """Another thread clears the cache while this one plans: with what was true before."""
    of = {"gpu": gpu, "attention_gpu": attention_gpu}[module]
    monkeypatch.setattr(of, "_make", lambda *args: of.launch_cache.clear() or "stale")
    assert globals()[find]() == "stale"
    assert not of.launch_cache
    monkeypatch.setattr(of, "_make", lambda *args: "fresh")
    assert globals()[find]() == globals()[find]() == "fresh"


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


def test_a_launch_of_sources_is_for_its_options_its_pivot_and_what_arrives(units, monkeypatch):
    monkeypatch.setattr(grouped_sources, "launch_cache", cache.LaunchCache())
    monkeypatch.setattr(grouped_sources, "make", lambda *args, **how: object())
    x = GroupedOperands(at(0), at(0)[None], at(0), Epilogue(), torch.zeros(1, 1, dtype=torch.int32))
    others = [
        *({"how": gpu.How(**how)} for how in ({"schedule": "static"}, {"workers": 3}, {"fast_accum": False})),
        {"how": gpu.How(limit=5)}, {"pivot": 1}, {"arrives": True}, {"x": x._replace(epilogue=Epilogue(publish=()))},
        {"x": x._replace(epilogue=Epilogue(activation="relu"))},
    ]  # fmt: skip
    calls = [{"x": x, "how": gpu.How()} | other for other in ({}, *others)]
    made = [grouped_sources.find(**call) for call in calls]
    assert len({id(one) for one in made}) == len(made)
    assert [grouped_sources.find(**call) for call in calls] == made


def test_what_arrives_and_what_is_published_are_the_problems(monkeypatch):
    class Asked(Exception):
        pass

    def problem_of(x, *coming):
        raise Asked(*coming)

    monkeypatch.setattr(gpu, "problem_of", problem_of)
    a, b = torch.ones(8, 16), torch.ones(16, 8)
    with pytest.raises(Asked) as asked:
        gpu._make(GemmOperands(a[None], b[None], torch.empty(1, 8, 8)), None, None, "rows", "columns", "published",
                  device="a GPU")  # fmt: skip
    assert asked.value.args == ("rows", "columns", "published")
