"""Tensor maps of Hopper's kernels, as a plan makes them and as the compiler is told of them. No kernel is imported."""

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
    """What a tensor map is made of, but for the address."""

    #: shape, strides: in elements, outermost first; the last stride is 1.
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]  # what one copy brings


#: The extents of the two dimensions that bring a clipped copy's address back: more than any coordinate, less than
#: 2**31, as which kernels are passed them.
WRAP = 2**31 - 2**16
#: A map that clips at any row has a stride of so many elements less the rows': 2**30 steps of it wrap around 64 bits.
AROUND = 2**34


def clipped(row: int, columns: int, box: tuple[int, int]) -> Map:
    """The map of rows of ``columns`` elements, ``row`` elements apart, whose copies end with any row.

    See `tilestream.kernels.hopper.attention_load`.
    """
    return Map((WRAP, WRAP, BEYOND, columns), (AROUND - row, row, row, 1), (1, 1, *box))


class AlignedNull:
    """Stands in for a tensor where a kernel is compiled: an aligned address of 0."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    @staticmethod
    def data_ptr() -> int:
        """An address that is a multiple of everything."""
        return 0


def described_by(made: Map, dtype: torch.dtype) -> TensorDescriptor:
    """A descriptor as a kernel is compiled for it: its box, and how that lies in shared memory."""
    element = _TYPES[str(dtype).removeprefix("torch.")]
    rows = math.prod(made.box[:-1])
    swizzle = gl.NVMMASharedLayout.get_default_for([rows, made.box[-1]], element).swizzle_byte_width
    layout = gl.NVMMASharedLayout(swizzle, element.primitive_bitwidth, len(made.box))
    rank = len(made.box)
    strides = [256] * (rank - 2) + [16, 1]  # as the shape, of no matter to the compiler
    return TensorDescriptor(AlignedNull(dtype), [16] * rank, strides, list(made.box), layout)
