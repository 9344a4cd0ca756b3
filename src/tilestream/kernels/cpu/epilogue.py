"""The epilogue on the CPU, in place on a tile's accumulator."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F  # noqa: N812  # its name everywhere

from tilestream.core.operands import Epilogue

#: `tilestream.core.operands.ACTIVATIONS`, each in place.
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "none": lambda x: x,
    "relu": torch.relu_,
    "gelu": lambda x: torch.ops.aten.gelu_(x),
    "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "silu": lambda x: F.silu(x, inplace=True),
}


#: The whole extent of a dimension.
_ALL = slice(None)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of accumulators, and of other sums, of operands in ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def part(e: Epilogue, batch: int, rows: slice, cols: slice) -> Epilogue:
    """The part of a canonical epilogue that a tile reads."""
    if e.bias is e.residual is e.scale_a is e.scale_b is None:
        return e
    return e._replace(
        bias=None if e.bias is None else e.bias[cols],
        residual=None if e.residual is None else e.residual[batch, rows, cols],
        scale_a=_part_of_scale(e.scale_a, batch, rows, _ALL), scale_b=_part_of_scale(e.scale_b, batch, _ALL, cols),
    )  # fmt: skip


def _part_of_scale(scale: torch.Tensor | None, batch: int, rows: slice, cols: slice) -> torch.Tensor | None:
    if scale is None or scale.numel() == 1:
        return scale
    return (scale if scale.dim() == 2 else scale[batch])[rows, cols]


def apply(e: Epilogue, acc: torch.Tensor) -> None:
    """Apply ``e`` in place to an accumulator. The tensors of ``e`` broadcast to it."""
    factor = _scaling(e, acc.dtype)
    if factor is not None:
        acc.mul_(factor)
    if e.bias is not None:
        acc.add_(e.bias)
    if e.residual is not None:
        # add_ computes in acc's dtype: a 16-bit residual times beta is rounded once, at the very end.
        acc.add_(e.residual, alpha=e.beta)
    _ACTIVATIONS[e.activation](acc)


def _scaling(e: Epilogue, dtype: torch.dtype) -> torch.Tensor | float | None:
    """``alpha * (scale_a * scale_b)``; None if that is 1."""
    factor: torch.Tensor | None = None
    for scale in (e.scale_a, e.scale_b):
        if scale is not None:
            mine = (scale.reshape(()) if scale.numel() == 1 else scale).to(dtype)
            factor = mine if factor is None else factor * mine
    if factor is None:
        return None if e.alpha == 1.0 else e.alpha
    return factor if e.alpha == 1.0 else factor * e.alpha
