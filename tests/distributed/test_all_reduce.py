"""`matmul_all_reduce` between real ranks, over gloo."""

from __future__ import annotations

import jobs
import pytest

#: a's rows, K, N, dtype, op, bias, scales.
CASES = [
    ((16,), 24, 20, "float32", "sum", False, False), ((1,), 24, 9, "float32", "avg", True, False),
    ((2, 5), 24, 9, "bfloat16", "sum", True, False), ((3, 2, 2), 8, 4, "float16", "avg", False, False),
    ((6,), 16, 8, "float8_e4m3fn", "sum", True, True), ((4,), 8, 4, "float64", "sum", False, False),
    ((0,), 8, 4, "float32", "sum", False, False),
]  # fmt: skip


@pytest.mark.parametrize("world", [1, 2, 3])
def test_sums_match_torch_on_every_rank(ranks, world):
    assert ranks.run(world, jobs.reduces, CASES) == [True] * world


def test_gradients_match_torch_in_one_graph(ranks):
    assert ranks.run(2, jobs.reduce_gradients) == [True] * 2


def test_invalid_arguments_raise_and_the_plan_says_why_it_is_unfused(ranks):
    for (op, several, k, bias, vector, differ), said in ranks.run(2, jobs.reduce_refuses):
        assert op == "ValueError: matmul_all_reduce: reduce_op='max'; it is one of sum, avg"
        assert several.startswith("TypeError: matmul_all_reduce: b is a list; it is one torch.Tensor")
        assert k.startswith("ValueError: matmul_all_reduce: ")
        assert "differ in K" in k
        assert bias.startswith("ValueError: matmul_all_reduce: bias has shape [5]"), bias
        assert vector.startswith("ValueError: matmul_all_reduce: a has 1 dimensions; it has at least 2")
        assert differ.startswith("ValueError: matmul_all_reduce: ranks ")
        assert "a: [4] rows float32 on rank 0, [5] rows float32 on rank 1" in differ or "[5] rows" in differ
        assert said.startswith("matmul_all_reduce, 2 ranks on cpu: N 6, K 8")
        assert "form      unfused: one after the other, by collective" in said
        assert "\n  partial   4 x 6 float32 of each rank" in said
        assert "pivot" not in said
