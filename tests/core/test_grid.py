"""`Grid`: the tiles of a problem, counted in 31 bits."""

from __future__ import annotations

import re

import pytest
from hypothesis import given

from strategies import TOP, int31
from tilestream.schedule import Grid, WorkItem


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 1, 1), "Grid: batch=-1; a count of tiles cannot be negative"),
        ((1, -2, 1), "Grid: num_m=-2; a count of tiles cannot be negative"),
        ((1, 1, -3), "Grid: num_n=-3; a count of tiles cannot be negative"),
        ((1, 1, 1, 0), "Grid: k_steps=0; an item has at least one K step (a K of 0 is one empty step)"),
        ((1, 1, 1, -1), "Grid: k_steps=-1; an item has at least one K step (a K of 0 is one empty step)"),
        ((2, 2**15, 2**15), "Grid: 2147483648 tiles of 1 K steps; schedules count in 31 bits: use larger tiles"),
        ((1, 1, 1, 2**31), "Grid: 1 tiles of 2147483648 K steps; schedules count in 31 bits: use larger tiles"),
    ],
)
def test_bad_grid_is_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Grid(*arguments)


def test_the_largest_grid_is_accepted():
    assert Grid(1, TOP, 1, TOP).tiles == TOP


@pytest.mark.parametrize(
    ("m", "n", "k", "expected"),
    [(256, 128, 64, (1, 2, 2, 2)), (257, 129, 65, (1, 3, 3, 3)), (1, 1, 1, (1, 1, 1, 1)), (0, 5, 0, (1, 0, 1, 1))],
)
def test_of_rounds_up_and_a_k_of_zero_is_one_step(m, n, k, expected):
    assert Grid.of(m, n, k, 128, 64, 32) == Grid(*expected)


@given(int31(0, 10**6), int31(1, 4096))
def test_of_covers_the_rows_with_no_tile_to_spare(m, block):
    grid = Grid.of(m, 1, 1, block, 1, 1)
    assert (grid.num_m - 1) * block < m <= grid.num_m * block or m == grid.num_m == 0


def test_counts_and_an_item_that_is_a_whole_tile_by_default():
    grid, item = Grid(3, 4, 5, 6), WorkItem(0, 0, 0, 0, 0, 4)
    assert (grid.plane, grid.tiles) == (20, 60)
    assert (item.part, item.parts, item.slot) == (0, 1, -1)
