"""Where each rank's rows are in the whole, and the chunks that they travel in. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tilestream.arrival.arrival import Arrival


class Part(NamedTuple):
    """A part of a rank's shard that travels as a whole: rows [begin, end) of one batch; ``chunk`` in the whole."""

    batch: int
    begin: int
    end: int
    chunk: int


@dataclass(frozen=True)
class Shards:
    """A tensor cut along a dimension before its last, seen as ``[batches, world, rows, width]``.

    Attributes
    ----------
    batches
        Product of the dimensions before the one that is cut.
    world
        Ranks.
    rows
        Of a shard in one batch: product of the shard's dimensions from the one that is cut on, without the last.
    width
        The last dimension.
    parts
        Chunks that a shard has in each batch.
    """

    batches: int
    world: int
    rows: int
    width: int
    parts: int = 1

    @classmethod
    def of(cls, shard: Sequence[int], dim: int, world: int, parts: int = 1) -> Shards:
        """Of a shard of this shape."""
        batches, rows = math.prod(shard[:dim]), math.prod(shard[dim:-1])
        return cls(batches, world, rows, shard[-1], max(1, min(parts, rows)))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The whole."""
        return self.batches, self.world, self.rows, self.width

    @property
    def total(self) -> int:
        """Rows of the whole."""
        return self.batches * self.world * self.rows

    def of_rank(self, rank: int) -> Iterator[Part]:
        """The parts of a rank's shard, in the order in which they travel."""
        for batch in range(self.batches):
            for part in range(self.parts):
                begin, end = (self.rows * i // self.parts for i in (part, part + 1))
                yield Part(batch, begin, end, (batch * self.world + rank) * self.parts + part)

    def place(self, rank: int, part: Part) -> tuple[int, int]:
        """Where a part of a rank's shard begins in the whole, and how long it is: in rows."""
        return (part.batch * self.world + rank) * self.rows + part.begin, part.end - part.begin

    def bounds(self) -> tuple[int, ...]:
        """First row of each chunk of the whole, then its number of rows."""
        shards = range(self.batches * self.world)
        return (*(s * self.rows + self.rows * i // self.parts for s in shards for i in range(self.parts)), self.total)

    def rank_of(self, chunk: int) -> int:
        """Whose shard a chunk is of."""
        return chunk // self.parts % self.world

    def arrival(self, rank: int, device: str | None = None) -> Arrival:
        """The whole's rows as they come in on ``rank``, which begins with its own."""
        pivot = rank * self.parts
        if self.rows and self.rows % self.parts == 0:
            count = self.batches * self.world * self.parts
            return Arrival.uniform(self.rows // self.parts, count, pivot, device=device)
        return Arrival.ragged(self.bounds(), pivot, device=device)
