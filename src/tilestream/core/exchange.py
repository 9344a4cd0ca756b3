"""How the CTAs of a cluster lay their sums into each other's shared memory: `tilestream.kernels.portable.cluster`."""

from __future__ import annotations

from tilestream.core.integers import cdiv
from tilestream.core.schedule import Schedule

#: Parts of a tile's K that a cluster's CTAs may have: powers of two, up to what each device with clusters supports.
CLUSTERS = (2, 4, 8)
#: Floats behind each row of a sum: so the rows that a warp stores at once lie in different banks.
PAD = 8
#: Bytes of which the room's address is a multiple.
ALIGNMENT = 16


def room(block_m: int, block_n: int) -> int:
    """Bytes of shared memory for the exchange of a tile's sums, with those before the first aligned address."""
    return cdiv(4 * block_m * (block_n + PAD), ALIGNMENT) * ALIGNMENT + ALIGNMENT


def cluster_of(schedule: Schedule) -> int:
    """CTAs of a cluster that add up a tile's parts in their shared memory; 1: parts go through global memory.

    All tiles have as many parts, of as many K steps.
    """
    shares, tiles = schedule.num_shares, schedule.grid.tiles
    parts = shares // max(1, tiles)
    alike = schedule.kind == "stream_k" and not schedule.full_tiles and parts * tiles == shares
    return parts if alike and parts in CLUSTERS and schedule.grid.k_steps % parts == 0 else 1
