"""TMA's rules for operands: one contiguous dimension; other strides and the address are multiples of 16 bytes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilestream.plan.problem import ITEMSIZE

_MOST_STRIDE = 2**40
#: Bytes of which addresses and strides are multiples.
ALIGNMENT = 16
#: Bytes of an L2 line.
_LINE = 128


def major_of(extents: tuple[int, int], strides: tuple[int, int], batch_stride: int, size: int) -> int | None:
    """The dimension of a matrix that is contiguous to TMA: 1, 0, or None if TMA cannot address the matrix.

    Extents and strides are in elements of ``size`` bytes. The stride of an extent of 1 is ignored. ``batch_stride`` is
    the distance to the next matrix, and 0 for a shared or single matrix.
    """
    if not _fits(batch_stride * size):
        return None
    for major in (1, 0):
        inner, outer = strides[major], strides[1 - major]
        if (inner == 1 or extents[major] == 1) and (extents[1 - major] == 1 or (outer > 0 and _fits(outer * size))):
            return major
    return None


def store_major_of(extents: tuple[int, int], strides: tuple[int, int], batch_stride: int, size: int) -> int | None:
    """`major_of` for a matrix that TMA stores.

    A load reads nothing beyond the extents. A store is clipped in units of 16 bytes along the contiguous dimension, and
    could write beyond the end of a row. (Seen on an H100: tests/gpu/test_gpu_hopper.py.)
    """
    major = major_of(extents, strides, batch_stride, size)
    return major if major is not None and extents[major] * size % ALIGNMENT == 0 else None


def k_major_only(size: int) -> bool:
    """Whether the tensor cores take operands of ``size`` bytes from shared memory only if these are contiguous along K.

    The tensor cores can transpose 16-bit operands, but not those of 8 bits and of tf32's 32.
    """
    return size != 2


def refuse(
    name: str, extents: Sequence[int], strides: Sequence[int], batch_stride: int, size: int, address: int,
    major: int | None = None,
) -> str:  # fmt: skip
    """Why TMA cannot address an operand as the tensor cores need it; empty if it can.

    ``major`` is the dimension that must be contiguous; None accepts both. See `k_major_only`.
    """
    if address % ALIGNMENT:
        return f"{name} lies at an address that is no multiple of {ALIGNMENT}, TMA's rule"
    found = major_of((extents[0], extents[1]), (strides[0], strides[1]), batch_stride, size)
    if found is None:
        return (
            f"{name} has strides {tuple(strides)} of {size} bytes: TMA needs one stride of 1, the others multiples of "
            f"{ALIGNMENT} bytes"
        )
    if major not in (None, found):
        what = "8-bit operands" if size == 1 else "tf32"
        return f"{name} is not contiguous along K, and the tensor cores take {what} only so"
    return ""


def refuse_contiguous(m: int, n: int, k: int, layout: str, dtypes: tuple[str, str]) -> str:
    """`refuse` for contiguous A and B of a ``layout``: why not the first of them that TMA cannot address."""
    return next(filter(None, refuse_each(m, n, k, layout, dtypes)), "")


def refuse_each(m: int, n: int, k: int, layout: str, dtypes: tuple[str, str]) -> tuple[str, str]:
    """`refuse` for contiguous A, and for B, of a ``layout``."""
    operands = (("a", (m, k), layout[0], 1), ("b", (k, n), layout[1], 0))
    whys = []
    for (name, (rows, columns), letter, along_k), dtype in zip(operands, dtypes, strict=True):
        size = ITEMSIZE[dtype]
        strides = (columns, 1) if letter == "n" else (1, rows)
        whys.append(refuse(name, (rows, columns), strides, 0, size, 0, along_k if k_major_only(size) else None))
    return whys[0], whys[1]


def which(of_a: str, of_b: str) -> str:
    """`tilestream.plan.problem.Problem.not_by_tma`, of why TMA cannot address A and why not B."""
    return "a" * bool(of_a) + "b" * bool(of_b)


def rows_of(m: int, n: int, k: int, layout: str) -> tuple[int, int]:
    """The contiguous elements of a row of A, and of B, in memory, for contiguous operands of a ``layout``."""
    return (k if layout[0] == "n" else m), (n if layout[1] == "n" else k)


def row_multiple(*strides: int) -> int:
    """The largest number of bytes, up to an L2 line, of which all ``strides`` (in bytes) are multiples."""
    return math.gcd(_LINE, *strides)


def _fits(stride: int) -> bool:
    return 0 <= stride < _MOST_STRIDE and stride % ALIGNMENT == 0
