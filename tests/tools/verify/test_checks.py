"""Checks of the models are checks: with a check that does nothing, or the wrong thing, the right protocol fails."""

from __future__ import annotations

import pytest
from exploring import explored, kind_of

from tilestream.core.gate import Gate, See
from tilestream.core.protocols import gather
from tilestream_tools.verify import barriers
from tilestream_tools.verify.barriers import RingMemory
from tilestream_tools.verify.copies import CopyCase
from tilestream_tools.verify.faults import Fault
from tilestream_tools.verify.gather import _brought
from tilestream_tools.verify.oracle import Oracle
from tilestream_tools.verify.partials import Partials
from tilestream_tools.verify.product import ProductCase, ProductModel
from tilestream_tools.verify.protocol import Ring
from tilestream_tools.verify.ring import RingCase, RingModel
from tilestream_tools.verify.shared_ring import Arrive, Await, Copy, SharedCase, SharedRing
from tilestream_tools.verify.sources import SourcesCase
from tilestream_tools.verify.sweep import matmul
from tilestream_tools.verify.words import Words
from tilestream_tools.verify.workers import WorkersModel

PIVOTED = matmul("dynamic", 2, 2, bounds=(0, 3, 4), pivot=1)
COUNTED = matmul("stream_k", 2, 1, k=2)
DRAINED = matmul("dynamic", 2, 2, bounds=(0, 3, 4), pivot=1, drain="reset")
SPLIT = matmul("stream_k", 2, 1, bounds=(0, 1, 2), k=2, drain="reset")
UNREAD = matmul("dynamic", 1, 1, bounds=(0, 0, 2), drain="reset")
FIXUP = matmul("stream_k", 2, 1, k=2, drain="poison", fixup=True)
HELD = matmul("stream_k", 2, 1, bounds=(0, 1, 2), k=2, drain="poison", fixup=True)
RING = RingCase(Ring(2, 2), (1, 2))
STRIPS = RingCase(Ring(2, 2, strips=2), (1,), split=True)
PRODUCT = ProductCase(matmul("dynamic", 1, 2, bounds=(0, 2, 4), k=2, drain="reset"), Ring(2, 1))


def model_of(case):
    return {RingCase: "ring", ProductCase: "product"}.get(type(case), "workers")


@pytest.mark.parametrize(
    "case", [PIVOTED, COUNTED, DRAINED, SPLIT, UNREAD, FIXUP, HELD, RING, STRIPS, PRODUCT], ids=str
)
def test_right_protocols_pass(case):
    assert kind_of(case, model_of(case)) is None


def nothing(*_, **__):
    return None


def counts_only(self, pid, op, answer, m):
    m[self.partials.count_of(op.item)] = (answer + 1) % op.item.parts


def wrapped(of, name, instead):
    """``instead``, given the real function first."""
    real = getattr(of, name)
    return lambda *given: instead(real, *given)


def number_in_the_slot(real, self, who, item, nan, m):
    real(self, who, item, False, m)
    m[self.poisoned] |= nan << self.position[item.tile]


def nan_in_every_slot(real, self, who, item, nan, m):
    real(self, who, item, True, m)
    m[self.poisoned] = 0


def all_but(word):
    def reset(real, self, pid, op, answer, m):
        if op.word != word:
            real(self, pid, op, answer, m)

    return wrapped(WorkersModel, "_reset", reset)


def one_more(real, self, pid, op, answer, m):
    real(self, pid, op, answer, m)
    if answer is not None:
        m[self.left + answer.tile] += 4


def forgets_arrivals(real, self, pid, op, answer, m):
    n = m.copy()
    n[self.arrived] = 0
    real(self, pid, op, answer, n)


def one_arrival_more(real, self):
    return {barrier: count + (barrier.name == "empty") for barrier, count in real(self).items()}


@pytest.mark.parametrize(
    ("of", "name", "instead", "case", "kind"),
    [
        (Oracle, "needs", lambda self, _: (1 << self.chunks) - 1, PIVOTED, "read before arrival"),
        (Gate, "needs", lambda self, _: (), PIVOTED, "read before arrival"),
        (WorkersModel, "_count", WorkersModel._add, COUNTED, "count not restored"),
        (WorkersModel, "_count", counts_only, COUNTED, "partial not visible"),
        (WorkersModel, "_take", nothing, PIVOTED, "double work"),
        (WorkersModel, "_compute", nothing, COUNTED, "partial not visible"),
        (WorkersModel, "_compute", nothing, matmul("dynamic", 1, 1), "missing work"),
        (WorkersModel, "_poison", nothing, DRAINED, "missing work"),
        (WorkersModel, "_poison", nothing, SPLIT, "partial not visible"),
        (Partials, "write", wrapped(Partials, "write", number_in_the_slot), SPLIT, "poison lost"),
        (Partials, "write", wrapped(Partials, "write", nan_in_every_slot), SPLIT, "wrong data"),
        *((WorkersModel, "_reset", all_but(w), DRAINED, "not reset") for w in ("counter", "exits", "abort", "signals")),
        (WorkersModel, "_quarantine", nothing, DRAINED, "not reset"),
        (Gate, "every", lambda self: (See(0, 1),), UNREAD, "reset too early"),
        (Words, "_write", nothing, FIXUP, "partial not visible"),
        (Words, "_add", nothing, FIXUP, "missing work"),
        (Words, "_restore", nothing, FIXUP, "count not restored"),
        (Words, "_reduce", nothing, FIXUP, "missing work"),
        (Partials, "hold", wrapped(Partials, "hold", number_in_the_slot), HELD, "poison lost"),
        (RingMemory, "_retire", nothing, RING, "wrong data"),
        (RingModel, "environment", lambda self, m: [], RING, "deadlock"),
        (RingModel, "_next", wrapped(RingModel, "_next", one_more), RING, "wrong data"),
        (Ring, "barriers", wrapped(Ring, "barriers", one_arrival_more), RING, "ring in use"),
        (ProductModel, "_load", wrapped(ProductModel, "_load", forgets_arrivals), PRODUCT, "read before arrival"),
    ],
)
def test_a_broken_check_is_noticed(of, name, instead, case, kind, monkeypatch):
    monkeypatch.setattr(of, name, instead)
    assert kind_of(case, model_of(case)) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [("drain", "left too early"), ("fill", "wrong data"), ("fence", "read before arrival"), ("store", "missing work")],
)
def test_an_operation_on_output_buffers_that_does_nothing_is_noticed(name, kind, monkeypatch):
    idle = {op: nothing for op, perform in barriers.MEANING.items() if perform.__name__ == name}
    monkeypatch.setattr(barriers, "MEANING", barriers.MEANING | idle)
    assert kind_of(STRIPS, "ring") == kind


def test_a_truth_that_is_told_what_the_slot_is_told_sees_no_lost_poison(monkeypatch):
    hand_in = WorkersModel._hand_in
    monkeypatch.setattr(WorkersModel, "_hand_in", lambda self, pid, op, m, nan: hand_in(self, pid, op, m, False))
    assert kind_of(SPLIT) is None


def test_leaving_with_copies_in_flight_is_a_fault():
    def leaves_copies_behind(ring, item):
        yield Copy(0, item, 0)

    assert kind_of(SharedCase(SharedRing(), ((1, False),), leaves_copies_behind), "shared") == "left too early"


def test_a_launch_that_leaves_a_chunk_without_its_signal_is_a_fault():
    model = CopyCase(workers=1, bounds=(0, 1), per_chunk=1, launches=1).build()
    m = model.memory()
    m[model._written] = 1
    with pytest.raises(Fault, match="without its signal"):
        model._check_end(1, m)
    m[model._signals] = 1
    model._check_end(1, m)


def test_only_a_barriers_arrival_has_two_answers_that_histories_are_merged_by():
    model = SharedCase(SharedRing(), ((1, False),)).build()
    assert [len(model.domain(op, None)) for op in (Arrive(), Await(0))] == [2, 1]


def test_signals_come_again_where_the_case_says_so():
    cases = [SourcesCase(((1,),), twice=twice) for twice in (False, True)]
    once, twice = (len(explored(case.build())[0]) for case in cases)
    assert once < twice


def test_deadlines_of_sources_pass_where_the_case_says_so():
    says = "the deadline expires, abort is set"
    for expires in (False, True):
        _, lines = explored(SourcesCase(((1,),), expires=expires).build())
        assert any(says in line for line in lines) == expires


def test_a_gather_whose_own_rows_are_brought_copies_them_behind_all_else():
    fill, filled, others = gather.Fill(0, 1), gather.Filled(0, 1), [gather.Break(), gather.Done(1)]
    turn = (op for op in (others[0], fill, filled, others[1]))
    assert list(_brought(turn)) == [*others, fill, filled]
