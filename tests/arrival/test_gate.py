"""Invariant 2, *One row*: what an item waits for are the chunks of the rows it reads, after raster and pivot."""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machine import Machine, all_of, done, unfair
from strategies import chunkings, rasters, seeds
from tilestream.arrival import Chunks, Gate, Seen, Wait, pass_gate
from tilestream.plan import Incoming, Problem
from tilestream.schedule import Grid, Schedule, WorkItem


@dataclass(frozen=True)
class Case:
    """A problem whose operands arrive, cut into tiles, and an oracle of its own: row by row, column by column."""

    problem: Problem
    grid: Grid
    block_m: int
    block_n: int

    @property
    def gate(self) -> Gate:
        p = self.problem
        return Gate(
            p.m, p.n, self.block_m, self.block_n,
            p.rows and p.rows.chunks, p.columns and p.columns.chunks, p.row_of_batch,
        )  # fmt: skip

    def reads(self, item: WorkItem) -> list[tuple[int, int]]:
        """(operand, chunk) of each row of A and each column of B in the item's tile, in order, each once."""
        p, found = self.problem, []
        for operand, incoming, begin, block, extent, base in (
            (0, p.rows, item.pm, self.block_m, p.m, 0 if p.shared_rows else item.batch * p.m),
            (1, p.columns, item.pn, self.block_n, p.n, 0),
        ):
            if incoming is not None:
                owner = [c for c in range(incoming.chunks.count) for _ in range(*incoming.chunks.range_of(c))]
                touched = [base + i for i in range(begin * block, begin * block + block) if i < extent]
                found += sorted({(operand, owner[i]) for i in touched})
        return found

    @property
    def arrivals(self) -> list[tuple[int, int]]:
        p = self.problem
        return [(o, c) for o, x in enumerate((p.rows, p.columns)) if x is not None for c in range(x.chunks.count)]


@st.composite
def cases(draw) -> Case:
    m, n, batch = draw(st.integers(1, 24)), draw(st.integers(1, 12)), draw(st.integers(1, 3))
    block_m, block_n = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    shared = batch > 1 and draw(st.booleans())
    which = draw(st.sampled_from(["rows", "columns", "both"]))
    rows = Incoming(draw(chunkings(m if shared else m * batch))) if which != "columns" else None
    columns = Incoming(draw(chunkings(n))) if which != "rows" else None
    problem = Problem(m, n, 4, batch, rows=rows, columns=columns, shared_rows=shared)
    return Case(problem, Grid.of(m, n, 4, block_m, block_n, 2, batch), block_m, block_n)


def schedule_of(draw, grid: Grid) -> Schedule:
    raster = draw(rasters(grid))
    kind = draw(st.sampled_from(["static", "dynamic", "stream_k"]))
    return Schedule(kind, grid, raster, draw(st.integers(1, 4)), draw(st.integers(1, 3)) if kind == "dynamic" else 1)


def agrees(case: Case, gate: Gate, items) -> bool:
    """Whether an item's needs are the chunks of each row it reads: of nothing else, and inside the signals."""
    try:
        return all(list(gate.needs(item)) == [Wait(*read, item) for read in case.reads(item)] for item in items)
    except IndexError:
        return False  # it asks for a row that is not there


class TestOneRow:
    @given(st.data(), cases())
    def test_needs_are_the_chunks_of_each_row_whatever_the_schedule(self, data, case):
        schedule = schedule_of(data.draw, case.grid)
        assert agrees(case, case.gate, schedule.items())

    @given(st.data(), cases(), seeds)
    def test_no_worker_reads_before_arrival_and_all_is_done(self, data, case, seed):
        schedule = schedule_of(data.draw, case.grid)
        crew = (
            range(schedule.workers) if schedule.kind == "static" else [data.draw(st.integers(0, schedule.workers - 1))]
        )
        machine = Machine(schedule, crew, gate=case.gate, reads=case.reads)
        order = random.Random(seed).sample(case.arrivals, len(case.arrivals))
        log = machine.run(unfair(seed), order)
        assert log.read_early == []
        assert done(log.items) == all_of(schedule)

    @given(st.data(), cases(), seeds)
    def test_after_an_abort_nothing_is_taken_that_has_not_arrived(self, data, case, seed):
        schedule = schedule_of(data.draw, case.grid)
        machine = Machine(schedule, range(schedule.workers), gate=case.gate, reads=case.reads)
        rng, choose = random.Random(seed), unfair(seed)
        machine.arrived = set(rng.sample(case.arrivals, rng.randint(0, len(case.arrivals) - 1)))
        while machine.runnable:
            machine.step(choose(machine.runnable))
        machine.aborted = True
        log = machine.run(choose)
        assert log.read_early == []
        assert max(done(log.items).values(), default=0) <= 1

    @given(st.data(), cases(), seeds)
    def test_a_worker_waits_once_for_each_chunk(self, data, case, seed):
        schedule = schedule_of(data.draw, case.grid)
        machine = Machine(schedule, [0], gate=case.gate)
        log = machine.run(unfair(seed), case.arrivals)
        asked = [(w.operand, w.chunk) for w in log.waited]
        assert len(set(asked)) == len(asked)
        assert set(asked) == {chunk for item in log.items for chunk in case.reads(item)}


class TestAWrongGateIsFound:
    """Composable_kernel's #5776 and its relatives, on one case with everything odd about it."""

    CASE = Case(
        Problem(7, 5, 4, 2, rows=Incoming(Chunks((0, 3, 3, 8, 14)), pivot=2), columns=Incoming(Chunks.uniform(5, 3))),
        Grid.of(7, 5, 4, 4, 2, 4, batch=2), 4, 2,
    )  # fmt: skip
    ITEMS = tuple(Schedule("dynamic", CASE.grid).items())

    def test_the_right_gate_agrees(self):
        assert agrees(self.CASE, self.CASE.gate, self.ITEMS)

    @pytest.mark.parametrize(
        "change",
        [
            {"row_of_batch": ()},
            {"row_of_batch": (0, 8)},
            {"block_m": 2},
            {"m": 8},
            {"rows": Chunks((0, 3, 3, 7, 14))},
            {"rows": None},
            {"columns": None},
            {"columns": Chunks.uniform(5, 2)},
        ],
        ids=str,
    )
    def test_a_gate_of_something_else(self, change):
        assert not agrees(self.CASE, replace(self.CASE.gate, **change), self.ITEMS)

    @pytest.mark.parametrize(
        "wrong",
        [lambda found, count: tuple((c + 2) % count for c in found), lambda found, count: found[:1]],
        ids=["a pivot applied to the data and not to the signal", "waiting for the first chunk only"],
    )
    def test_chunks_of_something_else(self, monkeypatch, wrong):
        right = Chunks.of_rows
        monkeypatch.setattr(Chunks, "of_rows", lambda self, b, e: wrong(right(self, b, e), self.count))
        assert not agrees(self.CASE, self.CASE.gate, self.ITEMS)

    def test_a_machine_without_its_gate_reads_early(self):
        schedule = Schedule("dynamic", self.CASE.grid, workers=2)
        log = Machine(schedule, [0, 1], reads=self.CASE.reads).run(unfair(1), self.CASE.arrivals)
        assert log.read_early


def told(protocol: Generator, *answers: int) -> tuple[list[Wait], object]:
    """What the protocol waits for, given these answers, and what it returns; None while it waits on."""
    waits = []
    try:
        for answer in (None, *answers):
            asked = protocol.send(answer)
            waits.append(asked)
    except StopIteration as end:
        return waits, end.value
    return waits, None


class TestPassGate:
    GATE = Gate(8, 4, 4, 4, Chunks.uniform(8, 2), Chunks.uniform(4, 2))
    ITEM = WorkItem(1, 0, 1, 0, 0, 1)

    def waits(self, *chunks: tuple[int, int]) -> list[Wait]:
        return [Wait(operand, chunk, self.ITEM) for operand, chunk in chunks]

    def test_waits_for_as_chunks_then_bs(self):
        assert list(self.GATE.needs(self.ITEM)) == self.waits((0, 2), (0, 3), (1, 0), (1, 1))

    def test_remembers_what_it_has_seen_of_each_operand(self):
        seen = Seen(rows=0b0100, columns=0b10)
        found = told(pass_gate(self.GATE, self.ITEM, seen), 1, 1)
        assert found == (self.waits((0, 3), (1, 0)), (True, Seen(rows=0b1100, columns=0b11)))
        assert told(pass_gate(self.GATE, self.ITEM, Seen(rows=0b1100))) == (self.waits((1, 0)), None)

    def test_the_end_of_the_launch_is_no_arrival(self):
        found = told(pass_gate(self.GATE, self.ITEM, Seen()), 1, 0)
        assert found == (self.waits((0, 2), (0, 3)), (False, Seen(rows=0b0100))), "seen is only what has arrived"

    def test_an_item_that_needs_nothing_passes(self):
        gate = Gate(0, 4, 4, 4, Chunks((0, 0)))
        assert told(pass_gate(gate, WorkItem(0, 0, 0, 0, 0, 1), Seen())) == ([], (True, Seen()))

    def test_more_chunks_than_a_machine_word_has_bits(self):
        gate = Gate(1000, 1, 1000, 1, Chunks.uniform(1000, 1))
        waits, end = told(pass_gate(gate, WorkItem(0, 0, 0, 0, 0, 1), Seen()), *[1] * 1000)
        assert [wait.chunk for wait in waits] == list(range(1000))
        assert end == (True, Seen(rows=2**1000 - 1))
