"""Hopper attention's texts, whole, in shares and in strips, take keys in the order that their plans state.

What the order gives is computed apart from the texts: see `key_order`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton")

import key_order
import strips_machine
import test_hopper_attention_text as whole
from test_hopper_attention_text import arriving, check_whole_rows, given, plan_of, run
from test_hopper_invariant_text import exact  # noqa: F401
from test_hopper_strips_text import EDITS as STRIPS

from mutants import engine
from mutants.engine import Edit, at

pytestmark = pytest.mark.usefixtures("exact")
CASES = {
    "full": ((70, 700), {}),
    "causal": ((300, 420), {"causal": True}),
    "window": ((300, 420), {"causal": True, "window": (150, None)}),
    "heads share": ((3, 900, 2), {"heads": (8, 2), "causal": True}),
    "128 columns": ((130, 500), {"dims": (128, 128)}),
    "256 columns": ((130, 500), {"dims": (256, 256), "causal": True}),
}


def made(case, plan, edits: tuple[Edit, ...] = ()) -> np.ndarray:
    """What the unsplit kernel's text gives, as `key_order.outputs`."""
    outs, _ = run(case, plan=plan, edits=edits)
    return np.stack(outs)[None]


@pytest.mark.parametrize("promises", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("name", CASES)
def test_a_tile_takes_keys_as_its_plan_says(name, promises):
    shape, features = CASES[name]
    case = key_order.prepare(given(*shape, **features))
    plan = plan_of(case.problem, promises=promises, splits=1)
    order = plan.key_order
    assert order.downwards
    assert np.array_equal(made(case, plan), key_order.outputs(case, order))
    for other in (replace(order, downwards=False), replace(order, block=order.block // 2)):
        assert not np.array_equal(made(case, plan), key_order.outputs(case, other)), "the values show the order"


@pytest.mark.parametrize("promises", [False, True])
def test_keys_that_arrive_are_taken_as_the_plan_says(promises):
    """From the first on, or, under the promise, as those that are there."""
    case = key_order.prepare(arriving(given(130, 700, causal=True)))
    plan = plan_of(case.problem, promises=promises, splits=1)
    order = plan.key_order
    assert order.downwards == promises
    assert np.array_equal(made(case, plan), key_order.outputs(case, order))
    assert not np.array_equal(made(case, plan), key_order.outputs(case, replace(order, downwards=not promises)))


@pytest.mark.parametrize("splits", [2, 3])
def test_shares_have_the_keys_that_the_plan_says(splits, monkeypatch):
    case, parts = given(70, 900), []
    plan = plan_of(case.problem, splits=splits)
    key_order.prepare(case, plan.key_order)
    monkeypatch.setattr(whole, "joined", lambda outs, *more, join=whole.joined: parts.append(outs) or join(outs, *more))
    made(case, plan)
    found = parts[0].numpy().reshape(splits, 1, 70, 2, -1)
    assert plan.key_order.shares == splits
    assert np.array_equal(found, key_order.outputs(case, plan.key_order))
    assert not np.array_equal(found, key_order.outputs(case, replace(plan.key_order, downwards=False)))
    more = key_order.outputs(case, replace(plan.key_order, shares=splits + 1))
    assert not np.array_equal(found, more[:splits])


@pytest.mark.parametrize("name", ["one query", "several queries", "window"])
def test_strips_take_keys_as_their_plan_says(name):
    shape, features = {
        "one query": ((1, 900), {"heads": (8, 2), "causal": True}),
        "several queries": ((5, 690, 2), {"heads": (8, 2), "causal": True}),
        "window": ((4, 800), {"heads": (4, 2), "causal": True, "window": (450, None)}),
    }[name]
    case = key_order.prepare(given(*shape, **features))
    plan = strips_machine.plan_of(case.problem)
    order = plan.key_order
    out, _ = strips_machine.run(case, plan=plan)
    out = out.reshape(1, case.problem.batch, case.problem.seqlen_q, *out.shape[1:])
    assert order.downwards
    assert np.array_equal(out, key_order.outputs(case, order))
    for other in (replace(order, downwards=False), replace(order, block=order.block // 2)):
        assert not np.array_equal(out, key_order.outputs(case, other))


LOAD, MATH = "tilestream.kernels.hopper.attention_load", "tilestream.kernels.hopper.attention_math"
TILE = "tilestream.kernels.device.attention_tile:locate_tile"
#: Texts whose numbers are as good, in another order.
EDITS = {
    "blocks are loaded from the first on": (
        *at(
            f"{LOAD}:load_keys", engine.replace("(end - 1 - (j - begin)) * C.BLOCK", "j * C.BLOCK"),
            engine.replace("first_value = first_key + C.BLOCK", "first_value = first_key - C.BLOCK"),
        ),
        *at(f"{LOAD}:last_values_of", engine.replace("tile.begin * C.BLOCK", "(tile.end - 1) * C.BLOCK")),
    ),
    "each block is a sum of its own": at(
        f"{MATH}:math_step",
        engine.replace(
            "warpgroup_mma(p, ring.v.index(at.stage), sums.o, is_async=True)",
            "warpgroup_mma(p, ring.v.index(at.stage), 0 * sums.o, is_async=True)",
        ),
        engine.replace(
            "rescale_o(o, rescale, C.COLUMNS, C.LAZY_RESCALE)",
            "rescale_o(o + sums.o, rescale, C.COLUMNS, C.LAZY_RESCALE)",
        ),
    ),
    "the last share is first": at(
        TILE,
        engine.replace(
            "share_of_keys(begin, plain_begin, plain_end, end, extents.shares, share)",
            "share_of_keys(begin, plain_begin, plain_end, end, extents.shares, extents.shares - 1 - share)",
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_a_text_that_takes_keys_otherwise_is_seen(name, monkeypatch):
    """Its numbers are as good: what is compared with float64 does not see it."""
    shape = given(70, 896)  # no block is masked
    plan, parts = plan_of(shape.problem, splits=2 if "share" in name else 1), []
    check_whole_rows(shape, *run(shape, plan=plan, edits=EDITS[name]), most_void=0)
    case = key_order.prepare(shape)
    monkeypatch.setattr(whole, "joined", lambda outs, *more, join=whole.joined: parts.append(outs) or join(outs, *more))
    found = made(case, plan, EDITS[name])
    if parts:
        found = parts[0].numpy().reshape(plan.shares, 1, 70, 2, -1)
    assert not np.array_equal(found, key_order.outputs(case, plan.key_order))


def test_strips_that_take_keys_otherwise_are_seen():
    case = key_order.prepare(given(1, 900, heads=(8, 2), causal=True))
    plan = strips_machine.plan_of(case.problem)
    edits = STRIPS["a sum begins anew in every other stage"]
    out, _ = strips_machine.run(case, plan=plan, edits=edits)
    assert not np.array_equal(out[None, None], key_order.outputs(case, plan.key_order))
