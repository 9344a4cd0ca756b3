"""Memory that launches keep, where torch has what a thread allocates come from a pool. About 30 s.

PYTHONPATH=src python -m pytest -o addopts= -q tests/gpu/test_gpu_outliving.py
"""

from __future__ import annotations

import pytest
import torch
from gpu_runs import randn, settle

import tilestream as ts
from error_rule import Maths, check

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("nothing_reported")]


@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
def test_torchs_compiler_holds_a_matmul_in_a_graph_of_its_own(schedule):
    """It raises if anything that a call allocates outlives the call: its stream is a new one, with a new workspace."""
    torch._dynamo.reset()
    step = torch.compile(lambda a, b: ts.matmul(a, b, schedule=schedule) * 2, mode="reduce-overhead", dynamic=False)
    a, b = randn(640, 512), randn(512, 384)
    for _ in range(4):  # warmed up, recorded, replayed
        a.copy_(randn(640, 512))
        torch.compiler.cudagraph_mark_step_begin()
        check(step(a, b) / 2, Maths(a, b))
    settle()


def test_a_pool_holds_nothing_of_ours():
    pool, side = torch.cuda.MemPool(), torch.cuda.Stream()
    a, b = randn(640, 512), randn(512, 384)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.cuda.use_mem_pool(pool):
        out = ts.matmul(a, b, schedule="dynamic")
    settle()
    check(out, Maths(a, b))
    del out
    used = [block for one in pool.snapshot() for block in one["blocks"] if block["state"] == "active_allocated"]
    assert not used, used
