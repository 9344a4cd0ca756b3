"""Model 1 of parts that are held and fixed up: what it explores, and what is no bug."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exploring import explored, kind_of, named, split

from mutants.checker import seeded_bugs
from tilestream_tools.verify import sweep
from tilestream_tools.verify.gpu_loop import Add, Look, ReducePartials, Restore, Write
from tilestream_tools.verify.report import explore
from tilestream_tools.verify.search import search
from tilestream_tools.verify.sweep import matmul

SIZES = ((2, 1, 2, 0), (3, 1, 3, 0), (2, 3, 2, 0), (3, 2, 2, 0), (4, 3, 2, 2), (2, 1, 3, 3))
TWO = matmul("stream_k", 2, 1, k=2, drain="poison", fixup=True)
HELD = matmul("stream_k", 2, 1, bounds=(0, 1, 2), k=2, drain="reset", fixup=True)


def kinds(text):
    cases = [matmul("stream_k", w, n, k=k, shares=s, drain="poison", fixup=True) for w, n, k, s in SIZES]
    cases += [matmul("stream_k", 3, 1, k=3, running=(0, 2), drain="poison", fixup=True)]
    return {kind_of(replace(case, program=split(text))) for case in cases}


def as_it_is(item):
    last = (yield Look(item)) == item.parts - 1
    if not last:
        yield Write(item)
        last = (yield Add(item)) == item.parts - 1
    if last:
        yield Restore(item)
        yield ReducePartials(item)


def restores_at_the_end(item):
    """No other contributor reads the count again; slots are written again by the next launch only."""
    last = (yield Look(item)) == item.parts - 1
    if not last:
        yield Write(item)
        last = (yield Add(item)) == item.parts - 1
    if last:
        yield ReducePartials(item)
        yield Restore(item)


def counts_even_if_it_is_the_last(item):
    if (yield Look(item)) < item.parts - 1:
        yield Write(item)
    if (yield Add(item)) == item.parts - 1:
        yield Restore(item)
        yield ReducePartials(item)


def writes_always(item):
    yield Write(item)
    if (yield Add(item)) == item.parts - 1:
        yield Restore(item)
        yield ReducePartials(item)


@pytest.mark.parametrize("text", [as_it_is, restores_at_the_end, counts_even_if_it_is_the_last, writes_always])
def test_what_the_kernel_may_be_changed_to(text):
    assert kinds(text) == {None}


@pytest.mark.parametrize("op", [Write, ReducePartials])
def test_what_a_worker_does_not_hold(op):
    def never_held(done):
        if done.item.parts == 1:
            yield done
        else:
            yield op(done.item)

    violation = explore("workers", replace(TWO, program=named("never_held", finish=never_held))).violation
    assert violation.kind == "wrong data"
    assert violation.message.endswith("that it does not hold")


class TestWhatIsExplored:
    def test_every_number_of_parts_is_found_counted(self):
        lines = explored(matmul("stream_k", 3, 1, k=3, drain="poison", fixup=True).build(reduce=False))[1]
        for name, most in (("look", 2), ("add", 2)):
            found = {line.split(" -> ")[1] for line in lines if f": {name}(" in line}
            assert found == {str(count) for count in range(most + 1)}

    def test_parts_are_poisoned_beside_computed_ones(self):
        lines = explored(HELD.build(reduce=False))[1]
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
        assert len({line.split(":")[0] for line in explored(case.build(reduce=False))[1] if ": look(" in line}) == 2
