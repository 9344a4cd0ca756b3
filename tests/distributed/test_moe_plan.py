"""The plan of a mixture of experts on GPUs: whether kernels push the rows, and why not. No GPU, no ranks."""

from __future__ import annotations

import types

import pytest
import torch

from tilestream.core.gpu_specs import named
from tilestream.distributed import moe_plan, symmetric
from tilestream.distributed.moe_experts import Experts, through
from tilestream.distributed.moe_plan import plan_of
from tilestream.distributed.planner import UNPREPARED
from tilestream.launch.layout import Layout


def group(world=2, capture=0, prepared=(), unreachable=""):
    return types.SimpleNamespace(
        rank=1, world=world, unreachable=unreachable, capture=lambda x: capture, prepared=set(prepared),
        backend=lambda device: "nccl",
    )  # fmt: skip


def on_gpu(dtype=torch.bfloat16):
    """As far as a plan looks at a tensor on a GPU."""
    return types.SimpleNamespace(
        is_cuda=True, dtype=dtype, device=torch.device("cuda", 0), element_size=lambda: dtype.itemsize
    )


def planned(state=None, x=None, op="moe", top_k=8, most_tokens=4096, form="auto"):
    w1 = torch.empty(16, 2048, 4096, device="meta")
    return plan_of(state or group(), op, x or on_gpu(), top_k, w1, "silu", form, most_tokens)


@pytest.fixture(autouse=True)
def _an_h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr(moe_plan, "cuda_properties", lambda index: types.SimpleNamespace(workers=132))
    monkeypatch.setattr(symmetric, "is_capturing", lambda device: False)


def test_rows_are_pushed_where_the_ranks_know_how_many_there_may_be():
    plan = planned()
    assert plan.fused
    assert plan.transport == "symmetric memory"
    assert plan.layout == Layout(2, 16, 4096 * 8, 4096, 2)
    assert plan.pushers == 24
    said = plan.explain()
    assert "kernels push the rows into the ranks' memory" in said
    assert "no host reads how many there are" in said
    assert "memory    0.805 GB of each GPU, for the rows of 2 ranks" in said
    assert "pushers   24 SMs\n" in said
    assert "backward  unfused: it sends the rows again by all-to-all" in said


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"most_tokens": 0}, "no most_tokens= is given, which says how much memory the rows of each rank need"),
        ({"op": "moe_backward"}, "the backward pass sends rows by all-to-all"),
        ({"form": "unfused"}, 'the caller asks for form="unfused"'),
        ({"state": group(1)}, "one rank: nothing travels"),
        ({"state": group(9)}, "9 ranks; up to 8 push into each other's memory"),
        ({"top_k": 0}, "no token has an expert: nothing travels"),
        ({"x": on_gpu(torch.float32)}, "torch.float32: operands of 16 and 8 bits overlap on GPUs"),
        ({"state": group(unreachable="2 hosts: shards travel inside one")}, "2 hosts: shards travel inside one"),
        (
            {"most_tokens": 131072},
            "most_tokens=131072: the rows of 2 ranks need 25.8 GB of each GPU; at most a quarter of its 80 GB is taken",
        ),
    ],
)
def test_other_calls_are_unfused_and_say_why(how, why):
    plan = planned(**how)
    assert not plan.fused
    assert (plan.transport, plan.layout, plan.agreed["form"]) == ("collective", None, "unfused")
    assert f"refused   fused: {why}" in plan.explain()


def test_a_capture_wants_an_equal_call_before_it(monkeypatch):
    eager = planned()
    early = planned(group(capture=1))
    assert (early.fused, early.refused[0].why) == (False, UNPREPARED)
    assert planned(group(capture=2, prepared={eager.handshake})).fused
    monkeypatch.setattr(symmetric, "is_capturing", lambda device: True)
    assert planned(group(capture=2, prepared={eager.handshake})).fused, "whatever gathers may do under capture"


def test_ranks_that_differ_in_the_most_tokens_have_calls_that_differ():
    first, second = planned(), planned(most_tokens=4095)
    assert first.handshake != second.handshake
    assert first.number != second.number
    assert "most_tokens" not in planned(most_tokens=0).agreed


def test_parts_of_the_memory_lie_apart_and_are_aligned():
    for world, e, capacity, width, itemsize in ((2, 1, 1, 8, 2), (3, 5, 7, 24, 4), (8, 1024, 131072, 7168, 2)):
        layout = Layout(world, e, capacity, width, itemsize)
        assert layout.results % 256 == layout.heads % 256 == 0
        assert layout.results >= world * capacity * width * itemsize
        assert layout.heads >= layout.results + capacity * width * itemsize
        assert layout.size == layout.heads + 4 * world * (1 + e)


def test_the_products_of_pushed_rows_are_hopper_s(monkeypatch):
    """Rows of a source are packed, and their experts' ends are on the device: the grouped kernel's."""
    pytest.importorskip("triton")
    from tilestream.ops import grouped_library
    from tilestream_tools.warm.ahead import ahead

    plans = []
    monkeypatch.setattr(grouped_library, "launch_of", lambda plan, x: lambda *_: plans.append(plan))
    both, w2, rows = (
        torch.empty(*shape, dtype=torch.bfloat16, device="meta")
        for shape in ((16, 2048, 512), (16, 512, 1024), (4096, 512))
    )
    w1, w3 = both.chunk(2, 1)
    ends = torch.empty(16, dtype=torch.int32, device="meta")
    with ahead(named("h100")):
        through(Experts(w1, w2, w3, "silu"), rows, ends)
    assert [(plan.backend, plan.problem.two_halves) for plan in plans] == [("hopper", True), ("hopper", False)]
