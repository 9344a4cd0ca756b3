"""`tilestream.mm` and `tilestream.bmm`: the matmul of two matrices, and of two batches of them."""

from __future__ import annotations

from typing import Any

import torch

from tilestream.ops.operands import Options, multiply


def mm(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    """``a @ b`` for matrices ``[M, K]`` and ``[K, N]``; keyword arguments and exceptions as for `tilestream.matmul`.

    Raises
    ------
    ValueError
        If an operand is no matrix.
    """
    _check_dims("mm", 2, a, b)
    return multiply(a, b, Options("mm", **options))


def bmm(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    """``a[i] @ b[i]`` for ``[B, M, K]`` and ``[B, K, N]``; keyword arguments and exceptions as for `tilestream.matmul`.

    Raises
    ------
    ValueError
        If an operand has not three dimensions, or they differ in batches.
    """
    _check_dims("bmm", 3, a, b)
    if a.shape[0] != b.shape[0]:
        raise ValueError(f"bmm: a has {a.shape[0]} batches, b has {b.shape[0]}; bmm does not broadcast, matmul does")
    return multiply(a, b, Options("bmm", **options))


def _check_dims(op: str, dims: int, a: torch.Tensor, b: torch.Tensor) -> None:
    for name, tensor in (("a", a), ("b", b)):
        if isinstance(tensor, torch.Tensor) and tensor.dim() != dims:
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)}; it has {dims} dimensions: use matmul for others"
            )
