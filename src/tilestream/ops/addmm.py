"""`tilestream.addmm`: torch.addmm, the matmul with a scaled addend."""

from __future__ import annotations

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.ops import native
from tilestream.ops.request import Request, multiply


def addmm(
    input: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    arrival: Arrival | None = None,
    schedule: str = "auto",
    workers: int | None = None,
    deadline: float | None = None,
) -> torch.Tensor:
    """``beta * input + alpha * (a @ b)`` for matrices ``[M, K]`` and ``[K, N]``.

    Parameters
    ----------
    input
        Broadcasts to ``[M, N]``. With ``beta=0`` it is not read: NaN there does not count.
    a, b
        The matrices.
    beta, alpha
        Factors.
    out, activation, out_dtype, arrival, schedule, workers, deadline
        As for `tilestream.matmul`, whose exceptions are raised.

    Raises
    ------
    ValueError
        If ``a`` or ``b`` is no matrix.
    """
    if arrival is None and deadline is None:
        made = native.product(
            "addmm", a, b, out, None, input, alpha, beta, activation, out_dtype, None, None, True, schedule, workers
        )  # fmt: skip
        if made is not None:
            return made
    for name, tensor in (("a", a), ("b", b)):
        if isinstance(tensor, torch.Tensor) and tensor.dim() != 2:
            raise ValueError(f"addmm: {name} has shape {list(tensor.shape)}; it has 2 dimensions: [M, K] and [K, N]")
    return multiply(Request(
        "addmm", a, b, residual=input, beta=beta, alpha=alpha, out=out, activation=activation, out_dtype=out_dtype,
        arrival=arrival, schedule=schedule, workers=workers, deadline=deadline,
    ))  # fmt: skip
