"""`all_gather_matmul` between real ranks, over gloo."""

from __future__ import annotations

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


def test_shards_in_several_chunks_that_do_not_divide_them(ranks):
    assert ranks.run(2, jobs.parts) == [True, True]


def test_own_rows_come_first_and_others_do_not_wait_for_a_late_rank(ranks, tmp_path):
    assert ranks.run(3, jobs.overlaps, str(tmp_path)) == [True] * 3


def test_calls_without_a_barrier(ranks):
    assert ranks.run(3, jobs.iterates, 50) == [True] * 3


def test_two_groups_at_once_and_one_breaks(ranks):
    assert ranks.run(2, faults.two_groups) == [True, True]


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
        assert waited < 10, "not at the deadline"


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
        assert seconds < 8


def test_a_rank_makes_another_call_while_another_dies(ranks):
    *others, _ = ranks.run(3, faults.differs_and_loses)
    for first, second in others:
        assert first.startswith(("ValueError", "GroupBroken")), first
        assert second.startswith("GroupBroken"), second


def test_autocast(ranks):
    assert ranks.run(2, jobs.autocasts) == [True, True]


def test_nothing_keeps_a_destroyed_group(ranks):
    assert ranks.run(2, jobs.forgets) == [True, True]


def test_shards_without_rows_columns_or_k(ranks):
    assert ranks.run(2, jobs.empties) == [True, True]


@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_match_torch(ranks, dim):
    assert ranks.run(2, jobs.gradients, dim) == [True, True]


def test_fakes_match_the_results(ranks):
    assert ranks.run(2, jobs.fakes) == [True, True]


@pytest.mark.slow
def test_compiles_to_one_graph(ranks):
    assert ranks.run(2, jobs.compiles) == [True, True]


def test_a_worker_limit_reaches_every_matmul(ranks):
    assert ranks.run(2, jobs.limits) == [True, True]


REFUSED = {
    "gather_dim": "ValueError: all_gather_matmul: gather_dim=2; it is a dimension of a_shard, -2 to 1",
    "a vector": "a_shard has 1 dimensions; it has at least 2",
    "no b": "TypeError: all_gather_matmul: b is list; it is a tensor, or a list of at least one",
    "K": "all_gather_matmul: a [8, 8] and b [9, 6] differ in K",
    "dtype": "TypeError: all_gather_matmul: a is torch.float32, b is torch.bfloat16",
    "b 3-D": "b has shape [2, 8, 6]; it is a matrix: [8, N]",
    "bias count": "bias: 1 for 2 b; there is one for each",
    "bias shape": "bias has shape [5]; it has one element a column: [6]",
    "activation": "activation='tanh'; it is None or one of relu",
    "scale": "scale_a has shape [3, 1]; it has one element, or one a row of a_shard",
    "scale dtype": "scale_a is torch.float64; scales are torch.float32",
    "form": "form='fast'; it is one of auto, fused, unfused",
    "deadline": "deadline=0; it is a positive, finite number of seconds",
    "group": "TypeError: all_gather_matmul: group is a str; it is a torch.distributed.ProcessGroup or None",
    "device": "b is on meta, a on cpu; all are on one device",
    "rows": "has 3 rows along scatter_dim=0; it is a multiple of the 2 ranks: pad it",
    "scatter_dim": "scatter_dim=1 is the last; one before it is cut: 0 to 0",
    "reduce_op": "reduce_op='max'; it is one of sum, avg",
    "int": "TypeError: all_gather_matmul: a_shard: dtype: torch.int32; tilestream multiplies",
    "scale type": "TypeError: all_gather_matmul: scale_a is a float; it is a torch.Tensor or None",
    "list": "TypeError: matmul_reduce_scatter: b is a list; it is one torch.Tensor: torch.cat(b, -1)",
    "plan K": "all_gather_matmul: a [8, 8] and b [9, 6] differ in K",
    "plan b 0-D": "all_gather_matmul: b has shape []; it is a matrix: [8, N]",
    "plan b 1-D": "all_gather_matmul: b has shape [8]; it is a matrix: [8, N]",
    "plan device": "all_gather_matmul: b is on meta, a on cpu; all are on one device",
    "plan int": "TypeError: all_gather_matmul: a_shard: dtype: torch.int32; tilestream multiplies",
    "plan scatter K": "matmul_reduce_scatter: a [2, 8] and b [9, 6] differ in K",
    "plan scatter b 3-D": "matmul_reduce_scatter: b has shape [2, 8, 6]; it is a matrix: [8, N]",
    "plan scatter device": "matmul_reduce_scatter: b is on meta, a on cpu; all are on one device",
    "plan scatter list": "TypeError: matmul_reduce_scatter: b is a list; it is one torch.Tensor: torch.cat(b, -1)",
}


def test_invalid_arguments_raise_before_anything_is_sent(ranks):
    for texts in ranks.run(2, faults.refuses):
        assert texts.keys() == REFUSED.keys()
        for name, text in texts.items():
            assert REFUSED[name] in text, name


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
