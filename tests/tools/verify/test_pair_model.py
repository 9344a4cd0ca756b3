"""Two CTAs that load for each other: the right protocol passes, and each way to spoil it is found."""

from __future__ import annotations

import pytest
from exploring import explored

from tilestream_tools.verify import protocol as p
from tilestream_tools.verify.pair import PairCase, PairModel, meet, paired
from tilestream_tools.verify.search import check, search


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


def test_reductions_change_no_verdict():
    for around in (paired, never_begins, never_ends):
        case = pair(items=(1,), around=around)
        kinds = {(fault := search(case.build(*how)).fault) and fault.kind for how in ((True, True), (False, False))}
        assert len(kinds) == 1, kinds


# Seeded faults --------------------------------------------------------------------------------------------------------


def never_begins(turn, carried):
    """A loop that touches the other CTA without having met it."""
    _, leaves, state = carried
    if leaves:
        yield from meet()
        return None
    after = yield from turn(state)
    return (True, True, state) if after is None else (True, False, after)


def never_ends(turn, carried):
    """A loop that leaves while the other CTA may still touch its own."""
    begun, _, state = carried
    if not begun:
        yield from meet()
        return True, False, state
    after = yield from turn(state)
    return None if after is None else (True, False, after)


def with_operations(turn, change):
    """``turn``, each of whose operations is replaced by those of ``change(op)``."""

    def changed(*given):
        inner, answer = turn(*given), None
        while True:
            try:
                op = inner.send(answer)
            except StopIteration as end:
                return end.value
            answer = 0
            for instead in change(op):
                answer = yield instead

    changed.__name__ = change.__name__
    return changed


def gives_back_before_the_mma_is_done(op):
    return [] if isinstance(op, p.Retire) and op.in_flight else [op]


def takes_every_stage_as_free(op):
    return [] if isinstance(op, p.WaitBarrier) and op.barrier.name == "empty" else [op]


def reads_without_waiting(op):
    return [] if isinstance(op, p.WaitBarrier) and op.barrier.name == "full" else [op]


@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        ({"around": never_begins}, {"barrier broken"}),
        ({"around": never_ends}, {"left too early"}),
        ({"math": with_operations(p.math_turn, gives_back_before_the_mma_is_done)}, {"overwritten while read"}),
        (
            {"load": with_operations(p.load_turn, takes_every_stage_as_free)},
            {"overwritten while read", "barrier broken"},
        ),
        ({"math": with_operations(p.math_turn, reads_without_waiting)}, {"read before arrival", "wrong data"}),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else "",
)
def test_a_fault_is_found(how, kinds):
    assert kind_of(pair(items=(3, 1), **how)) in kinds


def test_arrivals_of_one_cta_alone_do_not_free_a_stage(monkeypatch):
    counts = p.Ring.barriers

    def of_one(ring):
        return {barrier: 1 if barrier.name == "empty" else count for barrier, count in counts(ring).items()}

    monkeypatch.setattr(p.Ring, "barriers", of_one)
    assert kind_of(pair(items=(3, 1))) in {"overwritten while read", "wrong data", "barrier broken"}


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
