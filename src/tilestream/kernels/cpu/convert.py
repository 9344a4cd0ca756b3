"""Operands in the dtype that they are multiplied in.

torch converts float8_e4m3fn bit by bit, 0.35e9 elements a second and core (EPYC, Zen 5): longer than a BLAS takes for
the multiply-adds of a tile of 512 columns. There are only 256 values: looked up, it is 1.7e9.
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
        """A tensor of undefined contents, for the length of a block."""

    def slots(self, count: int, block_m: int, block_n: int, dtype: torch.dtype) -> torch.Tensor:
        """``[count, block_m, block_n]`` for partial results."""


_FP8 = tuple(getattr(torch, name) for name in FP8)
#: Elements looked up at a time: few enough that torch does it in the calling thread, and that their indices, four bytes
#: each, stay in its core's cache.
_AT_ONCE = 1 << 15


@functools.cache
def _values(dtype: torch.dtype, wide: torch.dtype) -> torch.Tensor:
    """What each byte stands for."""
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(wide)


@contextlib.contextmanager
def widened(x: torch.Tensor, dtype: torch.dtype, workspace: Scratch) -> Iterator[torch.Tensor]:
    """``x`` ``[rows, columns]`` in ``dtype`` for the length of the block: itself, or a copy laid out as it is."""
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
            # One row at most where it is not a row as a whole: either way this is contiguous.
            torch.index_select(values, 0, index, out=into[row : row + rows, column : column + columns].view(-1))
