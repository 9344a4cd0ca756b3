"""`tilestream.mm` and `tilestream.bmm`: the matmul of two matrices, and of two batches of them."""

from __future__ import annotations

import torch

from tilestream.arrival.arrival import Arrival
from tilestream.ops import native
from tilestream.ops.checks import check_tensors
from tilestream.ops.request import Request, multiply


def mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    beta: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    use_fast_accum: bool = True,
    arrival: Arrival | None = None,
    schedule: str = "auto",
    workers: int | None = None,
    deadline: float | None = None,
) -> torch.Tensor:
    """``a @ b`` for matrices ``[M, K]`` and ``[K, N]``; keyword arguments and exceptions as for `tilestream.matmul`.

    Raises
    ------
    ValueError
        If an operand is no matrix.
    """
    if arrival is None and deadline is None:
        made = native.product(
            "mm", a, b, out, bias, residual, 1.0, beta, activation, out_dtype, scale_a, scale_b, use_fast_accum,
            schedule, workers,
        )  # fmt: skip
        if made is not None:
            return made
    _check_dims("mm", 2, a, b)
    return multiply(Request(
        "mm", a, b, out=out, bias=bias, residual=residual, beta=beta, activation=activation, out_dtype=out_dtype,
        scale_a=scale_a, scale_b=scale_b, fast_accum=use_fast_accum, arrival=arrival, schedule=schedule,
        workers=workers, deadline=deadline,
    ))  # fmt: skip


def bmm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    beta: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    use_fast_accum: bool = True,
    arrival: Arrival | None = None,
    schedule: str = "auto",
    workers: int | None = None,
    deadline: float | None = None,
) -> torch.Tensor:
    """``a[i] @ b[i]`` for ``[B, M, K]`` and ``[B, K, N]``; keyword arguments and exceptions as for `tilestream.matmul`.

    Raises
    ------
    ValueError
        If an operand has not three dimensions, or they differ in batches.
    """
    if arrival is None and deadline is None:
        made = native.product(
            "bmm", a, b, out, bias, residual, 1.0, beta, activation, out_dtype, scale_a, scale_b, use_fast_accum,
            schedule, workers,
        )  # fmt: skip
        if made is not None:
            return made
    _check_dims("bmm", 3, a, b)
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: a has {a.shape[0]} batches, b has {b.shape[0]}; bmm does not broadcast, matmul does")
    return multiply(Request(
        "bmm", a, b, out=out, bias=bias, residual=residual, beta=beta, activation=activation, out_dtype=out_dtype,
        scale_a=scale_a, scale_b=scale_b, fast_accum=use_fast_accum, arrival=arrival, schedule=schedule,
        workers=workers, deadline=deadline,
    ))  # fmt: skip


def _check_dims(op: str, dims: int, a: torch.Tensor, b: torch.Tensor) -> None:
    check_tensors(op, a=a, b=b)
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != dims:
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)}; it has {dims} dimensions: use matmul for others"
            )
