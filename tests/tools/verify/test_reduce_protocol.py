"""All-reduces of a few rows: every order of hosts, streams and watchdogs."""

from __future__ import annotations

import pytest

from mutants.checker import seeded_bugs
from tilestream_tools import verify
from tilestream_tools.verify.one_shot import OneShotCase
from tilestream_tools.verify.search import search


@pytest.mark.parametrize("case", verify.configurations("reduce", "quick"), ids=str)
def test_every_order_comes_to_its_end_with_the_right_sums(case):
    outcome = search(case.build())
    assert outcome.fault is None, "\n".join(outcome.trace)
    assert outcome.complete


def test_merged_states_hide_nothing():
    one_slot = next(bug for bug in seeded_bugs() if bug.name == "one slot for all calls").cases[-1]
    for case in (OneShotCase(epochs=2), OneShotCase(epochs=1, expires=((0, 1),)), one_slot):
        merged, plain = (search(case.build(reduce)) for reduce in (True, False))
        assert (merged.fault is None) == (plain.fault is None)
