"""Model 1: what it explores, and that its checks are checks: with a broken truth the right protocol fails."""

from __future__ import annotations

import pytest

from tilestream.arrival.gate import Gate
from tilestream.verify.oracle import Oracle
from tilestream.verify.report import explore
from tilestream.verify.search import search
from tilestream.verify.seeded import seeded_bugs
from tilestream.verify.sweep import LAYOUTS, matmul
from tilestream.verify.workers import WorkersModel

BUGS = {bug.name: bug for bug in seeded_bugs()}


def kind_of(case):
    violation = explore("workers", case).violation
    return violation and violation.kind


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


class TestBrokenTruth:
    """The checker, mutated: each test would pass unnoticed if the check it is about did nothing."""

    CASE = matmul("dynamic", 2, 2, bounds=(0, 3, 4), pivot=1)

    def test_oracle_that_asks_for_everything_fails_the_right_gate(self, monkeypatch):
        assert kind_of(self.CASE) is None
        monkeypatch.setattr(Oracle, "needs", lambda self, item: (1 << self.chunks) - 1)
        assert kind_of(matmul("dynamic", 1, 2, bounds=(0, 2, 4))) == "read before arrival"

    def test_oracle_that_asks_for_nothing_misses_the_seeded_bug(self, monkeypatch):
        monkeypatch.setattr(Oracle, "needs", lambda self, item: 0)
        assert BUGS["pivot not in the signal"].find().violation is None

    def test_gate_that_asks_for_nothing_fails(self, monkeypatch):
        monkeypatch.setattr(Gate, "needs", lambda self, item: ())
        assert kind_of(self.CASE) == "read before arrival"

    def test_count_that_is_not_restored_fails(self, monkeypatch):
        case = matmul("stream_k", 2, 1, k=2)
        assert kind_of(case) is None
        monkeypatch.setattr(WorkersModel, "_count", WorkersModel._add)
        assert kind_of(case) == "count not restored"

    def test_partials_that_never_become_visible_fail(self, monkeypatch):
        def count_only(self, pid, op, answer, m):
            m[self.count + self.position[op.item.tile]] = (answer + 1) % op.item.parts

        monkeypatch.setattr(WorkersModel, "_count", count_only)
        assert kind_of(matmul("stream_k", 2, 1, k=2)) == "partial not visible"

    def test_take_that_does_not_count_up_fails(self, monkeypatch):
        monkeypatch.setattr(WorkersModel, "_take", lambda self, pid, op, answer, m: None)
        assert kind_of(self.CASE) == "double work"

    def test_compute_that_does_nothing_fails(self, monkeypatch):
        monkeypatch.setattr(WorkersModel, "_compute", lambda self, pid, op, answer, m: None)
        assert kind_of(matmul("dynamic", 1, 1)) == "missing work"

    def test_missing_tile_is_not_expected_after_an_expiry_only(self):
        # Where chunks never come, tiles are missing, and that is right: the deadline expires.
        model = self.CASE.build(reduce=False)
        ends = []
        at_end = model.at_end
        model.at_end = lambda m: (ends.append((m[model.aborted], m[model.stored])), at_end(m))
        assert search(model).fault is None
        assert {stored for aborted, stored in ends if not aborted} == {0b11}
        assert {stored for aborted, stored in ends if aborted} >= {0b00, 0b01}


class TestWhatIsExplored:
    def test_expiry_only_where_a_worker_is_blocked(self):
        model = matmul("dynamic", 1, 1, bounds=(0, 2)).build(reduce=False)
        lines = []
        frontier = {model.start()}
        seen = set()
        while frontier:
            state = frontier.pop()
            seen.add(state)
            log = []
            steps = model.steps(state, log)
            lines += [line for step in log for line in step]
            frontier |= {target for target, _ in steps} - seen
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
