"""`matmul_all_reduce` between real ranks, over gloo."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import jobs
import pytest
import torch

from tilestream.distributed import all_reduce

#: a's rows, K, N, dtype, more.
CASES = [
    ((16,), 24, 20, "float32", {}), ((1,), 24, 9, "float32", {"reduce_op": "avg", "bias": True}),
    ((2, 5), 24, 9, "bfloat16", {"bias": True}), ((3, 2, 2), 8, 4, "float16", {"reduce_op": "avg"}),
    ((6,), 16, 8, "float8_e4m3fn", {"bias": True, "scaled": "row"}), ((4,), 8, 4, "float64", {}),
    ((0,), 8, 4, "float32", {}),
]  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_match_torch_on_every_rank(ranks, world):
    assert ranks.run(world, jobs.reduces, CASES) == [True] * world


def test_different_calls_raise_and_the_plan_says_why_it_is_unfused(ranks):
    for differ, said in ranks.run(2, jobs.reduce_differs):
        assert differ.startswith("ValueError: matmul_all_reduce: ranks ")
        assert "a: [4] rows float32 on rank 0, [5] rows float32 on rank 1" in differ or "[5] rows" in differ
        assert said.startswith("matmul_all_reduce, 2 ranks on cpu: N 6, K 8")
        assert "form      unfused: one after the other, by collective" in said
        assert "\n  partial   4 x 6 float32 of each rank" in said
        assert "pivot" not in said


def test_on_gpus_a_fused_sum_is_one_launch_of_the_group(monkeypatch):
    called, plan, connected = (
        [],
        SimpleNamespace(fused=False),
        SimpleNamespace(fused=True, counted=False, first=None, decision=SimpleNamespace(library=True)),
    )
    a = SimpleNamespace(is_cuda=True, device="a device", dtype=torch.float16)
    request = SimpleNamespace(
        a=a, b=SimpleNamespace(dtype=torch.float16), scale_a=None, scale_b=None, reduce_op="sum",
        begin=lambda *states: None,
        running=contextlib.nullcontext,
    )  # fmt: skip
    known = {}
    state = SimpleNamespace(
        call=contextlib.nullcontext, decided=known.get, decide=known.setdefault, capture=lambda x: 0
    )
    monkeypatch.setattr(all_reduce, "travel_dtype", lambda request: torch.float16)
    monkeypatch.setattr(all_reduce, "plan_of", lambda *given, **more: plan)
    monkeypatch.setattr(all_reduce, "connected_plan", lambda state, given, *rest: connected if given is plan else None)
    monkeypatch.setattr(all_reduce.one_shot, "matmul_reduce", lambda *given: called.append(given))
    all_reduce.run([state], request, "key")
    assert known["key"] == ((connected,), torch.float16, torch.float16, True)
    assert called == [(state, connected, request, torch.float16, None)]
