"""`work_through`: a launch that is worked through to its last item, computed or NaN; with any answers, in any order."""

from __future__ import annotations

import math
import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turns import operations

from machine import Machine, all_of, done, every_interleaving, unfair
from strategies import chunkings, rasters, seeds
from tilestream.arrival import Chunks, Gate, See, Seen, Wait
from tilestream.core.loop import Compute, Count, Poll, Reduce, WorkerState, store_and_count, work
from tilestream.schedule import Cursor, Grid, Peek, Schedule, Take, WorkItem
from tilestream_tools.verify.gpu_loop import (
    Add,
    Leave,
    Look,
    Poison,
    Quarantine,
    ReducePartials,
    Reset,
    Restore,
    Write,
    fixup,
    work_through,
)

resetting = partial(work_through, reset=True)


@st.composite
def launches(draw, gated: bool = True) -> tuple[Schedule, Gate | None]:
    """Any schedule of a small problem whose A's rows arrive, and B's columns or not."""
    m, n, k = draw(st.integers(1, 9)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    grid = Grid.of(m, n, k, 2, 3, 1)
    kind = draw(st.sampled_from(["static", "dynamic", "stream_k"]))
    queues = draw(st.integers(1, 3)) if kind == "dynamic" else 1
    schedule = Schedule(kind, grid, draw(rasters(grid)), draw(st.integers(1, 4)), queues)
    if not gated:
        return schedule, None
    columns = draw(chunkings(n, 3)) if draw(st.booleans()) else None
    return schedule, Gate(m, n, 2, 3, draw(chunkings(m, 5)), columns)


def reads(gate: Gate, item: WorkItem) -> set[tuple[int, int]]:
    """(operand, chunk) of each row and each column of the item's tile, one by one."""
    found = set()
    for operand, chunks, begin, end in (
        (0, gate.rows, item.pm * 2, min(gate.m, item.pm * 2 + 2)),
        (1, gate.columns, item.pn * 3, min(gate.n, item.pn * 3 + 3)),
    ):
        if chunks is not None:
            found |= {
                (operand, c) for c in range(chunks.count) for row in range(*chunks.range_of(c)) if begin <= row < end
            }
    return found


def chunks_of(gate: Gate) -> list[tuple[int, int]]:
    return [
        (o, c) for o, chunks in enumerate((gate.rows, gate.columns)) if chunks is not None for c in range(chunks.count)
    ]


def machine_of(schedule: Schedule, gate: Gate | None, crew=None, **how) -> Machine:
    how.setdefault("program", resetting if crew is None else work_through)
    if gate is not None:
        how["reads"] = partial(reads, gate)
    return Machine(schedule, range(schedule.workers) if crew is None else crew, gate=gate, **how)


def holds(machine: Machine) -> None:
    """What holds of every launch that is worked through, whatever happened."""
    log, schedule = machine.log, machine.schedule
    assert done(log.handed_in) == all_of(schedule)
    assert log.read_early == []
    assert log.computed_after_told == []
    poisoned = {item.tile for _, item in log.poisoned}
    assert {tile for tile, result in machine.tiles.items() if math.isnan(result)} == poisoned
    assert machine.tiles == {
        tile: pytest.approx(math.nan if tile in poisoned else schedule.grid.k_steps, nan_ok=True)
        for tile in range(schedule.grid.tiles)
    }
    assert machine.slots == {}
    assert not any(machine.words.counts.values())
    told = {worker for worker, _ in log.told}
    assert {worker for worker, _ in log.poisoned} <= told


class TestWorkedThrough:
    @given(launches(), seeds)
    def test_each_item_is_handed_in_once_whenever_the_deadline_expires(self, launch, seed):
        machine = machine_of(*launch)
        order = random.Random(seed).sample(chunks_of(launch[1]), len(chunks_of(launch[1])))
        machine.run(unfair(seed), order, expires=True)
        holds(machine)

    @given(launches(), seeds)
    def test_without_an_expiry_it_is_work(self, launch, seed):
        log = machine_of(*launch).run(unfair(seed), chunks_of(launch[1]))
        assert log.poisoned == log.told == []
        assert done(log.items) == all_of(launch[0])

    @given(launches(), st.data())
    def test_one_worker_poisons_from_the_first_item_on_whose_chunk_never_comes(self, launch, data):
        schedule, gate = launch
        missing = data.draw(st.sampled_from(chunks_of(gate)))
        if schedule.kind == "static" and schedule.workers > 1:
            schedule = Schedule("static", schedule.grid, schedule.raster)
        machine = machine_of(schedule, gate, crew=[0])
        machine.arrived = set(chunks_of(gate)) - {missing}
        log = machine.run(lambda options: options[0], expires=True)
        holds(machine)
        late = [item for item in log.handed_in if missing in reads(gate, item)]
        poisoned = [item for _, item in log.poisoned]
        assert poisoned[:1] == late[:1]
        assert [type(by) for _, by in log.told] == [Wait, *[Poll] * len(poisoned)][: len(poisoned)]

    @given(launches(), seeds)
    def test_a_worker_computes_at_most_one_item_after_the_expiry(self, launch, seed):
        machine, choose = machine_of(*launch), unfair(seed)
        computed_before: dict[int, int] = {}

        def counted(options):
            if machine.aborted and not computed_before:
                computed_before.update(Counter(worker for worker, _ in machine.log.computed), all=1)
            return choose(options)

        machine.run(counted, chunks_of(launch[1]), expires=True)
        after = Counter(worker for worker, _ in machine.log.computed)
        if computed_before:
            assert all(after[worker] - computed_before.get(worker, 0) <= 1 for worker in range(launch[0].workers))

    @given(launches(), seeds, st.data())
    def test_workers_that_never_run_are_missed_by_nobody(self, launch, seed, data):
        schedule, gate = launch
        if schedule.kind != "static":
            crew = data.draw(st.sets(st.integers(0, schedule.workers - 1), min_size=1))
            machine = machine_of(schedule, gate, crew=sorted(crew))
            machine.run(unfair(seed), chunks_of(gate), expires=True)
            holds(machine)

    @given(launches(gated=False), seeds)
    def test_without_a_gate_nobody_looks_at_the_abort_word(self, launch, seed):
        machine = machine_of(*launch)
        machine.aborted = True
        log = machine.run(unfair(seed))
        assert log.poisoned == log.told == []
        assert done(log.items) == all_of(launch[0])
        assert machine.words.raw == [0] * launch[0].queues


class TestTheLastOneOut:
    @given(launches(), seeds)
    def test_the_next_launch_finds_the_words_as_they_were_or_signals_in_quarantine(self, launch, seed):
        machine = machine_of(*launch)
        log = machine.run(unfair(seed), chunks_of(launch[1]), expires=True)
        assert (machine.words.raw, machine.exits, machine.aborted) == ([0] * launch[0].queues, 0, False)
        assert machine.quarantined == bool(log.told)
        assert machine.arrived == set() or machine.quarantined

    @given(launches(), seeds)
    def test_signals_are_zeroed_when_all_have_come(self, launch, seed):
        machine, choose, picked = machine_of(*launch), unfair(seed), []

        def counted(options):
            picked.append(choose(options))
            return picked[-1]

        machine.run(counted, chunks_of(launch[1]))
        assert picked.count(-1) == len(chunks_of(launch[1])), "chunks that no tile reads, too"
        assert (machine.arrived, machine.quarantined) == (set(), False)

    @given(launches(), seeds)
    def test_replays(self, launch, seed):
        # Five launches on the same words, none of which the host has a look at.
        first = machine_of(*launch)
        words, exits, quarantined = first.words, 0, False
        for replay in range(5):
            machine = machine_of(*launch, words=words)
            machine.exits, machine.quarantined = exits, quarantined
            if quarantined:
                machine.arrived = set(chunks_of(launch[1])[:1])  # left as they were, or come late
            log = machine.run(unfair(seed + replay), chunks_of(launch[1]), expires=replay == 2)
            holds(machine)
            assert not quarantined or log.computed == []
            assert words.raw == [0] * launch[0].queues
            exits, quarantined = machine.exits, machine.quarantined

    def test_every_order_of_two_workers(self):
        gate = Gate(4, 2, 2, 2, Chunks((0, 3, 3, 4)))
        schedule = Schedule("dynamic", Grid(1, 2, 1), workers=2)
        ends = set()

        def run(choose):
            machine = machine_of(schedule, gate)
            machine.run(choose, [(0, 1)], expires=True)
            machine.arrived |= {(0, 1)}
            return machine

        for machine in every_interleaving(run):
            holds(machine)
            assert machine.quarantined
            ends.add(tuple(math.isnan(machine.tiles[tile]) for tile in range(2)))
        assert ends == {(True, True)}, "both tiles read chunk 0, which never comes"


fixing_up = partial(work_through, reset=True, finish=fixup)


class TestSettled:
    """Parts that their workers hold, and write only for others."""

    @given(launches(), seeds)
    def test_each_item_is_handed_in_once_whenever_the_deadline_expires(self, launch, seed):
        machine = machine_of(*launch, program=fixing_up)
        order = random.Random(seed).sample(chunks_of(launch[1]), len(chunks_of(launch[1])))
        machine.run(unfair(seed), order, expires=True)
        holds(machine)

    @given(launches(gated=False), seeds)
    def test_tiles_are_as_with_the_other_way_and_no_more_is_written(self, launch, seed):
        machine, other = machine_of(*launch, program=fixing_up), machine_of(*launch)
        machine.run(unfair(seed))
        other.run(unfair(seed))
        assert machine.tiles == other.tiles
        split = {item.tile: item.parts for item in machine.log.items if item.parts > 1}
        assert len(machine.log.reduced) == len(split)
        assert sum(split.values()) - len(split) <= len(machine.log.written) <= sum(split.values())

    def test_one_worker_writes_all_parts_but_the_last(self):
        schedule = Schedule("stream_k", Grid(1, 1, 1, 3), workers=3)
        machine = machine_of(schedule, None, crew=[0], program=partial(work_through, finish=fixup))
        log = machine.run(lambda options: options[0])
        assert [item.part for item in log.written] == [0, 1]
        assert [item.part for item in log.reduced] == [2]
        assert machine.tiles == {0: 3.0}

    @pytest.mark.parametrize("contributors", [2, 3])
    def test_every_order_of_contributors(self, contributors):
        schedule = Schedule("stream_k", Grid(1, 1, 1, contributors), workers=contributors)
        written = set()
        for machine in every_interleaving(lambda choose: self.driven(schedule, choose)):
            holds(machine)
            assert len(machine.log.reduced) == 1
            written.add(len(machine.log.written))
        assert written == {contributors - 1, contributors}, "the last may or may not have seen that it is"

    @staticmethod
    def driven(schedule, choose):
        machine = machine_of(schedule, None, program=partial(work_through, finish=fixup))
        for worker in machine.alive:
            machine.step(worker)  # tickets are of no account here, and make many orders
        while machine.alive:
            worker = choose(machine.alive)
            machine.step(worker)
            at = machine._at.get(worker)
            if at is not None and isinstance(at[1], Take | Write | Restore):
                machine.step(worker)
        return machine


# What one worker does, operation by operation ------------------------------------------------------------------------

GATE = Gate(4, 4, 2, 2, Chunks((0, 3, 3, 4)))
SCHEDULE = Schedule("dynamic", Grid(1, 2, 1, 2), workers=3)
SECOND, FIRST = WorkItem(1, 0, 1, 0, 0, 2), WorkItem(0, 0, 0, 0, 0, 2)
OUT = (Take(0), Leave())
SEES = (See(0, 0), See(0, 1), See(0, 2))
REST = (Reset("counter", 0), Reset("exits"), Reset("abort"))
QUEUES = Schedule("dynamic", Grid(1, 2, 1), workers=1, queues=2)
UNGATED = {"schedule": QUEUES, "gate": None}
WORK = {"program": work}
THROUGH = {"program": partial(work_through, reset=False)}
#: Answers, which worker's text, the operations that are so answered, and the state behind the turn.
TURNS = {
    "an item is taken, then the launch looked at, then its gate": (
        (1, 0, 1, 1, 0), {}, (Take(0), Poll(), Wait(0, 0, SECOND), Wait(0, 2, SECOND), Compute(SECOND)),
        WorkerState(Cursor(), Seen(rows=0b101)),
    ),
    "told at the poll": ((1, 1, 0), {}, (Take(0), Poll(), Poison(SECOND)), WorkerState()),
    "told at the gate: seen is only what has arrived": (
        (1, 0, 1, 0, 0), {}, (Take(0), Poll(), Wait(0, 0, SECOND), Wait(0, 2, SECOND), Poison(SECOND)),
        WorkerState(seen=Seen(rows=0b1)),
    ),
    "STOP where nothing is reset": ((2,), THROUGH, (Take(0),), None),
    "STOP with others still in": ((2, 1), {}, OUT, None),
    "the last one out sees every chunk": (
        (2, 2, 0, 1, 1, 1, 0, 0, 0, 0), {}, (*OUT, Poll(), *SEES, Reset("signals"), *REST), None
    ),
    "the last one out of a launch that is over": ((2, 2, 1, 0, 0, 0, 0), {}, (*OUT, Poll(), Quarantine(), *REST), None),
    "the deadline of the last one out": (
        (2, 2, 0, 1, 0, 0, 0, 0, 0), {}, (*OUT, Poll(), *SEES[:2], Quarantine(), *REST), None
    ),
    "the last one out of a launch without a gate": (
        (1, 1, 0, 0, 0, 0), UNGATED,
        (Take(0), Peek(1), Leave(), Reset("counter", 0), Reset("counter", 1), Reset("exits")), None,
    ),
    "work polls first": ((1,), WORK, (Poll(),), None),
    "work leaves at once": ((0, 0, 0), WORK, (Poll(), Take(0), Wait(0, 0, FIRST)), None),
    "work computes": (
        (0, 0, 1, 0), WORK, (Poll(), Take(0), Wait(0, 0, FIRST), Compute(FIRST)), WorkerState(seen=Seen(rows=0b1))
    ),
}  # fmt: skip


def turn(answers, schedule=SCHEDULE, gate=GATE, program=resetting):
    """The operations that are answered so, and what the turn returns."""
    left = iter(answers)
    return operations(program(schedule, gate, 0, WorkerState()), lambda _: next(left))


@pytest.mark.parametrize("name", TURNS)
def test_a_turn(name):
    answers, how, wanted, after = TURNS[name]
    assert turn(answers, **how) == ([*wanted], after)


@pytest.mark.parametrize(("over", "done_by"), [(0, Compute), (1, Poison)])
@pytest.mark.parametrize("before", [0, 1])
def test_a_part_is_counted_and_the_last_reduces_computed_or_not(over, done_by, before):
    split = Schedule("stream_k", Grid(1, 1, 1, 2), workers=2)
    item = WorkItem(0, 0, 0, 0, 0, 1, 0, 2, 0)
    waited = [] if over else [Wait(0, 0, item)]
    answers = [0, over, *[1 for _ in waited], 0, before, *[0] * before]
    found, _ = turn(answers, split, Gate(2, 2, 2, 2, Chunks((0, 2))))
    assert found == [Take(0), Poll(), *waited, done_by(item), Count(item), *[Reduce(item)] * before]


@pytest.mark.parametrize("done_by", [Compute, Poison])
@pytest.mark.parametrize(("looked", "counted"), [(1, None), (0, 1), (0, 0)])
def test_a_part_is_settled_computed_or_not(done_by, looked, counted):
    item = WorkItem(0, 0, 0, 0, 0, 1, 0, 2, 0)
    found, _ = operations(fixup(done_by(item)), lambda op: {Look: looked, Add: counted}.get(type(op), 0))
    written = [] if looked else [Write(item), Add(item)]
    added = [Restore(item), ReducePartials(item)] if 1 in (looked, counted) else []
    wanted = [done_by(item, held=True), Look(item), *written, *added]
    assert [(type(op), *op) for op in found] == [(type(op), *op) for op in wanted]


def test_a_whole_tile_is_settled_as_it_is_handed_in():
    assert list(fixup(Compute(FIRST))) == list(store_and_count(Compute(FIRST))) == [Compute(FIRST)]


def test_every_chunk_a_s_first():
    gate = Gate(4, 4, 2, 2, Chunks((0, 0, 4)), Chunks((0, 4)))
    assert gate.every() == (See(0, 0), See(0, 1), See(1, 0))
    assert Gate(4, 0, 2, 2, columns=Chunks((0, 0))).every() == (See(1, 0),)
