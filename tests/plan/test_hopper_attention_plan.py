"""The policy of the Hopper attention kernel: what it takes and refuses, with which tiles; no GPU, no Triton."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import pytest
from made_up import H100, reason

from tilestream.core.chunks import Chunks
from tilestream.plan.attention_planner import attention_plan, plan_attention
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy import hopper_attention as policy
from tilestream.plan.problem import Incoming

#: At the highest clock, which is what the driver says.
FASTEST = replace(
    H100, flops=256 * 1.98e9, tensor=(("float16", 4096 * 1.98e9), ("bfloat16", 4096 * 1.98e9)), clock=1.98e9
)  # fmt: skip
DENSE = AttentionProblem(4, 16, 16, 4096, 4096, 128)
LIES = (4096 * 2048, 2048, 128)


def plan(problem: AttentionProblem, **how):
    return plan_attention(problem, device=H100, **how)


@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 40)])
@pytest.mark.parametrize("more", [{}, {"window": (300, None)}, {"softcap": 30.0}, {"scaled": True}], ids=str)
def test_8_bits_have_room_for_values_twice(dims, more):
    problem = replace(DENSE, dtype="float8_e4m3fn", head_dim=dims[0], head_dim_v=dims[1], **more)
    made = plan(problem, backend="hopper")
    assert made.block[0] == 2 * policy.ROWS
    line = 64 if dims[0] == 64 else 128
    assert (policy.parts_of(problem), policy.width(problem)) == (1, line)
    queries = policy.queries_of(problem, 2, made.block[1], made.stages, H100.shared)
    bytes_ = policy.shared_bytes(problem, 2, made.block[1], made.stages, queries)
    wide = replace(problem, dtype="float16", scaled=False)
    # Keys and queries of one box, as 128 columns of 16 bits are of two; values as they come, and once more in 16 bits.
    columns = policy.columns_of(problem)
    assert columns == policy.columns_of(wide)
    of_wide = policy.shared_bytes(replace(wide, head_dim=128), 2, made.block[1], made.stages, queries)
    block = made.stages * made.block[1]
    assert of_wide - bytes_ == (256 - line) * (block + 2 * 64 * queries) - block * columns - 512
    assert bytes_ <= H100.shared
    math, *others = policy.REGISTERS_8BIT
    assert 2 * math + sum(others) <= 512, "16 warps of 128 registers a thread"


def test_the_portable_kernel_can_be_had():
    assert plan(DENSE).backend == "hopper"
    made = plan(DENSE, backend="portable")
    assert (made.backend, reason(made, "hopper")) == ("portable", "backend='portable' given")


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
        assert held <= (160 - 32 if consumers == 3 else 232 - 40)
        queries = policy.queries_of(problem, consumers, block, one.stages, H100.shared)
        assert policy.shared_bytes(problem, consumers, block, one.stages, queries) <= H100.shared
        assert one.stages >= 2
        assert columns >= problem.head_dim_v
        assert policy.parts_of(problem) * policy.width(problem) >= problem.head_dim


def test_heads_are_grouped_so_that_their_keys_stay_in_l2():
    for keys in (512, 4096, 65536):
        of_size = replace(DENSE, seqlen_q=keys, seqlen_k=keys)
        group = max(1, min(64, int(policy.L2_BYTES_OF_ALIKE // (keys * 512))))
        # As many where tiles are alike for another reason; more where those of a head are not, and have many keys.
        assert plan(of_size).group == plan(replace(of_size, window=(4 * keys, 0))).group == group
        most = int((policy.L2_BYTES if keys > policy.FEW_KEYS else policy.L2_BYTES_OF_FEW) // (keys * 512))
        assert max(1, most // 2) <= plan(replace(of_size, causal=True)).group <= max(1, min(64, most))
    # Query heads of one head of keys are grouped whole.
    assert plan(replace(DENSE, heads_kv=2, seqlen_k=65536, seqlen_q=65536)).group == 8


@pytest.mark.parametrize(("heads", "heads_kv"), [(32, 1), (48, 1), (64, 4), (96, 2)])
@pytest.mark.parametrize("keys", [512, 1024, 4096])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_heads_that_share_keys_are_in_one_group(heads, heads_kv, keys, dim):
    for batch, made in ((b, plan(AttentionProblem(b, heads, heads_kv, keys, keys, dim, causal=True))) for b in (1, 8)):
        assert made.group * made.pack % (heads // heads_kv) == 0, batch


def test_small_blocks_cost_what_they_did_where_there_is_no_choice():
    # One query with a cap, over 512 keys: a second launch, that joins shares, is not worth it.
    for softcap, window in ((30.0, (None, None)), (30.0, (256, None)), (0.0, (256, None))):
        problem = AttentionProblem(1, 32, 1, 1, 512, 64, causal=True, softcap=softcap, window=window)
        assert plan_attention(problem, device=FASTEST).shares == 1


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
        ({"lengths": True}, {"k": (LIES[0] + 128, 2048, 128)}, "k has strides .*: sequences or pages do not"),
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


def test_more_operations_cost_more():
    def seconds(**change):
        return min(c.predicted for c in policy.candidates(replace(DENSE, **change), H100, 132, kind="dynamic"))

    assert seconds(causal=True) < seconds() < seconds(seqlen_k=8192)
    assert seconds(window=(128, 0)) < seconds(causal=True)
    # The rate of the model is one that such kernels reach.
    rate = DENSE.operations / seconds()
    assert 450e12 < rate < 800e12


at_both_clocks = pytest.mark.parametrize("device", [H100, FASTEST], ids=["1.755 GHz", "1.98 GHz"])


def tokens_16k(length: int, dim: int, device, causal: bool = True):
    """The plan of 16k tokens in sequences of one length."""
    heads = 2048 // dim
    problem = AttentionProblem(16384 // length, heads, heads, length, length, dim, causal=causal)
    return plan_attention(problem, device=device)


@at_both_clocks
@pytest.mark.parametrize("length", [1024, 2048, 4096, 8192, 16384])
@pytest.mark.parametrize("causal", [False, True])
def test_of_64_columns_the_tile_that_was_measured_faster(length, causal, device):
    # Of 512, full, and of 2048, causal, both are as fast.
    three = not causal or length >= 2048
    made = tokens_16k(length, 64, device, causal)
    assert made.block == (192 if three else 128, 128)
    assert made.variant == ("ordered" if three else "unordered")


@at_both_clocks
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [512, 1024, 2048])
def test_small_blocks_where_there_are_few_keys_on_a_diagonal(dim, length, device):
    # Measured: 3 to 6 % faster at 512 keys, causal; slower at all else.
    assert tokens_16k(length, dim, device).block[1] == (64 if length == 512 else 128)
    assert tokens_16k(length, dim, device, causal=False).block[1] == 128


@at_both_clocks
@pytest.mark.parametrize(
    ("dim", "length", "among"),
    [
        (64, 512, {32, 64, 74, 80}), (64, 1024, {32, 40, 64}), (128, 512, {32, 48, 52, 64}), (128, 1024, {16}),
        (256, 512, {24, 26, 32}), (256, 1024, {16}), (256, 2048, {8}), (256, 4096, {4, 8}), (128, 4096, {4, 11}),
    ],
)  # fmt: skip
def test_causal_heads_go_in_groups_that_were_measured_fast(dim, length, among, device):
    # Of those that were timed, ones that were within 3.1 % of the fastest on an H100 and an H200.
    assert tokens_16k(length, dim, device).group in among


@at_both_clocks
@pytest.mark.parametrize("keys", [512, 1024, 4096, 32768, 131072])
@pytest.mark.parametrize("batch", [1, 4, 64])
def test_few_queries_keep_large_blocks(keys, batch, device):
    # Bound by memory, or split into shares, smaller blocks gain nothing: no consumer leaves any out.
    for queries, heads_kv in itertools.product((1, 4, 64), (8, 32)):
        problem = AttentionProblem(batch, 32, heads_kv, queries, keys, 128, causal=True)
        for causal in (False, True):
            assert plan_attention(replace(problem, causal=causal), device=device).block[1] == 128


def test_a_window_does_not_lose_the_shares_of_keys_that_arrive():
    # They are of all of a tile's blocks, whichever of its consumers does them.
    late = Incoming(Chunks.uniform(4096, 1024))
    made = plan(AttentionProblem(1, 16, 16, 4096, 4096, 128, window=(128, 128), keys=late))
    assert made.shares == 3


def test_sides_are_no_wider_than_all_keys():
    problem = AttentionProblem(1, 2, 2, 100, 300, 64, window=(2**40, 7))
    assert problem.sides == (400, 7)
    assert replace(problem, window=(None, 2**31 - 1)).sides == (None, 400)


def test_sums_of_256_columns_are_multiplied_in_turns():
    for dim, variant in ((128, "unordered"), (256, "ordered")):
        assert plan(AttentionProblem(4, 8, 8, 4096, 4096, dim, causal=True)).variant == variant


# Keys in shares -------------------------------------------------------------------------------------------------------

DECODE = AttentionProblem(1, 32, 8, 1, 32768, 128, causal=True)


def test_few_queries_over_many_keys_fill_the_workers():
    made = plan(DECODE)
    assert made.pack == 4
    assert made.shares == 132 // 8
    assert made.schedule.grid.tiles == 8 * made.shares
    assert f"split     keys of a tile in {made.shares} shares, whose outputs a second launch joins" in made.explain()
    whole = plan(DECODE, splits=1)
    assert whole.shares == 1
    assert whole.predicted > 4 * made.predicted
    assert "split " not in whole.explain()


@pytest.mark.parametrize(
    ("change", "shares"),
    [
        ({"seqlen_q": 4096, "heads_q": 32}, 1),  # tiles enough
        ({"batch": 64}, 1),
        ({"seqlen_k": 256}, 1),  # too few keys
        ({"seqlen_q": 64, "seqlen_k": 16384, "heads_kv": 8}, 8),
    ],
)
def test_keys_are_split_where_it_pays(change, shares):
    assert plan(replace(DECODE, **change)).shares == shares


def test_what_the_caller_asks_for():
    assert plan(DECODE, splits=5).shares == 5
    assert plan(replace(DECODE, seqlen_q=4096), splits=2).shares == 2
    assert plan(replace(DECODE, keys=Incoming(Chunks.uniform(32768, 512))), splits=5).shares == 5
    for problem, how, why in (
        (replace(DECODE, seqlen_q=8_000_000), {}, "8000000 rows of 32 heads; it counts those of all shares in 30 bits"),
        (DECODE, {"backend": "portable"}, "the portable kernel takes a tile's keys one after the other"),
    ):
        made = plan(problem, splits=5, **how)
        assert (made.shares, reason(made, "splits=5")) == (1, why)
    assert reason(plan(DECODE, splits=5), "splits=5") is None


@pytest.mark.parametrize("splits", [0, -1, 129, True, 2.0, "4"])
def test_splits_out_of_range(splits):
    with pytest.raises(ValueError, match=r"splits=.*; it must be the number of shares .* 1 to 128, or None"):
        attention_plan(1, 4096, splits=splits)


@pytest.mark.parametrize(
    ("rows", "keys", "growth"),
    # The link is slower than attention, about as fast, and faster: the last keys, or the first ones, are few.
    [(2048, 65536, 0.625), (4096, 32768, 1.5), (8192, 16384, 2.0), (256, 65536, 0.625)],
)
def test_shares_of_keys_that_arrive_grow_as_attention_is_slower_than_the_link(rows, keys, growth):
    coming = Incoming(Chunks.uniform(keys, 1024))
    made = plan(replace(DECODE, seqlen_q=rows, seqlen_k=keys, heads_q=32, keys=coming), splits=4)
    assert made.shares == 4
    (first, *more, last) = zip(made.late[::2], made.late[1::2], strict=True)
    assert (first, last) == ((0, 0), (256, 0))
    ends = [0, *(now for now, _ in more), 256]
    assert [step for _, step in more] == [later - now for now, later in itertools.pairwise(ends[1:])]
    sizes = [later - now for now, later in itertools.pairwise(ends)]
    assert all(abs(after - growth * size) <= 3 for size, after in itertools.pairwise(sizes))
    assert "shares that end at" in made.explain()
    there = plan(replace(DECODE, seqlen_q=rows, seqlen_k=keys, heads_q=32), splits=4)
    assert (there.shares, there.late) == (4, ())
    assert made.key_order != there.key_order


@pytest.mark.parametrize(
    ("change", "shares"),
    [
        ({}, 6),  # 68 MB of scratch each
        ({"heads_q": 8}, 6),
        ({"seqlen_q": 8192}, 3),
        ({"seqlen_q": 32768}, 1),  # too much scratch for two
        ({"keys": Incoming(Chunks.uniform(32768, 16384))}, 2),
        ({"keys": Incoming(Chunks.uniform(32768, 32768))}, 1),
        ({"keys": None}, 1),
        ({"head_dim": 256}, 1),  # the portable kernel's
    ],
)
def test_keys_that_arrive_are_split(change, shares):
    base = replace(DECODE, seqlen_q=4096, heads_q=32, keys=Incoming(Chunks.uniform(32768, 1024)))
    made = plan(replace(base, **{"head_dim_v": change.get("head_dim", 128), **change}))
    assert made.shares == shares
    if shares > 1:
        assert made.group <= made.schedule.grid.num_n // shares, "the first keys of all heads before later ones"
