"""Gathered rows, with their scales, and the products that are computed from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilestream.arrival.arrival import Arrival

#: ``product(a, scale_a, arrival, deadline)`` multiplies the gathered rows ``a`` (``[rows, K]``); without ``arrival``
#: all of them have arrived.
Product = Callable[[torch.Tensor, "torch.Tensor | None", "Arrival | None", float], torch.Tensor]


class ScaledRows(NamedTuple):
    """Rows, and one float32 scale a row where there are scales.

    All ranks' rows have shape ``[batches, world, rows, width]``; one rank's shard has ``[batches, rows, width]``.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
