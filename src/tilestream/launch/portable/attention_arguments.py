"""The arguments of `tilestream.kernels.portable.attention.attention` that a plan and a layout decide."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from tilestream.core.integers import cdiv
from tilestream.kernels.attention_config import PortableAttentionConfig
from tilestream.launch import attention_arguments
from tilestream.launch.attention_arguments import AttentionLayout, Strides
from tilestream.launch.portable.options import options
from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.policy.portable import has_fp8_units
from tilestream.plan.problem import ITEMSIZE

_INT31 = 2**31
#: The smallest number of a head's columns for the matrix units.
_LEAST_COLUMNS = 16
#: Elements of a program that joins two attentions (16 bytes of 16-bit elements a lane on AMD), and its most columns.
_PAIR, _PAIR_COLUMNS = 2048, 256

#: The most shares that a joining program reads at a time, and of how many elements a warp of it has its part.
TOGETHER, ELEMENTS = 16, 2048
#: The least rows, and the most shares, of which a joining program adds several rows: of so many elements.
MANY_ROWS, FEW_SHARES, ELEMENTS_OF_ROWS = 1 << 15, 8, 1024
#: Warps of a program that adds several rows; and of one that joins two attentions.
ROWS_WARPS = 4
PAIR_WARPS = 4


class AttentionArguments(attention_arguments.AttentionArguments):
    """See `tilestream.launch.attention_arguments.AttentionArguments`."""

    def __init__(self, plan: AttentionPlan, layout: AttentionLayout, trace: bool = False) -> None:
        super().__init__(plan, layout, trace)
        self.options = options(plan)

    def config(self) -> PortableAttentionConfig:
        """The compile-time configuration."""
        plan, layout, problem = self.plan, self.layout, self.plan.problem
        scaled = any(strides is not None for strides in (layout.scale_q, layout.scale_k))
        # An offset inside a tile or a block exceeds 31 bits only in unusual views.
        rows, tensors = max(plan.block), (layout.q, layout.out, layout.k, layout.v)
        return PortableAttentionConfig.of(
            plan,
            layout,
            TRACE=self._trace,
            D=problem.head_dim,
            DV=problem.head_dim_v,
            BLOCK_D=padded(problem.head_dim),
            BLOCK_DV=padded(problem.head_dim_v),
            ALIGN=_alignment(problem.dtype, layout.q, layout.k, layout.v),
            ALIGN_OUT=_alignment(problem.out_dtype, layout.out),
            OFFSETS_64BIT=any(rows * row + problem.heads_q * head >= _INT31 for _, row, head in tensors),
            POSITIVE=problem.positive and not scaled,
            PRECISION="tf32" if problem.dtype == "float32" and problem.tf32 else "ieee",
            CONVERT=problem.dtype == "float8_e4m3fn" and not has_fp8_units(plan.device.arch),
        )


def padded(columns: int) -> int:
    """The number of a head's columns, padded to a power of two for the matrix units."""
    return max(_LEAST_COLUMNS, 1 << (columns - 1).bit_length())


def _alignment(dtype: str, *strides: Strides) -> int:
    """The number of elements in 16 bytes if strides are multiples of it, else 1. Triton checks addresses itself."""
    elements = 16 // ITEMSIZE[dtype]
    return elements if all(stride % elements == 0 for each in strides for stride in each) else 1


def merged_rows(rows: int, shares: int, columns: int) -> int:
    """The rows that a program of the merge adds, of so many padded columns; 1: see `merge_shape`.

    Few rows are a program each, so that all SMs have some. More shares are read together, not one behind the other.
    """
    return max(1, ELEMENTS_OF_ROWS // columns) if rows >= MANY_ROWS and shares <= FEW_SHARES else 1


def merge_shape(shares: int, columns: int) -> tuple[int, int]:
    """The shares that a program of the merge reads at a time, and its warps, for so many padded columns.

    A row is a program. Small programs leave room for others: with 2 shares of 8192 rows of 32 heads, 16 shares at a
    time and 4 warps took 0.77 ms of an H200, 2 and 1 take 0.17.
    """
    together = min(TOGETHER, 1 << (shares - 1).bit_length())
    return together, max(1, together * columns // ELEMENTS)


def pair_arguments(
    extents: Sequence[int], columns: int, outputs: Sequence[tuple[int, ...]], sums: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, int, int], tuple[Any, ...]]:
    """The grid of `tilestream.kernels.portable.attention_merge.merge_pair`, and its arguments after the pointers.

    Parameters
    ----------
    extents
        The three extents of the rows.
    outputs, sums
        Strides of the rows of ``o_a``, ``o_b`` and ``out``, and of ``lse_a``, ``lse_b`` and ``lse``.
    """
    rows, width = math.prod(extents), padded(min(columns, _PAIR_COLUMNS))
    block = _PAIR // width
    strides = [*itertools.chain(*outputs)]
    align = math.gcd(8, *strides)
    steps = (stride // align for stride in strides)
    numbers = (rows, *extents[1:], *steps, *itertools.chain(*sums), columns, block, width, align)
    return (cdiv(rows, block) * cdiv(columns, width), 1, 1), numbers
