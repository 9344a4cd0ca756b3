"""Groups: runs of rows (of K) that lie one behind the other, of lengths that only the device knows.

The host plans for the most tiles that the groups can come to; the device counts those that there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

#: What the groups divide: A's rows, each group's multiplied with a B of its own; or K, each group's an output.
Along = Literal["rows", "k"]
ALONGS = get_args(Along)
#: Groups at most: a worker of a GPU looks at all of their offsets at once.
MOST_GROUPS = 1024


def most_row_tiles(rows: int, groups: int, block: int) -> int:
    """Tiles of ``block`` rows that ``rows`` rows in ``groups`` groups come to at most.

    A tile belongs to one group, and each group that has rows may end with a tile that is not full.
    """
    return (rows + min(groups, rows) * (block - 1)) // block


def mean_row_tiles(rows: int, groups: int, block: int) -> int:
    """Tiles of ``block`` rows where all groups are of one size."""
    used = min(groups, rows)
    return min(used * -(-rows // (used * block)), most_row_tiles(rows, groups, block)) if used else 0


def by_load(ends: Sequence[int]) -> tuple[list[int], int]:
    """The groups that end there, most rows first, the lower number first of equal ones; and how many have rows.

    `tilestream.kernels.device.groups.rank_by_load` is this order on the device.
    """
    begins = [0, *ends][: len(ends)]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return sorted(range(len(ends)), key=lambda g: -sizes[g]), sum(size > 0 for size in sizes)
