"""The sum of what ranks have computed, in fp32 and in the order of the ranks: the same bits each time.

One program a block of this rank's part of the output: read each rank's, add, divide, add the bias, round once.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Elements that a program adds: 16 bytes of 16-bit ones a thread.
BLOCK = 1024


@triton.jit(do_not_specialize=("rank", "epoch", "batches"))
def add_parts(
    own, parts, out, bias, over, rank, epoch, batches, plane, width, divisor,
    WORLD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out = sum of parts / divisor + bias``; NaN from the call ``over`` on. The grid: blocks, batches.

    Parameters
    ----------
    own
        This rank's whole product ``[batches, WORLD, plane]``, in which its own part is.
    parts
        The others' parts ``[WORLD, batches, plane]``; this rank's is not read.
    over
        ``int32``: the first call that is void, or 0.
    epoch
        This call.
    plane, width
        Elements of a batch of a rank's part, and of a row.
    """
    batch = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < plane
    first = tl.load(over)
    acc = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(WORLD):
        if r == rank:
            acc += tl.load(own + (batch * WORLD + r) * plane + i, mask=inside, other=0.0).to(tl.float32)
        else:
            acc += tl.load(parts + (r * batches + batch) * plane + i, mask=inside, other=0.0).to(tl.float32)
    acc = acc / divisor
    if BIAS:
        acc += tl.load(bias + i % width, mask=inside, other=0.0).to(tl.float32)
    void = (first != 0) & (first <= epoch)
    acc = tl.where(void, float("nan"), acc)
    tl.store(out + batch * plane + i, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("epoch",))
def add_slots(
    addresses, out, bias, over, epoch, count, width, divisor,
    WORLD: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out = sum of the ranks' slots / divisor + bias``; NaN from the call ``over`` on. The grid: blocks.

    Parameters
    ----------
    addresses
        ``int64[WORLD]``: where each rank's partial sum is, in memory that this GPU maps; of ``out``'s dtype.
    over
        ``int32``: the first call that is void, or 0.
    epoch
        This call.
    count, width
        Elements of a partial sum, and of a row.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    first = tl.load(over)
    acc = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(WORLD):
        # Slots begin at pages: said of the pointer, or what is read of a peer is read an element at a time.
        slot = tl.multiple_of(tl.load(addresses + r).to(tl.pointer_type(out.dtype.element_ty)), 16)
        acc += tl.load(slot + i, mask=inside, other=0.0).to(tl.float32)
    acc = acc / divisor
    if BIAS:
        acc += tl.load(bias + i % width, mask=inside, other=0.0).to(tl.float32)
    void = (first != 0) & (first <= epoch)
    acc = tl.where(void, float("nan"), acc)
    tl.store(out + i, acc.to(out.dtype.element_ty), mask=inside)
