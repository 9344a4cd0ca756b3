"""Model 1: its truth, what it expects at the end, and what it explores."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exploring import explored, kind_of

from mutants.checker import seeded_bugs
from tilestream.core.loop import Poll
from tilestream_tools.verify.gpu_loop import Leave, Poison, Quarantine, Reset, leave, work_through
from tilestream_tools.verify.oracle import Oracle
from tilestream_tools.verify.report import explore
from tilestream_tools.verify.search import search
from tilestream_tools.verify.sweep import LAYOUTS, UNREAD, matmul

BUGS = {bug.name: bug for bug in seeded_bugs()}


class TestOracle:
    @pytest.mark.parametrize("bounds", [b for layouts in LAYOUTS.values() for b in layouts])
    def test_agrees_with_the_gate_that_is_right(self, bounds):
        case = matmul("static", 1, (bounds[-1] + 1) // 2, bounds=bounds)
        oracle = Oracle(case.schedule, case.gate)
        for item in case.schedule.items():
            assert oracle.needs(item) == sum(1 << need.chunk for need in case.gate.needs(item))

    def test_by_hand(self):
        case = matmul("static", 1, 3, bounds=(0, 1, 5, 6))
        items = {item.pm: item for item in case.schedule.items()}
        oracle = Oracle(case.schedule, case.gate)
        assert [oracle.needs(items[pm]) for pm in range(3)] == [0b011, 0b010, 0b110]
        assert oracle.names(0b101) == "chunk 0, chunk 2"
        assert oracle.bit(0, 3) == oracle.bit(1, 0) == 0

    def test_columns(self):
        case = matmul("static", 1, 1, 2, bounds=(0, 3, 4), weight=True)
        oracle = Oracle(case.schedule, case.gate)
        assert {oracle.needs(item) for item in case.schedule.items()} == {0b01, 0b11}
        assert oracle.names(0b11) == "column chunk 0, column chunk 1"

    def test_batches(self):
        case = matmul("static", 1, 2, batch=2, bounds=(0, 3, 5, 8))
        oracle = Oracle(case.schedule, case.gate)
        needs = {(i.batch, i.pm): oracle.needs(i) for i in case.schedule.items()}
        assert needs == {(0, 0): 0b001, (0, 1): 0b011, (1, 0): 0b110, (1, 1): 0b100}


class TestWhatIsExpected:
    CASE = matmul("dynamic", 2, 2, bounds=(0, 3, 4), pivot=1)

    def test_oracle_that_asks_for_nothing_misses_the_seeded_bug(self, monkeypatch):
        monkeypatch.setattr(Oracle, "needs", lambda self, item: 0)
        assert BUGS["pivot not in the signal"].find().violation is None

    def test_missing_tile_is_not_expected_after_an_expiry_only(self):
        # Where chunks never come, tiles are missing, and that is right: the deadline expires.
        model = self.CASE.build(reduce=False)
        ends = []
        at_end = model.at_end
        model.at_end = lambda m: (ends.append((m[model.aborted], m[model.stored])), at_end(m))
        assert search(model).fault is None
        assert {stored for aborted, stored in ends if not aborted} == {0b11}
        assert {stored for aborted, stored in ends if aborted} >= {0b00, 0b01}


class TestADrain:
    CASE = matmul("dynamic", 2, 2, bounds=(0, 3, 4), pivot=1, drain="reset")

    def test_quarantine_of_a_launch_that_is_not_over_fails(self):
        def marks_always(schedule, gate, worker, state):
            after = yield from work_through(schedule, gate, worker, state)
            if after is None and (yield Leave()) == schedule.workers - 1:
                yield Quarantine()
                for word in ("counter", "exits", "abort"):
                    yield Reset(word)
            return after

        violation = explore("workers", replace(self.CASE, program=marks_always)).violation
        assert violation.kind == "not reset"
        assert violation.message.endswith("marks the signals of a launch that is not over")

    def test_signals_that_are_zeroed_while_others_are_in_fail(self):
        def zeroes_first(schedule, gate, worker, state):
            after = yield from work_through(schedule, gate, worker, state)
            if after is None:
                arrived = True
                for see in gate.every():
                    arrived = (yield see) and arrived
                if arrived:
                    yield Reset("signals")
                yield from leave(schedule, gate)
            return after

        violation = explore("workers", replace(self.CASE, program=zeroes_first)).violation
        assert violation.kind == "reset too early"
        assert violation.message.endswith("may still read it")

    @pytest.mark.parametrize("quarantined", [False, True])
    @pytest.mark.parametrize("poll", [False, True])
    @pytest.mark.parametrize("every", [False, True])
    def test_what_the_last_one_out_may_leave_out(self, every, poll, quarantined):
        """It need not see chunks that a tile reads, if it polls; it must poll, if an earlier launch expired."""

        def leaves(schedule, gate, worker, state):
            after = yield from work_through(schedule, gate, worker, state)
            if after is None and (yield Leave()) == schedule.workers - 1:
                arrived = not (poll and (yield Poll()))
                for see in gate.every():
                    if every or gate.rows.bounds[see.chunk] == gate.rows.bounds[see.chunk + 1]:
                        arrived = arrived and bool((yield see))
                yield Reset("signals") if arrived else Quarantine()
                for word in ("counter", "exits", "abort"):
                    yield Reset(word)
            return after

        kinds = {
            kind_of(matmul("dynamic", w, 2, bounds=b, drain="reset", program=leaves, quarantined=quarantined))
            for w in (1, 2)
            for b in (*LAYOUTS[2], *UNREAD[2])
        }
        right = poll or (every and not quarantined)
        assert kinds == {None} if right else "reset too early" in kinds

    def test_nothing_is_computed_of_signals_in_quarantine(self):
        model = replace(self.CASE, quarantined=True).build(reduce=False)
        computed, poisoned = [], []
        model._compute = lambda *how: computed.append(how)
        poison = model._poison
        model._poison = lambda pid, op, answer, m: (poisoned.append(op), poison(pid, op, answer, m))
        assert search(model).fault is None
        assert computed == []
        assert {type(op) for op in poisoned} == {Poison}

    def test_after_an_expiry_every_tile_is_expected_all_the_same(self):
        model = self.CASE.build(reduce=False)
        ends = []
        at_end = model.at_end
        model.at_end = lambda m: (ends.append((m[model.quarantined], m[model.stored])), at_end(m))
        assert search(model).fault is None
        assert set(ends) == {(0, 0b11), (1, 0b11)}


class TestWhatIsExplored:
    def test_expiry_only_where_a_worker_is_blocked(self):
        _, lines = explored(matmul("dynamic", 1, 1, bounds=(0, 2)).build(reduce=False))
        assert "worker 0: wait(chunk 0, for tile 0) -> the deadline expires, abort is set" in lines
        assert "worker 0: wait(chunk 0, for tile 0) -> arrived" in lines
        assert "chunk 0 arrives" in lines
        assert not any("deadline" in line and "wait" not in line for line in lines)

    def test_one_worker_one_tile_by_hand(self):
        # Nothing arrives late here, so: poll, take 0, compute, poll, take 1 (void), left.
        outcome = search(matmul("dynamic", 1, 1).build(reduce=False))
        assert (outcome.states, outcome.steps) == (6, 5)

    def test_static_alone_does_its_own_positions_and_no_others(self):
        model = matmul("static", 3, 3, running=(1,)).build()
        assert model.expected == [1]
        assert search(model).fault is None

    def test_trace_keeps_names_under_symmetry(self):
        violation = BUGS["abort not polled"].find().violation
        tickets = [line for line in violation.trace if "take" in line]
        assert tickets == [
            f"worker {w}: take(queue 0) -> {t}" for t, w in enumerate(int(x.split()[1][0]) for x in tickets)
        ]
        assert len({line.split(":")[0] for line in tickets}) == 2
