"""Several nodes: results equal those of one node with all ranks; and the bandwidth model.

Nodes are made of one host's ranks, over gloo: 2 x 2, 2 x 3 and 3 x 2.
"""

from __future__ import annotations

import itertools
import threading
import types

import node_jobs
import pytest
import torch

from tilestream.distributed import hierarchy, internode
from tilestream.distributed.dispatch import Case, table
from tilestream.distributed.nodes import NIC, NVLINK, NodeModel

WORLDS = [(2, 2), pytest.param(2, 3, marks=pytest.mark.slow), pytest.param(3, 2, marks=pytest.mark.slow)]


def gathers():
    """(shape of a shard, gather_dim, N of each b, dtype, form, more)."""
    yield (16, 24), 0, (20,), "float32", "fused", {}
    yield (37, 24), 0, (33, 7), "float32", "auto", {"bias": True, "activation": "gelu"}
    yield (2, 5, 24), 1, (9,), "float32", "fused", {}
    yield (2, 5, 24), 0, (9,), "bfloat16", "unfused", {"activation": "silu"}
    yield (3, 8), 1, (9,), "float32", "fused", {}
    yield (2, 3, 8), 2, (9, 4), "float32", "auto", {"bias": True}
    yield (6, 16), 0, (8, 8), "float8_e4m3fn", "fused", {"scaled": "row"}
    yield (2, 3, 16), 1, (8,), "float8_e4m3fn", "fused", {"scaled": "tensor"}
    yield (0, 8), 0, (3,), "float32", "fused", {}


def sums():
    """(a's rows, of which one dimension is multiplied by the world; scatter_dim, K, N, dtype, form, more)."""
    yield (16,), 0, 24, 20, "float32", "fused", {}
    yield (7,), 0, 24, 9, "float32", "unfused", {"reduce_op": "avg", "bias": True}
    yield (2, 5), 1, 24, 9, "float32", "fused", {"bias": True}
    yield (2, 5), 0, 24, 9, "bfloat16", "fused", {}
    yield (4,), 0, 8, 4, "float64", "auto", {}


@pytest.mark.parametrize(("nodes", "local"), WORLDS)
def test_results_match_one_node(ranks, nodes, local):
    world = nodes * local
    answers = ranks.run(world, node_jobs.computes, nodes, list(gathers()), list(sums()), [0, 1])
    assert answers == [True] * world


def test_plans_say_how_many_nodes(ranks):
    for gather, total in ranks.run(4, node_jobs.explains, 2):
        assert gather.startswith("all_gather_matmul, 2 nodes of 2 ranks on cpu: N 6, K 8")
        assert total.startswith("matmul_reduce_scatter, 2 nodes of 2 ranks on cpu: N 6, K 8")
        assert "nodes     2, each a step" in gather


def test_invalid_arguments_raise_before_anything_is_sent(ranks):
    for cube, rows, scales, k in ranks.run(4, node_jobs.refuses, 2):
        assert cube.startswith("ValueError: all_gather_matmul: group: a mesh of 3 dimensions; it has one, or two for")
        assert "it must be a multiple of the 4 ranks" in rows
        assert "scale_a has 4 elements; with K cut" in scales
        assert "differ in K" in k


def test_different_calls_raise_on_all_nodes(ranks):
    for text in ranks.run(4, node_jobs.differs, 2):
        assert text.startswith("ValueError: all_gather_matmul: ranks "), text
        assert "a_shard: [" in text


def test_a_rank_that_dies_breaks_the_group_on_all_nodes(ranks):
    *answers, lost = ranks.run(4, node_jobs.loses, 2)
    assert lost == "lost"
    for first, second, waited in answers:
        assert first.startswith(("GroupBroken", "ArrivalTimeout")), first
        assert second.startswith("GroupBroken"), second
        assert waited < 300, "bounded by the deadline"


def test_a_failed_call_over_nccl_breaks_the_group(monkeypatch):
    """The next call would receive what is already sent."""
    broken = []
    state = types.SimpleNamespace(rank=0, world=2, backend=lambda device: "nccl", break_=broken.append)
    plan = types.SimpleNamespace(case=types.SimpleNamespace(op="all_gather_matmul"))
    monkeypatch.setattr(internode, "agree", lambda *args: None)
    like = [types.SimpleNamespace(device=torch.device("cuda"))]

    def compute(steps):
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        internode.exchange_between_nodes(state, plan, like, 1.0, compute)
    assert broken == ["all_gather_matmul on rank 0: MemoryError: no room"]


def test_nccls_messages_go_a_step_on_and_come_from_a_step_before(monkeypatch):
    made = []
    dist = types.SimpleNamespace(
        isend="to", irecv="from", get_global_rank=lambda group, rank: 10 + rank, batch_isend_irecv=list,
        P2POp=lambda what, x, peer, group: made.append((what, peer)),
    )  # fmt: skip
    monkeypatch.setattr(internode, "dist", dist)
    steps = internode._NcclSteps(types.SimpleNamespace(rank=1, world=5, group=None))
    for step in (1, 2):
        steps.put(step, [torch.ones(2)])
    assert made == [("to", 12), ("from", 10), ("to", 13), ("from", 14)]


def test_nodes_compare_only_fields_that_no_node_decides_alone(monkeypatch):
    compared = []
    monkeypatch.setattr(hierarchy, "exchange_between_nodes", lambda state, plan, *rest: compared.append(plan))
    plan = types.SimpleNamespace(internode="of all nodes")
    state = types.SimpleNamespace(call=threading.Lock)
    hierarchy.NodeMesh(state, state).call(plan, [], 0.0, lambda steps: None)
    assert compared == ["of all nodes"]


# The model -----------------------------------------------------------------------------------------------------------


def test_bytes_between_and_inside_nodes_are_counted():
    """Transfer by transfer, for one rank."""
    for nodes, local in ((2, 8), (3, 2), (4, 4)):
        found = NodeModel(nodes, local, 1000, 1.0)
        peers = [index for index in range(nodes * local) if index]  # of rank 0
        nic = 1000 * sum(index % local == 0 for index in peers)  # from its counterparts
        nvlink = 1000 * len(peers) - nic  # from the peer in its own node that holds that shard
        assert (found.nic_bytes, found.nvlink_bytes) == (nic, nvlink)
        assert found.flat_bytes == found.nic_bytes * local
        assert found.nic_bytes + found.nvlink_bytes == (nodes * local - 1) * 1000


def test_the_model_is_between_the_floor_and_no_overlap():
    for nodes, local, megabytes, matmul in itertools.product(
        (2, 3, 4), (2, 4, 8), (1, 16, 64), (1e-5, 1e-4, 1e-3, 1e-2)
    ):
        found = NodeModel(nodes, local, megabytes << 20, matmul)
        assert max(found.parts) <= found.seconds * (1 + 1e-12)
        assert found.seconds <= sum(found.parts) * (1 + 1e-12)
        if found.hidden:
            steps = max(found.matmul, found.nvlink_bytes / NVLINK)
            assert found.seconds == pytest.approx(steps), "nothing of the NIC's time is left"


def model(nodes, rows, k, n):
    """Of a gather of bfloat16 shards on H100s, 8 a node."""
    case = Case("all_gather_matmul", rows, n, k, k, 8, "bfloat16", 2, "sm_90")
    return NodeModel.of(nodes, case, table()["rates"]["sm_90"])


def test_the_columns_that_hide_the_nic_do_not_depend_on_rows_and_k():
    # A shard of r rows has r * K * 2 bytes, and a step's matmul 2 * 8 * r * N * K operations.
    columns = 2 * table()["rates"]["sm_90"]["flops"] / (2 * 8 * NIC)
    assert 1700 < columns < 1900  # 720 TFLOP/s, bfloat16, 8 GPUs a node, 400 Gb/s
    for rows, k, nodes in itertools.product((128, 1024, 4096), (1024, 8192), (2, 4)):
        assert model(nodes, rows, k, int(columns * 1.01)).hidden
        assert not model(nodes, rows, k, int(columns * 0.99)).hidden


def test_an_mlp_of_llama_70b_on_two_nodes_of_eight():
    """8192 rows, TP 16: w1 and w3 are 28672 / 16 columns each. As in docs/distributed.md."""
    found = model(2, 8192 // 16, 8192, 2 * 28672 // 16)
    assert found.nic_bytes == 512 * 8192 * 2
    assert found.hidden
    assert found.seconds == pytest.approx(found.matmul)
    said = dict(found.explain())
    flat = "a GPU; flat it would be 67.11 MB through the NIC"
    assert said["bytes"] == f"8.389 MB through the NIC, 117.4 MB by NVLink, {flat}"
    assert f"nominal: {NIC / 1e9:g} and {NVLINK / 1e9:g} GB/s" in said["modelled"]
