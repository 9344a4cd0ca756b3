"""`tilestream.distributed.moe` between real ranks, over gloo: against plain torch, and when a rank is lost."""

from __future__ import annotations

from unittest import mock

import moe_jobs
import pytest
import torch

from tilestream.distributed import moe_dispatch


def cases():
    """(each rank's tokens, top_k, experts of a rank, dtype, form, more)."""
    for form in ("fused", "unfused"):
        yield (5, 8, 3), 2, 2, "float32", form, {}
        yield (7, 0, 4), 1, 3, "float32", form, {"activation": "gelu_tanh"}
        yield (6, 5, 7), 3, 3, "bfloat16", form, {"activation": "relu"}
        yield (6, 5, 7), 2, 2, "float64", form, {"only": [1], "activation": None}
    yield (4, 3, 2), 2, 4, "float16", "auto", {"activation": "gelu"}
    yield (0, 0, 0), 2, 2, "float32", "fused", {}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_results_and_gradients_are_those_of_plain_torch(ranks, world):
    assert ranks.run(world, moe_jobs.matches, list(cases())) == [True] * world


@pytest.mark.parametrize("world", [1, 2])
def test_shapes_routers_and_graphs(ranks, world):
    for text in ranks.run(world, moe_jobs.shapes_and_routers):
        assert f"moe, {world} ranks" in text
        why = (
            "refused   fused: one rank: nothing travels"
            if world == 1
            else "fused: each source's rows are multiplied as they come"
        )
        assert why in text
        assert "agreed    op moe, x [..., 12] float32, top_k 2, experts 2, hidden 10, activation silu" in text


def test_products_begin_when_their_first_source_is_there(ranks, tmp_path):
    assert ranks.run(3, moe_jobs.begins_with_the_first, str(tmp_path)) == [True] * 3


def test_an_expert_begins_before_its_sources_other_rows_are_there(ranks, tmp_path):
    assert ranks.run(2, moe_jobs.begins_with_the_first_expert, str(tmp_path)) == [True] * 2


def test_parts_have_each_row_once_and_an_experts_rows_in_one():
    for counts in ([0], [5], [0, 0, 3], [3, 0, 0], [1, 2, 3, 4], [9, 0, 1, 1]):
        for size in (1, 2, 4, 100):
            with mock.patch.object(moe_dispatch, "PART_BYTES", size):
                parts = moe_dispatch.parts_of(torch.tensor(counts), 1)
            assert [expert for part in parts for expert in range(part.first, part.end)] == list(range(len(counts)))
            assert [sum(counts[part.first : part.end]) for part in parts] == [
                part.rows.stop - part.rows.start for part in parts
            ]
            assert parts[-1].rows.stop == sum(counts)
            assert all(part.rows.stop - part.rows.start >= size for part in parts[:-1])


def test_parts_are_large_for_their_messages_and_small_for_what_is_multiplied_meanwhile():
    """256 rows of 8 KiB for each of 32 experts: the first products do not wait for 64 MiB, nor for one row's message.

    gloo takes about 20 us a message, as long as 64 KiB take at 3 GB/s.
    """
    counts, row_bytes = torch.full((32,), 256), 2**13
    parts = moe_dispatch.parts_of(counts, row_bytes)
    assert len(parts) >= 16
    few = moe_dispatch.parts_of(torch.ones(32, dtype=torch.int64), row_bytes)
    assert all((part.rows.stop - part.rows.start) * row_bytes >= 2**16 for part in few[:-1])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("width", "x: [..., 16] float32 on rank 1"),
        ("experts", "experts: 4 on rank 1"),
        ("op", "op: all_gather_matmul on rank 1"),
    ],
)
def test_ranks_that_differ_all_raise(ranks, how, said):
    texts, usable = zip(*ranks.run(2, moe_jobs.differs, how), strict=True)
    assert usable == (True, True)
    assert all(text.startswith("ValueError: ") and "ranks" in text for text in texts)
    assert said in texts[1] or said in texts[0]


@pytest.mark.parametrize("when", ["before", "counts"])
def test_a_lost_rank_raises_on_all_others(ranks, when, tmp_path):
    *others, last = ranks.run(3, moe_jobs.loses, when, str(tmp_path))
    assert last == "lost"
    for first, second, waited in others:
        assert first.startswith("GroupBroken"), first
        assert second.startswith("GroupBroken"), second
        assert waited < 300


@pytest.mark.parametrize("form", ["fused"])
def test_a_rank_that_does_not_call_is_named_at_the_deadline(ranks, form):
    *others, (late, after) = ranks.run(3, moe_jobs.expires, form)
    assert late.startswith("GroupBroken"), late
    assert after.startswith("GroupBroken"), after
    firsts = [first for first, _ in others]
    assert any(first.startswith("ArrivalTimeout: moe: rank 2's part") for first in firsts), firsts
    assert all(first.startswith(("ArrivalTimeout", "GroupBroken")) for first in firsts), firsts
    assert all(second.startswith("GroupBroken") for _, second in others)


def test_a_backward_that_a_rank_does_not_call_raises(ranks):
    first, last = ranks.run(2, moe_jobs.backward_expires)
    assert first.startswith("ArrivalTimeout: moe_backward: rank 1's part"), first
    assert last == "absent"


def test_invalid_arguments_raise_before_anything_is_sent(ranks):
    assert ranks.run(2, moe_jobs.refuses) == [True] * 2
