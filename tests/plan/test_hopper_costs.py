"""The Hopper kernel's cost model: row pitches as they were measured; and schedules that are made when asked for."""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import BF16, H100, reason

from tilestream.core.chunks import Chunks, Incoming
from tilestream.core.gpu_specs import named
from tilestream.core.grid import Grid
from tilestream.core.order import Raster
from tilestream.core.schedule import Schedule
from tilestream.plan import Problem, Refusal, plan, plan_groups, plan_problem, tma
from tilestream.plan.candidate import Candidate, Deferred
from tilestream.plan.planner import search_space
from tilestream.plan.policy import hopper
from tilestream.plan.policy.hopper_costs import FITTED, Costs, Cut, Model, TileFacts, TileModel, costs_of, row_cost
from tilestream.plan.problem import GroupedProblem

KINDS = ("static", "dynamic", "stream_k")
#: Issue 27, an H100, bfloat16: the tile, bytes that rows begin at multiples of, and TFLOP/s of 2048 x 13312 x 15800 and
#: of 15872 with rows of as many elements and more.
MEASURED = [((128, 256), 16, 458), ((256, 192), 16, 575), ((128, 256), 64, 697), ((128, 256), 128, 801)]


def rate(tile: tuple[int, int], multiple: int) -> float:
    """What the model expects of a tile, in TFLOP/s."""
    problem = Problem(2048, 13312, 15872, **BF16, row_multiples=(multiple, multiple))
    found = hopper.candidates(problem, named("h100"), 132, kinds=("static", "dynamic"))
    seconds = min(c.predicted for c in found if (c.variant, c.tile, c.swap_ab) == ("cooperative", tile, False))
    return problem.operations / seconds * 1e-12


def test_rows_that_cross_lines_cost_what_was_measured():
    """Beside aligned rows: what the model says of these is 9 % less than that shape has."""
    (*crossing, (tile, multiple, aligned)) = MEASURED
    known = rate(tile, multiple)
    assert known == pytest.approx(aligned, rel=0.1)
    for tile, multiple, measured in crossing:
        assert rate(tile, multiple) / known == pytest.approx(measured / aligned, rel=0.08), (tile, multiple)


def test_a_row_costs_by_the_lines_and_sectors_it_lies_in():
    costs = Costs(crossed=2.0, fifth=4.0)
    # One row in two begins at a line, one in four, one in eight; of the last, one in two lies in five sectors.
    assert [row_cost(multiple, costs) for multiple in (128, 64, 32, 16)] == [1, 2, 2.5, 1 + 2 * 7 / 8 + 4 / 2]


def test_rows_of_groups_are_those_that_are_written():
    """Of sources, those to expect, however many there is room for; of groups of K, each group's; of halves, one's."""

    def ends(m: int, n: int = 200, **more: Any) -> tuple[float, bool]:
        model = Model(GroupedProblem(m, n, 512, **BF16, groups=4, **more), named("h100"))
        return model.ends / model.costs.ends, model.by_tma

    assert ends(4096, sources=4, likely=4096) == ends(32768, sources=4, likely=4096) == ends(4096) == (4096, True)
    assert ends(1024, along="k") == (4096, True)
    assert ends(4096, 328, two_halves=True) == (4096, False)
    assert ends(4096, 256, two_halves=True) == (0, True)


def test_where_rows_cross_lines_the_plan_takes_a_tile_that_reads_less():
    aligned, crossing = (plan(2048, 13312, k, dtype="bfloat16", device="h100", layout="nt") for k in (15872, 15800))
    as_it_lies = [one for one in search_space(crossing.problem, crossing.device) if not one.realigned]
    best = min(as_it_lies, key=lambda one: one.predicted)
    assert sorted(best.tile) == [192, 256]
    assert best.predicted > 1.35 * aligned.predicted
    # With A's rows at lines the loss is less by more than the copy takes; B's copy would be six times as long.
    assert (crossing.realigned, sorted(crossing.tile)) == ("a", [128, 256])
    assert aligned.predicted < crossing.predicted < 0.85 * best.predicted
    said = "rows begin elsewhere (B's at multiples of 16), so a copy of 128 bytes reads two"
    assert reason(crossing, "whole lines of L2").startswith(said)
    assert reason(aligned, "whole lines of L2") is None
    # B's rows alone, as they lie in a plain product.
    one = plan(2048, 13328, 15872, dtype="bfloat16", device="h100", layout="nn")
    assert "(B's at multiples of 32)" in reason(one, "whole lines of L2")
    assert aligned.predicted < one.predicted < crossing.predicted


@pytest.mark.parametrize(("layout", "rows"), [("nn", (64, 256)), ("nt", (64, 64)), ("tn", (16, 256)), ("tt", (16, 64))])
def test_rows_are_those_of_the_layout(layout, rows):
    """M, N and K of 1000, 1152 and 1056 elements of two bytes: rows begin at multiples of 16, 256 and 64 bytes."""
    problem = plan(1000, 1152, 1056, dtype="bfloat16", device=H100, layout=layout).problem
    assert problem.row_multiples == tuple(min(row, 128) for row in rows)


def test_aligned_is_what_rows_are_not_what_extents_are():
    """A weight's plan does not depend on how many columns it has; a transposed operand's rows are along M."""
    assert plan(64, 33, 64, dtype="bfloat16", device=H100, layout="nt").problem.aligned
    assert not plan(33, 64, 64, dtype="bfloat16", device=H100, layout="tt").problem.aligned
    assert tma.rows_of(1, 2, 3, "nt") == (3, 3)
    assert tma.row_multiple(0, 48) == 16
    assert tma.row_multiple(256, 128) == 128
    assert tma.row_multiple(2 * 33) == 2


def test_plain_is_an_output_that_tma_stores_and_nothing_scales():
    """As the op finds it: others leave fewer registers for an accumulator."""
    asked = {(4096, "none"): True, (4100, "none"): False, (4097, "none"): False, (4096, "row"): False}
    for (n, scales), plain in asked.items():
        made = plan(512, n, 512, dtype="float8_e4m3fn", device=H100, scales=scales)
        assert made.problem.plain == plain
        assert plain or made.tile[0] * made.tile[1] <= 128 * 256
    assert plan(4, 5, 6, scales="none").problem.plain


@given(
    st.integers(1, 20000), st.integers(1, 20000), st.integers(1, 2000), st.sampled_from([1, 3]),
    st.sampled_from([16, 64, 128]), st.booleans(),
)  # fmt: skip
def test_a_candidate_costs_what_its_schedule_does(m, n, k, batch, multiple, auto):
    """What the policy tells the model before there is a schedule is what the schedule says."""
    problem = Problem(m, n, 8 * k, batch, **BF16, row_multiples=(128, multiple))
    found = list(hopper.candidates(problem, H100, 132, kinds=KINDS, auto=auto))
    for one in found[:: max(1, len(found) // 12)]:
        rows, columns = one.block[1::-1] if one.swap_ab else one.block[:2]
        tile = next(row for row in hopper.TILES if row[:3] == (one.variant, rows, columns))
        assert one.kind == one.schedule.kind
        assert one.predicted == hopper.seconds(problem, H100, one.schedule, tile, one.swap_ab)
    assert len({(c.variant, c.block, c.swap_ab, c.schedule) for c in found}) == len(found), "none is there twice"


def test_sums_that_are_promoted_cost_a_ping_pong_tile_more():
    exact = Problem(8192, 8192, 8192, dtype="float8_e4m3fn", out_dtype="bfloat16", fast_accum=False)
    one = next(c for c in hopper.candidates(exact, H100, 132, kinds=KINDS) if c.variant == "ping_pong")
    rows, columns = one.block[1::-1] if one.swap_ab else one.block[:2]
    tile = next(row for row in hopper.TILES if row[:3] == (one.variant, rows, columns))
    fast = dataclasses.replace(exact, fast_accum=True)
    times = [hopper.seconds(problem, H100, one.schedule, tile, one.swap_ab) for problem in (exact, fast)]
    assert times[0] > 1.5 * times[1]


@pytest.fixture
def made(monkeypatch):
    """How often something is made: by its name, objects of a class, or results of a function."""
    counts: Counter[str] = Counter()

    def count(owner, name, label):
        original = getattr(owner, name)

        def counting(*args, **kwargs):
            counts[label] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counting)

    for kind in (Schedule, Grid, Raster, Problem):
        count(kind, "__post_init__", kind.__name__)
    for kind in (Model, Refusal, Candidate):
        count(kind, "__init__", kind.__name__)
    count(hopper, "has_registers", "has_registers")
    count(importlib.import_module("tilestream.plan.planner"), "number", "number")
    count(importlib.import_module("tilestream.plan.raster"), "by_arrival", "table")
    plan_problem.cache_clear()
    return counts


ROWS = Incoming(Chunks.uniform(5000, 700))


@pytest.mark.parametrize(
    ("problem", "more"),
    [
        (Problem(5120, 5120, 5120, **BF16), {}),
        (Problem(512, 7168, 2048, **BF16), {}),
        # Rows may be copied first: what that would gain at most is known before such a problem is made.
        (Problem(900, 20000, 104, **BF16, row_multiples=(16, 16)), {"Model": 1}),
        # Chunks that are no whole number of tiles need a table of all tiles, which takes up to 10 ms.
        (Problem(5000, 5120, 5120, **BF16, rows=ROWS), {"table": 1, "Raster": 1}),
        (Problem(5000, 5120, 5120, **BF16, publishes=ROWS), {"table": 1, "Raster": 1}),
    ],
    ids=["many tiles", "few tiles", "rows elsewhere", "rows arrive", "rows are published"],
)  # fmt: skip
def test_a_new_shape_makes_no_more_than_its_plan(made, problem, more):
    """Of a hundred candidates only the price is found, and what no extent decides is known from an earlier shape."""
    plan_problem(dataclasses.replace(problem, k=problem.k + 64), device=H100)
    made.clear()
    chosen = plan_problem(problem, device=H100)
    assert int(chosen.why.split()[2]) > 60, "candidates were compared"
    reasons = {"Refusal": len(chosen.refused), "number": 4}  # beside these, of static what its costs then replace
    made["Refusal"] -= any(one.what in ("static", "dynamic") for one in chosen.refused)
    assert made == Counter({"Schedule": 1, "Grid": 1, "Model": 1}) + Counter(reasons) + Counter(more)


def test_groups_are_planned_with_one_model(made):
    plan_groups(GroupedProblem(8192, 2048, 1024, **BF16, groups=16), device=H100)
    assert made["Model"] == 1


def test_a_deferred_candidate_is_a_candidate():
    grid = hopper.Grid.of(512, 512, 512, 128, 128, 64)
    alike = {"variant": "cooperative", "block": (128, 128, 64), "warps": 4, "stages": 5, "registers": (40, 232)}
    alike |= {"swap_ab": False, "strip": 64, "buffers": 2}
    eager = Candidate(schedule=Schedule("static", grid), predicted=1e-3, **alike)
    later = Deferred(alike, "static", 1e-3, 16, 1, "", lambda: Schedule("static", grid))
    assert (later.kind, later.tiles, later.workers) == (eager.kind, eager.tiles, eager.workers) == ("static", 16, 1)
    assert "schedule" not in vars(later)
    assert dataclasses.astuple(later) == dataclasses.astuple(eager)
    other = later.with_schedule(Schedule("dynamic", grid, workers=3))
    assert (other.kind, other.workers) == ("dynamic", 3)
    assert other == eager.with_schedule(other.schedule)
    with pytest.raises(dataclasses.FrozenInstanceError):
        later.warps = 4


def test_constants_are_those_of_the_device(monkeypatch):
    mine = Costs(launch=1.0)
    monkeypatch.setitem(FITTED, "H200", mine)
    assert costs_of(dataclasses.replace(H100, name="NVIDIA H200")) is mine
    assert costs_of(H100) is costs_of(dataclasses.replace(H100, name="another")) is FITTED["H100"]
    problem = Problem(512, 512, 512, **BF16)
    assert Model(problem, H100, mine).costs is mine


# Terms of the model, each where the others are nothing ----------------------------------------------------------------

TILE = TileFacts("cooperative", 128, 256, 1, 4, 100, (256,), False)
#: Of 100 tiles of 8 K steps on 4 workers, and an output that TMA stores.
CUT = Cut("static", 100, 10, 8, 4, True, 8)
PLAIN = Problem(1024, 1024, 512, **BF16)


def seconds(tile: TileFacts = TILE, cut: Cut = CUT, problem: Problem = PLAIN, swap_ab: bool = False, **costs: float):
    """Seconds of a launch whose K steps take one each, on a device that reads memory at once."""
    free = dict.fromkeys(("epilogue", "register", "fix", "launch", "lined", "direct"), 0.0) | {"partials": 1e30}
    device = dataclasses.replace(H100, bandwidth=1e40)
    of_tile = tile_model(Model(problem, device, Costs(**free | costs)), tile, cut, swap_ab)
    of_tile.step = lambda *_: 1.0
    return of_tile.seconds(cut.kind, cut.workers, cut.together, cut.group, cut.shares)


def tile_model(model: Model, tile: TileFacts = TILE, cut: Cut = CUT, swap_ab: bool = False) -> TileModel:
    return TileModel(model, tile, swap_ab, cut.tiles, cut.num_m, cut.k_steps)


def test_waves_take_their_items_and_epilogues():
    assert seconds() == 25 * 8
    assert seconds(cut=CUT._replace(tiles=101)) == 26 * 8
    assert seconds(epilogue=2.0, register=0.5) == 25 * (8 + 2 + 100 * 0.5)
    assert seconds(ticket=3.0) == 25 * 8, "a static grid has no queue"
    assert seconds(cut=CUT._replace(kind="dynamic"), ticket=3.0) == 25 * (8 + 3)


def test_a_worker_with_several_items_takes_longer_to_begin():
    assert seconds(several=3.0) == seconds(cut=CUT._replace(kind="dynamic"), several=3.0) == 25 * 8 + 3
    assert seconds(cut=CUT._replace(tiles=4), several=3.0) == 8
    shared = CUT._replace(kind="stream_k", tiles=3)
    assert seconds(cut=shared, several=3.0) == seconds(cut=shared, several=0.0) + 3


def test_vectors_of_scales_cost_an_epilogue_by_its_columns():
    """Scales of one element are a factor that is loaded once."""
    costs = {"scaled": 0.5, "scaled_column": 0.25}
    fp8 = dataclasses.replace(PLAIN, dtype="float8_e4m3fn")
    for scales, more in (("row", 100 * 0.5 + 256 * 0.25), ("tensor", 0), ("none", 0)):
        assert seconds(problem=dataclasses.replace(fp8, scales=scales), **costs) == 25 * (8 + more)
    gated = dataclasses.replace(fp8, m=5000, scales="tensor", rows=ROWS)
    assert seconds(problem=gated, **costs) == 25 * (8 + 100 * 0.5 + 256 * 0.25), "behind a gate they are vectors, too"


def test_a_swapped_tile_has_its_loss():
    assert seconds(swap_ab=True, swapped_loss=3.0) == 3 * seconds(swapped_loss=3.0)


@pytest.mark.parametrize(("parts", "name"), [((256,), "lined"), ((128, 128), "lined"), ((96, 96, 64), "direct")])
def test_what_tma_does_not_store_costs_by_lines_or_as_registers_hold_it(parts, name):
    """Tiles of three parts lack the registers for lines."""
    odd = dataclasses.replace(PLAIN, n=1023)
    costs = {"lined": 0.25, "direct": 0.5}
    found = seconds(TILE._replace(parts=parts), problem=odd, **costs)
    assert found == 25 * (8 + costs[name] * 100)
    assert seconds(TILE._replace(parts=parts), **costs) == 25 * 8, "TMA stores"


@pytest.mark.parametrize(
    ("tiles", "shares", "each", "written"),
    # Of the last wave's tiles, each in so many shares: parts that a share writes, and parts of a tile.
    [(9, 4, 2, 1 + 4), (11, 4, 6, 2 + 4 / 3), (10, 4, 4, 1 + 2)],
)  # fmt: skip
def test_stream_k_writes_a_partial_or_two_for_each_share_and_reads_a_tiles(tiles, shares, each, written):
    cut = Cut("stream_k", tiles, 10, 8, 4, True, 8, shares)
    size = 4.0 * 128 * 256
    assert seconds(cut=cut) == 2 * 8 + each, "waves, and a share"
    assert seconds(cut=cut, fix=1.0, partials=size) == pytest.approx(2 * 8 + each + 1 + written)


def test_a_worker_with_one_item_multiplies_at_the_rate_of_one_consumer():
    free = Costs(alone=0.25, ping_pong=1.0, cooperative=1.0, feed=1e40, feed_of_one=1e40, step=0.0)
    model = Model(PLAIN, H100, free)
    times = {
        variant: [
            tile_model(model, TILE._replace(variant=variant), CUT._replace(tiles=tiles)).step("static", 4, True)
            for tiles in (3, 4, 5)
        ]
        for variant in ("ping_pong", "cooperative")
    }
    few, as_many, more = times["ping_pong"]
    assert few == as_many == 4 * more, "of ping-pong the other has nothing to do"
    assert len(set(times["cooperative"])) == 1


def test_an_operand_that_l2_keeps_is_read_once():
    """Of 3 tiles in 4 shares: 1024 rows of A, and 3 columns of tiles of B, of 1024 bytes each."""
    line = 512 * 2
    rows, columns = 1024 * line, 1 * 256 * line
    of_rows, of_columns = 3 * 128 * line, 3 * 256 * line

    def read(l2_bytes: float, shares: int = 4) -> float:
        model = Model(PLAIN, H100, Costs(l2_bytes=l2_bytes))
        return tile_model(model)._unshared_bytes(CUT.group, 3, shares)

    assert read(rows) == 0, "it keeps both"
    assert read(rows - 1) == of_rows
    assert read(columns) == of_rows
    assert read(columns - 1) == of_rows + of_columns
    assert read(0, shares=6) == 0, "shares that begin where tiles do read alike"


def test_a_cut_is_together_where_workers_take_neighbours():
    grid = hopper.Grid.of(512, 512, 512, 128, 128, 64)
    made = [Schedule(kind, grid, workers=4, **how) for kind, how in (
        ("static", {}), ("dynamic", {}), ("dynamic", {"queues": 4, "split": "strides"}),
    )]  # fmt: skip
    assert [Cut.of(one).together for one in made] == [True, False, True]
