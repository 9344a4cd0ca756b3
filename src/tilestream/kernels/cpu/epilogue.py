"""The epilogue on the CPU: what happens to the accumulator of a tile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F  # noqa: N812  # its name everywhere

from tilestream.kernels.epilogue import Epilogue

#: `tilestream.kernels.epilogue.ACTIVATIONS`, each in place.
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "none": lambda x: x,
    "relu": torch.relu_,
    "gelu": lambda x: torch.ops.aten.gelu_(x),
    "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "silu": lambda x: F.silu(x, inplace=True),
}


def apply(epilogue: Epilogue, acc: torch.Tensor, batch: int, rows: slice, cols: slice) -> None:
    """Do ``epilogue`` in place to ``acc``, the accumulator of that tile."""
    if epilogue.alpha != 1.0:
        acc.mul_(epilogue.alpha)
    if epilogue.bias is not None:
        acc.add_(epilogue.bias[cols])
    if epilogue.residual is not None:
        # add_ computes in acc's dtype: a 16-bit residual times beta is rounded once, at the very end.
        acc.add_(epilogue.residual[batch, rows, cols], alpha=epilogue.beta)
    _ACTIVATIONS[epilogue.activation](acc)
