"""The model of the Hopper attention's rings: what it proves, what it finds, and that it is of the kernel's text."""

from __future__ import annotations

import inspect

import pytest

from tilestream.verify import attention, attention_protocol, sweep
from tilestream.verify.attention import AttentionCase
from tilestream.verify.attention_protocol import AttentionRing
from tilestream.verify.search import search

#: Small, and whole: searched in seconds; and larger ones.
CASES = list(sweep.attentions("quick"))
LARGE = list(sweep.attentions("full"))[len(CASES) :]


def changed(function, *change: str):
    """A turn whose text is changed in one place."""
    text = inspect.getsource(function)
    assert text.count(change[0]) >= 1
    names = dict(vars(attention_protocol))
    exec(text.replace(change[0], change[1], 1), names)
    return names[function.__name__]


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


WAIT_K = 'yield WaitBarrier(Barrier("k_full", ahead.at), ahead.phase)'
RETIRED_K = '        yield Retire(1)\n        yield Arrive(Barrier("k_empty", ahead.at))\n'
RETIRED_V = '        yield Retire(0)\n        yield Arrive(Barrier("v_empty", stage.at))\n        stage, turn'
Q_EMPTY = '    yield Arrive(Barrier("q_empty", q_at))'
#: In which of the loops something is changed, what, by which rings it is found, and the fault that it is.
SEEDS = {
    "K is not waited for": ("math", (WAIT_K, "pass"), 1, (2,), "wrong data"),
    "V's stage is given back before it is read": (
        "math", (RETIRED_V, "\n".join([*RETIRED_V.split("\n")[1::-1], RETIRED_V.split("\n")[2]])), 1, (2,),
        "overwritten while read",
    ),
    "K's stage is given back before it is read": (
        "math", (RETIRED_K, "\n".join([*RETIRED_K.split("\n")[1::-1], ""])), 1, (3,), "overwritten while read"
    ),
    "queries are given back at the start": (
        "math", ("    blocks = k_steps(item)\n", f"    blocks = k_steps(item)\n{Q_EMPTY}\n"), 1, (1,), "wrong data"
    ),
    "the slot is given back at the start": (
        "math", ("    q_at = who", '    yield Arrive(Barrier("item_empty", slot.at))\n    q_at = who'), 1, (1,), ""
    ),
    "queries without blocks are not given back": (
        "math", (Q_EMPTY, f"    if blocks:\n    {Q_EMPTY}"), 1, (0, 1), "deadlock"
    ),
    "K's stage is awaited in the other phase": (
        "load", ('_fill("k", k.at, k.phase', '_fill("k", k.at, k.phase ^ 1'), 1, (1,), "deadlock"
    ),
    "no step over a stage": ("load", ("v = v.next(ring.depth)", "pass"), 2, (2,), ""),
    "the last V is not loaded": (
        "load", ("for block in range(blocks + 1)", "for block in range(blocks)"), 1, (1,), "deadlock"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEDS)
def test_a_seeded_fault_is_found(name):
    loop, change, depth, counts, kind = SEEDS[name]
    programs = {loop: changed(getattr(attention_protocol, f"{loop}_turn"), *change)}
    found = search(AttentionCase(AttentionRing(depth), counts, **programs).build(), 400_000)
    assert found.fault is not None
    assert not kind or found.fault.kind == kind, (found.fault, found.trace[-3:])
    assert found.trace


def test_turns_that_are_not_handed_on_are_a_deadlock():
    program = changed(
        attention_protocol.math_turn, 'yield Arrive(Barrier("order", (who + 1) % ring.consumers))', "pass"
    )  # fmt: skip
    found = search(AttentionCase(AttentionRing(2, ordered=True), (3,), math=program).build(), 400_000)
    assert found.fault is not None
    assert found.fault.kind == "deadlock"


def test_an_item_that_is_not_finished_is_missed():
    program = changed(attention_protocol.math_turn, "    yield Done(item)\n", "")
    found = search(AttentionCase(AttentionRing(1), (1,), math=program).build(), 400_000)
    assert found.fault is not None
    assert found.fault.kind in ("missing work", "wrong data")


def test_reductions_hide_nothing_of_a_small_one():
    case = AttentionCase(AttentionRing(1), (1,))
    assert search(case.build(reduce=False), 300_000).fault is None
    program = changed(attention_protocol.math_turn, 'yield WaitBarrier(Barrier("q_full", q_at), q.phase)', "pass")
    for reduce in (True, False):
        found = search(AttentionCase(AttentionRing(1), (1,), math=program).build(reduce), 300_000)
        assert found.fault is not None
        assert found.fault.kind == "wrong data"


def test_cases_say_what_they_are():
    assert str(CASES[-1]) == "attention, 2 consumers, in turns, 2 stages, queries of 1 items, 2 blocks an item"
    assert attention.NUMBERS == 4
