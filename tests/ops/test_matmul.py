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


EMPTY = [
    shapes
    for base in [((5, 6), (6, 7)), ((2, 5, 6), (2, 6, 7)), ((2, 5, 6), (6, 7)), ((6,), (6, 7)), ((5, 6), (6,))]
    for dim in range(len(base[0]) + len(base[1]))
    for shapes in [
        (
            tuple(0 if i == dim else x for i, x in enumerate(base[0])),
            tuple(0 if i + len(base[0]) == dim else x for i, x in enumerate(base[1])),
        )
    ]
]


@pytest.mark.parametrize("workers", [None, 2])
@pytest.mark.parametrize(("shape_a", "shape_b"), EMPTY, ids=str)
def test_each_dimension_may_be_zero(shape_a, shape_b, workers):
    # The zero is put into one operand; where the other has that dimension too, it follows.
    a, b = torch.empty(shape_a), torch.empty(shape_b)
    if a.shape[-1] != b.shape[-2 if b.dim() > 1 else 0]:
        k = min(a.shape[-1], b.shape[-2 if b.dim() > 1 else 0])
        a = a[..., :k]
        b = b[..., :k, :] if b.dim() > 1 else b[:k]
    if a.dim() == 3 and b.dim() == 3:
        batches = min(a.shape[0], b.shape[0])
        a, b = a[:batches], b[:batches]
    a, b = rand(*a.shape), rand(*b.shape)
    answer = ts.matmul(a, b, workers=workers)
    assert torch.equal(answer, torch.matmul(a, b))


@pytest.mark.parametrize("schedule", ["auto", "static", "dynamic", "stream_k"])
def test_k_of_zero_gives_the_epilogue_alone(schedule):
    a, b, bias, residual = torch.empty(20, 0), torch.empty(0, 33), rand(33), rand(20, 33)
    answer = ts.matmul(a, b, bias=bias, residual=residual, activation="gelu", schedule=schedule, workers=3)
    check(answer, Maths(a, b, bias, residual, activation="gelu"))


def strided(kind: str, rows: int, columns: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """A ``rows`` x ``columns`` matrix that lies in memory as ``kind`` says."""
    match kind:
        case "transposed":
            return rand(columns, rows, dtype=dtype, seed=seed).t()
        case "every other":
            return rand(2 * rows, 3 * columns, dtype=dtype, seed=seed)[::2, ::3]
        case "offset":
            return rand(rows + 3, columns + 5, dtype=dtype, seed=seed)[3:, 5:]
        case "unaligned":
            return rand(rows * columns + 1, dtype=dtype, seed=seed)[1:].view(rows, columns)
        case "one row for all":
            return rand(1, columns, dtype=dtype, seed=seed).expand(rows, columns)
        case "one column for all":
            return rand(rows, 1, dtype=dtype, seed=seed).expand(rows, columns)
        case "one number":
            return rand(1, 1, dtype=dtype, seed=seed).expand(rows, columns)
        case "windows":
            return rand(rows + columns, dtype=dtype, seed=seed).as_strided((rows, columns), (1, 1))
    raise AssertionError(kind)


STRIDES = [
    "transposed", "every other", "offset", "unaligned", "one row for all", "one column for all", "one number", "windows"
]  # fmt: skip


@pytest.mark.parametrize("kind", STRIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
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
    a, b = rand(40, 30), rand(30, 50)
    check(ts.mm(a, b), Maths(a, b))
    check(ts.mm(a, b, activation="relu", workers=2), Maths(a, b, activation="relu"))
    a, b = rand(3, 20, 30), rand(3, 30, 18)
    check(ts.bmm(a, b), Maths(a, b))
    check(ts.bmm(a, b, schedule="stream_k", workers=2), Maths(a, b))


@pytest.mark.parametrize("shape", [(30,), (7, 30), (2, 7, 30), (2, 2, 7, 30)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_linear_is_torchs(shape, with_bias):
    x, weight, bias = rand(*shape), rand(25, 30), rand(25) if with_bias else None
    answer = ts.linear(x, weight, bias, workers=2)
    assert answer.shape == F.linear(x, weight, bias).shape
    check(answer, Maths(x, weight.t(), bias))
    check(ts.linear(x, weight, bias, activation="silu"), Maths(x, weight.t(), bias, activation="silu"))


@pytest.mark.parametrize("shape", [(30,), (7, 30), (2, 7, 30)], ids=str)
def test_linear_with_a_vector_of_weights(shape):
    x, weight = rand(*shape), rand(30)
    assert ts.linear(x, weight).shape == F.linear(x, weight).shape
    torch.testing.assert_close(ts.linear(x, weight), F.linear(x, weight))


def test_the_result_is_contiguous_and_new():
    a, b = rand(40, 30), rand(30, 50)
    answer = ts.matmul(a, b)
    assert answer.is_contiguous()
    assert answer.untyped_storage().data_ptr() not in (a.untyped_storage().data_ptr(), b.untyped_storage().data_ptr())
    assert not answer.requires_grad


def test_operands_are_left_alone():
    a, b, bias, residual = rand(40, 30), rand(30, 50), rand(50), rand(40, 50)
    before = [t.clone() for t in (a, b, bias, residual)]
    versions = [t._version for t in (a, b, bias, residual)]
    ts.matmul(a, b, bias=bias, residual=residual, activation="gelu", schedule="stream_k", workers=2)
    assert all(torch.equal(x, y) for x, y in zip(before, (a, b, bias, residual), strict=True))
    assert versions == [t._version for t in (a, b, bias, residual)]


def test_nan_and_infinity_stay_where_they_are():
    a, b = rand(40, 30), rand(30, 50)
    a[17, 3], a[20, 4] = float("nan"), float("inf")
    for schedule in ("static", "dynamic", "stream_k"):
        answer = ts.matmul(a, b, schedule=schedule, workers=2)
        assert answer[17].isnan().all()
        assert answer[20].isinf().all()
        rest = [i for i in range(40) if i not in (17, 20)]
        check(answer[rest], Maths(a[rest], b))
