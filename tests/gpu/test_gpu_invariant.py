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

from benchmarks.invariance.pairs import captured, compare, in_pages

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


@pytest.mark.parametrize("how", [{}, {"dtype": torch.float16}, {"backend": "portable"}, {"dtype": torch.float8_e4m3fn}])
def test_a_row_of_a_group_has_the_bits_of_mm(how, request):
    """Whatever the groups' lengths, which choose the tile: from a few rows of each to thousands."""
    how = {"dtype": torch.bfloat16, "backend": "hopper"} | how
    if how["backend"] == "portable":
        request.getfixturevalue("portable")
    torch.manual_seed(0)
    rows = torch.randn(48, 2048, device="cuda").to(how["dtype"])
    b = torch.randn(8, 1024, 2048, device="cuda").to(how["dtype"]).transpose(1, 2)
    with ts.invariant():
        want = [ts.mm(rows, each, out_dtype=torch.bfloat16) for each in b]
        for mean in (6, 60, 200, 1000, 4000):
            lengths = torch.randint(1, 2 * mean, (8,))
            ends = lengths.cumsum(0)
            a = torch.randn(int(ends[-1]), 2048, device="cuda").to(how["dtype"])
            places = [(int(ends[i] - lengths[i]), min(48, int(lengths[i]))) for i in range(8)]
            for first, count in places:
                a.view(torch.uint8)[first : first + count] = rows.view(torch.uint8)[:count]
            made = ts.grouped_mm(a, b, ends.int().cuda(), out_dtype=torch.bfloat16)
            for (first, count), right in zip(places, want, strict=True):
                assert torch.equal(made[first : first + count], right[:count]), (mean, first)


STRIPS = {
    "a step": ((1, 1, 8192), {}),
    "some queries of a batch": ((3, 4, 5000), {}),
    "many rows": ((2, 16, 3001), {}),
    "64 columns": ((1, 2, 4100), {"columns": 64}),
    "a window": ((2, 1, 6000), {"window": (3500, 0)}),
    "float16": ((1, 1, 7777), {"dtype": torch.float16}),
    "a head of keys for each": ((1, 1, 4096), {"heads": (4, 4)}),
}


@pytest.mark.parametrize("name", STRIPS)
@pytest.mark.parametrize("page", [0, 16, 128])
def test_values_in_strips_have_the_unsplit_bits(name, page):
    """And the prompt's last rows, which the Hopper kernel computes in tiles of 128 rows."""
    (batch, queries, keys), how = STRIPS[name]
    how = {"columns": 128, "heads": (16, 4), "dtype": torch.bfloat16, "window": None} | how
    torch.manual_seed(keys)
    q, k, v = (
        torch.randn(batch, keys, heads, how["columns"], device="cuda").to(how["dtype"])
        for heads in (how["heads"][0], *2 * how["heads"][1:])
    )
    given = {"causal": True, "window": how["window"], "return_lse": True}
    problem = {"batch": batch, "heads_q": how["heads"][0], "heads_kv": how["heads"][1], "head_dim": how["columns"]}
    assert ts.attention_plan(
        queries, keys, **problem, causal=True, window=how["window"], page_size=page, device="cuda", invariant=True
    ).strips
    where, pages = {}, (k, v)
    if page:
        pages, where = in_pages(page, k[:1], v[:1])
        for one in range(1, batch):
            more, there = in_pages(page, k[one : one + 1], v[one : one + 1])
            there["block_table"] += len(pages[0])
            pages = [torch.cat(pair) for pair in zip(pages, more, strict=True)]
            where = {name: torch.cat((where[name], there[name])) for name in where}
    with ts.invariant():
        prompt, prompt_lse = ts.attention(2 * q, k, v, **given)
        step = 2 * q[:, -queries:]
        out, lse = ts.attention(step, *pages, **where, **given)
        with ts.worker_limit(100):  # without strips
            whole, whole_lse = ts.attention(step, *pages, **where, **given)
        again, again_lse = captured(lambda: ts.attention(step, *pages, **where, **given))
    for made, made_lse in ((whole, whole_lse), (prompt[:, -queries:], prompt_lse[..., -queries:]), (again, again_lse)):
        assert torch.equal(lse, made_lse)
        assert torch.equal(out, made)
