"""What ranks do in ``test_gpu_nodes.py``: a host's ranks, as a mesh of ``(nodes, ranks of one)``."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from distributed_jobs import poison, random
from torch.distributed.device_mesh import DeviceMesh

import tilestream as ts
from error_rule import Maths, check
from tilestream import distributed as tsd


def mesh_of(world: int, nodes: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(world).view(nodes, -1), mesh_dim_names=("node", "local"))


def gathers(rank, world, nodes, cases):
    """Each case against all shards side by side, multiplied by torch."""
    mesh = mesh_of(world, nodes)
    for shape, dim, columns, dtype, form, scaled in cases:
        dtype = getattr(torch, dtype)
        shards = [random(10 * r + 1, *shape, dtype=dtype) for r in range(world)]
        whole = torch.cat([x.view(torch.uint8) for x in shards], dim).view(dtype)
        bs = [random(500 + i, n, whole.shape[-1], dtype=dtype).t() for i, n in enumerate(columns)]
        scale_a = scale_b = scale_whole = None
        if scaled:
            of = [random(70 + r, *shape[:-1], 1, dtype=torch.float32).abs() + 0.5 for r in range(world)]
            scale_a, scale_whole = of[rank], torch.cat(of, dim)
            scale_b = [random(80 + i, n, dtype=torch.float32).abs() + 0.5 for i, n in enumerate(columns)]
        for return_a in (True, False, False):
            poison(mesh)
            outs = tsd.all_gather_matmul(
                shards[rank], bs, gather_dim=dim, scale_a=scale_a, scale_b=scale_b, form=form, return_a=return_a,
                group=mesh, deadline=20,
            )  # fmt: skip
            torch.cuda.synchronize()
            ts.check()
            if return_a:
                a, outs = outs
                assert a.view(torch.uint8).equal(whole.view(torch.uint8)), (shape, dim, form)
            for i, out in enumerate(outs):
                maths = Maths(
                    whole.flatten(0, -2), bs[i], scale_b=None if scale_b is None else scale_b[i],
                    scale_a=None if scale_whole is None else scale_whole.flatten(0, -2),
                )  # fmt: skip
                check(out.flatten(0, -2), maths)
    x, w = random(1, 256, 256), random(2, 256, 256)
    return tsd.plan_all_gather_matmul(x, w, form="fused", group=mesh).explain()


def sums(rank, world, nodes, cases):
    """Each case against the exact sum; twice, with the same bits."""
    mesh = mesh_of(world, nodes)
    for rows, dim, k, n, form, average in cases:
        shape = [extent * world if i == dim else extent for i, extent in enumerate(rows)]
        inputs = [(random(10 * r + 3, *shape, k), random(10 * r + 4, n, k).t()) for r in range(world)]
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
            assert outs[0].equal(outs[1]), "other bits the second time"
        over = world if average else 1
        exact = (sum(x.double() @ y.double() for x, y in inputs) / over).chunk(world, dim)[rank]
        theirs = (sum((x @ y).float() for x, y in inputs) / over).to(a.dtype).chunk(world, dim)[rank]
        ulp = torch.finfo(a.dtype).eps * exact.abs().max()
        error, other = ((x.double() - exact).abs() for x in (outs[0], theirs))
        # What travels between nodes is rounded once more than what travels inside one.
        assert error.max() <= 2 * other.max() + 2 * ulp, (rows, dim, form)
    return True


def reduces(rank, world, nodes, cases):
    """`matmul_all_reduce` over all ranks, and over nodes: against the exact sum, the same on every rank."""
    for group in (None, mesh_of(world, nodes)):
        for rows, k, n, average in cases:
            inputs = [(random(10 * r + 3, *rows, k), random(10 * r + 4, n, k).t()) for r in range(world)]
            bias, over = random(5, n), world if average else 1
            a, b = inputs[rank]
            out = tsd.matmul_all_reduce(a, b, bias=bias, reduce_op="avg" if average else "sum", group=group)
            exact = sum(x.double() @ y.double() for x, y in inputs) / over + bias.double()
            theirs = (sum((x @ y).float() for x, y in inputs) / over + bias).to(a.dtype)
            ulp = torch.finfo(a.dtype).eps * exact.abs().max()
            error, other = ((x.double() - exact).abs().max() for x in (out, theirs))
            assert error <= 2 * other + 2 * ulp, (rows, k, n)
            first = out.clone().view(torch.uint8)
            dist.broadcast(first, 0)
            assert first.equal(out.view(torch.uint8)), "ranks have other bits"
    return tsd.plan_matmul_all_reduce(*inputs[rank]).explain()


def iterates(rank, world, nodes, count):
    """A gather and a sum in turn without a barrier between, on other data each time; ranks are late in turn."""
    mesh, b, back = mesh_of(world, nodes), random(1, 256, 256) / 16, random(2, 256, 256) / 16
    wholes = [random(1000 + i, 96 * world, 256) for i in range(4)]
    mine = [x[96 * rank : 96 * rank + 96] for x in wholes]
    expected = [(world * ((x @ b) @ back).float()) for x in mine]
    wrong = torch.zeros((), device="cuda")
    for i in range(count):
        if i % 16 == rank:
            time.sleep(0.002)
        if i % 16 == 8 + rank:
            torch.cuda._sleep(2_000_000)
        h = tsd.all_gather_matmul(mine[i % 4], b, form="fused", group=mesh, deadline=20)
        out = tsd.matmul_reduce_scatter(h, back, form="fused", group=mesh, deadline=20)
        error = (out.float() - expected[i % 4]).abs().nan_to_num(torch.inf).max()
        wrong = torch.maximum(wrong, error)
    torch.cuda.synchronize()
    ts.check()
    return wrong.item()
