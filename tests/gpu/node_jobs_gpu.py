"""What ranks do in ``test_gpu_nodes.py``: a host's ranks, as a mesh of ``(nodes, ranks of one)``."""

from __future__ import annotations

import distributed_jobs
import torch
from torch.distributed.device_mesh import DeviceMesh


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


def blocks(rank, world, nodes, count):
    """As of `distributed_jobs`."""
    return distributed_jobs.blocks(rank, world, count, mesh_of(world, nodes))
