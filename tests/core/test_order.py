"""`Raster` and a caller's own order: what is refused, with which words; and what is accepted is a bijection."""

# ruff: noqa: E501  (tables of messages: each in one piece, so that it can be searched for)

from __future__ import annotations

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilestream.core import raster
from tilestream.schedule import Grid, Raster, by_arrival, by_cost, table_raster


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": "spiral"}, "Raster: order='spiral'; it must be one of row_major, grouped, chunk_major, longest_first, table"),
        ({"order": "grouped", "group": 0}, "Raster: group=0; it must be at least 1"),
        ({"order": "grouped", "group": -3}, "Raster: group=-3; it must be at least 1"),
        ({"order": "chunk_major", "band": 0}, "Raster: band=0; it must be at least 1"),
        ({"order": "chunk_major", "first": -1}, "Raster: first=-1; it must be at least 0"),
        ({"order": "table"}, "Raster: a table goes with order='table', and only with it"),
        ({"order": "grouped", "table": (0, 1)}, "Raster: a table goes with order='table', and only with it"),
        ({"order": "table", "table": (0,), "transposed": True}, "Raster: transposed=True with a table; write the table in the order that is meant"),
    ],
)  # fmt: skip
def test_bad_raster_is_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Raster(**arguments)


@pytest.mark.parametrize(("transposed", "rows"), [(False, 3), (True, 5)])
def test_pivot_outside_the_grid_is_refused(transposed, rows):
    Raster("chunk_major", first=rows - 1, transposed=transposed).check(Grid(1, 3, 5))
    with pytest.raises(
        ValueError, match=f"^Raster: first={rows}; the pivot's row tile is one of the {rows} there are$"
    ):
        Raster("chunk_major", first=rows, transposed=transposed).check(Grid(1, 3, 5))


def test_raster_is_frozen():
    with pytest.raises(AttributeError):
        Raster().order = "grouped"  # type: ignore[misc]


class TestTable:
    TILES = ((1, 1), (0, 0), (1, 0), (0, 1), (0, 2), (1, 2))
    IDS = (4, 0, 3, 1, 2, 5)

    @pytest.mark.parametrize(
        "order",
        [TILES, IDS, list(TILES), list(IDS), [list(tile) for tile in TILES], lambda t, num_m, num_n: TestTable.TILES[t],
         lambda t, num_m, num_n: TestTable.IDS[t]],
        ids=["pairs", "ids", "list of pairs", "list of ids", "list of lists", "function of pairs", "function of ids"],
    )  # fmt: skip
    def test_every_form_means_the_same(self, order):
        made = table_raster(order, 2, 3)
        assert made == Raster("table", table=self.IDS)
        assert tuple(made.tile(t, 2, 3) for t in range(6)) == self.TILES

    def test_a_function_is_asked_once_for_each_position(self):
        asked = []

        def order(t, num_m, num_n):
            asked.append((t, num_m, num_n))
            return raster.grouped(t, num_m, num_n, 2)

        made = table_raster(order, 3, 2)
        assert asked == [(t, 3, 2) for t in range(6)]
        assert [made.tile(t, 3, 2) for t in range(6)] == [raster.grouped(t, 3, 2, 2) for t in range(6)]

    @pytest.mark.parametrize(
        ("order", "message"),
        [
            ([0, 1, 2], "order: 3 entries; missing [3]; each of the 2 x 2 tiles (ids 0 to 3) comes exactly once"),
            ([0, 1, 2, 3, 3], "order: 5 entries; twice [3]; each of the 2 x 2 tiles (ids 0 to 3) comes exactly once"),
            ([0, 1, 1, 3], "order: 4 entries; missing [2]; twice [1]; each of the 2 x 2 tiles (ids 0 to 3) comes exactly once"),
            ([0, 1, 2, 4], "order: 4 entries; outside [4]; missing [3]; each of the 2 x 2 tiles (ids 0 to 3) comes exactly once"),
            ([-1, 1, 2, 3], "order: 4 entries; outside [-1]; missing [0]; each of the 2 x 2 tiles (ids 0 to 3) comes exactly once"),
            ([], "order: 0 entries; missing [0, 1, 2, 3]; each of the 2 x 2 tiles (ids 0 to 3) comes exactly once"),
            ([(0, 0), (0, 1), (1, 0), (2, 0)], "order: tile (2, 0); the grid has 2 x 2 tiles"),
            ([(0, 0), (0, 2), (1, 0), (1, 1)], "order: tile (0, 2); the grid has 2 x 2 tiles"),
            ([(0, 0), (-1, 1), (1, 0), (1, 1)], "order: tile (-1, 1); the grid has 2 x 2 tiles"),
            (lambda t, num_m, num_n: (0, 0), "order: 4 entries; missing [1, 2, 3]; twice [0]; each of the 2 x 2 tiles (ids 0 to 3) comes exactly once"),
            (lambda t, num_m, num_n: t + 1, "order: 4 entries; outside [4]; missing [0]; each of the 2 x 2 tiles (ids 0 to 3) comes exactly once"),
        ],
    )  # fmt: skip
    def test_what_is_no_permutation_is_refused(self, order, message):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            table_raster(order, 2, 2)

    @pytest.mark.parametrize("tile", ["0", 1.0, None, (0, 1, 2), (0,), {0: 1}])
    def test_what_is_no_tile_is_refused(self, tile):
        message = f"order: {tile!r}; a tile is an id pm * num_n + pn or a pair (pm, pn)"
        with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
            table_raster([tile, 1, 2, 3], 2, 2)

    def test_an_error_of_the_caller_s_function_is_his_own(self):
        with pytest.raises(ZeroDivisionError):
            table_raster(lambda t, num_m, num_n: t // (t - t), 2, 2)

    def test_a_long_table_is_refused_with_a_short_message(self):
        with pytest.raises(ValueError, match="missing") as caught:
            table_raster([0] * 10_000, 100, 100)
        assert len(str(caught.value)) < 200

    def test_table_made_for_another_grid_is_refused(self):
        with pytest.raises(ValueError, match="each of the 3 x 3 tiles"):
            table_raster(range(4), 2, 2).check(Grid(1, 3, 3))

    def test_empty_grid(self):
        assert table_raster([], 0, 5).table == ()

    @given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32))
    def test_any_permutation_is_taken_as_it_is(self, num_m, num_n, seed):
        order = random.Random(seed).sample(range(num_m * num_n), num_m * num_n)
        made = table_raster(order, num_m, num_n)
        assert [pm * num_n + pn for pm, pn in (made.tile(t, num_m, num_n) for t in range(len(order)))] == order


@given(st.lists(st.sampled_from([0.0, 1.0, 2.5, 7.0]) | st.floats(0, 1e9), max_size=30))
def test_by_cost_never_rises_and_keeps_ties_in_order(costs):
    order = by_cost(costs)
    assert sorted(order) == list(range(len(costs)))
    keys = [(-costs[i], i) for i in order]
    assert keys == sorted(keys)


def test_by_cost_is_a_table():
    made = table_raster(by_cost([1.0, 9.0, 4.0, 9.0]), 2, 2)
    assert [made.tile(t, 2, 2) for t in range(4)] == [(0, 1), (1, 1), (1, 0), (0, 0)]


class TestByArrival:
    @given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 5), st.booleans())
    def test_each_tile_once_in_the_order_of_arrival_and_grouped_inside(self, ready, others, group, transposed):
        num_m, num_n = (others, len(ready)) if transposed else (len(ready), others)
        made = by_arrival(ready, others, group, transposed)
        made.check(Grid(1, num_m, num_n))
        tiles = [made.tile(t, num_m, num_n)[:: -1 if transposed else 1] for t in range(num_m * num_n)]
        comes = [ready[row] for row, _ in tiles]
        assert comes == sorted(comes), "what arrives later is done later"
        for now in set(ready):
            rows = [row for row, when in enumerate(ready) if when == now]
            inside = [(rows.index(row), other) for row, other in tiles if ready[row] == now]
            assert inside == [raster.grouped(t, len(rows), others, group) for t in range(len(inside))]

    @given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.data())
    def test_is_chunk_major_where_chunks_are_whole_tiles(self, num_m, num_n, band, group, data):
        bands = -(-num_m // band)
        pivot = data.draw(st.integers(0, bands - 1))
        table = by_arrival([(row // band - pivot) % bands for row in range(num_m)], num_n, group)
        arithmetic = Raster("chunk_major", group, pivot * band, band)
        positions = range(num_m * num_n)
        assert [table.tile(t, num_m, num_n) for t in positions] == [arithmetic.tile(t, num_m, num_n) for t in positions]
