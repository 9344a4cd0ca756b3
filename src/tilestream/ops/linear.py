"""`tilestream.linear`: torch.nn.functional.linear, for inputs or weights that may still be arriving."""

from __future__ import annotations

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.ops.operands import Options, multiply


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    beta: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    arrival: Arrival | None = None,
    weight_arrival: Arrival | None = None,
    schedule: str = "auto",
    workers: int | None = None,
    deadline: float | None = None,
) -> torch.Tensor:
    """``activation(x @ weight.T + bias + beta * residual)``.

    Parameters
    ----------
    x
        ``[..., K]``; its leading dimensions count as rows.
    weight
        ``[N, K]`` (or ``[K]``, for a result without the last dimension).
    bias
        ``[N]``.
    weight_arrival
        How ``weight``'s rows come in: a weight that is still being copied from the host or read from a file.
    out, residual, beta, activation, out_dtype, arrival, schedule, workers, deadline
        As for `tilestream.matmul`, whose exceptions are raised.

    Raises
    ------
    ValueError
        If ``weight`` is neither a matrix nor a vector.
    """
    if isinstance(weight, torch.Tensor) and weight.dim() not in (1, 2):
        raise ValueError(f"linear: weight has shape {list(weight.shape)}; it is [N, K]")
    return multiply(
        x,
        weight.t() if isinstance(weight, torch.Tensor) else weight,
        Options(
            "linear",
            out=out,
            bias=bias,
            residual=residual,
            beta=beta,
            activation=activation,
            out_dtype=out_dtype,
            arrival=arrival,
            weight_arrival=weight_arrival,
            schedule=schedule,
            workers=workers,
            deadline=deadline,
        ),
    )
