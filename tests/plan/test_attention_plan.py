"""Problems and plans of attention: what they count, what they pick, what they refuse and say."""

from __future__ import annotations

import itertools

import pytest
from made_up import A100, H100, MI300X

import tilestream as ts
from tilestream.core.attention import diagonal, seen_keys
from tilestream.plan.attention_plan import packed_heads
from tilestream.plan.attention_planner import plan_attention
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy.cpu_attention import unlike_torch


def test_pairs_are_those_that_the_masks_leave():
    for rows, keys, left, right, alignment in itertools.product(
        (0, 1, 5, 9), (0, 1, 4, 11), (None, 0, 3), (None, 0, 2), ("bottom_right", "top_left")
    ):
        problem = AttentionProblem(2, 4, 2, rows, keys, 8, window=(left, right), alignment=alignment)
        ahead, behind = diagonal(rows, keys) if alignment == "bottom_right" else (0, 0)
        wide = rows + keys
        seen = (
            seen_keys(i, ahead, behind, wide if left is None else left, wide if right is None else right, keys)
            for i in range(rows)
        )
        assert problem.pairs == 2 * sum(end - begin for begin, end in seen)
        assert problem.operations == 2 * 4 * problem.pairs * 16


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, ""), ({"causal": True}, ""), ({"seqlen_k": 9, "causal": "top_left"}, ""), ({"seqlen_k": 9}, ""),
        ({"seqlen_q": 1, "causal": True}, ""), ({"return_lse": True, "heads_kv": 1}, ""),
        ({"seqlen_k": 9, "causal": True}, "a diagonal that ends in the last corner"),
        ({"window": (3, None)}, "a window"), ({"softcap": 2.0}, "a soft cap"), ({"sinks": True}, "sinks"),
        ({"head_dim_v": 32}, "values of other columns than keys"), ({"dtype": "float8_e4m3fn"}, "of float8_e4m3fn"),
        ({"page_size": 16}, "keys in pages"), ({"batch": 0}, "nothing to compute"),
        ({"seqlen_k": 0}, "nothing to compute"),
    ],
    ids=str,
)  # fmt: skip
def test_torchs_kernel_is_taken_where_it_computes_the_same(change, why):
    made = ts.attention_plan(
        **{"seqlen_q": 64, "heads_q": 2, "head_dim": 16, "dtype": "float32", **change}, workers=None
    )
    assert unlike_torch(made.problem) == why
    assert (made.variant == "torch") == (not why)
    assert ("torch's flash attention for CPUs, one call for all heads" in made.explain()) == (not why)
    if not why:
        assert (made.label, made.schedule.grid.tiles) == ("cpu inline, by torch's kernel", 1)


@pytest.mark.parametrize(
    "forced", [{"workers": 1}, {"schedule": "static"}, {"arrival": ts.Arrival.uniform(32, 2)}], ids=str
)
def test_torchs_kernel_is_not_taken_where_workers_are_asked_for(forced):
    assert ts.attention_plan(64, heads_q=2, head_dim=16, **forced).variant == "workers"


def test_bytes():
    problem = AttentionProblem(2, 4, 1, 10, 20, 64, 32)
    assert problem.bytes == 2 * (2 * 10 * 4 * (64 + 32) + 2 * 20 * 1 * (64 + 32))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"batch": -1}, ValueError, "batch=-1; an extent is not negative"),
        ({"head_dim": 12}, ValueError, "head_dim=12; it must be a multiple of 8, at most 256"),
        ({"heads_kv": 3}, ValueError, "heads_q=4, heads_kv=3; each head of keys serves"),
        ({"dtype": "int8"}, TypeError, "dtype: int8; attention takes"),
        ({"alignment": "left"}, ValueError, "alignment='left'; it must be one of"),
        ({"layout": "sbhd"}, ValueError, "layout='sbhd'; it must be one of"),
        ({"page_size": 48}, ValueError, "page_size=48; it must be a power of two"),
        ({"window": (-1, 0)}, ValueError, "window: left=-1"),
        ({"softcap": -2.0}, ValueError, r"softcap=-2\.0; it must be positive"),
    ],
)
def test_a_problem_refuses(change, error, message):
    given = {"batch": 1, "heads_q": 4, "heads_kv": 2, "seqlen_q": 8, "seqlen_k": 8, "head_dim": 64, **change}
    with pytest.raises(error, match=message):
        AttentionProblem(**given)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"seqlen_q": 1.5}, ValueError, r"seqlen_q=1\.5; an extent is a whole number"),
        ({"causal": "left"}, ValueError, "causal='left'; it must be False, True"),
        ({"window": 3}, ValueError, r"window=3; it must be \(left, right\)"),
        ({"workers": 0}, ValueError, "workers=0; it must be a positive whole number"),
        ({"schedule": "stream_k"}, ValueError, "schedule='stream_k'; attention has auto, static, dynamic"),
        ({"window": ("a", None)}, ValueError, r"window=\('a', None\); a side is a whole number of keys"),
        ({"window": (1.5, 0)}, ValueError, r"window=\(1\.5, 0\); a side is a whole number of keys"),
        ({"softcap": "x"}, TypeError, "softcap='x'; it must be a number, or None for none"),
        ({"softcap": True}, TypeError, "softcap=True; it must be a number"),
        ({"softcap": float("nan")}, ValueError, "softcap=nan; it must be finite and positive, or None"),
        ({"softcap": -2}, ValueError, "softcap=-2; it must be finite and positive, or None"),
        ({"sinks": 3}, TypeError, "sinks=3; it must be True or False"),
        ({"return_lse": "yes"}, TypeError, "return_lse='yes'; it must be True or False"),
        (
            {"arrival": 3},
            TypeError,
            r"arrival=3; it must be a tilestream\.Arrival .*, or None where the keys are there",
        ),
        ({"backend": "foo"}, ValueError, "backend='foo'; attention has 'hopper', 'cdna', 'portable' on GPUs: leave"),
        (
            {"backend": "hopper"},
            NotImplementedError,
            "backend='hopper'; it is a GPU's.*leave backend= away, or give",
        ),
        ({"backend": "portable"}, NotImplementedError, "backend='portable'; it is a GPU's.* for the CPU"),
        ({"device": H100, "dtype": "float64"}, NotImplementedError, "dtype: float64 on a GPU; only the CPU takes it"),
        ({"device": A100, "dtype": "float8_e4m3fn"}, NotImplementedError, "an A100, sm_80, has no instructions for it"),
        ({"device": A100, "seqlen_q": 2**29}, NotImplementedError, "seqlen_q=536870912; the portable kernel counts"),
    ],
)
def test_a_plan_refuses(how, error, message):
    with pytest.raises(error, match=message):
        ts.attention_plan(**{"seqlen_q": 64, **how})


def test_a_plan_explains_itself():
    plan = ts.attention_plan(
        4096, 8192, batch=2, heads_q=16, heads_kv=2, head_dim=192, head_dim_v=128, causal=True, window=(1024, None),
        softcap=30.0, sinks=True, device=A100, dtype="bfloat16",
    )  # fmt: skip
    for part in (
        "attention 2 x 16 heads (2 of keys), 4096 x 8192, head (192, 128), bfloat16 -> bfloat16",
        "an A100, 108 workers", "backend   portable",
        "mask      causal, window (1024, all), bottom right, soft cap 30, sinks",
        "raster    longest first", "arrival   none: no gate code runs", "refused   static: tiles differ in length",
        "refused   hopper: it is for sm_90, this is sm_80", "bound by operations",
    ):  # fmt: skip
        assert part in plan.explain(), part
    assert plan.label.startswith("portable dynamic, 108 workers")
    assert "schedule  dynamic, 108 workers, 1 queue\n" in plan.explain()
    static = ts.attention_plan(4096, device=A100, schedule="static")
    assert f"schedule  static, {static.schedule.workers} workers\n" in static.explain()


def test_the_same_question_has_the_same_answer():
    problem = AttentionProblem(1, 4, 2, 64, 64, 64)
    assert plan_attention(problem, device=A100) is plan_attention(problem, device=A100)


def test_heads_are_packed_only_where_queries_are_short_and_none_has_a_scale():
    def packed(rows, heads=(8, 1), **more):
        return packed_heads(AttentionProblem(1, *heads, rows, 64, 64, **more), 64)

    assert [packed(rows) for rows in (1, 8, 9, 16, 32, 33, 64)] == [8, 8, 4, 4, 2, 1, 1]
    assert packed(1, (6, 2)) == 1
    assert packed(1, (6, 1)) == 2
    assert packed(1, dtype="float8_e4m3fn", scaled=True) == 1


@pytest.mark.parametrize("how", [{}, {"causal": True}, {"page_size": 16}, {"invariant": True}], ids=str)
@pytest.mark.parametrize("device", ["h100", "b200", "a100", "mi300x", "mi355x"])
def test_queries_without_rows_make_an_empty_launch(device, how):
    """However many query heads share a head of keys: more than a tile has rows, too."""
    for ratio in (1, 16, 32, 64, 96, 128, 256, 512):
        plan = ts.attention_plan(0, 100, batch=2, heads_q=2 * ratio, heads_kv=2, device=device, **how)
        assert plan.schedule.full_tiles == 0
        assert plan.positions >= 1
        assert ratio % plan.pack == 0
        assert " 0 x 100" in plan.explain()


def test_groups_keep_keys_in_the_second_level_cache_and_each_xcd_has_a_queue():
    problem = AttentionProblem(4, 32, 8, 8192, 8192, 128, causal=True)
    # 24 MB of heads of 4 MB, each for 4 query heads; 4 MB of a die's L2.
    for device, group, queues, split in ((A100, 6 * 4, 1, "items"), (MI300X, 4, 8, "columns")):
        plan = plan_attention(problem, device=device)
        assert (plan.group, plan.schedule.queues, plan.schedule.split) == (group, queues, split)


def test_packed_sequences_have_tiles_enough():
    for lengths in ((1,), (5, 0, 37, 1), (128, 128), (129, 1, 1)):
        packed = {"varlen": True, "tokens_q": sum(lengths), "tokens_k": 64}
        plan = plan_attention(AttentionProblem(len(lengths), 4, 2, max(lengths), 64, 64, **packed), device=A100)
        packs = 4 // plan.pack
        assert plan.schedule.grid.tiles >= packs * sum(-(-n // plan.positions) for n in lengths)
        assert plan.group <= packs


def test_a_unit_of_each_shader_engine_is_left_to_the_producers_of_keys():
    arrives = {"arrival": ts.Arrival.uniform(512, 8)}
    for device, asked, how, workers, refused in (
        ("mi300x", None, arrives, 272, 304), ("mi355x", None, arrives, 224, 256), ("mi300x", 300, arrives, 272, 300),
        ("mi300x", 100, arrives, 100, None), ("mi300x", None, {}, 304, None), ("mi355x", None, {}, 256, None),
        ("h100", None, arrives, 132, None),  # NVIDIA's stream writes take no SM
    ):  # fmt: skip
        plan = ts.attention_plan(4096, heads_q=8, device=device, workers=asked, **how)
        assert plan.schedule.workers == workers
        assert (f"{refused} workers: keys arrive: a CU of each shader engine" in plan.explain()) == bool(refused)
        assert bool(refused) == ("keys arrive: a CU" in plan.explain())
