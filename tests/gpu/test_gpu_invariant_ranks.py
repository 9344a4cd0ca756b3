"""Under `tilestream.invariant` a row's bits do not depend on ranks: pushed, pulled, unfused, eager and captured.

Ranks as in ``test_gpu_distributed.py``: one a GPU, or all on one.

    PYTHONPATH=src python -m pytest -o addopts= -q tests/gpu/test_gpu_invariant_ranks.py
"""

from __future__ import annotations

import invariant_rank_jobs as jobs
import pytest
from gpu_runs import ON_HOPPER
from test_gpu_distributed import WORLDS, make_pool

pytestmark = [
    pytest.mark.timeout(300), pytest.mark.skipif(not ON_HOPPER, reason="what adds alike is measured on Hopper"),
]  # fmt: skip


@pytest.fixture(scope="module", params=[False, True], ids=["by the host", "by the device"])
def counted(request):
    """Whether the device counts the calls, which graphs need; and ranks that do so."""
    pools = {}

    def run(world, job, *given):
        if world not in pools:
            pools[world] = make_pool(**({"TILESTREAM_GRAPH_RANKS": "1"} if request.param else {}))
        return pools[world].run(world, job, *given, bound=240, seconds=60)

    yield request.param, run
    for pool in pools.values():
        pool.close()


@pytest.mark.parametrize("job", [jobs.gathers, jobs.sums], ids=lambda job: job.__name__)
@pytest.mark.parametrize("world", WORLDS)
def test_rows_have_the_same_bits_on_every_rank_and_in_every_way(counted, world, job):
    captured, run = counted
    for found in run(world, job, captured):
        assert found
        assert not {name: count for name, count in found.items() if count}, found
        assert any("captured" in name for name in found) == captured


def test_without_the_promise_some_rows_differ(counted):
    """Else the comparison could not fail."""
    _, run = counted
    assert min(run(2, jobs.free)) > 0
