"""Launches of the kernels that add the ranks' partial sums."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tilestream.kernels.portable import add
from tilestream.launch.launch import Kernel


def add_parts(
    whole: torch.Tensor, received: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, void: torch.Tensor,
    rank: int, epoch: int, divisor: float,
) -> None:  # fmt: skip
    """``out = sum of parts / divisor + bias`` on the current stream; NaN if ``void[0]`` is a call up to ``epoch``.

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
    launch_keyed(
        add.add_parts, (-(-plane // add.BLOCK), batches, 1), (whole, received, out, bias, void, rank), (epoch,),
        (batches, plane, width, divisor, world, bias is not None, add.BLOCK),
    )  # fmt: skip


def add_slots(
    addresses: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, void: torch.Tensor, epoch: int,
    divisor: float,
) -> None:  # fmt: skip
    """``out = sum of the ranks' slots / divisor + bias`` on the current stream; NaN as for `add_parts`.

    Parameters
    ----------
    addresses
        ``int64[world]``: the address of each rank's partial sum, of ``out``'s shape and dtype.
    out, bias
        ``[rows, width]``, ``[width]``; contiguous.
    """
    launch_keyed(
        add.add_slots, (-(-out.numel() // add.BLOCK), 1, 1), (addresses, out, bias, void), (epoch,),
        (out.numel(), out.shape[1], divisor, len(addresses), bias is not None, add.BLOCK),
    )  # fmt: skip


def launch_keyed(
    function: Any, grid: tuple[int, int, int], before: tuple[Any, ...], numbers: tuple[int, ...],
    behind: tuple[Any, ...], **options: int,
) -> None:  # fmt: skip
    """Launch on the current stream.

    Parameters
    ----------
    before, behind
        Arguments that a kernel is compiled for: by dtype and alignment, if they are tensors, else by value.
    numbers
        Arguments between them, for which it is not.
    """
    device = before[0].device
    kernel = _kernel(function, grid, device, tuple(map(_kind, before)), behind, **options)
    stream = torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    kernel(stream, tuple(kernel.take((*before, *numbers, *behind))))


@functools.lru_cache(maxsize=1024)
def _kernel(function: Any, grid: tuple[int, int, int], *compiled_for: Any, **options: int) -> Kernel:
    return Kernel(function, grid, options)


def _kind(x: Any) -> Any:
    """The part of an argument that a kernel is compiled for: a tensor's dtype and alignment."""
    return (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, torch.Tensor) else x
