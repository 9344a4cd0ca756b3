"""`Shards`: the place of each rank's rows among the gathered rows, and the chunks in which they travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tilestream.arrival.arrival import Arrival

if TYPE_CHECKING:
    import torch

#: ``product(a, scale_a, arrival, deadline)`` multiplies the gathered rows ``a`` (``[rows, K]``); without ``arrival``
#: all of them have arrived.
Product = Callable[["torch.Tensor", "torch.Tensor | None", "Arrival | None", float], "torch.Tensor"]


class ScaledRows(NamedTuple):
    """Rows, and one float32 scale a row; ``scales`` is None for unscaled rows.

    All ranks' rows have shape ``[batches, world, rows, width]``; one rank's shard has ``[batches, rows, width]``.
    """

    data: torch.Tensor
    scales: torch.Tensor | None


class Part(NamedTuple):
    """Rows ``[begin, end)`` of one batch of a shard, which travel as one chunk; ``chunk`` counts over all ranks."""

    batch: int
    begin: int
    end: int
    chunk: int


@dataclass(frozen=True)
class Shards:
    """A tensor cut along a dimension before its last, viewed as ``[batches, world, rows, width]``."""

    batches: int  # product of the dimensions before the cut one
    world: int  # ranks
    #: Rows of a shard in one batch: the product of the shard's dimensions from the cut one to the last but one.
    rows: int
    width: int  # the last dimension
    parts: int = 1  # chunks of a shard in each batch

    @classmethod
    def of(cls, shard: Sequence[int], dim: int, world: int, parts: int = 1) -> Shards:
        """The shards of a tensor, from the shape of one shard."""
        batches, rows = math.prod(shard[:dim]), math.prod(shard[dim:-1])
        return cls(batches, world, rows, shard[-1], max(1, min(parts, rows)))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of all shards together."""
        return self.batches, self.world, self.rows, self.width

    @property
    def total(self) -> int:
        """Rows of all shards together."""
        return self.batches * self.world * self.rows

    @property
    def chunks(self) -> int:
        """Chunks of all shards together."""
        return self.batches * self.world * self.parts

    def of_rank(self, rank: int) -> Iterator[Part]:
        """The parts of a rank's shard, in the order in which they travel."""
        for batch in range(self.batches):
            for part in range(self.parts):
                begin, end = (self.rows * i // self.parts for i in (part, part + 1))
                yield Part(batch, begin, end, (batch * self.world + rank) * self.parts + part)

    def place(self, rank: int, part: Part) -> tuple[int, int]:
        """A part's first row among all ranks' rows, and its number of rows."""
        return (part.batch * self.world + rank) * self.rows + part.begin, part.end - part.begin

    def bounds(self) -> tuple[int, ...]:
        """The first row of each chunk, then the number of rows."""
        shards = range(self.batches * self.world)
        return (*(s * self.rows + self.rows * i // self.parts for s in shards for i in range(self.parts)), self.total)

    def rank_of(self, chunk: int) -> int:
        """The rank whose shard contains ``chunk``."""
        return chunk // self.parts % self.world

    def arrival(self, rank: int, device: str | None = None) -> Arrival:
        """The arrival of all shards on ``rank``; its pivot is the rank's own shard."""
        pivot = rank * self.parts
        if self.rows and self.rows % self.parts == 0:
            return Arrival.uniform(self.rows // self.parts, self.chunks, pivot, device=device)
        return Arrival.ragged(self.bounds(), pivot, device=device)
