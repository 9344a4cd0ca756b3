"""The room for a cluster's sums: large enough wherever it begins, and of rows in different banks."""

from __future__ import annotations

import pytest

from tilestream.core.exchange import ALIGNMENT, PAD, room
from tilestream.plan.policy.one_tile import TILES

EACH = sorted({tile[:2] for tiles in TILES.values() for tile in tiles})


@pytest.mark.parametrize("tile", EACH, ids=str)
def test_the_room_holds_the_tile_behind_any_address(tile):
    rows, columns = tile
    for end in range(1024, 1024 + 4 * ALIGNMENT, 4):
        begins = (end - 4 * rows * (columns + PAD)) // ALIGNMENT * ALIGNMENT  # as `cluster.own_room` has it
        assert begins >= end - room(rows, columns)
        assert begins + 4 * rows * (columns + PAD) <= end


@pytest.mark.parametrize("columns", sorted({columns for _, columns in EACH}))
def test_what_half_a_warp_stores_at_once_is_in_different_banks(columns):
    """Of a warp's fragment: four rows, in each four pairs of neighbours. A bank is a word, of 32."""
    words = [row * (columns + PAD) + 2 * pair + i for row in range(4) for pair in range(4) for i in (0, 1)]
    assert len({word % 32 for word in words}) == len(words)
