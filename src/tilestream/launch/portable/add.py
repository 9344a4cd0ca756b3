"""Launches of the kernels that add the ranks' partial sums."""

from __future__ import annotations

import torch

from tilestream.kernels.portable import add


def add_parts(
    whole: torch.Tensor, received: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, void: torch.Tensor,
    rank: int, epoch: int, divisor: float,
) -> None:  # fmt: skip
    """``out = sum of parts / divisor + bias``, on the current stream; NaN if call ``void[0]`` is not after ``epoch``.

    Parameters
    ----------
    whole
        ``[batches, world, rows, width]``: this rank's product, with its own part.
    received
        ``[world, batches, rows, width]``: the peers' parts.
    out, bias
        ``[batches, rows, width]``, ``[width]``; contiguous.
    """
    (batches, rows, width), world = out.shape, len(received)
    plane = rows * width
    add.add_parts[-(-plane // add.BLOCK), batches](
        whole, received, out, bias, void, rank, epoch, batches, plane, width, divisor, WORLD=world,
        BIAS=bias is not None, BLOCK=add.BLOCK,
    )  # fmt: skip


def add_slots(
    addresses: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, void: torch.Tensor, epoch: int,
    divisor: float,
) -> None:  # fmt: skip
    """``out = sum of the ranks' slots / divisor + bias``, on the current stream; NaN as of `add_parts`.

    Parameters
    ----------
    addresses
        ``int64[world]``: each rank's partial sum, of ``out``'s shape and dtype.
    out, bias
        ``[rows, width]``, ``[width]``; contiguous.
    """
    add.add_slots[-(-out.numel() // add.BLOCK),](
        addresses, out, bias, void, epoch, out.numel(), out.shape[1], divisor, WORLD=len(addresses),
        BIAS=bias is not None, BLOCK=add.BLOCK,
    )  # fmt: skip
