"""The epilogue on the CPU: what happens to the accumulator of a tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional as F  # noqa: N812  # its name everywhere

#: Activations by name, each in place.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "none": lambda x: x,
    "relu": torch.relu_,
    "gelu": lambda x: torch.ops.aten.gelu_(x),
    "gelu_tanh": lambda x: torch.ops.aten.gelu_(x, approximate="tanh"),
    "silu": lambda x: F.silu(x, inplace=True),
}


@dataclass(frozen=True)
class Epilogue:
    """``activation(alpha * acc + bias + beta * residual)``, in the accumulator's dtype.

    Parameters
    ----------
    bias
        ``[N]`` or None.
    residual
        ``[B, M, N]`` (any strides) or None.
    activation
        One of `ACTIVATIONS`.
    """

    alpha: float = 1.0
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    beta: float = 1.0
    activation: str = "none"

    @property
    def trivial(self) -> bool:
        """Whether the accumulator is the answer."""
        return self.alpha == 1.0 and self.bias is None and self.residual is None and self.activation == "none"

    def apply(self, acc: torch.Tensor, batch: int, rows: slice, cols: slice) -> None:
        """Do it in place to ``acc``, the accumulator of that tile."""
        if self.alpha != 1.0:
            acc.mul_(self.alpha)
        if self.bias is not None:
            acc.add_(self.bias[cols])
        if self.residual is not None:
            # add_ computes in acc's dtype: a 16-bit residual times beta is rounded once, at the very end.
            acc.add_(self.residual[batch, rows, cols], alpha=self.beta)
        ACTIVATIONS[self.activation](acc)
