"""`tilestream.linear`: torch.nn.functional.linear, for inputs or weights that may still be arriving."""

from __future__ import annotations

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.ops import native
from tilestream.ops.request import Request, multiply


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
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    use_fast_accum: bool = True,
    arrival: Arrival | None = None,
    weight_arrival: Arrival | None = None,
    publish: Arrival | None = None,
    schedule: str = "auto",
    workers: int | None = None,
    deadline: float | None = None,
) -> torch.Tensor:
    """``activation(scale_a * scale_b * (x @ weight.T) + bias + beta * residual)``.

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
    scale_b
        float32: one element, or one a row of ``weight``: ``[N]``, ``[N, 1]`` or ``[1, N]``.
    out, residual, beta, activation, out_dtype, scale_a, use_fast_accum, arrival, publish, schedule, workers, deadline
        As for `tilestream.matmul`, whose exceptions are raised.

    Raises
    ------
    ValueError
        If ``weight`` is neither a matrix nor a vector.
    """
    if isinstance(scale_b, torch.Tensor) and scale_b.dim() == 2 and scale_b.shape[1] == 1:
        scale_b = scale_b.t()  # a scale a row of the weight is one a column of its transpose
    if arrival is None and weight_arrival is None and publish is None and deadline is None:
        made = native.product(
            "linear", x, weight, out, bias, residual, 1.0, beta, activation, out_dtype, scale_a, scale_b,
            use_fast_accum, schedule, workers,
        )  # fmt: skip
        if made is not None:
            return made
    if isinstance(weight, torch.Tensor) and weight.dim() not in (1, 2):
        raise ValueError(f"linear: weight has shape {list(weight.shape)}; it is [N, K]")
    transposed = weight.t() if isinstance(weight, torch.Tensor) else weight
    return multiply(Request(
        "linear", x, transposed, out=out, bias=bias, residual=residual, beta=beta, activation=activation,
        out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b, fast_accum=use_fast_accum, arrival=arrival,
        weight_arrival=weight_arrival, publish=publish, schedule=schedule, workers=workers, deadline=deadline,
    ))  # fmt: skip
