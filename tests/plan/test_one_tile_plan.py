"""Plans whose programs have a tile, or a share of one, each: when, why, and what they refuse."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from made_up import H100, reason

import tilestream as ts
from tilestream.core.chunks import Chunks
from tilestream.core.exchange import CLUSTERS, cluster_of
from tilestream.core.schedule import Schedule
from tilestream.ops import execute
from tilestream.plan import tuned
from tilestream.plan.additions import MMA
from tilestream.plan.candidate import ONE_TILE
from tilestream.plan.planner import plan_problem, search_space
from tilestream.plan.policy import one_tile
from tilestream.plan.problem import Incoming, Problem

BF16 = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
SMALL = Problem(128, 152, 32, **BF16)
#: Its K is cut.
SHARED = Problem(64, 64, 8192, **BF16)
LARGE = Problem(4096, 4096, 4096, **BF16)


def candidates(problem: Problem, workers: int = 132, **how):
    return list(one_tile.candidates(problem, H100, workers, **how))


def test_a_small_product_takes_it_and_says_why():
    made = plan_problem(SMALL, device=H100)
    assert (made.backend, made.variant, made.schedule.kind) == ("portable", ONE_TILE, "static")
    assert made.workers == made.schedule.grid.tiles
    assert made.label == f"portable one_tile, {made.workers} programs, {made.tile[0]}x{made.tile[1]} tiles"
    assert reason(made, "hopper").startswith("the cost model expects 0.00")
    assert reason(made, "hopper").endswith("ms with a program a tile")
    assert "schedule  none: a program for each tile\n" in made.explain()
    assert made.floor.seconds <= made.predicted
    assert plan_problem(LARGE, device=H100).variant != ONE_TILE
    middle = plan_problem(Problem(512, 2048, 2048, **BF16), device=H100)
    assert reason(middle, "portable").startswith(
        "the Hopper kernel does this; with a program a tile the cost model expects"
    )


#: Vectors of A and B, block and stages of tiles that spill with Triton 3.9, by the compile gate: where K is cut, and
#: with more than a plain epilogue.
SPILL_CUT = (
    ((2, 2), (16, 32, 128, 3)), ((8, 1), (16, 32, 128, 3)), ((1, 1), (64, 128, 32, 2)), ((8, 1), (128, 64, 64, 3)),
    ((1, 8), (64, 128, 64, 3)),
)  # fmt: skip
SPILL_MORE = (
    *SPILL_CUT, ((8, 8), (128, 64, 64, 3)), ((8, 8), (128, 64, 64, 5)), ((4, 4), (128, 64, 64, 3)),
    ((4, 4), (64, 128, 64, 3)), ((4, 4), (64, 128, 64, 4)), ((2, 2), (64, 128, 32, 2)),
)  # fmt: skip
#: Of the same tiles and vectors some that do not.
FIT = (
    ((8, 8), (16, 32, 128, 3)), ((4, 4), (16, 32, 128, 3)), ((1, 8), (16, 32, 128, 3)), ((8, 8), (64, 128, 64, 5)),
    ((1, 1), (32, 32, 128, 3)), ((2, 2), (64, 64, 64, 3)), ((8, 8), (128, 128, 64, 4)),
)  # fmt: skip


def test_no_program_spills():
    def fits(vectors: tuple[int, int], shape: tuple[int, ...], plain: bool, is_cut: bool) -> bool:
        (tile,) = (one for one in one_tile.TILES[2] if (*one[:3], one.stages) == shape)
        problem = Problem(640, 640, 640, **BF16, aligned=False, vectors=vectors, plain=plain)
        return one_tile.Way(problem, H100, tile).has_registers(is_cut)

    for one in SPILL_MORE:
        assert not fits(*one, plain=False, is_cut=True), one
        assert not fits(*one, plain=False, is_cut=False), one
        assert fits(*one, plain=True, is_cut=True) is (one not in SPILL_CUT), one
        assert fits(*one, plain=True, is_cut=False), one
    for one in FIT:
        assert fits(*one, plain=False, is_cut=True), one


def test_what_spills_is_no_candidate():
    made = Problem(64, 256, 2048, **BF16, aligned=False, vectors=(2, 2))
    whole, cut = ({one.block for one in candidates(made, kinds=(kind,))} for kind in ("static", "stream_k"))
    assert (16, 32, 128) in whole
    assert cut
    assert (16, 32, 128) not in cut
    assert (16, 32, 128) in {one.block for one in candidates(replace(made, vectors=(8, 8)), kinds=("stream_k",))}
    bytes_ = Problem(640, 640, 640, dtype="float8_e4m3fn", out_dtype="bfloat16", scales="row", plain=False)
    assert (128, 64) in {one.block[:2] for one in candidates(bytes_)}, "of 8 bits none spills"


def test_a_long_k_is_cut_into_shares_of_a_tile_each():
    """No share has parts of two tiles, and none is past the end of K."""
    cut = 0
    chance = random.Random(3)
    for _ in range(200):
        k = chance.randint(1000, 20000)
        problem = Problem(chance.randint(1, 200), chance.randint(1, 200), k, chance.choice([1, 1, 3]), **BF16)
        for one in candidates(problem):
            schedule, steps = one.schedule, one.schedule.grid.k_steps
            assert schedule.grid.k_steps * one.block[2] >= k
            if one.kind == "static":
                assert (schedule.workers, schedule.slots) == (schedule.grid.tiles, 0)
                continue
            cut += 1
            parts = schedule.num_shares // schedule.grid.tiles
            assert schedule.full_tiles == 0
            assert parts * schedule.grid.tiles == schedule.num_shares == schedule.workers
            assert steps % parts == 0
            assert (parts - 1) * (steps // parts) * one.block[2] < k
            assert [len(schedule.contributors(tile)) for tile in range(schedule.grid.tiles)] == [
                parts
            ] * schedule.grid.tiles
    assert cut > 1000
    made = plan_problem(SHARED, device=H100)
    assert (made.variant, made.schedule.kind) == (ONE_TILE, "stream_k")
    assert made.label.endswith(f" tiles of {made.schedule.grid.tiles}")
    assert "shares of the K of each tile" in made.explain()


def test_parts_of_a_tile_are_a_cluster_where_there_are_as_many_as_a_cluster_has():
    """All tiles' shares alike, on SMs that nobody has limited."""
    found = {}
    for one in candidates(SHARED):
        if one.kind == "stream_k":
            found.setdefault(one.schedule.num_shares // one.tiles, one.schedule)
    assert {parts: cluster_of(schedule) for parts, schedule in found.items()} == {
        parts: parts if parts in CLUSTERS else 1 for parts in found
    }
    assert set(found) > set(CLUSTERS)
    assert {cluster_of(one.schedule) for one in candidates(SHARED, 100)} == {1}
    grid = found[4].grid
    for shares, k_steps in ((found[4].num_shares + 1, grid.k_steps), (found[4].num_shares, grid.k_steps + 1)):
        other = Schedule("stream_k", replace(grid, k_steps=k_steps), found[4].raster, shares, shares=shares)
        assert cluster_of(other) == 1
    assert cluster_of(Schedule("static", grid, found[4].raster, 4 * grid.tiles)) == 1
    made = plan_problem(SHARED, device=H100, variant=ONE_TILE, schedule="stream_k")
    assert "a cluster that adds them in shared memory\n" in made.explain()
    with ts.worker_limit(100):
        assert "cluster" not in ts.plan(64, 64, 8192, dtype="bfloat16", device="h100", layout="nt").explain()


def test_an_sm_has_no_more_shares_than_were_measured():
    """Four for each of 132 SMs: 100 tiles are cut into four parts each, and not into six."""
    made = [one.schedule.workers for one in candidates(Problem(640, 640, 8192, **BF16), kinds=("stream_k",))]
    assert 400 in made
    assert max(made) <= 4 * 132


@pytest.mark.parametrize("sms", [1, 2, 3, 4, 7, 8])
def test_no_cluster_has_more_ctas_than_a_device_has_sms(sms):
    """They begin together or not at all."""
    few = replace(H100, workers=sms)
    found = [cluster_of(one.schedule) for one in one_tile.candidates(Problem(16, 16, 8192, **BF16), few, sms)]
    assert max(found) == max((parts for parts in CLUSTERS if parts <= sms), default=1)


@pytest.mark.parametrize("size", CLUSTERS)
def test_a_plan_of_clusters_does_not_run_under_a_limit(size):
    schedule = next(one.schedule for one in candidates(SHARED) if cluster_of(one.schedule) == size)
    made = replace(plan_problem(SHARED, device=H100), schedule=schedule)
    with ts.worker_limit(132):
        execute._check_limit(made)
    with ts.worker_limit(131), pytest.raises(ValueError, match="CTAs of clusters, which begin together"):
        execute._check_limit(made)


def test_a_limit_of_workers_is_one_of_programs():
    assert max(one.schedule.workers for one in candidates(SMALL)) > 20
    assert all(one.schedule.workers <= 20 for one in candidates(SMALL, 20))
    assert plan_problem(SMALL, 20, device=H100).workers <= 20
    with ts.worker_limit(7):
        assert ts.plan(128, 152, 32, dtype="bfloat16", device="h100").workers <= 7


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"k": 0}, "there is a group, or nothing to multiply"),
        ({"dtype": "float32", "out_dtype": "float32"}, "it multiplies 16 bits"),
        ({"dtype": "float8_e4m3fn", "fast_accum": False}, "it multiplies 16 bits"),
        ({"dtype": "float8_e4m3fn", "b_dtype": "float8_e5m2"}, "it multiplies 16 bits"),
        ({"dtype": "float8_e4m3fn", "no_tma": "odd"}, "it multiplies 16 bits"),
        ({"rows": Incoming(Chunks.uniform(128, 32))}, "chunks are waited for, or signalled, by persistent workers"),
        ({"publishes": Incoming(Chunks.uniform(128, 32))}, "chunks are waited for, or signalled"),
        ({"m": 2**13, "n": 2**13}, "its output has more than 4194304 elements"),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_what_it_leaves_to_others(change, why):
    problem = replace(SMALL, **change)
    assert one_tile.refusal(problem, H100).startswith(why)
    assert not candidates(problem)
    assert plan_problem(problem, device=H100).variant != ONE_TILE
    with pytest.raises(NotImplementedError, match=f"variant='one_tile': {why}.*; leave variant=, tile=, order="):
        plan_problem(problem, device=H100, backend="portable", variant=ONE_TILE)


def test_other_devices_have_none():
    for name in ("a100", "b200", "mi300x"):
        assert ts.plan(128, 152, 32, dtype="bfloat16", device=name).variant != ONE_TILE
        with pytest.raises((NotImplementedError, ValueError), match=r"sm_90 alone|it must be one of direct, staged"):
            ts.plan(128, 152, 32, dtype="bfloat16", device=name, variant=ONE_TILE)


def test_it_is_forced_with_a_tile_and_a_kind():
    how = {"dtype": "bfloat16", "device": "h100", "variant": ONE_TILE}
    for tile in {row[:2] for row in one_tile.TILES[2]}:
        assert ts.plan(512, 512, 512, **how, tile=tile).tile == tile
    made = ts.plan(64, 64, 8192, **how, schedule="stream_k")
    assert (made.schedule.kind, made.variant) == ("stream_k", ONE_TILE)
    assert ts.plan(64, 64, 8192, **how, schedule="static").schedule.kind == "static"
    assert reason(ts.plan(64, 64, 64, **how), "hopper") == "variant='one_tile' given"
    for more in ({"queues": 4}, {"shares": 4}, {"schedule": "dynamic"}, {"tile": (128, 256)}, {"order": [(0, 0)]}):
        with pytest.raises(NotImplementedError, match="it has no such tile or schedule here, and no queues"):
            ts.plan(64, 64, 64, **how, **more)
    for more in ({"stages": 4}, {"registers": (40, 232)}, {"backend": "hopper"}, {"backend": "portable", "stages": 4}):
        with pytest.raises(ValueError, match="with variant='one_tile': a portable kernel without it; leave it away"):
            ts.plan(64, 64, 64, **how, **more)
    for m, batch in ((1, 70000), (2**22, 1)):  # more than a grid has
        with pytest.raises(NotImplementedError, match="variant='one_tile'"):
            ts.plan(m, 1, 64, batch=batch, **how, workers=100000, tile=(64, 16))


def test_what_was_measured_and_is_gone_leaves_the_choice_to_the_model(monkeypatch):
    free = plan_problem(SMALL, device=H100)
    monkeypatch.setattr(tuned, "lookup", lambda *_: {"knobs": {"variant": "gone"}})
    plan_problem.cache_clear()
    made = plan_problem(SMALL, device=H100)
    plan_problem.cache_clear()
    assert (made.variant, made.block) == (ONE_TILE, free.block)
    assert reason(made, "what was measured") == "tilestream tune kept a plan that no longer exists: tune again"


def test_the_promise_takes_whole_tiles_alone():
    """Their order is all tiles' of 16 bits; of 8 bits, that of 64 rows. Parts are cut elsewhere."""
    with ts.invariant():
        made = ts.plan(64, 64, 8192, dtype="bfloat16", device="h100", layout="nt")
        assert (made.additions.unit, made.additions.cuts) == (MMA, ((),))
        small = ts.plan(128, 152, 32, dtype="bfloat16", device="h100", layout="nt")
        assert (small.variant, small.additions.unit) == (ONE_TILE, MMA)
        eight = ts.plan(128, 160, 128, dtype="float8_e4m3fn", device="h100")
        assert eight.additions.unit == MMA
        assert eight.variant != ONE_TILE or eight.tile[0] >= 64


def test_the_search_space_has_its_plans():
    found = [made for made in search_space(SMALL, H100) if made.variant == ONE_TILE]
    assert {made.tile for made in found} >= {(16, 32), (32, 32), (64, 64)}
    assert {made.backend for made in found} == {"portable"}


@pytest.mark.parametrize("dtype", [2, 1])
def test_tiles_are_powers_of_two_that_fit(dtype):
    assert len(set(one_tile.TILES[dtype])) == len(one_tile.TILES[dtype])
    for tile in one_tile.TILES[dtype]:
        assert all(x & (x - 1) == 0 for x in tile[:4])
        ring = (tile.block_m + tile.block_n) * tile.block_k * dtype * tile.stages
        assert ring <= H100.shared
        accumulator = tile.block_m * tile.block_n // (32 * tile.warps)
        assert accumulator <= 64
