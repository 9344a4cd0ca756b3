"""The kernel whose programs have a tile or a share each, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from interpreted import DEVICE, check_product, laid_out, nan_like, plan_for, product, recorded, run

from error_rule import ACTIVATIONS, Maths, check, rand
from tilestream.core.grid import Grid
from tilestream.core.operands import Epilogue
from tilestream.core.order import Raster
from tilestream.core.schedule import Schedule
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.portable.arguments import Arguments, arguments_of
from tilestream.plan.candidate import ONE_TILE
from tilestream.plan.plan import Plan
from tilestream.runtime.device_workspace import device_workspace

#: Programs of a tile; 0: one, with all of K. Of 1.5 on average some have parts of two tiles.
SPLITS = (0, 2, 1.5, 3)


def one_tile(a: torch.Tensor, b: torch.Tensor, split: float = 0, block=(16, 16, 16), **how) -> Plan:
    """A plan whose programs have a tile each, or a share."""
    plan = plan_for(a, b, "static", **how)
    problem = plan.problem
    grid = Grid.of(problem.m, problem.n, problem.k, *block, batch=problem.batch)
    shares = int(split * grid.tiles)
    schedule = Schedule("static", grid, Raster("row_major"), grid.tiles)
    if split:
        schedule = Schedule("stream_k", grid, Raster("row_major"), max(shares, grid.tiles + 1), shares=shares)
    return dataclasses.replace(plan, variant=ONE_TILE, block=block, schedule=schedule)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt", "ss"])
def test_layouts(layout, split):
    a, b = laid_out(37, 72, layout[0], torch.float16), laid_out(72, 50, layout[1], torch.float16)
    check_product(one_tile(a, b, split), a, b)


@pytest.mark.parametrize("split", SPLITS)
def test_every_small_size(split):
    for m, n, k in itertools.product((1, 15, 16, 17), (1, 16, 33), (1, 16, 17, 48)):
        a, b = rand(m, k), rand(k, n)
        check_product(one_tile(a, b, split if k > 16 else 0), a, b)


@pytest.mark.parametrize("block", [(16, 32, 64), (32, 16, 32), (64, 64, 16)])
def test_tiles(block):
    a, b = rand(70, 100), rand(100, 65)
    for split in SPLITS:
        check_product(one_tile(a, b, split, block), a, b)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("vector", [8, 4, 2])
def test_operands_in_vectors(vector, split):
    a = laid_out(9 * vector, 12 * vector, "n", torch.float16, vector)
    b = laid_out(12 * vector, 11 * vector, "t", torch.float16, vector)
    check_product(one_tile(a, b, split, vector=vector), a, b)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("vectors", [(8, 1), (1, 4), (2, 8)])
def test_each_operand_in_vectors_of_its_own(vectors, layout):
    """Where both lie along K, an extent that is a multiple of the wider vector alone is one of both."""
    m, n, k = 9 * vectors[0], 11 * vectors[1], 8 * max(vectors)
    if layout[0] == "t":
        k += vectors[1] if layout[1] == "t" else 1
    elif layout[1] == "n":
        k += vectors[0]
    a = laid_out(m, k, layout[0], torch.float16, vectors[0])
    b = laid_out(k, n, layout[1], torch.float16, vectors[1])
    for split in (0, 2):
        plan = one_tile(a, b, split, vector=vectors)
        lies = Layout((0, *a.stride()), (0, *b.stride()), (0, n, 1))
        assert vectors == arguments_of(plan, lies).config.VECTORS
        check_product(plan, a, b)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_epilogue(activation, split):
    a, b, bias, residual = rand(37, 70), rand(70, 40), rand(40), rand(37, 40, seed=3)
    check_product(one_tile(a, b, split), a, b, Epilogue(1.5, bias, residual, -0.5, activation or "none"))


@pytest.mark.parametrize("split", SPLITS)
def test_batches_and_a_strided_output(split):
    a, b = rand(3, 20, 33), rand(3, 33, 18)
    for shared in ("", "a", "b"):
        left, right = (x[:1].expand(3, -1, -1) if name == shared else x for name, x in (("a", a), ("b", b)))
        check_product(one_tile(left, right, split), left, right)
    store = torch.full((3, 20, 40), float("nan"))
    out = store[:, :, :36:2]
    run(one_tile(a, b, split), a, b, out)
    check(out, Maths(a, b))
    assert store[:, :, 1::2].isnan().all(), "wrote between the output's elements"


def test_nan_past_the_end_is_not_read():
    """What lies beside an operand's rows and columns counts for nothing."""
    a, b = laid_out(17, 17, "n", torch.float32, 31), laid_out(17, 17, "n", torch.float32, 31)
    for split in (0, 2):
        assert not product(one_tile(a, b, split), a, b).isnan().any()


@pytest.mark.parametrize("parts", range(2, 11))
def test_parts_are_added_in_the_order_of_k(parts):
    """The bits are those of the sums of the parts in order, however many loads are in flight."""
    a, b = rand(16, 16 * parts), rand(16 * parts, 16)
    plan = one_tile(a, b, parts)
    assert plan.additions.cuts == (tuple(range(16, 16 * parts, 16)),)
    made = product(plan, a, b)
    whole = sum(
        (product(one_tile(x, y), x, y) for x, y in zip(a.split(16, 1), b.split(16), strict=True)), torch.zeros(16, 16)
    )  # fmt: skip
    assert torch.equal(made, whole)


def test_a_wide_k_step():
    """Rows of K lie so far apart that a K step leaves 31 bits; a stub of memory has room for those alone."""
    plan = one_tile(rand(16, 48), rand(48, 16))
    arguments = arguments_of(plan, Layout((0, 1, 2**27), (0, 16, 1), (0, 16, 1)))
    assert arguments.config.OFFSETS_64BIT
    with pytest.raises(NotImplementedError, match=r"a: a stride of 134217728 elements along K, in steps of 16;"):
        Arguments(plan, Layout((0, 1, 2**27), (0, 16, 1), (0, 16, 1)))


def test_counts_are_restored():
    """Launches follow on one workspace; none leaves a count behind."""
    a, b = rand(33, 100), rand(100, 49)
    plan = one_tile(a, b, 3)
    first = product(plan, a, b)
    for _ in range(3):
        assert torch.equal(product(plan, a, b), first)
    assert not device_workspace(torch.device("cpu"), 0).open(plan.schedule, plan.block).counts.any()


@pytest.mark.parametrize("split", [0, 3])
def test_a_trace_is_of_the_persistent_kernel(split):
    """The same plan, the same bits, and a span for each tile."""
    a, b = rand(40, 70), rand(70, 40)
    plan, out = one_tile(a, b, split), nan_like(a, b)
    found = recorded("matmul", plan, lambda log: run(plan, a, b, out, probe=log))
    assert torch.equal(out, product(plan, a, b))
    assert len(found.spans) == plan.schedule.grid.tiles if not split else found.spans


def test_the_device_of_these_tests_is_one_that_has_the_kernel():
    """So the planner's own candidates are of it, too."""
    assert DEVICE.arch == "sm_90"
