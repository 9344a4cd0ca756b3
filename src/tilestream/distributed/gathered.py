"""What ranks gather, and what is computed of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from tilestream.arrival.arrival import Arrival

#: ``product(a, scale_a, arrival, deadline)``: what is computed of a whole, ``[rows, K]``; without ``arrival`` it is
#: there.
Product = Callable[[torch.Tensor, "torch.Tensor | None", "Arrival | None", float], torch.Tensor]


class Whole(NamedTuple):
    """What is gathered: ``[batches, world, rows, width]``, and a scale a row, float32, where there are scales.

    A shard of it is ``[batches, rows, width]``, and so are its scales.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
