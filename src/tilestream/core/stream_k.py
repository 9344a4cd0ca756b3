"""Stream-K: full tiles first, the remainder split along K into equal shares (Osama et al., "Stream-K", PPoPP 2023).

``tiles`` tiles over ``workers`` workers leave ``tiles % workers`` for a last, mostly empty wave. These tiles are laid
end to end as *units* (one K step of one tile each) and cut into ``shares`` equal parts; a share is a ticket, as a full
tile is. A share that crosses from one tile to the next makes two work items.

Each contributor to a tile writes its partial result to a slot that only (share, tile) determine, then counts. The last
one adds the partials in K order and restores the count. So the bits are the same each run, and no worker waits: one
that was never scheduled delays no other (invariant 10). In the paper's kernel the owner of a tile's first part spins
until the others are done.

Leaves in the sense of `tilestream.core.integers`.
"""

from __future__ import annotations


def remainder_tiles(tiles: int, workers: int) -> int:
    """Tiles of the last, partly filled wave."""
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
    """Where the partial of (share, remainder tile) lies.

    From one part to the next, in the order of units, the share or the tile or both grow by one. So their sum grows: no
    two parts share a slot, a tile's slots are in K order, and ``shares + remainder - 1`` slots are enough.
    """
    return share + tile
