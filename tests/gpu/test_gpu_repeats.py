"""Equal calls between ranks, each issued by one native call: same bits, in any order, and in time.

PYTHONPATH=src python -m pytest -o addopts= -q tests/gpu/test_gpu_repeats.py
"""

from __future__ import annotations

import pytest
import repeat_jobs as jobs
from test_gpu_distributed import SHARED, SOON, Pools, make_pool

from tilestream.launch.native import why_not

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(why_not()), reason=f"no extension: {why_not()}"),
]


@pytest.fixture(scope="module")
def ranks():
    pools = Pools()
    yield pools
    pools.close()


def test_repeated_calls_have_the_bits_of_the_usual_way(ranks):
    for found in ranks.run(2, jobs.same_bits, bound=240, seconds=60):
        for name, (same, count) in found.items():
            assert same, name
            assert count >= jobs.CALLS - 5, f"{name}: {count} of {jobs.CALLS} calls were repeated"


def test_calls_of_compiled_functions_are_repeated(ranks):
    for found in ranks.run(2, jobs.compiled, bound=240, seconds=60):
        for name, (error, count) in found.items():
            assert error < 4.0, name
            assert count >= jobs.CALLS - 5, f"{name}: {count} of {jobs.CALLS} calls were repeated"


def test_kinds_in_turn_on_two_streams_without_a_barrier(ranks):
    rounds = 6 if SHARED else 40
    for error, count in ranks.run(2, jobs.in_turn, rounds, bound=240, seconds=60):
        assert error == 0.0
        assert count > 8 * rounds


@pytest.mark.parametrize("op", ["gather", "sum", "all-reduce"])
def test_a_late_rank_ends_a_repeated_call(op):
    pool = make_pool()
    try:
        first, last = pool.run(2, jobs.late, op, bound=120, seconds=60)
    finally:
        pool.close()
    assert "ArrivalTimeout" in first or "GroupBroken" in first, (first, SOON)
    assert last != "nothing", "the late rank knows, too"
