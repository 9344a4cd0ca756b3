"""Gradients: of every form against torch's, gradcheck and gradgradcheck, and with operands that arrived."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from test_matmul import FORMS
from torch.utils.checkpoint import checkpoint

import tilestream as ts
from error_rule import ACTIVATIONS, check_gradient, nans, rand
from streaming import Feeder
from tilestream.arrival.flat import Awaited
from tilestream.launch.cache import launch_cache

pytestmark = pytest.mark.usefixtures("small_tiles")


def leaves(*tensors: torch.Tensor, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [t.detach().to(dtype or t.dtype).requires_grad_() for t in tensors]


def compare(op, by_torch, tensors) -> None:
    """Gradients of ``op`` against those of the same maths in torch, by the error rule."""
    mine, theirs, finer = leaves(*tensors), leaves(*tensors), leaves(*tensors, dtype=torch.float64)
    answer, torchs, exact = op(*mine), by_torch(*theirs), by_torch(*finer)
    weights = rand(*torchs.shape, seed=9).to(torchs.dtype)
    for result in (answer, torchs, exact):
        result.backward(weights.to(result.dtype))
    for x, y, z in zip(mine, theirs, finer, strict=True):
        check_gradient(x.grad, z.grad, y.grad)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_of_every_form(form, dtype):
    a, b = (rand(*shape, dtype=dtype, seed=i) for i, shape in enumerate(FORMS[form]))
    compare(lambda x, y: ts.matmul(x, y, workers=2), torch.matmul, (a, b))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("schedule", ["auto", "stream_k"])
def test_gradients_of_the_epilogue(activation, schedule):
    for shape in ((35, 37), (1, 37), (35, 1), (37,), ()):
        compare(
            lambda a, b, bias, residual: ts.matmul(
                a, b, bias=bias, residual=residual, beta=-0.5, activation=activation, schedule=schedule, workers=2
            ),
            lambda a, b, bias, residual: ACTIVATIONS[activation](a @ b + bias - 0.5 * residual),
            (rand(35, 40), rand(40, 37), rand(37), rand(*shape)),
        )


#: An op, the same in torch, and its operands.
OPS = {
    "addmm": (
        lambda c, a, b: ts.addmm(c, a, b, alpha=3, beta=2), lambda c, a, b: torch.addmm(c, a, b, alpha=3, beta=2),
        ((37,), (35, 40), (40, 37)),
    ),
    "linear": (ts.linear, torch.nn.functional.linear, ((2, 5, 40), (37, 40), (37,))),
    "bmm": (ts.bmm, torch.bmm, ((3, 17, 9), (3, 9, 18))),
    "expanded": (
        lambda x, y: ts.matmul(x.expand(35, 40), y.t(), workers=2), lambda x, y: x.expand(35, 40) @ y.t(),
        ((1, 40), (37, 40)),
    ),
    "strided": (
        lambda x, y: ts.matmul(x.expand(3, 35, 40)[:, ::2], y.t().expand(3, 40, 37), workers=2),
        lambda x, y: x.expand(3, 35, 40)[:, ::2] @ y.t().expand(3, 40, 37), ((35, 40), (37, 40)),
    ),
    "one tensor": (lambda x: ts.matmul(x, x.t(), residual=x @ x.t()), lambda x: 2 * (x @ x.t()), ((35, 40),)),
}  # fmt: skip


@pytest.mark.parametrize("name", OPS)
def test_gradients_of_other_ops_and_operands(name):
    op, by_torch, shapes = OPS[name]
    compare(op, by_torch, [rand(*shape, seed=i) for i, shape in enumerate(shapes)])


def test_gradients_of_an_expanded_gradient():
    # sum() sends back one number, expanded: stride 0 in both dimensions.
    a, b = leaves(rand(35, 40), rand(40, 37))
    ts.matmul(a, b, workers=2).sum().backward()
    torch.testing.assert_close(a.grad, b.detach().sum(1).expand(35, 40))
    torch.testing.assert_close(b.grad, a.detach().sum(0).unsqueeze(1).expand(40, 37))


def test_gradients_only_where_they_are_asked_for():
    for wanted in range(4):
        tensors = [rand(35, 40), rand(40, 37), rand(37), rand(35, 37)]
        tensors[wanted].requires_grad_()
        a, b, bias, residual = tensors
        ts.matmul(a, b, bias=bias, residual=residual, activation="gelu").sum().backward()
        assert [t.grad is not None for t in tensors] == [i == wanted for i in range(4)]


def test_out_dtype_has_gradients_in_the_operands_dtype():
    a, b = leaves(rand(35, 40, dtype=torch.bfloat16), rand(40, 37, dtype=torch.bfloat16))
    ts.matmul(a, b, out_dtype=torch.float32, activation="silu").sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation):
    a, b, bias, residual = leaves(*(rand(*s, dtype=torch.float64) for s in ((5, 7), (7, 6), (6,), (5, 1))))
    assert torch.autograd.gradcheck(
        lambda *t: ts.matmul(
            t[0], t[1], bias=t[2], residual=t[3], beta=0.5, activation=activation, schedule="stream_k", workers=2
        ),
        (a, b, bias, residual),
    )


@pytest.mark.parametrize("shapes", [((2, 3, 4), (4, 3)), ((2, 1, 3, 4), (3, 4, 2)), ((4,), (2, 4, 3))], ids=str)
def test_gradcheck_of_broadcasts(shapes):
    assert torch.autograd.gradcheck(ts.matmul, leaves(*(rand(*s, dtype=torch.float64) for s in shapes)))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradgradcheck(activation):
    a, b, bias = leaves(*(rand(*s, dtype=torch.float64) for s in ((3, 4), (4, 2), (2,))))
    assert torch.autograd.gradgradcheck(
        lambda *t: ts.matmul(t[0], t[1], bias=t[2], activation=activation), (a, b, bias)
    )


def test_relu_lets_nan_through_as_torch_does():
    x, y = leaves(nans(1, 1), nans(1, 1))
    torch.relu(y @ torch.ones(1, 1)).backward(torch.ones(1, 1))
    ts.matmul(x, torch.ones(1, 1), activation="relu").backward(torch.ones(1, 1))
    assert torch.equal(x.grad.isnan(), y.grad.isnan())
    assert torch.equal(x.grad.nan_to_num(), y.grad.nan_to_num())


def test_beta_0_sends_back_zeros():
    residual = nans(35, 37).requires_grad_()
    ts.matmul(rand(35, 40), rand(40, 37), residual=residual, beta=0.0).sum().backward()
    assert torch.equal(residual.grad, torch.zeros(35, 37))


def test_a_kept_operand_that_is_changed_before_backward_is_noticed():
    a, b = rand(35, 40), rand(40, 37).requires_grad_()
    answer = ts.matmul(a, b)
    a.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        answer.sum().backward()


#: A product by the public op and by the registered one, whose derivatives are two.
BY = {
    "public": lambda x, w, activation: ts.linear(x, w, activation=activation),
    "registered": lambda x, w, activation: torch.ops.tilestream.gemm(
        x, w.t(), None, None, 1.0, 1.0, activation or "none", None, "auto", 0
    ),
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_checkpoint_has_the_gradients_of_the_call(activation, by):
    """A checkpoint that is not reentrant lets each saved tensor be read once."""
    x, w = leaves(rand(35, 40), rand(37, 40))

    def gradients(call):
        return torch.autograd.grad(call(x, w, activation).sum(), (x, w))

    straight = gradients(BY[by])
    again = gradients(lambda *a: checkpoint(BY[by], *a, use_reentrant=False))
    assert all(torch.equal(one, other) for one, other in zip(straight, again, strict=True))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_gradients_of_a_batch_of_gradients(activation, count):
    x, w = leaves(rand(2, 5, 8), rand(7, 8))
    y = ts.linear(x, w, activation=activation)
    grads = rand(count, *y.shape)
    launch_cache.clear()
    for _ in range(2):  # not known at first; then calls of one gradient are, which have the batch's shapes
        batched = torch.autograd.grad(y, (x, w), grads, is_grads_batched=True, retain_graph=True)
        alone = [torch.autograd.grad(y, (x, w), grad, retain_graph=True) for grad in grads]
        for i, one in enumerate(batched):
            torch.testing.assert_close(one, torch.stack([of_call[i] for of_call in alone]))


def test_a_bad_factor_is_refused_with_a_gradient_too():
    a, b = leaves(rand(6, 8), rand(8, 7))
    for beta in (1.0, 1.0, "x"):
        with pytest.raises(TypeError, match="mm: beta='x'; it must be a number") if beta == "x" else nullcontext():
            ts.mm(a, b, beta=beta)


#: Calls whose result the public op, or the look-up of an equal call, sees in another shape than the kernel.
RESHAPED = {
    "mm": lambda x: ts.mm(x[0], x[1].t()),
    "one batch": lambda x: ts.bmm(x[:1], x[:1].mT),
    "rows": lambda x: ts.linear(x, x[0]),
    "vector": lambda x: ts.matmul(x, x[0, 0]),
    "bshd": lambda x: ts.attention(x[None], x[None], x[None]),
    "bhsd": lambda x: ts.attention(x[None], x[None], x[None], layout="bhsd"),
    "merge": lambda x: ts.merge_attention(*[x[None], x[None, ..., 0].mT] * 2)[1],
}


@pytest.mark.parametrize("name", RESHAPED)
def test_a_result_of_no_grad_can_be_changed_where_gradients_are_asked_for(name):
    """As torch's own: it is no view, or autograd would refuse."""
    x, factor = rand(3, 4, 8), torch.ones((), requires_grad=True)
    for _ in range(3):
        with torch.no_grad():
            result = RESHAPED[name](x)
        kept = result.clone()
        result.mul_(factor).sum().backward()
        torch.testing.assert_close(factor.grad, kept.sum())
        factor.grad = None


@pytest.mark.parametrize("name", RESHAPED)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_so_can_a_compiled_functions(name, backend):
    x, factor = rand(3, 4, 8), torch.ones((), requires_grad=True)
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(RESHAPED[name], backend=backend, fullgraph=True)(x)
    assert name == "merge" or result.stride() == RESHAPED[name](x).stride()
    kept = result.clone()
    result.mul_(factor).sum().backward()
    torch.testing.assert_close(factor.grad, kept.sum())


@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_arrival_then_backward(schedule, activation):
    source, weight, bias = rand(50, 40), rand(37, 40).requires_grad_(), rand(37).requires_grad_()
    x = nans(50, 40)
    arrival = ts.Arrival.uniform(13, 4, pivot=2)
    with Feeder(arrival, x, source, order=[2, 3, 0, 1]):
        y = ts.linear(x, weight, bias, activation=activation, arrival=arrival, schedule=schedule, workers=2)
    y.backward(rand(50, 37, seed=9))
    exact = leaves(weight, bias, dtype=torch.float64)
    theirs = leaves(weight, bias)
    for (w, c), wide in ((exact, torch.float64), (theirs, torch.float32)):
        ACTIVATIONS[activation](source.to(wide) @ w.t() + c).backward(rand(50, 37, seed=9).to(wide))
    check_gradient(weight.grad, exact[0].grad, theirs[0].grad)
    check_gradient(bias.grad, exact[1].grad, theirs[1].grad)


class Late:
    """What a launch on a GPU waited for, of which a chunk never came."""

    def void_if_late(self, grad):
        return grad * float("nan")


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_no_gradient_of_rows_that_never_came_is_a_number(activation, monkeypatch):
    monkeypatch.setattr(Awaited, "for_gradient", lambda rows, columns, op, out: (rows and columns) and Late())
    x, weight, bias = (rand(*shape).requires_grad_() for shape in ((8, 6), (5, 6), (5,)))
    rows, columns = ts.Arrival.uniform(8, 1), ts.Arrival.uniform(5, 1)
    rows.signal(0)
    columns.signal(0)
    y = ts.linear(x, weight, bias, activation=activation, arrival=rows, weight_arrival=columns)
    y.sum().backward()
    assert all(one.grad.isnan().all() for one in (x, weight, bias))
    monkeypatch.undo()
    (again,) = torch.autograd.grad(ts.linear(x, weight, bias, arrival=rows).sum(), x)
    torch.testing.assert_close(again, weight.detach().sum(0).expand(8, 6))


def test_no_gradient_of_keys_that_never_came_is_a_number(monkeypatch):
    monkeypatch.setattr(Awaited, "for_gradient", lambda rows, columns, op, out: rows and Late())
    q, k, v = (rand(1, 4, 2, 8).requires_grad_() for _ in range(3))
    arrival = ts.Arrival.uniform(4, 1)
    arrival.signal(0)
    ts.attention(q, k, v, arrival=arrival).sum().backward()
    assert all(one.grad.isnan().all() for one in (q, k, v))


def test_backward_after_the_next_round_began_is_noticed():
    # The stream's buffer was filled anew in the meantime: the saved operand is not what it was.
    source, weight = rand(32, 16), rand(16, 8).requires_grad_()
    stream = ts.stream_in(source, rows_per_chunk=8)
    with stream:
        y = ts.matmul(stream.tensor, weight, arrival=stream.arrival)
        stream.wait(300)
        stream.restart()
        stream.wait(300)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_both_arrive_and_both_have_gradients():
    source, weights = rand(40, 24), rand(36, 24)
    x, w = nans(40, 24).requires_grad_(), nans(36, 24).requires_grad_()
    rows, columns = ts.Arrival.uniform(16, 3), ts.Arrival.uniform(12, 3, pivot=1)
    with Feeder(rows, x.detach(), source), Feeder(columns, w.detach(), weights, order=[1, 2, 0]):
        y = ts.linear(x, w, arrival=rows, weight_arrival=columns, workers=2)
    y.sum().backward()
    torch.testing.assert_close(x.grad, weights.sum(0).expand(40, 24))
    torch.testing.assert_close(w.grad, source.sum(0).expand(36, 24))
