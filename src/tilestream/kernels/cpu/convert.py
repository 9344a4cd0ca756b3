"""Conversion of operands to the dtype in which they are multiplied.

Torch converts 0.35e9 elements of float8_e4m3fn a second and core (EPYC, Zen 5), which takes longer than the BLAS's
multiply-adds of a tile of 512 columns. A look-up in a table of the 256 values converts 1.7e9.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from tilestream.core.dtypes import FP8


class Scratch(Protocol):
    """Memory of one launch: `tilestream.runtime.workspace.Workspace`."""

    def borrow(self, shape: Sequence[int], dtype: torch.dtype) -> AbstractContextManager[torch.Tensor]:
        """A block with an uninitialised tensor."""

    def slots(self, count: int, block_m: int, block_n: int, dtype: torch.dtype) -> torch.Tensor:
        """``[count, block_m, block_n]`` for partial results."""


_FP8 = tuple(getattr(torch, name) for name in FP8)
#: Elements of one look-up: few enough for torch to stay in the calling thread, and for their indices, four bytes each,
#: to stay in its core's cache.
_AT_ONCE = 1 << 15


@functools.cache
def _values(dtype: torch.dtype, wide: torch.dtype) -> torch.Tensor:
    """The value of each byte."""
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(wide)


@contextlib.contextmanager
def widened(x: torch.Tensor, dtype: torch.dtype, workspace: Scratch) -> Iterator[torch.Tensor]:
    """A block with ``x`` ``[rows, columns]`` in ``dtype``: itself, or a copy in the same layout."""
    if x.dtype == dtype:
        yield x
        return
    if x.dtype not in _FP8:
        with workspace.borrow(x.shape, dtype) as into:
            yield into.copy_(x)
        return
    turned = x.stride(0) < x.stride(1)
    source = x.t() if turned else x
    with workspace.borrow(source.shape, dtype) as into:
        _look_up(source, into, workspace)
        yield into.t() if turned else into


def _look_up(x: torch.Tensor, into: torch.Tensor, workspace: Scratch) -> None:
    if not x.numel():
        return
    values, codes = _values(x.dtype, into.dtype), x.view(torch.uint8)
    rows, columns = max(1, _AT_ONCE // x.shape[1]), min(_AT_ONCE, x.shape[1])
    with workspace.borrow((rows * columns,), torch.int32) as indices:
        for row, column in itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], columns)):
            part = codes[row : row + rows, column : column + columns]
            index = indices[: part.numel()]
            index.view(part.shape).copy_(part)
            # Whole rows, or a part of one row: both are contiguous.
            torch.index_select(values, 0, index, out=into[row : row + rows, column : column + columns].view(-1))
