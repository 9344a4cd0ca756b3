"""Queues: where workers go, and counters that are never cleared."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from int31 import on_int31
from strategies import int31
from tilestream.core.queues import MOST_QUEUES, home_queue, left, neighbour, next_base, rank, ranked
from tilestream.schedule import Cursor, Grid, Peek, Schedule, Take, take


@given(int31(), int31(1))
def test_home_queue_is_one_of_the_queues(worker, queues):
    assert 0 <= on_int31(home_queue, worker, queues) < queues


def test_neighbouring_workers_have_neighbouring_queues():
    assert [home_queue(worker, 3) for worker in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("groups", range(1, 10))
@pytest.mark.parametrize("workers", range(1, 40))
def test_workers_of_one_group_become_neighbours(workers, groups):
    numbers = [on_int31(neighbour, worker, workers, groups) for worker in range(workers)]
    assert sorted(numbers) == list(range(workers)), "a bijection"
    for group in range(min(groups, workers)):
        of_group = [numbers[worker] for worker in range(workers) if worker % groups == group]
        assert of_group == list(range(of_group[0], of_group[0] + len(of_group)))


@given(int31(), int31())
def test_left_is_what_is_left_and_never_negative(size, taken):
    assert on_int31(left, size, taken) == max(size - taken, 0)


@given(int31(), int31(), *[st.integers(0, MOST_QUEUES - 1)] * 3)
def test_a_rank_says_which_queue_it_is_and_more_left_ranks_higher(left_1, left_2, queue_1, queue_2, home):
    ranks = [on_int31(rank, *one, home) for one in ((left_1, queue_1), (left_2, queue_2))]
    for one, queue, queue_left in zip(ranks, (queue_1, queue_2), (left_1, left_2), strict=True):
        assert on_int31(ranked, one, home) == (queue, min(queue_left, 1))
    if min(left_1, left_2) < 2**20 and left_1 != left_2:
        assert (ranks[0] > ranks[1]) == (left_1 > left_2)


def test_there_is_nothing_where_nobody_looked():
    assert all(ranked(0, home)[1] == 0 for home in range(MOST_QUEUES))


@pytest.mark.parametrize("held", [range(116, 132), range(16), range(0, 132, 8), range(128, 132)])
def test_workers_that_look_at_the_same_time_go_to_different_queues(held):
    """Another program holds SMs: the queues of the workers there are full, and the others empty."""
    workers = [worker for worker in range(132) if worker not in held]
    went = Counter(ranked(max(rank(9, queue, worker) for queue in held), worker)[0] for worker in workers)
    assert set(went) == set(held)
    assert max(went.values()) <= 3 * len(workers) / len(held)


class TestNoLeftovers:
    """Invariant 4: a launch counts from a base that no worker of the launch before can have passed."""

    @given(st.integers(0, 2**62), int31(), int31(1))
    def test_next_base_is_above_every_ticket(self, base, size, workers):
        # Bases only grow, and are counted in 64 bits; a ticket is the difference to one.
        assert next_base(base, size, workers) == base + size + workers


def steal(sizes_left: list[int], *, queues: int, worker: int = 0) -> list[object]:
    """The operations of one `take` of a worker whose own queue is empty, when others have so many left."""
    schedule = Schedule("dynamic", Grid(1, 1, 10 * queues), queues=queues, workers=queues)
    asked = []
    protocol = take(schedule, worker, Cursor(source=schedule.queues + 1))
    operation = next(protocol)
    try:
        while True:
            asked.append(operation)
            if isinstance(operation, Peek):
                operation = protocol.send(10 - sizes_left[operation.queue])
            else:
                operation = protocol.send(10 - sizes_left[operation.queue])
    except StopIteration as end:
        return [*asked, end.value[0]]


class TestStealing:
    def test_own_queue_first_and_without_looking_at_others(self):
        schedule = Schedule("dynamic", Grid(1, 4, 4), queues=4, workers=4)
        protocol = take(schedule, 2, Cursor())
        assert next(protocol) == Take(2)
        with pytest.raises(StopIteration) as end:
            protocol.send(0)
        item, cursor = end.value.value
        assert item == schedule.ticket(2, 0)[0]
        assert cursor.source == 0

    def test_a_void_ticket_closes_the_own_queue_for_good(self):
        schedule = Schedule("dynamic", Grid(1, 4, 4), queues=4, workers=4)
        protocol = take(schedule, 2, Cursor())
        next(protocol)
        assert protocol.send(schedule.queue_size(2)) == Peek(0)
        asked = [protocol.send(0), protocol.send(1)]
        assert asked == [Peek(1), Peek(3)], "its own queue is not asked again"
        assert protocol.send(4) == Take(0), "the fullest"
        with pytest.raises(StopIteration) as end:
            protocol.send(0)
        assert end.value.value[1].source == 1

    def test_from_the_fullest(self):
        *asked, item = steal([0, 3, 7, 5], queues=4)
        assert asked == [Peek(1), Peek(2), Peek(3), Take(2)]
        assert item is not None
        assert item.pn == 20 + 3

    def test_nothing_left_is_stop_and_touches_no_counter(self):
        assert steal([0, 0, 0, 0], queues=4) == [Peek(1), Peek(2), Peek(3), None]

    def test_one_queue_never_peeks(self):
        schedule = Schedule("dynamic", Grid(1, 2, 2), queues=1, workers=3)
        protocol = take(schedule, 1, Cursor())
        assert next(protocol) == Take(0)
        with pytest.raises(StopIteration) as end:
            protocol.send(4)
        assert end.value.value[0] is None

    def test_a_lost_race_looks_again(self):
        schedule = Schedule("dynamic", Grid(1, 1, 30), queues=3, workers=3)
        protocol = take(schedule, 0, Cursor(source=schedule.queues + 1))
        assert [next(protocol), protocol.send(9), protocol.send(8)] == [Peek(1), Peek(2), Take(2)]
        assert protocol.send(10) == Peek(1), "void: another worker was faster"
        assert [protocol.send(9), protocol.send(11)] == [Peek(2), Take(1)]

    @given(st.integers(2, 6), st.data())
    def test_the_victim_is_always_a_fullest_one(self, queues, data):
        counts = [0, *data.draw(st.lists(st.integers(0, 10), min_size=queues - 1, max_size=queues - 1))]
        *asked, item = steal(counts, queues=queues)
        if max(counts) == 0:
            assert item is None
        else:
            assert counts[asked[-1].queue] == max(counts)
