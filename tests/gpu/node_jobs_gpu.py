"""What ranks do in ``test_gpu_nodes.py``: a host's ranks, as a mesh of ``(nodes, ranks of one)``."""

from __future__ import annotations

import distributed_jobs
import torch
from distributed_jobs import Worst, late_in_turn, random
from torch.distributed.device_mesh import DeviceMesh

from tilestream import distributed as tsd


def mesh_of(world: int, nodes: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(world).view(nodes, -1), mesh_dim_names=("node", "local"))


def gathers(rank, world, nodes, cases):
    """As of `distributed_jobs`."""
    return distributed_jobs.gathers(rank, world, cases, mesh_of(world, nodes))


def sums(rank, world, nodes, cases):
    """As of `distributed_jobs`. What travels between nodes is rounded once more than what travels inside one."""
    return distributed_jobs.scatters(rank, world, cases, mesh_of(world, nodes), ulps=2)


def reduces(rank, world, nodes, cases):
    """As of `distributed_jobs`: over all ranks, and over nodes."""
    distributed_jobs.reduces(rank, world, cases, form="auto", ulps=2)
    return distributed_jobs.reduces(rank, world, cases, mesh_of(world, nodes), form="auto", ulps=2)


def iterates(rank, world, nodes, count):
    """A gather and a sum in turn without a barrier between, on other data each time; ranks are late in turn."""
    mesh, b, back = mesh_of(world, nodes), random(1, 256, 256) / 16, random(2, 256, 256) / 16
    wholes = [random(1000 + i, 96 * world, 256) for i in range(4)]
    mine = [x[96 * rank : 96 * rank + 96] for x in wholes]
    expected = [(world * ((x @ b) @ back).float()) for x in mine]
    worst = Worst()
    for i in range(count):
        late_in_turn(i, rank)
        h = tsd.all_gather_matmul(mine[i % 4], b, form="fused", group=mesh, deadline=20)
        out = tsd.matmul_reduce_scatter(h, back, form="fused", group=mesh, deadline=20)
        worst.add(out, expected[i % 4])
    return worst.get()
