"""Streams as operands, and the arrival that was forgotten."""

from __future__ import annotations

import gc
import itertools
import math
import re
import threading
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilestream as ts
from tilestream.arrival import stream as streams

ROWS, K, N = 12, 8, 6


@pytest.fixture(autouse=True)
def none_is_open():
    gc.collect()
    assert not streams.open_streams
    yield
    gc.collect()
    assert not streams.open_streams


@pytest.fixture
def source():
    """A generator of blocks of rows that stops before its second block until it is let go on; the rows; the go."""
    rows, go = torch.randn(ROWS, K), threading.Event()

    def blocks():
        yield rows[:4]
        assert go.wait(300)
        yield rows[4:]

    yield blocks(), rows, go
    go.set()


def streaming(source, **shape) -> ts.Stream:
    return ts.stream_in(source[0], shape=shape.get("shape", (ROWS, K)), dtype=torch.float32, rows_per_chunk=4)


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}$")


B, WEIGHT, BIAS, INPUT = torch.randn(K, N), torch.randn(N, K), torch.randn(N), torch.randn(ROWS, N)
OPS = {
    "matmul": (lambda x, **more: ts.matmul(x, B, **more), lambda x: x @ B),
    "mm": (lambda x, **more: ts.mm(x, B, **more), lambda x: x @ B),
    "addmm": (lambda x, **more: ts.addmm(INPUT, x, B, **more), lambda x: INPUT + x @ B),
    "linear": (lambda x, **more: ts.linear(x, WEIGHT, BIAS, **more), lambda x: x @ WEIGHT.T + BIAS),
    "bmm": (lambda x, **more: ts.bmm(x, B.expand(3, K, N), **more), lambda x: x @ B),
}


def shape_for(op: str) -> dict[str, tuple[int, ...]]:
    return {"shape": (3, ROWS // 3, K)} if op == "bmm" else {}


@pytest.mark.parametrize("op", OPS)
def test_a_stream_is_the_operand_that_arrives(source, op):
    call, expected = OPS[op]
    _, rows, go = source
    with streaming(source, **shape_for(op)) as x:
        threading.Timer(0.02, go.set).start()
        made = call(x)
        torch.testing.assert_close(made, expected(rows.view(x.tensor.shape)))
        torch.testing.assert_close(call(x, arrival=x.arrival), made)
    torch.testing.assert_close(call(x), made)  # filled, and closed


@pytest.mark.parametrize("whose", ["x", "weight", "both"])
def test_a_weight_is_a_stream(whose):
    x, weight = torch.randn(ROWS, K), torch.randn(N, K)
    with ts.stream_in(x, rows_per_chunk=4) as left, ts.stream_in(weight, rows_per_chunk=2) as right:
        made = ts.linear(left if whose != "weight" else x, right if whose != "x" else weight, BIAS)
    torch.testing.assert_close(made, x @ weight.T + BIAS)


@pytest.mark.parametrize("op", OPS)
def test_its_tensor_without_its_arrival_is_refused_until_it_is_filled(source, op):
    call, expected = OPS[op]
    _, rows, go = source
    name = "x" if op == "linear" else "a"
    with streaming(source, **shape_for(op)) as x:
        with refused(
            ValueError,
            f"{op}: {name} is a tensor that ts.stream_in has not filled yet; give the Stream itself in its place, or "
            "arrival=stream.arrival, or wait until it is filled: stream.wait()",
        ):
            call(x.tensor)
        go.set()
        x.wait()
        torch.testing.assert_close(call(x.tensor), expected(rows.view(x.tensor.shape)))


@pytest.mark.parametrize(
    ("view", "whose"), [*itertools.product(["rows", "transposed", "a column", "detached", "alias"], ["a", "b"])]
)
def test_so_are_views_of_it(source, view, whose):
    _, _, go = source
    with streaming(source) as x:
        views = {
            "rows": x.tensor[2:6], "transposed": x.tensor.T, "a column": x.tensor[:, :1], "detached": x.tensor.detach(),
            "alias": x.tensor.view(ROWS, K),
        }  # fmt: skip
        y = views[view]
        with pytest.raises(ValueError, match=f"matmul: {whose} is a tensor that ts.stream_in has not filled yet"):
            ts.matmul(y, torch.ones(y.shape[1], 2)) if whose == "a" else ts.matmul(torch.ones(2, y.shape[0]), y)
        go.set()
        x.wait()
        assert not ts.matmul(y, torch.ones(y.shape[1], 2)).isnan().any()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: ts.matmul(torch.ones(2, ROWS), x), "b"),
        (lambda x: ts.mm(torch.ones(2, ROWS), x), "b"),
        (lambda x: ts.addmm(x, torch.ones(ROWS, 2), torch.ones(2, K)), "input"),
        (lambda x: ts.matmul(torch.ones(ROWS, 2), torch.ones(2, K), residual=x), "residual"),
        (lambda x: ts.linear(torch.ones(2, 3), torch.ones(K, 3), x[0] if isinstance(x, torch.Tensor) else x), "bias"),
    ],
)
def test_operands_that_do_not_arrive(source, call, name):
    op = {"b": "(matmul|mm)", "input": "addmm", "residual": "matmul", "bias": "linear"}[name]
    with streaming(source) as x:
        with pytest.raises(
            ValueError,
            match=rf"^{op}: {name} is a tensor that ts.stream_in has not filled yet, and {name} does not arrive; wait "
            rf"until it is filled: stream.wait\(\)$",
        ):
            call(x.tensor)
        with pytest.raises(
            TypeError, match=rf"^{op}: {name} is a Stream, and {name} does not arrive; wait for it: stream.wait\(\)$"
        ):
            call(x)
        source[2].set()
        x.wait()
        call(x.tensor)


QUERIES, KEYS = torch.ones(1, ROWS, 3, 8), torch.ones(1, ROWS, 1, 8)
LSE = torch.zeros(1, K, ROWS)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: ts.matmul(torch.ones(ROWS, 2), torch.ones(2, K), out=x), "matmul: out"),
        (lambda x: ts.mm(torch.ones(ROWS, 2), torch.ones(2, K), out=x), "mm: out"),
        (lambda x: ts.bmm(torch.ones(1, ROWS, 2), torch.ones(1, 2, K), out=x[None]), "bmm: out"),
        (lambda x: ts.addmm(torch.ones(K), torch.ones(ROWS, 2), torch.ones(2, K), out=x), "addmm: out"),
        (lambda x: ts.linear(torch.ones(ROWS, 2), torch.ones(K, 2), out=x), "linear: out"),
        (lambda x: ts.matmul(torch.ones(ROWS, 2), torch.ones(2, 2), scale_a=x[:, 0]), "matmul: scale_a"),
        (lambda x: ts.linear(torch.ones(3, 2), torch.ones(ROWS, 2), scale_b=x[:, :1]), "linear: scale_b"),
        (lambda x: ts.attention(QUERIES, KEYS, KEYS, sinks=x[0, :3]), "attention: sinks"),
        (lambda x: ts.attention(QUERIES, KEYS, KEYS, scale_q=x[:1, :1]), "attention: scale_q"),
        (lambda x: ts.attention(KEYS, KEYS, KEYS, out=x.view(1, ROWS, 1, K)), "attention: out"),
        (lambda x: ts.merge_attention(x.view(1, ROWS, 1, K), LSE[:, :1], KEYS, LSE[:, :1]), "merge_attention: o_a"),
        (lambda x: ts.merge_attention(KEYS, LSE[:, :1], KEYS, x[:, 0].view(1, 1, ROWS)), "merge_attention: lse_b"),
    ],
)
def test_what_else_a_call_reads_or_writes_does_not_arrive_either(source, call, name):
    with streaming(source) as x:
        with pytest.raises(ValueError, match=f"^{name} is a tensor that ts.stream_in has not filled yet, and"):
            call(x.tensor)
        source[2].set()
        torch.testing.assert_close(x.wait(), source[1])  # nothing was written
        call(x.tensor)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_stream_in_a_compiled_function(source, backend):
    compiled = torch.compile(lambda x, bias: ts.matmul(x, B, bias=bias), backend=backend, fullgraph=True)
    with streaming(source) as x:
        threading.Timer(0.02, source[2].set).start()
        torch.testing.assert_close(compiled(x, BIAS), source[1] @ B + BIAS)


def test_a_weight_that_was_forgotten_is_named_as_the_caller_names_it(source):
    with (
        streaming(source) as x,
        pytest.raises(ValueError, match=r"linear: weight is .* or weight_arrival=stream\.arrival"),
    ):
        ts.linear(torch.ones(2, K), x.tensor)


def test_another_streams_arrival_is_refused(source):
    other = ts.Arrival.uniform(4, 3)
    with streaming(source) as x:
        for call in (lambda: ts.matmul(x, B, arrival=other), lambda: ts.mm(x, B, arrival=other)):
            with pytest.raises(ValueError, match="a is a Stream, and arrival= is another's; leave arrival= away"):
                call()


def test_keys_and_values_arrive_together(source):
    q = torch.randn(1, 3, 1, K)
    with streaming(source, shape=(1, ROWS, 1, K)) as x:
        v = torch.randn(1, ROWS, 1, K)
        for k in (x.tensor, x.tensor[:, :4]):
            other = v[:, : k.shape[1]]
            for name, operands in {"q": (k, v, v), "k": (q, k, other), "v": (q, other, k)}.items():
                with pytest.raises(ValueError, match=f"attention: {name} is a tensor that ts.stream_in has not filled"):
                    ts.attention(*operands)
        with refused(
            TypeError,
            "attention: k is a Stream; keys and values arrive together: give their tensors, and the arrival= of both",
        ):
            ts.attention(q, x, x)
        source[2].set()
        made = ts.attention(q, x.tensor, x.tensor, arrival=x.arrival)
        torch.testing.assert_close(made, ts.attention(q, x.tensor, x.tensor))


class TestOpen:
    """A stream is open from its beginning until it is filled, closed or gone; `restart` opens it again."""

    def test_until_it_is_filled_and_again_after_restart(self):
        x = ts.stream_in(torch.randn(ROWS, K), rows_per_chunk=4)
        assert list(streams.open_streams) == [x.tensor.data_ptr()]
        x.wait()
        assert not streams.open_streams
        x.restart()
        assert streams.open_streams
        x._filling.join(300)
        assert ts.matmul(x.tensor, B).shape == (ROWS, N), "seen to be filled by the call that asks"
        assert not streams.open_streams

    def test_until_it_is_gone(self, source):
        x = streaming(source)
        other = torch.randn(ROWS, K)
        ts.matmul(other, B)  # in other memory
        source[2].set()
        x._filling.join(300)
        del x
        gc.collect()
        assert not streams.open_streams

    def test_until_it_is_closed(self, source):
        with streaming(source) as x:
            source[2].set()
        assert not streams.open_streams
        assert x.tensor.shape == (ROWS, K)

    def test_an_empty_one_is_none(self):
        x = ts.stream_in(torch.empty(0, K))
        assert not streams.open_streams
        assert ts.matmul(x, B).shape == (0, N)

    def test_a_producer_that_has_failed_has_filled_nothing(self):
        def blocks():
            yield torch.zeros(4, K)
            raise OSError("the disk is gone")

        x = ts.stream_in(blocks(), shape=(ROWS, K), dtype=torch.float32, rows_per_chunk=4)
        x._filling.join(300)
        with pytest.raises(ValueError, match="has not filled yet"):
            ts.matmul(x.tensor, B)
        with pytest.raises(OSError, match="the disk is gone"):
            ts.matmul(x, B)

    def test_tensors_without_memory_are_none_of_a_stream(self, source):
        with streaming(source) as x:
            assert torch.func.vmap(lambda a: ts.matmul(a, B))(torch.ones(2, 3, K)).shape == (2, 3, N)
            assert ts.matmul(torch.ones(3, K, device="meta"), torch.ones(K, 2, device="meta")).shape == (3, 2)
            with warnings.catch_warnings(), FakeTensorMode():
                warnings.simplefilter("error")  # torch warns where the address of a fake tensor is asked for
                assert ts.matmul(torch.ones(3, K), torch.ones(K, 2)).shape == (3, 2)
            source[2].set()
            assert not math.isnan(float(x.wait().sum()))


TRACED = {
    "matmul": (lambda x: ts.matmul(x, B), "gemm: a"),
    "matmul with a bias": (lambda x: ts.matmul(x, B, bias=BIAS, activation="relu"), "gemm: a"),
    "matmul with scales": (lambda x: ts.matmul(torch.ones(ROWS, K), B, scale_a=x[:, 0]), "gemm: scale_a"),
    "right": (lambda x: ts.mm(torch.ones(2, ROWS), x), "gemm: b"),
    "residual": (lambda x: ts.matmul(torch.ones(ROWS, 2), torch.ones(2, K), residual=x), "gemm: residual"),
    "linear": (lambda x: ts.linear(x, WEIGHT, BIAS), "gemm: a"),
    "weight": (lambda x: ts.linear(torch.ones(2, K), x), "gemm: b"),
    "attention": (lambda x: ts.attention(QUERIES, x.view(1, ROWS, 1, K), KEYS), "attention: k"),
    "attention of a window": (
        lambda x: ts.attention(x.view(1, ROWS, 1, K), KEYS, KEYS, window=(2, 2)), "attention: q"
    ),
    "grouped": (lambda x: ts.grouped_mm(x, B.expand(2, K, N), OFFSETS), "grouped_gemm: a"),
    "grouped weights": (
        lambda x: ts.grouped_mm(torch.ones(4, ROWS // 2), x.view(2, ROWS // 2, K), OFFSETS), "grouped_gemm: b"
    ),
    "by source": (lambda x: ts.grouped_mm(x, B.expand(2, K, N), counts=COUNTS), "grouped_mm: a"),
}  # fmt: skip
OFFSETS = torch.tensor([2, 4], dtype=torch.int32)
COUNTS = torch.full((3, 2), 2, dtype=torch.int32)


class TestTraced:
    """Calls that are checked when they run, by the registered op."""

    @pytest.mark.parametrize(
        ("backend", "call"),
        [*itertools.product(["eager"], TRACED), *itertools.product(["aot_eager"], ["matmul", "attention", "grouped"])],
    )
    def test_a_compiled_call_of_what_is_not_filled_is_refused(self, source, call, backend):
        run, what = TRACED[call]
        compiled = torch.compile(run, backend=backend, fullgraph=True)
        with streaming(source) as x:
            for _ in range(2):
                with pytest.raises(
                    ValueError,
                    match=f"^{what} is a tensor that ts.stream_in has not filled yet, and the call does not wait",
                ):
                    compiled(x.tensor)
            source[2].set()
            x.wait()
            torch.testing.assert_close(compiled(x.tensor), run(source[1]))

    def test_so_are_the_views_that_a_graph_makes(self, source):
        compiled = torch.compile(lambda x: ts.matmul(x[4:].mT, B[:, :1].expand(8, 2)), backend="aot_eager")
        with streaming(source) as x:
            with pytest.raises(ValueError, match="gemm: a is a tensor"):
                compiled(x.tensor)
            source[2].set()

    def test_so_is_what_a_graph_writes_to(self, source):
        out = ts.matmul(torch.ones(ROWS, 2), torch.ones(2, K))  # loads the ops
        op = torch.ops.tilestream.gemm_out.default
        with streaming(source) as x:
            operands = torch.ones(ROWS, 2), torch.ones(2, K), None, None, 1.0, 1.0, "none", None, "auto", 0
            with pytest.raises(ValueError, match="gemm: out is a tensor"):
                op(*operands, x.tensor)
            op(*operands, out)
            source[2].set()

    @pytest.mark.parametrize("call", [call for call in TRACED if call != "by source"])  # that has no derivative
    def test_a_transform_does_not_hide_it(self, source, call):
        run, _ = TRACED[call]
        with streaming(source) as x:
            for level in (torch.func.vmap, lambda f: torch.func.vmap(torch.func.vmap(f))):
                with pytest.raises(ValueError, match="has not filled yet"):
                    level(run)(x.tensor.expand(2, 2, ROWS, K) if level is not torch.func.vmap else x.tensor[None])
            with pytest.raises(ValueError, match="has not filled yet"):
                torch.func.grad(lambda y: run(y).sum())(x.tensor)
            source[2].set()

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_what_waits_is_not_refused(self, source, backend):
        keys = torch.randn(1, ROWS, 1, K)
        of = {
            "linear": lambda x, y: ts.linear(x, y),
            "attention": lambda x, y: ts.attention(keys, x.tensor[None, :, None], keys, arrival=x.arrival),
        }
        for call in of.values():
            compiled, (left, right) = torch.compile(call, backend=backend), (torch.randn(ROWS, K), torch.randn(N, K))
            with ts.stream_in(left, rows_per_chunk=4) as x, ts.stream_in(right, rows_per_chunk=2) as y:
                made = compiled(x, y)
            torch.testing.assert_close(made, call(x, y))

    def test_a_graph_of_the_other_operands_is_not_refused(self, source):
        compiled = torch.compile(lambda x: ts.matmul(x, B), backend="eager")
        with streaming(source):
            torch.testing.assert_close(compiled(torch.ones(ROWS, K)), torch.ones(ROWS, K) @ B)
            source[2].set()

    def test_the_gradient_of_a_launch_that_waited(self, source):
        weight = B.clone().requires_grad_()
        with streaming(source) as x:
            threading.Timer(0.02, source[2].set).start()
            made = ts.matmul(x, weight, activation="silu")
            x.arrival.advance()  # rows are missing, as behind a launch that has given up
            made.sum().backward()
        assert weight.grad.shape == (K, N)

    def test_experts_without_rows_are_not_missed(self):
        x, experts = torch.randn(4, K, requires_grad=True), torch.randn(3, K, N)
        offsets = torch.tensor([2, 2, 4], dtype=torch.int32)
        with ts.stream_experts(experts, offsets) as b:
            made = ts.grouped_mm(x, b, offsets)
            made.sum().backward()
            op = torch.ops.tilestream.grouped_gemm.default
            with torch.no_grad():
                again = op(x, b.tensor, offsets, None, "none", None, "auto", 0, False)
                torch.testing.assert_close(again, made)
                b.arrival.advance()
                b._open()
                with pytest.raises(ValueError, match="grouped_gemm: b is a tensor"):
                    op(x, b.tensor, offsets, None, "none", None, "auto", 0, False)
                b.arrival.signal(0)
                b.arrival.signal(2)
                op(x, b.tensor, offsets, None, "none", None, "auto", 0, False)
                with pytest.raises(ValueError, match="grouped_mm: b is a tensor"):
                    ts.grouped_mm(x, b.tensor, offsets)
        assert not x.grad.isnan().any()


@pytest.mark.parametrize(("name", "whose"), [("a", "arrival"), ("b", "weight_arrival"), ("bias", "bias does not")])
def test_a_given_plan_is_not_run_with_what_is_not_filled(source, name, whose):
    plan = ts.plan(ROWS, K, K, dtype="float32", device="cpu")
    operands = {"a": torch.ones(ROWS, K), "b": torch.ones(K, K), "bias": torch.ones(K)}
    with streaming(source) as x:
        filling = {"a": x.tensor, "b": x.tensor[:K], "bias": x.tensor[0]}[name]
        for run in (plan.run, torch.compile(plan.run, backend="eager")):
            with pytest.raises(ValueError, match=rf"^plan\.run: {name} is a tensor that .* not filled yet.*{whose}"):
                run(**{**operands, name: filling})
        source[2].set()
        x.wait()
        assert plan.run(**{**operands, name: filling}).shape == (ROWS, K)
