"""`tilestream.merge_attention` and its registered op: values, gradients, what follows them, what is refused."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import tilestream as ts
from attention_maths import Case, call_of
from error_rule import passes, rand
from tilestream.core.operands import MergeOperands
from tilestream.launch.cache import launch_cache
from tilestream.ops import attention_merge
from tilestream.ops.attention_merge import formula, merge_attention_op

#: Shapes of an output, and layouts.
LAYOUTS = {"bshd": ((2, 5, 3, 8), "bshd"), "bhsd": ((2, 3, 5, 8), "bhsd"), "packed": ((7, 3, 8), "bshd")}


def sums_shape(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[1]) if len(shape) == 4 and layout == "bshd" else shape[:-1]


def parts(name: str = "bshd", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Both parts, of which each has rows that saw nothing, one row both."""
    shape, layout = LAYOUTS[name]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    o_a, o_b = rand(*shape, dtype=dtype, seed=1), rand(*shape, dtype=dtype, seed=2)
    lse_a, lse_b = (4 * rand(*sums_shape(shape, layout), dtype=wide, seed=seed) for seed in (3, 4))
    lse_a.view(-1)[[0, 3, 8]] = -math.inf
    lse_b.view(-1)[[0, 5]] = -math.inf
    return o_a, lse_a, o_b, lse_b


def asked(name: str):
    """`merge_attention` with the layout of `parts`."""
    return lambda *x: ts.merge_attention(*x, layout=LAYOUTS[name][1])


def canonical(name: str, x: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """As the registered op takes them."""
    return tuple(one.transpose(1, 2) if name == "bshd" and one.dim() == 3 else one for one in x)


def in_long_double(name: str, x: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference, for float64 too."""
    o_a, lse_a, o_b, lse_b = (one.double().numpy().astype(np.longdouble) for one in canonical(name, x))
    with np.errstate(invalid="ignore"):
        whole = np.logaddexp(lse_a, lse_b)
        shares = [np.nan_to_num(np.exp(logs - whole))[..., None] for logs in (lse_a, lse_b)]
    out, lse = (torch.from_numpy(one.astype(np.float64)) for one in (o_a * shares[0] + o_b * shares[1], whole))
    return out, *canonical(name, (lse,))


# Values ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("cut", [0, 1, 17, 33])
def test_two_parts_of_the_keys_make_the_whole(cut, layout):
    call = call_of(Case((20,), (33,), (4, 2)))
    q, k, v = (call.tensors[name] for name in "qkv")
    rows = (lambda x: x.transpose(1, 2)) if layout == "bhsd" else (lambda x: x)
    two = [
        ts.attention(rows(q), rows(k[:, part]), rows(v[:, part]), layout=layout, return_lse=True)
        for part in (slice(0, cut), slice(cut, None))
    ]
    out, lse = ts.merge_attention(*two[0], *two[1], layout=layout)
    call.check(rows(out), lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", LAYOUTS)
def test_values_are_those_of_logaddexp(name, dtype):
    x = parts(name, dtype)
    out, lse = asked(name)(*x)
    assert (out.dtype, lse.dtype, out.shape, lse.shape) == (dtype, x[1].dtype, x[0].shape, x[1].shape)
    o_a, lse_a, o_b, lse_b = canonical(name, x)
    whole = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((logs - whole).exp().nan_to_num(0.0).unsqueeze(-1) for logs in (lse_a, lse_b))
    by_torch = (o_a * share_a + o_b * share_b).to(dtype), *canonical(name, (whole,))
    finer = in_long_double(name, x)
    assert passes(out, finer[0], by_torch[0])
    assert torch.equal(lse == -math.inf, finer[1] == -math.inf)
    assert passes(*(one.clamp_min(-99) for one in (lse, finer[1], by_torch[1])))


def test_packed_ones_and_what_saw_nothing():
    o, lse = torch.randn(7, 2, 16), torch.randn(7, 2)
    void, nothing = torch.full_like(o, math.nan), torch.full_like(lse, -math.inf)
    for given in ((o, lse, void, nothing), (void, nothing, o, lse)):
        out, logs = ts.merge_attention(*given)
        assert torch.equal(out, o)
        assert torch.equal(logs, lse)
    out, logs = ts.merge_attention(void, nothing, void, nothing)
    assert not out.any()
    assert torch.equal(logs, nothing)


@pytest.mark.parametrize("shape", [(0, 5, 3, 8), (2, 0, 3, 8), (2, 5, 0, 8), (2, 5, 3, 0), (0, 3, 8)])
def test_empty_ones(shape):
    o, lse = torch.zeros(shape), torch.zeros(sums_shape(shape, "bshd"))
    out, logs = ts.merge_attention(o, lse, o, lse)
    assert out.shape == o.shape
    assert torch.equal(logs, lse + math.log(2))


@pytest.mark.parametrize("rows", [(), (5,), (2, 2, 5, 3)])
def test_the_op_takes_any_number_of_rows(rows):
    o_a, o_b, lse_a, lse_b = rand(*rows, 8, seed=1), rand(*rows, 8, seed=2), rand(*rows, seed=3), rand(*rows, seed=4)
    out, lse = merge_attention_op(o_a, lse_a, o_b, lse_b)
    torch.testing.assert_close(lse, torch.logaddexp(lse_a, lse_b))
    share = torch.sigmoid(lse_a - lse_b).unsqueeze(-1)
    torch.testing.assert_close(out, share * o_a + (1 - share) * o_b)


def test_strides_are_those_of_the_first_part():
    o, lse = torch.zeros(2, 3, 5, 8).transpose(1, 2), torch.zeros(2, 5, 3).transpose(1, 2)
    out, logs = ts.merge_attention(o, lse, o.contiguous(), lse.contiguous())
    assert (out.stride(), logs.stride()) == (o.stride(), lse.stride())
    view = torch.zeros(2, 5, 3, 11)[..., :8]
    out, _ = ts.merge_attention(view, lse, o, lse)
    assert out.is_contiguous()


# Gradients ------------------------------------------------------------------------------------------------------------


def check_derivatives(name, fast):
    """First and second; ``fast``: along random directions, not each by itself."""
    x = [one.nan_to_num(neginf=-2.0).requires_grad_() for one in parts(name, torch.float64)]
    assert torch.autograd.gradcheck(asked(name), x, fast_mode=fast)
    assert torch.autograd.gradgradcheck(asked(name), x, fast_mode=fast)


@pytest.mark.parametrize("name", ["bshd", "packed"])
def test_gradients_and_second_derivatives(name):
    check_derivatives(name, fast=True)


@pytest.mark.parametrize("name", ["bshd", "packed"])
def test_each_gradient_and_second_derivative(name):
    check_derivatives(name, fast=False)


@pytest.mark.parametrize("which", range(4))
def test_one_operands_gradient_is_as_with_all(which):
    def gradients(*which: int) -> list[torch.Tensor | None]:
        x = [one.requires_grad_(i in which) for i, one in enumerate(parts("packed"))]
        out, lse = ts.merge_attention(*x)
        (out.square().sum() + lse.masked_fill(lse == -math.inf, 0.0).square().sum()).backward()
        return [one.grad for one in x]

    alone, all_ = gradients(which), gradients(0, 1, 2, 3)
    assert torch.equal(alone[which], all_[which])
    assert [one is not None for one in alone] == [i == which for i in range(4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_the_formula(dtype):
    close, found = 4 * torch.finfo(dtype).eps, []
    for op in (merge_attention_op, formula):
        x = [one.requires_grad_() for one in parts("packed", dtype)]
        out, lse = op(*x)
        (out.float().square().sum() + lse.masked_fill(lse == -math.inf, 0.0).square().sum()).backward()
        found.append([one.grad for one in x])
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=close, atol=close)


@pytest.mark.parametrize("op", [merge_attention_op, formula])
def test_what_does_not_count_has_no_gradient_whatever_is_in_it(op):
    o_a, lse_a, o_b, lse_b = parts("packed")
    lse_a.fill_(-math.inf)
    x = [one.requires_grad_() for one in (torch.full_like(o_a, math.nan), lse_a, o_b, lse_b)]
    out, lse = op(*x)
    (out.sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()).backward()
    assert not x[0].grad.any()
    assert not x[1].grad.any()
    counts = lse_b > -math.inf
    assert torch.equal(x[2].grad, counts.unsqueeze(-1).expand(o_b.shape).float())
    assert torch.equal(x[3].grad, counts.float())


# What follows a call --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("gradients", [False, True])
def test_opcheck(name, gradients):
    torch.library.opcheck(
        merge_attention_op, tuple(x.requires_grad_(gradients) for x in canonical(name, parts(name, torch.bfloat16)))
    )


def test_opcheck_of_views():
    o, lse = torch.randn(2, 3, 5, 11)[..., :8], torch.randn(2, 3, 5)
    torch.library.opcheck(merge_attention_op, (o, lse[:1].expand(2, 3, 5), o[:1].expand(2, 3, 5, 8), lse))


def test_fake_and_meta_tensors_agree_with_real_ones():
    for name in LAYOUTS:
        x = parts(name, torch.bfloat16)
        real = asked(name)(*x)
        with FakeTensorMode() as mode:
            fake = asked(name)(*(mode.from_tensor(one) for one in x))
        meta = asked(name)(*(one.to("meta") for one in x))
        for other in (fake, meta):
            for one, like in zip(other, real, strict=True):
                assert (one.shape, one.dtype, one.stride()) == (like.shape, like.dtype, like.stride()), name


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_compiler_is_given_torchs_operations(name):
    """It makes one kernel of them and of what stands around."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    x = parts(name)
    found = torch.compile(asked(name), fullgraph=True, backend=backend)(*x)
    for mine, like in zip(found, asked(name)(*x), strict=True):
        assert torch.equal(mine, like)
        assert mine.stride() == like.stride()
    assert "tilestream" not in graphs[0].code


def test_compiled_gradients():
    x = [one.requires_grad_() for one in parts()]
    for call in (torch.compile(asked("bshd"), fullgraph=True, backend="aot_eager"), asked("bshd")):
        out, _ = call(*x)
        out.square().sum().backward()
    twice = [one.grad.clone() for one in x]
    for one in x:
        one.grad = None
    asked("bshd")(*x)[0].square().sum().backward()
    for both, once in zip(twice, x, strict=True):
        torch.testing.assert_close(both, 2 * once.grad)


def test_a_trace_has_the_op():
    assert "tilestream.merge_attention" in make_fx(asked("bshd"))(*parts()).code


def test_transforms():
    call, x = asked("packed"), parts("packed", torch.float64)
    both = torch.func.vmap(call)(*(torch.stack([one, one.roll(1, 0)]) for one in x))
    for i, of in enumerate((x, [one.roll(1, 0) for one in x])):
        for mine, like in zip(both, call(*of), strict=True):
            torch.testing.assert_close(mine[i], like)
    x = [one.nan_to_num(neginf=-2.0) for one in x]
    weights = [torch.randn_like(one) for one in x]
    _, tangents = torch.func.jvp(call, tuple(x), tuple(weights))
    for i in range(2):
        grads = torch.func.grad(lambda *y, i=i: call(*y)[i].sum(), argnums=(0, 1, 2, 3))(*x)
        forward = sum((grad * weight).sum() for grad, weight in zip(grads, weights, strict=True))
        torch.testing.assert_close(tangents[i].sum(), forward)
    with forward_ad.dual_level():
        dual = call(*(forward_ad.make_dual(*pair) for pair in zip(x, weights, strict=True)))
        torch.testing.assert_close(forward_ad.unpack_dual(dual[0]).tangent, tangents[0])


def test_autocast_changes_nothing():
    x = parts(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = asked("bshd")(*x)
    for mine, like in zip(found, asked("bshd")(*x), strict=True):
        assert torch.equal(mine, like)
        assert mine.dtype == torch.float32


# The GPU's way --------------------------------------------------------------------------------------------------------


def operands(dtype: torch.dtype = torch.float16, shape: tuple[int, ...] = (2, 5, 3, 8), **more) -> MergeOperands:
    o, lse = torch.zeros(shape, dtype=dtype), torch.zeros(shape[:-1])
    return MergeOperands(o, lse, o, lse, torch.empty_like(o), torch.empty_like(lse))._replace(**more)


@pytest.mark.parametrize(
    ("x", "takes"),
    [
        (operands(), True),
        (operands(torch.bfloat16, (7, 3, 8)), True),
        (operands(torch.float32, o_b=torch.zeros(2, 5, 3, 8, dtype=torch.bfloat16)), True),
        (operands(o_a=torch.zeros(2, 3, 5, 16)[..., :8].transpose(1, 2)), True),
        (operands(shape=(2, 5, 3, 1), o_a=torch.zeros(2, 5, 3, 4)[..., :1]), True),
        (operands(torch.float64), False),
        (operands(lse_b=torch.zeros(2, 5, 3, dtype=torch.float64)), False),
        (operands(o_a=torch.zeros(2, 5, 3, 16)[..., ::2]), False),
        (operands(o_b=torch.zeros(2, 5, 3, 16)[..., ::2]), False),
        (operands(out=torch.zeros(2, 5, 3, 16)[..., ::2]), False),
        (operands(shape=(2, 5, 3, 0)), False),
        (operands(shape=(0, 3, 8)), False),
        (operands(shape=(5, 8)), False),
        (operands(shape=(1, 2, 5, 3, 8)), False),
        (operands(lse=torch.zeros(1).expand(2**31 - 2**10)), False),
    ],
)
def test_what_the_kernel_takes(x, takes):
    assert attention_merge._is_for_kernel(x) is takes


def test_a_gpu_has_an_implementation_of_its_own():
    assert torch._C._dispatch_has_kernel_for_dispatch_key("tilestream::merge_attention", "CUDA")


def test_a_launch_is_kept_for_equal_calls(monkeypatch):
    pytest.importorskip("triton")
    from tilestream.launch.portable import attention_launch

    made, launched = [], []

    class Launch:
        def __init__(self, x: MergeOperands) -> None:
            made.append(x)

        def __call__(self, x: MergeOperands) -> None:
            launched.append(x)

    monkeypatch.setattr(attention_launch, "PairLaunch", Launch)
    monkeypatch.setattr(attention_merge, "check_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(attention_merge, "launch_cache", type(launch_cache)())
    x = canonical("bshd", parts())
    for given in (x, x, canonical("bshd", parts()), (*x[:3], x[3].contiguous()), (x[0].half(), *x[1:])):
        out, lse = attention_merge._by_kernel(*given)
        assert (out.dtype, out.stride(), lse.stride()) == (given[0].dtype, given[0].stride(), given[1].stride())
        assert launched[-1].out is out
        assert launched[-1][:4] == tuple(given)
    assert (len(made), len(launched)) == (3, 5)
    found = attention_merge._by_kernel(*(one.double() for one in x))
    assert len(launched) == 5, "float64 is the formula's"
    assert torch.equal(found[0], formula(*(one.double() for one in x))[0])


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"o_a": None}, "o_a is None; it must be a torch.Tensor"),
        ({"lse_b": 1.0}, "lse_b is a float; it must be a torch.Tensor"),
        ({"layout": "hsbd"}, "layout='hsbd'; it must be one of bshd, bhsd"),
        ({"o_b": torch.zeros(1, 5, 2, 4)}, r"o_a \[1, 3, 2, 4\] and o_b \[1, 5, 2, 4\]; they are alike"),
        ({"lse_b": torch.zeros(1, 3, 2)}, r"lse_b has shape \[1, 3, 2\]; of such outputs it is \[1, 2, 3\]"),
        ({"lse_a": torch.zeros(1, 2, 3, device="meta")}, "lse_a is on meta, o_a on cpu; all are on one device"),
        ({"o_b": torch.zeros(1, 3, 2, 4, device="meta")}, "o_b is on meta, o_a on cpu; all are on one device"),
        ({"o_a": torch.zeros(1, 3, 2, 4).to_sparse()}, "o_a has layout torch.sparse_coo; tensors are dense"),
        ({"lse_b": torch.nested.nested_tensor([torch.zeros(2, 3)])}, "lse_b is nested; tensors are dense"),
        (
            {"o_b": torch.zeros(1, 3, 2, 4).int()},
            "o_b is torch.int32; it must be of a floating-point dtype of 16 bits or",
        ),
        (
            {"o_a": torch.zeros(1, 3, 2, 4).to(torch.float8_e4m3fn)},
            "o_a is torch.float8_e4m3fn; it must be of a floating",
        ),
    ],
)
def test_refuses(change, message):
    o, lse = torch.zeros(1, 3, 2, 4), torch.zeros(1, 2, 3)
    given = {"o_a": o, "lse_a": lse, "o_b": o, "lse_b": lse, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        ts.merge_attention(**given)


@pytest.mark.parametrize(
    "shapes", [((2, 5, 8), (5, 2), (2, 5, 8), (2, 5)), ((2, 5, 8), (2, 5), (2, 4, 8), (2, 5)), ((), (), (), ())]
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_op_refuses(shapes, device):
    with pytest.raises(ValueError, match="merge_attention: o_a, lse_a, o_b and lse_b have shapes"):
        merge_attention_op(*(torch.zeros(shape, device=device) for shape in shapes))
