"""The collectives that torch's compiler leaves unfused, found in its graphs, with the reason for each."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.fx.experimental.proxy_tensor import make_fx

from tilestream.distributed.async_tp import AsyncTP
from tilestream.distributed.unfused_report import UnfusedPass, unfused_collectives

module = importlib.import_module("tilestream.distributed.async_tp")  # the package has the function by that name
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def group():
    """Two ranks, one of which is here: collectives are traced, and none is run."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


X, W, BIAS = torch.randn(8, 4), torch.randn(4, 6), torch.randn(6)


def unfused(function, *given):
    graph = make_fx(function, tracing_mode="fake")(*given).graph
    return [(place.op, place.what, place.why) for place in unfused_collectives(graph)]


def test_a_gather_that_no_matmul_reads(group):
    found = unfused(lambda x: collectives.all_gather_tensor(x, 0, group).relu(), X)
    assert found == [("all_gather_into_tensor", "[8, 4], float32", "no matmul reads what is gathered")]


def test_a_gather_before_a_bias(group):
    [(_, _, why)] = unfused(lambda x, w, c: torch.addmm(c, collectives.all_gather_tensor(x, 0, group), w), X, W, BIAS)
    assert "adds a bias in the same op (addmm)" in why


def test_ops_between_a_gather_and_its_matmul_are_named(group):
    [(_, what, why)] = unfused(lambda x, w: collectives.all_gather_tensor(x, 1, group) @ w, X[None], W)
    assert what == "[1, 8, 4], float32"
    assert why.startswith("torch's pass did not take it; between it and the matmul (")
    assert why.endswith("view")


def test_a_sum_without_a_matmul(group):
    [(op, _, why)] = unfused(lambda x: collectives.reduce_scatter_tensor(x.relu(), "sum", 0, group), X)
    assert (op, why) == ("reduce_scatter_tensor", "no matmul makes what is scattered")


def test_a_sum_of_several_products(group):
    def function(x, w, v):
        return collectives.reduce_scatter_tensor((x @ w).double().float() + x @ v, "sum", 0, group)

    [(_, _, why)] = unfused(function, X, W, W)
    assert why.startswith("what is scattered is a sum, of 2 products among other things: torch's pass knows a product")
    [(_, _, why)] = unfused(lambda x, w: collectives.reduce_scatter_tensor(x @ w + 1, "sum", 0, group), X, W)
    assert "of 1 product among" in why


@pytest.mark.parametrize(
    ("function", "products"),
    [
        (lambda x, w, v, z: x @ w + x @ v, 2),
        (lambda x, w, v, z: x @ w + x @ v + x @ (w - v), 3),
        (lambda x, w, v, z: x @ w + z, 1),
        (lambda x, w, v, z: (x @ w - x @ v) * 2, 2),
    ],
)
@pytest.mark.parametrize("shape", [(8, 4), (2, 8, 4)], ids=["rows", "batches"])
def test_a_sum_as_the_compiler_rewrites_it(group, function, products, shape):
    """It fuses a matmul and an addition, if the operands are matrices."""
    from torch._inductor import config

    found = []

    def scattered(x, w, v, z):
        return collectives.reduce_scatter_tensor(function(x, w, v, z), "sum", len(shape) - 2, group)

    torch._dynamo.reset()
    with config.patch(post_grad_custom_post_pass=UnfusedPass(found.append), force_disable_caches=True):
        torch.compile(scattered)(torch.randn(shape), W, torch.randn(4, 6), torch.randn(*shape[:-1], 6))
    [place] = found
    assert f"a sum, of {products} product{'s' * (products != 1)} among" in place.why


def test_a_product_that_is_scaled_before_it_is_scattered(group):
    [(_, _, why)] = unfused(lambda x, w: collectives.reduce_scatter_tensor((x @ w) * 2, "sum", 0, group), X, W)
    assert why == "torch's pass did not take it; between it and the matmul (mm) there is: mul"


def test_a_scattered_bias(group):
    [(_, _, why)] = unfused(
        lambda x, w, c: collectives.reduce_scatter_tensor(torch.addmm(c, x, w), "sum", 0, group), X, W, BIAS
    )
    assert why.startswith("the matmul adds a bias in the same op (addmm)")


def test_a_collective_without_a_known_shape(group):
    traced = make_fx(lambda x: collectives.all_gather_tensor(x.relu(), 0, group), tracing_mode="fake")(X).graph
    [gather] = [node for node in traced.nodes if "all_gather" in node.name]
    del gather.args[0].meta["val"]
    [place] = unfused_collectives(traced)
    assert place.what == "to [16, 4], float32"
    del gather.meta["val"]
    [place] = unfused_collectives(traced)
    assert place.what == "to ?"


def test_a_product_with_other_readers(group):
    def function(x, w):
        product = x @ w
        return collectives.reduce_scatter_tensor(product, "sum", 0, group), product.relu()

    [(_, _, why)] = unfused(function, X, W)
    assert why == "something else reads the product too, which the fused op does not give"


def test_an_all_reduced_product(group):
    [(op, _, why)] = unfused(lambda x, w: collectives.all_reduce(x @ w, "sum", group), X, W)
    assert op == "all_reduce"
    assert "SequenceParallel" in why
    [(op, _, _)] = unfused(lambda x, w, v: collectives.all_reduce(x @ w + x @ v, "sum", group), X, W, W)
    assert op == "all_reduce"
    assert unfused(lambda x: collectives.all_reduce(x, "sum", group), X) == []


def test_a_graph_without_collectives(group):
    assert unfused(lambda x, w: x @ w, X, W) == []


def test_the_report_lists_them_behind_the_calls(group, monkeypatch):
    handle = AsyncTP(group.group_name)
    monkeypatch.setattr(module, "_open", {group.group_name: handle})
    handle._count("fused_all_gather_matmul", "[8, 4]", "a test")
    graph = make_fx(lambda x: collectives.all_gather_tensor(x, 0, group).relu(), tracing_mode="fake")(X).graph
    seen = []
    look = UnfusedPass(module._report_unfused, before=seen.append)
    look(graph)
    look(graph)
    assert seen == [graph, graph]
    assert [str(site) for site in handle.report()] == [
        "fused_all_gather_matmul [8, 4]: 1 call, unfused: a test",
        "all_gather_into_tensor [8, 4], float32: left in 2 places: no matmul reads what is gathered",
    ]
    monkeypatch.setattr(module, "_open", {})
    look(graph)
    assert handle.report()[-1].calls == 2, "a closed group's"


def test_the_pass_runs_behind_the_compilers_own(group):
    from torch._inductor import config
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    found = []
    traced = make_fx(lambda x: collectives.all_gather_tensor(x, 0, group).relu(), tracing_mode="fake")(X)
    with config.patch(post_grad_custom_post_pass=UnfusedPass(found.append)):
        post_grad_passes(traced, True)
    assert [place.op for place in found] == ["all_gather_into_tensor"]


def test_the_key_in_the_compilers_cache():
    assert UnfusedPass(print).uuid() == ("tilestream.unfused_report",)
    assert UnfusedPass(print, before=UnfusedPass(print)).uuid() == (
        "tilestream.unfused_report",
        "('tilestream.unfused_report',)",
    )
    assert UnfusedPass(print, before=lambda graph: None).uuid() is None
