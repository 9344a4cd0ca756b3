"""Sums of rows, each in an order that depends on the row's length alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sum_rows(x, out, columns, stride, BLOCK: tl.constexpr):
    """``out[row] = sum(x[row, :columns])`` of float32, a program a row: blocks of ``BLOCK``, the first first."""
    row = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, columns, BLOCK):
        at = first + step
        total += tl.load(x + row * stride + at, mask=at < columns, other=0.0)
    tl.store(out + row, tl.sum(total, 0))
