"""`matmul_reduce_scatter` between real ranks, over gloo: sums in the order of the ranks, the same bits each time."""

from __future__ import annotations

import jobs
import pytest


def cases():
    """(a's rows, of which one dimension is multiplied by the world; scatter_dim, K, N, dtype, form, op, bias)."""
    for form in ("fused", "unfused"):
        yield (16,), 0, 24, 20, "float32", form, "sum", False
        yield (7,), 0, 24, 9, "float32", form, "avg", True
        yield (2, 5), 1, 24, 9, "float32", form, "sum", True
        yield (2, 5), 0, 24, 9, "bfloat16", form, "sum", False
        yield (2, 3, 2), 1, 8, 4, "float16", form, "avg", False
        yield (4,), 0, 8, 4, "float64", form, "sum", False


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_match_torch(ranks, world):
    assert ranks.run(world, jobs.scatters, list(cases())) == [True] * world


@pytest.mark.slow
def test_sums_between_five_ranks(ranks):
    assert ranks.run(5, jobs.scatters, list(cases())) == [True] * 5
