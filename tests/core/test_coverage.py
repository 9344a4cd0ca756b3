"""Invariant 1, *Coverage*, and 4, *No memset, no leftovers*: the workers' own loop, on shared words, in any order."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machine import Machine, Words, all_of, done, every_interleaving, unfair
from strategies import schedules, seeds
from tilestream.core import queues
from tilestream.core import schedule as schedule_module
from tilestream.schedule import Grid, Raster, Schedule


def crew_of(schedule: Schedule, seed: int) -> list[int]:
    """A non-empty subset of the workers; often one alone."""
    rng = random.Random(seed)
    return rng.sample(range(schedule.workers), rng.choice([1, rng.randint(1, schedule.workers), schedule.workers]))


class TestCoverage:
    @given(schedules("dynamic", "stream_k"), seeds)
    def test_any_workers_at_any_speed_do_each_item_exactly_once(self, schedule, seed):
        log = Machine(schedule, crew_of(schedule, seed)).run(unfair(seed))
        assert done(log.items) == all_of(schedule)

    @given(schedules("dynamic", "stream_k"), seeds)
    def test_workers_that_never_run_again_take_nothing_along_but_the_ticket_they_hold(self, schedule, seed):
        machine, choose, rng = Machine(schedule, range(schedule.workers)), unfair(seed), random.Random(seed)
        for _ in range(rng.randint(0, 40)):
            if machine.alive:
                machine.step(choose(machine.alive))
        survivor = rng.randrange(schedule.workers)
        while survivor in machine.alive:
            machine.step(survivor)
        share = -(-schedule.units // schedule.num_shares) if schedule.num_shares else 0
        undone = len(all_of(schedule) - done(machine.log.items))
        assert undone <= len(machine.alive) * max(schedule.grid.k_steps, share)
        assert done(machine.run(choose).items) == all_of(schedule)

    @given(schedules("static"), seeds)
    def test_static_does_each_item_once_when_all_workers_have_run(self, schedule, seed):
        log = Machine(schedule, range(schedule.workers)).run(unfair(seed))
        assert done(log.items) == all_of(schedule)

    @given(schedules("static"), seeds)
    def test_static_touches_no_shared_word_and_waits_for_no_worker(self, schedule, seed):
        crew = crew_of(schedule, seed)
        machine = Machine(schedule, crew)
        machine.words = None  # a Take, Peek or Count would raise
        log = machine.run(unfair(seed))
        positions = [schedule.ticket(0, position)[0] for position in range(schedule.grid.tiles)]
        for worker in crew:
            assert [i for w, i in log.computed if w == worker] == positions[worker :: schedule.workers]

    @given(schedules("stream_k"), seeds)
    def test_each_split_tile_is_reduced_once_when_all_its_parts_are_there(self, schedule, seed):
        machine, choose = Machine(schedule, crew_of(schedule, seed)), unfair(seed)
        while machine.alive:
            reduced = len(machine.log.reduced)
            machine.step(choose(machine.alive))
            for item in machine.log.reduced[reduced:]:
                steps = done(i for i in machine.log.items if i.tile == item.tile)
                assert len(steps) == schedule.grid.k_steps
        split = {item.tile for item in schedule.items() if item.parts > 1}
        assert sorted(item.tile for item in machine.log.reduced) == sorted(split)
        assert not +machine.words.counts, "the last contributor restores the count"

    @pytest.mark.parametrize(
        "schedule",
        [
            Schedule("dynamic", Grid(1, 1, 3), workers=2),
            Schedule("dynamic", Grid(1, 1, 3), workers=2, queues=2),
            Schedule("dynamic", Grid(1, 1, 2), workers=2, queues=3),
            Schedule("dynamic", Grid(1, 2, 2), workers=1, queues=3, split="columns"),
            Schedule("stream_k", Grid(1, 1, 1, 2), workers=2),
        ],
        ids=["one queue", "two queues", "a queue without a worker of its own", "columns", "stream_k"],
    )
    def test_every_interleaving_of_small_launches(self, schedule):
        runs = 0
        for log in every_interleaving(lambda choose: Machine(schedule, range(schedule.workers)).run(choose)):
            runs += 1
            assert done(log.items) == all_of(schedule)
        assert runs > 1000 or schedule.workers == 1

    @pytest.mark.slow
    @given(schedules("dynamic", "stream_k"), seeds)
    def test_many_launches_one_after_another(self, schedule, seed):
        words = Words.fresh(schedule)
        for launch in range(40):
            machine = Machine(schedule, crew_of(schedule, seed + launch), words=words)
            assert done(machine.run(unfair(seed + launch)).items) == all_of(schedule)
            words = words.next_launch(schedule)

    def test_large_launch(self):
        schedule = Schedule("dynamic", Grid(2, 37, 23), Raster("grouped", group=4), 132, 8, "columns")
        assert done(Machine(schedule, range(132)).run(unfair(7)).items) == all_of(schedule)


class TestNoLeftovers:
    @given(schedules("dynamic", "stream_k"), st.lists(st.integers(0, 2**40), min_size=11, max_size=11), seeds)
    def test_whatever_lies_below_the_base_does_not_count(self, schedule, below, seed):
        bases = [value + random.Random(seed).randint(0, 1000) for value in below[: schedule.queues]]
        words = Words(below[: schedule.queues], bases)
        log = Machine(schedule, crew_of(schedule, seed), words=words).run(unfair(seed))
        assert done(log.items) == all_of(schedule)

    @given(schedules("dynamic", "stream_k"), seeds)
    def test_a_drained_launch_cannot_spoil_the_next(self, schedule, seed):
        words, rng = Words.fresh(schedule), random.Random(seed)
        for launch in range(3):
            machine, choose = Machine(schedule, crew_of(schedule, seed + launch), words=words), unfair(seed + launch)
            for _ in range(rng.randint(0, 60)):
                if machine.alive:
                    machine.step(choose(machine.alive))
            machine.aborted = True
            machine.run(choose)
            words = words.next_launch(schedule)
            assert all(raw <= base for raw, base in zip(words.raw, words.bases, strict=True))
            words.counts.clear()  # the host forgets the counts of a launch that was drained
        log = Machine(schedule, crew_of(schedule, seed), words=words).run(unfair(seed))
        assert done(log.items) == all_of(schedule)

    @given(schedules("dynamic", "stream_k"), seeds)
    def test_next_base_bounds_the_tickets_drawn(self, schedule, seed):
        machine = Machine(schedule, range(schedule.workers))
        machine.run(unfair(seed))
        bases = machine.words.next_launch(schedule).bases
        assert all(raw <= base for raw, base in zip(machine.words.raw, bases, strict=True))

    def test_the_bound_is_reached(self):
        schedule = Schedule("dynamic", Grid(1, 1, 5), workers=3)
        machine = Machine(schedule, range(3))
        machine.run(unfair(0))
        assert machine.words.raw == machine.words.next_launch(schedule).bases == [8]

    @given(schedules("dynamic", "stream_k"), seeds)
    def test_an_aborted_launch_lets_everybody_go(self, schedule, seed):
        machine = Machine(schedule, range(schedule.workers))
        machine.aborted = True
        assert machine.run(unfair(seed)).items == []
        assert machine.words.raw == [0] * schedule.queues


class TestAWrongRuleIsFound:
    """The properties above can fail: each mutation does something plausible, and loses or doubles an item."""

    SCHEDULE = Schedule("dynamic", Grid(1, 3, 4), workers=3, queues=4)

    def covers(self, crew=(0, 1)) -> bool:
        try:
            logs = [Machine(self.SCHEDULE, crew).run(unfair(seed)) for seed in range(20)]
        except ArithmeticError:
            return False  # a ticket past the end of everything
        return all(done(log.items) == all_of(self.SCHEDULE) for log in logs)

    @pytest.mark.parametrize(
        ("module", "name", "wrong", "covers"),
        [
            (queues, "left", queues.left, True),
            # A worker that does not steal.
            (queues, "rank", lambda queue_left, queue, home: 0, False),
            # A queue that looks empty and is not.
            (queues, "left", lambda size, taken: max(size - taken - 3, 0), False),
            # A void ticket taken for a valid one: 12 positions in 4 queues are 3 each.
            (Schedule, "queue_size", lambda self, queue: 4, False),
        ],
    )
    def test_rules(self, monkeypatch, module, name, wrong, covers):
        monkeypatch.setattr(module, name, wrong)
        assert self.covers() == covers

    def test_parts_that_overlap(self, monkeypatch):
        monkeypatch.setattr(schedule_module, "part_begin", lambda total, parts, part: (total // parts) * part)
        monkeypatch.setattr(TestAWrongRuleIsFound, "SCHEDULE", Schedule("dynamic", Grid(1, 1, 7), workers=3, queues=4))
        assert not self.covers()

    def test_a_base_that_forgets_void_tickets(self):
        words = Words.fresh(self.SCHEDULE)
        Machine(self.SCHEDULE, range(3), words=words).run(unfair(1))
        forgetful = Words(words.raw, [base + self.SCHEDULE.queue_size(q) for q, base in enumerate(words.bases)])
        log = Machine(self.SCHEDULE, range(3), words=forgetful).run(unfair(1))
        assert done(log.items) != all_of(self.SCHEDULE)
