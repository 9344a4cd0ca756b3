"""The sum of the ranks' parts, in Triton's interpreter: order, rounding, bias, and calls that are void."""

from __future__ import annotations

import pytest
import torch

from tilestream.kernels.portable.add import add_parts
from tilestream.launch.portable import add as launch

#: Batches, ranks, rows, width: whole blocks, a tail, less than one.
SHAPES = [(1, 2, 8, 64), (2, 3, 5, 40), (1, 5, 1, 3)]


def added(whole, parts, rank, *, bias=None, over=0, epoch=7, divisor=1.0, block=64):
    batches, world, rows, width = whole.shape
    out = torch.full((batches, rows, width), float("nan"), dtype=whole.dtype)
    plane = rows * width
    add_parts[-(-plane // block), batches](
        whole, parts, out, bias, torch.tensor([over], dtype=torch.int32), rank, epoch, batches, plane, width, divisor,
        WORLD=world, BIAS=bias is not None, BLOCK=block,
    )  # fmt: skip
    return out


def operands(batches, world, rows, width, rank):
    whole = torch.full((batches, world, rows, width), float("nan"), dtype=torch.float16)
    whole[:, rank].normal_()
    parts = torch.randn(world, batches, rows, width).half()
    parts[rank] = float("nan")  # not read
    return whole, parts


@pytest.mark.parametrize("shape", SHAPES)
def test_adds_in_float32_in_the_order_of_the_ranks_and_rounds_once(shape):
    for rank in range(shape[1]):
        whole, parts = operands(*shape, rank)
        bias = torch.randn(shape[3])
        wide = torch.zeros(shape[0], *shape[2:])
        for r in range(shape[1]):
            wide += (whole[:, rank] if r == rank else parts[r]).float()
        assert added(whole, parts, rank).equal(wide.half())
        average = (wide / shape[1] + bias).half()
        assert added(whole, parts, rank, bias=bias, divisor=float(shape[1])).equal(average)


@pytest.mark.parametrize(("over", "epoch", "void"), [(0, 7, False), (8, 7, False), (7, 7, True), (6, 7, True)])
def test_from_the_call_that_was_overruled_on_the_sum_is_nan(over, epoch, void):
    whole, parts = operands(1, 2, 3, 4, 1)
    assert added(whole, parts, 1, over=over, epoch=epoch).isnan().all() == void


@pytest.mark.parametrize("biased", [False, True])
def test_launches_take_every_call_of_a_shape(biased):
    whole, parts = operands(2, 3, 5, 40, 1)
    bias = torch.randn(40) if biased else None
    for epoch in (3, 4):
        out, void = torch.empty(2, 5, 40, dtype=torch.float16), torch.zeros(1, dtype=torch.int32)
        launch.add_parts(whole, parts, out, bias, void, 1, epoch, 3.0)
        assert out.equal(added(whole, parts, 1, bias=bias, divisor=3.0))
    slots = torch.randn(3, 5, 40).half()
    out = torch.empty(5, 40, dtype=torch.float16)
    addresses = torch.tensor([slot.data_ptr() for slot in slots])
    launch.add_slots(addresses, out, bias, void, epoch, 1.0)
    total = slots[0].float() + slots[1].float() + slots[2].float()
    assert out.equal((total if bias is None else total + bias).half())
