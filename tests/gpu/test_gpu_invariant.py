"""Under `tilestream.invariant` a row has the same bits in random pairs of calls; INVARIANT_PAIRS says how many."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from gpu_runs import ON_HOPPER

from error_rule import passes

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


def test_torchs_own_functions_of_rows():
    """Each row has its own bits, and errs as torch's; the lengths are blocks of `sum_rows`, and tails of one."""
    functional = torch.nn.functional
    calls = {
        "mean": lambda x: x.mean(-1), "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1),
        "rms_norm": lambda x: functional.rms_norm(x, (x.shape[-1],), eps=torch.finfo(torch.float32).eps),
        "layer_norm": lambda x: functional.layer_norm(x, (x.shape[-1],)),
    }  # fmt: skip
    for columns in (1, 7, 1024, 4097):
        x = torch.randn(300, columns, device="cuda")
        for name, call in calls.items():
            want, theirs = call(x.double()), call(x)
            with ts.use_invariant_torch():
                made = call(x)
                assert all(torch.equal(call(x[i : i + 3]), made[i : i + 3]) for i in (0, 17, 297)), name
            assert passes(made, want, theirs), (name, columns)
        normed = functional.rms_norm(x, (columns,))
        with ts.use_invariant_torch():  # without an eps both have float32's; a double has its own
            torch.testing.assert_close(functional.rms_norm(x, (columns,)), normed)


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_a_windows_edge_is_anywhere_in_a_tile(columns):
    """A row's bits, log-sum-exp too, where its tile begins at other queries and so has other blocks before its own."""
    torch.manual_seed(columns)
    q, k, v = (torch.randn(1, 681, heads, columns, device="cuda").bfloat16() for heads in (16, 2, 2))
    how = {"causal": True, "window": (300, 0), "return_lse": True}
    with ts.invariant():
        whole, whole_lse = ts.attention(2 * q, k, v, **how)
        for rows in (375, 300, 247, 70, 1):
            out, lse = ts.attention(2 * q[:, -rows:], k, v, **how)
            assert torch.equal(lse, whole_lse[..., -rows:]), rows
            assert torch.equal(out, whole[:, -rows:]), rows
