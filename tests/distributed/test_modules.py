"""Tensor-parallel layers against the same layers on one rank."""

from __future__ import annotations

import jobs


def test_layers_and_their_gradients_match_one_rank(ranks):
    said = ranks.run(2, jobs.layers)
    assert said == ["ValueError: RowParallelLinear: in_features=5; it is a multiple of the 2 ranks"] * 2
