"""The copy of operands into rows that TMA can address, in Triton's interpreter: every element, nowhere else."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tilestream.core.gpu_specs import named
from tilestream.core.operands import Epilogue, GemmOperands
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.hopper.realign import ACROSS, LONG, SHORT, copy_of
from tilestream.launch.hopper.realign_launch import Realign
from tilestream.ops.gpu import _strides
from tilestream.plan import plan_problem, tma
from tilestream.plan.problem import Problem, dtype_name
from tilestream.plan.realign import copied_bytes, realigned

DTYPES = {2: torch.float16, 4: torch.float32, 1: torch.float8_e4m3fn}


def numbers(*shape: int, size: int = 2) -> torch.Tensor:
    """Random bits; of floats none is NaN."""
    if size == 1:
        return torch.randint(0, 127, shape, dtype=torch.int8).view(DTYPES[1])
    return torch.randn(shape).to(DTYPES[size])


class Lies(NamedTuple):
    """An operand as it lies; and the bytes that are copied at a time, of two-byte elements."""

    make: object
    word: int = 2


LAYOUTS = {
    "odd rows": Lies(lambda size: numbers(37, 301, size=size)),
    "rows of 2 elements": Lies(lambda size: numbers(37, 302, size=size), 4),
    "rows of 4 elements": Lies(lambda size: numbers(37, 300, size=size), 8),
    "columns": Lies(lambda size: numbers(301, 37, size=size).T),
    "batches": Lies(lambda size: numbers(3, 20, 33, size=size)),
    "batches of columns": Lies(lambda size: numbers(3, 20, 33, size=size).mT),
    "a shared batch": Lies(lambda size: numbers(1, 20, 33, size=size).expand(3, 20, 33)),
    "columns of a wider matrix": Lies(lambda size: numbers(50, 264, size=size)[:, :260], 8),
    "from the second column on": Lies(lambda size: numbers(50, 264, size=size)[:, 1:257]),
    "every other column": Lies(lambda size: numbers(50, 67, size=size)[:, ::2]),
    "one row": Lies(lambda size: numbers(1, 999, size=size)),
    "one column": Lies(lambda size: numbers(999, 1, size=size)),
    "a row for all": Lies(lambda size: numbers(1, 19, size=size).expand(140, 19)),
    "several blocks": Lies(lambda size: numbers(129, 257, size=size)),
}


@pytest.mark.parametrize("size", DTYPES)
@pytest.mark.parametrize("along_k", [1, 0], ids=["A", "B"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_has_every_element_where_tma_takes_it(name, along_k, size):
    x = LAYOUTS[name].make(size)
    batch = x.shape[0] if x.dim() == 3 else 1
    aligned = x.data_ptr() % 16 == 0
    made = copy_of((x.shape[-2], x.shape[-1]), _strides(x), batch, size, along_k, aligned, 128)
    if size == 2 and (aligned or LAYOUTS[name].word == 2):
        assert made.word == LAYOUTS[name].word
    of_batch, *pair = made.strides
    wanted = along_k if tma.k_major_only(size) else None
    assert not tma.refuse("x", x.shape[-2:], pair, of_batch, size, 0, wanted)

    k, other = (x.shape[-1], x.shape[-2]) if along_k else (x.shape[-2], x.shape[-1])
    m, n = (other, 8) if along_k else (8, other)
    problem = Problem(
        m, n, k, batch, dtype_name(x.dtype), "float16", no_tma="odd", not_by_tma="a" if along_k else "b", aligned=False,
        tf32=size == 4, shared_rows=bool(along_k and batch > 1 and not x.stride(0)),
    )  # fmt: skip
    plan = plan_problem(problem, device=named("h100"), backend="hopper")
    shape = (batch,) if batch > 1 else ()
    a = x if along_k else numbers(*shape, m, k, size=size)
    b = numbers(*shape, k, n, size=size) if along_k else x
    out = torch.empty(*shape, m, n, dtype=torch.float16)
    first = Realign(plan, Layout(_strides(a), _strides(b), _strides(out)), 100, (aligned, aligned))
    scratch = torch.full((first.floats + 32,), float("nan"))
    before = scratch.clone()
    result = first(0, GemmOperands(a, b, out, Epilogue()), scratch)

    copied, other = (result.a, result.b) if along_k else (result.b, result.a)
    assert other is (b if along_k else a)
    assert copied.data_ptr() == scratch.data_ptr() + 512, "behind the partial results, at a multiple of 128"
    assert _strides(copied) == (first.layout.a if along_k else first.layout.b) == made.strides
    assert copied.float().equal(x.float())
    # Partial results lie before the copies; nothing is written behind them.
    bits, bits_before = scratch.view(torch.int32), before.view(torch.int32)
    assert bits[:128].equal(bits_before[:128])
    assert bits[first.floats :].equal(bits_before[first.floats :])


def test_two_operands_are_copied_by_one_launch_side_by_side():
    m, n, k = 70, 90, 131
    a, b, out = numbers(m, k), numbers(n, k).T, torch.empty(m, n, dtype=torch.float16)
    problem = Problem(m, n, k, 1, "float16", "float16", no_tma="odd", not_by_tma="ab", aligned=False)
    plan = plan_problem(problem, device=named("h100"), backend="hopper")
    assert plan.realigned == "ab"
    first = Realign(plan, Layout(_strides(a), _strides(b), _strides(out)), 0, (True, True))
    for _ in range(2):  # on the same scratch
        scratch = torch.full((first.floats,), float("nan"))
        result = first(0, GemmOperands(a, b, out, Epilogue()), scratch)
        assert result.a.equal(a)
        assert result.b.equal(b)
        assert result.b.data_ptr() >= result.a.data_ptr() + 2 * 70 * result.a.stride(0)
        a, b = numbers(m, k), numbers(n, k).T
        result = first(0, GemmOperands(a, b, out, Epilogue()), scratch)
        assert result.a.equal(a)
        assert result.b.equal(b)


@pytest.mark.parametrize("along_k", [1, 0], ids=["A", "B"])
@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 19, 33, 264, 1000])
@pytest.mark.parametrize("k", [1, 16, 33, 1024])
def test_a_copy_is_what_the_planner_takes_it_for(rows, k, across, along_k):
    """Rows of few elements are mostly padding, so a copy is along K where that has better rows."""
    shape = (rows, k) if along_k else (k, rows)
    strides = (0, 1, shape[0]) if across else (0, shape[1], 1)
    made = copy_of(shape, strides, 1, 2, along_k, True, 0)
    name = "a" if along_k else "b"
    m, n = (rows, 8) if along_k else (8, rows)
    problem = Problem(m, n, k, 1, "float16", "float16", no_tma="odd", not_by_tma=name, aligned=False)
    assert made.bytes <= 2 * max(copied_bytes(problem, name)[1], 128)
    pitch = max(made.strides)
    assert tma.row_multiple(2 * pitch) >= realigned(problem, name).row_multiples["ab".index(name)] or pitch == 1


@pytest.mark.parametrize(
    ("shape", "size", "block"),
    [((64, 256), 2, SHORT), ((64, 1023), 2, LONG), ((64, 33), 2, SHORT), ((64, 1023), 4, LONG)],
)
def test_blocks_are_of_long_rows_or_of_short_ones(shape, size, block):
    x = numbers(*shape, size=size)
    made = copy_of(shape, _strides(x), 1, size, 1, x.data_ptr() % 16 == 0, 0)
    assert made.block == block
    assert copy_of(shape, _strides(x), 1, 4, 0, False, 0).block == ACROSS, "K is the other dimension"
    assert copy_of((2, 64), (0, 1, 2), 1, 2, 1, True, 0).block == ACROSS, "two that lie side by side"
    assert made.blocks == -(-shape[0] // block[0]) * -(-(shape[1] * size // made.word) // block[1])
