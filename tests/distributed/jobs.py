"""What ranks do in the tests of the ops across ranks. Each rank can make the random inputs of all ranks."""

from __future__ import annotations

import contextvars
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tilestream as ts
from rank_checks import Gathered, Summed, raised, same_on_every_rank
from small_tiles import use_small_tiles
from tilestream import distributed as tsd


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers on each rank."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype)


def gathers(rank, world, cases, group=None):
    """Each case against all shards side by side, multiplied by torch."""
    for shape, dim, columns, dtype, form, extra in cases:
        dtype, options = getattr(torch, dtype), dict(extra)
        bias, scaled = dtype if options.pop("bias", 0) else None, options.pop("scaled", "")
        data = Gathered.random(random, world, shape, dim, columns, dtype, bias=bias, scaled=scaled)
        a, outs = tsd.all_gather_matmul(
            data.shards[rank], data.bs, gather_dim=dim, form=form, return_a=True, group=group, **data.arguments(rank),
            **options,
        )  # fmt: skip
        data.check(outs, a, options.get("activation"))
    return True


def scatters(rank, world, cases, group=None):
    """Each case against the sum of all ranks' products in float64; twice, with the same bits."""
    for rows, dim, k, n, dtype, form, extra in cases:
        dtype, shape, options = getattr(torch, dtype), list(rows), dict(extra)
        shape[dim] *= world
        bias = dtype if options.pop("bias", 0) else None
        data = Summed.random(random, world, shape, k, n, dtype, bias=bias, k_contiguous=False, **options)
        a, b = data.operands[rank]
        if a.dim() > 2:  # no view has its rows, like what torch's compiler gathers along a later dimension
            a = a.transpose(0, 1).contiguous().transpose(0, 1)
        outs = [
            tsd.matmul_reduce_scatter(a, b, scatter_dim=dim, form=form, group=group, **data.arguments())
            for _ in range(2)
        ]
        assert outs[0].equal(outs[1]), "the second result has other bits"
        data.check(outs[0], (rows, dim, dtype, form), dim=dim, rank=rank, frobenius=True)
    return True


def reduces(rank, world, cases, group=None):
    """Each case against the sum of all ranks' products in float64; the same on every rank."""
    for rows, k, n, dtype, extra in cases:
        dtype, options = getattr(torch, dtype), dict(extra)
        bias = torch.float32 if options.pop("bias", 0) else None
        data = Summed.random(random, world, rows, k, n, dtype, bias=bias, k_contiguous=False, **options)
        out = tsd.matmul_all_reduce(*data.operands[rank], group=group, **data.arguments())
        data.check(out, (rows, dtype, options))
        same_on_every_rank(out)
    return True


def reduce_gradients(rank, world, group=None):
    """Gradients against torch's on all ranks' data, and compiled to one graph."""
    operands = [[x.double().requires_grad_() for x in (random(r, 3, 4, 6), random(50 + r, 6, 5))] for r in range(world)]
    bias = random(9, 5).double().requires_grad_()
    a, b, own = (x.detach().clone().requires_grad_() for x in (*operands[rank], bias))
    factors = [random(200 + r, 1).double() for r in range(world)]
    compiled = torch.compile(
        lambda a, b, bias: tsd.matmul_all_reduce(a, b, bias=bias, reduce_op="avg", group=group),
        backend="aot_eager", fullgraph=True, disable=group is not None,
    )  # fmt: skip
    (factors[rank] * compiled(a, b, own).square().sum()).backward()
    out = sum(x @ w for x, w in operands) / world + bias
    expected = torch.autograd.grad(sum(factors) * out.square().sum(), operands[rank])
    for x, y in zip((a, b), expected, strict=True):
        assert torch.allclose(x.grad, y)
    (of_bias,) = torch.autograd.grad(factors[rank] * (out.detach() - bias.detach() + bias).square().sum(), bias)
    return torch.allclose(own.grad, of_bias)


def reduce_differs(rank, world):
    """Ranks give other numbers of rows: all raise, and the group stays usable."""
    a, b = torch.ones(4, 8), torch.ones(8, 6)
    said = raised(lambda: tsd.matmul_all_reduce(torch.ones(4 + rank, 8), b))
    assert tsd.matmul_all_reduce(a, b).eq(8 * world).all()
    return said, tsd.plan_matmul_all_reduce(a, b).explain()


def iterates(rank, world, count, group=None):
    """Many calls without a barrier in between, each on other data; some ranks are late."""
    b = random(1, 24, 20)
    for i in range(count):
        if i % 10 == rank:
            time.sleep(0.01)
        whole = random(1000 + i, 7 * world, 24)
        mine = whole[7 * rank : 7 * rank + 7]
        out = tsd.all_gather_matmul(mine, b, group=group, form="fused" if i % 3 else "unfused")
        assert torch.allclose(out, whole @ b, atol=1e-4), i
        part = tsd.matmul_reduce_scatter(whole, b, group=group, form="fused")
        assert torch.allclose(part, world * (mine @ b), atol=1e-3), i
    return True


def overlaps(rank, world, folder):
    """The last rank comes when the others have computed everything but its rows, and not before.

    So that it ends at all shows it: they tell it so, by a file each. A rank begins with its own rows and goes on with
    whatever is there, in arrival order: all but the last one's.
    """
    a, b = random(rank, 64, 32), random(99, 32, 64)
    flags = [Path(folder) / str(r) for r in range(world - 1)]
    end = time.monotonic() + 300

    def wait_for(happened, what):
        while not happened():
            assert time.monotonic() < end, what
            time.sleep(0.002)

    if rank == world - 1:
        wait_for(
            lambda: all(flag.exists() for flag in flags), "the others have not computed what they could without it"
        )
        return tsd.all_gather_matmul(a, b, form="fused").shape == (64 * world, 64)
    with pytest.MonkeyPatch.context() as patch, ts.trace.record() as recorder:
        small = use_small_tiles(patch)
        next(small)
        context = contextvars.copy_context()  # the recorder is this context's
        caller = threading.Thread(
            target=context.run, args=(tsd.all_gather_matmul, a, b), kwargs={"form": "fused", "deadline": 20}
        )
        caller.start()
        wait_for(lambda: recorder.launches, "no launch")
        launch = recorder.launches[0]
        before = launch.tiles * (world - 1) // world
        wait_for(lambda: launch.tiles_done == before, "tiles whose rows have arrived are not computed")
        flags[rank].touch()
        caller.join(300)
        assert not caller.is_alive()
        assert launch.tiles_done == launch.tiles >= 4 * world
        spans = [span for span in launch.spans if span.kind == "tile"]
        order = [spans[i * len(spans) // world].pm * 16 // 64 for i in range(world)]
        assert (order[0], order[-1]) == (rank, world - 1), "its own rows first, the late ones last"
    return True


def forgets(rank, world):
    """Nothing keeps a group, or its buffers, alive once it is destroyed."""
    import gc
    import weakref

    from tilestream.distributed import group_state

    group = dist.new_group(list(range(world)))
    tsd.all_gather_matmul(torch.ones(4, 8), torch.ones(8, 6), group=group, form="fused")
    state = weakref.ref(group_state.state_of("test", group))
    assert state() is not None
    dist.destroy_process_group(group)
    del group
    gc.collect()
    return state() is None


def gradients(rank, world, dim, group=None):
    """Gradients against torch's on all ranks' data."""
    shape = (3, 4, 6)
    for activation in (None, "relu", "silu"):
        shards = [random(r, *shape).double().requires_grad_() for r in range(world)]
        weights = [random(50 + i, 6, 5 + i).double().requires_grad_() for i in range(2)]
        bias = random(70, 5).double().requires_grad_()
        mine = shards[rank].detach().clone().requires_grad_()
        ours = [w.detach().clone().requires_grad_() for w in (*weights, bias)]
        a, outs = tsd.all_gather_matmul(
            mine, ours[:2], gather_dim=dim, bias=[ours[2], None], activation=activation, return_a=True, group=group
        )
        # Each rank has another loss, and their gradients add up.
        factors = [random(200 + r, 1).double() for r in range(world)]
        (factors[rank] * (outs[0].square().sum() + outs[1].sin().sum() + a.cos().sum())).backward()
        whole = torch.cat(shards, dim)
        act = {None: lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu}[activation]
        losses = act(whole @ weights[0] + bias).square().sum() + act(whole @ weights[1]).sin().sum()
        losses = losses + whole.cos().sum()
        expected = torch.autograd.grad(losses, [shards[rank], *weights, bias])
        assert torch.allclose(mine.grad, sum(factors) * expected[0])
        for x, y in zip(ours, expected[1:], strict=True):
            assert torch.allclose(x.grad, factors[rank] * y)
        scattered = random(300 + rank, 4 * world, 6).double().requires_grad_()
        weight = random(400 + rank, 6, 5).double().requires_grad_()
        out = tsd.matmul_reduce_scatter(scattered, weight, reduce_op="avg", group=group)
        (factors[rank] * out).sum().backward()
        grad = torch.cat([factors[r].expand(4, 5) for r in range(world)]) / world
        assert torch.allclose(scattered.grad, grad @ weight.detach().T)
        assert torch.allclose(weight.grad, scattered.detach().T @ grad)
    return True


def compiles(rank, world):
    """Under torch.compile, as one graph; the backend runs it unchanged."""
    group = dist.group.WORLD

    @torch.compile(backend="aot_eager", fullgraph=True)
    def block(x, w1, w2):
        return tsd.matmul_reduce_scatter(tsd.all_gather_matmul(x, w1, activation="relu", group=group), w2, group=group)

    x, w1, w2 = random(rank, 4, 8), random(31, 8, 12), random(32, 12, 8)
    whole = torch.cat([random(r, 4, 8) for r in range(world)])
    expected = world * torch.relu(whole[4 * rank : 4 * rank + 4] @ w1) @ w2
    return torch.allclose(block(x, w1, w2), expected, atol=1e-3)


def limits(rank, world):
    """A worker limit inside a function applies to all its matmuls, eager and compiled, and in the backward pass."""
    from tilestream.launch.cache import launch_cache
    from tilestream.ops import execute

    asked, plan_problem = [], execute.plan_problem

    def plan(*args, limit, **more):
        asked.append(limit)
        return plan_problem(*args, limit=limit, **more)

    def block(x, w1, w2):
        with ts.worker_limit(1):
            gathered = tsd.all_gather_matmul(x, w1, activation="gelu")
            return tsd.matmul_reduce_scatter(gathered, w2)

    execute.plan_problem = plan
    try:
        for how in (block, torch.compile(block, backend="aot_eager")):
            operands = random(rank, 4, 8), random(31, 8, 12), random(32, 12, 8)
            launch_cache.clear()  # equal products are not planned again
            out = how(*(x.requires_grad_() for x in operands))
            forward = len(asked)
            launch_cache.clear()
            out.sum().backward()
            assert 2 <= forward < len(asked), asked
            assert set(asked) == {1}, asked
            asked.clear()
    finally:
        execute.plan_problem = plan_problem
    return True


def explains(rank, world):
    """Plans in words."""
    a, b = torch.ones(4, 8), torch.ones(8, 6)
    return {
        "fused": tsd.plan_all_gather_matmul(a, b, form="fused").explain(),
        "unfused": tsd.plan_all_gather_matmul(a, b, form="unfused").explain(),
        "auto": tsd.plan_all_gather_matmul(torch.empty(4096, 4096), torch.empty(4096, 4096)).explain(),
        "small": tsd.plan_all_gather_matmul(a, b).explain(),
        "last": tsd.plan_all_gather_matmul(a, torch.ones(8 * world, 6), gather_dim=1, form="fused").explain(),
        "scatter": tsd.plan_matmul_reduce_scatter(torch.ones(world, 8), b, form="fused").explain(),
        "agreed": str(tsd.plan_all_gather_matmul(a, b).agreed),
    }


def empties(rank, world):
    """A shard of no rows, of no columns, of no K."""
    for rows, k, n in ((0, 8, 6), (3, 8, 0), (3, 0, 6)):
        out = tsd.all_gather_matmul(torch.ones(rows, k), torch.ones(k, n), form="fused")
        assert out.shape == (rows * world, n)
        assert out.eq(k).all()
        part = tsd.matmul_reduce_scatter(torch.ones(rows * world, k), torch.ones(k, n), form="fused")
        assert part.shape == (rows, n)
        assert part.eq(world * k).all()
    return True


def compare_strides(ops, rank, world, name):
    """The results have the strides, shapes and values of torch's own implementation by plain collectives."""
    from torch.distributed import _symmetric_memory as symmetric

    x, y, z = random(rank, 2, 3, 4, 16), random(rank, 3, 2, 4, 16), random(40 + rank, 2, 3 * world, 4 * world, 16)
    laid_out = x, y.transpose(0, 1), x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    b, k = random(50, 16, 8), random(51, 16 * world, 8)
    f8 = [tensor.to(torch.float8_e4m3fn) for tensor in (x, random(52, 32, 16))]
    scales, one, half = random(80 + rank, 2, 3, 4, 1).abs(), torch.ones(1, 32), torch.bfloat16
    calls = [
        *(("fused_all_gather_matmul", (a, [b, b[:, :5]], dim, name), {}) for a in laid_out for dim in (0, 1, 2)),
        *(("fused_all_gather_matmul", (x, [k], dim, name), {}) for dim in (3, -1)),
        *(("fused_matmul_reduce_scatter", (z, b, "sum", dim, name), {}) for dim in (1, 2, -1)),
        *(
            ("fused_all_gather_scaled_matmul",
             (f8[0], [f8[1].t()], scale, [of_b], dim, name, [None], [None], [half], [False]), {})
            for dim in (0, 1, 2) for scale, of_b in ((scales, one), (torch.ones(1), torch.ones(1)))
        ),
        ("fused_scaled_matmul_reduce_scatter",
         (z.to(torch.float8_e4m3fn).flatten(0, 2), f8[1].t(), torch.ones(1), torch.ones(1), "sum", 1, 0, name,
          [*z.shape[:-1], 32], None, None, half, False), {}),
    ]  # fmt: skip
    for op, given, options in calls:
        ours = torch.utils._pytree.tree_leaves(getattr(ops, op)(*given, **options))
        on_meta = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), given)
        scaled = "scaled" in op  # gloo sends no fp8
        fallback = getattr(symmetric, f"_{op}_fallback")
        theirs = torch.utils._pytree.tree_leaves(fallback(*(on_meta if scaled else given), **options))
        fakes = torch.utils._pytree.tree_leaves(getattr(ops, op)(*on_meta, **options))
        for mine, other, fake in zip(ours, theirs, fakes, strict=True):
            where = op, given[2:5]
            assert mine.shape == other.shape == fake.shape, where
            assert mine.stride() == other.stride() == fake.stride(), (where, mine.stride(), other.stride())
            assert scaled or torch.allclose(mine, other, atol=1e-4), where


def torch_ops(rank, world):
    """torch's fused ops, while a handle is open and only for its group, run on tilestream, with torch's results."""
    group = dist.group.WORLD
    name = group.group_name
    ops = torch.ops.symm_mem
    shards = [random(r, 2, 3, 16) for r in range(world)]
    b1, b2 = random(50, 16, 8), random(51, 16, 5)
    x, w = random(60 + rank, 2, 3 * world, 16), random(70 + rank, 16, 8)
    handle = tsd.async_tp(group)
    import torch._inductor.config as inductor

    assert inductor._micro_pipeline_tp
    assert type(inductor.post_grad_custom_post_pass).__name__ == "UnfusedPass"
    assert raised(lambda: tsd.async_tp(group)).startswith("ValueError: async_tp: group")
    for dim in (0, 1):
        whole = torch.cat(shards, dim)
        a, (c1, c2) = ops.fused_all_gather_matmul(shards[rank], [b1, b2], dim, name)
        assert a.equal(whole)
        assert torch.allclose(c1, whole @ b1, atol=1e-4)
        assert torch.allclose(c2, whole @ b2, atol=1e-4)
    none, _ = ops.fused_all_gather_matmul(shards[rank], [b1], 0, name, return_A=False)
    assert none is None
    # fp8, a scale a row: this rank's, or all ranks'.
    f8 = [x.flatten(0, 1).to(torch.float8_e4m3fn) for x in shards]
    w8, scales, of_b = b1.t().contiguous().to(torch.float8_e4m3fn).t(), random(80, 6 * world, 1).abs(), torch.ones(1, 8)
    exact = (torch.cat([x.float() for x in f8]) @ w8.float()) * scales
    for scale in (scales, scales.chunk(world)[rank]):
        _, (c,) = ops.fused_all_gather_scaled_matmul(
            f8[rank], [w8], scale, [of_b], 0, name, [None], [None], [torch.bfloat16], [False]
        )
        assert c.dtype == torch.bfloat16
        assert torch.allclose(c.float(), exact, rtol=2e-2, atol=2e-2)
    operands = [(random(60 + r, 2, 3 * world, 16), random(70 + r, 16, 8)) for r in range(world)]
    in_fp8 = [tuple(x.to(torch.float8_e4m3fn) for x in pair) for pair in operands]
    x8, w8 = in_fp8[rank][0].flatten(0, 1), in_fp8[rank][1].t().contiguous().t()
    parts, f8parts = [x @ w for x, w in operands], [x.float() @ w.float() for x, w in in_fp8]
    one = torch.ones(())
    for op in ("sum", "avg"):
        total, f8total = (sum(each) / (world if op == "avg" else 1) for each in (parts, f8parts))
        for dim in (1, 2, -1):  # columns are cut along the last
            mine = total.chunk(world, dim)[rank]
            assert torch.allclose(ops.fused_matmul_reduce_scatter(x, w, op, dim, name), mine, atol=1e-4)
        # The scaled op takes a matrix, and the shape that it had.
        scaled = ops.fused_scaled_matmul_reduce_scatter(
            x8, w8, one, one, op, 1, 0, name, [2, 3 * world, 8], None, None, torch.bfloat16, False
        )
        mine = f8total.chunk(world, 1)[rank]
        assert scaled.shape == mine.shape
        assert torch.allclose(scaled.float(), mine, rtol=5e-2, atol=0.2)
    sites = handle.report()
    columns = [site for site in sites if "columns are scattered" in site.why]
    assert sorted((site.calls, site.fused) for site in columns) == [(2, False), (2, False)]
    assert {site.op for site in sites} == {
        "fused_all_gather_matmul", "fused_all_gather_scaled_matmul", "fused_matmul_reduce_scatter",
        "fused_scaled_matmul_reduce_scatter",
    }  # fmt: skip
    assert sum(site.calls for site in sites) == 9 + 4
    assert all(site.why for site in sites)
    other = dist.new_group(list(range(world)))
    c = ops.fused_matmul_reduce_scatter(x, w, "sum", 1, other.group_name)  # torch's, with plain collectives
    assert torch.allclose(c, sum(parts).chunk(world, 1)[rank], atol=1e-4)
    assert sum(site.calls for site in handle.report()) == 9 + 4, "a group without a handle"
    handle.close()
    handle.close()
    assert inductor.post_grad_custom_post_pass is None
    assert "NotImplementedError" in raised(lambda: ops.fused_all_gather_matmul(shards[rank], [b1], 0, name))
    with tsd.async_tp(group):
        compare_strides(ops, rank, world, name)
    assert "fused_" in str(sites[0])
    assert "modelled: " in str(sites[0])
    return True


def fakes(rank, world):
    """The fakes have the shapes, dtypes and strides of the results."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    a, b = random(rank, 4, 3, 8).bfloat16(), random(9, 8, 6).bfloat16()
    calls = [
        lambda a, b: tsd.all_gather_matmul(a, [b, b[:, :2]], gather_dim=1, return_a=True),
        lambda a, b: tsd.all_gather_matmul(a, b, out_dtype=torch.float32),
        lambda a, b: tsd.matmul_reduce_scatter(a.repeat(world, 1, 1), b),
    ]
    for call in calls:
        real = torch.utils._pytree.tree_leaves(call(a, b))
        with FakeTensorMode() as mode:
            fake = torch.utils._pytree.tree_leaves(call(mode.from_tensor(a), mode.from_tensor(b)))
        for x, y in zip(real, fake, strict=True):
            assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride())
    return True


def parts(rank, world):
    """Shards in several chunks that do not divide them."""
    from tilestream.distributed import dispatch

    rates = dispatch.table()["rates"]["cpu"]
    before, rates["chunk_bytes"] = rates["chunk_bytes"], 256
    dispatch.table_hash.cache_clear()
    try:
        a, b = random(1, 37, 8), random(2, 8, 5)
        assert tsd.plan_all_gather_matmul(a, b, form="fused").chunks == 4
        gathers(
            rank, world, [((37, 8), 0, (5,), "float32", "fused", {}), ((2, 19, 8), 1, (5,), "float32", "fused", {})]
        )
        scatters(rank, world, [((37,), 0, 4, 8, "float32", "fused", {})])
    finally:
        rates["chunk_bytes"] = before
        dispatch.table_hash.cache_clear()
    return True


def autocasts(rank, world):
    """Autocast converts the operands before anything is sent; gradients have the operands' dtype."""
    x = random(rank, 4, 8).requires_grad_()
    w = random(50, 8, 6)
    whole = torch.cat([random(r, 4, 8) for r in range(world)])
    with torch.autocast("cpu", torch.bfloat16):
        y = tsd.all_gather_matmul(x, w, form="fused")
        z = tsd.matmul_reduce_scatter(y, w.t(), form="fused")
    assert y.dtype == z.dtype == torch.bfloat16
    assert torch.allclose(y.float(), whole @ w, rtol=5e-2, atol=0.1)
    z.float().sum().backward()
    return x.grad.dtype == torch.float32


def layers(rank, world, group=None):
    """A tensor-parallel MLP against the same on one rank: forward, and every gradient."""
    torch.manual_seed(0)
    up, down = torch.nn.Linear(8, 6 * world).double(), torch.nn.Linear(6 * world, 8).double()
    column = tsd.ColumnParallelLinear.of(up, dim=1, group=group, activation="gelu")
    row = tsd.RowParallelLinear.of(down, dim=1, group=group)
    whole = random(5, 2, 3 * world, 8).double().requires_grad_()
    mine = whole.detach().chunk(world, 1)[rank].clone().requires_grad_()
    expected = down(torch.nn.functional.gelu(up(whole)))
    out = row(column(mine))
    assert torch.allclose(out, expected.chunk(world, 1)[rank])
    expected.square().sum().backward()
    out.square().sum().backward()
    assert torch.allclose(mine.grad, whole.grad.chunk(world, 1)[rank])
    assert torch.allclose(column.weight.grad, up.weight.grad.chunk(world)[rank])
    assert torch.allclose(column.bias.grad, up.bias.grad.chunk(world)[rank])
    assert torch.allclose(row.weight.grad, down.weight.grad.chunk(world, 1)[rank])
    dist.all_reduce(row.bias.grad)  # of each rank's own rows
    assert torch.allclose(row.bias.grad, down.bias.grad)
    fresh = tsd.ColumnParallelLinear(8, 2 * world, bias=False, group=group)
    assert fresh(torch.ones(1, 8)).shape == (world, 2)
    for made, what in ((tsd.RowParallelLinear, "in"), (tsd.ColumnParallelLinear, "out")):
        text = raised(lambda: made(2 * world + 1, 2 * world + 1, group=group))  # noqa: B023
        wrong = f"{what}_features={2 * world + 1}; it must be a multiple of the {world} ranks"
        assert text == f"ValueError: {made.__name__}: {wrong}"
    return True


def invariants(rank, world):
    """Under the promise a row of a sum has the same bits however rows are cut."""
    a, b = random(rank, 12 * world, 40), random(99, 40, 32)
    with ts.invariant():
        whole = ts.distributed.matmul_reduce_scatter(a, b)
        parts = [ts.distributed.matmul_reduce_scatter(a[i::12].contiguous(), b) for i in range(0, 12, 5)]
        for i, part in zip(range(0, 12, 5), parts, strict=True):
            assert torch.equal(part[0], whole[i]), i
        shard = random(7 + rank, 9, 40)
        gathered = ts.distributed.all_gather_matmul(shard, b)
        assert torch.equal(gathered[9 * rank : 9 * rank + 9], ts.matmul(shard, b))
        if world > 1:
            with pytest.raises(NotImplementedError, match="adds in an order that depends on the rows"):
                ts.distributed.matmul_all_reduce(a, b)
        free = tsd.plan_matmul_all_reduce(a, b, invariant=False)
    tsd.matmul_all_reduce(a, b)
    assert not free.promise
    plans_with_the_promise(shard, a, b, world)
    return True


def plans_with_the_promise(shard, a, b, world):
    """``invariant=`` of a plan is the block around it."""
    for plan, rows in ((tsd.plan_all_gather_matmul, shard), (tsd.plan_matmul_reduce_scatter, a)):
        asked, free = plan(rows, b, invariant=True), plan(rows, b)
        with ts.invariant():
            assert plan(rows, b) == asked
            assert plan(rows, b, invariant=False) == free
        assert asked.promise
        assert not free.promise
        assert "the same bits for each row, whatever is beside it" in asked.explain()
        with pytest.raises(TypeError, match="invariant=1; it must be True, False, or None"):
            plan(rows, b, invariant=1)
    if world > 1:
        with pytest.raises(NotImplementedError, match="adds in an order that depends on the rows"):
            tsd.plan_matmul_all_reduce(a, b, invariant=True)
    assert not tsd.plan_matmul_all_reduce(a, b).fused
