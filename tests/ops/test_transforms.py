"""torch.func, forward mode, double backward, vmap, and the strides of gradients: each against torch's."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 -- as everybody has it
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

import tilestream as ts
import tilestream.ops  # the package itself imports them on first use
from attention_maths import attention_by_torch
from error_rule import ACTIVATIONS, rand
from tilestream.ops import request
from tilestream.plan import limit as limits

func = torch.func
ops = torch.ops.tilestream


def made(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [rand(*shape, dtype=torch.float64, seed=i) for i, shape in enumerate(shapes)]


def epilogue(activation):
    """An op with all that has a derivative, and the same in torch."""
    scales = (torch.tensor([[0.5], [2.0], [-1.0]]), torch.tensor([[1.0, 3.0, 0.25, -2.0, 1.5]]))
    options = {"beta": -0.5, "activation": activation, "scale_a": scales[0], "scale_b": scales[1]}
    return (
        lambda a, b, bias, residual: ts.matmul(a, b, bias=bias, residual=residual, **options),
        lambda a, b, bias, residual: ACTIVATIONS[activation](
            scales[0].double() * scales[1].double() * (a @ b) + bias - 0.5 * residual
        ),
        ((3, 4), (4, 5), (5,), (3, 5)),
    )


def attention(**options):
    """The output and the log-sum-exp by this package, and by torch a sequence at a time."""

    def by_torch(q, k, v, sinks=None):
        parts = [attention_by_torch(*one, sinks=sinks, **options) for one in zip(q, k, v, strict=True)]
        return tuple(torch.stack(x) for x in zip(*parts, strict=True))

    def op(q, k, v, sinks=None):
        return ts.attention(q, k, v, sinks=sinks, return_lse=True, **options)

    return op, by_torch


QKV = ((2, 3, 4, 8), (2, 5, 2, 8), (2, 5, 2, 16))
#: An op, the same in torch, and its operands' shapes.
PRODUCTS = {
    "mm": (ts.mm, torch.mm, ((3, 4), (4, 5))),
    "bmm": (ts.bmm, torch.bmm, ((2, 3, 4), (2, 4, 5))),
    "addmm": (
        lambda c, a, b: ts.addmm(c, a, b, alpha=3, beta=2), lambda c, a, b: torch.addmm(c, a, b, alpha=3, beta=2),
        ((5,), (3, 4), (4, 5)),
    ),
    "addmm, beta 0": (
        lambda c, a, b: ts.addmm(c, a, b, beta=0), lambda c, a, b: torch.addmm(c, a, b, beta=0),
        ((3, 5), (3, 4), (4, 5)),
    ),
    "linear, 2-D": (ts.linear, F.linear, ((3, 4), (5, 4), (5,))),
    "linear, 3-D": (ts.linear, F.linear, ((2, 3, 4), (5, 4), (5,))),
    "broadcast": (ts.matmul, torch.matmul, ((2, 1, 3, 4), (3, 4, 5))),
    "vector": (ts.matmul, torch.matmul, ((3, 4), (4,))),
    **{f"epilogue, {activation}": epilogue(activation) for activation in ACTIVATIONS},
}  # fmt: skip
ATTENTIONS = {
    "attention": (*attention(), QKV),
    "attention, causal": (*attention(causal=True), QKV),
    "attention, all": (*attention(causal=True, softcap=1.5, scale=0.4, window=(2, None)), (*QKV, (4,))),
}
OPS = PRODUCTS | ATTENTIONS


def close(mine, theirs, what="") -> None:
    for x, y in zip(tree_leaves(mine), tree_leaves(theirs), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}")


def total(op):
    """A number of all that an op gives, which is linear in nothing."""
    return lambda *x: sum(torch.sin(y).sum() for y in tree_leaves(op(*x)))


@pytest.mark.parametrize("name", OPS)
def test_transforms_are_torchs_own(name):
    op, by_torch, shapes = OPS[name]
    x, tangents, all_of = made(*shapes), tuple(made(*shapes[::-1]))[::-1], tuple(range(len(shapes)))
    for what, transform in {
        "grad": lambda f: func.grad(total(f), all_of)(*x),
        "vjp": lambda f: func.vjp(total(f), *x)[1](torch.tensor(2.0, dtype=torch.float64)),
        "jvp": lambda f: func.jvp(f, tuple(x), tangents),
        "jvp of one": lambda f: [
            func.jvp(lambda y, i=i: f(*x[:i], y, *x[i + 1 :]), (x[i],), (tangents[i],)) for i in all_of
        ],
        "jacrev": lambda f: func.jacrev(f, all_of)(*x),
        "hessian": lambda f: func.hessian(total(f), all_of)(*x),
        "reverse over reverse": lambda f: func.grad(total(func.grad(total(f), all_of)), all_of)(*x),
        "reverse over forward": lambda f: func.grad(total(lambda *y: func.jvp(f, y, tangents)), all_of)(*x),
    }.items():
        close(transform(op), transform(by_torch), what)


@pytest.mark.parametrize("name", OPS)
def test_gradients_of_each_sample(name):
    op, by_torch, shapes = OPS[name]
    x, all_of = made(*shapes), tuple(range(len(shapes)))
    each = [torch.stack([y, 2 * y, torch.sin(y)], dim=1) for y in x]
    for number in range(1, 2 ** len(x)):
        dims = tuple(1 if number >> i & 1 else None for i in all_of)
        given = [x[i] if dims[i] is None else each[i] for i in all_of]
        close(
            func.vmap(func.grad(total(op), all_of), dims)(*given),
            func.vmap(func.grad(total(by_torch), all_of), dims)(*given),
            dims,
        )


@pytest.mark.parametrize("name", OPS)
def test_gradcheck_of_both_orders_and_modes(name):
    op, _, shapes = OPS[name]
    x = [y.requires_grad_() for y in made(*shapes)]
    fast = {"fast_mode": True, "check_batched_grad": True}
    assert torch.autograd.gradcheck(op, x, check_forward_ad=True, **fast)
    assert torch.autograd.gradgradcheck(op, x, check_fwd_over_rev=True, check_rev_over_rev=True, **fast)


def packed(q, k, v):
    ends_q, ends_k = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 2, 2, 5], [0, 4, 5, 7]))
    return ts.attention(q, k, v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, causal=True)


def lengths(q, k, v):
    return ts.attention(q, k, v, seqlens_k=torch.tensor([1, 5], dtype=torch.int32), causal=True)


@pytest.mark.parametrize("op", [packed, lengths], ids=["packed", "lengths"])
def test_attention_of_lists_of_lengths(op):
    # Rows of no sequence, keys that no query sees, queries that see no key.
    shapes = ((6, 4, 8), (9, 2, 8), (9, 2, 8)) if op is packed else QKV
    x = [y.requires_grad_() for y in made(*shapes)]
    assert torch.autograd.gradcheck(op, x, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(op, x, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True)
    x = [y.detach() for y in x]
    assert not any(y.isnan().any() for y in func.grad(lambda *y: total(op)(*y).sin(), (0, 1, 2))(*x))
    each = [torch.stack([y, 2 * y]) for y in x]
    close(func.vmap(op)(*each), torch.stack([op(*x), op(*(2 * y for y in x))]))


def test_attention_of_nothing_has_derivatives():
    for shapes in (((2, 0, 4, 8), (2, 5, 2, 8)), ((2, 3, 4, 8), (2, 0, 2, 8)), ((0, 3, 4, 8), (0, 5, 2, 8))):
        q, k = made(*shapes)
        out, tangent = func.jvp(lambda q, k: ts.attention(q, k, k), (q, k), (q, k))
        assert tangent.shape == out.shape
        assert not tangent.any()
        of_q, of_k = func.grad(lambda q, k: total(func.grad(total(lambda q: ts.attention(q, k, k))))(q), (0, 1))(q, k)
        assert (of_q.shape, of_k.shape) == (q.shape, k.shape)
        assert not of_q.any()


@pytest.mark.parametrize("name", ["linear, 3-D", "bmm", "attention"])
def test_vmap_is_one_call_of_the_op(name):
    op, _, shapes = OPS[name]
    x = [torch.stack([y, y]) for y in made(*shapes)]
    seen = []

    class Calls(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, called, types, args=(), kwargs=None):
            seen.append(called)
            return called(*args, **(kwargs or {}))

    with Calls():
        func.vmap(func.grad(total(op), tuple(range(len(x)))))(*x)
    tilestreams = [called for called in seen if called.namespace == "tilestream"]
    assert len(tilestreams) == (2 if name == "attention" else 3)


def test_vmap_of_vectors_of_scales_and_of_sinks():
    a, b, sinks = made((3, 4), (4, 5), (4,))
    rows, columns = torch.rand(2, 3, 1), torch.rand(2, 1, 5)
    for dims in ((None, 0), (0, None), (0, 0)):
        scales = (rows if dims[0] == 0 else rows[0], columns if dims[1] == 0 else columns[0])
        mine = func.vmap(lambda x, y: ts.mm(a, b, scale_a=x, scale_b=y), dims)(*scales)
        close(mine, func.vmap(lambda x, y: x.double() * y.double() * (a @ b), dims)(*scales), dims)
    one = torch.rand(2)
    close(func.vmap(lambda x: ts.mm(a, b, scale_a=x))(one), one.double()[:, None, None] * (a @ b))
    q, k, v = made(*QKV)
    mine = func.vmap(lambda x: ts.attention(q, k, v, sinks=x))(torch.stack([sinks, 2 * sinks]))
    close(mine, torch.stack([ts.attention(q, k, v, sinks=x) for x in (sinks, 2 * sinks)]))


def test_direct_callers_of_the_registered_ops_have_the_same_derivatives():
    a, b = made((3, 4), (4, 5))
    how = (None, None, 1.0, 1.0, "silu", None, "auto", 0)
    f, g = (lambda *x: total(ops.gemm)(*x, *how)), total(lambda x, y: F.silu(x @ y))
    close(func.hessian(f, (0, 1))(a, b), func.hessian(g, (0, 1))(a, b))


def test_torch_func_inside_a_compiled_function():
    a, w = made((3, 4), (5, 4))
    compiled = torch.compile(
        lambda w, a: func.vmap(func.grad(lambda w, x: ts.linear(x, w).sin().sum()), (None, 0))(w, a),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    close(compiled(w, a), func.vmap(func.grad(lambda w, x: F.linear(x, w).sin().sum()), (None, 0))(w, a))


def test_what_has_no_forward_mode_derivative_says_so():
    a, w = rand(3, 4), rand(4, 5)
    q = rand(1, 3, 2, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(a, a)
        with pytest.raises(NotImplementedError, match="matmul: scales, out= and publish= have no forward-mode deriv"):
            ts.matmul(a, w, scale_a=forward_ad.make_dual(rand(3, 1), rand(3, 1)))
        with pytest.raises(NotImplementedError, match="matmul: scales, out= and publish= have no forward-mode deriv"):
            ts.matmul(dual, w, out=rand(3, 5))
        how = (None, None, 1.0, 1.0, "none", None, "auto", 0, forward_ad.make_dual(rand(3, 1), rand(3, 1)), None)
        with pytest.raises(NotImplementedError, match="gemm: scales"):
            ops.gemm(a, w, *how)
        with pytest.raises(NotImplementedError, match="attention: scales, out="):
            ts.attention(q, q, q, scale_k=forward_ad.make_dual(rand(2), rand(2)))
        with pytest.raises(NotImplementedError, match="attention: scales, out="):
            ts.attention(forward_ad.make_dual(q, q), q, q, out=rand(1, 3, 2, 8))
        tangent = forward_ad.unpack_dual(ts.matmul(dual, w, activation="relu")).tangent
    torch.testing.assert_close(tangent, torch.where(a @ w > 0, a @ w, 0.0))


def arrived(rows: int) -> ts.Arrival:
    arrival = ts.Arrival.uniform(rows, 1)
    arrival.signal(0)
    return arrival


X, B, Q = made((8, 4), (4, 5), (1, 3, 2, 8))
#: The operand that arrives, a call of it, and torch's formula.
ARRIVING = {
    "rows": (X, lambda x: ts.matmul(x, B, activation="silu", arrival=arrived(8)), lambda x: F.silu(x @ B)),
    "a weight": (B.t(), lambda w: ts.linear(X, w, weight_arrival=arrived(5)), lambda w: X @ w.t()),
    "keys": (
        Q, lambda k: ts.attention(Q, k, Q, arrival=arrived(3)), lambda k: attention_by_torch(Q[0], k[0], Q[0])[0],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("x", "op", "formula"), ARRIVING.values(), ids=ARRIVING)
def test_what_arrives_has_a_tangent(x, op, formula):
    tangent = torch.rand_like(x)
    _, expected = func.jvp(formula, (x,), (tangent,))
    close(func.jvp(op, (x,), (tangent,))[1].reshape(expected.shape), expected)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(op(forward_ad.make_dual(x, tangent))).tangent
    assert found is not None
    close(found.reshape(expected.shape), expected)


#: Calls of operands ``[8, 4]`` and ``[4, 5]`` without a forward-mode derivative.
WITHOUT_TANGENT = {
    "publish=": (
        lambda a, b: ts.matmul(a, b, publish=ts.Arrival.uniform(8, 1)),
        "matmul: scales, out= and publish= have no forward-mode derivative",
    ),
    "plan.run": (
        lambda a, b: ts.plan(8, 5, 4, dtype="float64").run(a, b),
        "plan.run: it has no forward-mode derivative; use tilestream.matmul",
    ),
    **{
        op: (
            lambda a, b, op=op: getattr(ts.distributed, op)(a, b),
            f"{op}: it has no forward-mode derivative; gather, or sum, by torch.distributed's functional collectives",
        )
        for op in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
    },
}  # fmt: skip


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(("op", "message"), WITHOUT_TANGENT.values(), ids=WITHOUT_TANGENT)
def test_what_has_no_tangent_is_refused_in_both_forms_of_forward_mode(op, message, which):
    """Before anything is looked at that needs a process group."""
    x = [X, B]
    with pytest.raises(NotImplementedError, match=message), forward_ad.dual_level():
        op(*(forward_ad.make_dual(y, y) if i == which else y for i, y in enumerate(x)))
    with pytest.raises(NotImplementedError, match=message):
        func.jvp(lambda y: op(*(y if i == which else z for i, z in enumerate(x))), (x[which],), (x[which],))


def test_registered_attention_refuses_gradients_that_nothing_computes():
    pages, table = rand(4, 4, 2, 8), torch.zeros(1, 2, dtype=torch.int32)
    q, keys = rand(1, 3, 2, 8).requires_grad_(), torch.ones(1, dtype=torch.int32)
    numbers = (False, "bottom_right", -1, -1, 0.0, 1.0, 0, 0, "bshd", False, "auto", 0, 0)
    with pytest.raises(RuntimeError, match="attention: q requires a gradient; keys in pages"):
        ops.attention(q, pages, pages, None, None, None, None, None, None, table, keys, *numbers)
    scale = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(RuntimeError, match="attention: scale_q requires a gradient; scales get none"):
        ops.attention(q, q, q, None, scale, None, None, None, None, None, None, *numbers)


def test_saved_log_sums_are_no_output():
    q = rand(1, 3, 2, 8).requires_grad_()
    out = ts.attention(q, q, q)
    assert out.grad_fn is not None
    assert ts.attention(q, q, q, return_lse=True)[1].requires_grad


# Strides --------------------------------------------------------------------------------------------------------------


def layouts(*shape: int) -> dict[str, torch.Tensor]:
    """Tensors of one shape that lie differently, each with a gradient."""
    *batch, rows, columns = shape
    found = {
        "row-major": rand(*shape), "transposed": rand(*batch, columns, rows).mT,
        "padded": rand(*batch, rows, 2 * columns)[..., ::2], "expanded": rand(1, columns).expand(shape),
    }  # fmt: skip
    return {name: x.requires_grad_() for name, x in found.items()}


#: Ops of two operands, the same in torch, and the operands' shapes; where torch folds a broadcast it transposes.
STRIDED = {
    "mm": (ts.mm, torch.mm, (3, 4), (4, 5)),
    "linear, 2-D": (ts.linear, F.linear, (3, 4), (5, 4)),
    "linear, 3-D": (ts.linear, F.linear, (2, 3, 4), (5, 4)),
    "linear, bias": (
        lambda x, w: ts.linear(x, w, rand(5)), lambda x, w: F.linear(x, w, rand(5)), (2, 3, 4), (5, 4)
    ),
    "relu": (
        lambda x, w: ts.linear(x, w, activation="relu"), lambda x, w: F.linear(x, w).relu(), (3, 4), (5, 4)
    ),
    "addmm": (lambda a, b: ts.addmm(rand(5), a, b), lambda a, b: torch.addmm(rand(5), a, b), (3, 4), (4, 5)),
    "bmm": (ts.bmm, torch.bmm, (2, 3, 4), (2, 4, 5)),
    "matmul, folded": (ts.matmul, torch.matmul, (2, 3, 4), (4, 5)),
    "matmul, broadcast": (ts.matmul, torch.matmul, (2, 3, 3, 4), (3, 4, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", STRIDED)
def test_gradients_have_torchs_strides(name):
    op, by_torch, *shapes = STRIDED[name]
    for how_a, a in layouts(*shapes[0]).items():
        for how_b, b in layouts(*shapes[1]).items():
            for create_graph in (False, True):
                answers = [f(a, b) for f in (op, by_torch)]
                grads = rand(*answers[0].shape), torch.ones(()).expand(answers[0].shape)
                for grad in grads:
                    mine, theirs = (
                        torch.autograd.grad(y, (a, b), grad, create_graph=create_graph, retain_graph=True)
                        for y in answers
                    )
                    for x, y in zip(mine, theirs, strict=True):
                        torch.testing.assert_close(x, y)
                        assert x.stride() == y.stride(), (how_a, how_b)


def test_a_residual_has_the_gradient_itself():
    residual, bias = rand(3, 5).requires_grad_(), rand(5).requires_grad_()
    grad = torch.ones(()).expand(3, 5)
    for f in (
        lambda: ts.addmm(residual, rand(3, 4), rand(4, 5)),
        lambda: torch.addmm(residual, rand(3, 4), rand(4, 5)),
    ):
        assert torch.autograd.grad(f(), residual, grad)[0].stride() == (0, 0)
    assert torch.autograd.grad(ts.linear(rand(3, 4), rand(5, 4), bias), bias, grad)[0].stride() == (1,)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_attention_has_gradients_that_lie_as_its_operands(layout):
    # As torch's own kernels for GPUs have them, so that nothing is copied into .grad.
    for swapped in (False, True):
        x = [rand(2, 4, 4, 8).transpose(1, 2).requires_grad_() if swapped else rand(2, 4, 4, 8).requires_grad_()
             for _ in range(3)]  # fmt: skip
        for y, grad in zip(x, torch.autograd.grad(ts.attention(*x, layout=layout).sum(), x), strict=True):
            assert grad.stride() == y.stride()
    qkv = rand(2, 4, 3, 4, 8).requires_grad_()
    assert torch.autograd.grad(ts.attention(*qkv.unbind(2), layout=layout).sum(), qkv)[0].is_contiguous()


def test_float64_sinks_count_in_float64():
    q, k, v, sinks = made(*QKV, (4,))
    close(ts.attention(q, k, v, sinks=sinks), ATTENTIONS["attention"][1](q, k, v, sinks)[0])


# Plain tensors: the gradient without the registered ops --------------------------------------------------------------

#: Shapes of a and b, and options of the call.
PLAIN = {
    "matrices": ((3, 4), (4, 5), {}),
    "rows of three dimensions": ((2, 3, 4), (4, 5), {"bias": True}),
    "batches": ((2, 3, 4), (2, 4, 5), {"bias": True}),
    "relu": ((2, 3, 4), (4, 5), {"bias": True, "activation": "relu"}),
    "gelu": ((2, 3, 4), (4, 5), {"bias": True, "activation": "gelu"}),
    "residual": ((2, 3, 4), (4, 5), {"bias": True, "residual": True}),
    "factors": ((2, 3, 4), (2, 4, 5), {"bias": True, "residual": True, "alpha": 0.5, "beta": -2.0}),
    "factors, gelu": ((3, 4), (4, 5), {"bias": True, "residual": True, "alpha": 3.0, "activation": "gelu"}),
    "how": ((3, 4), (4, 5), {"activation": "silu", "schedule": "stream_k", "workers": 2}),
}


def plain(shape_a, shape_b, options, dtype=torch.float64):
    a, b, bias = (rand(*shape, dtype=dtype, seed=i) for i, shape in enumerate((shape_a, shape_b, shape_b[-1:])))
    given = [a, b, *[bias] * ("bias" in options), *[(a @ b).sin()] * ("residual" in options)]
    leaves = [x.requires_grad_() for x in given]

    def call(a, b, bias=None, residual=None):
        r = request.Request("matmul", a, b, **options | {"bias": bias, "residual": residual})
        assert request._is_seen_by_autograd_alone(r)
        return request._Product.apply(a, b, bias, residual, r)

    def by_torch(a, b, bias=None, residual=None):
        product = options.get("alpha", 1) * (a @ b) + (0 if bias is None else bias)
        product = product if residual is None else product + options.get("beta", 1) * residual
        return ACTIVATIONS[options.get("activation")](product)

    return call, by_torch, leaves


@pytest.mark.parametrize("name", PLAIN)
def test_plain_tensors_have_the_same_gradients(name):
    call, by_torch, x = plain(*PLAIN[name])
    answers = call(*x), by_torch(*x)
    close(*answers)
    grads = [torch.autograd.grad(y, x, torch.cos(answers[1].detach())) for y in answers]
    close(*grads)
    assert [y.stride() for y in grads[0]] == [y.stride() for y in grads[1]]
    assert torch.autograd.gradcheck(call, x, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, x, fast_mode=True)
    if name != "relu":  # which keeps its output
        call(*x).mul_(2).sum().backward()  # no view, so it may be changed in place
        close(x[0].grad, 2 * torch.autograd.grad(by_torch(*x).sum(), x[0])[0])


def test_a_plain_product_keeps_its_operands_and_no_more():
    call, _, x = plain(*PLAIN["rows of three dimensions"])
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda y: kept.append(y) or y, lambda y: y):
        call(*x)
    assert [one.data_ptr() for one in kept] == [one.data_ptr() for one in x[:2]]
    y = call(*x)
    x[0].detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_plain_products_are_launched_natively_both_ways(monkeypatch):
    asked = []

    def product(op, a, b, out=None, bias=None, residual=None, alpha=1, beta=1, activation=None, dtype=None, *others):
        asked.append((op, tuple(a.shape), tuple(b.shape), activation, limits.limit()))
        y = a @ (b.t() if op == "linear" else b)
        return ACTIVATIONS[activation](y if bias is None else y + bias).to(dtype)

    monkeypatch.setattr(request.native, "product", product)
    monkeypatch.setattr(request.native, "observed", None)
    x, w, bias = (y.requires_grad_() for y in made((2, 3, 4), (5, 4), (5,)))
    with ts.worker_limit(3):
        y = request._Product.apply(x, w, bias, None, request.Request("linear", x, w, bias=bias, activation="silu"))
    y.sum().backward()
    assert asked == [
        ("linear", (2, 3, 4), (5, 4), "silu", 3),
        ("matmul", (2, 3, 4), (4, 5), None, 3),
        ("matmul", (6, 5), (5, 4), None, 3),
        ("matmul", (5, 6), (6, 4), None, 3),
    ]
    assert w.grad.is_contiguous()
    asked.clear()
    request._Product.apply(x, w, None, None, request.Request("linear", x, w)).sum().backward()
    assert [shapes for _, *shapes, activation, bound in asked if activation is None and not bound] == [
        [(2, 3, 4), (5, 4)], [(6, 5), (5, 4)], [(5, 6), (6, 4)],
    ]  # fmt: skip
    w.grad = None
    r = request.Request("linear", x, w, bias=bias, activation="silu")
    request._Product.apply(x, w, bias, None, r).sum().backward()
    close(w.grad, torch.autograd.grad(F.silu(F.linear(x, w, bias)).sum(), w)[0])


class Own(torch.Tensor):
    pass


def test_what_is_plain():
    a, b, c = rand(3, 4), rand(4, 5).requires_grad_(), rand(2, 4, 5)
    is_plain = request._is_seen_by_autograd_alone
    of = functools.partial(request.Request, "matmul")
    for r in (
        of(a, b),
        of(c.mT, b.mT.mT),
        of(b.mT, a.mT),
        of(a, c[0], bias=rand(5).requires_grad_()),
        of(c.mT, c, bias=b[0]),
        of(a, b, residual=rand(3, 5), beta=2),
        of(a, b.detach(), residual=rand(3, 5).requires_grad_(), alpha=0.5),
        functools.partial(request.Request, "linear")(a, rand(5, 4), residual=rand(3, 5).requires_grad_()),
    ):
        assert is_plain(r)
    with torch.no_grad():
        assert not is_plain(of(a, b))
    with torch.autograd.forward_ad.dual_level():
        assert not is_plain(of(a, b))
    with FakeTensorMode():
        assert not is_plain(of(a, b))
    func.vmap(lambda x: (is_plain(of(a, b)) and pytest.fail("a transform is active"), x)[1])(a)
    nested = torch.nested.nested_tensor([rand(3, 4)]).requires_grad_()
    for r in (
        of(a, rand(4, 5)), of(a[0], b), of(a, b, out=rand(3, 5)), of(a, b, residual=rand(5)),
        of(a, b, residual=rand(3, 5), beta=True), of(a, b, residual=rand(3, 5).as_subclass(Own)),
        of(a, rand(4, 5), residual=rand(3, 5)), of(a, b, residual=1.0),
        of(a, b, scale_a=torch.ones(())), of(a, b, scale_b=torch.ones(())), of(c[:1].mT, c, bias=b[0]),
        of(a.to(torch.float8_e4m3fn), b), of(a.as_subclass(Own), b), of(a.to("meta"), b), of(nested, nested),
        of(a, None), of(c[None], c, bias=b[0]),
    ):  # fmt: skip
        assert not is_plain(r), r
