"""The epilogue on the CPU: what happens to the accumulator of a tile."""

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


def apply(epilogue: Epilogue, acc: torch.Tensor, batch: int, rows: slice, cols: slice) -> None:
    """Do ``epilogue`` in place to ``acc``, the accumulator of that tile."""
    factor = scaling(epilogue, acc.dtype, batch, rows, cols)
    if factor is not None:
        acc.mul_(factor)
    if epilogue.bias is not None:
        acc.add_(epilogue.bias[cols])
    if epilogue.residual is not None:
        # add_ computes in acc's dtype: a 16-bit residual times beta is rounded once, at the very end.
        acc.add_(epilogue.residual[batch, rows, cols], alpha=epilogue.beta)
    _ACTIVATIONS[epilogue.activation](acc)


def scaling(
    epilogue: Epilogue, dtype: torch.dtype, batch: int, rows: slice, cols: slice
) -> torch.Tensor | float | None:
    """``alpha * (scale_a * scale_b)`` for that tile, which it broadcasts to; None where that is 1."""
    factor: torch.Tensor | None = None
    for scale, part in ((epilogue.scale_a, (rows, slice(None))), (epilogue.scale_b, (slice(None), cols))):
        if scale is None:
            continue
        if scale.numel() == 1:
            mine = scale.reshape(())
        else:
            mine = (scale if scale.dim() == 2 else scale[batch])[part]
        factor = mine.to(dtype) if factor is None else factor * mine.to(dtype)
    if factor is None:
        return None if epilogue.alpha == 1.0 else epilogue.alpha
    return factor if epilogue.alpha == 1.0 else factor * epilogue.alpha
