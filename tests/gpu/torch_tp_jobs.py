"""What ranks do with torch's tensor parallelism on tilestream: the shapes of torch's tests, and modules."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from distributed_jobs import BF16, finish, random
from torch import nn

from tilestream import distributed as tsd


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The relative error in the Frobenius norm; infinite if shape or dtype differ."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def native(rank, world):
    """torch's all-gather of copies, stream writes and `_async_input_mm`, which runs on tilestream.

    B in both layouts, the shard in symmetric memory or not. Returns the largest error.
    """
    from torch.distributed import _symmetric_memory as symmetric

    name, errors = dist.group.WORLD.group_name, []
    m, n, k = 4096, 1024, 1024
    with tsd.async_tp():
        for transposed, shared in itertools.product((False, True), (False, True)):
            source = random(10 + rank, m // world, k)
            a = symmetric.empty(m // world, k, dtype=BF16, device=source.device) if shared else source
            if shared:
                symmetric.rendezvous(a, name)
                a.copy_(source)
            b = random(5, n, k).t() if transposed else random(5, k, n)
            for _ in range(3):
                whole, out = symmetric._fused_all_gather_matmul_native(a, b, name)
                finish()
                shards = torch.cat([random(10 + r, m // world, k) for r in range(world)])
                assert whole.equal(shards)
                errors.append(relative(out, (shards.double() @ b.double()).to(BF16)))
    return max(errors)


def where_torch_hangs(rank, world):
    """A shape at which torch's own native op never ends on two H200s (torch 2.11; killed after 110 s).

    torch's op, and the one that it calls where ``TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP`` is set. Returns the errors.
    """
    from torch.distributed import _symmetric_memory as symmetric

    name, errors = dist.group.WORLD.group_name, []
    shards, b = [random(10 + r, 1536, 8192) for r in range(world)], random(5, 8192, 5120)
    whole = torch.cat(shards)
    exact = (whole.double() @ b.double()).to(BF16)
    calls = (
        lambda: torch.ops.symm_mem.fused_all_gather_matmul(shards[rank], [b], 0, name),
        lambda: symmetric._fused_all_gather_matmul_native(shards[rank], b, name),
    )
    with tsd.async_tp():
        for call, _ in itertools.product(calls, range(5)):
            gathered, outs = call()
            finish()
            assert gathered.equal(whole)
            errors.append(relative(outs[0] if isinstance(outs, list) else outs, exact))
    return errors


def patterns(rank, world):
    """The functions that torch's tests of its compiler's pass compile: each compiled on tilestream, against eager.

    Returns for each its name, its error, and the sites of the report.
    """
    group, said = dist.group.WORLD, []
    b, wide = random(3, 64, 32) / 8, random(4, 8 * world, 32) / 4

    def gathered(dim, keep):
        def function(x):
            whole = collectives.all_gather_tensor(x, dim, group)
            return (whole @ b, whole.relu()) if keep else (whole @ b, None)

        return function

    def several(x):
        whole = collectives.all_gather_tensor(x, 0, group)
        return whole @ b, whole @ (b * 2)

    def scattered(dim, op):
        def function(x):
            return collectives.reduce_scatter_tensor(x @ wide, op, dim, group), None

        return function

    def run(name, function, x):
        torch._dynamo.reset()
        with torch.no_grad():
            theirs = function(x)
            with tsd.async_tp(group) as handle:
                ours = torch.compile(function)(x)
                finish()
                sites = [str(site) for site in handle.report()]
        error = max(relative(x, y) for x, y in zip(ours, theirs, strict=True) if x is not None)
        said.append((name, error, sites))

    for shape, dim, keep in [
        ((16, 64), 0, False), ((16, 64), 0, True), ((2, 16, 64), 0, False), ((2, 16, 64), 1, False),
        ((2, 16, 64), 1, True), ((16, 64), 1, False), ((2, 16, 64), 2, True),
    ]:  # fmt: skip
        if dim == len(shape) - 1:  # K is cut
            shape = (*shape[:-1], 64 // world)
        keeps = "kept" if keep else "dropped"
        run(f"gather of {list(shape)}, dim {dim}, whole {keeps}", gathered(dim, keep), random(20 + rank, *shape))
    run("gather, two products", several, random(20 + rank, 16, 64))
    for shape, dim, op in itertools.product(
        ((16 * world, 8 * world), (2 * world, 16 * world, 8 * world)), (0, 1), ("sum", "avg")
    ):
        if dim == len(shape) - 1 and 32 % world:
            continue
        run(f"scatter of {list(shape)}, dim {dim}, {op}", scattered(dim, op), random(20 + rank, *shape))
    return said


def modules(rank, world):
    """The two parallel Linears, eager, forward and backward, beside one GPU's in float32; and the plans of both."""
    tokens, dim, hidden = 512, 1024, 2048
    whole = [nn.Linear(dim, hidden, device="cuda"), nn.Linear(hidden, dim, device="cuda")]
    torch.manual_seed(1)
    for x in itertools.chain(*(w.parameters() for w in whole)):
        nn.init.normal_(x, std=0.02)
    up = tsd.ColumnParallelLinear.of(whole[0].to(BF16), activation="silu")
    down = tsd.RowParallelLinear.of(whole[1].to(BF16))
    x = random(30 + rank, tokens // world, dim).requires_grad_()
    every = torch.cat([random(30 + r, tokens // world, dim) for r in range(world)]).float().requires_grad_()
    weights = [w.detach().float().requires_grad_() for w in (*whole[0].parameters(), *whole[1].parameters())]
    exact = nn.functional.linear(nn.functional.silu(nn.functional.linear(every, *weights[:2])), *weights[2:])
    grad = random(77, tokens, dim).float() / 32
    exact.backward(grad)
    mine = slice(rank * tokens // world, (rank + 1) * tokens // world)
    part = slice(rank * hidden // world, (rank + 1) * hidden // world)
    for _ in range(3):  # as steps of training are, without a barrier between
        for p in (x, up.weight, down.weight, up.bias):
            p.grad = None
        out = down(up(x))
        out.backward(grad[mine].to(BF16))
    finish()
    pairs = [
        (out, exact[mine]), (x.grad, every.grad[mine]), (up.weight.grad, weights[0].grad[part]),
        (up.bias.grad, weights[1].grad[part]), (down.weight.grad, weights[2].grad[:, part]),
    ]  # fmt: skip
    plans = [
        tsd.plan_all_gather_matmul(x.detach(), up.weight.detach().t()).explain(),
        tsd.plan_matmul_reduce_scatter(up(x).detach(), down.weight.detach().t()).explain(),
    ]
    return [relative(ours.float(), theirs) for ours, theirs in pairs], plans
