"""What ranks do in ``test_gpu_nodes.py``: a host's ranks, as a mesh of ``(nodes, ranks of one)``."""

from __future__ import annotations

import distributed_jobs
import torch
from distributed_jobs import Worst, late_in_turn, poison, random
from torch.distributed.device_mesh import DeviceMesh

import tilestream as ts
from rank_checks import check_sum, factors, same_on_every_rank
from tilestream import distributed as tsd


def mesh_of(world: int, nodes: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(world).view(nodes, -1), mesh_dim_names=("node", "local"))


def gathers(rank, world, nodes, cases):
    """As of `distributed_jobs`."""
    return distributed_jobs.gathers(rank, world, cases, mesh_of(world, nodes))


def sums(rank, world, nodes, cases):
    """Each case against the exact sum; twice, with the same bits."""
    mesh = mesh_of(world, nodes)
    for rows, dim, k, n, form, average in cases:
        shape = [extent * world if i == dim else extent for i, extent in enumerate(rows)]
        inputs = factors(random, world, shape, k, n, torch.bfloat16)
        a, b = inputs[rank]
        outs = []
        for _ in range(2):
            poison(mesh)
            op = "avg" if average else "sum"
            outs.append(
                tsd.matmul_reduce_scatter(a, b, scatter_dim=dim, reduce_op=op, form=form, group=mesh, deadline=20)
            )
            torch.cuda.synchronize()
            ts.check()
        if form == "fused":
            assert outs[0].equal(outs[1]), "the second result has other bits"
        over = world if average else 1
        exact = (sum(x.double() @ y.double() for x, y in inputs) / over).chunk(world, dim)[rank]
        theirs = (sum((x @ y).float() for x, y in inputs) / over).chunk(world, dim)[rank]
        # What travels between nodes is rounded once more than what travels inside one.
        check_sum(outs[0], exact, theirs, (rows, dim, form), ulps=2)
    return True


def reduces(rank, world, nodes, cases):
    """`matmul_all_reduce` over all ranks, and over nodes: against the exact sum, the same on every rank."""
    for group in (None, mesh_of(world, nodes)):
        for rows, k, n, average in cases:
            inputs = factors(random, world, rows, k, n, torch.bfloat16)
            bias, over = random(5, n), world if average else 1
            a, b = inputs[rank]
            out = tsd.matmul_all_reduce(a, b, bias=bias, reduce_op="avg" if average else "sum", group=group)
            exact = sum(x.double() @ y.double() for x, y in inputs) / over + bias.double()
            theirs = sum((x @ y).float() for x, y in inputs) / over + bias
            check_sum(out, exact, theirs, (rows, k, n), ulps=2)
            same_on_every_rank(out)
    return tsd.plan_matmul_all_reduce(*inputs[rank]).explain()


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
