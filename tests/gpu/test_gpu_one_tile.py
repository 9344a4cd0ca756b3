"""Programs with a tile, or a share of one, each: by the error rule, bit by bit, repeated, captured, side by side."""

from __future__ import annotations

import pytest
import torch
from gpu_runs import captured, nan, randn

import tilestream as ts
from error_rule import Maths, check
from tilestream.core.exchange import CLUSTERS
from tilestream.launch.cache import launch_cache
from tilestream.plan.plan import of_candidate
from tilestream.plan.policy import one_tile
from tilestream.plan.policy.one_tile import TILES

F16, BF16, E4M3 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
#: M, N, K, batch: ragged, of no multiples, with one row, one column, a K that is shorter than a step, and a long one.
SHAPES = [
    (128, 152, 32, 1), (65, 33, 129, 1), (1, 640, 1000, 1), (300, 1, 77, 1), (17, 1030, 3, 1), (64, 96, 4096, 1),
    (40, 72, 200, 5),
]  # fmt: skip
KINDS = ("static", "stream_k")


def operands(m, n, k, batch=1, dtype=BF16, layout="nt"):
    def make(rows, columns, letter):
        extents = (rows, columns) if letter == "n" else (columns, rows)
        x = randn(*((batch,) if batch > 1 else ()), *extents, dtype=dtype)
        return x if letter == "n" else x.mT

    return make(m, k, layout[0]), make(k, n, layout[1])


def plan_of(a, b, layout="nt", **how):
    batch = a.shape[0] if a.dim() == 3 else 1
    return ts.plan(
        a.shape[-2], b.shape[-1], a.shape[-1], batch=batch, dtype=a.dtype, layout=layout, device="cuda",
        variant="one_tile", **how,
    )  # fmt: skip


def made_by(a, b, layout="nt", **how):
    """A product into NaN, or None where no such tile or share fits."""
    try:
        plan = plan_of(a, b, layout, **how)
    except NotImplementedError:
        return None
    out = nan(*a.shape[:-1], b.shape[-1], dtype=BF16 if a.dtype == E4M3 else a.dtype)
    return plan.run(a, b, out=out)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_tile_by_the_error_rule(shape, layout):
    ran = 0
    for dtype in (F16, BF16):
        a, b = operands(*shape, dtype=dtype, layout=layout)
        for tile in {row[:2] for row in TILES[2]}:
            for kind in KINDS:
                out = made_by(a, b, layout, tile=tile, schedule=kind)
                if out is not None:
                    check(out, Maths(a, b))
                    ran += 1
    assert ran


def cut(a, b, layout="nt"):
    """By number of parts, plans that cut K into as many: one of each tile."""
    problem = plan_of(a, b, layout).problem
    device, found = ts.plan(1, 1, 1, dtype=BF16, device="cuda").device, {}
    for one in one_tile.candidates(problem, device, device.workers):
        parts = one.schedule.num_shares // one.tiles if one.kind == "stream_k" else 1
        plan = of_candidate(problem, device, "portable", one, "a test's")
        found.setdefault(parts, {}).setdefault(one.tile, plan)
    return {parts: [*plans.values()] for parts, plans in found.items()}


CUT = [(65, 33, 4100, 1, BF16), (130, 96, 4096, 2, F16), (90, 208, 4608, 1, E4M3)]


@pytest.mark.parametrize(("m", "n", "k", "batch", "dtype"), CUT, ids=str)
def test_clusters_add_as_global_memory_does(m, n, k, batch, dtype, monkeypatch):
    """In 2, 4 and 8 parts: the bits of the parts that go through global memory."""
    a, b = operands(m, n, k, batch, dtype=dtype)
    plans = cut(a, b)
    assert set(plans) >= set(CLUSTERS)
    for plan in (plan for parts in CLUSTERS for plan in plans[parts]):
        made = plan.run(a, b, out=nan(*a.shape[:-1], n, dtype=BF16 if dtype == E4M3 else dtype))
        check(made, Maths(a, b, out_dtype=made.dtype))
        with monkeypatch.context() as patched:
            launch_cache.clear()
            patched.setattr("tilestream.launch.portable.arguments.cluster_of", lambda schedule: 1)
            assert torch.equal(plan.run(a, b), made), plan.label
        launch_cache.clear()


def test_clusters_with_an_epilogue_and_a_strided_output():
    a, b = operands(70, 88, 2200)
    bias, residual = randn(88), randn(70, 88)
    for parts, plans in cut(a, b).items():
        if parts in CLUSTERS:
            store = nan(70, 2 * 88)
            out = plans[0].run(a, b, bias=bias, residual=residual, activation="gelu", out=store[:, ::2])
            check(out, Maths(a, b, bias, residual, activation="gelu"))
            assert store[:, 1::2].isnan().all()


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("pads", [(8, 1), (1, 8), (2, 8), (4, 1)], ids=str)
def test_each_operand_in_vectors_of_its_own(pads, layout):
    """Rows of one are multiples of 8, 4 or 2 elements, those of the other of fewer."""

    def make(rows, columns, letter, pad):
        extents = (rows, columns) if letter == "n" else (columns, rows)
        x = randn(extents[0], 16 * extents[1] + pad)[:, : extents[1]]
        return x if letter == "n" else x.mT

    for m, n, k in ((72, 40, 200), (33, 1030, 97), (8, 8, 1000)):
        a, b = make(m, k, layout[0], pads[0]), make(k, n, layout[1], pads[1])
        check(ts.matmul(a, b), Maths(a, b))


@pytest.mark.parametrize("shape", [(128, 160, 128, 1), (33, 1040, 4096, 1), (300, 48, 512, 1)], ids=str)
def test_8_bits(shape):
    a, b = operands(*shape, dtype=E4M3)
    ran = 0
    for tile in {row[:2] for row in TILES[1]}:
        for kind in KINDS:
            out = made_by(a, b, tile=tile, schedule=kind)
            if out is not None:
                check(out, Maths(a, b, out_dtype=BF16))
                ran += 1
    assert ran


def test_16_bits_have_the_bits_of_the_hopper_kernel():
    """So `ts.invariant` may take them: whole tiles add as all others do."""
    ran = 0
    for shape, layout in (((128, 152, 512, 1), "nt"), ((200, 96, 1000, 1), "tt"), ((40, 72, 208, 3), "nn")):
        a, b = operands(*shape, layout=layout)
        batch = shape[3]
        whole = ts.plan(*shape[:3], batch=batch, dtype=BF16, layout=layout, device="cuda", backend="hopper",
                        schedule="static").run(a, b)  # fmt: skip
        for tile in {row[:2] for row in TILES[2]}:
            out = made_by(a, b, layout, tile=tile, schedule="static")
            assert out is None or torch.equal(out, whole), tile
            ran += out is not None
    assert ran


def test_8_bits_of_64_rows_have_the_bits_of_the_hopper_kernel():
    a, b = operands(130, 96, 512, dtype=E4M3)
    whole = ts.plan(130, 96, 512, dtype=E4M3, layout="nt", device="cuda", backend="hopper", schedule="static").run(a, b)
    made = [made_by(a, b, tile=tile, schedule="static") for tile in {row[:2] for row in TILES[1]} if tile[0] >= 64]
    assert sum(out is not None for out in made) > 1
    assert all(out is None or torch.equal(out, whole) for out in made)


def test_a_k_step_wider_than_31_bits():
    """Rows of K that lie 2^24 elements apart, in steps of 128."""
    store = torch.empty(160, 2**24, dtype=BF16, device="cuda")
    store[:, :64] = randn(160, 64)
    check(ts.matmul(store[:, :64].mT, b := randn(160, 48)), Maths(store[:, :64].mT, b))
    check(ts.matmul(a := randn(40, 160), store[:, :64]), Maths(a, store[:, :64]))


def test_small_products_take_it_and_the_promise_keeps_their_bits():
    a, b = operands(128, 152, 32)
    assert "one_tile" in ts.plan(128, 152, 32, dtype=BF16, layout="nt", device="cuda").label
    out = ts.matmul(a, b)
    check(out, Maths(a, b))
    with ts.invariant():
        promised = ts.matmul(a, b)
        for rows in (1, 17, 64, 128):
            assert torch.equal(ts.matmul(a[:rows], b), promised[:rows])


def test_views_and_an_epilogue():
    base = randn(80, 300)
    a, b = base[3:67, 5:133], randn(200, 128).mT[:, 1::2]
    bias, residual = randn(100), randn(64, 100)
    out = ts.matmul(a, b, bias=bias, residual=residual, activation="gelu")
    check(out, Maths(a, b, bias, residual, activation="gelu"))


@pytest.mark.parametrize("kind", KINDS)
def test_repeats_and_replays_have_the_same_bits(kind):
    a, b = operands(130, 90, 4096)
    plan = plan_of(a, b, schedule=kind, tile=(64, 64))
    first = plan.run(a, b)
    check(first, Maths(a, b))
    for _ in range(50):
        assert torch.equal(plan.run(a, b), first)
    with captured() as graph:
        replayed = plan.run(a, b)
    for _ in range(20):
        replayed.fill_(float("nan"))
        graph.replay()
        assert torch.equal(replayed, first)
        assert torch.equal(plan.run(a, b), first)


@pytest.mark.parametrize("kind", KINDS)
def test_two_streams_at_once(kind):
    """Each stream has counts and partial results of its own."""
    pairs = [operands(130, 90, 4096), operands(64, 200, 8192)]
    plans = [plan_of(a, b, schedule=kind, tile=(64, 64)) for a, b in pairs]
    want = [plan.run(a, b) for plan, (a, b) in zip(plans, pairs, strict=True)]
    streams, made = [torch.cuda.Stream() for _ in pairs], []
    torch.cuda.synchronize()
    for _ in range(30):
        for stream, plan, (a, b) in zip(streams, plans, pairs, strict=True):
            with torch.cuda.stream(stream):
                made.append(plan.run(a, b))
    torch.cuda.synchronize()
    for i, out in enumerate(made):
        assert torch.equal(out, want[i % 2])
