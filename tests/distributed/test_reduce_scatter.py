"""`matmul_reduce_scatter` between real ranks, over gloo: sums in the order of the ranks, the same bits each time."""

from __future__ import annotations

import jobs
import pytest


def cases():
    """(a's rows, of which one dimension is multiplied by the world; scatter_dim, K, N, dtype, form, more)."""
    for form in ("fused", "unfused"):
        yield (16,), 0, 24, 20, "float32", form, {}
        yield (7,), 0, 24, 9, "float32", form, {"reduce_op": "avg", "bias": True}
        yield (2, 5), 1, 24, 9, "float32", form, {"bias": True}
        yield (2, 5), 0, 24, 9, "bfloat16", form, {}
        yield (2, 3, 2), 1, 8, 4, "float16", form, {"reduce_op": "avg"}
        yield (4,), 0, 8, 4, "float64", form, {}
        yield (2, 3), 1, 16, 8, "float8_e4m3fn", form, {"scaled": "row"}
        yield (6,), 0, 16, 8, "float8_e4m3fn", form, {"scaled": "tensor"}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_match_torch(ranks, world):
    assert ranks.run(world, jobs.scatters, list(cases())) == [True] * world


@pytest.mark.slow
def test_sums_between_five_ranks(ranks):
    assert ranks.run(5, jobs.scatters, list(cases())) == [True] * 5


@pytest.mark.parametrize("world", [1, 2])
def test_under_the_promise_a_row_has_its_own_bits(ranks, world):
    assert ranks.run(world, jobs.invariants) == [True] * world
