"""All-reduces of a few rows, every order of hosts, streams and watchdogs; and what is wrong with them is found."""

from __future__ import annotations

from typing import Any

import pytest

from tilestream.verify import seeded_one_shot as wrong
from tilestream.verify.one_shot import OneShotCase
from tilestream.verify.search import search

ALL = tuple((rank, epoch) for rank in range(2) for epoch in (1, 2, 3))


def cases():
    for epochs in (1, 2, 3, 4, 5):
        yield OneShotCase(epochs=epochs)
    yield OneShotCase(world=3, epochs=2)
    yield OneShotCase(epochs=1, expires=((0, 1),))
    yield OneShotCase(epochs=2, expires=((0, 1), (1, 2)))
    yield OneShotCase(epochs=3, expires=((0, 2),))
    yield OneShotCase(epochs=1, expires=((0, 1),), lost=1)
    yield pytest.param(OneShotCase(epochs=2, expires=((0, 1), (0, 2)), lost=1), marks=pytest.mark.slow)
    yield pytest.param(OneShotCase(epochs=4, expires=((0, 2), (1, 2))), marks=pytest.mark.slow)
    yield pytest.param(OneShotCase(epochs=3, expires=ALL, lost=1), marks=pytest.mark.slow)
    yield pytest.param(OneShotCase(world=3, epochs=1, expires=((0, 1), (1, 1)), lost=2), marks=pytest.mark.slow)


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_every_order_comes_to_its_end_with_the_right_sums(case):
    outcome = search(case.build())
    assert outcome.fault is None, "\n".join(outcome.trace)
    assert outcome.complete


EARLY, OVER = "read before arrival", "overwritten while read"
SEEDED: list[tuple[str, dict[str, Any]]] = [
    (EARLY, {"reduce": wrong.tells_before_multiplied, "epochs": 1}),
    (EARLY, {"reduce": wrong.hears_the_next_rank_alone, "epochs": 1, "world": 3}),
    ("deadlock", {"reduce": wrong.tells_the_next_rank_alone, "epochs": 1, "world": 3}),
    ("deadlock", {"reduce": wrong.tells_when_added, "epochs": 1}),
    (EARLY, {"watch": wrong.overrules_nothing, "epochs": 1, "expires": ((0, 1),)}),
    (EARLY, {"watch": wrong.overrules_afterwards, "epochs": 1, "expires": ((0, 1),)}),
    ("not told", {"watch": wrong.tells_nobody, "epochs": 1, "expires": ((0, 1),)}),
    (OVER, {"slots": 1, "epochs": 2}),
    (OVER, {"slots": 2, "epochs": 3, "expires": ((0, 2),)}),
    (OVER, {"ahead": 2, "epochs": 4, "expires": ((0, 2),)}),
]


@pytest.mark.parametrize(("kind", "change"), SEEDED, ids=[f"{kind}: {', '.join(change)}" for kind, change in SEEDED])
def test_what_is_wrong_is_found(kind, change):
    outcome = search(OneShotCase(**change).build())
    assert outcome.fault is not None, "not found"
    assert outcome.fault.kind == kind, outcome.trace


def test_merged_states_hide_nothing():
    for change in ({"epochs": 2}, {"epochs": 1, "expires": ((0, 1),)}, {"epochs": 2, "slots": 1}):
        case = OneShotCase(**change)
        merged, plain = (search(case.build(reduce)) for reduce in (True, False))
        assert (merged.fault is None) == (plain.fault is None)
