"""The plan of grouped matmuls on devices made up for the purpose, and the tiles that groups come to."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import H100, MI300X

import tilestream as ts
from tilestream.core.groups import mean_row_tiles, most_row_tiles
from tilestream.core.schedule import Cursor, Schedule, Take, take
from tilestream.plan import GroupedProblem, plan_groups
from tilestream.plan.candidate import Asked
from tilestream.plan.grouped import hopper_candidates


def plan(m=8192, n=4096, k=2048, groups=32, device=H100, **how):
    return ts.grouped_plan(m, n, k, groups, device=device, **how)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40), st.integers(0, 100), st.sampled_from([1, 16, 64, 128]))
def test_groups_come_to_no_more_tiles_than_planned_for(sizes, behind, block):
    rows = sum(sizes) + behind
    tiles = sum(-(-size // block) for size in sizes)
    assert tiles <= most_row_tiles(rows, len(sizes), block) <= rows
    assert mean_row_tiles(rows, len(sizes), block) <= most_row_tiles(rows, len(sizes), block)
    assert -(-rows // block) <= most_row_tiles(rows, len(sizes), block), "offsets that are none count as one group"


def test_the_tiles_to_expect_are_one_a_group_of_few_rows():
    assert [mean_row_tiles(rows, 4, 64) for rows in (1, 2, 3, 4)] == [1, 2, 3, 4]
    assert mean_row_tiles(128, 1, 64) == 2


@pytest.mark.parametrize("sizes", [(3, 0, 40, 17), (60, 0, 0, 0), (0, 0, 0, 1), (15, 15, 15, 15)])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_workers_take_the_tiles_that_there_are_and_no_more_tickets_than_planned(kind, sizes):
    """As a kernel does: the planned schedule's queues and workers, with the row tiles that the device has counted."""
    planned = plan_groups.__wrapped__(
        GroupedProblem(60, 64, 32, 1, "bfloat16", "bfloat16", groups=4), 5, kind, device=H100, backend="portable"
    ).schedule
    tiles = sum(-(-size // 16) for size in sizes)
    grid = dataclasses.replace(planned.grid, num_m=tiles)
    there = Schedule(kind, grid, planned.raster, planned.workers, planned.queues, planned.split)
    counters, found = [0] * there.queues, []
    for worker in (3, 1, 0, 2, 4)[: planned.workers]:
        cursor, item = Cursor(), object()
        while item is not None:
            steps, answer = take(there, worker, cursor), None
            try:
                while True:
                    asked = steps.send(answer)
                    answer = counters[asked.queue]
                    counters[asked.queue] += isinstance(asked, Take)
            except StopIteration as end:
                item, cursor = end.value
            if item is not None:
                found.append((item.pm, item.pn))
    assert sorted(found) == [(pm, pn) for pm in range(tiles) for pn in range(grid.num_n)]
    assert max(counters) <= planned.most_tickets


def test_few_rows_a_group_get_a_tile_of_few_rows():
    assert plan(256, groups=64).tile[0] <= 32
    assert plan(65536, groups=8).tile[0] >= 128
    assert plan(256, groups=64, backend="portable").tile[0] <= 64


def test_the_launched_grid_holds_the_most_tiles():
    made = plan(8192, groups=32)
    assert made.schedule.grid.num_m == most_row_tiles(8192, 32, made.tile[0])
    assert made.schedule.grid.batch == 1
    along_k = plan(1024, 2048, 8192, along="k")
    assert (along_k.schedule.grid.batch, along_k.schedule.grid.num_m) == (32, -(-1024 // along_k.tile[0]))


def test_which_kernel():
    assert plan().backend == "hopper"
    assert plan(along="k").backend == "hopper"
    assert plan(device=MI300X).backend == "portable"
    assert plan(device="cpu").backend == "cpu"
    reasons = {
        "there are 512": {"groups": 512}, "portable' given": {"backend": "portable"},
        "no multiple of 16|the others multiples of 16 bytes": {"k": 2047}, "take float8_e4m3fn along K only":
        {"along": "k", "dtype": "float8_e4m3fn"},
    }  # fmt: skip
    for said, how in reasons.items():
        made = plan(**how)
        assert made.backend == "portable"
        assert any(re.search(said, one.why) for one in made.refused if one.what == "hopper"), made.refused


def test_explain_says_it():
    said = plan().explain()
    for line in (
        "grouped_mm [8192, 2048] @ [32, 2048, 4096] by rows, bfloat16 -> bfloat16",
        "32 of 256 rows on average; offsets are read on the device: the device counts the tiles",
        "at most 1 x", "stream_k: which tiles are the last wave's is known on the device alone",
    ):  # fmt: skip
        assert line in said
    assert "32 of 64 of K on average; offsets are read on the device: the longest" in plan(along="k").explain()


def test_a_full_epilogue_gets_no_tile_that_would_spill():
    assert plan(65536, groups=4, backend="portable").tile == (128, 256)
    assert plan(65536, groups=4, scales="row", backend="portable").tile != (128, 256)
    rows = list(hopper_candidates(plan(activation="gelu").problem, H100, 132, Asked()))
    assert not any(224 in one.block for one in rows), "224 columns are of three parts"
    assert any(224 in one.block for one in hopper_candidates(plan().problem, H100, 132, Asked()))
    swapped = [one for one in rows if one.swap_ab]
    assert max(one.block[0] * one.block[1] // (256 if one.variant == "cooperative" else 128) for one in swapped) < 128


def test_a_ring_has_two_stages_at_least():
    """One is multiplied while the next is copied: a tile with shared memory for two is taken, one for one is not."""
    problem, shared = plan().problem, (48 * 1024, 64 * 1024, 96 * 1024)
    devices = [dataclasses.replace(H100, shared=size) for size in shared]
    made = [{one.stages for one in hopper_candidates(problem, device, 132, Asked())} for device in devices]
    assert made == [set(), {2}, {2, 3}]


@pytest.mark.parametrize(
    "how", [{"activation": "swiglu"}, {"scales": "block", "dtype": "fp8"}, {"activation": "silu"}], ids=str
)
def test_experts_on_hopper_are_hoppers(how):
    made = plan(**how)
    assert made.backend == "hopper"
    assert "not run" not in made.explain()
    assert plan(**how, backend="portable").backend == "portable"


def test_two_halves_are_a_tiles():
    made = plan(activation="swiglu", backend="hopper")
    assert "swiglu of two halves" in made.explain()
    assert made.problem.out_columns == 2048
    assert not made.swap_ab
    assert made.schedule.grid.num_n == -(-2048 // (made.tile[1] // 2))
    assert made.problem.bytes == plan().problem.bytes - 8192 * 2048 * 2
    assert plan(256, groups=64, activation="swiglu").tile[0] <= 64


def test_a_step_and_a_part_of_a_tile_are_of_one_block_of_scales():
    for m, n in itertools.product((64, 512, 8192), (128, 4096)):
        made = plan(m, n, dtype="fp8", scales="block", backend="hopper")
        assert made.block[2] == 128
        assert made.swap_ab or made.tile[1] in (16, 32, 64, 128, 256)
    said = plan(n=2 * 192, dtype="fp8", scales="block", activation="swiglu", backend="portable").explain()
    assert "a scale a row and 128 of K, and for 128x128 of B" in said
    with pytest.raises(NotImplementedError, match="halves of 192 columns: the second one begins inside a block of 128"):
        plan(n=2 * 192, dtype="fp8", scales="block", activation="swiglu", backend="hopper")


def test_what_is_known_of_other_gpus_is_said():
    assert "neither compiled nor run for sm_100" in plan(device="b200").explain()
    assert "compiled, not run: no gfx942 GPU was there" in plan(device="mi300x").explain()
    assert "not run" not in plan(device="h100").explain()


REFUSED = {
    "groups=0; there are 1 to 1024": {"groups": 0},
    "groups=1025; there are 1 to 1024": {"groups": 1025},
    "groups=2.5; it must be a whole number": {"groups": 2.5},
    "m=-1; it must be a whole number": {"m": -1},
    "along='n'; it must be one of rows, k": {"along": "n"},
    "along=['k']; it must be one of rows, k": {"along": ["k"]},
    "scales='rows'; it must be one of none, tensor, row, block": {"scales": "rows"},
    "activation='tanh'; it must be None or one of relu, gelu, gelu_tanh, silu, swiglu": {"activation": "tanh"},
    "an activation of two halves: groups divide K": {"activation": "swiglu", "along": "k"},
    "scales='block': groups divide K": {"scales": "block", "dtype": "fp8", "along": "k"},
    "n=33; of an activation of two halves B has an even number of columns": {"n": 33, "activation": "swiglu"},
    "schedule='stream_k'": {"schedule": "stream_k"},
    "schedule='now'; it must be one of auto, static, dynamic": {"schedule": "now"},
    "scales='rows'; it must be one of none,": {"scales": "rows"},
    "tile=(64, 64); the CPU takes each group's product whole": {"tile": (64, 64), "device": "cpu"},
    "capacity=64, arrives=False without sources=": {"capacity": 64},
    "capacity=None, arrives=True without sources=": {"arrives": True},
    "sources=0; it must be a whole number, at least 1": {"sources": 0},
    "capacity=0; it must be a whole number, at least 1": {"sources": 2, "capacity": 0},
    "along='k' with sources=2; sources bring rows": {"sources": 2, "along": "k"},
    "m=4096 rows; 2 sources have places of 100: 200 at most": {"m": 4096, "sources": 2, "capacity": 100},
    "schedule='static' with rows by source": {"sources": 2, "schedule": "static"},
    "tile=(3, 3): the portable kernel has": {"tile": (3, 3), "backend": "portable"},
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_refused(said):
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(**REFUSED[said])


@pytest.mark.parametrize("given", [1, 0, None])
@pytest.mark.parametrize("sources", [None, 2])
def test_what_arrives_is_true_or_false(given, sources):
    with pytest.raises(TypeError, match=f"arrives={given}; it must be True or False"):
        plan(sources=sources, arrives=given)


def test_scales_of_blocks_are_of_8_bits():
    with pytest.raises(TypeError, match="scales='block': operands are bfloat16; they are of float8_e4m3fn"):
        plan(scales="block")


def test_a_plan_of_groups_runs_nothing():
    made = plan(device="cpu")
    with pytest.raises(NotImplementedError, match=r"call tilestream\.grouped_mm"):
        made.run(None, None)


def test_the_cost_counts_what_groups_read():
    few, many = (GroupedProblem(64, 1024, 1024, 1, "bfloat16", "bfloat16", groups=groups) for groups in (2, 500))
    assert many.bytes == few.bytes + 62 * 2 * 1024 * 1024, "no more matrices are read than there are rows"
    along_k = GroupedProblem(64, 32, 1000, 1, "bfloat16", "bfloat16", groups=4, along="k")
    assert along_k.bytes == 2 * 1000 * 96 + 2 * 4 * 64 * 32


def test_rows_by_source_cost_what_is_expected_of_them():
    few, many = (plan(m=4096, sources=8, capacity=capacity, arrives=True) for capacity in (4096, 2**20))
    assert few.predicted == many.predicted, "a place's rows that are not there cost nothing"
    assert (few.block, few.problem.likely) == (many.block, 4096)
    assert many.problem.m == 8 * 2**20
    assert many.schedule.grid.num_m > 8 * 2**20 // many.block[0]
    assert many.schedule.packed == 8 * (many.problem.groups + 1)
    text = many.explain()
    for part in (
        "by source",
        "if they bring 4096 rows in all",
        "a queue for each group of a source",
    ):
        assert part in text
    assert "no gate code runs" in plan(m=4096, sources=8).explain()
    assert plan(m=4096, sources=8).problem.m == 8 * 4096
    with pytest.raises(ValueError, match="sources=3: groups by source divide rows, 64 in equal places"):
        GroupedProblem(64, 32, 32, groups=2, sources=3)


@pytest.mark.parametrize(
    ("groups", "arrives", "load"), [(8, True, 88), (64, True, 88), (8, False, 72), (65, True, 136), (256, False, 136)]
)
def test_rows_by_source_are_hopper_s_whose_load_warp_has_more_registers(groups, arrives, load):
    for how in ({}, {"activation": "swiglu"}, {"dtype": "fp8", "scales": "block"}, {"m": 64, "scales": "row"}):
        made = plan(groups=groups, sources=4, arrives=arrives, backend="hopper", **how)
        assert (made.backend, made.registers[0]) == ("hopper", load)
        loops = 1 if made.variant == "single" else 2
        assert load + loops * made.registers[1] <= {1: 256, 2: 504}[loops], "registers of a CTA"
    assert plan(groups=groups, sources=4, arrives=arrives).backend == "hopper", "as a plan chooses"


def test_rows_by_source_have_tiles_whose_math_loops_have_room():
    made = {"m": 4096, "sources": 8, "arrives": True}
    for how, most in (({}, 128), ({"scales": "row"}, 96), ({"activation": "swiglu"}, 64)):
        problem = plan(**made, **how).problem
        rows = list(hopper_candidates(problem, H100, 132, Asked()))
        registers = {one.block[0] * one.block[1] // (256 if one.variant == "cooperative" else 128) for one in rows}
        assert max(registers) == most
    few = plan(groups=257, **made)
    assert few.backend == "portable"
    assert any("among 256 at most, and there are 257" in one.why for one in few.refused)
