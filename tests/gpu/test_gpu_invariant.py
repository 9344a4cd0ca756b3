"""Under `tilestream.invariant` a row has the same bits in random pairs of calls; INVARIANT_PAIRS says how many."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from gpu_runs import ON_HOPPER

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.invariance.pairs import compare

import tilestream as ts

PAIRS = int(os.environ.get("INVARIANT_PAIRS", "300"))


@pytest.mark.parametrize("attention", [0.0, 1.0], ids=["products", "attention"])
def test_a_row_has_the_same_bits_in_each_of_two_calls(attention):
    found = compare(7, PAIRS, attention=attention)
    assert found.pairs >= PAIRS
    assert not found.differing, found.differing[:5]
    assert all("copy them" in text for text in found.refused), found.refused[:5]


def test_without_the_promise_some_rows_differ():
    """Else the pairs could not fail: a split of K that the promise excludes changes bits."""
    a, b = torch.randn(16, 8192, device="cuda").bfloat16(), torch.randn(8192, 1024, device="cuda").bfloat16()
    free, whole = ts.matmul(a, b, schedule="stream_k"), ts.matmul(a, b, schedule="static")
    assert not torch.equal(free, whole)
    with ts.invariant():
        assert torch.equal(ts.matmul(a, b), ts.matmul(a.repeat(64, 1), b)[:16])
        with pytest.raises(NotImplementedError, match="stream_k cuts K by the numbers of tiles and workers"):
            ts.matmul(a, b, schedule="stream_k")
