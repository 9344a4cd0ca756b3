"""The epilogue as every backend is told of it; each writes in its own language what it does to an accumulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilestream.launch.gate import PublishArguments
from tilestream.plan.problem import Scales

#: Names of the activations.
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


@dataclass(frozen=True)
class Epilogue:
    """``activation(alpha * (scale_a * scale_b) * acc + bias + beta * residual)``, in the accumulator's dtype.

    Parameters
    ----------
    bias
        ``[N]`` or None.
    residual
        ``[B, M, N]`` (any strides) or None.
    activation
        One of `ACTIVATIONS`.
    scale_a, scale_b
        float32: one element, of any shape, or one a row of A (``[M, 1]``, ``[B, M, 1]``) and one a column of B
        (``[1, N]``, ``[B, 1, N]``), any strides; None: 1.
    publish
        Where the output's chunks are signalled, for a plan that publishes them; None: nowhere.
    """

    alpha: float = 1.0
    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    beta: float = 1.0
    activation: str = "none"
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    publish: PublishArguments | None = None

    @property
    def trivial(self) -> bool:
        """Whether the accumulator is the answer."""
        return (
            self.alpha == 1.0
            and self.bias is None
            and self.residual is None
            and self.activation == "none"
            and self.scales == "none"
        )

    @property
    def scales(self) -> Scales:
        """See `tilestream.plan.problem.Problem`."""
        given = [scale for scale in (self.scale_a, self.scale_b) if scale is not None]
        if not given:
            return "none"
        return "tensor" if all(scale.numel() == 1 for scale in given) else "row"
