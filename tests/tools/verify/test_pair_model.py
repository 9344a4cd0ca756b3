"""Two CTAs that load for each other: the right protocol passes, and each way to spoil it is found."""

from __future__ import annotations

import pytest
from exploring import explored

from mutants.checker import seeded_bugs
from tilestream_tools.verify import protocol as p
from tilestream_tools.verify.pair import PairCase, PairModel, paired
from tilestream_tools.verify.search import check, search

BUGS = {bug.name: bug for bug in seeded_bugs() if bug.model == "pair"}


def pair(depth=2, consumers="single", items=(2, 1), **how):
    return PairCase(p.Ring(depth, 2, consumers, promoted=depth == 1, ctas=2), items, **how)


def kind_of(case, limit=20_000):
    violation, _ = check(lambda reduce: case.build(reduce, reduce), str(case), limit)
    return violation and violation.kind


@pytest.mark.parametrize("case", [pair(), pair(depth=1), pair(items=(3, 1)), pair(items=())], ids=str)
def test_the_right_protocol_passes(case):
    assert kind_of(case) is None


@pytest.mark.slow
@pytest.mark.parametrize("case", [pair(3, items=(2, 1, 1)), pair(consumers="cooperative")], ids=str)
def test_the_right_protocol_passes_with_more(case):
    assert kind_of(case) is None


def test_a_half_lands_before_its_cta_expects_it():
    model = pair(items=(1,)).build()
    full = model.places[p.Barrier("full", 0)]
    bytes_left = {state[base + full] >> 5 for state in explored(model)[0] for base in model.base}
    assert bytes_left >= {-1, 0, 1, 2}


@pytest.mark.parametrize("bug", [None, "never met", "not met at the end"])
def test_reductions_change_no_verdict(bug):
    around = BUGS[f"pair: {bug}"].cases[0].around if bug else paired
    case = pair(items=(1,), around=around)
    kinds = {(fault := search(case.build(*how)).fault) and fault.kind for how in ((True, True), (False, False))}
    assert len(kinds) == 1, kinds


# Seeded faults of the machine; those of the text are in `tests/mutants/tables/pairs.txt` ------------------------------


def test_arrivals_that_the_other_cta_is_not_told_of_free_no_stage(monkeypatch):
    def arrives_here_alone(self, pid, op, answer, m):
        self._count(self._cta(pid), op.barrier, m, 1, 0)

    monkeypatch.setitem(PairModel.performed, p.Arrive, arrives_here_alone)
    assert kind_of(pair()) == "deadlock"


@pytest.mark.parametrize("loads", [1, 3])
def test_a_stage_is_full_with_both_halves(monkeypatch, loads):
    def expects(self, pid, op, answer, m):
        self._count(self._cta(pid), op.barrier, m, 1, loads)

    monkeypatch.setitem(PairModel.performed, p.Expect, expects)
    assert kind_of(pair()) in ({"read before arrival", "barrier broken", "wrong data"} if loads == 1 else {"deadlock"})
