"""What the Hopper kernel is launched with: maps, majors, which way round, strides; and the launch's own bookkeeping.

No GPU: the maps are data, and launches are written down instead of issued.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import GateWords, LocalRows
from tilestream.arrival.flat import Awaited
from tilestream.core import gpu_specs
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.kernels.config import HopperConfig
from tilestream.kernels.hopper.epilogue import line_layout
from tilestream.kernels.hopper.gemm import gemm
from tilestream.launch.gate import NO_GATE, GateArguments, PublishArguments
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.grouped_arguments import Bias
from tilestream.launch.hopper import grouped as hopper_grouped
from tilestream.launch.hopper import launch as launching
from tilestream.launch.hopper.arguments import Arguments
from tilestream.launch.hopper.grouped import HopperGroupedArguments
from tilestream.launch.hopper.launch import GemmLaunch
from tilestream.launch.hopper.maps import Map, described_by
from tilestream.launch.launch import Probe
from tilestream.launch.launcher import VARIES, Descriptor
from tilestream.launch.trace import SpanLog
from tilestream.ops import gpu
from tilestream.plan import DeviceProperties, Problem
from tilestream.plan.candidate import Asked, Forced
from tilestream.plan.grouped import hopper_candidates
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy import hopper as policy
from tilestream.plan.problem import GroupedProblem
from tilestream.plan.problem import Incoming as Arriving
from tilestream.runtime.channel import channel

H100 = DeviceProperties("an H100", "portable", 132, 5e11, 3.3e12, "a stub", "sm_90", 232448)
M, N, K = 1000, 520, 264
BF16 = ("bfloat16", "bfloat16")
ROWS = (0, N, 1)
BATCHES = Layout((M * K, K, 1), (K * N, N, 1), (M * N, N, 1))
NAMES = gemm.arg_names
#: The tile of each way round.
TILE = {False: (128, 64), True: (64, 128)}
swapped_or_not = pytest.mark.parametrize("swapped", [False, True])


def make(
    variant="cooperative", tile=(128, 64), swapped=False, kind="dynamic", m=M, n=N, k=K, batch=1, dtypes=BF16,
    queues=None, order=None, workers=7, **problem,
) -> Plan:  # fmt: skip
    made = Problem(m, n, k, batch, *dtypes, **problem)
    forced = Forced(tile, order, queues, variant=variant)
    found = policy.candidates(made, H100, workers, kinds=(kind,), forced=forced)
    return of_candidate(made, H100, "hopper", next(one for one in found if one.swap_ab == swapped), "a test's")


def strides(rows: int, columns: int, how: str) -> tuple[int, int, int]:
    return (0, *((columns, 1) if how == "n" else (1, rows)))


def layout(how="nn", out=ROWS, m=M, n=N, k=K, **rest) -> Layout:
    return Layout(strides(m, k, how[0]), strides(k, n, how[1]), out, **rest)


def named(arguments: Arguments) -> dict[str, Any]:
    """Every argument and compile-time constant of the kernel by its name; what stands in for operands is their name."""
    operands = NAMES[: NAMES.index("row_signals")]
    filled = arguments.fill((*operands, "base", "reset", "alpha", "beta"), 99, GateArguments(*GateArguments._fields))
    return by_name(filled)


def by_name(filled: Any) -> dict[str, Any]:
    given = dict(zip(NAMES, filled, strict=True))
    config = given["C"]
    derived = {name: getattr(config, name) for name, of in vars(HopperConfig).items() if isinstance(of, property)}
    return given | dataclasses.asdict(config) | derived


def check(found: Arguments | dict[str, Any], **expected) -> None:
    """Arguments and constants, by name."""
    given = named(found) if isinstance(found, Arguments) else found
    assert {name: given[name] for name in expected} == expected


# Maps ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["nn", "nt", "tn", "tt"])
def test_maps_of_each_layout(how):
    a = Map((M, K), (K, 1), (64, 128)) if how[0] == "n" else Map((K, M), (M, 1), (128, 64))
    b = Map((K, N), (N, 1), (128, 64)) if how[1] == "n" else Map((N, K), (K, 1), (64, 128))
    made = Arguments(make(), layout(how))
    assert (made.x, made.y) == (a, (b, None, None)), "a loop has half of a tile's rows, and a copy of its own"
    assert made.out == Map((M, N), (N, 1), (64, make().strip))
    majors = {"X_K_MAJOR": how[0] == "n", "Y_K_MAJOR": how[1] == "t"}
    check(made, FLIPPED=False, STORE="tma", SWAP_AB=False, BATCHED=False, **majors)


@pytest.mark.parametrize("how", ["nn", "nt", "tn", "tt"])
def test_swapped_the_rows_are_bs(how):
    plan = make(tile=TILE[True], swapped=True)
    assert plan.swap_ab
    made = Arguments(plan, layout(how))
    assert made.x.shape == ((N, K) if how[1] == "t" else (K, N))
    assert made.y[0].shape == ((M, K) if how[0] == "n" else (K, M))
    assert made.out == Map((M, N), (N, 1), (plan.strip, 64)), "an output in rows is written across"
    check(made, FLIPPED=True, SWAP_AB=True, rows=N, columns=M, ROWS=128, WIDTHS=(64,), stride_or=1, stride_oc=N)
    across = Arguments(plan, layout(how, out=(0, 1, M)))
    assert across.out == Map((N, M), (M, 1), (64, plan.strip))
    check(across, FLIPPED=False)


@pytest.mark.parametrize(
    ("variant", "tile", "halves"),
    [("cooperative", (128, 128), 2), ("ping_pong", (128, 128), 1), ("single", (64, 64), 1)],
)
def test_a_box_is_what_one_loop_multiplies(variant, tile, halves):
    plan = make(variant, tile)
    made = Arguments(plan, layout())
    assert made.x.box == (plan.block[0] // halves, plan.block[2])
    assert made.out.box == (plan.block[0] // halves, plan.strip)


def test_parts_of_a_tile_have_a_map_each():
    made = Arguments(make(tile=(128, 224)), layout("nt"))
    assert [part.box for part in made.y] == [(width, 64) for width in (128, 64, 32)]
    assert {part.shape for part in made.y} == {(N, K)}
    check(made, WIDTHS=(128, 64, 32))
    fp8 = {"dtypes": ("float8_e4m3fn", "bfloat16"), "k": 256}
    for fast, widths in ((True, (256,)), (False, (128, 128))):
        made = Arguments(make(tile=(128, 256), fast_accum=fast, **fp8), layout("nt", k=256))
        check(made, WIDTHS=widths, PROMOTED=not fast)


@pytest.mark.parametrize("row", policy.TILES, ids=lambda row: "-".join(map(str, row)))
@pytest.mark.parametrize("size", [1, 2])
def test_every_box_is_one_that_tensor_maps_have(row, size):
    dtype = "bfloat16" if size == 2 else "float8_e4m3fn"
    for swapped in (False, True)[: 1 if row.rows == row.columns else 2]:
        tile = (row.columns, row.rows) if swapped else (row.rows, row.columns)
        plan = make(row.variant, tile, swapped, dtypes=(dtype, "bfloat16"), m=1024, n=1024, k=1024)
        made = Arguments(plan, layout("nt", m=1024, n=1024, k=1024, out=(0, 1024, 1)))
        for one in (made.x, *made.y, made.out):
            if one is not None:
                assert one.box[0] <= 256, one
                # Triton cuts rows of more than 128 bytes into several copies.
                row_bytes = one.box[1] * (2 if one is made.out else size)
                assert row_bytes in (32, 64) or row_bytes % 128 == 0, one


def test_what_tma_cannot_address_is_refused():
    with pytest.raises(ValueError, match=r"an operand of extents \(1000, 264\) and strides \(265, 1\): TMA cannot"):
        Arguments(make(), Layout((0, 265, 1), (0, N, 1), ROWS))


# Outputs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("out", "m", "n", "stored", "flipped"),
    [
        ((0, N, 1), M, N, "tma", False),
        ((0, N + 8, 1), M, N, "tma", False),  # rows with a gap
        ((0, 1, M), M, N, "tma", True),  # columns
        ((0, N + 1, 1), M, N, "lines", False),
        ((0, 2 * N, 2), M, N, "direct", False),  # no element is beside another
        ((0, 528, 1), M, 524, "lines", False),  # TMA stores clip at whole 16 bytes
        ((0, 1, 1000), 996, N, "lines", True),
        ((0, 8, 1), 1, 8, "tma", False),
        ((0, 1, 8), 8, 1, "tma", True),
        ((0, 1, 1), 8, 1, "tma", True),
        ((0, 1, 1), 1, 1, "lines", False),
    ],
)
def test_how_an_output_is_stored(out, m, n, stored, flipped):
    made = Arguments(make(m=m, n=n), layout("nt", out=out, m=m, n=n))
    assert (made.out is None) == (stored != "tma")
    check(made, STORE=stored, FLIPPED=flipped, stride_ob=out[0], stride_or=out[1], stride_oc=out[2])


def test_an_output_is_stored_by_tma_where_its_address_and_rows_are_multiples_of_16_bytes():
    check(Arguments(make(), layout(), out_aligned=False), STORE="lines")
    plan = make(dtypes=("bfloat16", "float32"))
    for pitch, stored in ((524, "tma"), (522, "lines")):
        check(Arguments(plan, layout(out=(0, pitch, 1))), STORE=stored)


@pytest.mark.parametrize("swap_ab", [False, True])
def test_lines_are_those_of_the_output_either_way_round(swap_ab):
    """The accumulator's rows are B's columns where the operands are swapped, and so lie side by side."""
    tile = (64, 128) if swap_ab else (128, 64)
    for out, along_rows in (((0, N + 1, 1), swap_ab), ((0, 1, M + 1), not swap_ab)):
        made = named(Arguments(make("cooperative", tile, swap_ab), layout(out=out)))
        assert (made["STORE"], made["FLIPPED"]) == ("lines", along_rows)


@pytest.mark.parametrize(
    ("tile", "kind", "epilogue", "stored"),
    [
        ((128, 256), "dynamic", {}, "lines"),
        ((128, 256), "stream_k", {}, "lines"),
        ((128, 96), "stream_k", {"bias": 1}, "lines"),
        ((128, 160), "stream_k", {"bias": 1}, "direct"),
        ((256, 96), "dynamic", {"bias": 1}, "direct"),
        # No registers are left for it: see tests/kernels/gates/hopper_gemm.py.
        ((256, 96), "stream_k", {}, "direct"),
        ((256, 96), "stream_k", {"bias": 1}, "direct"),
        ((128, 256), "dynamic", {"bias": 1}, "direct"),
        ((128, 64), "dynamic", {"activation": "gelu"}, "lines"),
        ((128, 224), "dynamic", {}, "direct"),
        ((128, 256), "dynamic", {"scaled": True}, "direct"),
        ((128, 256), "dynamic", {"residual": (0, 905, 1)}, "direct"),
    ],
)
def test_lines_are_stored_where_registers_are_left(tile, kind, epilogue, stored):
    plan = make("cooperative", tile, kind=kind, m=2000, n=904, k=4096)
    assert bool(plan.schedule.slots) == (kind == "stream_k")
    check(Arguments(plan, layout(out=(0, 905, 1), m=2000, n=904, k=4096, **epilogue)), STORE=stored, FLIPPED=False)


@pytest.mark.parametrize(("columns", "flipped"), [(64, False), (32, False), (16, False), (32, True), (16, True)])
def test_a_store_of_a_warp_is_of_consecutive_elements(columns, flipped):
    made = line_layout(columns, flipped)
    across = made.threads_per_warp[0 if flipped else 1]
    assert across == (32 if flipped else min(32, columns))
    assert made.threads_per_warp[0] * made.threads_per_warp[1] == 32
    assert made.warps_per_cta[0] * made.warps_per_cta[1] == 4
    assert made.order[0] == (0 if flipped else 1), "the first threads are beside one another along the output's lines"
    # No element is in two threads: a strip is whole repetitions of what four warps hold.
    for extent, threads, warps in zip((64, columns), made.threads_per_warp, made.warps_per_cta, strict=True):
        assert extent % (threads * warps) == 0


@pytest.mark.parametrize(
    ("out", "residual", "wide"),
    [
        ((0, N, 1), None, False),
        ((0, 2**21, 1), None, False),
        ((0, 2**22, 1), None, True),  # 999 rows of so many
        ((0, 1, 2**23), None, True),
        ((2**40, N, 1), None, False),  # a batch's offset is 64 bits wide anyway
        ((0, N, 1), (0, 2**22, 1), True),
        ((0, N, 1), (2**40, N, 1), False),
        ((0, N + 1, 1), (0, 2**22, 1), True),
    ],
)
def test_offsets_that_leave_31_bits(out, residual, wide):
    plan = make()
    given = named(Arguments(plan, layout(out=out, residual=residual)))
    # They take two registers each: where there is no C buffer, fewer columns are finished at a time.
    check(given, OFFSETS_64BIT=wide, STRIP=16 if wide and given["STORE"] == "lines" else plan.strip)


@pytest.mark.parametrize(
    ("variant", "tile", "strips"),  # strips: by TMA, where the output is of 16 bits; and from registers
    [
        ("cooperative", (128, 256), (64, 32)),
        ("cooperative", (256, 128), (32, 16)),
        ("ping_pong", (128, 128), (32, 16)),
        ("ping_pong", (64, 256), (64, 32)),
        ("single", (64, 16), (16, 16)),
    ],
)
def test_strips_from_registers_have_few_elements(variant, tile, strips):
    plan = make(variant, tile)
    for out, stored, strip in zip((ROWS, (0, N + 1, 1)), ("tma", "lines"), strips, strict=True):
        check(Arguments(plan, layout(out=out)), STORE=stored, STRIP=strip)


@pytest.mark.parametrize(("n", "eights"), [(520, True), (516, False), (8, True), (1, False)])
def test_vectors_that_do_not_straddle_the_end(n, eights):
    check(Arguments(make(n=n), layout("nt", n=n, out=(0, 528, 1))), N_DIVISIBLE_BY_8=eights)
    swapped = make(tile=TILE[True], swapped=True, m=n, n=M)  # columns are A's rows
    check(Arguments(swapped, layout("nt", m=n, n=M, out=(0, M, 1))), N_DIVISIBLE_BY_8=eights)


# Batches, extents of one ----------------------------------------------------------------------------------------------


def test_batches_have_a_dimension_more():
    plan = make(batch=5)
    made = Arguments(plan, BATCHES)
    assert made.x == Map((5, M, K), (M * K, K, 1), (1, 64, 128))
    assert made.y[0] == Map((5, K, N), (K * N, N, 1), (1, 128, 64))
    assert made.out == Map((5, M, N), (M * N, N, 1), (1, 64, plan.strip))
    check(made, BATCHED=True, x_batched=1, y_batched=1, batches=5, stride_ob=M * N)


@pytest.mark.parametrize("shared", ["a", "b"])
@swapped_or_not
def test_what_all_batches_share_is_a_batch_of_one(shared, swapped):
    plan = make(batch=5, tile=TILE[swapped][::-1], swapped=not swapped)
    lay = BATCHES._replace(**{shared: (0, *getattr(BATCHES, shared)[1:])})
    made = Arguments(plan, lay)
    batches = {"a": 1 if shared == "a" else 5, "b": 1 if shared == "b" else 5}
    x, y = (batches["b"], batches["a"]) if plan.swap_ab else (batches["a"], batches["b"])
    assert (made.x.shape[0], made.y[0].shape[0]) == (x, y)
    check(made, x_batched=int(x > 1), y_batched=int(y > 1))


def test_a_single_batch_has_no_such_dimension():
    made = Arguments(make(batch=1), Layout((77, K, 1), (78, N, 1), (79, N, 1)))
    assert [len(one.shape) for one in (made.x, made.y[0], made.out)] == [2, 2, 2]
    check(made, x_batched=0, y_batched=0)


@pytest.mark.parametrize("extent", ["m", "n", "k"])
def test_the_stride_of_an_extent_of_one_does_not_count(extent):
    extents = {"m": M, "n": N, "k": K, extent: 1}
    m, n, k = extents.values()
    a, b = (0, 7, 1) if m == 1 else (0, K, 1), (0, 1, 7) if n == 1 else (0, 1, K)
    if k == 1:
        a, b = (0, 8, 3), (0, 5, 8)
    made = Arguments(make(**extents), Layout(a, b, (0, n, 1)))
    assert (made.x.shape, made.y[0].shape) == ((m, k), (n, k))


# The schedule, the epilogue, what is compiled in ----------------------------------------------------------------------


def test_every_argument_lands_under_its_name():
    plan = make(kind="stream_k", workers=11)
    lay = layout(bias=3, residual=(0, 2 * N, 2), scaled=True, activation="silu", scale_a=(5, 6), scale_b=(7, 8))
    schedule, grid, raster = plan.schedule, plan.schedule.grid, plan.schedule.raster
    themselves = ("x_map", "out_map", "log", "base", "reset", "alpha", "beta", *GateArguments._fields)
    check(
        Arguments(plan, lay, probe=True), **{name: name for name in themselves}, capacity=99, rows=M, columns=N,
        stride_bias=3, stride_rb=0, stride_rr=2 * N, stride_rc=2, stride_sb=5, stride_sr=6, stride_tb=7, stride_tc=8,
        batches=1, num_m=grid.num_m, num_n=grid.num_n, k_steps=grid.k_steps, full_tiles=schedule.full_tiles,
        shares=schedule.num_shares, units=schedule.units, queues=1, group=raster.group, first=raster.first,
        band=raster.band, first_batch=0, ROWS=128, BLOCK_K=128, STAGES=plan.stages, STRIP=plan.strip,
        BUFFERS=plan.buffers, KIND="stream_k", SPLIT="items", STEAL=False, ORDER="grouped", TRANSPOSED=False,
        CONSUMERS="cooperative", PROMOTED=False, LOAD_REGISTERS=40, MATH_REGISTERS=232, SCALED=True, SCALES="none",
        BIAS="columns", RESIDUAL=True, ACTIVATION="silu", PROBE=True, CHAINED=True, ROW_CHUNKS="none",
        COLUMN_CHUNKS="none",
    )  # fmt: skip


def test_one_kernel_serves_all_values_of_its_numbers_but_a_few_strides():
    specialised = {"stride_or", "stride_oc", "stride_bias", "stride_rr", "stride_rc", "stride_sr", "stride_tc"}
    numbers = set(NAMES[NAMES.index("base") : NAMES.index("C")])
    assert {p.name for p in gemm.params if p.do_not_specialize} == numbers - specialised


def test_swapped_the_epilogue_is_too():
    plan = make(tile=TILE[True], swapped=True, scales="row")
    lay = layout(bias=3, residual=(0, 2 * N, 2), scale_a=(5, 6), scale_b=(7, 8))
    expected = {"stride_rr": 2, "stride_rc": 2 * N, "stride_sb": 7, "stride_sr": 8, "stride_tb": 5, "stride_tc": 6}
    check(Arguments(plan, lay), BIAS="rows", SCALES="row", **expected)


def test_scales_of_one_element_are_loaded_once_as_alpha():
    """Beside an alpha they stay vectors: its product with them would be rounded otherwise. Behind a gate, too."""
    plan = make(scales="tensor")
    check(Arguments(plan, layout()), SCALES="none", SCALED=True, LOADS_ALPHA=True)
    check(Arguments(plan, layout(scaled=True)), SCALES="row", SCALED=True, LOADS_ALPHA=False)
    gated = make(scales="tensor", rows=UNIFORM)
    check(Arguments(gated, layout()), SCALES="row", SCALED=False, LOADS_ALPHA=False)
    check(Arguments(make(scales="row"), layout()), SCALES="row", SCALED=False, LOADS_ALPHA=False)
    check(Arguments(make(), layout()), SCALES="none", SCALED=False, LOADS_ALPHA=False)


def test_kinds():
    check(Arguments(make(kind="static"), layout()), KIND="static")
    check(Arguments(make(queues=3), layout()), KIND="dynamic", STEAL=True, SPLIT="columns", queues=3)
    even = make(kind="stream_k", m=1024, n=512, workers=8)
    assert not even.schedule.slots
    check(Arguments(even, layout(m=1024, n=512, out=(0, 512, 1))), KIND="dynamic")  # nothing is split
    check(Arguments(make(order=tuple(range(72))[::-1]), layout()), ORDER="table")


def test_how_it_is_compiled():
    assert Arguments(make(), layout()).options == {"num_warps": 4, "launch_pdl": True}
    single = make("single", (64, 64))
    assert Arguments(single, layout()).options == {"num_warps": 4, "launch_pdl": True, "maxnreg": 128}


# What arrives --------------------------------------------------------------------------------------------------------

UNIFORM, RAGGED = Arriving(Arrival.uniform(150, 7).chunks(M)), Arriving(Arrival.ragged([0, 7, 7, N]).chunks(N))


@swapped_or_not
def test_what_arrives_is_told_by_the_outputs_rows_and_columns(swapped):
    """Whichever way round the operands are: chunks are of A's rows and of B's columns."""
    plan = make(tile=TILE[swapped], swapped=swapped, rows=UNIFORM, columns=RAGGED)
    rows, columns = (N, M) if swapped else (M, N)
    check(
        Arguments(plan, layout()), ROW_CHUNKS="uniform", COLUMN_CHUNKS="ragged", SWAP_AB=swapped, row_chunks=7,
        rows_per_chunk=150, row_unread=0, column_chunks=3, columns_per_chunk=1, column_unread=1, rows_per_batch=0,
        row_tiles_per_batch=0, rows=rows, columns=columns,
    )  # fmt: skip


def test_batches_arrive_one_after_the_other():
    plan = make(batch=3, rows=Arriving(Arrival.uniform(150, 20).chunks(3 * M)))
    check(Arguments(plan, BATCHES), rows_per_batch=M, row_tiles_per_batch=plan.schedule.grid.num_m)


@pytest.mark.parametrize("arriving", [{"rows": UNIFORM}, {"columns": RAGGED}], ids=lambda x: next(iter(x)))
def test_a_launch_that_waits_does_not_begin_before_the_kernel_ahead_has_ended(arriving):
    arguments = Arguments(make(**arriving), layout())
    check(arguments, CHAINED=False)
    assert not arguments.options["launch_pdl"]


class Words:
    """Stands in for a GPU's signals."""

    def __init__(self, count: int, epoch: int, key: int, local_rows: LocalRows | None = None) -> None:
        self.given = GateWords(torch.zeros(count + 1, dtype=torch.int32)[1:], torch.zeros(1), epoch, key)
        self.local_rows = local_rows

    def use(self, local_rows: bool = False) -> GateWords:
        if self.local_rows is not None and not local_rows:
            self.local_rows.bring()
        return self.given


def operands(*, m=M, n=N, pitch=None, **epilogue) -> GemmOperands:
    a, b, out = (torch.zeros(s, dtype=torch.bfloat16) for s in ((m, K), (K, n), (m, pitch or n)))
    return GemmOperands(a, b, out[:, :n], Epilogue(**epilogue))


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_launch_is_given_the_words_of_what_arrives(written, kind):
    x, launch = operands(), GemmLaunch(make(kind=kind, rows=UNIFORM, columns=RAGGED), layout())
    for epoch in (0, 5):
        rows, columns = Words(7, epoch, 11), Words(3, epoch + 1, 12)
        launch(x, Awaited(rows, columns, 2.5, "matmul"))
        call, report = written[0].calls[-1], channel(x.a.device)
        check(
            call, row_signals=rows.given.words.data_ptr(), row_quarantine=rows.given.quarantine.data_ptr(),
            column_signals=columns.given.words.data_ptr(), column_table=launch._chunks[1].on(x.a.device).data_ptr(),
            records=report.records.data_ptr(), claims=report.claims.data_ptr(), row_epoch=epoch,
            column_epoch=epoch + 1, row_key=11, column_key=12, allowed=2_500_000_000,
        )  # fmt: skip
        assert "row_table" not in call, "uniform chunks are arithmetic"
        assert "counters" in call, "a gate has an abort word, whatever the schedule"
    assert len(written) == 1, "one compiled kernel for every epoch"


def test_a_deadline_of_centuries_is_counted_in_64_bits(written):
    GemmLaunch(make(rows=UNIFORM), layout())(operands(), Awaited(Words(7, 1, 0), None, 1e300, "matmul"))
    check(written[0].calls[0], allowed=10**18)


# Local rows ----------------------------------------------------------------------------------------------------------

SHARD = 128
GATHERED = Arriving(Arrival.uniform(SHARD, 8).chunks(8 * SHARD))


def shard_of(*, rows=2 * SHARD, first=SHARD, height=SHARD, period=4 * SHARD, offset=0, dtype=torch.bfloat16):
    """A rank's rows of two batches of four ranks' rows; and where it is written down that they were brought."""
    brought: list[str] = []
    store = torch.zeros(rows * K + offset, dtype=dtype)
    assert store.data_ptr() % 16 == 0
    return LocalRows(store[offset:].view(rows, K), first, height, period, lambda: brought.append("brought")), brought


def launched(rows: LocalRows, columns: LocalRows | None = None, lies="nn", **how) -> None:
    m = 8 * SHARD
    plan = make(m=m, rows=GATHERED, columns=RAGGED if columns else None, **how)
    awaited = Awaited(Words(8, 1, 0, rows), columns and Words(3, 1, 1, columns), 2.5, "matmul")
    GemmLaunch(plan, layout(lies, m=m))(operands(m=m, alpha=3.0), awaited)


def test_local_rows_are_read_in_their_own_tensor(written):
    local, brought = shard_of()
    launched(local)
    ((launcher, call),) = [(made, made.calls[0]) for made in written]
    described = launcher.arguments["local_map"]
    assert (described.shape, described.strides) == ((2 * SHARD, K), (K, 1))
    assert launcher.arguments["LOCAL_ROWS"]
    assert call["local_map"] == local.rows.data_ptr() != call["x_map"]
    check(call, local_first=1, local_tiles=1, local_period=4)  # in tiles of 128 rows
    check(call, row_epoch=1, alpha=3.0)  # in its place
    assert not brought


@pytest.mark.parametrize(
    ("how", "rest"),
    [
        ({"first": SHARD - 64}, {}), ({"height": SHARD - 8}, {}), ({"period": 4 * SHARD - 64}, {}), ({"offset": 4}, {}),
        ({"dtype": torch.float16}, {}), ({}, {"tile": (64, 128), "swapped": True}), ({}, {"lies": "tn"}),
        ({}, {"kind": "stream_k"}), ({}, {"tile": (128, 224)}),
    ],
    ids=["first", "height", "period", "address", "dtype", "swapped", "column-major", "shares", "three parts across"],
)  # fmt: skip
def test_where_they_cannot_be_they_are_brought(written, how, rest):
    local, brought = shard_of(**how)
    launched(local, **rest)
    assert brought == ["brought"]
    assert not written[0].arguments["LOCAL_ROWS"]
    assert "local_map" not in written[0].calls[0]


def test_local_columns_are_brought_and_rows_beside_them_are_not(written):
    (rows, left), (columns, brought) = shard_of(), shard_of()
    launched(rows, columns)
    assert (left, brought) == ([], ["brought"])
    assert written[0].arguments["LOCAL_ROWS"]
    alone, brought = shard_of()
    launch = GemmLaunch(make(columns=RAGGED), layout())
    launch(operands(), Awaited(None, Words(3, 1, 0, alone), 2.5, "matmul"))
    assert brought == ["brought"]


def test_of_several_batches_no_rows_are_local():
    tiles = (SHARD, SHARD, 4 * SHARD)
    made = Arguments(
        make(batch=2, m=4 * SHARD, rows=GATHERED),
        Layout((4 * SHARD * K, K, 1), (K * N, N, 1), (4 * SHARD * N, N, 1)),
    )
    assert made.local_tiles(*tiles) is None
    assert Arguments(make(m=8 * SHARD, rows=GATHERED), layout(m=8 * SHARD)).local_tiles(*tiles) == (1, 1, 4)
    assert Arguments(make(m=8 * SHARD), layout(m=8 * SHARD)).local_tiles(*tiles) is None


# Launches ------------------------------------------------------------------------------------------------------------


class Written:
    """Stands in for `Launcher`: what it was made from, and with what it was called."""

    made: list[Written] = []  # noqa: RUF012

    def __init__(self, kernel, grid, arguments, cluster=1) -> None:
        self.kernel, self.grid, self.arguments, self.cluster = kernel, grid, by_name(arguments), cluster
        self.calls: list[dict[str, Any]] = []
        Written.made.append(self)

    def __call__(self, stream, *varying) -> None:
        varies = [name for name, x in self.arguments.items() if x is VARIES or isinstance(x, Descriptor)]
        self.calls.append(dict(zip(varies, varying, strict=True)))


@pytest.fixture
def written(monkeypatch):
    """Launches are written down; the kernel is not compiled."""
    monkeypatch.setattr(launching, "Launcher", Written)
    monkeypatch.setattr(gemm, "warmup", lambda *filled, grid, **options: (filled, grid, options))
    Written.made = []
    return Written.made


FULL = layout(bias=1, residual=ROWS, scaled=True, activation="gelu", scale_a=(0, 1), scale_b=(0, 1))


def full_operands() -> GemmOperands:
    """With everything that an epilogue has; laid out as `FULL`."""
    return operands(
        alpha=1.5, bias=torch.zeros(N, dtype=torch.bfloat16), residual=torch.zeros(1, M, N, dtype=torch.bfloat16),
        beta=0.5, activation="gelu", scale_a=torch.ones(M, 1), scale_b=torch.ones(1, N),
    )  # fmt: skip


@swapped_or_not
@pytest.mark.parametrize("kind", ["static", "dynamic", "stream_k"])
def test_a_launch_gives_each_argument_its_address(written, kind, swapped):
    plan = make(kind=kind, tile=TILE[swapped], swapped=swapped, workers=11, scales="row")
    given, launch = full_operands(), GemmLaunch(plan, FULL)
    launch(given)
    launch(given)
    (launcher,) = written
    assert launcher.grid == (plan.workers, 1, 1)
    first, second = launcher.calls
    (a, b, out, epilogue), turn = given, -1 if swapped else 1
    (x, y), (row, column) = (a, b)[::turn], (epilogue.scale_a, epilogue.scale_b)[::turn]
    tensors = {
        "x_map": x, "y_map": y, "out_map": out, "out": out, "bias": epilogue.bias, "residual": epilogue.residual,
        "row_scale": row, "column_scale": column,
    }  # fmt: skip
    check(first, **{name: tensor.data_ptr() for name, tensor in tensors.items()}, alpha=1.5, beta=0.5, reset=0)
    assert ("counters" in first, "partials" in first, "counts" in first) == (
        kind != "static", kind == "stream_k", kind == "stream_k",
    )  # fmt: skip
    if kind != "static":
        assert second["base"] - first["base"] == plan.schedule.full_tiles + plan.schedule.num_shares + plan.workers
    check(launcher.arguments, x_map=Descriptor(*Arguments(plan, FULL).x[:2]), y_map_1=None, y_map_2=None)


@swapped_or_not
def test_a_pair_of_ctas_is_launched_from_its_own_ptx(written, monkeypatch, swapped):
    seen = []
    monkeypatch.setattr(launching, "rewritten", lambda kernel: seen.append(kernel) or {"ir_override": "there"})
    tile = (192, 512) if swapped else (512, 192)
    plan = make("paired", tile, swapped, kind="static", workers=11)
    given = operands()
    GemmLaunch(plan, layout())(given)
    (launcher,) = written
    assert (plan.workers, launcher.grid, launcher.cluster) == (5, (10, 1, 1), 2), "a CTA of a pair is a program"
    first, second = seen[0], launcher.kernel
    assert (first[0], {**first[2], "ir_override": "there"}) == (second[0], second[2]), "the same kernel, from that text"
    boxes = [one.block_shape for one in second[0][:5] if one is not None]
    assert [max(box) for box in boxes] == [128, 64, 64], "x: a consumer's rows; y: half of each part, 128 and 64 wide"
    check(launcher.arguments, CTAS=2, ROWS=256, HALF_ROWS=128, COLUMNS=192, WIDTHS=(128, 64), CONSUMERS="cooperative")
    (call,) = launcher.calls
    x, y = (given.b, given.a) if swapped else (given.a, given.b)
    check(call, x_map=x.data_ptr(), y_map=y.data_ptr(), y_map_1=y.data_ptr(), out_map=given.out.data_ptr())


def test_a_launch_of_parts_and_from_registers(written):
    given = operands(pitch=N + 1)
    GemmLaunch(make(tile=(128, 224)), layout(out=(0, N + 1, 1)))(given)
    (call,) = written[0].calls
    check(call, **dict.fromkeys(("y_map", "y_map_1", "y_map_2"), given.b.data_ptr()), out=given.out.data_ptr())
    assert "out_map" not in call


def test_launches_with_a_probe_and_with_a_trace_are_kernels_of_their_own(written):
    plan, x = make(), operands()
    launch, probe, log = GemmLaunch(plan, layout()), Probe(plan.workers, 50, x.a.device), SpanLog(plan, x.a.device)
    for how in (None, probe, log, None):
        launch(x, probe=how)
    plain, probed, traced = written
    assert [(one.arguments["PROBE"], one.arguments["TRACE"], len(one.calls)) for one in written] == [
        (False, False, 2), (True, False, 1), (False, True, 1),
    ]  # fmt: skip
    assert [one.arguments["capacity"] for one in (plain, probed)] == [0, 50]
    check(probed.calls[0], log=probe.words.data_ptr())
    check(traced.calls[0], log=log.words.data_ptr())
    assert len(log.words) >= plan.schedule.grid.tiles + plan.schedule.slots


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_few_rows_read_the_other_operand_in_larger_pieces(written, rows):
    GemmLaunch(make(m=rows), layout(m=rows))(operands(m=rows))
    assert written[0].arguments["y_map"].promotion == (256 if rows <= 64 else 128)


def test_launches_differ_where_what_is_compiled_into_them_does(monkeypatch):
    plan = make(scales="row")
    monkeypatch.setattr(gpu, "launch_cache", type(gpu.launch_cache)())
    a, b, out, _ = operands()
    columns, rows, bias = torch.ones(4 * N), torch.ones(4 * M), torch.zeros(4 * N, dtype=torch.bfloat16)

    def find(out=out, at=0, scale_at=0, **how):
        epilogue = Epilogue(
            bias=bias[at : at + N], scale_a=rows[:M, None], scale_b=columns[scale_at : scale_at + N][None], **how
        )
        return gpu.find(GemmOperands(a, b, out, epilogue), gpu.How(), plan)

    first = find()
    for equal in ({}, {"at": 8}, {"scale_at": 4}, {"alpha": 1.0, "activation": "none"}):
        assert find(**equal) is first, "another address that is a multiple of 16 makes no difference"
    others = [find(at=1), find(scale_at=1), find(alpha=2.0), find(activation="gelu")]
    shifted = torch.zeros(M * N + 1, dtype=torch.bfloat16)[1:].view(M, N)
    others.append(find(out=shifted))
    assert len({id(one) for one in (first, *others)}) == 6
    assert find(scale_at=2) is others[1]


@pytest.mark.parametrize(
    ("shape", "dtype"),
    list(itertools.product([(64, 64), (1, 64, 64), (128, 32), (64, 128)], ["bfloat16", "float16", "float32"])),
)
def test_a_descriptor_says_how_a_box_lies_in_shared_memory(shape, dtype):
    made = described_by(Map((8, *shape[1:]), (0,) * len(shape), shape), getattr(torch, dtype))
    size = getattr(torch, dtype).itemsize
    assert (made.block_shape, made.layout.rank) == (list(shape), len(shape))
    assert (made.layout.element_bitwidth, made.layout.swizzle_byte_width) == (8 * size, min(128, shape[-1] * size))


def test_the_gate_compiles_what_is_launched(written, monkeypatch):
    """`gates.hopper_gemm.fill` does without torch what a launch does with it: Triton sees no difference."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")  # the gate sets it
    import triton
    from gates import hopper_gemm
    from gates.hopper import no_gpu

    plan = make(kind="stream_k", tile=(128, 224), workers=11, scales="row")
    GemmLaunch(plan, FULL)(full_operands())
    theirs, _, options = written[0].kernel
    before = triton.runtime.driver._active if hasattr(triton.runtime.driver, "_active") else None
    try:
        no_gpu()
        mine_options, mine = hopper_gemm.fill(plan, FULL)
        *_, bind = gemm.device_caches[0]
        seen = [bind(*filled, **options, debug=False, instrumentation_mode="")[1] for filled in (theirs, mine)]
    finally:
        gemm.device_caches.clear()
        triton.runtime.driver._active = before
    assert mine_options == options
    assert seen[0] == seen[1]


# Groups ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [64, 60])
@pytest.mark.parametrize("along", ["rows", "k"])
def test_operands_of_groups_have_their_own_and_vectors_divide_what_is_stored(along, m):
    problem = GroupedProblem(m, 512, 1024, 1, "bfloat16", "bfloat16", plain=True, groups=8, along=along)
    device, seen = gpu_specs.named("h100"), set()
    operands = ((0, 1024, 1), (512 * 1024, 1, 1024)) if along == "rows" else ((0, 1, m), (0, 512, 1))
    layout = Layout(*operands, (0 if along == "rows" else m * 512, 512, 1))
    for one in hopper_candidates(problem, device, 132, Asked(backend="hopper")):
        made = HopperGroupedArguments(of_candidate(problem, device, "hopper", one, "a test's"), layout, Bias())
        seen.add(one.swap_ab)
        of_b = (1, 0) if one.swap_ab else (0, 1)
        assert made._batched == (list(of_b) if along == "rows" else [0, 0]), "A's rows and K's runs are of all groups"
        ends_evenly = along == "k" and m % 8 == 0
        assert (ends_evenly if one.swap_ab else True) == made.config.N_DIVISIBLE_BY_8
    assert seen == {False, True}


def test_what_a_grouped_launch_is_given_varies_and_what_it_has_not_does_not(monkeypatch):
    made, plan = (
        SimpleNamespace(kernel="", fill=lambda given, gate, publish: (*given, *gate, *publish), options={}),
        SimpleNamespace(problem=SimpleNamespace(kind="tf32"), schedule=SimpleNamespace(workers=132)),
    )
    monkeypatch.setattr(hopper_grouped, "described_by", lambda one, dtype: one)
    monkeypatch.setattr(hopper_grouped.compiling, "compiled", lambda *given: "a kernel")
    monkeypatch.setattr(hopper_grouped, "Launcher", lambda *given: given)
    one, x = SimpleNamespace(shape=(8, 8), strides=(8, 1)), torch.ones(1)
    mapped = [(one, x), (None, None), (one, x)]
    kernel, grid, filled = hopper_grouped.HopperGroupedLaunch._compiled(
        SimpleNamespace(plan=plan), made, mapped, (x, None, x), NO_GATE._replace(row_signals=x, row_epoch=3),
        PublishArguments(x, x, 5),
    )  # fmt: skip
    assert (kernel, grid) == ("a kernel", (132, 1, 1))
    descriptors, given, numbers = filled[:3], filled[3:6], filled[6:10]
    tf32 = [None if descriptor is None else descriptor.tf32 for descriptor in descriptors]
    assert tf32 == [True, None, False], "the output's map is of float32"
    assert given == (VARIES, None, VARIES)
    assert numbers == (VARIES, VARIES, 1.0, 1.0)
    assert filled[10:] == (VARIES, *[None] * 8, *[VARIES] * 9), "signals, and what is published"
