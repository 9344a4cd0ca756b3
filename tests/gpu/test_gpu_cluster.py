"""Clusters that share a tile's K: by the error rule, bit by bit, repeated, captured, on two streams at once."""

from __future__ import annotations

import pytest
import torch
from gpu_runs import ON_HOPPER, captured, nan, randn

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

import tilestream as ts
from error_rule import Maths, check
from tilestream.core.exchange import CLUSTERS
from tilestream.plan.plan import of_candidate
from tilestream.plan.policy import hopper_cluster

F16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
#: M, N, K, batch: ragged in all extents, one row, one column, a K whose last part is short, and of whole tiles.
SHAPES = [
    (64, 256, 4096, 1), (65, 264, 4104, 1), (8, 640, 3080, 1), (1000, 8, 2056, 1), (128, 384, 8200, 1),
    (72, 136, 5128, 3),
]  # fmt: skip


def operands(m, n, k, batch=1, dtype=BF16, layout="nt"):
    def make(rows, columns, letter):
        extents = (rows, columns) if letter == "n" else (columns, rows)
        x = randn(*((batch,) if batch > 1 else ()), *extents, dtype=dtype)
        return x if letter == "n" else x.mT

    return make(m, k, layout[0]), make(k, n, layout[1])


def every(a, b, layout="nt", **how):
    """Plans by number of parts: of each tile, either way round, one."""
    batch = a.shape[0] if a.dim() == 3 else 1
    asked = ts.plan(
        a.shape[-2], b.shape[-1], a.shape[-1], batch=batch, dtype=a.dtype, layout=layout, device="cuda", **how
    )  # fmt: skip
    problem, device, found = asked.problem, asked.device, {}
    for one in hopper_cluster.candidates(problem, device, device.workers, kinds=("stream_k",)):
        plan = of_candidate(problem, device, "hopper", one, "a test's")
        found.setdefault(one.workers // one.tiles, {})[one.tile, one.swap_ab, one.stages] = plan
    return {parts: [*plans.values()] for parts, plans in found.items()}


def all_of(plans):
    return [plan for of_parts in plans.values() for plan in of_parts]


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_by_the_error_rule(shape, layout):
    for dtype in (F16, BF16):
        a, b = operands(*shape, dtype=dtype, layout=layout)
        plans = every(a, b, layout)
        assert set(plans) >= {2, 4}
        for plan in all_of(plans):
            out = plan.run(a, b, out=nan(*a.shape[:-1], b.shape[-1], dtype=dtype))
            check(out, Maths(a, b))


@pytest.mark.parametrize("shape", [(64, 256, 4096, 1), (72, 136, 5136, 3), (16, 528, 4112, 1)], ids=str)
def test_8_bits(shape):
    a, b = operands(*shape, dtype=E4M3)
    for plan in all_of(every(a, b)):
        out = plan.run(a, b, out=nan(*a.shape[:-1], b.shape[-1], dtype=BF16))
        check(out, Maths(a, b, out_dtype=BF16))


@pytest.mark.parametrize("parts", CLUSTERS)
def test_the_sum_is_that_of_the_parts_in_order(parts):
    """Bit by bit: each part's product by itself, in float32, added from the first to the last."""
    a, b = operands(64, 128, parts * 1024)
    for plan in every(a, b, out_dtype=torch.float32)[parts]:
        out = plan.run(a, b, out=nan(64, 128, dtype=torch.float32))
        steps = plan.schedule.grid.k_steps // parts * plan.block[2]
        total = torch.zeros(64, 128, device="cuda")
        for i, k in enumerate(range(0, parts * 1024, steps)):
            whole = ts.plan(64, 128, steps, dtype=BF16, layout="nt", out_dtype=torch.float32, device="cuda",
                            backend="hopper", variant="single", schedule="static")  # fmt: skip
            product = whole.run(a[:, k : k + steps].contiguous(), b[k : k + steps].t().contiguous().t())
            total = product if i == 0 else total + product
        assert torch.equal(out, total), plan.label


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("store", ["rows", "every second", "columns", "odd"])
def test_epilogues_and_outputs(store, activation):
    a, b = operands(136, 264, 4104)
    bias, residual = randn(264), randn(136, 264)
    for plan in all_of(every(a, b)):
        out = {
            "rows": lambda: nan(136, 264), "every second": lambda: nan(136, 528)[:, ::2],
            "columns": lambda: nan(264, 136).t(), "odd": lambda: nan(136, 267)[:, 1:265],
        }[store]()  # fmt: skip
        made = plan.run(a, b, bias=bias, residual=residual, alpha=0.5, beta=2.0, activation=activation, out=out)
        check(made, Maths(a, b, bias, residual, alpha=0.5, beta=2.0, activation=activation))


def test_scales_of_rows():
    a, b = operands(80, 272, 4112, dtype=E4M3)
    scale_a, scale_b = torch.rand(80, 1, device="cuda") + 0.5, torch.rand(1, 272, device="cuda") + 0.5
    for plan in all_of(every(a, b, scales="row")):
        out = plan.run(a, b, scale_a=scale_a, scale_b=scale_b, out=nan(80, 272, dtype=BF16))
        check(out, Maths(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=BF16))


def test_views_with_offsets_and_gaps():
    a, b = randn(80, 9000)[3:67, 8:4104], randn(300, 9000)[7:263, 16:4112].t()
    for plan in all_of(every(a, b)):
        check(plan.run(a, b, out=nan(64, 256)), Maths(a, b))


def test_repeats_and_replays_have_the_same_bits():
    a, b = operands(64, 512, 8192)
    for plan in all_of(every(a, b)):
        first = plan.run(a, b)
        check(first, Maths(a, b))
        for _ in range(50):
            assert torch.equal(plan.run(a, b), first)
        out = nan(64, 512)
        with captured() as graph:
            plan.run(a, b, out=out)
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, first)


def test_two_streams_at_once():
    """Clusters of both share SMs; a plan is one launch object, used from both."""
    problems = [operands(64, 512, 8192), operands(128, 256, 4096)]
    plans = [all_of(every(a, b))[:4] for a, b in problems]
    wanted = [[plan.run(a, b) for plan in found] for (a, b), found in zip(problems, plans, strict=True)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(30):
        outs = []
        for (a, b), found, stream in zip(problems, plans, streams, strict=True):
            with torch.cuda.stream(stream):
                outs.append([plan.run(a, b) for plan in found])
        torch.cuda.synchronize()
        for got, want in zip(outs, wanted, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_beside_kernels_that_hold_sms():
    """Clusters wait until SMs that lie together are free, and end."""
    a, b = operands(64, 512, 8192)
    large, stream = randn(4096, 4096), torch.cuda.Stream()
    for plan in all_of(every(a, b)):
        wanted = plan.run(a, b)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(8):
                torch.mm(large, large)
        made = [plan.run(a, b) for _ in range(8)]
        torch.cuda.synchronize()
        assert all(torch.equal(one, wanted) for one in made)


def test_forced_by_name():
    a, b = operands(64, 2048, 8192)
    plan = ts.plan(64, 2048, 8192, dtype=BF16, layout="nt", device="cuda", variant="cluster")
    assert plan.variant == "cluster"
    check(plan.run(a, b), Maths(a, b))
