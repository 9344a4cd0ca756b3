"""Model 1 of parts that are held and fixed up: what it explores, that its checks are checks, and what is no bug."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from mutants.checker import seeded_bugs
from tilestream.core.loop import Add, Look, ReducePartials, Restore, Write, work_through
from tilestream_tools.verify import sweep
from tilestream_tools.verify.partials import Partials
from tilestream_tools.verify.report import explore
from tilestream_tools.verify.search import search
from tilestream_tools.verify.sweep import matmul
from tilestream_tools.verify.words import Words

SIZES = ((2, 1, 2, 0), (3, 1, 3, 0), (2, 3, 2, 0), (3, 2, 2, 0), (4, 3, 2, 2), (2, 1, 3, 3))
TWO = matmul("stream_k", 2, 1, k=2, drain="poison", fixup=True)


def kind_of(case):
    violation = explore("workers", case).violation
    return violation and violation.kind


def split(text):
    """A program that holds the parts of a tile and hands them in so."""

    def finish(done):
        if done.item.parts == 1:
            yield done
        else:
            yield done._replace(held=True)
            yield from text(done.item)

    program = partial(work_through, finish=finish)
    program.__name__ = text.__name__
    return program


def kinds(text):
    cases = [matmul("stream_k", w, n, k=k, shares=s, drain="poison", fixup=True) for w, n, k, s in SIZES]
    cases += [matmul("stream_k", 3, 1, k=3, running=(0, 2), drain="poison", fixup=True)]
    return {kind_of(replace(case, program=split(text))) for case in cases}


class TestNoBugs:
    """Other ways to do it, that hold: what the kernel may be changed to."""

    def test_as_it_is(self):
        def as_it_is(item):
            last = (yield Look(item)) == item.parts - 1
            if not last:
                yield Write(item)
                last = (yield Add(item)) == item.parts - 1
            if last:
                yield Restore(item)
                yield ReducePartials(item)

        assert kinds(as_it_is) == {None}

    def test_the_count_may_be_restored_before_the_parts_are_read_or_after(self):
        # The last contributor restores: no other reads it again. Slots are written again by the next launch only.
        def after(item):
            last = (yield Look(item)) == item.parts - 1
            if not last:
                yield Write(item)
                last = (yield Add(item)) == item.parts - 1
            if last:
                yield ReducePartials(item)
                yield Restore(item)

        assert kinds(after) == {None}

    def test_the_last_by_a_look_may_count_if_it_restores_then(self):
        def counts_too(item):
            if (yield Look(item)) < item.parts - 1:
                yield Write(item)
            if (yield Add(item)) == item.parts - 1:
                yield Restore(item)
                yield ReducePartials(item)

        assert kinds(counts_too) == {None}

    def test_the_look_may_be_left_out(self):
        def writes_always(item):
            yield Write(item)
            if (yield Add(item)) == item.parts - 1:
                yield Restore(item)
                yield ReducePartials(item)

        assert kinds(writes_always) == {None}


class TestChecksAreChecks:
    def test_right_protocol(self):
        assert kind_of(TWO) is None

    @pytest.mark.parametrize(
        ("name", "kind"),
        [("_write", "partial not visible"), ("_add", "missing work"), ("_restore", "count not restored"),
         ("_reduce", "missing work")],
    )  # fmt: skip
    def test_an_operation_that_does_nothing(self, name, kind, monkeypatch):
        monkeypatch.setattr(Words, name, lambda self, pid, op, answer, m: None)
        assert kind_of(TWO) == kind

    def test_poison_that_is_held_and_forgotten(self, monkeypatch):
        case = matmul("stream_k", 2, 1, bounds=(0, 1, 2), k=2, drain="poison", fixup=True)
        assert kind_of(case) is None
        hold = Partials.hold

        def as_a_number(self, who, item, nan, m):
            hold(self, who, item, False, m)
            m[self.poisoned] |= nan << self.position[item.tile]

        monkeypatch.setattr(Partials, "hold", as_a_number)
        assert kind_of(case) == "poison lost"

    @pytest.mark.parametrize("op", [Write, ReducePartials])
    def test_what_a_worker_does_not_hold(self, op):
        def never_held(done):
            if done.item.parts == 1:
                yield done
            else:
                yield op(done.item)

        program = partial(work_through, finish=never_held)
        program.__name__ = "never_held"
        violation = explore("workers", replace(TWO, program=program)).violation
        assert violation.kind == "wrong data"
        assert violation.message.endswith("that it does not hold")


class TestWhatIsExplored:
    def lines(self, case):
        model = case.build(reduce=False)
        frontier, seen, lines = [model.start()], set(), set()
        while frontier:
            state = frontier.pop()
            if state not in seen:
                seen.add(state)
                log = []
                frontier += [target for target, _ in model.steps(state, log)]
                lines |= {line for step in log for line in step}
        return lines

    def test_every_number_of_parts_is_found_counted(self):
        lines = self.lines(matmul("stream_k", 3, 1, k=3, drain="poison", fixup=True))
        for name, most in (("look", 2), ("add", 2)):
            found = {line.split(" -> ")[1] for line in lines if f": {name}(" in line}
            assert found == {str(count) for count in range(most + 1)}

    def test_parts_are_poisoned_beside_computed_ones(self):
        lines = self.lines(matmul("stream_k", 2, 1, bounds=(0, 1, 2), k=2, drain="reset", fixup=True))
        assert any("poison(tile 0, K steps 0 to 1" in line for line in lines)
        assert any("compute(tile 0, K steps 1 to 2" in line for line in lines)
        assert any("reducepartials(tile 0" in line for line in lines)

    def test_shares_over_several_tiles_and_several_shares_a_worker(self):
        cases = [c for c in sweep.workers("quick") if c.fixup]
        parts = [[i for i in c.schedule.items() if i.parts > 1] for c in cases]
        assert {i.parts for items in parts for i in items} >= {2, 3, 4}
        assert any(c.schedule.num_shares > len(c.workers) for c in cases)
        assert any(c.schedule.remainder > c.schedule.num_shares for c in cases)
        assert {c.drain for c in cases} == {"poison", "reset"}
        assert any(c.gate is not None for c in cases)
        assert any(c.running for c in cases)
        assert any(c.quarantined for c in cases)

    def test_the_last_one_too_early_by_hand(self):
        violation = next(b for b in seeded_bugs() if b.name == "the last one too early").find().violation
        assert violation.trace == (
            "worker 0: take(queue 0) -> 0",
            "worker 0: compute(tile 0, K steps 0 to 1, part 0 of 2)",
            "worker 0: look(tile 0, K steps 0 to 1, part 0 of 2) -> 0",
            "worker 0: restore(tile 0, K steps 0 to 1, part 0 of 2)",
            "worker 0: reducepartials(tile 0, K steps 0 to 1, part 0 of 2)",
        )

    def test_parts_of_one_tile_held_by_two_consumers_of_one_worker(self):
        case = next(c for c in sweep.products("quick") if c.ring.consumers == "ping_pong" and c.workers.running)
        assert case.workers.schedule.num_shares == 3
        assert search(case.build()).fault is None
        assert len({line.split(":")[0] for line in self.lines(case) if ": look(" in line}) == 2
