"""`Schedule`: queues and what they divide, batches, and what is refused."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product

import pytest
from dialogue import dialogue
from hypothesis import given

from machine import Machine
from strategies import schedules
from tilestream.core import structs
from tilestream.schedule import Cursor, Grid, Raster, Schedule, WorkItem, table_raster


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "greedy"}, "Schedule: kind='greedy'; it must be one of static, dynamic, stream_k"),
        (
            {"split": "diagonals"},
            "Schedule: split='diagonals'; it must be one of items, columns, rows, strides, chunks",
        ),
        ({"workers": 0}, "Schedule: workers=0; it must be at least 1"),
        ({"workers": -4}, "Schedule: workers=-4; it must be at least 1"),
        ({"queues": 0}, "Schedule: queues=0; it must be at least 1"),
        ({"shares": -1, "kind": "stream_k"}, "Schedule: shares=-1; it must be at least 0"),
        ({"kind": "static", "queues": 2}, "Schedule: queues=2 with kind='static'; only dynamic has more than one"),
        ({"kind": "stream_k", "queues": 3}, "Schedule: queues=3 with kind='stream_k'; only dynamic has more than one"),
        *(({"kind": kind, "split": split},
           f"Schedule: split='{split}' with kind='{kind}'; only dynamic has queues to split")
          for kind, split in product(("static", "stream_k"), ("columns", "rows"))),
        *(({"kind": kind, "shares": 2}, f"Schedule: shares=2 with kind='{kind}'; only stream_k cuts a remainder")
          for kind in ("static", "dynamic")),
        ({"split": "columns", "raster": table_raster(range(12), 3, 4)},
         "Schedule: split='columns' with a table; a table's positions are split as 'items'"),
        ({"split": "rows", "raster": Raster("chunk_major")},
         "Schedule: split='rows' where rows arrive; queues split the dimension that does not arrive"),
        ({"split": "columns", "raster": Raster("chunk_major", transposed=True)},
         "Schedule: split='columns' where columns arrive; queues split the one that does not arrive"),
        ({"raster": Raster("chunk_major", first=3)},
         "Raster: first=3; the pivot's row tile is one of the 3 there are"),
        ({"raster": Raster("table", table=(0, 1))},
         "order: 2 entries; missing [2, 3, 4, 5]; each of the 3 x 4 tiles (ids 0 to 11) comes exactly once"),
        ({"kind": "stream_k", "grid": Grid(1, 1, 2, 2**30), "workers": 3},
         "Schedule: a remainder of 2 tiles of 1073741824 K steps; units are counted in 31 bits: take larger K steps"),
        ({"kind": "stream_k", "grid": Grid(1, 1, 3, 2**30), "workers": 4},
         "Schedule: a remainder of 3 tiles of 1073741824 K steps; units are counted in 31 bits: take larger K steps"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_schedule_is_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Schedule(**{"kind": "dynamic", "grid": Grid(1, 3, 4), **arguments})


def test_schedule_is_frozen():
    with pytest.raises(AttributeError):
        Schedule("dynamic", Grid(1, 1, 1)).workers = 2  # type: ignore[misc]


@given(schedules("static", "dynamic"))
def test_items_are_each_tile_whole_and_once(schedule):
    grid = schedule.grid
    items = list(schedule.items())
    tiles = [(b, m, n) for b in range(grid.batch) for m in range(grid.num_m) for n in range(grid.num_n)]
    assert sorted((i.batch, i.pm, i.pn) for i in items) == tiles
    assert [tiles[i.tile] for i in items] == [(i.batch, i.pm, i.pn) for i in items], "the id names the tile"
    assert {(i.k_begin, i.k_end, i.parts, i.slot) for i in items} <= {(0, grid.k_steps, 1, -1)}


@given(schedules("dynamic"))
def test_queue_sizes_add_up_and_differ_by_one_stripe_at_most(schedule):
    grid = schedule.grid
    sizes = [schedule.queue_size(queue) for queue in range(schedule.queues)]
    assert sum(sizes) == grid.tiles
    stripe = {"items": 1, "columns": grid.batch * grid.num_m, "rows": grid.batch * grid.num_n}[schedule.split]
    assert max(sizes) - min(sizes) <= stripe


@given(schedules("dynamic"))
def test_a_queue_of_columns_or_rows_has_a_stripe_of_them(schedule):
    for queue in range(schedule.queues):
        items = [schedule.ticket(queue, ticket)[0] for ticket in range(schedule.queue_size(queue))]
        if schedule.split != "items" and items:
            along = [(i.pn if schedule.split == "columns" else i.pm) for i in items]
            across = schedule.grid.num_m if schedule.split == "columns" else schedule.grid.num_n
            assert set(along) == set(range(min(along), max(along) + 1))
            assert set(Counter(along).values()) == {across * schedule.grid.batch}


@pytest.mark.parametrize(
    ("grid", "how", "tiles"),
    [
        (Grid(1, 2, 5), {"queues": 3}, ["00 01 02 03", "04 10 11", "12 13 14"]),
        (Grid(1, 2, 5), {"queues": 3, "split": "columns"}, ["00 01 10 11", "02 03 12 13", "04 14"]),
        (Grid(1, 3, 2), {"queues": 2, "split": "rows"}, ["00 01 10 11", "20 21"]),
        (Grid(1, 2, 2), {"queues": 4, "split": "columns"}, ["00 10", "01 11", "", ""]),
        (Grid(1, 1, 2), {"queues": 5}, ["00", "01", "", "", ""]),
        (Grid(1, 2, 5), {"queues": 3, "split": "strides"}, ["00 03 11 14", "01 04 12", "02 10 13"]),
        # Each queue begins at the pivot: a late chunk leaves no queue idle.
        (Grid(1, 4, 4), {"raster": Raster("chunk_major", first=2), "queues": 2, "split": "columns"},
         ["20 21 30 31 00 01 10 11", "22 23 32 33 02 03 12 13"]),
        (Grid(1, 4, 3), {"raster": Raster("chunk_major", first=2, transposed=True), "queues": 2, "split": "rows"},
         ["02 12 00 10 01 11", "22 32 20 30 21 31"]),
    ],
)  # fmt: skip
def test_queues_by_hand(grid, how, tiles):
    """Each queue's tiles, as row and column."""
    schedule = Schedule("dynamic", grid, **how)
    for queue, expected in enumerate(tiles):
        items = [schedule.ticket(queue, ticket)[0] for ticket in range(schedule.queue_size(queue))]
        assert " ".join(f"{item.pm}{item.pn}" for item in items) == expected


def test_batches_one_after_another_each_in_the_raster_s_order():
    schedule = Schedule("dynamic", Grid(3, 2, 2), Raster("grouped", group=2))
    items = list(schedule.items())
    assert [i.batch for i in items] == [0] * 4 + [1] * 4 + [2] * 4
    assert [(i.pm, i.pn) for i in items] == [(0, 0), (1, 0), (0, 1), (1, 1)] * 3
    assert [i.tile for i in items] == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]


def test_a_caller_s_order_is_that_of_each_batch():
    schedule = Schedule("dynamic", Grid(2, 1, 3), table_raster([2, 0, 1], 1, 3))
    assert [(i.batch, i.pn) for i in schedule.items()] == [(0, 2), (0, 0), (0, 1), (1, 2), (1, 0), (1, 1)]


@pytest.mark.parametrize("kind", ["static", "dynamic", "stream_k"])
@pytest.mark.parametrize("shape", [(0, 2, 2), (1, 0, 2), (1, 2, 0)])
def test_a_grid_without_tiles_is_over_at_once(kind, shape):
    schedule = Schedule(kind, Grid(*shape), workers=2)
    assert list(schedule.items()) == []
    assert Machine(schedule, [0, 1]).run(max).items == []


def test_static_is_strided():
    cursor, taken = Cursor(), []
    for _ in range(4):
        asked, (item, cursor) = dialogue(Schedule("static", Grid(1, 1, 7), workers=3), 1, cursor=cursor)
        assert asked == []
        taken.append(item and item.pn)
    assert taken == [1, 4, None, None]


def test_the_raster_never_changes_what_a_tile_is():
    grid = Grid(2, 3, 4, 5)
    items = {}
    for order, transposed in product(["row_major", "grouped", "chunk_major", "longest_first"], [False, True]):
        for item in Schedule("dynamic", grid, Raster(order, 2, transposed=transposed)).items():
            assert items.setdefault(item.tile, item) == item
    assert items[23] == WorkItem(23, 1, 2, 3, 0, 5)


def test_the_device_has_the_same_cursor_and_items():
    """By name: a probe's extra fields, and an item's tile id, which the device computes, are the only others."""
    device = (*structs.Cursor._fields, *structs.Ready._fields)
    assert tuple(name for name in device if name not in ("noted", "asked")) == Cursor._fields
    assert tuple(name for name in structs.Item._fields if name != "place") == WorkItem._fields[1:]
