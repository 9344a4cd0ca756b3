"""The Hopper kernel's policy on a device made up for the purpose, and what TMA can address: no GPU is asked."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import BF16, H100, lines, reason, refused

from tilestream import Arrival, plan
from tilestream.core.grid import Grid
from tilestream.core.order import Raster
from tilestream.plan import Problem, plan_problem, search_space, tma
from tilestream.plan.candidate import ONE_TILE, Forced
from tilestream.plan.policy import hopper
from tilestream.plan.problem import FNUZ, FP8, ITEMSIZE, OCP, Incoming
from tilestream.schedule import Schedule

KINDS = ("static", "dynamic", "stream_k")
each_row = pytest.mark.parametrize("row", [pytest.param(row, id="-".join(map(str, row))) for row in hopper.TILES])
each_kind = pytest.mark.parametrize("kind", KINDS)
CHUNKED = Incoming(Arrival.uniform(512, 8).chunks(4096))


def test_what_no_extent_decides_is_made_once():
    hopper._known_ways.cache_clear()
    for m, n, k, rows, batch in (
        (4096, 4096, 4096, (128, 128), 1), (31, 8192, 520, (16, 16), 1), (700, 96, 4096, (128, 32), 1),
    ):  # fmt: skip
        problem = Problem(m, n, k, batch, **BF16, row_multiples=rows, vectors=(4, 4))
        assert list(hopper.candidates(problem, H100, 132, kinds=KINDS))
    assert hopper._known_ways.cache_info().misses == 1
    for other in ({"plain": False}, {"out_dtype": "float32"}, {"batch": 3}, {"dtype": "float8_e4m3fn"}):
        made = list(hopper.candidates(Problem(64, 64, 64, **(BF16 | other)), H100, 132, kinds=KINDS))
        alone = hopper.ways(Problem(64, 64, 64, **(BF16 | other)), H100, KINDS, hopper.FREE)
        assert {(one.block, one.swap_ab, one.kind, one.registers) for one in made} == {
            (way.block, way.swap_ab, kind, way.kinds[kind]["registers"]) for way in alone for kind in way.kinds
        }
    assert hopper._known_ways.cache_info().misses == 5


def candidates(problem=None, workers=132, kinds=KINDS, auto=False, **how):
    problem = problem or Problem(4096, 4096, 4096, **BF16)
    return list(hopper.candidates(problem, H100, workers, kinds=kinds, forced=Forced(**how), auto=auto))


def planned(*extents, dtype="bfloat16", **how):
    return plan(*(extents or (1000, 1000, 1000)), dtype=dtype, device=H100, **how)


def row_of(one):
    """The row of `TILES` that a candidate or a plan has."""
    rows, columns = one.block[1::-1] if one.swap_ab else one.block[:2]
    return next(row for row in hopper.TILES if row[:3] == (one.variant, rows, columns))


# Tiles ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out_size", [2, 4])
@each_row
def test_every_tile_has_a_ring_that_fits_and_strips_that_divide_it(row, out_size):
    stages, strip, buffers = row.stages(out_size, H100.shared), row.strip(out_size), row.buffers(out_size)
    stage = 128 * row.lines * (row.rows + row.columns)
    used = stages * stage + row.loops * buffers * row.rows_per_loop * strip * out_size + 1024
    assert 2 <= stages <= 12
    assert used <= H100.shared
    assert stages == 12 or used + stage > H100.shared, "one more would fit"
    assert strip & (strip - 1) == 0
    assert all(width % strip == 0 for width in hopper.widths(row.columns)), "a strip lies in one part"
    assert row.rows_per_loop * strip * out_size <= 8192
    assert max(strip, row.rows_per_loop) <= 256, "a box"
    assert buffers == (1 if strip == row.columns else 2)
    assert row.strip(out_size, 16) == min(strip, 16)


@each_row
def test_an_accumulator_fits_the_registers_of_a_math_loop(row):
    assert row.rows_per_loop % 64 == 0, "the tensor cores take 64 rows"
    assert row.registers == row.rows_per_loop * row.columns * 4 // (128 * 4)
    assert row.registers <= 192
    assert row.loops == (1 if row.variant == "single" else 2)
    assert row.block_k(2) * 2 == row.block_k(1) == 128 * row.lines


@pytest.mark.parametrize("widest", [128, 256])
@each_row
def test_a_tile_is_multiplied_in_parts_that_are_powers_of_two(row, widest):
    parts = hopper.widths(row.columns, widest)
    assert sum(parts) == row.columns
    assert list(parts) == sorted(parts, reverse=True)
    assert len(parts) <= hopper.MOST_PARTS
    assert all(part & (part - 1) == 0 and 8 <= part <= widest for part in parts)


def test_parts_by_hand():
    assert [hopper.widths(n) for n in (256, 224, 192, 160, 96, 16)] == [
        (256,), (128, 64, 32), (128, 64), (128, 32), (64, 32), (16,),
    ]  # fmt: skip
    assert hopper.widths(256, 128) == (128, 128)
    for dtype, fast, widest in (("bfloat16", True, 256), ("float8_e4m3fn", True, 256), ("float8_e4m3fn", False, 128)):
        assert hopper.widest(Problem(1, 1, 1, 1, dtype, "bfloat16", fast_accum=fast)) == widest
    assert len({row[:3] for row in hopper.TILES}) == len(hopper.TILES), "no tile is there twice"


# What it does, and what it leaves to the portable kernel --------------------------------------------------------------


def test_what_it_does_it_does():
    made = planned(4096, 4096, 4096)
    assert (made.backend, made.warps) == ("hopper", 4)
    assert made.label.startswith(f"hopper {made.variant} dynamic, 132 workers with a queue each, ")
    assert reason(made, "portable") == "the Hopper kernel does this"
    assert reason(made, "static")
    assert re.search(r"refused   \d+x\d+ tiles: the cost model expects", made.explain())


@pytest.mark.parametrize(
    ("layout", "extents", "which"),
    [
        ("nn", (65, 64, 64), ""), ("nn", (64, 65, 64), "b"), ("nn", (64, 64, 65), "a"), ("nt", (64, 65, 64), ""),
        ("nt", (64, 64, 65), "ab"), ("tn", (65, 64, 64), "a"), ("tn", (64, 64, 65), ""), ("tt", (65, 64, 64), "a"),
        ("tt", (64, 65, 64), ""), ("tt", (64, 64, 65), "b"),
    ],
)  # fmt: skip
def test_a_layout_is_addressed_where_its_rows_are_aligned(layout, extents, which):
    made = planned(*extents, dtype="float16", layout=layout, backend="hopper")
    assert (made.backend, made.realigned, made.problem.not_by_tma) == ("hopper", which, which)
    assert ("realigned" in made.label) == bool(which)
    strides = "(65, 1)" if which and layout["ab".index(which[0])] == "n" else "(1, 65)"
    why = f"{which[:1]} has strides {strides} of 2 bytes: TMA needs one stride of 1, the others multiples of 16 bytes"
    assert (f" bytes: {why}\n" in made.explain()) == bool(which)
    here = planned(*extents, dtype="float16", layout=layout, backend="portable")
    assert (here.backend, here.realigned) == ("portable", "")


def test_the_portable_kernel_can_be_had():
    assert reason(planned(64, 64, 64, tile=(128, 128), backend="portable"), "hopper") == "backend='portable' given"


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize(
    "how",
    [
        {"arrival": Arrival.uniform(256, 16, pivot=3)},
        {"arrival": Arrival.ragged([0, 10, 10, 4096], pivot=2)},
        {"weight_arrival": Arrival.uniform(512, 8, pivot=5)},
        {"arrival": Arrival.uniform(100, 41), "weight_arrival": Arrival.uniform(512, 8)},
    ],
    ids=["uniform", "ragged", "weight", "both"],
)
def test_what_arrives_is_its_too(how, layout):
    made = planned(4096, 4096, 4096, layout=layout, **how)
    assert reason(made, "portable") == "the Hopper kernel does this"
    assert "a tile waits for the chunks it reads" in made.explain()
    operand, chunks = ("arrival" not in how), how.get("arrival", how.get("weight_arrival"))
    for one in (made, planned(4096, 4096, 4096, layout=layout, backend="portable", **how)):
        assert one.schedule.raster.order in ("chunk_major", "table")
        ready = [
            max((w.chunk - chunks.pivot) % chunks.num_chunks for w in one.gate.needs(item) if w.operand == operand)
            for item in one.schedule.items()
        ]
        assert ready == sorted(ready), "in the order in which chunks arrive, the pivot's first"
    few_rows = planned(16, 4096, 4096, layout=layout, weight_arrival=Arrival.uniform(512, 8))
    assert few_rows.swap_ab
    assert few_rows.schedule.raster.transposed, "B's columns are the tensor cores' rows, and still the output's columns"


def test_the_reason_why_a_tile_that_is_forced_is_not_cut():
    problem = Problem(4096, 4096, 4096, plain=False, **BF16)
    why = "with more than a plain epilogue an accumulator of 128 rows and columns leaves no registers for it"
    forced = {"variant": "ping_pong", "tile": (128, 128), "device": H100}
    made = plan_problem(problem, None, "stream_k", **forced)
    assert (made.backend, reason(made, "hopper")) == ("portable", why)
    with pytest.raises(NotImplementedError, match=why):
        plan_problem(problem, None, "stream_k", backend="hopper", **forced)
    assert plan_problem(problem, None, "dynamic", **forced).backend == "hopper"
    # The same tile, the other way round, has an accumulator that is cut.
    assert plan_problem(problem, None, "stream_k", device=H100, tile=(256, 128)).swap_ab


def test_no_stream_k_where_both_operands_arrive():
    rows, columns = {"arrival": Arrival.uniform(256, 5)}, {"weight_arrival": Arrival.uniform(256, 5)}
    extents, why = (1280, 1280, 8192), "with both operands arriving the load warp has no registers for it"
    assert planned(*extents, **rows, schedule="stream_k").backend == "hopper"
    made = planned(*extents, **rows, **columns)
    assert (made.backend, made.schedule.kind != "stream_k", reason(made, "stream_k")) == ("hopper", True, why)
    made = planned(*extents, **rows, **columns, schedule="stream_k")
    assert (made.backend, made.schedule.kind, reason(made, "hopper")) == ("portable", "stream_k", why)
    with pytest.raises(NotImplementedError, match=f"backend='hopper': {why}"):
        planned(*extents, **rows, **columns, schedule="stream_k", backend="hopper")


@each_row
def test_a_gate_gives_the_load_warp_registers_that_the_accumulators_leave(row):
    how = {"variant": row.variant, "tile": (row.rows, row.columns), "kinds": ("dynamic",)}
    ((load, math),) = {c.registers for c in candidates(Problem(4096, 4096, 4096, rows=CHUNKED, **BF16), **how)}
    assert load + row.loops * math == (256 if row.loops == 1 else 504), "what Triton has to give out"
    assert load == (72 if row.loops == 1 else 56 if row.registers <= 128 else 40)
    assert load % 8 == math % 8 == 0, "setmaxnreg counts in eights"


@pytest.mark.parametrize("row", [row for row in hopper.TILES if row.columns in (96, 160, 192, 224, 128, 256)], ids=str)
def test_where_operands_arrive_the_load_warp_has_no_registers_for_all_of_it(row):
    def kinds(columns):
        problem = Problem(4096, 4096, 4096, rows=CHUNKED, columns=columns, **BF16)
        made = candidates(problem, 131, kinds=("dynamic", "stream_k"), variant=row.variant)
        return {c.schedule.kind for c in made if row[1:3] in (c.block[:2], c.block[1::-1])}

    several = len(hopper.widths(row.columns)) > 1
    room = row.registers <= hopper._LEAST_ROOM and not several
    assert kinds(None) == ({"dynamic", "stream_k"} if room else {"dynamic"})
    assert kinds(CHUNKED) == (set() if several else {"dynamic"})


# What is forced ------------------------------------------------------------------------------------------------------


@each_row
def test_a_variant_and_a_tile_both_ways_round(row):
    for tile in {(row.rows, row.columns), (row.columns, row.rows)}:
        made = planned(variant=row.variant, tile=tile)
        assert (made.backend, made.variant, made.tile) == ("hopper", row.variant, tile)
        ways = {(c.variant, c.block[:2], c.swap_ab) for c in candidates(variant=row.variant, tile=tile)}
        both = {(row.variant, (row.rows, row.columns), False), (row.variant, (row.columns, row.rows), True)}
        assert both & ways
        assert {way[:2] for way in ways} == {(row.variant, tile)}
    assert (row.rows == row.columns) <= (not any(c.swap_ab for c in candidates(variant=row.variant, tile=tile)))


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_stages(stages):
    made = planned(stages=stages)
    assert (made.backend, made.stages) == ("hopper", stages)


@pytest.mark.parametrize("registers", hopper.REGISTERS)
@each_kind
def test_registers(registers, kind):
    found = candidates(registers=registers, kinds=(kind,))
    assert {c.registers for c in found} == ({registers} if registers == (40, 232) or kind != "stream_k" else set())
    assert "single" not in {c.variant for c in found}
    assert {c.registers for c in candidates(kinds=(kind,))} == {(40, 232), (40, 216)}


def test_registers_are_in_the_plan():
    one, other = (planned(tile=(128, 128), variant="cooperative", registers=given) for given in (None, (24, 240)))
    assert (one.registers, other.registers) == ((40, 232), (24, 240))
    alike = ("registers", "why", "refused", "schedule", "predicted")
    assert dataclasses.replace(other, **{name: getattr(one, name) for name in alike}) == one
    assert "  registers of a thread: 24 of the load warp, 240 of the math warps" in other.explain()
    assert planned(variant="single").registers == (40, 216)
    assert plan(64, 64, 64).registers == (0, 0)
    assert lines(plan(64, 64, 64), "registers") == []


def test_three_consumers_are_taken_where_they_are_forced():
    made = planned(3072, 3072, 3072, variant="triple")
    assert (made.variant, made.registers, sorted(made.tile)[1]) == ("triple", (32, 160), 192)
    assert made.why.endswith("; three consumers, which on an H200 gain nothing over two")
    assert "triple" not in {one.variant for one in candidates(Problem(3072, 3072, 3072, **BF16))}
    for what in ({"schedule": "stream_k"}, {"registers": (40, 232)}, {"arrival": Arrival.uniform(256, 12)}):
        with pytest.raises(NotImplementedError, match="backend='hopper'"):
            planned(3072, 3072, 3072, variant="triple", **what)
    eight = {one.tile for one in candidates(Problem(512, 512, 512, 1, "float8_e4m3fn", "bfloat16"), variant="triple")}
    assert eight == {(192, 160), (160, 192)}


@each_kind
def test_a_schedule_and_workers(kind):
    made = planned(schedule=kind, workers=7)
    assert (made.schedule.kind, made.workers, made.backend) == (kind, 7, "hopper")


def test_queues_shares_and_an_order():
    schedule = planned(queues=4, backend="hopper").schedule
    assert (schedule.kind, schedule.queues, schedule.split) == ("dynamic", 4, "columns")
    schedule = planned(shares=3, workers=5, tile=(128, 128), backend="hopper").schedule
    assert (schedule.kind, schedule.num_shares) == ("stream_k", 3)
    made = planned(tile=(128, 128), order=list(range(64))[::-1])
    assert (made.backend, made.schedule.raster.order) == ("hopper", "table")


SLIM = {"registers": (24, 240)}
FEW = "24 registers of the load warp's are too few for "


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"tile": (48, 48)}, "it has no 48x48 tile here"),
        ({"tile": (64, 16), "variant": "ping_pong"}, "it has no 64x16 tile here with variant=ping_pong, stages=None"),
        ({"stages": 13}, "no tile of it fits with variant=None, stages=13"),
        ({"variant": "cooperative", "tile": (128, 256), "stages": 9},
         "it has no 128x256 tile here with variant=cooperative, stages=9"),
        ({**SLIM, "schedule": "stream_k"}, f"{FEW}stream_k"),
        ({**SLIM, "arrival": Arrival.uniform(100, 10)}, f"{FEW}a gate"),
        ({**SLIM, "queues": 3}, f"{FEW}queues=3"),
        ({**SLIM, "variant": "single"}, "one math loop has (40, 216) registers"),
        ({**SLIM, "tile": (64, 32)}, "it has no 64x32 tile here with registers=(24, 240)"),
    ],
)  # fmt: skip
def test_what_it_does_not_have(how, why):
    more = ", registers=" if "registers" in how else ""
    leave = f"leave what is forced of backend=, variant=, stages={more}, tile= and schedule= away"
    with refused(NotImplementedError, f"backend='hopper': {why}; {leave}"):
        planned(backend="hopper", **how)


def test_a_tile_that_only_the_portable_kernel_has():
    assert planned(tile=(16, 128)).backend == "hopper", "the other way round, it has that one"
    with pytest.raises(ValueError, match=r"tile=\(48, 48\): the portable kernel has "):
        planned(tile=(48, 48))
    small = dataclasses.replace(H100, shared=49152)
    made = plan(1000, 1000, 1000, dtype="bfloat16", device=small, tile=(64, 64))
    assert made.backend == "portable"
    assert reason(made, "hopper").startswith("a tile of 64x64 does not fit with dynamic or stream_k here")


# Candidates ----------------------------------------------------------------------------------------------------------

problems = st.builds(
    lambda m, n, k, batch, dtype, out, fast, plain: Problem(
        m, n, k, batch, dtype, out, tf32=dtype == "float32", fast_accum=fast, plain=plain
    ),
    *[st.integers(1, 20000)] * 3, st.sampled_from([1, 1, 3]), st.sampled_from(hopper.DTYPES),
    st.sampled_from(hopper.OUT_DTYPES), st.booleans(), st.booleans(),
)  # fmt: skip


@given(problems, st.integers(1, 132))
def test_candidates_are_ways_that_can_be_run(problem, workers):
    found = list(hopper.candidates(problem, H100, workers, kinds=KINDS))
    assert {c.schedule.kind for c in found} == set(KINDS)
    out_size, promoted = ITEMSIZE[problem.out_dtype], problem.dtype in FP8 and not problem.fast_accum
    for one in found:
        row = row_of(one)
        # Beside the accumulator a math loop holds the product of one of its parts.
        held = row.registers + (row.rows_per_loop if promoted else 0)
        assert row.registers <= 128 or problem.plain, "an epilogue takes registers, too"
        assert held <= 160 or one.schedule.kind != "stream_k", "and so does reducing"
        assert held <= (160 if promoted and one.variant == "ping_pong" else 192)
        assert not promoted or len(hopper.widths(row.columns, 128)) <= 2
        if promoted:
            row = row._replace(lines=1)
            assert one.block[2] == 128, "as much as the tensor cores may add up"
        assert one.block[2] == row.block_k(ITEMSIZE[problem.dtype])
        assert 2 <= one.stages == row.stages(out_size, H100.shared)
        assert one.strip <= row.strip(out_size)
        assert row.columns % one.strip == 0
        assert (one.buffers, one.warps) == (row.buffers(out_size), 4)
        assert 0 < one.predicted < math.inf
        schedule, grid = one.schedule, one.schedule.grid
        counts = (grid.num_m, grid.num_n, grid.k_steps)
        for extent, size, count in zip((problem.m, problem.n, problem.k), one.block, counts, strict=True):
            assert count * size >= extent > (count - 1) * size
        assert schedule.workers == (workers if schedule.kind == "stream_k" else min(workers, grid.tiles))
        assert 1 <= schedule.raster.group <= max(1, grid.num_m)


def test_nothing_to_even_out_needs_no_queue():
    small = Problem(100, 100, 1000, **BF16)
    assert {c.schedule.kind for c in candidates(small, kinds=("dynamic", "stream_k"), auto=True)} == {
        "static", "stream_k",
    }  # fmt: skip
    assert {c.schedule.kind for c in candidates(small, kinds=("dynamic",))} == {"dynamic"}, "as it was asked for"
    assert planned(100, 100, 1000, schedule="dynamic").schedule.kind == "dynamic"


def test_a_queue_a_worker_where_there_is_something_to_even_out_and_nothing_arrives():
    made = planned(4096, 4096, 4096, schedule="dynamic").schedule
    assert (made.queues, made.split, made.workers) == (132, "strides", 132)
    static = dataclasses.replace(made, kind="static", queues=1, split="items")
    for worker in range(made.workers):  # what it takes by itself is what a static grid would give it
        own = [made.ticket(worker, ticket)[0] for ticket in range(made.queue_size(worker))]
        assert own == [static.ticket(0, at)[0] for at in range(worker, made.grid.tiles, made.workers)]
    assert planned(4096, 4096, 4096, queues=1).schedule.queues == 1
    arriving = planned(4096, 4096, 4096, arrival=Arrival.uniform(512, 8), schedule="dynamic")
    assert arriving.schedule.split != "strides"


def test_shares_of_a_remainder():
    def shares(tiles, k_steps, workers, forced=None):
        return hopper._shares(tiles, k_steps, workers, forced)

    assert shares(100, 100, 132, 7) == (7,)
    assert shares(100, 100, 50) == (0,), "no remainder"
    assert shares(102, 100, 50) == (0, 2 * 25), "each tile in as many parts as there are workers for it"
    assert shares(102, 20, 50) == (0, 2 * 5), "of four K steps and more"
    assert shares(140, 100, 99) == (0, 2 * 41)
    assert shares(160, 100, 99) == (0,), "fewer workers than two for each"
    assert shares(102, 7, 50) == (0,)


@given(st.integers(1, 400), st.integers(1, 300), st.integers(1, 132))
def test_shares_cut_each_tile_alike(tiles, k_steps, workers):
    for shares in hopper._shares(tiles, k_steps, workers, None)[1:]:
        schedule = Schedule("stream_k", Grid.of(tiles, 1, k_steps, 1, 1, 1), Raster(), workers, shares=shares)
        assert schedule.remainder
        assert schedule.num_shares == shares <= workers
        assert shares % schedule.remainder == 0
        parts = shares // schedule.remainder
        several = [len(schedule.contributors(tile)) for tile in range(schedule.remainder)]
        # Where the steps do not divide, the larger shares come first, and some cross from tile to tile.
        assert k_steps % parts or several == [parts] * len(several)


# The model: what it says about more of the same, not how much ---------------------------------------------------------


@each_row
@each_kind
def test_more_work_takes_longer(row, kind):
    def seconds(m, n, k):
        how = {"variant": row.variant, "tile": (row.rows, row.columns), "kinds": (kind,)}
        return min((c.predicted for c in candidates(Problem(m, n, k, **BF16), **how)), default=None)

    little, deep = seconds(2048, 4096, 4096), seconds(8192, 4096, 16384)
    if little is None:  # no registers
        assert (kind, row.registers > 160) == ("stream_k", True)
        return
    assert little < seconds(8192, 4096, 4096) < deep
    assert little < seconds(2048, 16384, 4096)


def test_fewer_workers_take_longer():
    for kind in KINDS:
        few, many = (min(c.predicted for c in candidates(workers=w, kinds=(kind,))) for w in (20, 132))
        assert many < few


def test_memory_binds_where_there_is_little_to_compute():
    few = Problem(1, 8192, 8192, **BF16)
    least = few.bytes / H100.bandwidth
    assert all(c.predicted > least for c in candidates(few))
    slow = dataclasses.replace(H100, bandwidth=H100.bandwidth / 100)
    found = [min(c.predicted for c in hopper.candidates(few, device, 132, kinds=KINDS)) for device in (H100, slow)]
    assert found[1] > 10 * found[0]
    many = Problem(2048, 2048, 512, **BF16)
    for one in hopper.candidates(many, slow, 132, kinds=("stream_k",)):
        partials = 2 * 4 * one.schedule.slots * math.prod(one.tile)  # written, and read again
        assert one.predicted > (many.bytes + partials) / slow.bandwidth, "stream_k's partial results are bytes, too"


@pytest.mark.parametrize("m", [1, 16, 64, 8192])
def test_few_rows_get_a_tile_of_few_rows_and_many_a_large_one(m):
    made = planned(m, 8192, 8192, layout="nt")
    rows, columns = made.tile
    assert made.backend == "hopper"
    assert rows * columns >= 128 * 192 if m == 8192 else (rows <= 64 and made.swap_ab == (rows < 64))


# The search space ----------------------------------------------------------------------------------------------------


@given(problems)
def test_the_plan_takes_the_fastest_of_its_search_space(problem):
    space = list(search_space(problem, H100))
    best = plan_problem(problem, device=H100)
    assert all(made.backend == "hopper" or made.variant == ONE_TILE for made in space)
    assert {made.why for made in space} == {"one of the search space"}
    assert best.predicted == min(made.predicted for made in space)
    assert any((made.variant, made.block, made.schedule) == (best.variant, best.block, best.schedule) for made in space)


def test_a_search_space_of_the_portable_kernel_and_of_none():
    space = list(search_space(Problem(64, 64, 64, dtype="float32"), H100, workers=9))
    assert {made.backend for made in space} == {"portable"}
    assert {made.workers for made in space} == {9}
    with pytest.raises(NotImplementedError, match="float64 on a GPU"):
        list(search_space(Problem(64, 64, 64, 1, "float64", "float64"), H100))


# What TMA can address ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("extents", "strides", "batch", "size", "major"),
    [
        ((64, 64), (64, 1), 0, 2, 1),
        ((64, 64), (1, 64), 0, 2, 0),
        ((64, 60), (64, 1), 0, 2, 1),  # an extent may be anything, a stride may not
        ((64, 60), (60, 1), 0, 2, None),
        ((64, 60), (60, 1), 0, 4, 1),
        ((64, 64), (64, 2), 0, 2, None),
        ((64, 64), (0, 1), 0, 2, None),  # rows that are all one and the same
        ((64, 64), (-64, 1), 0, 2, None),
        ((1, 64), (7, 1), 0, 2, 1),  # the stride of a single row does not count
        ((64, 1), (64, 7), 0, 2, 1),
        ((64, 1), (1, 7), 0, 2, 0),
        ((1, 1), (3, 5), 0, 2, 1),
        ((64, 64), (64, 1), 64, 2, 1),
        ((64, 64), (64, 1), 4, 2, None),
        ((64, 64), (64, 1), 2**39, 2, None),
        ((64, 64), (2**39, 1), 0, 2, None),
        ((64, 64), (2**39 - 8, 1), 0, 2, 1),
        ((64, 64), (16, 1), 0, 1, 1),
        ((64, 64), (8, 1), 0, 1, None),
    ],
)
def test_which_dimension_is_contiguous(extents, strides, batch, size, major):
    assert tma.major_of(extents, strides, batch, size) == major


@given(
    st.tuples(st.integers(1, 70), st.integers(1, 70)), st.tuples(st.integers(0, 200), st.integers(0, 200)),
    st.sampled_from([0, 8, 64, 3]), st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_a_transposed_matrix_is_addressed_the_other_way(extents, strides, batch, size):
    major = tma.major_of(extents, strides, batch, size)
    other = tma.major_of(extents[::-1], strides[::-1], batch, size)
    assert (major is None) == (other is None)
    if major is not None and min(extents) > 1:
        assert other == 1 - major
        assert strides[major] == 1
        assert strides[1 - major] * size % 16 == 0
        assert batch * size % 16 == 0


@given(
    st.tuples(st.integers(1, 70), st.integers(1, 70)), st.tuples(st.integers(0, 200), st.integers(0, 200)),
    st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_a_store_ends_at_whole_16_bytes(extents, strides, size):
    major, stored = (f(extents, strides, 0, size) for f in (tma.major_of, tma.store_major_of))
    assert stored in (None, major)
    assert (stored is not None) == (major is not None and extents[major] * size % 16 == 0)


@pytest.mark.parametrize(
    ("strides", "address", "major", "why"),
    [
        ((64, 1), 0, None, ""),
        ((64, 1), 0, 1, ""),
        ((1, 64), 0, None, ""),
        ((64, 1), 8, None, "a lies at an address that is no multiple of 16, TMA's rule"),
        ((63, 1), 0, None,
         "a has strides (63, 1) of 1 bytes: TMA needs one stride of 1, the others multiples of 16 bytes"),
        ((1, 64), 0, 1, "a is not contiguous along K, and the tensor cores take 8-bit operands only so"),
    ],
)  # fmt: skip
def test_why_an_operand_is_not_addressed(strides, address, major, why):
    assert tma.refuse("a", (64, 64), strides, 0, 1, address, major) == why


@pytest.mark.parametrize("dtypes", list(itertools.product(OCP, repeat=2)))
def test_8_bit_operands_lie_along_k(dtypes):
    assert not tma.refuse_contiguous(64, 64, 64, "nt", dtypes)
    assert tma.refuse_contiguous(64, 64, 64, "nn", dtypes).startswith("b is not contiguous along K")
    assert tma.refuse_contiguous(64, 64, 64, "tt", dtypes).startswith("a is not contiguous along K")
    assert tma.refuse_contiguous(64, 64, 72, "nt", dtypes).startswith("a has strides (72, 1) of 1 bytes")
    made = plan(4096, 4096, 4096, dtype=dtypes[0], b_dtype=dtypes[1], device=H100)
    assert made.backend == "hopper"
    across = plan(512, 512, 512, dtype=dtypes[0], b_dtype=dtypes[1], device=H100, layout="nn")
    assert (across.backend, across.realigned) == ("hopper", "b")


def test_other_kinds_of_8_bits_are_refused():
    with pytest.raises(NotImplementedError, match=r"backend='hopper': it multiplies .*, not float8_e4m3fnuz"):
        planned(64, 64, 64, dtype=FNUZ[0], backend="hopper")


def test_float32_is_multiplied_as_tf32_where_that_is_allowed_and_lies_along_k():
    problem = Problem(4096, 4096, 4096, dtype="float32", out_dtype="float32", tf32=True)
    made, halves = (plan_problem(one, device=H100) for one in (problem, Problem(4096, 4096, 4096, **BF16)))
    assert made.backend == "hopper"
    assert made.block[2] % 32 == 0
    assert 1.7 < made.predicted / halves.predicted < 2.3, "half the rate, twice the bytes"
    assert tma.refuse_contiguous(64, 64, 64, "nt", ("float32", "float32")) == ""
    for layout, name in (("nn", "b"), ("tt", "a"), ("tn", "a")):
        why = tma.refuse_contiguous(64, 64, 64, layout, ("float32", "float32"))
        assert why == f"{name} is not contiguous along K, and the tensor cores take tf32 only so"
        other = plan_problem(dataclasses.replace(problem, no_tma=why), device=H100)
        assert other.backend == "portable"
        assert f"hopper: {why}" in other.explain()


def test_8_bits_without_fast_accumulation():
    made = planned(4096, 4096, 4096, dtype="float8_e4m3fn", use_fast_accum=False)
    assert (made.backend, made.problem.fast_accum) == ("hopper", False)
    assert "added up in float32 every 128 of K" in made.explain()


def test_a_batch_that_shares_an_operand():
    made = plan_problem(Problem(4096, 512, 512, 4, **BF16, shared_rows=True), device=H100)
    assert (made.backend, made.schedule.grid.batch) == ("hopper", 4)


def test_a_swapped_tile_of_two_parts_has_a_plain_epilogue():
    # Triton 3.9 keeps what another one is told on the stack: tests/kernels/gates/hopper_gemm.py.
    def tiles(plain, swapped):
        made = candidates(Problem(4096, 4096, 4096, plain=plain, **BF16))
        return {one.block[:2] for one in made if one.swap_ab == swapped}

    assert {(96, 256), (128, 256)} <= tiles(True, True)
    assert (96, 256) not in tiles(False, True)
    assert (128, 256) in tiles(False, True)
    assert (256, 96) in tiles(False, False)
