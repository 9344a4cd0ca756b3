"""Tensor maps of Hopper's kernels: of a plan, and for the compiler. Imports no kernel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilestream.plan.policy.hopper_attention import BEYOND

if TYPE_CHECKING:
    import torch

_TYPES = {
    "bfloat16": gl.bfloat16, "float16": gl.float16, "float32": gl.float32, "float8_e4m3fn": gl.float8e4nv,
    "float8_e5m2": gl.float8e5,
}  # fmt: skip


class Map(NamedTuple):
    """A tensor map without its address."""

    #: shape, strides: in elements, outermost first; the last stride is 1.
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]  # the extents of one copy


#: The extents of the two dimensions that wrap a clipped copy's address: above all coordinates, and below 2**31, the
#: range of kernels' numbers.
WRAP = 2**31 - 2**16
#: The wrapping stride of a map that clips at any row is this minus the rows' stride: 2**30 steps wrap 64 bits.
AROUND = 2**34


def clipped(row: int, columns: int, box: tuple[int, int]) -> Map:
    """The map of rows of ``columns`` elements, ``row`` elements apart, whose copies can end at any row.

    See `tilestream.kernels.hopper.attention_load`.
    """
    return Map((WRAP, WRAP, BEYOND, columns), (AROUND - row, row, row, 1), (1, 1, *box))


class AlignedNull:
    """A stand-in for a tensor when a kernel is compiled: the aligned address 0."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @staticmethod
    def data_ptr() -> int:
        """The address 0, a multiple of all alignments."""
        return 0


def described_by(made: Map, dtype: torch.dtype) -> TensorDescriptor:
    """The descriptor that a kernel is compiled for: its box, and the box's layout in shared memory."""
    element = _TYPES[str(dtype).removeprefix("torch.")]
    rows = math.prod(made.box[:-1])
    swizzle = gl.NVMMASharedLayout.get_default_for([rows, made.box[-1]], element).swizzle_byte_width
    layout = gl.NVMMASharedLayout(swizzle, element.primitive_bitwidth, len(made.box))
    rank = len(made.box)
    strides = [256] * (rank - 2) + [16, 1]  # the compiler ignores shape and strides
    return TensorDescriptor(AlignedNull(dtype), [16] * rank, strides, list(made.box), layout)
