"""NVIDIA's GPUs by name: their data sheets' figures, and portable plans that their shared memory holds."""

from __future__ import annotations

import itertools

import pytest
from made_up import lines, refused

from tilestream import Arrival, attention_plan, plan
from tilestream.core.gpu_specs import GPU_SPECS, gpu_properties, named
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.portable.arguments import Arguments
from tilestream.plan import Problem, plan_problem
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy import portable, portable_attention
from tilestream.plan.problem import ITEMSIZE, OCP, Incoming

#: Bytes of shared memory that a block can have (CUDA programming guide, by compute capability): KiB, less 1 of the SM.
LIMITS = {"sm_80": 163, "sm_89": 99, "sm_90": 227, "sm_100": 227, "sm_103": 227, "sm_110": 227, "sm_120": 99}
NVIDIA = [name for name, spec in GPU_SPECS.items() if spec.arch.startswith("sm_")]
#: Of which nothing has run.
NOT_RUN = [name for name in NVIDIA if GPU_SPECS[name].arch != "sm_90"]
#: What Triton keeps beside a ring: barriers, an atomic's answer.
SLACK = 1024
every_gpu = pytest.mark.parametrize("name", NVIDIA)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("a100", "bfloat16", 312), ("a100", "tf32", 156), ("a100", "float32", 19.5), ("l40s", "bfloat16", 362.05),
        ("l40s", "tf32", 183), ("l40s", "fp8", 733), ("l40s", "float32", 91.6), ("rtx4090", "float16", 165.2),
        ("rtx4090", "fp8", 330.3), ("rtx4090", "tf32", 82.6), ("rtx4090", "float32", 82.6), ("b200", "bfloat16", 2250),
        ("b200", "fp8", 4500), ("b200", "tf32", 1125), ("b300", "bfloat16", 2250), ("thor", "fp8", 517),
        ("rtx5090", "float16", 209.5), ("rtx5090", "fp8", 419), ("rtx5090", "tf32", 104.8),
        ("rtx5090", "float32", 104.8),
    ],
)  # fmt: skip
def test_peaks_are_the_data_sheets(name, dtype, tflops):
    device = named(name)
    assert device.peak(dtype, device.workers) / 1e12 == pytest.approx(tflops, rel=1.3e-2)


@every_gpu
def test_shared_memory_is_the_programming_guides(name):
    assert named(name).shared == LIMITS[named(name).arch] * 1024


def test_a_geforce_adds_up_in_float32_at_half_the_rate():
    """By the name that its driver has: a workstation's GPU of the same architecture is not halved."""
    there = gpu_properties("NVIDIA GeForce RTX 5090", "sm_120", 170, 2.407e9, 1.792e12, 101376)
    assert (there.tensor, there.l2) == (named("rtx5090").tensor, 96 << 20)
    other = gpu_properties("NVIDIA RTX PRO 6000 Blackwell", "sm_120", 188, 2.407e9, 1.792e12, 101376)
    assert [2 * rate for _, rate in there.tensor] == [rate for _, rate in other.tensor]
    assert (there.flops, other.l2) == (other.flops, 0)


def gemm_bytes(stages: int, block: tuple[int, int, int], itemsize: int, arch: str) -> int:
    """Shared memory that Triton takes: with instructions of a warp one stage is in registers. See the compile gates."""
    buffers = stages - 1 if arch in ("sm_80", "sm_89", "sm_120") else stages
    return buffers * (block[0] + block[1]) * block[2] * itemsize


@every_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", *OCP])
def test_no_plan_takes_more_shared_memory_than_there_is(name, dtype):
    device, most = named(name), 0
    for aligned, other, waits in itertools.product((True, False), repeat=3):
        how = {"fast_accum": other} if dtype in OCP else {"tf32": other}
        rows = Arrival.uniform(512, 8).incoming(4096) if waits else None
        result = "bfloat16" if dtype in OCP else dtype
        problem = Problem(4096, 4096, 4096, 1, dtype, result, rows, aligned=aligned, **how)
        if dtype in OCP and device.arch == "sm_80":
            with pytest.raises(NotImplementedError, match=r"has no matrix units for operands of 8 bits"):
                plan_problem(problem, device=device)
            return
        for row in portable.tiles(problem, device):
            made = plan_problem(problem, device=device, backend="portable", tile=row[:2])
            most = max(most, gemm_bytes(made.stages, made.block, ITEMSIZE[dtype], device.arch))
    assert 16384 < most <= device.shared - SLACK


@every_gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_no_attention_takes_more_shared_memory_than_there_is(name, dtype, columns):
    device, itemsize = named(name), ITEMSIZE[dtype]
    if dtype == "float8_e4m3fn" and device.arch == "sm_80":
        pytest.skip("its plan refuses that")
    for aligned, waits in itertools.product((True, False), repeat=2):
        keys = Incoming(Arrival.uniform(512, 16).incoming(2 * 4096).chunks) if waits else None
        p = AttentionProblem(2, 8, 2, 4096, 4096, columns, columns, dtype=dtype, aligned=aligned, keys=keys)
        for row in portable_attention.tiles(p, device):
            # A tile of queries, or of the output, beside the ring of keys and values.
            needed = row.block_m * columns * itemsize + row.stages * row.block_n * 2 * columns * itemsize
            assert needed <= device.shared - SLACK, row


def test_heads_of_32_bits_keep_their_stages_where_those_of_16_spill():
    tiles = [
        portable_attention.tiles(AttentionProblem(1, 4, 4, 512, 512, 256, dtype=dtype), named("b200"))
        for dtype in ("float32", "bfloat16")
    ]
    assert [{row.stages for row in rows if row.block_n == 16} for rows in tiles] == [{2}, {1}]


@pytest.mark.parametrize("name", ["b200", "b300", "thor"])
def test_tensor_memory_has_no_tile_whose_accumulator_spills(name):
    with refused(
        ValueError, "tile=(128, 256): the portable kernel has 128x128, 64x128, 64x64, 16x128 for these operands"
    ):
        plan(4096, 4096, 4096, dtype="bfloat16", device=name, tile=(128, 256))
    waits = plan(4096, 4096, 4096, dtype="bfloat16", device=name, arrival=Arrival.uniform(512, 8))
    assert waits.tile == (64, 64), "at a gate 128 columns spill"
    assert [config(name, tile=tile).STRIP for tile in ((128, 128), (64, 128), (64, 64))] == [16, 16, 32]
    assert config("rtx5090", tile=(128, 128)).STRIP == config("h100", tile=(128, 256)).STRIP == 32


@pytest.mark.parametrize("name", ["a100", "rtx4090", "rtx5090"])
def test_a_warps_instructions_have_no_tile_that_spills(name):
    with refused(
        ValueError, "tile=(128, 256): the portable kernel has 128x128, 64x128, 64x64, 16x128 for these operands"
    ):
        plan(4096, 4096, 4096, dtype="bfloat16", device=name, tile=(128, 256))


def config(name: str, **how):
    made = plan(4096, 4096, 4096, dtype=how.pop("dtype", "bfloat16"), device=name, backend="portable", **how)
    return Arguments(made, Layout((0, 4096, 1), (0, 1, 4096), (0, 4096, 1))).config


@pytest.mark.parametrize(
    ("name", "imprecise", "by_itself"),
    [("h100", 128, False), ("l40s", 128, True), ("rtx4090", 128, True), ("rtx5090", 128, True), ("b200", None, False)],
)
def test_sums_of_products_of_8_bits_are_emptied_where_they_lose_bits(name, imprecise, by_itself):
    made = config(name, dtype=OCP[0], use_fast_accum=False)
    found = made.IMPRECISE, made.PROMOTED
    assert found == (imprecise, by_itself)
    fast = config(name, dtype=OCP[0])
    assert (fast.IMPRECISE, fast.PROMOTED) == (None, False)
    says = plan(4096, 4096, 4096, dtype=OCP[0], device=name, use_fast_accum=False, backend="portable").explain()
    assert ("added up in float32 every 128 of K" in says) == (imprecise is not None)


@pytest.mark.parametrize("name", NOT_RUN)
def test_a_plan_says_that_it_has_not_run(name):
    made = plan(4096, 4096, 4096, dtype="bfloat16", device=name)
    assert made.backend == "portable"
    for one in (made, attention_plan(4096, heads_q=8, device=name, dtype="bfloat16")):
        assert lines(one, "checked") == [f"compiled, not run: no {made.device.arch} GPU was there"]


def test_what_has_run_says_nothing_and_what_was_not_compiled_says_so():
    assert lines(plan(4096, 4096, 4096, dtype="bfloat16", device="h100"), "checked") == []
    assert lines(plan(4096, 4096, 4096), "checked") == []
    other = gpu_properties("NVIDIA RTX A6000", "sm_86", 84, 1.8e9, 768e9, 101376)
    assert lines(plan(4096, 4096, 4096, dtype="bfloat16", device=other), "checked") == [
        "neither compiled nor run for sm_86: its shared memory and registers are not checked"
    ]
