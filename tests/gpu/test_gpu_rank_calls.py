"""Equal calls between ranks that are issued by graphs (TILESTREAM_RANK_CALLS=graphs): same bits, in any order, in time.

CALLS is how many calls a test of many makes without a barrier.

    PYTHONPATH=src python -m pytest -o addopts= -q tests/gpu/test_gpu_rank_calls.py
"""

from __future__ import annotations

import os

import graph_rank_jobs
import pytest
import repeat_jobs as jobs
from test_gpu_distributed import SHARED, WORLDS, Pools, make_pool

from tilestream.launch.native import why_not

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=f"no extension: {why_not()}"),
]
COUNT = int(os.environ.get("CALLS", "60" if SHARED else "3000"))


@pytest.fixture(scope="module")
def ranks():
    pools = Pools(TILESTREAM_RANK_CALLS="graphs")
    yield pools
    pools.close()


def test_calls_by_graphs_have_the_bits_of_calls_by_operations(ranks):
    count = 2 * jobs.CALLS
    for found in ranks.run(2, jobs.by_graphs, count, bound=280, seconds=60):
        for name, (same, launched, why) in found.items():
            assert same, name
            assert not why, (name, why)
            assert launched >= count - 10, f"{name}: {launched} of {count} calls were graphs"


def test_calls_by_graphs_have_the_bits_of_the_usual_way(ranks):
    for found in ranks.run(2, jobs.same_bits, bound=280, seconds=60):
        assert [name for name, (same, _) in found.items() if not same] == []


@pytest.mark.parametrize("name", ["gather", "pulled gather", "gathered rows", "sum", "all-reduce"])
@pytest.mark.parametrize("world", WORLDS)
def test_thousands_of_calls_of_late_ranks_on_two_streams(ranks, world, name):
    for error, launched, why in ranks.run(world, jobs.thousands_by_graphs, name, COUNT, bound=280, seconds=60):
        assert error == 0.0
        assert not why
        assert launched >= COUNT - 30, "some ten come before there are graphs"


def test_kinds_in_turn_on_two_streams_without_a_barrier(ranks):
    rounds = 6 if SHARED else 40
    for error, count in ranks.run(2, jobs.in_turn, rounds, bound=280, seconds=60):
        assert error == 0.0
        assert count > 8 * rounds


@pytest.mark.parametrize("name", ["gather", "sum", "all_reduce"])
@pytest.mark.parametrize("world", WORLDS)
def test_replays_beside_calls_by_graphs(ranks, world, name):
    count = min(COUNT, 600)
    for error, is_same, repeated in ranks.run(world, graph_rank_jobs.by_turns, name, count, bound=280, seconds=60):
        assert error < 4.0
        assert is_same
        assert repeated >= count - 8


@pytest.mark.parametrize("op", ["gather", "sum", "all-reduce"])
def test_a_late_rank_ends_a_call_by_a_graph(op):
    pool = make_pool(TILESTREAM_RANK_CALLS="graphs")  # of its own, which its broken group does not leave
    try:
        first, last = pool.run(2, jobs.late, op, bound=120, seconds=60)
    finally:
        pool.close()
    assert "ArrivalTimeout" in first or "GroupBroken" in first, first
    assert last != "nothing", "the late rank knows, too"
