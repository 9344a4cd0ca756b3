"""Groups: consecutive runs of rows, or of K, whose lengths only the device knows.

The host plans for the largest number of tiles that the groups can have. The device counts the actual ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal, get_args

#: What the groups divide: A's rows, with one B for each group; or K, with one output for each group.
Along = Literal["rows", "k"]
ALONGS = get_args(Along)
#: The largest number of groups: a worker of a GPU reads all offsets at once.
MOST_GROUPS = 1024
#: How far lengths are taken to lie from their mean, as a share of it, and how many of them stand for all: between equal
#: lengths and those of a mild skew (benchmarks/results/h100/gemm_grouped_search.json).
SPREAD, SAMPLES = 0.4, 16


def most_row_tiles(rows: int, groups: int, block: int) -> int:
    """The largest number of tiles of ``block`` rows for ``rows`` rows in ``groups`` groups.

    A tile belongs to one group, and each group that has rows may end with a tile that is not full.
    """
    return (rows + min(groups, rows) * (block - 1)) // block


@functools.lru_cache(maxsize=256)  # tiles of as many rows are often asked for again
def mean_row_tiles(rows: int, groups: int, block: int) -> int:
    """The number of tiles of ``block`` rows to expect: lengths spread evenly around their mean, `SPREAD` either way."""
    used = min(groups, rows)
    if used <= 1:
        return -(-rows // block)
    shares = (1 + SPREAD * (2 * i + 1 - SAMPLES) / SAMPLES for i in range(SAMPLES))
    tiles = sum(math.ceil(share * rows / used / block) for share in shares)
    return min(round(used * tiles / SAMPLES), most_row_tiles(rows, groups, block))


def by_load(ends: Sequence[int]) -> tuple[list[int], int]:
    """The groups that end there, most rows first, the lower number first of equal ones; and how many have rows.

    `tilestream.kernels.device.groups.rank_by_load` is this order on the device.
    """
    begins = [0, *ends][: len(ends)]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    return sorted(range(len(ends)), key=lambda g: -sizes[g]), sum(size > 0 for size in sizes)
