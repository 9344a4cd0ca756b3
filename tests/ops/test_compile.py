"""torch.compile(fullgraph=True), mostly on the ``aot_eager`` backend: it traces as inductor does, and needs no g++."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

import tilestream as ts
from error_rule import Maths, check, check_gradient, nans, rand
from streaming import Feeder, late
from tilestream.ops import native


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(model, x, w, bias, grad):
    leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
    y = model(*leaves)
    y.backward(grad.to(y.dtype))
    return y, [t.grad for t in leaves]


def test_what_waits_or_publishes_is_left_out_of_the_compilers_own_cuda_graphs():
    """Its signals and copies are issued outside of them; ranks make memory at their first call, which outlives it."""
    for module in ("library", "moe"):
        pytest.importorskip(f"tilestream.distributed.{module}", exc_type=ImportError)
    ops = [getattr(torch.ops.tilestream, name) for name in dir(torch.ops.tilestream)]
    # The extension's ops have no overload of that name, and need none: no graph holds them.
    packets = [op for op in ops if isinstance(op, torch._ops.OpOverloadPacket) and "default" in op.overloads()]
    found = {op: op.default for op in packets}
    alone = {
        op for op, one in found.items()
        if any(argument.name.endswith("arrival") or argument.name == "publish" for argument in one._schema.arguments)
    }  # fmt: skip
    assert len(alone) >= 5
    tagged = {op for op, one in found.items() if torch.Tag.cudagraph_unsafe in one.tags}
    assert alone <= tagged
    across_ranks = {op for op, one in found.items() if {"group", "form"} <= {x.name for x in one._schema.arguments}}
    assert len(across_ranks) == 5
    assert tagged == alone | across_ranks


def model(x, w, bias):
    y = ts.linear(x, w, bias, activation="gelu")
    return ts.matmul(y, y.mT, residual=torch.tanh(y).sum(-1, keepdim=True), beta=0.5)


def by_torch(x, w, bias):
    y = torch.nn.functional.gelu(torch.nn.functional.linear(x, w, bias))
    return y @ y.mT + 0.5 * torch.tanh(y).sum(-1, keepdim=True)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_forward_and_backward_with_dynamic_shapes(backend):
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    w, bias = rand(12, 24), rand(12)
    compiled_once = 0
    for rows in (5, 9, 33):
        x, grad = rand(2, rows, 24), rand(2, rows, rows)
        y, mine = gradients(compiled, x, w, bias, grad)
        z, theirs = gradients(by_torch, x, w, bias, grad)
        exact, finer = gradients(by_torch, x.double(), w.double(), bias.double(), grad)
        torch.testing.assert_close(y, z)
        assert exact.dtype == torch.float64
        for a, b, c in zip(mine, finer, theirs, strict=True):
            check_gradient(a, b, c)
        compiled_once = compiled_once or counter.frame_count
    assert counter.frame_count == compiled_once, "compiled again for another size"


def test_inductor_runs_it():
    x, w, bias = rand(2, 5, 24), rand(12, 24), rand(12)
    compiled = torch.compile(lambda x: ts.linear(x, w, bias, activation="relu") * 2, fullgraph=True)
    torch.testing.assert_close(compiled(x), 2 * torch.relu(torch.nn.functional.linear(x, w, bias)))


@pytest.mark.parametrize("workers", [None, 2])
def test_arrival_over_several_epochs(workers):
    arrival = ts.Arrival.uniform(8, 4, pivot=1)
    compiled = torch.compile(
        lambda x, w, arrival: ts.matmul(x, w, arrival=arrival, activation="silu", workers=workers),
        fullgraph=True,
        backend="aot_eager",
    )
    x = nans(32, 16)
    for epoch in range(4):
        source, w = rand(32, 16, seed=epoch), rand(16, 12).requires_grad_()
        x.fill_(float("nan"))
        with Feeder(arrival, x, source, before=late(epoch % 4)):
            answer = compiled(x, w, arrival)
        check(answer, Maths(source, w, activation="silu"))
        answer.sum().backward()
        assert w.grad is not None
        assert not w.grad.isnan().any()
        arrival.advance()


@pytest.mark.parametrize("what", ["rounds of one arrival", "arrivals"])
def test_rounds_do_not_compile_anew(what):
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x, w, arrival: ts.matmul(x, w, arrival=arrival), fullgraph=True, backend=counter)
    x, w = rand(32, 16), rand(16, 12)
    arrival = ts.Arrival.uniform(8, 4)
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        if what == "arrivals":
            arrival = ts.Arrival.uniform(8, 4)
        for chunk in range(4):
            arrival.signal(chunk)
        check(compiled(x, w, arrival), Maths(x, w))
        arrival.advance()
    assert counter.frame_count <= 3


def test_a_callers_own_signals_are_zeroed_by_each_replay():
    words = torch.zeros(4, dtype=torch.int32)
    arrival = ts.Arrival.uniform(8, 4, signals=words)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda x, w, arrival: ts.matmul(x, w, arrival=arrival, workers=2), fullgraph=True, backend=counter
    )
    x, w = nans(32, 16), rand(16, 12)
    for call in range(12):
        source = rand(32, 16, seed=call)
        x.fill_(float("nan"))
        with Feeder(arrival, x, source, order=[3, 1, 0, 2]):
            check(compiled(x, w, arrival), Maths(source, w))
        assert words.tolist() == [0, 0, 0, 0]
    assert counter.frame_count == 1


def test_out_is_written():
    out = nans(9, 6)
    compiled = torch.compile(
        lambda x, w, out: ts.matmul(x, w, out=out, bias=w[0]) is not None, fullgraph=True, backend="aot_eager"
    )
    x, w = rand(9, 16), rand(16, 6)
    assert compiled(x, w, out)
    check(out, Maths(x, w, w[0]))


def test_a_timeout_in_a_compiled_call_is_raised():
    arrival = ts.Arrival.uniform(8, 4)
    compiled = torch.compile(
        lambda x, w, arrival: ts.matmul(x, w, arrival=arrival, deadline=0.05), fullgraph=True, backend="aot_eager"
    )
    with pytest.raises(ts.ArrivalTimeout) as caught:
        compiled(rand(32, 16), rand(16, 6), arrival)
    assert caught.value.chunk in range(4)


def test_a_bad_argument_is_an_error_under_compile_too():
    compiled = torch.compile(lambda x, w: ts.matmul(x, w, activation="tanh"), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="activation"):
        compiled(rand(9, 16), rand(16, 6))


#: Calls, and the ops that graphs of them call: few arguments and no derivative, where nothing else is asked for.
IN_GRAPHS = {
    "linear": (lambda x, w: ts.linear(x, w), ["gemm_forward"]),
    "linear, activation": (lambda x, w: ts.linear(x, w, w[:, 0], activation="relu"), ["gemm_forward"]),
    "addmm": (lambda x, w: ts.addmm(w[:, 0], x, w.t()), ["gemm"]),
    "alpha": (lambda x, w: ts.addmm(w[:, 0], x, w.t(), beta=0, alpha=2.0), ["gemm"]),
    "out_dtype": (lambda x, w: ts.mm(x, w.t(), out_dtype=torch.bfloat16), ["gemm"]),
    "scale": (lambda x, w: ts.mm(x, w.t(), scale_a=w[:1, :1]), ["gemm"]),
    "schedule": (lambda x, w: ts.mm(x, w.t(), schedule="static"), ["gemm"]),
    "workers": (lambda x, w: ts.mm(x, w.t(), workers=1), ["gemm"]),
    "limit": (lambda x, w: limited(x, w), ["gemm"]),
    "attention": (lambda x, w: ts.attention(*[x.view(1, 3, 2, 8)] * 3, causal=True), ["attention_forward"]),
    "lse": (
        lambda x, w: ts.attention(*[x.view(1, 3, 2, 8)] * 3, layout="bhsd", return_lse=True, scale=2)[1],
        ["attention_forward"],
    ),
    "window": (lambda x, w: ts.attention(*[x.view(1, 3, 2, 8)] * 3, window=(1, 1)), ["attention"]),
    "sinks": (lambda x, w: ts.attention(*[x.view(1, 3, 2, 8)] * 3, sinks=w[0, :2]), ["attention"]),
}


def limited(x, w):
    with ts.worker_limit(1):
        return ts.linear(x, w)


@pytest.mark.parametrize("name", IN_GRAPHS)
@pytest.mark.parametrize("gradients", [False, True])
def test_the_op_of_a_graph_is_the_one_that_costs_least(name, gradients):
    call, expected = IN_GRAPHS[name]
    graphs: list[list[str]] = []

    def noted(graph, inputs):
        graphs.append([node.target._opname for node in graph.graph.nodes if "tilestream" in str(node.target)])
        return graph

    x, w = rand(3, 16).requires_grad_(gradients), rand(6, 16)
    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=noted)
    with torch.set_grad_enabled(gradients):
        answer = torch.compile(call, fullgraph=True, backend=backend)(x, w)
        torch.testing.assert_close(answer, call(x, w))
    assert graphs[0] == expected
    if gradients:
        grad = torch.autograd.grad(answer.sum(), x)[0]
        torch.testing.assert_close(grad, torch.autograd.grad(call(x, w).sum(), x)[0])


def test_a_graph_that_is_exported_can_be_trained():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(rand(6, 16))

        def forward(self, x):
            return ts.linear(x, self.w)

    module = Model()
    exported = torch.export.export(module, (rand(9, 16),)).run_decompositions().module()
    exported(x := rand(9, 16)).sum().backward()
    torch.testing.assert_close(exported.w.grad, x.sum(0).expand(6, 16))


def test_the_extension_that_is_loaded_later_compiles_nothing_anew(monkeypatch):
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(lambda x: (ts.mm(x, x), ts.attention(*[x[None, None]] * 3)), backend=counter)
    x = rand(8, 8)
    for found in (None, object()):
        monkeypatch.setattr(native._loaded, "extension", found)
        compiled(x)
    assert counter.frame_count == 1


class Decoder(torch.nn.Module):
    """Products and attention, one behind the other, of any number of rows."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(rand(24, 16)), torch.nn.Parameter(rand(24))

    def forward(self, x):
        y = ts.linear(x, self.weight, self.bias, activation="relu")
        heads = y.view(1, -1, 3, 8)
        return ts.attention(heads, heads, heads, causal=True), ts.addmm(self.bias, y, self.weight @ self.weight.t())


def exported_decoder(module: Decoder):
    rows = torch.export.Dim("rows", min=2, max=64)
    with torch.no_grad():
        return torch.export.export(module, (rand(10, 16),), dynamic_shapes={"x": {0: rows}})


def test_an_exported_model_has_the_registered_ops():
    module = Decoder()
    exported = exported_decoder(module)
    ops = [str(node.target) for node in exported.graph.nodes if "tilestream" in str(node.target)]
    assert ops == ["tilestream.gemm.default", "tilestream.attention.default", "tilestream.gemm.default"]
    for rows in (10, 7, 33):
        x = rand(rows, 16)
        with torch.no_grad():
            assert all(map(torch.equal, exported.module()(x), module(x)))


@pytest.mark.slow  # a compiler of C++ takes 20 s
def test_a_package_of_aot_inductor_runs(tmp_path):
    module = Decoder()
    package = torch._inductor.aoti_compile_and_package(
        exported_decoder(module), package_path=str(tmp_path / "decoder.pt2")
    )
    run = torch._inductor.aoti_load_package(package)
    for rows in (10, 7, 33):
        x = rand(rows, 16)
        with torch.no_grad():
            for found, expected in zip(run(x), module(x), strict=True):
                torch.testing.assert_close(found, expected)


def test_export():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(rand(16, 6))

        def forward(self, x):
            return ts.matmul(x, self.w, activation="relu")

    module = Model()
    exported = torch.export.export(module, (rand(9, 16),), dynamic_shapes={"x": {0: torch.export.Dim("rows")}})
    x = rand(21, 16)
    check(exported.module()(x).detach(), Maths(x, module.w, activation="relu"))


@pytest.mark.parametrize("file", sorted(Path(ts.ops.__file__).parent.glob("*.py")), ids=lambda file: file.stem)
def test_no_op_indexes_with_a_comparison(file):
    """Torch 2.11's tracer takes no bool for an index of a tuple, which later ones do."""
    indices = [found.slice for found in ast.walk(ast.parse(file.read_text())) if isinstance(found, ast.Subscript)]
    assert [i.lineno for i in indices if isinstance(i, ast.Compare | ast.BoolOp) or _is_not(i)] == []


def _is_not(index):
    return isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.Not)
