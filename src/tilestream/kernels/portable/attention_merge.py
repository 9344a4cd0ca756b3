"""Shares of keys joined: a second, small kernel behind the one that computes them.

Where there are fewer tiles than workers, a tile's keys are split into shares. A share is a work item with an output and
a log-sum-exp of its own in scratch, float32. This kernel adds them, always in the same order::

    top = max over shares of lse;  weight = exp(lse - top)
    out = sum of weight * out / (sum of weight + exp(sink - top));  lse = top + ln (that sum)

So it gives the same bits each run, and no worker waits for another. Stream-K's rule, in which the last of a tile's
workers adds, would save the launch of 2 to 3 us, but cost each consumer of the Hopper kernel registers for the loop
that adds. Where keys are split the kernel is bound by reading them, and the shares are in L2.

Source of the split: Dao et al., "Flash-Decoding" (2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
_LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit(
    do_not_specialize=("shares", "rows", "positions", "heads", "ob", "os", "oh", "lb", "ls", "lh"),
    do_not_specialize_on_alignment=("out", "lse", "sinks"),
)
def merge_shares(
    partials, sums, out, lse, sinks, shares, rows, positions, heads, ob, os, oh, lb, ls, lh,
    DV: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Add up the shares of a row, of position and head: a program each.

    Parameters
    ----------
    partials, sums
        float32 ``[shares, rows, DV]`` and ``[shares, rows]``; rows are sequence, position and head.
    out, lse
        Of the call, with strides of sequence, position and head; ``lse`` may be None.
    sinks
        float32 ``[heads]``, or None.
    positions
        Of a sequence.
    TOGETHER
        Shares that are read at a time: one after the other they would be as many waits for memory.
    """
    row = tl.program_id(0)
    head = row % heads
    column = tl.arange(0, COLUMNS)
    some = tl.arange(0, TOGETHER)
    top = tl.cast(float("-inf"), tl.float32)
    if sinks is not None:
        top = tl.load(sinks + head)
    for first in range(0, shares, TOGETHER):
        share = first + some
        logs = tl.load(sums + share.to(tl.int64) * rows + row, mask=share < shares, other=float("-inf"))
        top = tl.maximum(top, tl.max(logs, 0))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.cast(0.0, tl.float32)
    if sinks is not None:
        total = tl.exp2((tl.load(sinks + head) - base) * _LOG2_E)
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, shares, TOGETHER):
        share = first + some
        lies = share.to(tl.int64) * rows + row
        logs = tl.load(sums + lies, mask=share < shares, other=float("-inf"))
        weight = tl.exp2((logs - base) * _LOG2_E)
        part = tl.load(
            partials + (lies[:, None] * DV + column[None, :]), mask=(share < shares)[:, None] & (column < DV)[None, :],
            other=0.0,
        )  # fmt: skip
        acc += tl.sum(weight[:, None] * part, 0)
        total += tl.sum(weight, 0)
    whole = tl.where(total == 0.0, 1.0, total)
    position = row // heads % positions
    sequence = (row // heads // positions).to(tl.int64)
    out_at = out + (sequence * ob + position.to(tl.int64) * os + head.to(tl.int64) * oh)
    tl.store(out_at + column, (acc / whole).to(out.dtype.element_ty), mask=column < DV)
    if lse is not None:
        logs = tl.where(total == 0.0, float("-inf"), base + _LN_2 * tl.log2(whole))
        tl.store(lse + (sequence * lb + position.to(tl.int64) * ls + head.to(tl.int64) * lh), logs)
