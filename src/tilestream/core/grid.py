"""The tiles of one problem, and the work items made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tilestream.core.integers import cdiv

#: Schedules count in integers for which a device's 32-bit arithmetic and Python's agree.
INT31 = 2**31


class WorkItem(NamedTuple):
    """A tile and its range of K."""

    tile: int  # the tile's id in messages and probes, ``(batch * num_m + pm) * num_n + pn``
    #: batch, pm, pn: the tile's batch, row tile and column tile.
    batch: int
    pm: int
    pn: int
    #: k_begin, k_end: range of K steps.
    k_begin: int
    k_end: int
    #: part, parts: the number of this part among the tile's parts; (0, 1) for a whole tile.
    part: int = 0
    parts: int = 1
    slot: int = -1  # the slot of this part's partial result; -1 for a whole tile


@dataclass(frozen=True)
class Grid:
    """``batch`` outputs of ``num_m`` x ``num_n`` tiles, each tile ``k_steps`` deep.

    Raises
    ------
    ValueError
        If a count is negative, ``k_steps`` is not positive, or tiles or K steps exceed 31 bits.
    """

    batch: int
    num_m: int
    num_n: int
    k_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("batch", "num_m", "num_n"):
            if getattr(self, name) < 0:
                raise ValueError(f"Grid: {name}={getattr(self, name)}; a count of tiles cannot be negative")
        if self.k_steps < 1:
            raise ValueError(
                f"Grid: k_steps={self.k_steps}; an item has at least one K step (a K of 0 is one empty step)"
            )
        if self.tiles >= INT31 or self.k_steps >= INT31:
            raise ValueError(
                f"Grid: {self.tiles} tiles of {self.k_steps} K steps; schedules count in 31 bits: use larger tiles"
            )

    @classmethod
    def of(cls, m: int, n: int, k: int, block_m: int, block_n: int, block_k: int, batch: int = 1) -> Grid:
        """The grid of an ``[batch, m, n]`` output with ``block_m`` x ``block_n`` tiles and K steps of ``block_k``."""
        return cls(batch, cdiv(m, block_m), cdiv(n, block_n), max(1, cdiv(k, block_k)))

    @property
    def plane(self) -> int:
        """The number of tiles of one batch."""
        return self.num_m * self.num_n

    @property
    def tiles(self) -> int:
        """The number of tiles of all batches."""
        return self.batch * self.num_m * self.num_n
