"""matmul, mm, bmm and linear against torch: shapes, dtypes, strides, schedules."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import tilestream as ts
from error_rule import DTYPES, Maths, check, rand

pytestmark = pytest.mark.usefixtures("small_tiles")

#: Operands' shapes: every form that torch.matmul has.
FORMS = {
    "vector @ vector": ((37,), (37,)),
    "vector @ matrix": ((37,), (37, 19)),
    "matrix @ vector": ((19, 37), (37,)),
    "matrix @ matrix": ((50, 37), (37, 41)),
    "one by one": ((1, 1), (1, 1)),
    "row @ column": ((1, 37), (37, 1)),
    "column @ row": ((37, 1), (1, 37)),
    "vector @ batch": ((37,), (3, 37, 19)),
    "batch @ vector": ((3, 19, 37), (37,)),
    "batch @ matrix": ((3, 19, 37), (37, 21)),
    "matrix @ batch": ((19, 37), (3, 37, 21)),
    "batch @ batch": ((3, 19, 37), (3, 37, 21)),
    "one @ batch": ((1, 19, 37), (3, 37, 21)),
    "batch @ one": ((3, 19, 37), (1, 37, 21)),
    "4-D @ 4-D": ((2, 3, 17, 9), (2, 3, 9, 18)),
    "crossed broadcast": ((2, 1, 17, 9), (1, 3, 9, 18)),
    "4-D @ 3-D": ((2, 3, 17, 9), (3, 9, 18)),
    "5-D @ matrix": ((2, 1, 2, 3, 9), (9, 5)),
    "matrix @ 4-D": ((17, 9), (2, 2, 9, 18)),
    "4-D @ vector": ((2, 3, 17, 9), (9,)),
    "vector @ 4-D": ((9,), (2, 3, 9, 17)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_form(form, dtype):
    shape_a, shape_b = FORMS[form]
    a, b = rand(*shape_a, dtype=dtype, seed=1), rand(*shape_b, dtype=dtype, seed=2)
    check(ts.matmul(a, b), Maths(a, b))
    check(ts.matmul(a, b, workers=3), Maths(a, b))


@pytest.mark.parametrize("form", FORMS)
def test_form_under_stream_k_with_an_epilogue(form):
    shape_a, shape_b = FORMS[form]
    a, b = rand(*shape_a, dtype=torch.float16, seed=1), rand(*shape_b, dtype=torch.float16, seed=2)
    shape = torch.matmul(a, b).shape
    columns = 1 if len(shape_b) == 1 else shape_b[-1]
    bias, residual = rand(columns, dtype=torch.float16), rand(*shape, dtype=torch.float16)
    answer = ts.matmul(a, b, bias=bias, residual=residual, beta=0.5, schedule="stream_k", workers=3)
    # A matmul with a vector has one column, which torch then drops.
    shown = bias.reshape(()) if len(shape_b) == 1 else bias
    check(answer, Maths(a, b, shown, residual, beta=0.5))


#: Operands of which each dimension is 0 in turn; ``k`` and the batch are 0 in both.
EMPTY = [
    tuple(tuple(0 if name == empty else sizes[name] for name in names) for names in form)
    for form in (("mk", "kn"), ("bmk", "bkn"), ("bmk", "kn"), ("k", "kn"), ("mk", "k"))
    for empty in sorted(set(form[0] + form[1]))
    for sizes in [{"b": 2, "m": 5, "k": 6, "n": 7}]
]


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize(("shape_a", "shape_b"), EMPTY, ids=str)
def test_each_dimension_may_be_zero(shape_a, shape_b, workers):
    a, b = rand(*shape_a), rand(*shape_b)
    assert torch.equal(ts.matmul(a, b, workers=workers), torch.matmul(a, b))
    narrow = (x.to(torch.float8_e4m3fn) for x in (a, b))
    assert torch.equal(ts.matmul(*narrow, workers=workers), torch.matmul(a, b).bfloat16())


@pytest.mark.parametrize("schedule", ["auto", "static", "dynamic", "stream_k"])
def test_k_of_zero_gives_the_epilogue_alone(schedule):
    a, b, bias, residual = torch.empty(20, 0), torch.empty(0, 33), rand(33), rand(20, 33)
    answer = ts.matmul(a, b, bias=bias, residual=residual, activation="gelu", schedule=schedule, workers=3)
    check(answer, Maths(a, b, bias, residual, activation="gelu"))


#: A matrix of ``m`` rows and ``n`` columns, by how it lies in memory; ``make`` makes numbers of a shape.
STRIDES = {
    "transposed": lambda make, m, n: make(n, m).t(),
    "every other": lambda make, m, n: make(2 * m, 3 * n)[::2, ::3],
    "offset": lambda make, m, n: make(m + 3, n + 5)[3:, 5:],
    "unaligned": lambda make, m, n: make(m * n + 1)[1:].view(m, n),
    "one row for all": lambda make, m, n: make(1, n).expand(m, n),
    "one column for all": lambda make, m, n: make(m, 1).expand(m, n),
    "one number": lambda make, m, n: make(1, 1).expand(m, n),
    "windows": lambda make, m, n: make(m + n).as_strided((m, n), (1, 1)),
}


def strided(kind: str, rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return STRIDES[kind](lambda *shape: rand(*shape, dtype=dtype, seed=seed), rows, columns)


@pytest.mark.parametrize("kind", STRIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_strides(kind, dtype):
    a, b = strided(kind, 35, 43, dtype, 1), strided(kind, 43, 37, dtype, 2)
    plain = rand(35, 43, dtype=dtype, seed=3)
    for schedule in ("dynamic", "stream_k"):
        check(ts.matmul(a, b, schedule=schedule, workers=2), Maths(a, b))
        check(ts.matmul(plain, b, schedule=schedule, workers=2), Maths(plain, b))
    check(ts.matmul(a, b), Maths(a, b))


@pytest.mark.parametrize("permutation", list(itertools.permutations(range(3))))
def test_permuted_batches(permutation):
    sizes = (3, 18, 21)
    inverse = [permutation.index(i) for i in range(3)]
    a = rand(*(sizes[p] for p in permutation)).permute(*inverse)
    b = rand(3, 21, 17)
    check(ts.matmul(a, b, workers=2), Maths(a, b))
    check(ts.matmul(a, b[0], workers=2), Maths(a, b[0]))
    check(ts.matmul(b.mT, a.mT, workers=2), Maths(b.mT, a.mT))


def test_a_negated_view():
    a = torch.complex(rand(20, 20), rand(20, 20, seed=5)).conj().imag
    assert a.is_neg()
    check(ts.matmul(a, a, workers=2), Maths(a.resolve_neg(), a.resolve_neg()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_negated_views_beside_equal_calls(dtype):
    x, weight, bias = rand(8, 3, dtype=dtype), rand(4, 3, dtype=dtype), rand(4, dtype=dtype)
    for which in ("", "x", "weight", "bias"):  # the first call is not negated
        given = {name: t.clone() for name, t in (("x", x), ("weight", weight), ("bias", bias))}
        if which:
            given[which] = torch._neg_view(given[which])
        true = {name: t.resolve_neg() for name, t in given.items()}
        check(ts.linear(**given), Maths(true["x"], true["weight"].t(), true["bias"]))


@pytest.mark.parametrize("workers", [*range(1, 9), 40])
@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
def test_schedules_and_workers(schedule, workers):
    a, b = rand(50, 70), rand(70, 49)  # 16 tiles, 9 K steps
    check(ts.matmul(a, b, schedule=schedule, workers=workers), Maths(a, b))


def test_odd_sizes_around_a_tile():
    for m, n, k in itertools.product((15, 16, 17), (31, 33), (7, 8, 9)):
        a, b = rand(m, k), rand(k, n)
        check(ts.matmul(a, b, workers=2), Maths(a, b))


def test_the_plans_own_tiles_for_a_large_product(request):
    request.getfixturevalue("monkeypatch").undo()
    from tilestream.plan.planner import plan_problem

    plan_problem.cache_clear()
    a, b = rand(700, 513), rand(513, 600)
    for schedule in ("auto", "static", "dynamic", "stream_k"):
        check(ts.matmul(a, b, schedule=schedule, workers=3), Maths(a, b))


def test_mm_and_bmm_are_torchs():
    for op, a, b in ((ts.mm, rand(40, 30), rand(30, 50)), (ts.bmm, rand(3, 20, 30), rand(3, 30, 18))):
        check(op(a, b), Maths(a, b))
        check(op(a, b, activation="relu", workers=2), Maths(a, b, activation="relu"))
        check(op(a, b, schedule="stream_k", workers=2), Maths(a, b))


@pytest.mark.parametrize("shape", [(30,), (7, 30), (2, 7, 30), (2, 2, 7, 30)], ids=str)
def test_linear_is_torchs(shape):
    x, weight = rand(*shape), rand(25, 30)
    for bias in (None, rand(25)):
        answer = ts.linear(x, weight, bias, workers=2)
        assert answer.shape == F.linear(x, weight, bias).shape
        check(answer, Maths(x, weight.t(), bias))
        check(ts.linear(x, weight, bias, activation="silu"), Maths(x, weight.t(), bias, activation="silu"))
    vector = ts.linear(x, weight[0])
    assert vector.shape == F.linear(x, weight[0]).shape
    torch.testing.assert_close(vector, F.linear(x, weight[0]))


def test_the_result_is_new_and_operands_are_left_alone():
    given = rand(40, 30), rand(30, 50), rand(50), rand(40, 50)
    before, versions = [t.clone() for t in given], [t._version for t in given]
    a, b, bias, residual = given
    answer = ts.matmul(a, b, bias=bias, residual=residual, activation="gelu", schedule="stream_k", workers=2)
    assert answer.is_contiguous()
    assert answer.untyped_storage().data_ptr() not in [t.untyped_storage().data_ptr() for t in given]
    assert not answer.requires_grad
    assert all(torch.equal(x, y) for x, y in zip(before, given, strict=True))
    assert versions == [t._version for t in given]


def test_nan_and_infinity_stay_where_they_are():
    a, b = rand(40, 30), rand(30, 50)
    a[17, 3], a[20, 4] = float("nan"), float("inf")
    for schedule in ("static", "dynamic", "stream_k"):
        answer = ts.matmul(a, b, schedule=schedule, workers=2)
        assert answer[17].isnan().all()
        assert answer[20].isinf().all()
        rest = [i for i in range(40) if i not in (17, 20)]
        check(answer[rest], Maths(a[rest], b))
