"""Queues: where workers go, and counters that are never cleared."""

from __future__ import annotations

from collections import Counter

import pytest
from dialogue import dialogue
from hypothesis import example, given
from hypothesis import strategies as st

from int31 import on_int31
from strategies import int31
from tilestream.core.queues import MOST_QUEUES, home_queue, left, neighbour, next_base, rank, ranked
from tilestream.schedule import Cursor, Grid, Peek, Schedule, Take


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


@given(st.integers(0, 2**62), int31(), int31(1))
def test_next_base_is_above_every_ticket(base, size, workers):
    """Invariant 4. Bases only grow, and are counted in 64 bits; a ticket is the difference to one."""
    assert next_base(base, size, workers) == base + size + workers


class TestStealing:
    FOUR = Schedule("dynamic", Grid(1, 4, 4), queues=4, workers=4)
    THREE = Schedule("dynamic", Grid(1, 1, 30), queues=3, workers=3)

    def test_own_queue_first_and_without_looking_at_others(self):
        asked, (item, cursor) = dialogue(self.FOUR, 2, 0)
        assert asked == [Take(2)]
        assert (item, cursor.source) == (self.FOUR.ticket(2, 0)[0], 0)

    def test_a_void_ticket_closes_the_own_queue_for_good_and_leads_to_the_fullest(self):
        asked, (_, cursor) = dialogue(self.FOUR, 2, self.FOUR.queue_size(2), 0, 1, 4, 0)
        assert asked == [Take(2), Peek(0), Peek(1), Peek(3), Take(0)], "its own queue is not asked again"
        assert cursor.source == 1

    def test_one_queue_never_peeks(self):
        one = Schedule("dynamic", Grid(1, 2, 2), queues=1, workers=3)
        asked, (item, _) = dialogue(one, 1, 4)
        assert (asked, item) == ([Take(0)], None)

    def test_a_lost_race_looks_again(self):
        asked, _ = dialogue(self.THREE, 0, 9, 8, 10, 9, 11, cursor=Cursor(source=4))
        # The first ticket is void: another worker was faster.
        assert asked == [Peek(1), Peek(2), Take(2), Peek(1), Peek(2), Take(1)]

    @given(st.integers(2, 6), st.data())
    @example(4, [3, 7, 5])
    @example(4, [0, 0, 0])
    def test_the_victim_is_always_a_fullest_one(self, queues, data):
        counts = data if isinstance(data, list) else [data.draw(st.integers(0, 10)) for _ in range(queues - 1)]
        schedule = Schedule("dynamic", Grid(1, 1, 10 * queues), queues=queues, workers=queues)
        taken = [10 - count for count in counts]
        looks = [Peek(queue) for queue in range(1, queues)]
        asked, end = dialogue(schedule, 0, *taken, cursor=Cursor(source=queues + 1))
        assert asked[: queues - 1] == looks
        if max(counts) == 0:
            assert (len(asked), end[0]) == (queues - 1, None), "STOP, and no counter is touched"
            return
        victim = asked[-1].queue
        assert counts[victim - 1] == max(counts)
        ticket = 10 - max(counts)
        _, (item, cursor) = dialogue(schedule, 0, *taken, ticket, cursor=Cursor(source=queues + 1))
        assert (item, cursor.source) == (schedule.ticket(victim, ticket)[0], victim + 1)
