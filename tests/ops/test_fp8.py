"""Operands of 8 bits, and scales of operands of any dtype: matmul, mm, bmm, linear, plans, arrivals, on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tilestream as ts
import tilestream.ops  # registers torch.ops.tilestream
from error_rule import DTYPES, FNUZ, FP8, NARROW, Maths, check, check_gradient, nans, rand
from streaming import Feeder, late
from tilestream.kernels.cpu.convert import widened
from tilestream.runtime.workspace import workspace

pytestmark = [pytest.mark.usefixtures("small_tiles"), pytest.mark.timeout(60)]

E4M3, E5M2 = FP8
PAIRS = [*itertools.product(FP8, FP8), *itertools.product(FNUZ, FNUZ)]
OUT = (torch.bfloat16, torch.float16, torch.float32)
HOWS = ({}, {"workers": 2}, {"schedule": "static", "workers": 3}, {"schedule": "stream_k", "workers": 3})
gemm = torch.ops.tilestream.gemm.default
gemm_out = torch.ops.tilestream.gemm_out.default
arriving = torch.ops.tilestream.gemm_arriving.default


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
        assert answer.dtype == torch.bfloat16, "what comes of 8-bit operands where nobody says"
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


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt", "ss"])
def test_layouts(layout):
    def operand(rows, cols, how):
        if how == "t":
            return operand(cols, rows, "n").t()
        step = 2 if how == "s" else 1
        store = nans(rows, step * cols + 3).to(E4M3)
        store[:, : step * cols : step] = rand(rows, cols, dtype=E4M3)
        return store[:, : step * cols : step]

    a, b = operand(35, 40, layout[0]), operand(40, 37, layout[1])
    for how in HOWS:
        check(ts.matmul(a, b, **how), Maths(a, b))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scaled", ["tensor", "row"])
def test_operands_of_any_dtype_are_scaled(scaled, dtype):
    a, b = rand(35, 40, dtype=dtype), rand(40, 37, dtype=dtype)
    with_scales = scales(scaled, 35, 37)
    for how in HOWS:
        answer = ts.matmul(a, b, **with_scales, **how)
        assert answer.dtype == dtype
        check(answer, Maths(a, b, **with_scales))


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


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (5, 0, 7), (5, 7, 0), (1, 1, 1)])
def test_empty_and_smallest(m, n, k):
    a, b = rand(m, k, dtype=E4M3), rand(k, n, dtype=E4M3)
    check(ts.matmul(a, b, **scales("row", m, n)), Maths(a, b, **scales("row", m, n)))


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


@pytest.mark.parametrize("schedule", ["auto", "static", "dynamic", "stream_k"])
def test_rows_that_arrive(schedule):
    source, b = rand(50, 40, dtype=E4M3), rand(40, 37, dtype=E5M2)
    x = nans(50, 40).to(E4M3)
    arrival = ts.Arrival.uniform(12, 5, pivot=3)
    with_scales = scales("row", 50, 37)
    with Feeder(arrival, x, source, order=[3, 4, 0, 1, 2], before=late(0)):
        answer = ts.matmul(x, b, **with_scales, arrival=arrival, schedule=schedule, workers=3)
    check(answer, Maths(source, b, **with_scales))


def test_a_stream_of_them():
    source, b = rand(64, 40, dtype=E4M3), rand(40, 37, dtype=E4M3)
    with ts.stream_in(source, rows_per_chunk=16) as x:
        check(ts.matmul(x.tensor, b, arrival=x.arrival), Maths(source, b))


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_a_stream_of_them_from_a_file(dtype, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    source, b = rand(64, 41, dtype=dtype), rand(41, 37, dtype=E4M3)
    safetensors.save_file({"odd": torch.zeros(3, dtype=torch.uint8), "x": source}, tmp_path / "x.safetensors")
    with ts.stream_in(tmp_path / "x.safetensors", tensor="x", rows_per_chunk=16) as x:
        assert x.tensor.dtype == dtype
        check(ts.matmul(x.tensor, b, arrival=x.arrival), Maths(source, b))


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


def arguments(scaled: str, out_dtype=None, dtype=E4M3, batch=()):
    a, b = rand(*batch, 9, 16, dtype=dtype), rand(*batch, 16, 7, dtype=dtype)
    return (
        (a, b, rand(7), None, 1.5, 1.0, "relu", out_dtype, "auto", 2),
        (*scales(scaled, 9, 7, batch).values(), False),
    )


def opcheck(op, args):
    # test_schema compares operands before and after by allclose, which does not know 8 bits.
    narrow = args[0].dtype in FP8
    all_of = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, args, test_utils=all_of[narrow:])


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("scaled", ["none", "tensor", "row"])
def test_opcheck(scaled, batch):
    for dtype in (E4M3, torch.bfloat16):
        first, last = arguments(scaled, dtype=dtype, batch=batch)
        opcheck(gemm, (*first, *last))
        out = torch.zeros(*batch, 9, 7, dtype=torch.bfloat16)
        opcheck(gemm_out, (*first, out, *last))
        arrival = ts.Arrival.uniform(4, -(-(batch or (1,))[0] * 9 // 4))
        for chunk in range(arrival.num_chunks):
            arrival.signal(chunk)
        ints = [arrival.key, arrival.epoch, arrival.pivot, arrival.num_chunks, arrival.rows_per_chunk]
        opcheck(arriving, (*first, None, ints, None, [], 5.0, "mm", *last))


def test_scales_may_be_left_away():
    first, _ = arguments("none")
    a, b, bias = first[:3]
    check(gemm(*first), Maths(a, b, bias, alpha=1.5, activation="relu"))
    check(gemm(*first, torch.tensor(2.0)), Maths(a, b, bias, alpha=3.0, activation="relu"))


def test_flops_and_meta_tensors():
    a, b = rand(30, 40, dtype=E4M3), rand(40, 50, dtype=E5M2)
    with FlopCounterMode(display=False) as counter:
        ts.mm(a, b, **scales("row", 30, 50))
    assert counter.get_total_flops() == 2 * 30 * 40 * 50
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
def test_scaled_operands_of_more_bits_have_gradients(scaled, activation):
    def gradients(op, dtype):
        tensors = [rand(*s, seed=7).to(dtype).requires_grad_() for s in ((35, 40), (40, 37), (37,), (35, 37))]
        answer = op(*tensors)
        answer.backward(rand(35, 37, seed=9).to(answer.dtype))
        return [t.grad for t in tensors]

    given = scales(scaled, 35, 37)

    def mine(a, b, bias, residual):
        return ts.matmul(a, b, bias=bias, residual=residual, beta=0.5, activation=activation, **given)

    def by_torch(a, b, bias, residual):
        x = (a @ b) * (given["scale_a"] * given["scale_b"]).to(a.dtype) + bias + 0.5 * residual
        return {None: lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu}[activation](x)

    finer, theirs = gradients(by_torch, torch.float64), gradients(by_torch, torch.float32)
    for one, reference, peer in zip(gradients(mine, torch.float32), finer, theirs, strict=True):
        check_gradient(one, reference, peer)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_a_bias_has_a_gradient_whatever_the_operands(activation):
    a, b = rand(35, 40, dtype=E4M3), rand(40, 37, dtype=E4M3)
    bias, theirs = (rand(37).requires_grad_() for _ in range(2))
    maths = {"activation": activation, "out_dtype": torch.float32}
    ts.matmul(a, b, bias=bias, **scales("row", 35, 37), **maths).sum().backward()
    x = (a.float() @ b.float()) * torch.mul(*scales("row", 35, 37).values()) + theirs
    {None: lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu}[activation](x).sum().backward()
    torch.testing.assert_close(bias.grad, theirs.grad)
