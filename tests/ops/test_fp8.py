"""Operands of 8 bits, and scales of operands of any dtype: matmul, mm, bmm, linear, plans, arrivals, on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

import tilestream as ts
import tilestream.ops  # registers torch.ops.tilestream
from error_rule import ACTIVATIONS, DTYPES, FNUZ, FP8, NARROW, Maths, check, check_gradient, nans, rand
from tilestream.kernels.cpu.convert import widened
from tilestream.runtime.workspace import workspace

pytestmark = pytest.mark.usefixtures("small_tiles")

E4M3, E5M2 = FP8
PAIRS = [*itertools.product(FP8, FP8), *itertools.product(FNUZ, FNUZ)]
OUT = (torch.bfloat16, torch.float16, torch.float32)
HOWS = ({}, {"workers": 2}, {"schedule": "static", "workers": 3}, {"schedule": "stream_k", "workers": 3})
gemm = torch.ops.tilestream.gemm.default


def scales(kind: str, m: int, n: int, batch: tuple[int, ...] = ()) -> dict[str, torch.Tensor | None]:
    if kind == "none":
        return {"scale_a": None, "scale_b": None}
    if kind == "tensor":
        return {"scale_a": torch.tensor(0.75), "scale_b": torch.tensor([[3.0]])}
    return {"scale_a": rand(*batch, m, 1).exp(), "scale_b": rand(*batch, 1, n).exp()}


# Numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_each_of_the_256_values_is_converted_exactly(dtype, wide):
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    for x in (every.view(16, 16), every.view(16, 16).t(), every.view(16, 16)[::3, 1::2], every.view(1, 256)[:, :0]):
        with workspace() as scratch, widened(x, wide, scratch) as answer:
            torch.testing.assert_close(answer, x.to(wide), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(700, 300), (3, 70000), (1, 1), (70000, 3)], ids=str)
def test_what_is_converted_piece_by_piece_is_all_there(shape):
    x = rand(*shape).to(E4M3)
    for seen in (x, x.t(), x[:, ::2]):
        with workspace() as scratch, widened(seen, torch.float32, scratch) as answer:
            assert torch.equal(answer, seen.float())


def test_the_same_bits_are_other_numbers_of_the_other_kind():
    bits = torch.arange(1, 0x78, dtype=torch.uint8).view(1, -1)  # positive, and finite in both
    eye = torch.eye(bits.numel()).to(E4M3)
    halves = ts.matmul(bits.view(FNUZ[0]), eye.to(FNUZ[0]), out_dtype=torch.float32)
    assert torch.equal(2 * halves, ts.matmul(bits.view(E4M3), eye, out_dtype=torch.float32))


@pytest.mark.parametrize("scaled", ["none", "tensor", "row"])
@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_pairs_and_schedules(dtypes, scaled):
    a, b = rand(35, 40, dtype=dtypes[0]), rand(40, 37, dtype=dtypes[1])
    with_scales = scales(scaled, 35, 37)
    for how in HOWS:
        answer = ts.matmul(a, b, **with_scales, **how)
        assert answer.dtype == torch.bfloat16, "the default of 8-bit operands"
        check(answer, Maths(a, b, **with_scales))


@pytest.mark.parametrize("out_dtype", OUT, ids=str)
@pytest.mark.parametrize("scaled", ["tensor", "row"])
def test_the_whole_epilogue(scaled, out_dtype):
    a, b, bias, residual = rand(35, 40, dtype=E4M3), rand(40, 37, dtype=E5M2), rand(37), rand(35, 37)
    maths = {"bias": bias, "residual": residual, "beta": -0.5, "activation": "gelu", "out_dtype": out_dtype}
    maths |= scales(scaled, 35, 37)
    for how in HOWS:
        check(ts.mm(a, b, **maths, **how), Maths(a, b, **maths))
        out = nans(35, 37, dtype=out_dtype)
        assert ts.mm(a, b, **maths, **how, out=out) is out
        check(out, Maths(a, b, **maths))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaled", ["tensor", "row"])
def test_operands_of_any_dtype_are_scaled(scaled, dtype):
    a, b = rand(35, 40, dtype=dtype), rand(40, 37, dtype=dtype)
    with_scales = scales(scaled, 35, 37)
    for how in HOWS:
        answer = ts.matmul(a, b, **with_scales, **how)
        assert answer.dtype == dtype
        check(answer, Maths(a, b, **with_scales))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (5, 0, 7), (5, 7, 0), (1, 1, 1)])
def test_scales_of_nothing_and_of_one_number(m, n, k):
    a, b = rand(m, k, dtype=E4M3), rand(k, n, dtype=E4M3)
    check(ts.matmul(a, b, **scales("row", m, n)), Maths(a, b, **scales("row", m, n)))


def test_use_fast_accum_is_taken_and_changes_nothing_here():
    a, b = rand(35, 40, dtype=E4M3), rand(40, 37, dtype=E4M3)
    assert torch.equal(ts.matmul(a, b, use_fast_accum=False), ts.matmul(a, b))


def test_nan_and_infinity():
    a, b = rand(5, 40, dtype=E5M2), rand(40, 37, dtype=E4M3)
    a[1, 3], a[2, 4] = float("nan"), float("inf")
    answer = ts.matmul(a, b, scale_a=torch.tensor(2.0), workers=2)
    torch.testing.assert_close(answer, (2 * (a.float() @ b.float())).bfloat16(), equal_nan=True)
    b[7, 2] = float("nan")  # the one not-a-number of e4m3: it has no infinity
    assert ts.matmul(a, b, workers=2)[0].isnan().tolist() == [i == 2 for i in range(37)]


def test_a_product_of_scales_does_not_overflow_on_the_way():
    a, b = rand(20, 40, dtype=E4M3), rand(40, 33, dtype=E4M3)
    extreme = {"scale_a": torch.full((20, 1), 1e38), "scale_b": torch.full((1, 33), 1e-38)}
    maths = Maths(a, b, scale_a=torch.ones(20, 1), scale_b=torch.full((1, 33), 1.0))
    check(ts.matmul(a, b, **extreme), maths)


# Forms ---------------------------------------------------------------------------------------------------------------


def test_the_forms_of_a_scale():
    a, b = rand(35, 40, dtype=E4M3), rand(40, 37, dtype=E5M2)
    row, column = scales("row", 35, 37).values()
    ones_a, ones_b = torch.ones(35, 1), torch.ones(1, 37)
    for scale_a, scale_b, rows, columns in (
        (row, None, row, ones_b),
        (None, column, ones_a, column),
        (row[:, 0], column[0], row, column),
        (row, torch.tensor([2.0]), row, 2 * ones_b),
        (torch.tensor(3.0), column, 3 * ones_a, column),
        (torch.full((1, 1, 1), 3.0), None, 3 * ones_a, ones_b),
        (row.expand(35, 7)[:, 3:4], column.t().contiguous().t(), row, column),
        (torch.stack([row, -row], 1)[:, 0], column, row, column),
    ):
        check(ts.matmul(a, b, scale_a=scale_a, scale_b=scale_b), Maths(a, b, scale_a=rows, scale_b=columns))


FORMS = [
    ((40,), (40,), (), ()),
    ((5, 40), (40,), (5, 1), ()),
    ((40,), (40, 6), (), (1, 6)),
    ((2, 3, 5, 40), (40, 6), (2, 3, 5, 1), (1, 6)),
    ((2, 3, 5, 40), (40, 6), (5, 1), (6,)),
    ((2, 1, 5, 40), (3, 40, 6), (2, 1, 5, 1), (3, 1, 6)),
    ((2, 1, 5, 40), (3, 40, 6), (2, 3, 5, 1), (1, 6)),
    ((4, 5, 40), (4, 40, 6), (4, 5, 1), (4, 1, 6)),
    ((4, 5, 40), (4, 40, 6), (5, 1), (4, 1, 1)),
    ((5, 40), (4, 40, 6), (4, 1, 1), (1, 6)),
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_torchs_forms(form):
    a, b = rand(*form[0], dtype=E4M3), rand(*form[1], dtype=E4M3)
    scale_a, scale_b = rand(*form[2]), rand(*form[3])
    # As they broadcast to the result: a vector operand's dimension is not there.
    seen_b = scale_b.squeeze(-2) if a.dim() == 1 and scale_b.dim() > 1 else scale_b
    seen_a = scale_a.squeeze(-1) if b.dim() == 1 and scale_a.dim() > 1 else scale_a
    check(ts.matmul(a, b, scale_a=scale_a, scale_b=scale_b), Maths(a, b, scale_a=seen_a, scale_b=seen_b))


def test_linear_and_bmm():
    x, weight, bias = rand(3, 5, 40, dtype=E4M3), rand(37, 40, dtype=E5M2), rand(37)
    tokens, rows = rand(3, 5, 1), rand(37)
    maths = Maths(x, weight.t(), bias, scale_a=tokens, scale_b=rows, activation="relu")
    for scale_b in (rows, rows.view(37, 1), rows.view(1, 37)):
        check(ts.linear(x, weight, bias, scale_a=tokens, scale_b=scale_b, activation="relu"), maths)
    a, b = rand(3, 20, 40, dtype=E4M3), rand(3, 40, 18, dtype=E5M2)
    check(ts.bmm(a, b, **scales("row", 20, 18, (3,)), workers=2), Maths(a, b, **scales("row", 20, 18, (3,))))
    check(ts.addmm(rand(20, 18), a[0], b[0], alpha=0.5), Maths(a[0], b[0], None, rand(20, 18), alpha=0.5))


def test_autocast_leaves_them_alone():
    a, b = rand(35, 40, dtype=E4M3), rand(40, 37, dtype=E5M2)
    with torch.autocast("cpu", torch.float16):
        answer = ts.matmul(a, b)
    assert answer.dtype == torch.bfloat16
    check(answer, Maths(a, b))


# Arrival, plans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FP8, ids=str)
@pytest.mark.parametrize("source", ["tensor", "file"])
def test_a_stream_of_them(source, dtype, tmp_path):
    rows, b, options = rand(64, 41, dtype=dtype), rand(41, 37, dtype=E4M3), {}
    given = rows
    if source == "file":
        safetensors = pytest.importorskip("safetensors.torch")
        given, options = tmp_path / "x.safetensors", {"tensor": "x"}
        safetensors.save_file({"odd": torch.zeros(3, dtype=torch.uint8), "x": rows}, given)
    with ts.stream_in(given, rows_per_chunk=16, **options) as x:
        assert x.tensor.dtype == dtype
        check(ts.matmul(x.tensor, b, arrival=x.arrival), Maths(rows, b))


def test_plan_run():
    a, b = rand(35, 40, dtype=E4M3), rand(40, 37, dtype=E5M2)
    for kind in ("none", "tensor", "row"):
        made = ts.plan(35, 37, 40, dtype=E4M3, b_dtype=E5M2, out_dtype=torch.float32, scales=kind, workers=2)
        given = scales(kind, 35, 37)
        check(made.run(a, b, **given), Maths(a, b, **given, out_dtype=torch.float32))
    check(made.run(a, b, **scales("tensor", 35, 37)), Maths(a, b, **scales("tensor", 35, 37), out_dtype=torch.float32))
    check(made.run(a, b), Maths(a, b, out_dtype=torch.float32))
    with pytest.raises(ValueError, match=r"b: \[40, 37\] torch.float8_e4m3fn .*the plan is for .*torch.float8_e5m2"):
        made.run(a, b.to(E4M3))
    made = ts.plan(35, 37, 40, dtype=E4M3, b_dtype=E5M2, scales="tensor")
    with pytest.raises(ValueError, match=r"scales='row', the plan is for scales='tensor'; make a plan with scales='r"):
        made.run(a, b, **scales("row", 35, 37))
    batches = ts.plan(5, 6, 7, batch=3, dtype="float32", scales="row")
    a, b = rand(3, 5, 7), rand(3, 7, 6)
    check(batches.run(a, b, **scales("row", 5, 6, (3,))), Maths(a, b, **scales("row", 5, 6, (3,))))


# torch.library, torch.compile, autograd -------------------------------------------------------------------------------


def test_scales_may_be_left_away():
    a, b, bias = rand(9, 16, dtype=E4M3), rand(16, 7, dtype=E4M3), rand(7)
    first = (a, b, bias, None, 1.5, 1.0, "relu", None, "auto", 2)
    check(gemm(*first), Maths(a, b, bias, alpha=1.5, activation="relu"))
    check(gemm(*first, torch.tensor(2.0)), Maths(a, b, bias, alpha=3.0, activation="relu"))


def test_meta_tensors():
    a, b = rand(30, 40, dtype=E4M3), rand(40, 50, dtype=E5M2)
    answer = ts.mm(a.to("meta"), b.to("meta"), **{k: v.to("meta") for k, v in scales("row", 30, 50).items()})
    assert (answer.shape, answer.dtype, answer.device.type) == ((30, 50), torch.bfloat16, "meta")


def test_compile_with_dynamic_shapes():
    torch._dynamo.reset()
    weight, rows = rand(12, 24, dtype=E4M3), rand(12, 1)
    compiled = torch.compile(
        lambda x, tokens: ts.linear(x, weight, scale_a=tokens, scale_b=rows, use_fast_accum=False),
        fullgraph=True, dynamic=True, backend="aot_eager",
    )  # fmt: skip
    for m in (5, 9, 33):
        x, tokens = rand(2, m, 24, dtype=E4M3), rand(2, m, 1)
        check(compiled(x, tokens), Maths(x, weight.t(), scale_a=tokens, scale_b=rows[:, 0]))
    torch._dynamo.reset()


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("scaled", ["tensor", "row"])
@pytest.mark.parametrize("narrow", [False, True])
def test_gradients_of_scaled_products(scaled, activation, narrow):
    """Operands of more than 8 bits have gradients, and a bias and a residual whatever the operands are."""
    given = scales(scaled, 35, 37)
    shapes, few = ((35, 40), (40, 37), (37,), (35, 37)), E4M3 if narrow else torch.float32

    def gradients(op, dtype):
        tensors = [rand(*s, seed=7).to(few if i < 2 else torch.float32).to(dtype) for i, s in enumerate(shapes)]
        leaves = [t.requires_grad_() for t in (tensors[2:] if narrow else tensors)]
        answer = op(*(t.to(few) if op is mine and i < 2 else t for i, t in enumerate(tensors)))
        answer.backward(rand(35, 37, seed=9).to(answer.dtype))
        return [t.grad for t in leaves]

    def mine(a, b, bias, residual):
        how = {"beta": 0.5, "activation": activation, "out_dtype": torch.float32}
        return ts.matmul(a, b, bias=bias, residual=residual, **how, **given)

    def by_torch(a, b, bias, residual):
        x = (a @ b) * (given["scale_a"] * given["scale_b"]).to(a.dtype) + bias + 0.5 * residual
        return ACTIVATIONS[activation](x)

    finer, theirs = gradients(by_torch, torch.float64), gradients(by_torch, torch.float32)
    for one, reference, peer in zip(gradients(mine, torch.float32), finer, theirs, strict=True):
        check_gradient(one, reference, peer)
