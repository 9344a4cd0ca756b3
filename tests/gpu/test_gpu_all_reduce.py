"""`matmul_all_reduce` across GPUs: right, the same bits on each rank and each time; ranks that are late, or lost.

TILESTREAM_WORLDS=2 PYTHONPATH=src python -m pytest -o addopts= -q tests/gpu/test_gpu_all_reduce.py
"""

from __future__ import annotations

import pytest
import reduce_jobs as jobs
from test_gpu_distributed import SHARED, WORLDS, Pools, make_pool

pytestmark = pytest.mark.timeout(200)

#: a's rows, K, N, dtype, whether it is the average, whether there are scales a row.
CASES = [
    ((1,), 256, 256, "bfloat16", False, False), ((64,), 512, 8192, "bfloat16", False, False),
    ((200,), 512, 136, "bfloat16", True, False), ((2, 65), 256, 256, "float16", False, False),
    ((3,), 129, 100, "bfloat16", False, False), ((128,), 256, 256, "float8_e4m3fn", True, True),
    ((256,), 256, 8192, "bfloat16", False, False), ((16,), 256, 256, "bfloat16", False, False),
]  # fmt: skip


@pytest.fixture(scope="module")
def ranks():
    pools = Pools()
    yield pools
    pools.close()


@pytest.mark.parametrize("world", WORLDS)
def test_sums_match_torch_on_every_rank(ranks, world):
    said = ranks.run(world, jobs.reduces, CASES, bound=150, seconds=60)
    assert all("fused: in one shot: each rank reads the partial sums of all" in text for text in said), said[0]


@pytest.mark.parametrize("world", WORLDS)
def test_calls_without_a_barrier(ranks, world):
    wrong = ranks.run(world, jobs.iterates, 50 if SHARED else 500, bound=120, seconds=60)
    assert max(wrong) < 0.5, wrong  # another epoch's sums would be off by 2 and more


def test_capture_is_unfused_and_says_why(ranks):
    if SHARED:
        pytest.skip("gloo has no collective that a graph could hold")
    assert all("a CUDA graph is being captured" in text for text in ranks.run(2, jobs.captures, bound=120, seconds=60))


@pytest.mark.parametrize(
    ("killed", "environment"), [(False, {}), (True, {}), (False, {"CUDA_LAUNCH_BLOCKING": "1"})],
    ids=["late", "killed", "blocking"],
)  # fmt: skip
def test_a_rank_that_does_not_come_is_given_up(killed, environment):
    if SHARED and environment:
        pytest.skip("ranks that share a GPU take turns on it")
    pool = make_pool(**environment)
    try:
        (first, second, works, waited), late = pool.run(2, jobs.expires, killed, bound=60, seconds=30)
    finally:
        pool.close()
    assert works
    assert killed or late[1].startswith("GroupBroken"), late
    assert first.startswith("ArrivalTimeout: matmul_all_reduce"), first
    assert "rank 1's part of the sum" in first
    assert second.startswith("GroupBroken"), second
    assert waited < 3
