"""Calls between ranks that CUDA graphs hold: eager calls, replays, both by turns; ranks that are late, or lost.

The device counts all calls (TILESTREAM_GRAPH_RANKS=1); in the tests of ``captured_ranks`` captured ones, as by default.
Ranks as in ``test_gpu_distributed.py``: one a GPU, or all on
one.

    PYTHONPATH=src python -m pytest -o addopts= -q tests/gpu/test_gpu_graph_ranks.py

REPLAYS is how many replays a test makes without a barrier.
"""

from __future__ import annotations

import os

import distributed_jobs
import gather_jobs
import graph_rank_jobs as jobs
import pytest
from test_gpu_distributed import REDUCED, SHARED, WORLDS, Pools, cases, make_pool, sums, unshared

from tilestream.launch.native import why_not

pytestmark = pytest.mark.timeout(300)
NAMES = ("gather", "sum", "all_reduce")
#: Seconds beyond a deadline: ranks that share a GPU take turns on it.
SLACK = 6.0 if SHARED else 1.5


@pytest.fixture(scope="module")
def ranks():
    pools = Pools(TILESTREAM_GRAPH_RANKS="1")
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def captured_ranks():
    pools = Pools(TILESTREAM_GRAPH_RANKS="")
    yield pools
    pools.close()


@pytest.mark.parametrize("world", WORLDS)
def test_eager_gathers_match_torch(ranks, world):
    said = ranks.run(world, distributed_jobs.gathers, list(cases("fused")), bound=240, seconds=60)
    assert all("counted   by the device" in text for text in said), said[0]


@pytest.mark.parametrize("world", WORLDS)
def test_eager_sums_match_torch(ranks, world):
    said = ranks.run(world, distributed_jobs.scatters, list(sums("fused")), bound=240, seconds=60)
    assert all("counted   by the device" in text for text in said), said[0]


@pytest.mark.parametrize("world", WORLDS)
def test_eager_all_reduces_match_torch(ranks, world):
    said = ranks.run(world, distributed_jobs.reduces, REDUCED, bound=150, seconds=60)
    assert all("counted   by the device" in text for text in said), said[0]


@pytest.mark.parametrize("world", WORLDS)
def test_eager_calls_of_alternating_shapes_without_a_barrier(ranks, world):
    wrong = ranks.run(world, gather_jobs.alternates, 60 if SHARED else 1000, bound=280, seconds=60)
    assert max(wrong) < 2.0, wrong


def test_a_capture_wants_a_call_before_it(ranks):
    for said in ranks.run(2, jobs.unprepared, bound=120, seconds=60):
        assert "call it once before the capture" in said


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", WORLDS)
def test_replays_of_late_ranks_without_a_barrier(ranks, world, name, mixed):
    count = int(os.environ.get("REPLAYS", "60" if SHARED else "2000"))
    assert max(ranks.run(world, jobs.replays, name, count, mixed, bound=200, seconds=60)) < 4.0


@pytest.mark.parametrize("name", NAMES)
def test_replays_have_the_bits_of_eager_calls(ranks, name):
    assert all(ranks.run(2, jobs.same_bits, name, 8, bound=120, seconds=60))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world", WORLDS)
def test_replays_beside_eager_calls_that_the_host_counts(captured_ranks, world, name):
    count = 24 if SHARED else 600
    for error, is_same, repeated in captured_ranks.run(world, jobs.by_turns, name, count, bound=200, seconds=60):
        assert error < 4.0
        assert is_same
        assert repeated >= (0 if why_not() else count - 8)


def test_a_capture_wants_a_call_before_it_where_the_host_counts_others(captured_ranks):
    for said in captured_ranks.run(2, jobs.unprepared, bound=120, seconds=60):
        assert "call it once before the capture" in said


def test_kinds_that_are_called_once_are_captured(captured_ranks):
    assert max(captured_ranks.run(2, jobs.kinds, bound=200, seconds=60)) < 4.0


@pytest.mark.parametrize("job", ["piecewise", "layers"])
def test_graphs_of_engines_by_default(captured_ranks, job):
    assert max(captured_ranks.run(2, getattr(jobs, job), bound=200, seconds=60)) < 4.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("job", ["destroyed", "pooled"])
def test_graphs_and_their_memory_by_default(captured_ranks, job, name):
    assert max(captured_ranks.run(2, getattr(jobs, job), name, bound=120, seconds=60)) < 4.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("job", ["compiled", "compiled_and_captured"])
def test_compiled_functions_and_graphs_by_default(captured_ranks, job, name):
    assert max(captured_ranks.run(2, getattr(jobs, job), name, True, bound=200, seconds=60)) < 8.0


def test_torchs_fused_ops_in_graphs_by_default(captured_ranks):
    assert max(captured_ranks.run(2, jobs.torchs_ops, bound=200, seconds=60)) < 1e-2


@unshared("torch's barrier wants the ranks to run at once")
def test_torchs_fused_ops_in_graphs_of_torchs_compiler(captured_ranks):
    assert max(captured_ranks.run(2, jobs.torchs_ops_compiled, bound=200, seconds=60)) < 1e-2


def test_ranks_whose_devices_count_other_calls_raise_on_all():
    pool = make_pool()
    try:
        for first, second, right in pool.run(2, jobs.other_counts, bound=120, seconds=60):
            assert "differ in TILESTREAM_GRAPH_RANKS: " in first, first
            assert "differ in TILESTREAM_GRAPH_RANKS: " in second, second
            assert right
    finally:
        pool.close()


@pytest.mark.parametrize("name", NAMES)
def test_replays_of_captured_calls_are_traced(ranks, name):
    for wrong, error in ranks.run(2, jobs.traced, name, 6, bound=120, seconds=60):
        assert not wrong, wrong
        assert error < 4.0


@pytest.mark.parametrize("name", NAMES)
def test_what_torch_compiles_with_graphs_of_its_own(ranks, name):
    assert max(ranks.run(2, jobs.compiled, name, bound=200, seconds=60)) < 8.0


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_function_that_is_captured(ranks, name):
    assert max(ranks.run(2, jobs.compiled_and_captured, name, bound=200, seconds=60)) < 8.0


def test_graphs_of_several_calls_on_two_streams_and_of_two_groups(ranks):
    assert max(ranks.run(2, jobs.layers, bound=200, seconds=60)) < 4.0


@pytest.mark.parametrize("world", WORLDS)
def test_steps_cut_into_graphs_with_eager_calls_between(ranks, world):
    assert max(ranks.run(world, jobs.piecewise, bound=200, seconds=60)) < 4.0


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_destroyed_under_way_and_new_memory(ranks, name):
    assert max(ranks.run(2, jobs.destroyed, name, bound=120, seconds=60)) < 4.0


@pytest.mark.parametrize("name", NAMES)
def test_graphs_that_share_a_pool_of_memory(ranks, name):
    assert max(ranks.run(2, jobs.pooled, name, bound=120, seconds=60)) < 4.0


@pytest.mark.parametrize("name", NAMES)
def test_replays_in_another_order_on_another_rank_raise(name):
    pool = make_pool(TILESTREAM_GRAPH_RANKS="1")  # of its own, which its broken group does not leave
    try:
        for error, seconds in pool.run(2, jobs.crossed, name, bound=120, seconds=30):
            assert error.startswith(("ArrivalTimeout", "GroupBroken")), error
            assert seconds < 2.0 + SLACK
    finally:
        pool.close()


def test_a_capture_with_a_part_of_a_call_makes_no_graph():
    pool = make_pool(TILESTREAM_GRAPH_RANKS="1")  # of its own: torch may stay in a capture that failed
    try:
        for said, wrong in pool.run(2, jobs.half_captured, bound=120, seconds=30):
            assert "capture" in said, said
            assert wrong < 4.0
    finally:
        pool.close()


@pytest.mark.parametrize("absent", ["late", "stopped", "killed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_that_does_not_replay_ends_all_in_their_deadline(name, absent):
    pool = make_pool(TILESTREAM_GRAPH_RANKS="1")  # of its own, which its broken group does not leave
    try:
        *others, late = pool.run(
            WORLDS[-1] if absent == "killed" else 2, jobs.expires, name, absent, bound=120, seconds=30
        )
    finally:
        pool.close()
    assert absent == "killed" or late[1].startswith("GroupBroken"), late
    for error, again, works, first, rest in others:
        assert error.startswith(("ArrivalTimeout", "GroupBroken")), error
        assert again.startswith("GroupBroken"), again
        assert works
        assert first < 2 * 0.5 + SLACK, "soon after the deadline of 0.5 s"
        assert rest < SLACK, "a broken group waits for nothing"
    assert any(error.startswith("ArrivalTimeout") for error, *_ in others)
