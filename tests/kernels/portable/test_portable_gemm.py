"""The portable kernel in Triton's interpreter: numbers, layouts, epilogues, every small size."""

from __future__ import annotations

import itertools

import pytest
import torch
from interpreted import DEVICE, KINDS, check_product, crossed, laid_out, plan_for, product, run, strides

from error_rule import ACTIVATIONS, Maths, check, rand
from tilestream.core.operands import Epilogue
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.portable.arguments import Arguments
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import VECTORS, Problem

DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt", "ss"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layouts(dtype, layout, kind):
    a, b = laid_out(37, 40, layout[0], dtype), laid_out(40, 50, layout[1], dtype)
    check_product(plan_for(a, b, kind), a, b)


def test_tf32_rounds_to_nearest_halves_away_from_zero():
    """The interpreter multiplies in float32: what is added up are the rounded operands' products."""
    a, b = rand(17, 1), rand(1, 33)
    a[0], a[1], a[2] = 1 + 2**-11, -(1 + 2**-11), 1 + 2**-11 - 2**-20  # halves, and a little less
    plan = plan_problem.__wrapped__(Problem(17, 33, 1, tf32=True), 3, "static", device=DEVICE, backend="portable")

    def rounded(x: torch.Tensor) -> torch.Tensor:
        whole, exponent = torch.frexp(x.double())
        whole = whole * 2**11
        return torch.ldexp(whole.sign() * (whole.abs() + 0.5).floor(), exponent - 11).float()

    assert rounded(a[:3, 0]).tolist() == [1 + 2**-10, -(1 + 2**-10), 1.0]
    assert torch.equal(product(plan, a, b), rounded(a) * rounded(b))


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("vector", VECTORS)
def test_operands_in_vectors_of_a_few_elements(vector, layout):
    m, k, n = (vector * x for x in (9, 5, 11))
    for pad, found in ((vector, vector), (vector + 1, 1)):  # the second is not as the plan's vectors are
        a = laid_out(m, k, layout[0], torch.float16, pad)
        b = laid_out(k, n, layout[1], torch.float16, pad)
        plan = plan_for(a, b, vector=vector)
        lie = Layout(strides(a), strides(b), (0, n, 1))
        config = Arguments(plan, lie).config
        assert ((found, found), (layout[0] == "n", layout[1] == "t")) == (config.VECTORS, config.K_MAJOR)
        check_product(plan, a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_every_small_size(kind):
    for m, n, k in itertools.product((1, 15, 16, 17), (1, 16, 33), (0, 1, 16, 17, 48)):
        a, b = rand(m, k), rand(k, n)
        check_product(plan_for(a, b, kind, workers=3), a, b)


@crossed("kind, workers", KINDS, [1, 2, 3, 4, 6, 7, 8, 9, 13])
def test_every_number_of_workers(kind, workers):
    a, b = rand(50, 70), rand(70, 40)
    check_product(plan_for(a, b, kind, workers), a, b)


@pytest.mark.parametrize("shares", [1, 2, 3, 8, 11, 100])
def test_every_number_of_shares(shares):
    a, b = rand(33, 100), rand(100, 49)
    check_product(plan_for(a, b, "stream_k", 7, shares=shares), a, b)


@pytest.mark.parametrize("kind", ["dynamic", "stream_k"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue(activation, kind):
    a, b, bias, residual = rand(37, 70), rand(70, 40), rand(40), rand(37, 40, seed=3)
    check_product(plan_for(a, b, kind), a, b, Epilogue(1.5, bias, residual, -0.5, activation or "none"))


@pytest.mark.parametrize("part", ["bias", "residual", "alpha", "activation"])
def test_a_part_of_the_epilogue_alone(part):
    a, b = rand(20, 30), rand(30, 40)
    parts = {"bias": rand(80)[::2], "residual": rand(40, 20).t(), "alpha": 3.0, "activation": "relu"}
    check_product(plan_for(a, b), a, b, Epilogue(**{part: parts[part]}))


def test_relu_keeps_nan_and_what_is_past_the_end_counts_for_nothing():
    a, b = rand(17, 17), rand(17, 17)
    a[3, 4] = float("nan")
    out = product(plan_for(a, b), a, b, Epilogue(activation="relu"))
    assert out[3].isnan().all()
    assert not out[[i for i in range(17) if i != 3]].isnan().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", ["", "a", "b", "ab"])
def test_batches(kind, shared):
    a, b = rand(3, 20, 33), rand(3, 33, 18)
    a, b = (x[:1].expand(3, -1, -1) if name in shared else x for name, x in (("a", a), ("b", b)))
    check_product(plan_for(a, b, kind), a, b)


@pytest.mark.parametrize("kind", ["dynamic", "stream_k"])
def test_out_dtype_and_strided_out(kind):
    a, b = rand(37, 40, dtype=torch.float16), rand(40, 50, dtype=torch.float16)
    store = torch.full((37, 103), float("nan"))
    out = store[:, :100:2]
    run(plan_for(a, b, kind, out="float32"), a, b, out)
    check(out, Maths(a, b, out_dtype=torch.float32))
    assert store[:, 1::2].isnan().all(), "wrote between the output's elements"


@pytest.mark.parametrize("kind", KINDS)
def test_own_order(kind):
    a, b = rand(50, 33), rand(33, 70)
    tiles = 4 * 5
    order = tuple((7 * t + 3) % tiles for t in range(tiles))
    check_product(plan_for(a, b, kind, order=order), a, b)
