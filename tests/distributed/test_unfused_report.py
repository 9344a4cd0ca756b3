"""The collectives that torch's compiler leaves unfused, found in its graphs, with the reason for each."""

from __future__ import annotations

import importlib
import re

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


def gathered(x, dim=0):
    return collectives.all_gather_tensor(x, dim, dist.group.WORLD)


def scattered(x, dim=0):
    return collectives.reduce_scatter_tensor(x, "sum", dim, dist.group.WORLD)


def reduced(x):
    return collectives.all_reduce(x, "sum", dist.group.WORLD)


def read_twice(x, w):
    product = x @ w
    return scattered(product), product.relu()


GATHER, SCATTER, REDUCE = "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"
ROWS = "[8, 4], float32"


@pytest.mark.parametrize(
    ("function", "given", "op", "what", "why"),
    [
        (lambda x: gathered(x).relu(), (X,), GATHER, ROWS, "^no matmul reads what is gathered$"),
        (
            lambda x, w, c: torch.addmm(c, gathered(x), w), (X, W, BIAS), GATHER, ROWS,
            r"^the matmul adds a bias in the same op \(addmm\)",
        ),
        (
            lambda x, w: gathered(x, 1) @ w, (X[None], W), GATHER, "[1, 8, 4], float32",
            r"^torch's pass did not take it; between it and the matmul \(.*view$",
        ),
        (lambda x: scattered(x.relu()), (X,), SCATTER, ROWS, "^no matmul makes what is scattered$"),
        (
            lambda x, w, v: scattered((x @ w).double().float() + x @ v), (X, W, W), SCATTER, "",
            "^what is scattered is a sum, of 2 products among other things: torch's pass knows a product",
        ),
        (lambda x, w: scattered(x @ w + 1), (X, W), SCATTER, "", "of 1 product among"),
        (
            lambda x, w: scattered((x @ w) * 2), (X, W), SCATTER, "",
            r"^torch's pass did not take it; between it and the matmul \(mm\) there is: mul$",
        ),
        (
            lambda x, w, c: scattered(torch.addmm(c, x, w)), (X, W, BIAS), SCATTER, "",
            r"^the matmul adds a bias in the same op \(addmm\)",
        ),
        (read_twice, (X, W), SCATTER, "", "^something else reads the product too, which the fused op does not give$"),
        (lambda x, w: reduced(x @ w), (X, W), REDUCE, "", "SequenceParallel"),
        (lambda x, w, v: reduced(x @ w + x @ v), (X, W, W), REDUCE, "", "SequenceParallel"),
    ],
)  # fmt: skip
def test_the_reason_why_a_collective_is_unfused(group, function, given, op, what, why):
    [found] = unfused_collectives(traced(function, *given))
    assert found.op == op
    assert found.what == what or not what
    assert re.search(why, found.why), found.why


@pytest.mark.parametrize(("function", "given"), [(lambda x: reduced(x), (X,)), (lambda x, w: x @ w, (X, W))])
def test_what_no_matmul_could_overlap_is_not_reported(group, function, given):
    assert list(unfused_collectives(traced(function, *given))) == []


def traced(function, *given):
    return make_fx(function, tracing_mode="fake")(*given).graph


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

    def sums(x, w, v, z):
        return scattered(function(x, w, v, z), len(shape) - 2)

    torch._dynamo.reset()
    with config.patch(post_grad_custom_post_pass=UnfusedPass(found.append), force_disable_caches=True):
        torch.compile(sums)(torch.randn(shape), W, torch.randn(4, 6), torch.randn(*shape[:-1], 6))
    [place] = found
    assert f"a sum, of {products} product{'s' * (products != 1)} among" in place.why


def test_a_collective_without_a_known_shape(group):
    graph = traced(lambda x: gathered(x.relu()), X)
    [gather] = [node for node in graph.nodes if "all_gather" in node.name]
    del gather.args[0].meta["val"]
    [place] = unfused_collectives(graph)
    assert place.what == "to [16, 4], float32"
    del gather.meta["val"]
    [place] = unfused_collectives(graph)
    assert place.what == "to ?"


def test_the_report_lists_them_behind_the_calls(group, monkeypatch):
    handle = AsyncTP(group.group_name)
    monkeypatch.setattr(module, "_open", {group.group_name: handle})
    handle._count("fused_all_gather_matmul", torch.empty(8, 4), [torch.empty(4, 2)], 0, "a test")
    graph = traced(lambda x: gathered(x).relu(), X)
    seen = []
    look = UnfusedPass(module._report_unfused, before=seen.append)
    look(graph)
    look(graph)
    assert seen == [graph, graph]
    assert [str(site) for site in handle.report()] == [
        "fused_all_gather_matmul [8, 4] @ [4, 2], dim 0, float32: 1 call, unfused: a test",
        "all_gather_into_tensor [8, 4], float32: left in 2 places: no matmul reads what is gathered",
    ]
    monkeypatch.setattr(module, "_open", {})
    look(graph)
    assert handle.report()[-1].calls == 2, "a closed group's"


def test_the_pass_runs_behind_the_compilers_own(group):
    from torch._inductor import config
    from torch._inductor.fx_passes.post_grad import post_grad_passes

    found = []
    module = make_fx(lambda x: gathered(x).relu(), tracing_mode="fake")(X)
    with config.patch(post_grad_custom_post_pass=UnfusedPass(found.append)):
        post_grad_passes(module, True)
    assert [place.op for place in found] == ["all_gather_into_tensor"]


def test_the_key_in_the_compilers_cache():
    assert UnfusedPass(print).uuid() == ("tilestream.unfused_report",)
    assert UnfusedPass(print, before=UnfusedPass(print)).uuid() == (
        "tilestream.unfused_report",
        "('tilestream.unfused_report',)",
    )
    assert UnfusedPass(print, before=lambda graph: None).uuid() is None
