"""Bias, residual, alpha and beta, activations, out_dtype, addmm, autocast, and the modes of torch."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch

import tilestream as ts
from error_rule import ACTIVATIONS, DTYPES, Maths, check, nans, rand

pytestmark = pytest.mark.usefixtures("small_tiles")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(activation, dtype):
    a, b = rand(35, 40, dtype=dtype), rand(40, 37, dtype=dtype)
    for bias, residual in itertools.product((None, rand(37, dtype=dtype)), (None, rand(35, 37, dtype=dtype))):
        maths = Maths(a, b, bias, residual, activation=activation)
        for how in ({}, {"workers": 2}, {"schedule": "stream_k", "workers": 2}):
            check(ts.matmul(a, b, bias=bias, residual=residual, activation=activation, **how), maths)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [*itertools.product(DTYPES[:3], DTYPES[:3]), *((torch.float64, out_dtype) for out_dtype in DTYPES)], ids=str,
)  # fmt: skip
def test_out_dtype(dtype, out_dtype):
    a, b = rand(35, 40, dtype=dtype), rand(40, 37, dtype=dtype)
    for how in ({}, {"workers": 2}, {"schedule": "stream_k", "workers": 3}):
        answer = ts.matmul(a, b, out_dtype=out_dtype, **how)
        assert answer.dtype == out_dtype
        check(answer, Maths(a, b, out_dtype=out_dtype))


def test_16_bit_operands_keep_their_sums_in_float32():
    a, b = rand(20, 400, dtype=torch.bfloat16), rand(400, 20, dtype=torch.bfloat16)
    exact = a.double() @ b.double()
    answer = ts.matmul(a, b, out_dtype=torch.float32, schedule="stream_k", workers=3)
    assert (answer - exact).abs().max() < 1e-4 * exact.abs().max()


#: Shapes of residuals that broadcast to a product, and the product's operands.
RESIDUALS = [
    *((shape, (35, 40), (40, 37)) for shape in ((35, 37), (1, 37), (35, 1), (37,), (1,), (), (1, 1))),
    *(
        (shape, (2, 3, 17, 9), shape_b)
        for shape in ((2, 3, 17, 18), (3, 17, 18), (17, 1), (2, 1, 1, 18), (1, 3, 1, 1))
        for shape_b in ((2, 3, 9, 18), (9, 18))
    ),
]


@pytest.mark.parametrize(("shape", "shape_a", "shape_b"), RESIDUALS, ids=str)
def test_residual_broadcasts(shape, shape_a, shape_b):
    a, b, residual = rand(*shape_a), rand(*shape_b), rand(*shape)
    check(ts.matmul(a, b, residual=residual, beta=-0.5, workers=2), Maths(a, b, None, residual, beta=-0.5))


@pytest.mark.parametrize("residual_dtype", DTYPES, ids=str)
def test_epilogue_tensors_of_another_dtype(residual_dtype):
    a, b = rand(35, 40, dtype=torch.bfloat16), rand(40, 37, dtype=torch.bfloat16)
    bias, residual = rand(37, dtype=residual_dtype), rand(35, 37, dtype=residual_dtype)
    answer = ts.matmul(a, b, bias=bias, residual=residual, workers=2)
    assert answer.dtype == torch.bfloat16
    check(answer, Maths(a, b, bias.bfloat16(), residual.bfloat16()))


@pytest.mark.parametrize("op", ["matmul", "addmm"])
def test_what_beta_0_leaves_unread_may_be_nan(op):
    a, b = rand(35, 40), rand(40, 37)
    for how in ({}, {"workers": 2}, {"schedule": "stream_k", "workers": 3}):
        if op == "matmul":
            answer = ts.matmul(a, b, residual=nans(35, 37), beta=0.0, **how)
        else:
            answer = ts.addmm(nans(35, 37), a, b, beta=0, **how)
        check(answer, Maths(a, b))


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (0, 1), (1, 0), (0.5, -2.0), (0, 0), (-1, 0.25)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_addmm_is_torchs(beta, alpha, dtype):
    a, b = rand(35, 40, dtype=dtype), rand(40, 37, dtype=dtype)
    for shape in ((35, 37), (37,), (35, 1), ()):
        addend = rand(*shape, dtype=dtype)
        maths = Maths(a, b, None, addend, alpha=alpha, beta=beta)
        answer = ts.addmm(addend, a, b, beta=beta, alpha=alpha, workers=2)
        check(answer, maths)
        assert answer.shape == torch.addmm(addend, a, b, beta=beta, alpha=alpha).shape


@pytest.mark.parametrize("number", [np.float16, np.float32, np.float64, np.int64, np.uint8, int, bool])
def test_factors_are_numbers_of_numpy_too(number):
    """As torch's own: a bool is 0 or 1."""
    a, b, addend, two = rand(20, 8), rand(8, 20), rand(20, 20), number(2)
    maths = Maths(a, b, None, addend, alpha=float(two), beta=float(two))
    assert torch.allclose(torch.addmm(addend, a, b, alpha=two, beta=two), maths.by_torch())
    for answer in (
        ts.addmm(addend, a, b, alpha=two, beta=two), ts.addmm(addend, a, b, alpha=two, beta=two),
        ts.plan(20, 20, 8).run(a, b, residual=addend, alpha=two, beta=two),
    ):  # fmt: skip
        check(answer, maths)


def test_a_plan_takes_numbers_alone():
    plan, x = ts.plan(4, 4, 4), torch.ones(4, 4)
    with pytest.raises(TypeError, match=r"plan.run: alpha='x'; it must be a number"):
        plan.run(x, x, alpha="x")
    with pytest.raises(TypeError, match=r"plan.run: beta=None; it must be a number"):
        plan.run(x, x, residual=x, beta=None)
    with pytest.raises(TypeError, match=r"plan\.run: b has layout torch\.sparse_coo; tensors are dense"):
        plan.run(x, x.to_sparse())
    with torch.inference_mode():
        out = torch.zeros(4, 4)
    with pytest.raises(RuntimeError, match=r"plan\.run: out: Inplace update to inference tensor outside InferenceMode"):
        plan.run(x, x, out=out)


def test_addmm_with_alpha_0_and_nothing_to_add_up():
    addend = rand(4, 5)
    assert torch.equal(ts.addmm(addend, torch.empty(4, 0), torch.empty(0, 5), beta=2), 2 * addend)


def test_alpha_comes_before_bias_and_activation():
    a, b, bias, addend = rand(20, 8), rand(8, 20), rand(20), rand(20, 20)
    plan = ts.plan(20, 20, 8, tile=(16, 16), workers=2)
    answer = plan.run(a, b, bias=bias, residual=addend, alpha=0.5, beta=2, activation="relu")
    check(answer, Maths(a, b, bias, addend, alpha=0.5, beta=2, activation="relu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_its_dtype(dtype):
    a, b = rand(35, 40), rand(40, 37)
    with torch.autocast("cpu", dtype=dtype):
        answer, torchs = ts.matmul(a, b, workers=2), torch.matmul(a, b)
        mixed = ts.matmul(a, b.to(dtype))
        double = ts.matmul(a.double(), b.double())
    assert answer.dtype == torchs.dtype == mixed.dtype == dtype
    assert double.dtype == torch.float64
    check(answer, Maths(a.to(dtype), b.to(dtype)))


def test_autocast_gradients_come_back_in_the_operands_dtype():
    a, b = rand(35, 40).requires_grad_(), rand(40, 37).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        answer = ts.linear(a, b.t(), rand(37), activation="gelu")
    answer.sum().backward()
    assert (a.grad.dtype, b.grad.dtype) == (torch.float32, torch.float32)


#: Ops that autocast converts for, and the same in torch.
UNDER_AUTOCAST = {
    "mm": (ts.mm, torch.mm, ((35, 40), (40, 37))),
    "matmul": (ts.matmul, torch.matmul, ((2, 35, 40), (40, 37))),
    "bmm": (ts.bmm, torch.bmm, ((3, 35, 40), (3, 40, 37))),
    "addmm": (ts.addmm, torch.addmm, ((37,), (35, 40), (40, 37))),
    "linear": (ts.linear, torch.nn.functional.linear, ((2, 35, 40), (37, 40), (37,))),
    "attention": (
        functools.partial(ts.attention, layout="bhsd"), torch.nn.functional.scaled_dot_product_attention,
        ((2, 4, 9, 16),) * 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDER_AUTOCAST)
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_torchs(name, dtypes, dtype):
    """Results and gradients, of operands of one dtype and of two; an equal call is another time the same."""
    op, by_torch, shapes = UNDER_AUTOCAST[name]
    given = [rand(*shape, dtype=dtypes[i > 0], seed=i) for i, shape in enumerate(shapes)]

    def answers(f):
        leaves = [x.clone().requires_grad_() for x in given]
        with torch.autocast("cpu", dtype):
            y = f(*leaves)
            with torch.no_grad():
                plain = f(*leaves)
        y.sum().backward()
        return [y, plain, *(x.grad for x in leaves)]

    theirs = answers(by_torch)
    for _ in range(3):
        for x, y in zip(answers(op), theirs, strict=True):
            assert (x.dtype, x.stride()) == (y.dtype, y.stride())
            torch.testing.assert_close(x, y, rtol=0.05, atol=0.1)


def test_autocast_refuses_what_torch_refuses():
    a, b = rand(35, 40), torch.ones(40, 37, dtype=torch.int64)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(TypeError, match=r"mm: b: dtype: torch.int64"):
            ts.mm(a, b)
        with pytest.raises(TypeError, match=r"mm: a is torch.bfloat16, b is torch.float64"):
            ts.mm(a, rand(40, 37).double())


def test_torch_has_the_op_that_converts_a_weight():
    """On a GPU, where tests/gpu shows that it is converted once a block."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::einsum", "AutocastCUDA")
    x = rand(4, 4)
    assert torch.ops.aten.einsum.default("...->...", [x]).data_ptr() == x.data_ptr()


def test_autocast_does_not_convert_what_has_not_arrived():
    arrival = ts.Arrival.uniform(20, 2)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=r"autocast would convert .* stream it in as torch.bfloat16, or leave autocast"),
    ):
        ts.matmul(nans(40, 8), rand(8, 8), arrival=arrival)


def test_inference_mode_and_no_grad():
    a, b = rand(35, 40).requires_grad_(), rand(40, 37)
    for mode in (torch.inference_mode, torch.no_grad):
        for how in ({}, {"workers": 2}, {"schedule": "stream_k", "workers": 2}):
            with mode():
                answer = ts.matmul(a, b, activation="relu", **how)
                out = ts.matmul(a, b, out=nans(35, 37), **how)
            assert not answer.requires_grad
            assert answer.is_inference() == (mode is torch.inference_mode)
            check(answer, Maths(a, b, activation="relu"))
            check(out, Maths(a, b))


@pytest.mark.parametrize("how", [{}, {"workers": 2}, {"arrival": None}, {"publish": None}], ids=str)
def test_an_output_made_in_inference_mode_is_written_in_it_alone(how):
    """As torch has it. Worker threads write it, too."""
    a, b = rand(35, 40), rand(40, 37)
    how = {name: value or ts.Arrival.uniform(35, 1) for name, value in how.items()}
    if "arrival" in how:
        how["arrival"].signal(0)
    with torch.inference_mode():
        out = nans(35, 37)
        check(ts.matmul(a, b, out=out, **how), Maths(a, b))
        written = out.clone()
    with pytest.raises(RuntimeError, match="matmul: out: Inplace update to inference tensor outside InferenceMode"):
        ts.matmul(a + 1, b, out=out, **how)
    assert torch.equal(out, written)


def test_the_default_device_and_dtype_do_not_matter():
    a, b, bias = rand(35, 40), rand(40, 37), rand(37)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.device("meta"):
            for how in ({}, {"workers": 2}, {"schedule": "stream_k", "workers": 2}):
                answer = ts.matmul(a, b, bias=bias, out_dtype=torch.float16, **how)
                assert answer.device.type == "cpu"
                check(answer, Maths(a, b, bias, out_dtype=torch.float16))
    finally:
        torch.set_default_dtype(before)


def test_it_is_called_from_a_threadpool_with_one_intra_op_thread():
    from concurrent.futures import ThreadPoolExecutor

    a, b = rand(35, 40), rand(40, 37)
    with ThreadPoolExecutor(4) as pool:
        for answer in pool.map(lambda i: ts.matmul(a, b, workers=1 + i % 3), range(12)):
            check(answer, Maths(a, b))
