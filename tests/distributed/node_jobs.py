"""What ranks do in the tests of several nodes: a host's ranks, as a mesh of ``(nodes, ranks of one)``."""

from __future__ import annotations

import os
import time
from pathlib import Path

import jobs
import torch
import torch.distributed as dist
from jobs import random
from torch.distributed.device_mesh import DeviceMesh

from rank_checks import raised
from tilestream import distributed as tsd


def mesh_of(world: int, nodes: int) -> DeviceMesh:
    """The ranks of the default group, as so many nodes."""
    return DeviceMesh("cpu", torch.arange(world).view(nodes, -1), mesh_dim_names=("node", "local"))


def computes(rank, world, nodes, gathers, sums, dims):
    """The same as one node of all ranks."""
    mesh = mesh_of(world, nodes)
    jobs.gathers(rank, world, gathers, mesh)
    jobs.scatters(rank, world, sums, mesh)
    jobs.reduces(rank, world, [((2, 5), 24, 9, "bfloat16", {"reduce_op": "avg", "bias": True})], mesh)
    for dim in dims:
        jobs.gradients(rank, world, dim, mesh)
    assert jobs.reduce_gradients(rank, world, mesh)
    return True


def iterates(rank, world, nodes, count):
    """As of `jobs`."""
    return jobs.iterates(rank, world, count, mesh_of(world, nodes))


def overlaps(rank, world, nodes, folder):
    """The last node comes when the others have computed their own rows, and not before."""
    from tilestream.distributed import all_gather

    mesh, b, done = mesh_of(world, nodes), random(9, 8, 6), []
    whole = random(3, 4 * world, 8)
    tsd.all_gather_matmul(whole[4 * rank : 4 * rank + 4], b, group=mesh, deadline=600)  # all ranks are here
    local = world // nodes
    run = all_gather.run

    def run_and_report(state, *args, **how):
        result = run(state, *args, **how)
        done.append(time.monotonic())
        (Path(folder) / f"{rank} {len(done)}").touch()
        return result

    all_gather.run = run_and_report
    try:
        if rank >= local:  # the last node waits for all ranks of the first to have done a step
            end = time.monotonic() + 300
            while len(list(Path(folder).glob("* 1"))) < local:
                assert time.monotonic() < end, "a node does not compute its own rows before the other node's arrive"
                time.sleep(0.002)
        out = tsd.all_gather_matmul(whole[4 * rank : 4 * rank + 4], b, group=mesh, form="fused", deadline=600)
    finally:
        all_gather.run = run
    return torch.allclose(out, whole @ b, atol=1e-4)


def explains(rank, world, nodes):
    mesh = mesh_of(world, nodes)
    gather = tsd.plan_all_gather_matmul(torch.ones(4, 8), torch.ones(8, 6), group=mesh)
    total = tsd.plan_matmul_reduce_scatter(torch.ones(4 * world, 8), torch.ones(8, 6), group=mesh)
    return gather.explain(), total.explain()


def refuses(rank, world, nodes):
    """Invalid arguments raise on their rank, before anything is sent."""
    mesh, a, b = mesh_of(world, nodes), torch.ones(4, 8), torch.ones(8, 6)
    cube = DeviceMesh("cpu", torch.arange(world).view(nodes, -1, 1))
    texts = [
        raised(lambda: tsd.all_gather_matmul(a, b, group=cube)),
        raised(lambda: tsd.matmul_reduce_scatter(torch.ones(world + 1, 8), b, group=mesh)),
        raised(lambda: tsd.all_gather_matmul(a, b, gather_dim=1, scale_a=torch.ones(4, 1), group=mesh)),
        raised(lambda: tsd.all_gather_matmul(a, torch.ones(7, 6), group=mesh)),
    ]
    again = tsd.all_gather_matmul(a, b, group=mesh)
    assert again.eq(8).all()
    return texts


def differs(rank, world, nodes):
    """A node makes another call: all raise."""
    mesh = mesh_of(world, nodes)
    rows = 5 if rank >= world // nodes else 4
    return raised(lambda: tsd.all_gather_matmul(torch.ones(rows, 8), torch.ones(8, 6), group=mesh, deadline=600))


def loses(rank, world, nodes):
    """The last rank dies: all others raise, now and at each later call."""
    mesh, a, b = mesh_of(world, nodes), torch.ones(4, 8), torch.ones(8, 6)
    tsd.all_gather_matmul(a, b, group=mesh)
    dist.barrier()
    if rank == world - 1:
        os._exit(0)
    begin = time.monotonic()
    first = raised(lambda: tsd.all_gather_matmul(a, b, group=mesh, form="fused", deadline=3))
    waited = time.monotonic() - begin
    return first, raised(lambda: tsd.all_gather_matmul(a, b, group=mesh, deadline=3)), waited


def meshes_of_one(rank, world):
    """A mesh of one dimension, of one node, or of one rank a node acts as a single group."""
    from tilestream.distributed.group_state import groups_of

    a, b = torch.full((4, 8), float(rank)), torch.ones(8, 6)
    expected = 8 * torch.arange(world).repeat_interleave(4).float()
    flat = DeviceMesh("cpu", torch.arange(world))
    for mesh in (flat, mesh_of(world, 1), mesh_of(world, world)):
        assert len(groups_of("test", mesh)) == 1
        assert tsd.all_gather_matmul(a, b, group=mesh)[:, 0].equal(expected)
        up = tsd.ColumnParallelLinear(8, 6 * world, group=mesh)
        assert up(a).shape == (4 * world, 6)
    return True


def layers(rank, world, nodes):
    """As of `jobs`."""
    return jobs.layers(rank, world, mesh_of(world, nodes))


def exchanges(rank, world):
    """NCCL's branch of `internode`, between gloo ranks, which have the same sends and receives.

    Two tensors a step, and one without elements; got in another order than they were put.
    """
    from tilestream.distributed.group_state import state_of
    from tilestream.distributed.internode import _NcclSteps

    def sent(source, step):
        first = torch.full((2, 3), 10.0 * source + step).t()
        return [first, torch.empty(0, 4), torch.full((5,), 10 * source + step, dtype=torch.bfloat16)]

    for _ in range(3):
        steps = _NcclSteps(state_of("test", None))
        for step in range(1, world):
            steps.put(step, sent(rank, step))
        for step in reversed(range(1, world)):
            for got, expected in zip(steps.get(step), sent((rank - step) % world, step), strict=True):
                assert got.shape == expected.shape
                assert got.equal(expected), (step, got)
    return True
