"""Stream-K: the remainder, its shares, their slots, and the order in which partial results are added."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from int31 import on_int31
from strategies import TOP, int31, schedules
from tilestream.core import stream_k
from tilestream.core.integers import part_begin, part_of, part_size
from tilestream.core.stream_k import remainder_tiles, share_part, slot
from tilestream.schedule import Grid, Schedule


def parts_of(schedule: Schedule) -> dict[int, list]:
    """The parts of each tile that is split, in the schedule's order."""
    parts = defaultdict(list)
    for item in schedule.items():
        if item.parts > 1:
            parts[item.tile].append(item)
    return parts


@given(int31(), int31(1))
def test_remainder_is_the_last_partly_filled_wave(tiles, workers):
    remainder = on_int31(remainder_tiles, tiles, workers)
    assert (tiles - remainder) % workers == 0
    assert remainder < workers


@given(st.data(), int31(1))
def test_share_part_on_int31_stays_in_its_tile_and_its_share(data, k_steps):
    units = data.draw(int31(1))
    unit = data.draw(int31(0, units - 1))
    unit_end = data.draw(int31(unit + 1, units))
    tile, begin, end = on_int31(share_part, unit, unit_end, k_steps)
    assert tile * k_steps + begin == unit
    assert begin < end <= k_steps
    assert tile * k_steps + end == min(unit_end, (tile + 1) * k_steps)


def test_share_part_on_int31_at_the_edge():
    assert on_int31(share_part, 2**30, 2**30 + 1, TOP) == (0, 2**30, 2**30 + 1)


@given(schedules("stream_k"))
def test_coverage_each_unit_of_the_remainder_once(schedule):
    done = [(item.tile, k) for item in schedule.items() for k in range(item.k_begin, item.k_end)]
    assert sorted(done) == [(t, k) for t in range(schedule.grid.tiles) for k in range(schedule.grid.k_steps)]


@given(schedules("stream_k"))
def test_shares_are_equal_to_within_one_unit(schedule):
    sizes = [part_size(schedule.units, schedule.num_shares, share) for share in range(schedule.num_shares)]
    assert sum(sizes) == schedule.units
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert 0 not in sizes, "a share without a unit would be a ticket without an item"


@given(schedules("stream_k"))
def test_contributors_are_exactly_the_shares_with_a_unit_of_the_tile(schedule):
    k_steps = schedule.grid.k_steps
    for tile in range(schedule.remainder):
        units = range(tile * k_steps, (tile + 1) * k_steps)
        shares = {
            share
            for share in range(schedule.num_shares)
            if set(units) & set(range(*(part_begin(schedule.units, schedule.num_shares, share + x) for x in (0, 1))))
        }
        assert shares == set(schedule.contributors(tile))


@given(schedules("stream_k"))
def test_parts_are_numbered_in_k_order_and_their_slots_are_their_own(schedule):
    slots = [item.slot for parts in parts_of(schedule).values() for item in parts]
    assert len(set(slots)) == len(slots), "two parts share a slot"
    assert all(0 <= s < schedule.slots for s in slots)
    for parts in parts_of(schedule).values():
        assert [item.part for item in parts] == list(range(parts[0].parts))
        assert {item.parts for item in parts} == {len(parts)}
        assert [item.k_begin for item in parts] == [0] + [item.k_end for item in parts[:-1]]
        assert parts[-1].k_end == schedule.grid.k_steps
        first = parts[0].slot - parts[0].part
        assert [item.slot for item in parts] == list(range(first, first + len(parts))), "neighbours, in K order"
    assert all(item.slot == -1 for item in schedule.items() if item.parts == 1)


@given(st.data(), int31(1, 2**15), int31(1, 2**15))
def test_slots_of_large_remainders_strictly_grow(data, remainder, k_steps):
    units = remainder * k_steps
    shares = data.draw(int31(1, units))
    unit = data.draw(int31(0, units - 1))
    share, tile = on_int31(part_of, units, shares, unit), unit // k_steps
    here = on_int31(slot, share, tile)
    assert 0 <= here < shares + remainder - 1
    if unit + 1 < units:
        following = part_of(units, shares, unit + 1), (unit + 1) // k_steps
        assert slot(*following) > here or following == (share, tile)


@pytest.mark.parametrize(
    "wrong", [lambda share, tile: tile, lambda share, tile: share, lambda share, tile: share - tile]
)
def test_a_wrong_slot_is_found(wrong, monkeypatch):
    monkeypatch.setattr(stream_k, "slot", wrong)
    schedule = Schedule("stream_k", Grid(1, 1, 7, 5), workers=8, shares=5)
    slots = [item.slot for parts in parts_of(schedule).values() for item in parts]
    assert len(set(slots)) < len(slots) or min(slots) < 0


def test_by_hand():
    # 7 tiles on 5 workers: 5 whole, then 2 tiles of 3 K steps in 5 shares of 2, 1, 1, 1, 1 units.
    schedule = Schedule("stream_k", Grid(1, 7, 1, 3), workers=5)
    assert (schedule.remainder, schedule.full_tiles, schedule.units, schedule.num_shares) == (2, 5, 6, 5)
    items = list(schedule.items())
    assert [item.tile for item in items[:5]] == [0, 1, 2, 3, 4]
    got = [(i.tile, i.k_begin, i.k_end, i.part, i.parts, i.slot) for i in items[5:]]
    assert got == [(5, 0, 2, 0, 2, 0), (5, 2, 3, 1, 2, 1), (6, 0, 1, 0, 3, 3), (6, 1, 2, 1, 3, 4), (6, 2, 3, 2, 3, 5)]
    assert schedule.slots == 6
    assert [list(schedule.contributors(tile)) for tile in (0, 1)] == [[0, 1], [2, 3, 4]]
    assert schedule.remainder_tile(1).tile == 6


def test_a_share_may_cross_into_the_next_tile():
    schedule = Schedule("stream_k", Grid(1, 5, 1, 4), workers=3)  # 2 tiles of 4 steps in shares of 3, 3, 2
    crossing = [(i.tile, i.k_begin, i.k_end, i.part, i.parts) for i in list(schedule.items())[3:]]
    assert crossing == [(3, 0, 3, 0, 2), (3, 3, 4, 1, 2), (4, 0, 2, 0, 2), (4, 2, 4, 1, 2)]


def test_a_share_may_hold_several_whole_tiles():
    schedule = Schedule("stream_k", Grid(1, 3, 1, 2), workers=4, shares=1)
    items = list(schedule.items())
    assert [(i.tile, i.k_begin, i.k_end, i.parts, i.slot) for i in items] == [(t, 0, 2, 1, -1) for t in range(3)]
    assert schedule.queue_size(0) == 1


def test_no_remainder_is_dynamic_and_only_stream_k_has_one():
    schedule = Schedule("stream_k", Grid(2, 3, 2, 4), workers=4)
    assert (schedule.remainder, schedule.units, schedule.num_shares, schedule.slots) == (0, 0, 0, 0)
    assert list(schedule.items()) == list(Schedule("dynamic", schedule.grid, workers=4).items())
    for kind in ("static", "dynamic"):
        schedule = Schedule(kind, Grid(1, 7, 1, 3), workers=5)
        assert (schedule.remainder, schedule.slots, schedule.full_tiles) == (0, 0, 7)


def test_more_shares_than_units_leaves_one_unit_each():
    schedule = Schedule("stream_k", Grid(1, 1, 1, 3), workers=8, shares=100)
    assert schedule.num_shares == 3
    assert [(i.k_begin, i.k_end, i.part) for i in schedule.items()] == [(0, 1, 0), (1, 2, 1), (2, 3, 2)]
