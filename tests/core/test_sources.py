"""The schedule of rows by source: every tile once, by any workers, whatever comes when, twice, or never."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tilestream.core import sources
from tilestream.core.sources import COUNTED, LOST, Place, SourcePlaces, take

COUNTS = ((3, 0, 5), (0, 0, 0), (1, 1, 1), (0, 17, 0))
PLACES = SourcePlaces(4, 3, 20, 2, 3, pivot=2)


class World:
    """Words that workers share, and what has come of each source."""

    def __init__(self, places=PLACES, counts=COUNTS, seed=0):
        self.places, self.counts, self.random = places, counts, random.Random(seed)
        self.tickets, self.settled, self.there = Counter(), {}, set()
        self.over, self.naps = False, 0
        self.coming = [(s, g) for s in range(places.sources) for g in range(-1, places.groups)]
        self.random.shuffle(self.coming)
        self.lost: set = set()

    def perform(self, op):
        match op:
            case sources.Look(source):
                return int((source, -1) in self.there)
            case sources.Settle(source, state):
                return self.settled.setdefault(source, state)
            case sources.Count(source):
                assert (source, -1) in self.there, "counts are read before they are there"
                return self.counts[source]
            case sources.Taken(queue):
                return self.tickets[queue]
            case sources.Arrived(source, group):
                return int((source, group) in self.there)
            case sources.Draw(queue):
                self.tickets[queue] += 1
                return self.tickets[queue] - 1
        assert isinstance(op, sources.Nap)
        self.naps += 1
        coming = [one for one in self.coming if one not in self.lost]
        if coming and not self.over:
            self.there.add(coming[0])
            self.coming.remove(coming[0])
        elif self.lost:
            self.over = True
        return int(self.over)


def play(world, workers, running=None):
    """Run workers, an operation of one at a time; the tiles that each took, and whether the launch was over."""
    names = list(running or range(workers))
    places, turns, answers = dict.fromkeys(names, Place()), {}, dict.fromkeys(names)
    done, left = [], set(names)
    for w in names:
        turns[w] = take(world.places, w, places[w])
    while left:
        w = world.random.choice(sorted(left))
        try:
            answers[w] = world.perform(turns[w].send(answers[w]))
        except StopIteration as end:
            tile, places[w] = end.value
            if tile is None:
                left.remove(w)
                continue
            done.append((tile, places[w].over))
            turns[w], answers[w] = take(world.places, w, places[w]), None
    return done


def check(world, done):
    tiles = Counter((tile.source, tile.group, tile.ticket) for tile, _ in done)
    wanted = Counter()
    for source in range(world.places.sources):
        counts = world.counts[source] if world.settled[source] == COUNTED else None
        for group, size in enumerate(world.places.tiles(counts)):
            wanted.update((source, group, ticket) for ticket in range(size))
    assert tiles == wanted
    for tile, over in done:
        if not over and world.settled[tile.source] == COUNTED:
            assert {(tile.source, -1), (tile.source, tile.group)} <= world.there


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_each_tile_once_in_any_order_of_arrival(workers):
    for seed in range(40):
        world = World(seed=seed)
        done = play(world, workers)
        check(world, done)
        assert not any(over for _, over in done)
        assert set(world.settled.values()) == {COUNTED}


@pytest.mark.parametrize("running", [(0,), (2,), (4,), (1, 3)])
def test_any_workers_do_all(running):
    world = World(seed=sum(running))
    check(world, play(world, 5, running))


@pytest.mark.parametrize("lost", [{(1, -1)}, {(3, -1)}, {(0, 2)}, {(2, -1), (3, 1)}, {(1, 0)}], ids=str)
def test_what_is_lost_ends_the_launch_and_is_taken_once(lost):
    for seed in range(40):
        world = World(seed=seed)
        world.lost = lost
        done = play(world, 3)
        check(world, done)
        counted = {s for s in range(4) if world.settled[s] == COUNTED}
        assert counted == {s for s in range(4) if (s, -1) not in lost}
        assert any(over for _, over in done) or all(not COUNTS[s][g] for s, g in lost)


def test_a_source_that_comes_while_it_is_given_up_is_counted_by_all_or_by_none():
    found = set()
    for seed in range(300):
        world = World(seed=seed)
        world.lost = {(3, -1)}
        perform = world.perform

        def late(op, perform=perform, world=world):
            if world.over and world.random.random() < 0.2:
                world.there.add((3, -1))
            return perform(op)

        world.perform = late
        check(world, play(world, 3))
        found.add(world.settled[3])
    assert found == {COUNTED, LOST}


def test_no_worker_waits_beside_a_tile_that_is_there():
    for seed in range(60):
        world = World(seed=seed)
        perform = world.perform

        def strict(op, perform=perform, world=world):
            if isinstance(op, sources.Nap):
                for source, counts in enumerate(world.counts):
                    for group, size in enumerate(world.places.tiles(counts)):
                        if {(source, -1), (source, group)} <= world.there:
                            assert world.tickets[world.places.queue(source, group)] >= size
            return perform(op)

        world.perform = strict
        check(world, play(world, 1))  # with more, another may signal between a worker's look and its nap


def test_all_is_there():
    world = World(PLACES._replace(arrives=False))
    world.there = set(world.coming)
    check(world, play(world, 3))
    assert not world.naps


def test_workers_that_look_together_begin_with_the_pivot_and_with_different_tiles():
    world = World()
    world.there = set(world.coming)
    turns = [take(world.places, w, Place()) for w in range(9)]
    draws = []
    for turn in turns:
        answer = None
        while not isinstance(op := turn.send(answer), sources.Draw):
            answer = world.perform(op)
        draws.append(op.queue)
    assert draws == [6, 6, 6, 7, 7, 7, 8, 8, 8], "as many workers as each group of source 2 has tiles"


@pytest.mark.parametrize("counts", [(-1, 2, 3), (21, 0, 0), (10, 10, 1), (2**31 - 1, 2**31 - 1, 0)], ids=str)
def test_counts_that_are_none_make_the_place_one_group(counts):
    assert not PLACES.is_valid(counts)
    assert PLACES.tiles(counts) == PLACES.tiles(None) == (30, 0, 0)


def test_words_lie_side_by_side():
    groups, words = 3, []
    for source in range(4):
        words.append(sources.counts_word(source, groups))
        words += [sources.rows_word(source, group, groups) for group in range(groups)]
    assert words == list(range(16))
