"""Stream-K: full tiles first, then the remainder in equal shares of K (Osama et al., "Stream-K", PPoPP 2023).

``tiles`` tiles over ``workers`` workers leave ``tiles % workers`` tiles for a last, mostly empty wave. These tiles are
laid end to end as *units*, one K step of one tile each, and cut into ``shares`` equal parts. A share is a ticket, as a
full tile is. A share that crosses from one tile to the next is two work items.

Each contributor to a tile writes its partial result to the slot of (share, tile) and then counts. The last one adds the
partials in K order and restores the count. So the bits are the same in each run. No worker waits, and a worker that is
never scheduled delays no other (invariant 10). In the paper's kernel the owner of a tile's first part spins until the
others are done.

The functions are leaves in the sense of `tilestream.core.integers`.
"""

from __future__ import annotations


def remainder_tiles(tiles: int, workers: int) -> int:
    """The number of tiles of the last, partly filled wave."""
    return tiles % workers


def share_part(unit: int, unit_end: int, k_steps: int) -> tuple[int, int, int]:
    """The next work item of a share that has done its units up to ``unit``.

    Returns
    -------
    (tile, k_begin, k_end)
        The remainder tile (from 0) and its range of K steps.
    """
    tile = unit // k_steps
    begin = unit % k_steps
    return tile, begin, begin + min(k_steps - begin, unit_end - unit)


def slot(share: int, tile: int) -> int:
    """The slot of the partial result of (share, remainder tile).

    From one part to the next, in the order of units, the share, the tile or both grow by one, so their sum grows.
    Therefore no two parts have the same slot, a tile's slots are in K order, and ``shares + remainder - 1`` slots are
    enough.
    """
    return share + tile
