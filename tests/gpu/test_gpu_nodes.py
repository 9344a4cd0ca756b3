"""Ops over several nodes, made of one host's GPUs: 2 x 4 of eight, or 2 x 2 of four, with NCCL between nodes.

Where there are fewer, the nodes share them: rank r is on GPU r modulo their number, so that a node's ranks have a GPU
each where there are two. Two ranks of one GPU are in no NCCL group, so it is gloo between nodes then, through the CPU:
right, and slow.

    PYTHONPATH=src python -m pytest -o addopts= -q tests/gpu/test_gpu_nodes.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import node_jobs_gpu as jobs
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
from pool import Pool

GPUS = torch.cuda.device_count()
NODES, WORLD = 2, 8 if GPUS >= 8 else 4
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def ranks():
    if GPUS >= WORLD:
        pool = Pool("cpu:gloo,cuda:nccl")
    else:
        pool = Pool("gloo", TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")
    yield pool
    pool.close()


def gathers(form):
    """(shape of a shard, gather_dim, N of each b, dtype, form, more)."""
    yield (256, 256), 0, (256,), "bfloat16", form, {}
    yield (200, 512), 0, (136, 72), "bfloat16", form, {}
    yield (2, 130, 256), 1, (256,), "bfloat16", form, {}
    yield (128, 256), 0, (256,), "float8_e4m3fn", form, {"scaled": "row"}
    yield (64, 128), 1, (64,), "bfloat16", form, {}  # K is cut: unfused
    yield (2048, 2048), 0, (512,), "bfloat16", form, {}


def sums(form):
    """(shape of a rank's part of a, scatter_dim, N, dtype, form, more)."""
    yield (256, 256), 0, 256, "bfloat16", form, {}
    yield (200, 512), 0, 136, "bfloat16", form, {"reduce_op": "avg"}
    yield (2, 64, 256), 1, 128, "bfloat16", form, {}
    yield (1024, 256), 0, 2048, "bfloat16", form, {}


@pytest.mark.parametrize("form", ["fused", "unfused"])
def test_gathers_match_one_node(ranks, form):
    said = ranks.run(WORLD, jobs.gathers, NODES, list(gathers(form)), bound=240, seconds=60)
    start = f"all_gather_matmul, {NODES} nodes of {WORLD // NODES} ranks on sm_"
    assert all(text.startswith(start) for text in said), said[0]
    assert all("MB through the NIC" in text for text in said), said[0]
    if GPUS > 1:
        assert all("fused: transfer and matmul overlap, by symmetric memory" in text for text in said), said[0]


@pytest.mark.parametrize("form", ["fused", "unfused"])
def test_sums_match_one_node(ranks, form):
    if GPUS < WORLD and form == "unfused":
        pytest.skip("gloo adds in another order")
    said = ranks.run(WORLD, jobs.sums, NODES, list(sums(form)), bound=240, seconds=60)
    start = f"matmul_reduce_scatter, {NODES} nodes of {WORLD // NODES} ranks on sm_"
    assert all(text.startswith(start) for text in said), said[0]


def test_all_reduces(ranks):
    cases = [
        ((1,), 256, 512, "bfloat16", {}), ((16,), 512, 256, "bfloat16", {"reduce_op": "avg"}),
        ((2, 64), 256, 136, "bfloat16", {}),
    ]  # fmt: skip
    said = ranks.run(WORLD, jobs.reduces, NODES, cases, bound=120, seconds=60)
    assert all("unfused: one after the other, by collective" in text for text in said), said[0]


def test_gathers_and_sums_in_turn_without_a_barrier(ranks):
    wrong = ranks.run(WORLD, jobs.blocks, NODES, 200 if GPUS >= WORLD else 30, bound=240, seconds=60)
    assert max(wrong) < 0.5, wrong
