"""Ops across GPUs: ranks that are late, give up or die; every dtype and dimension; streams, groups, graphs.

Ranks are processes, one a GPU, at most 4 here (5 and 8 with TILESTREAM_WORLDS=2,5,8). On one GPU two and three of them
share it, over gloo (TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1). This shows results, not speed: the GPU runs one
process at a time, so a kernel that polls for a peer delays that peer by its share of the time.

    PYTHONPATH=src python -m pytest -o addopts= -q tests/gpu/test_gpu_distributed.py
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import distributed_jobs as jobs
import gather_jobs
import pytest
import torch
import torch_tp_jobs

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import moe_jobs
from pool import Pool

GPUS = torch.cuda.device_count()
SHARED = GPUS < 2
_ASKED = os.environ.get("TILESTREAM_WORLDS", "2,3" if SHARED else "2,3,4")
WORLDS = [int(x) for x in _ASKED.split(",") if SHARED or int(x) <= GPUS]
pytestmark = pytest.mark.timeout(300)
#: Seconds until a rank has given up at a deadline of 0.5 s, on a busy host too: half of the group's own timeout, 30 s.
#: How soon it is on an idle one is in docs/faults.md.
SOON = 15.0


def unshared(reason: str) -> pytest.MarkDecorator:
    """Skip where ranks share a GPU."""
    return pytest.mark.skipif(SHARED, reason=reason)


def make_pool(**environment: str) -> Pool:
    if SHARED:
        return Pool("gloo", TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1", **environment)
    return Pool("cpu:gloo,cuda:nccl", **environment)


class Pools:
    """A pool for each world.

    torch counts a process's rendezvous of symmetric memory over all groups; ranks with other counts do not meet.
    ``environment``: the ranks' variables.
    """

    def __init__(self, **environment: str) -> None:
        self._environment = environment
        self._pools: dict[int, Pool] = {}

    def run(self, world: int, *args, **how):
        if world not in self._pools:
            self._pools[world] = make_pool(**self._environment)
        return self._pools[world].run(world, *args, **how)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="module")
def ranks():
    pools = Pools()
    yield pools
    pools.close()


def cases(form):
    """(shape of a shard, gather_dim, N of each b, dtype, form, more)."""
    yield (256, 256), 0, (256,), "bfloat16", form, {}
    yield (200, 512), 0, (136, 72), "bfloat16", form, {"bias": True, "activation": "gelu"}
    yield (1, 256), 0, (256,), "bfloat16", form, {}
    yield (2, 130, 256), 1, (256,), "bfloat16", form, {}
    yield (2, 3, 64, 256), 2, (128,), "float16", form, {"activation": "silu"}
    yield (128, 256), 0, (256,), "float8_e4m3fn", form, {"scaled": "row"}
    yield (2, 64, 256), 1, (256, 128), "float8_e4m3fn", form, {"scaled": "tensor"}
    yield (64, 128), 1, (64,), "bfloat16", form, {}  # K is cut: unfused
    yield (4096, 4096), 0, (128,), "bfloat16", form, {}
    yield (64, 64), 0, (64,), "float32", "auto", {}  # unfused


@pytest.mark.parametrize("form", ["fused", "unfused"])
@pytest.mark.parametrize("world", WORLDS)
def test_gathers_match_torch(ranks, world, form):
    said = ranks.run(world, jobs.gathers, list(cases(form)), bound=240, seconds=60)
    assert all("fused: transfer and matmul overlap, by symmetric memory" in text for text in said), said[0]


@pytest.mark.parametrize("world", WORLDS)
def test_calls_without_a_barrier(ranks, world):
    count = 50 if SHARED else 1000
    wrong = ranks.run(world, jobs.iterates, count, bound=200, seconds=60)
    assert max(wrong) < 1.0, wrong  # another epoch's rows would be off by 16 and more


@pytest.mark.parametrize("ways", [("push",), ("pull",), ("pull", "push")], ids="-".join)
@pytest.mark.parametrize("world", WORLDS)
def test_a_peer_that_is_a_whole_call_late(ranks, world, ways):
    assert all(ranks.run(world, gather_jobs.late_by_a_call, ways, bound=120, seconds=60))


@pytest.mark.parametrize("world", WORLDS)
def test_calls_of_alternating_shapes_without_a_barrier(ranks, world):
    # Chunks, dtypes and ways alternate: the signal of a number belongs to another rank each time.
    wrong = ranks.run(world, gather_jobs.alternates, 60 if SHARED else 2000, bound=280, seconds=60)
    assert max(wrong) < 2.0, wrong  # another epoch's rows would be off by 16 and more


def test_calls_from_many_streams(ranks):
    assert all(ranks.run(2, jobs.streams, bound=120, seconds=60))


def test_two_groups_in_opposite_order(ranks):
    assert all(ranks.run(2, jobs.two_groups, bound=120, seconds=60))


@unshared("ranks that share a GPU would take each other's SMs")
def test_a_neighbour_holds_sms(ranks):
    assert all(ranks.run(2, jobs.neighbour, bound=120, seconds=60))


@unshared("gloo has no collective that a graph could hold")
def test_capture_is_unfused_and_says_why(ranks):
    for said in ranks.run(2, jobs.captures, bound=120, seconds=60):
        assert all("a CUDA graph is being captured" in text for text in said)


def test_nothing_keeps_a_destroyed_group(ranks):
    assert ranks.run(2, jobs.forgets, bound=120, seconds=60) == [(True, 0, [])] * 2


def sums(form):
    """(shape of a rank's part, scatter_dim, N, dtype, form, more)."""
    yield (256, 256), 0, 256, "bfloat16", form, {}
    yield (200, 512), 0, 136, "bfloat16", form, {"bias": True, "reduce_op": "avg"}
    yield (1, 256), 0, 64, "bfloat16", form, {}
    yield (3, 130, 256), 1, 256, "float16", form, {}
    yield (2, 64, 256), 1, 128, "bfloat16", form, {"strided": True}  # no view has its rows
    yield (100, 129), 0, 100, "bfloat16", form, {}  # what TMA does not address
    yield (128, 256), 0, 256, "float8_e4m3fn", form, {"scaled": "row"}
    yield (2, 64, 256), 1, 128, "float8_e4m3fn", form, {"scaled": "tensor"}
    yield (4096, 256), 0, 4096, "bfloat16", form, {}


@pytest.mark.parametrize("form", ["fused", "unfused"])
@pytest.mark.parametrize("world", WORLDS)
def test_sums_match_torch(ranks, world, form):
    if SHARED and form == "unfused":
        pytest.skip("gloo adds in another order")
    said = ranks.run(world, jobs.scatters, list(sums(form)), bound=240, seconds=60)
    assert all("fused: transfer and matmul overlap, by symmetric memory" in text for text in said), said[0]


@pytest.mark.parametrize("world", WORLDS)
def test_sums_without_a_barrier(ranks, world):
    wrong = ranks.run(world, jobs.adds_up, 50 if SHARED else 1000, bound=200, seconds=60)
    assert max(wrong) < 2.0, wrong  # another epoch's rows would be off by 16 and more


#: Of all-reduces: a's rows, K, N, dtype, more.
REDUCED = [
    ((1,), 256, 256, "bfloat16", {}), ((64,), 512, 8192, "bfloat16", {}),
    ((200,), 512, 136, "bfloat16", {"reduce_op": "avg"}), ((2, 65), 256, 256, "float16", {}),
    ((3,), 129, 100, "bfloat16", {}), ((128,), 256, 256, "float8_e4m3fn", {"reduce_op": "avg", "scaled": "row"}),
    ((256,), 256, 8192, "bfloat16", {}), ((16,), 256, 256, "bfloat16", {}),
]  # fmt: skip


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduces_match_torch_on_every_rank(ranks, world):
    said = ranks.run(world, jobs.reduces, REDUCED, bound=150, seconds=60)
    assert all("fused: in one shot: each rank reads the partial sums of all" in text for text in said), said[0]


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduces_without_a_barrier(ranks, world):
    wrong = ranks.run(world, jobs.reduces_in_turn, 50 if SHARED else 500, bound=120, seconds=60)
    assert max(wrong) < 0.5, wrong  # another epoch's sums would be off by 2 and more


@pytest.mark.parametrize("world", WORLDS)
def test_gathers_and_sums_in_turn(ranks, world):
    wrong = ranks.run(world, jobs.blocks, 5 if SHARED else 100, bound=200, seconds=60)
    assert max(wrong) < 0.5, wrong


def test_torchs_fused_ops_as_its_own_tests_call_them(ranks):
    for done, sites in ranks.run(2, jobs.torch_shapes, bound=120, seconds=60):
        assert len(done) == 2 * (2 * 4 + 2 * 3)
        assert any("fused:" in site for site in sites), sites


@unshared("the compiler's pass wants NCCL")
@pytest.mark.parametrize("whole", [False, True])
def test_a_llama_of_torchs_parallel_styles_is_fused_and_learns_as_without(ranks, whole):
    for plain, ours, sites in ranks.run(2, jobs.llama, whole, bound=200, seconds=60):
        jobs.llama_holds(plain, ours, sites)


@unshared("torch's barrier wants the ranks to run at once")
def test_torchs_all_gather_of_an_input_that_arrives_runs_on_our_matmul(ranks):
    assert max(ranks.run(2, torch_tp_jobs.native, bound=120, seconds=60)) < 1e-2


@unshared("torch's barrier wants the ranks to run at once")
@pytest.mark.timeout(150)
def test_a_gather_ends_where_torchs_native_op_hangs(ranks):
    for errors in ranks.run(2, torch_tp_jobs.where_torch_hangs, bound=120, seconds=60):
        assert max(errors) < 1e-2, errors


@unshared("that pass wants NCCL")
def test_what_torchs_compiler_fuses_of_the_patterns_of_its_tests(ranks):
    for said in ranks.run(2, torch_tp_jobs.patterns, bound=280, seconds=60):
        assert len(said) == 16
        for name, error, sites in said:
            assert error < 1e-2, (name, error)
            if "two products" in name or ", dim 0" in name:
                assert jobs.called(sites), name
    print(*said, sep="\n")


def test_modules_train_as_one_gpu_would(ranks):
    for errors, plans in ranks.run(2, torch_tp_jobs.modules, bound=120, seconds=60):
        assert max(errors) < 2e-2, errors
        assert len(plans) == 2


@pytest.mark.parametrize("absent", ["late", "stopped", "killed"])
@pytest.mark.parametrize(
    ("op", "way", "part"),
    [
        ("all_gather_matmul", "push", "part of a_shard"),
        ("all_gather_matmul", "pull", "part of a_shard"),
        ("matmul_reduce_scatter", "", "the sum"),
        ("matmul_all_reduce", "", "the sum"),
    ],
)
def test_a_rank_that_does_not_come(absent, op, way, part):
    job, how = (jobs.expires, way) if way else (jobs.sum_expires, op)
    pool = make_pool()  # of its own, which its broken group does not leave
    try:
        *others, late = pool.run(WORLDS[-1] if absent == "killed" else 2, job, absent, how, bound=120, seconds=30)
    finally:
        pool.close()
    assert absent == "killed" or late[1].startswith("GroupBroken"), late
    for first, second, works, waited in others:
        assert works
        # Of three ranks the first may abort the second before its deadline.
        aborted = first.startswith("GroupBroken") and len(others) > 1
        assert aborted or (first.startswith(f"ArrivalTimeout: {op}: rank ") and part in first), first
        assert second.startswith("GroupBroken"), second
        assert waited < SOON, "after the deadline of 0.5 s"


@unshared("ranks that share a GPU take turns on it")
@pytest.mark.parametrize("op", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_a_rank_that_does_not_come_to_a_sum_where_launches_block(op):
    pool = make_pool(CUDA_LAUNCH_BLOCKING="1")
    try:
        (first, second, works, _), late = pool.run(2, jobs.sum_expires, "late", op, bound=60, seconds=30)
    finally:
        pool.close()
    assert works
    assert late[1].startswith("GroupBroken"), late
    assert first.startswith(f"ArrivalTimeout: {op}: rank 1's part of the sum"), first
    assert second.startswith("GroupBroken"), second


@pytest.mark.parametrize(
    "environment",
    [{"CUDA_LAUNCH_BLOCKING": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}],
    ids=lambda environment: "-".join(*environment.items()),
)
def test_whatever_the_order_in_which_the_driver_runs_streams(environment):
    if SHARED and "CUDA_LAUNCH_BLOCKING" in environment:
        pytest.skip("ranks that share a GPU take turns on it")
    pool = make_pool(**environment)
    try:
        assert max(pool.run(2, jobs.iterates, 30, bound=120, seconds=60)) < 1.0
        assert max(pool.run(2, gather_jobs.alternates, 30, bound=120, seconds=60)) < 2.0
        assert max(pool.run(2, jobs.adds_up, 30, bound=120, seconds=60)) < 2.0
        assert all(pool.run(2, jobs.streams, bound=120, seconds=60))
    finally:
        pool.close()


def test_a_mixture_of_experts(ranks):
    """By all-to-all: uneven tokens, an expert with all of them, a rank without."""
    sizes = {"width": 256, "hidden": 192}
    cases = [
        ((200, 131, 77, 300), 2, 4, "bfloat16", "auto", sizes),
        ((64, 0, 9, 1), 1, 3, "float16", "auto", {**sizes, "activation": "gelu_tanh"}),
        ((130, 40, 20, 10), 2, 2, "bfloat16", "auto", {**sizes, "only": [1], "activation": "relu"}),
    ]
    for world in WORLDS[:1]:
        assert ranks.run(world, moe_jobs.matches, cases, "cuda") == [True] * world
