"""The epilogue as every backend is told of it; each writes in its own language what it does to an accumulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Names of the activations.
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


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
