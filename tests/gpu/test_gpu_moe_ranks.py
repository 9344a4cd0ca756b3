"""Mixtures of experts whose rows kernels push: results, replays of graphs, ranks that are late, or lost.

Ranks as in ``test_gpu_distributed.py``: one a GPU, or all on one.

    TILESTREAM_WORLDS=2 PYTHONPATH=src python -m pytest -o addopts= -q tests/gpu/test_gpu_moe_ranks.py

REPLAYS is how many replays a test makes without a barrier.
"""

from __future__ import annotations

import os

import moe_rank_jobs as jobs
import pytest
from test_gpu_distributed import SHARED, WORLDS, Pools, make_pool

from tilestream.launch.native import why_not

pytestmark = pytest.mark.timeout(300)
#: Seconds beyond a deadline: ranks that share a GPU take turns on it.
SLACK = 6.0 if SHARED else 1.5


@pytest.fixture(scope="module")
def ranks():
    pools = Pools()
    yield pools
    pools.close()


CASES = [
    ((200, 131, 77, 300), 2, 4, "bfloat16", None, "silu"),
    ((64, 0, 9, 1), 1, 3, "float16", None, "gelu_tanh"),
    ((130, 40, 20, 10), 2, 2, "bfloat16", [1], "relu"),  # one expert has all rows, each token twice
    ((3, 1, 2, 1), 3, 5, "bfloat16", None, None),
    ((1024, 700, 1, 4), 4, 16, "bfloat16", None, "silu"),
]


@pytest.mark.parametrize("world", WORLDS)
def test_results_match_torch(ranks, world):
    said = ranks.run(world, jobs.matches, CASES, bound=240, seconds=60)
    assert all("fused: kernels push the rows into the ranks' memory" in text for text in said), said[0]


@pytest.mark.parametrize("halves", [True, False])
def test_equal_calls_are_repeated_with_the_bits_of_the_usual_way(ranks, halves):
    for same, count in ranks.run(2, jobs.repeated, halves, 60, bound=120, seconds=60):
        assert same
        assert bool(why_not()) or count >= 50, "all but the first ones of each stream"


def test_gradients_are_those_of_the_unfused_form(ranks):
    assert ranks.run(2, jobs.gradients, bound=120, seconds=60) == [True, True]


def test_an_expert_that_does_not_exist_makes_its_token_nan(ranks):
    assert ranks.run(2, jobs.no_such_expert, bound=120, seconds=60) == [[3, 5]] * 2


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("world", WORLDS)
def test_replays_of_late_ranks_without_a_barrier(ranks, world, mixed):
    count = int(os.environ.get("REPLAYS", "60" if SHARED else "2000"))
    assert max(ranks.run(world, jobs.replays, count, mixed, bound=200, seconds=60)) < 0.25


def test_memory_that_grows_behind_a_capture(ranks):
    assert max(ranks.run(2, jobs.grows, bound=120, seconds=60)) < 0.25


def test_more_tokens_than_agreed_raise_before_anything_is_launched(ranks):
    for said in ranks.run(2, jobs.too_many, bound=60, seconds=30):
        assert said.startswith("ValueError: moe: x has 96 tokens, and most_tokens=95"), said


@pytest.mark.parametrize("absent", ["late", "stopped", "killed"])
def test_a_rank_that_does_not_come_ends_all_in_their_deadline(absent):
    pool = make_pool()  # of its own, which its broken group does not leave
    try:
        *others, late = pool.run(WORLDS[-1] if absent == "killed" else 2, jobs.expires, absent, bound=120, seconds=30)
    finally:
        pool.close()
    assert absent == "killed" or late[1].startswith("GroupBroken"), late
    for first, again, works, waited in others:
        assert first.startswith(("ArrivalTimeout", "GroupBroken")), first
        assert again.startswith("GroupBroken"), again
        assert works
        assert waited < 2 * 0.5 + SLACK
    assert any("rank" in first and "'s rows" in first for first, *_ in others), others


def test_a_rank_that_does_not_replay_ends_the_others_replay():
    pool = make_pool()
    try:
        (said, waited), _ = pool.run(2, jobs.replay_expires, bound=120, seconds=30)
    finally:
        pool.close()
    assert said.startswith("ArrivalTimeout: moe: rank 1's rows"), said
    assert waited < 2 * 0.5 + SLACK
