"""Odd and large worlds over gloo: results, ranks that are late, killed or stopped, and two groups at once.

A world of three is among the quick tests; 5, 6, 7 and 8 ranks take as many processes.
"""

from __future__ import annotations

import faults
import jobs
import moe_jobs
import pytest

WORLDS = [3, *(pytest.param(world, marks=pytest.mark.slow) for world in (5, 6, 7, 8))]
pytestmark = [pytest.mark.parametrize("world", WORLDS), pytest.mark.timeout(600)]
#: Of the group's own waits, and of a job: eight processes may share two cores.
HOW = {"seconds": 120.0, "bound": 300.0}
#: Seconds of a call that a stopped rank does not come to; the others must come within them.
DEADLINE = 8.0

GATHERS = [
    ((17, 24), 0, (20,), "float32", "fused", {}),
    ((2, 5, 24), 1, (9, 4), "float32", "fused", {"bias": True, "activation": "gelu"}),
    ((6, 16), 0, (8,), "float16", "unfused", {}),
]
SUMS = [
    ((7,), 0, 24, 9, "float32", "fused", {"reduce_op": "avg", "bias": True}),
    ((2, 5), 1, 24, 9, "bfloat16", "fused", {}),
    ((4,), 0, 8, 4, "float64", "unfused", {}),
]
ALL_REDUCES = [((3, 2), 24, 20, "float32", {}), ((1,), 24, 9, "float32", {"reduce_op": "avg", "bias": True})]
#: Tokens of each rank: two have none, one has most.
TOKENS = (5, 0, 11, 3, 1, 0, 2, 4)
#: Of 16 bits: torch's errors in a few numbers of 32 bits are small by chance, and the rule compares with them.
MIXTURES = [
    (TOKENS, 2, 2, "bfloat16", "fused", {}),
    (TOKENS, 1, 1, "float64", "fused", {"only": [1], "activation": "gelu_tanh"}),  # rank 1 has the one expert
    (TOKENS, 2, 1, "float16", "unfused", {}),
]


@pytest.mark.parametrize(
    ("job", "cases"),
    [(jobs.gathers, GATHERS), (jobs.scatters, SUMS), (jobs.reduces, ALL_REDUCES), (moe_jobs.matches, MIXTURES)],
    ids=["gathers", "sums", "all-reduces", "experts"],
)
def test_results_match_torch(ranks, world, job, cases):
    assert ranks.run(world, job, cases, **HOW) == [True] * world


def test_two_groups_at_once_and_one_that_breaks(ranks, world):
    assert ranks.run(world, faults.two_groups, **HOW) == [True] * world


def test_a_late_rank_is_waited_for(ranks, world):
    for right, _ in ranks.run(world, faults.comes_late, 0.3, **HOW):
        assert right


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_killed_rank_breaks_the_group(ranks, world, when, tmp_path):
    *others, lost = ranks.run(world, faults.loses, when, str(tmp_path), **HOW)
    assert lost == "lost"
    for first, second, _ in others:
        assert first.startswith("GroupBroken: process group '"), first
        assert "all_gather_matmul: lost rank" in first
        assert second.startswith("GroupBroken"), second


@pytest.mark.parametrize("op", ["gather", "sum", "moe"])
def test_a_stopped_rank_ends_the_others_at_their_deadline(ranks, world, op, tmp_path):
    *others, last = ranks.run(world, faults.stops, str(tmp_path), DEADLINE, op, **HOW)
    firsts = [first for first, *_ in others]
    assert all(first.startswith(("ArrivalTimeout", "GroupBroken")) for first in firsts), firsts
    assert any(first.startswith("ArrivalTimeout") and f"rank {world - 1}'s" in first for first in firsts), firsts
    assert last[0].startswith(("GroupBroken", "ArrivalTimeout")), last
    for _, second, _ in (*others, last):
        assert second.startswith("GroupBroken"), "from then on"
