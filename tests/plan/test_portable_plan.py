"""The portable kernel's policy on devices made up for the purpose: no GPU is asked."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
from made_up import H100, HZ, MI300X, MI355X, reason

import tilestream
from tilestream import Arrival
from tilestream.launch.gemm_arguments import Layout, is_aligned
from tilestream.launch.portable.arguments import Arguments
from tilestream.launch.portable.options import options
from tilestream.plan import DeviceProperties, Problem
from tilestream.plan import plan_problem as any_plan_problem
from tilestream.plan.policy.portable import CDNA, COSTS, TILES, converts, fp8_units, tiles
from tilestream.plan.problem import FNUZ, OCP

E4M3, E5M2 = OCP
SMALL = DeviceProperties("a small GPU", "portable", 4, 1e11, 1e11, "made up", "sm_75", 49152)
DTYPES = ("bfloat16", "float16", "float32")
by_arch = {"ids": lambda device: device.arch}
#: An H100 has a faster kernel for some of this: see `test_hopper_plan`.
plan_problem = functools.partial(any_plan_problem, backend="portable")


def plan(m, n, k, device=H100, dtype="bfloat16", **how):
    return tilestream.plan(m, n, k, dtype=dtype, device=device, **{"backend": "portable", **how})


def every_row(dtype, device, **more):
    """The rows for such operands, aligned and not, and a problem that has them."""
    for aligned, other in itertools.product((True, False), repeat=2):
        how = {"fast_accum": other} if dtype in OCP else {"tf32": other}
        out_dtype = "bfloat16" if dtype in OCP else dtype
        problem = Problem(1000, 1000, 1000, 1, dtype, out_dtype, aligned=aligned, **how, **more)
        yield from ((row, problem) for row in tiles(problem, device))


def test_a_large_problem_gets_the_large_tile_and_a_worker_an_sm():
    made = plan(4096, 4096, 4096)
    assert (made.backend, made.variant, made.tile, made.workers) == ("portable", "persistent", (128, 256), 132)
    assert (made.warps, made.stages) == (8, 3)
    assert made.schedule.raster.order == "grouped"


@pytest.mark.parametrize("m", [1, 16, 64])
def test_few_rows_get_a_tile_of_few_rows(m):
    assert plan(m, 8192, 8192).tile[0] <= 64


@pytest.mark.parametrize("device", [H100, MI300X, SMALL], **by_arch)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rings_fit_the_device(device, dtype):
    for row, _ in every_row(dtype, device):
        assert row.ring_bytes(4 if dtype == "float32" else 2) <= device.shared


def test_tiles_are_powers_of_two_that_dot_takes():
    for row in itertools.chain.from_iterable(TILES.values()):
        assert all(x & (x - 1) == 0 and x >= 16 for x in row[:3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_worker_is_compiled_for_all_the_registers_of_an_sm(dtype):
    for row, problem in every_row(dtype, H100):
        made = options(plan_problem(problem, tile=(row.block_m, row.block_n), device=H100))
        assert made["maxnreg"] == 255, "what ptxas is not told, it may spill for"
        assert made["maxnreg"] * 32 * made["num_warps"] <= 65536
        assert "maxnreg" not in options(plan_problem(problem, device=MI300X)), "Triton refuses it there"


@pytest.mark.parametrize(
    ("m", "n", "k"), list(itertools.product((0, 1, 100, 4097), (0, 1, 100, 4096), (0, 1, 64, 1000)))
)
def test_every_shape_has_a_plan(m, n, k):
    for device, dtype in itertools.product((H100, MI300X), DTYPES):
        made = plan(m, n, k, dtype=dtype, device=device, batch=2)
        assert made.schedule.grid.num_m * made.tile[0] >= m
        assert made.explain()


@pytest.mark.parametrize("kind", ["static", "dynamic", "stream_k"])
def test_a_schedule_that_is_asked_for_is_taken(kind):
    assert plan(1000, 1000, 1000, dtype="float16", schedule=kind, workers=7).schedule.kind == kind


def test_queues_split_columns():
    made = plan(1000, 1000, 1000, dtype="float16", queues=4)
    assert (made.schedule.queues, made.schedule.split) == (4, "columns")


def test_explain_names_what_was_refused_and_why():
    text = plan(1024, 3184, 17, backend=None, layout="nt").explain()
    for part in (
        "refused   static: 0.5% faster by the cost model",
        "refused   vector loads: a stride",
        "refused   hopper: a has strides (17, 1)",
        "an H100, 132 workers",
    ):
        assert part in text
    assert "vector loads" not in plan(1024, 1024, 1024).explain()


def test_rows_that_are_no_vectors_are_stored_by_elements_which_takes_longer():
    """1599 x 3178 x 16 of a board took 23.1 us on an H200, 1.6 of them the clock's; without this 13.1 were expected."""
    odd, even, eighths = (plan(1599, n, 16, layout="tn", tile=(128, 128)).predicted for n in (3178, 3184, 3176))
    assert odd == eighths == pytest.approx(even + 1.1 * 3 * 128 * 128 * COSTS.narrow)  # three tiles of a worker
    assert 17e-6 < odd < 22e-6


def test_a_queue_costs_more_than_its_insurance_on_nvidia():
    """It is measured there, and nothing arrives; else there is a queue, static not being asked for."""
    made = plan(4096, 4096, 4096, layout="nt")
    assert made.schedule.kind == "static"
    assert "slower by the cost model, more than 1%" in reason(made, "dynamic")
    assert plan(4096, 4096, 4096, layout="nt", schedule="dynamic").schedule.queues == H100.workers
    assert plan(4096, 4096, 4096, layout="nt", arrival=Arrival.uniform(1024, 4)).schedule.kind == "dynamic"
    assert plan(4096, 4096, 4096, "mi300x", layout="nt").schedule.kind != "static"


@pytest.mark.parametrize("shape", [(1536, 5632, 4096), (3072, 5632, 8192)])
def test_full_waves_are_not_split(shape):
    made = plan(*shape, layout="nt")
    assert made.schedule.grid.tiles % made.workers == 0
    assert made.schedule.kind == "static"
    assert plan(*shape, schedule="stream_k", layout="nt").schedule.kind == "stream_k", "as it is asked for"


@pytest.mark.parametrize("backend", ["portable", None])
@pytest.mark.parametrize(("workers", "queues"), [(1100, 1), (1000, 1000)])
def test_workers_beyond_the_queues_that_there_are_share_one(backend, workers, queues):
    made = plan(65536, 32768, 4096, workers=workers, backend=backend, layout="nt", schedule="dynamic")
    assert (made.workers, made.schedule.queues) == (workers, queues)


@pytest.mark.parametrize(
    ("extents", "how", "error", "message"),
    [
        ((10, 10, 10), {"dtype": "float64"}, NotImplementedError, r"float64 on a GPU; .*use torch\.matmul"),
        ((1, 1, 2**31 - 1), {"dtype": "float16"}, NotImplementedError, r"k=2147483647; .*31 bits"),
        ((64, 64, 64), {"tile": (48, 48)}, ValueError, r"tile=\(48, 48\): the portable kernel has 128x256, "),
    ],
)
def test_what_it_does_not_do_it_says_with_the_way_out(extents, how, error, message):
    with pytest.raises(error, match=message):
        plan(*extents, **how)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there():
    with pytest.raises(NotImplementedError, match="torch sees no GPU here"):
        plan(1, 1, 1, "cuda")


def test_alignment_is_what_a_vector_of_16_bytes_needs():
    assert is_aligned((64, 64), (64, 1), 0, 4096)
    assert is_aligned((64, 64), (1, 64), 64 * 64, 0)
    for extents, strides, batch, address in (
        ((64, 60), (64, 1), 0, 0), ((60, 64), (1, 64), 0, 0), ((64, 64), (72, 1), 0, 0), ((64, 64), (128, 2), 0, 0),
        ((64, 64), (64, 1), 8, 0), ((64, 64), (64, 1), 0, 2),
    ):  # fmt: skip
        assert not is_aligned(extents, strides, batch, address)


# Operands of 8 bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [H100, MI355X], **by_arch)
def test_8_bit_operands_have_tiles_whose_rings_fit(device):
    for row, problem in every_row(E4M3, device, b_dtype=E5M2):
        assert row.ring_bytes(1) <= device.shared
        assert row.block_k >= 32, "the least that the hardware takes"
        made = options(plan_problem(problem, tile=(row.block_m, row.block_n), device=device))
        assert made["num_warps"] == row.warps


def test_8_bit_operands_get_the_large_tile_and_bfloat16():
    made = plan(4096, 4096, 4096, dtype=E4M3)
    assert (made.tile, made.block[2], made.problem.out_dtype) == ((128, 256), 128, "bfloat16")
    assert made.floor.compute == pytest.approx(2 * 4096**3 / (132 * 8192 * HZ))
    promoted = plan(4096, 4096, 4096, dtype=E4M3, use_fast_accum=False)
    assert promoted.tile == (128, 128), "each accumulator is there twice"
    assert plan(64, 64, 64, dtype="float16", use_fast_accum=False).problem.fast_accum, "which is about 8 bits only"


def test_explain_says_what_is_scaled_and_how_it_is_added_up():
    made = plan(64, 64, 64, dtype=E4M3, b_dtype=E5M2, scales="row", use_fast_accum=False)
    assert made.explain().splitlines()[0] == (
        "matmul [64, 64] @ [64, 64], float8_e4m3fn x float8_e5m2, a scale a row and column, added up in float32 every "
        "128 of K -> bfloat16"
    )
    assert "bfloat16, one scale each -> bf" in plan(1, 1, 1, scales="tensor").explain()


OTHERS = f"has matrix units for {E4M3} and {E5M2}, to which the same bits are other numbers"


@pytest.mark.parametrize(
    ("dtype", "arch", "why"),
    [
        *((E4M3, arch, "has no matrix units for operands of 8") for arch in ("sm_75", "sm_80", "gfx90a", "gfx1100")),
        (FNUZ[0], "sm_90", OTHERS),
        (FNUZ[1], "gfx1200", OTHERS),
    ],
)
def test_8_bit_operands_where_the_hardware_has_no_such(dtype, arch, why):
    device = dataclasses.replace(H100, name="a GPU", arch=arch)
    message = rf"dtype: {dtype}; a GPU, {arch}, {why}.*: convert the operands to bf"
    with pytest.raises(NotImplementedError, match=message):
        plan(64, 64, 64, device, dtype)
    assert plan(64, 64, 64, device, scales="row").explain()


@pytest.mark.parametrize("arch", ["sm_89", "sm_90", "sm_100", "sm_120", "gfx950"])
def test_8_bit_operands_where_it_has(arch):
    assert plan(64, 64, 64, dataclasses.replace(H100, arch=arch), E5M2).problem.fp8


COLUMN_MAJOR_B = Layout((0, 1024, 1), (0, 1, 1024), (0, 1024, 1))


@pytest.mark.parametrize("device", [MI300X, MI355X], **by_arch)
def test_cdna_multiplies_both_kinds_and_says_which_it_converts(device):
    own, other = (FNUZ, OCP) if device.arch == "gfx942" else (OCP, FNUZ)
    assert fp8_units(device.arch) == own
    for dtypes, kind in ((own, "8-bit"), (other, "8-bit, converted")):
        for aligned in (True, False):
            problem = Problem(1000, 1000, 1000, 1, dtypes[0], "bfloat16", b_dtype=dtypes[1], aligned=aligned)
            rows = tiles(problem, device)
            assert rows == CDNA[device.arch][kind if aligned else f"{kind}, unaligned"]
            assert all(row.ring_bytes(1) <= device.shared for row in rows)
        made = plan(1024, 1024, 1024, device, dtypes[0], b_dtype=dtypes[1])
        given = Arguments(made, COLUMN_MAJOR_B).config
        assert converts(dtypes[0], device.arch) == (dtypes == other)
        assert (dtypes if dtypes == other else ("", "")) == (given.A_KIND, given.B_KIND)
        converted = (
            f"{device.arch}'s take {own[0]} and {own[1]}, to which the bits of {dtypes[0]} are other numbers: "
            "converted to float16 on the way, exactly, and multiplied at its rate"
        )
        assert reason(made, "8-bit matrix units") == (converted if dtypes == other else None)


@pytest.mark.parametrize("device", [MI300X, MI355X], **by_arch)
def test_amds_matrix_units_add_up_8_bits_in_float32_whatever_is_asked(device):
    fast, exact = (
        plan(1024, 1024, 1024, device, fp8_units(device.arch)[0], use_fast_accum=fast) for fast in (True, False)
    )
    assert exact.block == fast.block
    assert Arguments(exact, COLUMN_MAJOR_B).config.IMPRECISE is None
    assert "added up in float32 every" not in exact.explain()


# What the kernel is compiled with -------------------------------------------------------------------------------------

F16, F32 = ({"dtype": name, "out_dtype": name} for name in ("float16", "float32"))
ROW_SCALES = {"dtype": E4M3, "out_dtype": "bfloat16", "scales": "row"}


@pytest.mark.parametrize(
    ("change", "lies", "expected"),
    [
        (F16, {}, {"OFFSETS_64BIT": False, "EVEN_K": True}),
        (F16, {"a": (2**40, 64, 1)}, {"OFFSETS_64BIT": False}),  # a batch's offset is always 64 bits wide
        (F16, {"a": (0, 2**26, 1)}, {"OFFSETS_64BIT": True}),
        (F16, {"out": (0, 1, 2**26)}, {"OFFSETS_64BIT": True}),
        (F16, {"out": (0, 1, 2**24)}, {"OFFSETS_64BIT": False}),
        ({**ROW_SCALES, "m": 4096}, {"scale_a": (0, 2**20)}, {"OFFSETS_64BIT": True}),
        *(({**F16, "k": k}, {}, {"EVEN_K": even}) for k, even in ((0, False), (64, True), (100, False), (128, True))),
        (F32, {}, {"PRECISION": "ieee"}),
        ({**F32, "tf32": True}, {}, {"PRECISION": "tf32"}),
        ({**F16, "tf32": True}, {}, {"PRECISION": "ieee"}),
        # No more than a K step: Triton takes no more.
        ({**ROW_SCALES, "k": 4096}, {}, {"IMPRECISE": None, "SCALES": "row"}),
        ({**ROW_SCALES, "m": 4096, "k": 4096, "fast_accum": False}, {}, {"IMPRECISE": 128, "SCALES": "row"}),
        ({**ROW_SCALES, "k": 4096, "fast_accum": False, "aligned": False}, {}, {"IMPRECISE": 32, "SCALES": "row"}),
    ],
)
def test_what_the_kernel_is_compiled_with(change, lies, expected):
    problem = Problem(**{"m": 64, "n": 64, "k": 64, **change})
    layout = Layout(**{"a": (0, 64, 1), "b": (0, 64, 1), "out": (0, 64, 1), **lies})
    made = Arguments(plan_problem(problem, device=H100), layout).config
    assert {name: getattr(made, name) for name in expected} == expected


def test_what_arrives_is_the_outer_dimension_from_the_pivot_on():
    rows = plan(4096, 4096, 1024, arrival=Arrival.uniform(512, 8, pivot=3))
    raster = rows.schedule.raster
    assert (raster.order, raster.first, raster.band) == ("chunk_major", 3 * 512 // rows.tile[0], 512 // rows.tile[0])
    assert rows.gate is not None
    assert "rows in 8 chunks of 512 rows, pivot 3; a tile waits for the chunks it reads" in rows.explain()
    columns = plan(4096, 4096, 1024, weight_arrival=Arrival.ragged([0, 100, 4096]))
    assert columns.schedule.raster.order == "table"
    split = plan(4096, 4096, 64, queues=2, weight_arrival=Arrival.uniform(512, 8))
    assert split.schedule.split == "rows", "a late chunk of columns must leave no queue idle"
    batches = plan(100, 64, 64, batch=3, dtype="float16", arrival=Arrival.uniform(70, 5, pivot=2))
    assert batches.schedule.first_batch == 1
    assert plan(64, 64, 64).gate is None


@pytest.mark.parametrize(("k", "vector"), [(4096, 8), (4104, 8), (4100, 4), (4098, 2), (4097, 1)])
def test_copies_are_of_as_many_elements_as_strides_allow(k, vector):
    made = tilestream.plan(4096, 4096, k, dtype="bfloat16", layout="nt", device=H100, backend="portable")
    assert made.problem.vector == vector
    # As many stages in flight as of aligned operands, where an element at a time has two.
    assert made.stages == {4096: 3, 4097: 2}.get(k, 4)
    assert (f"copies are of {vector} elements" in made.explain()) == (k != 4096 and vector > 1)
    lies = Layout((0, k, 1), (0, 1, k), (0, 4096, 1))
    copied = Arguments(made, lies).config.VECTORS
    assert copied == (1 if made.problem.aligned else vector,) * 2
    for other in ({"dtype": "float32"}, {"device": "cpu"}):
        how = {"dtype": "bfloat16", "device": H100} | other
        assert tilestream.plan(4096, 4096, k, **how).problem.vector == 1
