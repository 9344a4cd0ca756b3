"""`tilestream.attention` on the CPU: numbers, layouts, lists of lengths, and NaN in memory that no row may read."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilestream as ts
from attention_maths import FEATURES, LENGTHS, MIXES, Case, attention_by_torch, call_of
from error_rule import passes
from tilestream.plan.policy import cpu_attention

HOWS = ("packed", "packed paged", "lengths", "paged")


@pytest.fixture
def small_blocks(monkeypatch):
    """Tiles of 16 rows, blocks of 16 keys: small operands have many."""
    from tilestream.plan.attention_planner import plan_attention

    monkeypatch.setattr(cpu_attention, "BLOCK", (16, 16))
    plan_attention.cache_clear()
    yield
    plan_attention.cache_clear()


def run(case: Case, seed: int = 0, **how) -> None:
    call = call_of(case, seed=seed)
    out, lse = ts.attention(**call.tensors, **call.options, return_lse=True, **how)
    call.check(out, lse)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("lengths", [((37,), (113,)), ((113,), (37,))], ids=str)
def test_dense(features, lengths):
    run(Case(*lengths, heads=(4, 2), dims=(32, 32), features=features))


@pytest.mark.parametrize("features", ["causal", "all"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths_at_the_edges_of_tiles(features, lengths):
    run(Case(*lengths, heads=(4, 2), dims=(32, 32), features=features))


@pytest.mark.parametrize(
    ("mix", "features"), [*((MIXES[0], name) for name in FEATURES), *((mix, "all") for mix in MIXES[1:])]
)
@pytest.mark.parametrize("how", HOWS)
def test_several_sequences(mix, how, features, small_blocks):
    queries, keys = mix
    if "packed" not in how:
        queries = queries[2:3] or queries[:1]
    run(Case(queries, keys, (4, 2), features=features, how=how, page=8, extra=2), workers=2)


@pytest.mark.parametrize("page", [1, 16, 256])
def test_pages(page, small_blocks):
    run(Case((20, 40), (100, 33), features="causal", how="packed paged", page=page))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("features", ["causal", "all"])
def test_dtypes(dtype, features, small_blocks):
    run(Case((40,), (50, 33), (4, 2), (32, 16), features, "lengths", dtype=dtype))


@pytest.mark.parametrize("dims", [(8, 8), (24, 40), (96, 96), (192, 128), (256, 256)], ids=str)
def test_columns(dims):
    run(Case((70,), (90,), (4, 2), dims, "causal"))


@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (6, 2), (6, 6), (32, 4)], ids=str)
@pytest.mark.parametrize("how", ["dense", "packed"])
def test_heads(heads, how):
    run(Case((20,), (33,), heads, features="sinks", how=how))


@pytest.mark.parametrize("schedule", ["static", "dynamic"])
@pytest.mark.parametrize("workers", [1, 3])
def test_every_schedule_and_number_of_workers(schedule, workers, small_blocks):
    run(Case((70,), (90, 20), (4, 2), features="all", how="lengths"), schedule=schedule, workers=workers)
    run(Case((70, 3), (90, 20), (4, 2), features="all", how="packed"), schedule=schedule, workers=workers)


@settings(max_examples=25)
@given(
    st.integers(0, 50), st.integers(0, 50), st.sampled_from([False, True, "top_left"]),
    st.none() | st.integers(0, 30), st.none() | st.integers(0, 30), st.booleans(),
)  # fmt: skip
def test_masks_of_any_kind(rows, keys, causal, left, right, sinks):
    generator = torch.Generator().manual_seed(rows * 64 + keys)
    q, k, v = (torch.randn(1, n, 2, 8, generator=generator, dtype=torch.float64) for n in (rows, keys, keys))
    sink = torch.randn(2, generator=generator) if sinks else None
    out, lse = ts.attention(q, k, v, causal=causal, window=(left, right), sinks=sink, return_lse=True)
    expected, logs = attention_by_torch(q[0], k[0], v[0], causal=causal, window=(left, right), sinks=sink)
    torch.testing.assert_close(out[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse[0], logs, rtol=1e-12, atol=1e-12)


@settings(max_examples=10)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=5), st.data())
def test_lists_of_any_lengths(lengths, data):
    queries, keys = zip(*lengths, strict=True)
    case = Case(
        queries, keys, (4, 2), features=data.draw(st.sampled_from(list(FEATURES))),
        how=data.draw(st.sampled_from(["packed", "packed paged"])), page=4, extra=data.draw(st.integers(0, 3)),
    )  # fmt: skip
    run(case)


def test_scale_and_soft_cap_are_numbers_of_numpy_too():
    q, k, v = torch.randn(1, 5, 2, 8), torch.randn(1, 7, 2, 8), torch.randn(1, 7, 2, 8)
    for number in (np.float32, np.float64, np.float16):
        expected = ts.attention(q, k, v, scale=0.25, softcap=2.0)
        assert torch.equal(ts.attention(q, k, v, scale=number(0.25), softcap=number(2)), expected)


def test_layout_bhsd():
    call = call_of(Case((20,), (33, 33), (4, 2), features="causal"))
    swapped = {name: x.transpose(1, 2) for name, x in call.tensors.items()}
    out, lse = ts.attention(**swapped, causal=True, layout="bhsd", return_lse=True)
    assert out.shape == (2, 4, 20, 16)
    assert out.is_contiguous()
    call.check(out.transpose(1, 2), lse)


def test_any_strides_whose_last_is_1():
    call = call_of(Case((20,), (33, 33), (4, 2), features="causal"))
    spread = {}
    for name, x in call.tensors.items():
        store = torch.full((x.shape[0], x.shape[2], x.shape[1], 40), math.nan)
        spread[name] = store[..., 3 : 3 + x.shape[3]].transpose(1, 2)
        spread[name].copy_(x)
    call.check(*ts.attention(**spread, causal=True, return_lse=True))


def test_out_is_written_in_place_and_nothing_beside_it():
    call = call_of(Case((20,), (33,), (4, 2)))
    store = torch.full((1, 20, 4, 24), math.nan)
    out = store[..., :16]
    assert ts.attention(**call.tensors, out=out) is out
    call.check(out, None)
    assert store[..., 16:].isnan().all()
    answer, lse = ts.attention(**call.tensors, out=out, return_lse=True)
    assert answer is out
    call.check(out, lse)
    into = torch.full((1, 4, 20, 16), math.nan)
    swapped = {name: x.transpose(1, 2) for name, x in call.tensors.items()}
    assert ts.attention(**swapped, layout="bhsd", out=into) is into
    call.check(into.transpose(1, 2), None)
    apart = torch.full((1, 20, 4, 32), math.nan)  # columns of a head that do not lie side by side
    turned = torch.full((16, 4, 1, 20), math.nan).permute(2, 3, 1, 0)
    for out in (apart[..., ::2], turned):
        answer, lse = ts.attention(**call.tensors, out=out, return_lse=True)
        assert answer is out
        call.check(out, lse)
    assert apart[..., 1::2].isnan().all()
    with torch.inference_mode():
        for out in (torch.full((1, 20, 4, 16), math.nan), torch.full((16, 4, 1, 20), math.nan).permute(2, 3, 1, 0)):
            ts.attention(**call.tensors, out=out)
            call.check(out, None)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_out_of_no_elements_is_resized(layout):
    call = call_of(Case((20,), (33,), (4, 2)))
    given = call.tensors if layout == "bshd" else {name: x.transpose(1, 2) for name, x in call.tensors.items()}
    out = torch.empty(0, 7)
    assert ts.attention(**given, layout=layout, out=out) is out
    assert out.is_contiguous()
    call.check(out if layout == "bshd" else out.transpose(1, 2), None)


@pytest.mark.parametrize("shape", [(0, 5, 2), (1, 0, 2), (2, 5, 0)], ids=str)
def test_nothing_to_compute(shape):
    batch, rows, heads = shape
    q, k = torch.ones(batch, rows, heads, 8), torch.ones(batch, 3, heads, 8)
    out, lse = ts.attention(q, k, k, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (batch, heads, rows)


def test_no_keys_at_all():
    q, none = torch.ones(1, 5, 2, 8), torch.ones(1, 0, 2, 8)
    out, lse = ts.attention(q, none, none, return_lse=True)
    assert not out.any()
    assert (lse == -math.inf).all()
    sinks = torch.tensor([0.5, -2.0])
    out, lse = ts.attention(q, none, none, sinks=sinks, return_lse=True)
    assert not out.any()
    assert torch.equal(lse, sinks[None, :, None].expand(1, 2, 5))


def test_large_scores_neither_overflow_nor_vanish():
    q, k, v = (x * 1e3 for x in torch.randn(3, 1, 9, 1, 16, generator=torch.Generator().manual_seed(0)))
    out, lse = ts.attention(q, k, v, return_lse=True)
    expected, logs = attention_by_torch(q[0].double(), k[0].double(), v[0].double())
    assert passes(out[0], expected, attention_by_torch(q[0], k[0], v[0])[0])
    torch.testing.assert_close(lse[0].double(), logs, rtol=1e-6, atol=1e-2)


def test_nan_stays_where_it_belongs():
    call = call_of(Case((20,), (20,), (2, 1), features="causal"))
    call.tensors["k"][0, 7] = math.nan
    out = ts.attention(**call.tensors, causal=True)
    assert out[0, 7:].isnan().all()
    assert not out[0, :7].isnan().any()


def test_the_same_bits_each_time(small_blocks):
    call = call_of(Case((70, 3), (90, 20), (4, 2), features="all", how="packed"))
    first = ts.attention(**call.tensors, **call.options, workers=2)
    for _ in range(20):
        assert torch.equal(first, ts.attention(**call.tensors, **call.options, workers=2))


def test_more_keys_than_a_block_of_scores_fits():
    """Memory is bounded by blocks, whatever the lengths."""
    q, k = torch.randn(1, 64, 1, 8), torch.randn(1, 2**16, 1, 8)
    assert ts.attention(q, k, k).isfinite().all()


def test_scales_of_one_element_of_heads_and_of_sequences():
    call = call_of(Case((5,), (9, 9), (4, 2), dtype=torch.float8_e4m3fn))
    q, k, v = (call.tensors[name] for name in "qkv")
    for of_q, of_k in ((torch.tensor(0.5), torch.rand(2)), (torch.rand(4), torch.rand(2, 2)), (None, torch.rand(1))):
        wide_q = torch.ones(2, 4) if of_q is None else of_q.expand(2, 4)
        call.scales = (wide_q, of_k.expand(2, 2), torch.ones(2, 2))
        call.check(ts.attention(q, k, v, scale_q=of_q, scale_k=of_k), None)


def test_the_shapes_of_an_output_are_told_as_the_caller_has_them():
    q, k, v = (torch.randn(2, 4, 7, 32) for _ in range(3))
    with pytest.raises(ValueError, match=r"out has shape \[7\]; the result has \[2, 4, 7, 32\]"):
        ts.attention(q, k, v, layout="bhsd", out=torch.empty(7))
