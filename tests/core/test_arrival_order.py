"""Arrival order: queues hold the tiles that read the same chunks; each item is taken once, of what was seen."""

from __future__ import annotations

import random
import re
from itertools import permutations, product

import pytest
from dialogue import dialogue
from hypothesis import given
from hypothesis import strategies as st

from machine import Machine, all_of, done, unfair
from strategies import seeds
from tilestream.core.gate import chunks_of
from tilestream.core.loop import work
from tilestream.core.schedule import MOST_QUEUES, first_of
from tilestream.schedule import Cursor, Grid, Ready, Schedule, Take
from tilestream_tools.verify.arrival_order import ordered
from tilestream_tools.verify.gpu_loop import work_through


@st.composite
def cases(draw):
    """Rows or columns of up to 3 batches in chunks of any sizes, none included, from any pivot."""
    weight, batch = draw(st.booleans()), draw(st.integers(1, 3))
    if draw(st.booleans()):
        rows, size = draw(st.integers(1, 20)) * (1 if weight else batch), draw(st.integers(2, 9))
        bounds = (*range(0, rows, size), rows)
    else:
        cuts = sorted(draw(st.lists(st.integers(0, 24), min_size=1, max_size=6)))
        rows = max(cuts[-1], 1)
        rows = rows if weight else -(-rows // batch) * batch
        bounds = (0, *(min(cut, rows) for cut in cuts), rows)
    tiles, others = -(-(rows if weight else rows // batch) // 2), draw(st.integers(1, 3))
    num_m, num_n = (others, tiles) if weight else (tiles, others)
    pivot = draw(st.integers(0, len(bounds) - 2))
    return ordered(
        draw(st.integers(1, 4)), num_m, num_n, bounds=bounds, pivot=pivot, weight=weight, batch=batch
    )  # fmt: skip


@given(cases())
def test_a_queue_holds_tiles_that_read_the_same_chunks(case):
    schedule, gate = case.schedule, case.gate
    chunks = chunks_of(schedule, gate)
    tiles = []
    for queue, size in enumerate(map(schedule.queue_size, range(schedule.queues))):
        for ticket in range(size):
            item, _ = schedule.ticket(queue, ticket)
            tiles.append(item.tile)
            assert tuple(need.chunk for need in gate.needs(item)) == chunks[queue]
    assert sorted(tiles) == list(range(schedule.grid.tiles)), "each tile is in one queue, once"
    assert [item.tile for item in schedule.items()] == tiles


@given(cases(), seeds)
def test_each_item_is_taken_once_of_a_queue_that_was_seen(case, seed):
    schedule, rng = case.schedule, random.Random(seed)
    wanted = {(w.operand, w.chunk) for item in schedule.items() for w in case.gate.needs(item)}
    arrivals = rng.sample(sorted(wanted), len(wanted))

    def reads(item):
        return [(w.operand, w.chunk) for w in case.gate.needs(item)]

    for program in (work, work_through):
        machine = Machine(schedule, range(schedule.workers), gate=case.gate, program=program, reads=reads)
        log = machine.run(unfair(seed), arrivals)
        assert done(log.items) == all_of(schedule)
        assert not log.read_early
        assert not machine.log.told


@given(cases(), seeds)
def test_after_an_expiry_each_item_is_handed_in_once(case, seed):
    schedule, rng = case.schedule, random.Random(seed)
    wanted = sorted({(w.operand, w.chunk) for item in schedule.items() for w in case.gate.needs(item)})
    some = rng.sample(wanted, rng.randrange(len(wanted)))
    machine = Machine(schedule, range(schedule.workers), gate=case.gate, program=work_through)
    machine.run(unfair(seed), some, expires=True)
    assert sorted(machine.tiles) == list(range(schedule.grid.tiles))
    assert not machine.log.computed_after_told


def test_one_worker_takes_what_comes_first_in_any_order_of_arrival():
    case = ordered(1, 3, bounds=(0, 2, 4, 6), pivot=1)
    for order in permutations(range(3)):
        machine, taken = Machine(case.schedule, [0], gate=case.gate, program=work), []
        for chunk in order:
            machine.arrived.add((0, chunk))
            while machine.runnable:
                machine.step(0)
            taken = [item.pm for _, item in machine.log.computed]
        assert taken == list(order)


class TestText:
    SCHEDULE = Schedule("dynamic", Grid(1, 3, 2), workers=2, queues=2, split="chunks", ends=(2, 6))

    @pytest.mark.parametrize(
        ("cursor", "answers", "asked", "tile", "behind"),
        [
            # From the queue of the item before, without a look.
            (Cursor(queue=1), (3,), [Take(1)], 5, Cursor(queue=1)),
            # An empty queue is not asked for again.
            (Cursor(), (1, 4, 0, 0), [Ready(0b11), Take(1), Ready(0b01), Take(0)], 0, Cursor(queue=0, empty=0b10)),
            # STOP comes when all queues were found empty.
            (Cursor(), (0, 2, 1, 4), [Ready(0b11), Take(0), Ready(0b10), Take(1)], None, Cursor(empty=0b11)),
            (Cursor(empty=0b11), (), [], None, Cursor(empty=0b11)),
            # Told that the launch is over: from the first queue that is not empty.
            (Cursor(empty=0b01), (-1, 1), [Ready(0b10), Take(1)], 3, Cursor(queue=1, empty=0b01)),
        ],
    )
    def test_a_take(self, cursor, answers, asked, tile, behind):
        found, (item, after) = dialogue(self.SCHEDULE, 0, *answers, cursor=cursor)
        assert (found, item and item.tile, after) == (asked, tile, behind)


def test_the_first_of_queues():
    assert [first_of(bits) for bits in (1, 2, 3, 12, 1 << 31)] == [0, 1, 0, 2, 31]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"queues": 2, "ends": (6,)}, "1 ends, queues=2, split='chunks'; split='chunks' has an end for each queue"),
        ({"queues": 2, "ends": (6,), "split": "items"}, "split='chunks' has an end for each queue"),
        ({"queues": 2, "ends": (3, 5)}, "ends=[3, 5] with 6 tiles; each queue has a tile at least"),
        ({"queues": 2, "ends": (6, 6)}, "ends=[6, 6] with 6 tiles; each queue has a tile at least"),
        ({"queues": 33, "ends": tuple(range(1, 34)), "grid": Grid(1, 33, 1)}, f"and {MOST_QUEUES} queues at most"),
        ({"kind": "stream_k", "ends": (6,)}, "split='chunks' with kind='stream_k'; only dynamic has queues"),
    ],
)
def test_bad_ends(how, message):
    arguments = {"kind": "dynamic", "grid": Grid(1, 3, 2), "workers": 2, "split": "chunks", **how}
    with pytest.raises(ValueError, match=re.escape(message)):
        Schedule(**arguments)


@pytest.mark.parametrize(("num_m", "pivot"), list(product((1, 2, 5), (0, 1))))
def test_every_position_is_in_the_raster_s_order(num_m, pivot):
    schedule = ordered(2, num_m, 2, bounds=(*range(0, 2 * num_m, 2), 2 * num_m), pivot=pivot % num_m).schedule
    rows = [item.pm for item in schedule.items()]
    assert rows == [(pivot + i // 2) % num_m for i in range(2 * num_m)]
