"""Scales of the operands: their checks, and their form for the registered ops and the kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tilestream.core.dtypes import FP8, FP8_RESULT

#: Dtypes of 8 bits, and the default dtype of their product.
FP8_DTYPES = tuple(getattr(torch, name) for name in FP8)
FP8_RESULT_DTYPE: torch.dtype = getattr(torch, FP8_RESULT)


def canonical_scales(
    op: str, scale_a: torch.Tensor | None, scale_b: torch.Tensor | None, batch_a: Sequence[int],
    batch_b: Sequence[int], shape: Sequence[int],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Both scales as `tilestream.core.operands.Epilogue` has them.

    Parameters
    ----------
    scale_a, scale_b
        The caller's: one element, or a shape that broadcasts to ``[*batch_a, 1]`` and ``[*batch_b, 1, N]``, or ``[M]``
        and ``[N]``. ``batch_a`` ends with M.
    shape
        The shape of the canonical output: ``[M', N]``, or ``[B, M, N]``.
    """
    row, column = ("row of x", "row of weight") if op == "linear" else ("row of a", "column of b")
    if scale_a is not None:
        scale_a = _canonical(f"{op}: scale_a", row, scale_a, (*batch_a, 1), (*shape[:-1], 1), 1)
    if scale_b is not None:
        full, to = (*batch_b, 1, shape[-1]), (*shape[:-2], 1, shape[-1])
        scale_b = _canonical(f"{op}: scale_b", column, scale_b, full, to, 0)
    return scale_a, scale_b


def _canonical(
    name: str, what: str, scale: torch.Tensor, full: tuple[int, ...], to: tuple[int, ...], missing: int
) -> torch.Tensor:
    """A scale that broadcasts to ``full``, as ``to``. A scale of one dimension has none at ``missing``."""
    if scale.numel() == 1:
        return scale
    extent = full[-1 - missing]
    seen = scale.unsqueeze(missing) if scale.dim() == 1 else scale
    fits = seen.dim() <= len(full) and all(
        mine in (1, theirs) for mine, theirs in zip(reversed(seen.shape), reversed(full), strict=False)
    )
    if not fits or (scale.dim() == 1 and scale.shape[0] != extent):
        raise ValueError(
            f"{name} has shape {list(scale.shape)}; it has one element, or one a {what}: [{extent}], or what "
            f"broadcasts to {list(full)}"
        )
    return seen if tuple(seen.shape) == to else seen.expand(full).reshape(to)


def check_scale_dtype(op: str, name: str, scale: torch.Tensor) -> None:
    """Raise unless a scale is float32, the dtype of the sums that it is multiplied with."""
    if scale.dtype != torch.float32:
        raise TypeError(f"{op}: {name} is {scale.dtype}; scales are torch.float32: {name}.float()")
