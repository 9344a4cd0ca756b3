"""Operands in the dtype that they are multiplied in.

torch converts float8_e4m3fn bit by bit, 0.35e9 elements a second and core (EPYC, Zen 5): longer than a BLAS takes for
the multiply-adds of a tile of 512 columns. There are only 256 values: looked up, it is 1.7e9.
"""

from __future__ import annotations

import functools

import torch

from tilestream.runtime.workspace import Workspace

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: Elements looked up at a time: their indices, four bytes each, stay in the cache of a core.
_AT_ONCE = 1 << 16


@functools.cache
def _values(dtype: torch.dtype, wide: torch.dtype) -> torch.Tensor:
    """What each byte stands for."""
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8, device="cpu").view(dtype).to(wide)


def widen(x: torch.Tensor, into: torch.Tensor, workspace: Workspace) -> None:
    """Convert ``x`` ``[rows, columns]``, any strides, to ``into``, which is contiguous."""
    if x.dtype not in _FP8 or not x.numel():
        into.copy_(x)
        return
    values, codes = _values(x.dtype, into.dtype), x.view(torch.uint8)
    rows = max(1, _AT_ONCE // x.shape[1])
    with workspace.borrow((min(rows, x.shape[0]) * x.shape[1],), torch.int32) as indices:
        for begin in range(0, x.shape[0], rows):
            part = codes[begin : begin + rows]
            index = indices[: part.numel()]
            index.view(part.shape).copy_(part)
            torch.index_select(values, 0, index, out=into[begin : begin + rows].view(-1))
