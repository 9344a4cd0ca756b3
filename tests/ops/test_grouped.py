"""`tilestream.grouped_mm` on the CPU: against a plain loop, its derivatives, its forms, and what it refuses."""

from __future__ import annotations

import functools
import itertools
import re

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tilestream as ts
from error_rule import ACTIVATIONS, Maths, check, rand
from grouped_cases import offsets_of
from tilestream.core.operands import Epilogue, GroupedOperands
from tilestream.ops import execute
from tilestream.ops.grouped_library import problem_of

F64, E4M3, E5M2 = torch.float64, torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
execute_run = execute.run
FORMS = ("rows", "columns", "k")
#: Sizes of three groups, of 17 rows (columns, K): rows of no group; an empty group; all in one; none.
SIZES = [(3, 4, 2), (0, 17, 0), (16, 0, 1), (0, 0, 0)]


def operands(form, dtype=torch.float32, groups=3):
    a, b = {
        "rows": ((17, 8), (groups, 8, 6)), "columns": ((groups, 6, 8), (8, 17)), "k": ((6, 17), (17, 5)),
    }[form]  # fmt: skip
    return rand(*a, dtype=dtype), rand(*b, dtype=dtype, seed=1)


def loop(form, a, b, ends, bias=None):
    """Each group's product, and where in the result it is: a plain loop."""
    begin = 0
    for group, end in enumerate(ends.tolist()):
        run = slice(begin, end)
        if form == "rows":
            yield (run,), a[run] @ b[group] + (0 if bias is None else bias[group])
        elif form == "columns":
            yield (slice(None), run), a[group] @ b[:, run] + (0 if bias is None else bias[run])
        else:
            yield (group,), a[:, run] @ b[run] + (0 if bias is None else bias[group])
        begin = end


def by_loop(form, a, b, ends, bias=None, activation=None):
    shape = (len(ends), a.shape[0], b.shape[1]) if form == "k" else (a.shape[-2], b.shape[-1])
    out = a.new_zeros(shape)
    for where, product in loop(form, a, b, ends, bias):
        out = out.index_put(_indices(out, where), ACTIVATIONS[activation](product))
    return out


def _indices(out, where):
    numbers = torch.arange(out.numel()).view(out.shape)[where]
    return torch.unravel_index(numbers, out.shape)


def check_derivatives(call, inputs, fast):
    """First and second derivatives, forward too; ``fast``: along random directions, not each by itself."""
    assert torch.autograd.gradcheck(call, inputs, check_forward_ad=True, fast_mode=fast)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=fast)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_groups_of_any_size(form, dtype):
    a, b = operands(form, dtype)
    for sizes in SIZES:
        ends = offsets_of(sizes)
        out = ts.grouped_mm(a, b, ends)
        assert out.is_contiguous()
        seen = torch.zeros_like(out, dtype=torch.bool)
        for (where, _), part in zip(loop(form, a, b, ends), parts(form, a, b, ends), strict=True):
            check(out[where], Maths(*part))
            seen[where] = True
        assert not out[~seen].any(), "what no group has is zero"


def parts(form, a, b, ends):
    begin = 0
    for group, end in enumerate(ends.tolist()):
        run = slice(begin, end)
        yield {
            "rows": lambda r=run, g=group: (a[r], b[g]), "columns": lambda r=run, g=group: (a[g], b[:, r]),
            "k": lambda r=run: (a[:, r], b[r]),
        }[form]()  # fmt: skip
        begin = end


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_epilogue(form, activation):
    (a, b), ends = operands(form, F64), offsets_of(SIZES[0])
    bias = rand(17, dtype=F64) if form == "columns" else rand(3, b.shape[-1], dtype=F64)
    out = ts.grouped_mm(a, b, ends, bias=bias, activation=activation)
    assert torch.allclose(out, by_loop(form, a, b, ends, bias, activation))


def test_batches_are_a_form_without_offsets():
    a, b, bias = rand(3, 5, 8), rand(3, 8, 6), rand(3, 6)
    assert torch.allclose(ts.grouped_mm(a, b, bias=bias, activation="relu"), (a @ b + bias[:, None]).relu())
    scale_a, scale_b = rand(3, 5).abs(), rand(3, 6).abs()
    wanted = scale_a[:, :, None] * scale_b[:, None] * (a @ b)
    assert torch.allclose(ts.grouped_mm(a, b, scale_a=scale_a, scale_b=scale_b), wanted, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kinds", [(E4M3, E4M3), (E5M2, E4M3)], ids=str)
def test_operands_of_8_bits_and_scales(kinds, form):
    (a, b), ends = operands(form), offsets_of(SIZES[0])
    a, b = a.to(kinds[0]), b.to(kinds[1])
    shape_a = (17,) if form == "rows" else (3, 6)
    shape_b = {"rows": (3, 6), "columns": (17,), "k": (3, 5)}[form]
    scale_a, scale_b = rand(*shape_a).abs() + 0.5, rand(*shape_b).abs() + 0.5
    wide = (x.double() for x in (a, b))
    rows = scale_a[..., None].double()
    columns = scale_b.double() if form == "columns" else scale_b[:, None].double()
    wanted = by_loop(form, *wide, ends)
    for where, _ in loop(form, a.double(), b.double(), ends):
        group = where[0] if form == "k" else SIZES[0].index((where[-1].stop or 0) - (where[-1].start or 0))
        mine = rows[where[0]] if form == "rows" else rows[group]
        theirs = columns[where[-1]] if form == "columns" else columns[group]
        wanted[where] *= mine * theirs
    out = ts.grouped_mm(a, b, ends, scale_a=scale_a, scale_b=scale_b)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.double(), wanted, rtol=0.01, atol=0.01 * wanted.abs().max().item())
    one = ts.grouped_mm(a, b, ends, scale_a=torch.tensor(2.0), out_dtype=torch.float32)
    assert torch.allclose(one.double(), 2 * by_loop(form, a.double(), b.double(), ends), atol=1e-4)


def halves(seed=3, dtype=F64):
    """A, B of two halves, and their bias."""
    return rand(17, 8, dtype=dtype), rand(3, 8, 10, dtype=dtype, seed=seed), rand(3, 10, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_swiglu_of_two_halves(sizes, dtype):
    (a, b, bias), ends = halves(dtype=dtype), offsets_of(sizes)
    out = ts.grouped_mm(a, b, ends, bias=bias, activation="swiglu")
    assert out.shape == (17, 5)
    begin = 0
    for group, end in enumerate(ends.tolist()):
        check(out[begin:end], Maths(a[begin:end], b[group], bias[group], activation="swiglu"))
        begin = end
    assert not out[begin:].any()
    into = torch.full((17, 12), float("nan"), dtype=dtype)[:, 1:11:2]
    assert torch.equal(ts.grouped_mm(a, b, ends, bias=bias, activation="swiglu", out=into), out)
    with ts.worker_limit(1):
        limited = ts.grouped_mm(a, b, ends, bias=bias, activation="swiglu", workers=1)
    assert torch.allclose(limited.double(), out.double(), rtol=0.01, atol=1e-5)


def swiglu_of(inputs):
    return functools.partial(swiglu, offsets_of(SIZES[0])), [x.requires_grad_() for x in inputs]


def swiglu(ends, a, b, bias):
    return ts.grouped_mm(a, b, ends, bias=bias, activation="swiglu")


def test_each_derivative_of_swiglu():
    check_derivatives(*swiglu_of(halves()), fast=False)


def test_derivatives_of_swiglu():
    call, inputs = swiglu_of(halves())
    check_derivatives(call, inputs, fast=True)
    many = torch.vmap(lambda a: call(a, *inputs[1:]))(torch.stack([inputs[0], -inputs[0]]))
    assert torch.allclose(many[1], call(-inputs[0], *inputs[1:]))


def test_swiglu_compiled():
    (a, b, _), ends = [x.requires_grad_() for x in halves(dtype=torch.float32)], offsets_of(SIZES[0])
    call = torch.compile(
        lambda a, b, ends: ts.grouped_mm(a, b, ends, activation="swiglu"), fullgraph=True, backend="aot_eager"
    )
    answers = [f(a, b, ends) for f in (call, lambda a, b, ends: ts.grouped_mm(a, b, ends, activation="swiglu"))]
    assert torch.equal(*answers)
    grads = [torch.autograd.grad(answer.sum(), (a, b)) for answer in answers]
    assert all(torch.allclose(x, y) for x, y in zip(*grads, strict=True))


def blocks(k=300, n=200):
    """Operands of 8 bits, and their scales of blocks of 128."""
    of_k, of_n = -(-k // 128), -(-n // 128)
    a, b = rand(17, k).to(E4M3), rand(3, n, k, seed=1).to(E4M3).mT
    return a, b, rand(17, of_k, seed=2).abs() + 0.1, rand(3, of_n, of_k, seed=3).mT.abs() + 0.1


def by_blocks(a, b, scale_a, scale_b, ends):
    """The sum over blocks of K, each scaled by itself: a plain loop in float64."""
    out, begin = torch.zeros(a.shape[0], b.shape[2], dtype=F64), 0
    for group, end in enumerate(ends.tolist()):
        run = slice(begin, end)
        for i, j in itertools.product(range(scale_b.shape[1]), range(scale_b.shape[2])):
            depth, columns = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            product = a[run, depth].double() @ b[group, depth, columns].double()
            out[run, columns] += scale_a[run, i, None].double() * scale_b[group, i, j].double() * product
        begin = end
    return out


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("k", "n"), [(300, 200), (128, 128), (40, 130), (256, 1)])
def test_scales_of_blocks(k, n, sizes):
    (a, b, scale_a, scale_b), ends = blocks(k, n), offsets_of(sizes)
    wanted = by_blocks(a, b, scale_a, scale_b, ends)
    out = ts.grouped_mm(a, b, ends, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
    assert torch.allclose(out.double(), wanted, atol=1e-5 * max(wanted.abs().max().item(), 1))
    across = ts.grouped_mm(b.mT, a.t(), ends, scale_a=scale_b.mT, scale_b=scale_a.t(), out_dtype=torch.float32)
    assert torch.allclose(across.t(), out, atol=1e-5 * max(wanted.abs().max().item(), 1))
    if n % 2 == 0:
        gate, up = wanted.chunk(2, 1)
        out = ts.grouped_mm(a, b, ends, scale_a=scale_a, scale_b=scale_b, activation="swiglu")
        wanted = torch.nn.functional.silu(gate) * up
        assert torch.allclose(out.double(), wanted, rtol=0.01, atol=0.01 * wanted.abs().max().item())


@pytest.mark.parametrize("form", FORMS)
def test_out(form):
    (a, b), ends = operands(form), offsets_of(SIZES[0])
    wanted = ts.grouped_mm(a, b, ends)
    store = torch.full((*wanted.shape[:-1], 2 * wanted.shape[-1] + 1), float("nan"))
    out = store[..., 1::2]
    assert ts.grouped_mm(a, b, ends, out=out) is out
    assert torch.allclose(out, wanted)
    assert store[..., ::2].isnan().all()
    assert torch.equal(ts.grouped_mm(a, b, ends, out=torch.empty(0)), wanted)
    version = out._version
    ts.grouped_mm(a, b, ends, out=out)
    assert out._version > version


def derived(form, activation):
    """A product of float64, and what it is derived by."""
    ends = offsets_of(SIZES[0])
    a, b = (x.requires_grad_() for x in operands(form, F64))
    bias = rand(17, dtype=F64) if form == "columns" else rand(3, b.shape[-1], dtype=F64)

    def call(a, b, bias):
        return ts.grouped_mm(a, b, ends, bias=bias, activation=activation)

    return call, (a, b, bias.requires_grad_())


activations = pytest.mark.parametrize("activation", [None, "relu", "gelu_tanh"])


@activations
@pytest.mark.parametrize("form", FORMS)
def test_derivatives(form, activation):
    check_derivatives(*derived(form, activation), fast=True)


@activations
@pytest.mark.parametrize("form", FORMS)
def test_each_derivative(form, activation):
    check_derivatives(*derived(form, activation), fast=False)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_lie_as_their_operands_do(form):
    ends = offsets_of(SIZES[0])
    for turned in (False, True):
        a, b = (x.mT.contiguous().mT if turned else x for x in operands(form))
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        for x, grad in zip((a, b), torch.autograd.grad(ts.grouped_mm(a, b, ends).sum(), (a, b)), strict=True):
            assert grad.stride() == x.stride()


def test_the_gradient_of_two_columns_lies_as_they_do():
    a, b = rand(9, 2).mT.contiguous().mT.requires_grad_(), rand(3, 2, 6)
    (grad,) = torch.autograd.grad(ts.grouped_mm(a, b, offsets_of((4, 0, 5))).sum(), (a,))
    assert grad.stride() == a.stride() == (1, 9)


def test_the_rows_of_no_group_have_no_gradient():
    a, b = (x.requires_grad_() for x in operands("rows"))
    bias = rand(3, 6).requires_grad_()
    out = ts.grouped_mm(a, b, offsets_of(SIZES[0]), bias=bias, activation="silu")
    grad = torch.ones_like(out)
    grad[9:] = float("nan")
    found = torch.autograd.grad(out, (a, b, bias), grad)
    assert not any(x.isnan().any() for x in found)
    assert not found[0][9:].any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap(form, dims):
    ends = offsets_of(SIZES[0])
    a, b = operands(form)
    many = [torch.stack([x, 2 * x, -x]) if dim == 0 else x for x, dim in zip((a, b), dims, strict=True)]
    found = torch.vmap(lambda a, b: ts.grouped_mm(a, b, ends), dims)(*many)
    for i in range(3):
        a, b = (x[i] if dim == 0 else x for x, dim in zip(many, dims, strict=True))
        assert torch.allclose(found[i], ts.grouped_mm(a, b, ends))


@pytest.mark.parametrize("form", FORMS)
def test_compiled_with_any_offsets(form):
    a, b = (x.requires_grad_() for x in operands(form))
    call = torch.compile(lambda a, b, ends: ts.grouped_mm(a, b, ends).relu(), fullgraph=True, backend="aot_eager")
    for sizes in SIZES[:2]:
        ends = offsets_of(sizes)
        answers = [f(a, b, ends) for f in (call, lambda a, b, ends: ts.grouped_mm(a, b, ends).relu())]
        assert torch.equal(*answers)
        grads = [torch.autograd.grad(answer.sum(), (a, b)) for answer in answers]
        assert all(torch.allclose(x, y) for x, y in zip(*grads, strict=True))


@pytest.mark.parametrize("name", ["grouped_gemm", "grouped_gemm_out"])
@pytest.mark.parametrize("along", ["rows", "k"])
def test_the_registered_ops_keep_torchs_rules(name, along):
    a, b = operands(along)
    shape = (17, 6) if along == "rows" else (3, 6, 5)
    more = (torch.empty(shape),) if name.endswith("out") else (True,)
    args = (a, b, offsets_of(SIZES[0]), None, "relu", None, "auto", 0, *more)
    torch.library.opcheck(getattr(torch.ops.tilestream, name).default, args)


def test_flops_are_those_of_a_product_of_all_rows():
    a, b = operands("rows")
    with FlopCounterMode(display=False) as counter:
        ts.grouped_mm(a, b, offsets_of(SIZES[0]))
    assert counter.get_total_flops() == 2 * 17 * 8 * 6


def test_meta_tensors_have_the_shape():
    a, b = (x.to("meta") for x in operands("k"))
    assert ts.grouped_mm(a, b, torch.empty(4, dtype=torch.int32, device="meta")).shape == (4, 6, 5)


def test_empty_operands():
    for m, n, k, groups in itertools.product((0, 3), (0, 2), (0, 4), (0, 2)):
        ends = offsets_of([m // 2] * groups) if groups else torch.empty(0, dtype=torch.int32)
        out = ts.grouped_mm(rand(m, k), rand(groups, k, n), ends)
        assert out.shape == (m, n)
        assert not out.any() or (k and groups)


def test_workers_and_a_limit():
    a, b, ends = rand(90, 40), rand(3, 40, 50), offsets_of((30, 0, 50))
    wanted = ts.grouped_mm(a, b, ends)
    assert torch.allclose(ts.grouped_mm(a, b, ends, workers=2, schedule="static"), wanted, atol=1e-5)
    with ts.worker_limit(1):
        assert torch.allclose(ts.grouped_mm(a, b, ends), wanted, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_bias_of_one_element(form):
    (a, b), ends = operands(form, groups=1), torch.tensor([17], dtype=torch.int32)
    a, b, bias = (a[..., :1, :], b, rand(17)) if form == "columns" else (a, b[..., :1], rand(1, 1))
    wanted = by_loop(form, a, b, ends, bias, "relu")
    assert torch.allclose(ts.grouped_mm(a, b, ends, bias=bias, activation="relu"), wanted, atol=1e-6)
    assert torch.allclose(ts.grouped_mm(a, b, ends, bias=bias, activation="relu", workers=1), wanted, atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_a_limit_holds_for_products_with_a_bias(form, monkeypatch):
    """Also for one of an element a row, of a group of one column, and of more tiles than one."""
    ends, long = offsets_of((1, 6, 0)), 3000
    a, b = {
        "rows": (rand(8, 8), rand(3, 8, long)), "columns": (rand(3, long, 8), rand(8, 8)),
        "k": (rand(6, 8), rand(8, long)),
    }[form]  # fmt: skip
    bias = rand(8) if form == "columns" else rand(3, long)
    workers = []
    monkeypatch.setattr(execute, "run", lambda *x, **how: workers.append(x[1].limit) or execute_run(*x, **how))
    with ts.worker_limit(1):
        out = ts.grouped_mm(a, b, ends, bias=bias, activation="relu")
    assert torch.allclose(out, by_loop(form, a, b, ends, bias, "relu"), atol=1e-5)
    assert workers == [1] * (3 if form == "k" else 2)


def test_autocast():
    a, b = operands("rows")
    with torch.autocast("cpu", torch.bfloat16):
        assert ts.grouped_mm(a, b, offsets_of(SIZES[0])).dtype == torch.bfloat16


@pytest.mark.parametrize(("a", "b", "why"), [
    (rand(64, 32), rand(3, 48, 32).mT, ""), (rand(64, 32), rand(3, 32, 48), ""),
    (rand(32, 64).t(), rand(3, 48, 32).mT, "a is not contiguous along K: a group would begin anywhere"),
    (rand(64, 32).t(), rand(64, 48), ""), (rand(32, 64), rand(64, 48), "a is not contiguous along K"),
])  # fmt: skip
def test_groups_begin_where_a_copy_can(a, b, why):
    """Along what groups divide, no copy of TMA begins, and no vector."""
    a, b = a.bfloat16(), b.bfloat16() if b.is_contiguous() else b.mT.bfloat16().mT
    a = a if a.is_contiguous() else a.t().contiguous().t()
    problem = problem_of(GroupedOperands(a, b, torch.empty(64, 48), Epilogue(), offsets_of((1, 2, 3))))
    assert problem.aligned == (not why)
    assert bool(problem.no_tma) == bool(why)
    assert (why in problem.no_tma) or problem.along == "k"


# Refusals -------------------------------------------------------------------------------------------------------------

A, B, ENDS = torch.ones(5, 4), torch.ones(2, 4, 3), torch.tensor([2, 5], dtype=torch.int32)
REFUSED = {
    "falling": ({"offsets": ENDS.flip(0)}, ValueError, "offsets=[5, 2]; they do not fall, and go from 0 to 5 at most"),
    "beyond": ({"offsets": ENDS + 1}, ValueError, "offsets=[3, 6]; they do not fall"),
    "negative": ({"offsets": ENDS - 3}, ValueError, "offsets=[-1, 2]; they do not fall"),
    "int64": ({"offsets": ENDS.long()}, TypeError, "offsets is torch.int64; it must be torch.int32: offsets.int()"),
    "two dimensions": ({"offsets": ENDS[None]}, ValueError, "offsets has shape [1, 2]; it has one element a group"),
    "none": ({"offsets": None}, ValueError, "offsets=None with a [5, 4] and b [2, 4, 3]; they say where groups end"),
    "a list": ({"offsets": [2, 5]}, TypeError, "offsets is a list; it must be a torch.Tensor"),
    "too many": ({"offsets": ENDS[:1]}, ValueError, "offsets has 1 elements, b 2 groups"),
    "batches": ({"a": B, "b": B.mT}, ValueError, "offsets with a and b of 3 dimensions"),
    "batches differ": ({"a": B.mT[:1], "b": B, "offsets": None}, ValueError, "a has 1 groups, b has 2"),
    "dimensions": ({"a": A[0]}, ValueError, "a has 1 and b 3 dimensions; each has 2 or 3"),
    "K": ({"a": A[:, 1:]}, ValueError, "a [5, 3] and b [2, 4, 3] differ in K: 3 and 4"),
    "halves of columns": (
        {"a": B.mT, "b": A.t(), "activation": "swiglu"}, ValueError,
        "with a [2, 3, 4] and b [4, 5]; it is of groups of rows: a [M, K], b [G, K, 2 F] and offsets",
    ),
    "halves of K": ({"a": A.t(), "b": A, "activation": "swiglu"}, ValueError, "it is of groups of rows"),
    "halves of batches": (
        {"a": B.mT, "b": B, "offsets": None, "activation": "swiglu"}, ValueError, "it is of groups of rows",
    ),
    "an odd half": ({"activation": "swiglu"}, ValueError, "half of b's columns are gates: it has an even number"),
    "bias of one half": (
        {"b": torch.ones(2, 4, 6), "bias": torch.ones(2, 3), "activation": "swiglu"}, ValueError,
        "bias has shape [2, 3]; it has one row a group: [2, 6]",
    ),
    "out of both halves": (
        {"b": torch.ones(2, 4, 6), "out": torch.ones(5, 6), "activation": "swiglu"}, ValueError,
        "out has shape [5, 6]; the result has [5, 3]",
    ),
    "blocks of one": (
        {"a": A.to(E4M3), "b": B.to(E4M3), "scale_b": torch.ones(2, 1, 1)}, ValueError,
        "scale_a of shape None beside a scale of blocks; of blocks it has [5, 1]",
    ),
    "blocks of rows": (
        {"a": A.to(E4M3), "b": B.to(E4M3), "scale_a": torch.ones(5), "scale_b": torch.ones(2, 1, 1)}, ValueError,
        "scale_a of shape [5] beside a scale of blocks; of blocks it has [5, 1]",
    ),
    "blocks of 32 bits": (
        {"scale_a": torch.ones(5, 1), "scale_b": torch.ones(2, 1, 1)}, TypeError,
        "scales of blocks, and a is torch.float32; they are of operands of 8 bits",
    ),
    "dtypes": ({"a": A.double()}, TypeError, "a is torch.float64, b is torch.float32"),
    "integers": ({"a": A.int()}, TypeError, "a: dtype: torch.int32"),
    "bias": ({"bias": torch.ones(3)}, ValueError, "bias has shape [3]; it has one row a group: [2, 3]"),
    "bias of 8 bits": ({"bias": torch.ones(2, 3).to(E4M3)}, TypeError, "bias is torch.float8_e4m3fn"),
    "scale": ({"scale_a": torch.ones(4)}, ValueError, "scale_a has shape [4]; it has one element, or [5], or [5, 1]"),
    "scale_b": ({"scale_b": torch.ones(3, 2)}, ValueError, "scale_b has shape [3, 2]; it has one element, or [2, 3]"),
    "scale's dtype": ({"scale_a": torch.ones(5).double()}, TypeError, "scale_a is torch.float64"),
    "out": ({"out": torch.ones(5, 2)}, ValueError, "out has shape [5, 2]; the result has [5, 3]"),
    "out's dtype": ({"out": torch.ones(5, 3).double()}, TypeError, "out is torch.float64, the result torch.float32"),
    "overlap": ({"a": A, "out": A[:, :3]}, ValueError, "out: overlaps a in memory"),
    "activation": ({"activation": "tanh"}, ValueError, "it must be None or one of relu, gelu, gelu_tanh, silu, swiglu"),
    "stream_k": ({"schedule": "stream_k"}, ValueError, "schedule='stream_k'; which tiles would be cut along K"),
    "schedule": ({"schedule": "best"}, ValueError, "schedule='best'; it must be one of"),
    "workers": ({"workers": 0}, ValueError, "workers=0; it must be a positive whole number"),
    "out_dtype": ({"out_dtype": "float32"}, TypeError, "out_dtype='float32'; it must be a torch.dtype"),
    "sparse": ({"a": A.to_sparse()}, TypeError, "a has layout torch.sparse_coo"),
    "two devices": ({"offsets": ENDS.to("meta")}, ValueError, "offsets is on meta, the others on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    change, kind, said = REFUSED[case]
    given = {"a": A.clone(), "b": B, "offsets": ENDS} | change
    with pytest.raises(kind, match=re.escape(said)):
        ts.grouped_mm(**given)


def test_gradients_that_there_are_not():
    a = A.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="out= has no gradient"):
        ts.grouped_mm(a, B, ENDS, out=torch.empty(5, 3))
    with pytest.raises(RuntimeError, match="multiply by the scales outside"):
        ts.grouped_mm(a, B, ENDS, scale_a=torch.ones(5))
    with pytest.raises(RuntimeError, match="scale_a requires a gradient"):
        ts.grouped_mm(A, B, ENDS, scale_a=torch.ones(5, requires_grad=True))
    op = torch.ops.tilestream.grouped_gemm
    with pytest.raises(ValueError, match="activation='swiglu' with groups of K: it is of groups of rows"):
        op(A.t(), A, ENDS, None, "swiglu", None, "auto", 0, False)
    with pytest.raises(ValueError, match="activation='swiglu': b has 3 columns; each half has as many"):
        op(A, B, ENDS, None, "swiglu", None, "auto", 0, False)


def test_equal_bits_are_not_promised_silently():
    with ts.invariant():
        with pytest.raises(NotImplementedError, match=r"grouped_mm: tilestream\.invariant promises each row"):
            ts.grouped_mm(torch.ones(10, 4), B, counts=torch.ones(2, 2, dtype=torch.int32))
        with pytest.raises(NotImplementedError, match="its tiles were not compared on sm_100"):
            ts.grouped_plan(64, 64, 64, 4, device="b200")


def test_a_stream_is_refused():
    with ts.stream_in(torch.ones(5, 4)) as stream, pytest.raises(TypeError, match="a is a Stream"):
        ts.grouped_mm(stream, B, ENDS)
