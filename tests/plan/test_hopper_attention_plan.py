"""The policy of the Hopper attention kernel: what it takes and refuses, with which tiles; no GPU, no Triton."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from tilestream.plan import hopper_attention as policy
from tilestream.plan.attention import AttentionProblem
from tilestream.plan.attention_choose import plan_attention
from tilestream.plan.device import DeviceProperties

H100 = DeviceProperties(
    "an H100", "portable", 132, 256 * 1.755e9, 3.35e12, "a stub", "sm_90", 232448,
    (("float16", 4096 * 1.755e9), ("bfloat16", 4096 * 1.755e9)),
)  # fmt: skip
DENSE = AttentionProblem(4, 16, 16, 4096, 4096, 128)
LIES = (4096 * 2048, 2048, 128)


def plan(problem: AttentionProblem, **how):
    return plan_attention(problem, device=H100, **how)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "float32"}, "it multiplies bfloat16, float16, not float32"),
        ({"scaled": True}, "q, k or v has scales, which it does not apply"),
        ({"positive": False}, "a scale that is not positive"),
        ({"seqlen_q": 0}, "there is nothing to load"),
        ({"page_size": 4, "pages": 9}, "pages of 4 keys; a copy brings 8 at least"),
        ({"aligned": False}, "a stride or an address is no multiple of 16 bytes"),
        ({"no_tma": "out begins 2 bytes"}, "out begins 2 bytes"),
        ({"batch": 2**13, "seqlen_q": 2**14}, "rows of 16 heads"),
    ],
    ids=lambda x: "" if isinstance(x, str) else "-".join(x),
)
def test_what_it_does_not_do_goes_to_the_portable_kernel_with_the_reason(change, why):
    problem = replace(DENSE, **change)
    assert why in policy.refusal(problem, H100)
    with pytest.raises(NotImplementedError, match="backend='hopper': "):
        plan(problem, backend="hopper")
    with pytest.raises(NotImplementedError):
        next(policy.candidates(problem, H100, 132, kind="dynamic"))
    made = plan(problem)
    assert made.backend == "portable"
    assert why in made.explain()


def test_rows_are_counted_in_31_bits():
    assert policy.refusal(replace(DENSE, seqlen_k=2**29), H100) == f"seqlen_k={2**29}; it counts rows in 31 bits"


def test_another_device_is_refused():
    assert policy.refusal(DENSE, replace(H100, arch="gfx942")) == "it is for sm_90, this is gfx942"
    assert plan_attention(DENSE, device=replace(H100, arch="sm_80", shared=166912)).backend == "portable"


def test_the_portable_kernel_can_be_had():
    made = plan(DENSE, backend="portable")
    assert made.backend == "portable"
    assert "hopper: backend='portable' given" in made.explain()
    assert plan(DENSE).backend == "hopper"
    with pytest.raises(ValueError, match="backend='cuda'; attention has 'hopper', 'cdna', 'portable'"):
        plan(DENSE, backend="cuda")


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (256, 256), (192, 128), (8, 8), (80, 80), (96, 40), (64, 256)])
@pytest.mark.parametrize("more", [{}, {"window": (300, None)}, {"softcap": 30.0}], ids=str)
def test_every_head_has_a_tile_that_fits(dims, more):
    problem = replace(DENSE, head_dim=dims[0], head_dim_v=dims[1], **more)
    found = list(policy.candidates(problem, H100, 132, kind="dynamic"))
    assert found
    for one in found:
        consumers, block = one.block[0] // policy.ROWS, one.block[1]
        columns = policy.columns_of(problem)
        # Scores, their weights, and the accumulator, in a thread's registers beside what else it needs.
        held = block // 2 + block // 4 + columns // 2
        assert held <= (160 if consumers == 3 else 232) - 40
        queries = policy.queries_of(problem, consumers, block, one.stages, H100.shared)
        assert policy.shared_bytes(problem, consumers, block, one.stages, queries) <= H100.shared
        assert one.stages >= 2
        assert columns >= problem.head_dim_v
        assert policy.parts_of(problem) * policy.width(problem) >= problem.head_dim


def test_heads_are_grouped_so_that_their_keys_stay_in_l2():
    for keys in (512, 4096, 65536):
        made = plan(replace(DENSE, seqlen_q=keys, seqlen_k=keys))
        assert made.group == max(1, min(64, int(policy.L2_BYTES // (keys * 512))))
    # Query heads of one head of keys are grouped whole.
    assert plan(replace(DENSE, heads_kv=2, seqlen_k=65536, seqlen_q=65536)).group == 8


@pytest.mark.parametrize(
    ("rows", "heads", "pack"),
    [(4096, (16, 2), 1), (16, (16, 2), 8), (33, (16, 2), 2), (1, (64, 1), 64), (1, (6, 1), 2)],
)
def test_short_queries_are_packed(rows, heads, pack):
    made = plan(replace(DENSE, seqlen_q=rows, heads_q=heads[0], heads_kv=heads[1]))
    assert made.pack == pack
    assert made.positions * made.pack == made.block[0]
    assert policy.ROWS % made.pack == 0


@pytest.mark.parametrize(
    ("change", "where", "why"),
    [
        ({}, {}, ""),
        ({}, {"q": (0, 2048, 128)}, r"q has strides \(0, 2048, 128\): TMA's are positive multiples of 16 bytes"),
        ({}, {"v": (LIES[0], 2052, 128)}, r"v has strides .*: TMA's are positive multiples of 16 bytes"),
        ({}, {"out_address": 2}, "out begins 2 bytes behind a multiple of 16"),
        ({"batch": 1}, {"q": (0, 2048, 128)}, ""),
        ({"varlen": True, "tokens_q": 9, "tokens_k": 9}, {"q": (0, 2048, 128), "k": (0, 2048, 128)}, ""),
        (
            {"lengths": True},
            {"k": (LIES[0] + 128, 2048, 128)},
            "k has strides .*: sequences or pages do not",
        ),
        ({"lengths": True}, {"k": (128 * 2**29, 128, 128)}, "k has strides .*: its last sequence or page is"),
    ],
    ids=str,
)
def test_strides_that_tma_cannot_address(change, where, why):
    given = {"q": LIES, "k": LIES, "v": LIES, "out": LIES} | where
    found = policy.refuse_strides(replace(DENSE, **change), **given)
    assert re.match(why, found) if why else not found


def test_a_queue_or_none():
    assert plan(DENSE).schedule.kind == "dynamic"
    assert plan(DENSE, schedule="static").schedule.kind == "static"
    assert plan(DENSE).schedule.raster.order == "longest_first"
    assert {c.variant for c in policy.candidates(DENSE, H100, 132, kind="dynamic", variant="apart")} == {"apart"}


def test_more_operations_cost_more():
    def seconds(**change):
        return min(c.seconds for c in policy.candidates(replace(DENSE, **change), H100, 132, kind="dynamic"))

    assert seconds(causal=True) < seconds() < seconds(seqlen_k=8192)
    assert seconds(window=(128, 0)) < seconds(causal=True)
    # The rate of the model is one that such kernels reach.
    rate = DENSE.operations / seconds()
    assert 450e12 < rate < 800e12


@pytest.mark.parametrize("length", [512, 2048, 16384])
@pytest.mark.parametrize("causal", [False, True])
def test_of_64_columns_the_tile_that_was_measured_faster(length, causal):
    # Or as fast: full, of 16k, three consumers were faster by 2 %.
    problem = AttentionProblem(16384 // length, 32, 32, length, length, 64, causal=causal)
    assert plan(problem).block == (128, 128)
    assert plan(problem).variant == "apart"


def test_a_variant_is_one_that_there_is():
    with pytest.raises(ValueError, match="variant='foo'; it is one of turns, apart, or None for the model's choice"):
        list(policy.candidates(DENSE, H100, 132, kind="dynamic", variant="foo"))
