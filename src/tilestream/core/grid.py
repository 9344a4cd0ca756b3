"""The tiles of one problem, and the work items made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tilestream.core.integers import cdiv

#: Schedules count in integers that a device's 32-bit arithmetic and Python's agree on.
INT31 = 2**31


class WorkItem(NamedTuple):
    """A tile and the range of K to do for it."""

    tile: int  # the tile's id, ``(batch * num_m + pm) * num_n + pn``: what messages and probes name it by
    #: batch, pm, pn: the tile: batch, row tile, column tile.
    batch: int
    pm: int
    pn: int
    #: k_begin, k_end: range of K steps.
    k_begin: int
    k_end: int
    #: part, parts: which of how many contributors to this tile; (0, 1) for a whole tile.
    part: int = 0
    parts: int = 1
    slot: int = -1  # where this part's partial result lies; -1 for a whole tile


@dataclass(frozen=True)
class Grid:
    """``batch`` outputs of ``num_m`` x ``num_n`` tiles, each tile ``k_steps`` deep.

    Raises
    ------
    ValueError
        If a count is negative, ``k_steps`` is not positive, or tiles or K steps leave 31 bits.
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
        """Tiles of one batch."""
        return self.num_m * self.num_n

    @property
    def tiles(self) -> int:
        """Tiles of all batches."""
        return self.batch * self.num_m * self.num_n
