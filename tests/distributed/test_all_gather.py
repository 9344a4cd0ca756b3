"""`all_gather_matmul` between real ranks, over gloo."""

from __future__ import annotations

import re

import faults
import jobs
import pytest

FORMS = ("fused", "unfused")


def cases():
    """(shape of a shard, gather_dim, N of each b, dtype, form, more)."""
    for form in FORMS:
        yield (16, 24), 0, (20,), "float32", form, {}
        yield (37, 24), 0, (33, 7), "float32", form, {"bias": True, "activation": "gelu"}
        yield (2, 5, 24), 1, (9,), "float32", form, {}
        yield (2, 3, 4, 8), 2, (9,), "float32", form, {}
        yield (2, 5, 24), 0, (9,), "bfloat16", form, {"activation": "silu"}
        yield (3, 8), 1, (9,), "float32", form, {}
        yield (2, 3, 8), 2, (9, 4), "float32", form, {"bias": True}
        yield (6, 16), 0, (8,), "float16", form, {}
        yield (6, 16), 0, (8, 8), "float8_e4m3fn", form, {"scaled": "row"}
        yield (2, 3, 16), 1, (8,), "float8_e4m3fn", form, {"scaled": "tensor"}
        yield (1, 8), 0, (3,), "float64", form, {}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gathers_match_torch(ranks, world):
    some = list(cases())[:: 3 if world == 1 else 1]
    assert ranks.run(world, jobs.gathers, some) == [True] * world


@pytest.mark.slow
def test_gathers_between_five_ranks(ranks):
    assert ranks.run(5, jobs.gathers, list(cases())) == [True] * 5


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ("rows", "a_shard: [4, 8] float32 on rank 0, [5, 8] float32 on rank 1"),
        ("dtype", "a_shard: [4, 8] float32 on rank 0, [4, 8] bfloat16 on rank 1"),
        ("form", "form: fused on rank 0, unfused on rank 1"),
        ("op", "op: all_gather_matmul on rank 0, matmul_reduce_scatter on rank 1"),
    ],
)
def test_different_calls_raise_on_all_ranks_and_the_group_stays_usable(ranks, how, field):
    texts = ranks.run(3, faults.differs, how)
    assert all(text.startswith("ValueError") for text in texts), texts
    assert f"ranks 0 and 1 differ in {field}" in texts[0]
    assert "All ranks of a group make the same calls" in texts[0]


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_rank_that_dies_breaks_the_group_at_once(ranks, when, tmp_path):
    *others, lost = ranks.run(3, faults.loses, when, str(tmp_path))
    assert lost == "lost"
    for first, second, waited in others:
        assert first.startswith("GroupBroken: process group '"), first
        assert "all_gather_matmul: lost rank" in first
        assert "make a new one of the ranks that are left" in first
        assert second.startswith("GroupBroken"), second
        assert waited < 300, "not at the deadline"


@pytest.mark.parametrize("op", ["gather", "scatter"])
def test_a_rank_that_does_not_come_is_waited_for_until_the_deadline(ranks, op):
    *others, late = ranks.run(3, faults.expires, op)
    names = {first.split(":")[0] for first, _, _ in others}
    assert "ArrivalTimeout" in names <= {"ArrivalTimeout", "GroupBroken"}, others  # the first may abort the second
    said = next(first for first, _, _ in others if first.startswith("ArrivalTimeout"))
    what = "rank 2's part of a_shard's chunk 2" if op == "gather" else "rank 2's part's chunk 0"
    assert what in said
    assert "within the deadline of 0.5 s: rank " in said
    for first, second, seconds in (*others, late):
        assert first.split(":")[0] in ("ArrivalTimeout", "GroupBroken")
        assert second.startswith("GroupBroken"), "from then on"
        assert seconds < 300


def test_a_rank_makes_another_call_while_another_dies(ranks):
    *others, _ = ranks.run(3, faults.differs_and_loses)
    for first, second in others:
        assert first.startswith(("ValueError", "GroupBroken")), first
        assert second.startswith("GroupBroken"), second


def test_a_tensor_that_a_stream_fills_is_refused_before_anything_is_sent(ranks):
    wanted = {
        "gather": "all_gather_matmul: a_shard", "gather of b": r"all_gather_matmul: b\[1\]",
        "scatter": "matmul_reduce_scatter: a", "reduce": "matmul_all_reduce: a", "moe": "moe: x",
        "torch's gather": "all_gather_matmul: a_shard", "torch's scatter": "fused_matmul_reduce_scatter: a",
    }  # fmt: skip
    for said in ranks.run(2, faults.reads_what_is_not_filled):
        assert len(said) == 12
        for name, text in said:
            assert re.match(f"ValueError: {wanted[name]} is a tensor that ts.stream_in has not filled yet", text), text


def test_plans_explain_themselves(ranks):
    one, other = ranks.run(2, jobs.explains)
    assert one["agreed"] == other["agreed"], "all ranks compare the same fields"
    assert "fused: transfer and matmul overlap, by gloo" in one["fused"]
    assert 'the caller asks for form="unfused"' in one["unfused"]
    assert "modelled: " in one["auto"]
    assert "form      fused" in one["auto"]
    assert "form      unfused" in one["small"]
    assert "refused   fused: the last dimension is cut" in one["last"]
    assert "matmul_reduce_scatter, 2 ranks on cpu" in one["scatter"]
