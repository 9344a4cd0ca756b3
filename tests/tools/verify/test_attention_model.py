"""The model of the Hopper attention's rings: what it proves, what it finds, and that it is of the kernel's text."""

from __future__ import annotations

import pytest

from mutants.checker import seeded_bugs
from tilestream_tools.verify import attention, sweep
from tilestream_tools.verify.attention import AttentionCase
from tilestream_tools.verify.attention_protocol import AttentionRing
from tilestream_tools.verify.search import search

#: Small, and whole: searched in seconds; and larger ones.
CASES = list(sweep.attentions("quick"))
LARGE = list(sweep.attentions("full"))[len(CASES) :]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_nothing_is_found(case):
    found = search(case.build())
    assert found.fault is None, (found.fault, found.trace)
    assert found.complete
    assert found.states > 1000


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_nothing_is_found_in_larger_ones(case):
    found = search(case.build())
    assert found.fault is None, (found.fault, found.trace)
    assert found.complete


def test_reductions_hide_nothing_of_a_small_one():
    case = AttentionCase(AttentionRing(1), (1,))
    assert search(case.build(reduce=False), 300_000).fault is None
    bug = next(bug for bug in seeded_bugs() if bug.name == "attention: queries not awaited")
    for reduce in (True, False):
        found = search(AttentionCase(AttentionRing(1), (1,), math=bug.cases[0].math).build(reduce), 300_000)
        assert found.fault is not None
        assert found.fault.kind == "wrong data"


def test_cases_say_what_they_are():
    turns, late, narrow, both, own = (
        next(
            case for case in reversed(CASES)
            if (case.ring.ordered, case.ring.arriving, case.ring.converting, case.ring.own) == how
        )
        for how in (
            (True, False, False, ""), (False, True, False, ""), (False, False, True, ""),
            (True, False, True, ""), (True, False, False, "first"),
        )
    )  # fmt: skip
    assert str(own) == (
        "attention, 2 consumers, in turns, first blocks left out, 2 stages, queries of 1 items, 2 blocks an item"
    )
    assert str(both) == (
        "attention, 2 consumers, in turns, values converted, 2 stages, queries of 1 items, 1 blocks an item"
    )
    assert str(narrow) == ("attention, 2 consumers, values converted, 2 stages, queries of 1 items, 2 blocks an item")
    assert str(turns) == "attention, 2 consumers, in turns, 2 stages, queries of 1 items, 2 blocks an item"
    assert str(late) == "attention, 2 consumers, keys arriving, 2 stages, queries of 1 items, 1 blocks an item"
    assert attention.NUMBERS == 4
