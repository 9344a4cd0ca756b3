"""Joins attentions of the same queries over different keys.

The formula, for any number of parts::

    top = max over parts of lse;  weight = exp(lse - top)
    out = sum of weight * out / (sum of weight + exp(sink - top));  lse = top + ln (that sum)

`merge_pair` joins two attentions of the caller. `merge_shares` joins the shares of a split: with fewer tiles than
workers, or with keys that arrive, a tile's keys are split into shares. A share is a work item, with a float32 output
and log-sum-exp in scratch. `merge_shares`, or `merge_shares_of_rows` for many rows, runs after the kernel that computes
them, and adds them in a fixed order. So each run gives the same bits, and no worker waits for another. With stream-K's
rule the last of a tile's workers would add: this would save a launch of 2 to 3 us, but cost each consumer of the Hopper
kernel registers for the loop. A kernel with split keys is bound by reading them, and the shares are in L2.

Source of the split: Dao et al., "Flash-Decoding" (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def base_of(top):
    """The number to subtract before exponentials: the largest log-sum-exp; 0 for rows without keys."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def weight_of(logs, base):
    """``exp(logs - base)``."""
    return tl.exp2((logs - base) * _LOG2_E)


@triton.jit
def divisor_of(total):
    """The divisor of weights: their sum; 1 for rows without keys, whose weights are 0."""
    return tl.where(total == 0.0, 1.0, total)


@triton.jit
def lse_of(total, base):
    """The log-sum-exp of all parts, from the sum of their weights."""
    return tl.where(total == 0.0, float("-inf"), base + _LN_2 * tl.log2(divisor_of(total)))


@triton.jit(
    do_not_specialize=("shares", "rows", "positions", "heads", "ob", "os", "oh", "lb", "ls", "lh"),
    do_not_specialize_on_alignment=("out", "lse", "sinks"),
)
def merge_shares(
    partials, sums, out, lse, sinks, shares, rows, positions, heads, ob, os, oh, lb, ls, lh,
    DV: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add the shares of a row, which is a position and head; one program a row.

    Parameters
    ----------
    partials, sums
        float32 ``[shares, rows, DV]`` and ``[shares, rows]``; rows are sequence, position and head.
    out, lse
        The call's outputs, with strides of sequence, position and head; ``lse`` may be None.
    sinks
        ``[heads]``, or None.
    positions
        Query positions of a sequence.
    TOGETHER
        Shares that are read at a time. Reads one after the other would each wait for memory.
    """
    row = tl.program_id(0)
    head = row % heads
    column = tl.arange(0, COLUMNS)
    some = tl.arange(0, TOGETHER)
    top = tl.cast(float("-inf"), tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head).to(tl.float32)
    for first in range(0, shares, TOGETHER):
        share = first + some
        logs = tl.load(sums + share.to(tl.int64) * rows + row, mask=share < shares, other=float("-inf"))
        top = tl.maximum(top, tl.max(logs, 0))
    base = base_of(top)
    total = tl.cast(0.0, tl.float32)
    if sinks is not None:
        total = weight_of(tl.load(sinks + head).to(tl.float32), base)
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, shares, TOGETHER):
        share = first + some
        lies = share.to(tl.int64) * rows + row
        logs = tl.load(sums + lies, mask=share < shares, other=float("-inf"))
        weight = weight_of(logs, base)
        part = tl.load(
            partials + (lies[:, None] * DV + column[None, :]), mask=(share < shares)[:, None] & (column < DV)[None, :],
            other=0.0,
        )  # fmt: skip
        acc += tl.sum(weight[:, None] * part, 0)
        total += tl.sum(weight, 0)
    whole = divisor_of(total)
    position = row // heads % positions
    sequence = (row // heads // positions).to(tl.int64)
    out_at = out + (sequence * ob + position.to(tl.int64) * os + head.to(tl.int64) * oh)
    tl.store(out_at + column, (acc / whole).to(out.dtype.element_ty), mask=column < DV)
    if lse is not None:
        logs = lse_of(total, base)
        tl.store(lse + (sequence * lb + position.to(tl.int64) * ls + head.to(tl.int64) * lh), logs)


@triton.jit(
    do_not_specialize=("rows", "positions", "heads", "ob", "os", "oh", "lb", "ls", "lh"),
    do_not_specialize_on_alignment=("out", "lse", "sinks"),
)
def merge_shares_of_rows(
    partials, sums, out, lse, sinks, SHARES: tl.constexpr, rows, positions, heads, ob, os, oh, lb, ls, lh,
    DV: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`merge_shares` for many rows and few shares: a program adds ``ROWS`` rows, one share behind the other.

    With a program a row, 2 shares of 8192 rows of 32 heads took 0.17 ms of an H200, twice the time of their bytes.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    head = row % heads
    column = tl.arange(0, COLUMNS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head).to(tl.float32)
    for share in tl.static_range(SHARES):
        logs = tl.load(sums + (tl.cast(share, tl.int64) * rows + row), mask=inside, other=float("-inf"))
        top = tl.maximum(top, logs)
    base = base_of(top)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        total = weight_of(tl.load(sinks + head).to(tl.float32), base)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    whole_rows = inside[:, None] & (column < DV)[None, :]
    for share in tl.static_range(SHARES):
        lies = tl.cast(share, tl.int64) * rows + row
        weight = weight_of(tl.load(sums + lies, mask=inside, other=float("-inf")), base)
        part = tl.load(partials + (lies[:, None] * DV + column[None, :]), mask=whole_rows, other=0.0)
        acc += weight[:, None] * part
        total += weight
    position = row // heads % positions
    sequence = (row // heads // positions).to(tl.int64)
    out_at = out + (sequence * ob + position.to(tl.int64) * os + head.to(tl.int64) * oh)
    made = (acc / divisor_of(total)[:, None]).to(out.dtype.element_ty)
    tl.store(out_at[:, None] + column[None, :], made, mask=whole_rows)
    if lse is not None:
        lse_at = lse + (sequence * lb + position.to(tl.int64) * ls + head.to(tl.int64) * lh)
        tl.store(lse_at, lse_of(total, base), mask=inside)


@triton.jit
def offsets_of(row, middle, last, s0, s1, s2):
    """64-bit offsets of rows of ``[first, middle, last]``, by the strides of these extents."""
    i, j, k = row // last // middle, row // last % middle, row % last
    return i.to(tl.int64) * s0 + j.to(tl.int64) * s1 + k.to(tl.int64) * s2


@triton.jit
def weigh(o_at, share, mask):
    """A part's elements times its share; 0 if the share is 0, also for NaN."""
    part = tl.load(o_at, mask=mask, other=0.0).to(tl.float32)
    return tl.where(share == 0.0, 0.0, share * part)


@triton.jit(
    do_not_specialize=(
        "rows", "middle", "last", "a0", "a1", "a2", "b0", "b1", "b2", "o0", "o1", "o2", "la0", "la1", "la2", "lb0",
        "lb1", "lb2", "lo0", "lo1", "lo2",
    ),
    do_not_specialize_on_alignment=("lse_a", "lse_b", "lse"),
)  # fmt: skip
def merge_pair(
    o_a, lse_a, o_b, lse_b, out, lse, rows, middle, last, a0, a1, a2, b0, b1, b2, o0, o1, o2, la0, la1, la2,
    lb0, lb1, lb2, lo0, lo1, lo2, DV: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Join two attentions in float32; each program has a block of rows and columns.

    Parameters
    ----------
    o_a, o_b, out
        ``[first, middle, last, DV]`` by the strides of the first three, in units of ALIGN elements; the fourth is 1.
    lse_a, lse_b, lse
        ``[first, middle, last]``, by their strides.
    rows
        ``first * middle * last``.
    ALIGN
        The unit of offsets, so that the compiler knows their alignment and uses vectors.
    """
    STRIPS: tl.constexpr = (DV + COLUMNS - 1) // COLUMNS
    row = tl.program_id(0) // STRIPS * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % STRIPS * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = row < rows
    mask = inside[:, None] & (column < DV)
    logs_a = tl.load(lse_a + offsets_of(row, middle, last, la0, la1, la2), mask=inside, other=0.0).to(tl.float32)
    logs_b = tl.load(lse_b + offsets_of(row, middle, last, lb0, lb1, lb2), mask=inside, other=0.0).to(tl.float32)
    base = base_of(tl.maximum(logs_a, logs_b))
    weight_a, weight_b = weight_of(logs_a, base), weight_of(logs_b, base)
    total = weight_a + weight_b
    whole = divisor_of(total)
    a_at = o_a + ((ALIGN * offsets_of(row, middle, last, a0, a1, a2))[:, None] + column)
    b_at = o_b + ((ALIGN * offsets_of(row, middle, last, b0, b1, b2))[:, None] + column)
    acc = weigh(a_at, (weight_a / whole)[:, None], mask) + weigh(b_at, (weight_b / whole)[:, None], mask)
    out_at = out + ((ALIGN * offsets_of(row, middle, last, o0, o1, o2))[:, None] + column)
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=mask)
    # All programs of a row compute the same bits; one of them writes.
    lse_at = lse + offsets_of(row, middle, last, lo0, lo1, lo2)
    logs = lse_of(total, base).to(lse.dtype.element_ty)
    tl.store(lse_at, logs, mask=inside & (tl.program_id(0) % STRIPS == 0))
