"""Attention whose values are taken in strips has the bits of the Hopper kernel, by the texts of both in float32."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("triton")

import strips_machine
from test_hopper_attention_text import check_whole_rows, given, plan_of, run
from test_hopper_invariant_text import exact  # noqa: F401

from mutants.engine import at, delete, replace

CASES = {
    "one query": ((1, 300), {"heads": (8, 2), "causal": True}),
    "a batch": ((1, 300, 3), {"heads": (4, 1)}),
    "several queries": ((5, 290), {"heads": (8, 2), "causal": True}),
    "many rows": ((33, 270), {"heads": (2, 2), "causal": True}),
    "all of a prompt": ((40, 40), {"heads": (2, 2), "causal": True}),
    "more queries than keys": ((50, 20), {"heads": (2, 2), "causal": True}),
    "top left": ((9, 260), {"heads": (4, 2), "causal": "top_left"}),
    "window": ((4, 400), {"heads": (4, 2), "causal": True, "window": (150, None)}),
    "a window of one block": ((2, 500), {"heads": (4, 2), "causal": True, "window": (30, None)}),
    "as many blocks as stages": ((1, 1024), {"heads": (4, 2), "causal": True}),
    "two rounds of stages, and more": ((2, 2100), {"heads": (4, 2), "causal": True}),
    "128 columns": ((2, 300), {"heads": (4, 2), "causal": True, "dims": (128, 128)}),
    "80 columns": ((2, 300), {"heads": (4, 2), "causal": True, "dims": (80, 80)}),
    "more columns of keys": ((2, 300), {"heads": (4, 2), "causal": True, "dims": (128, 64)}),
    "sinks": ((2, 300), {"heads": (4, 2), "causal": True, "sinks": True}),
    "lengths": ((1, (300, 0, 1, 129), 4), {"heads": (4, 2), "how": "lengths", "causal": True}),
    "small pages": ((2, (300, 131), 2), {"heads": (4, 2), "how": "paged", "causal": True}),
    "large pages": ((2, (300, 131), 2), {"heads": (4, 2), "how": "paged", "page": 128, "causal": True}),
    "a window in pages": ((2, (390, 131), 2), {"heads": (4, 2), "how": "paged", "window": (150, 0)}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_the_kernels_bits(name, exact):  # noqa: F811
    shape, features = CASES[name]
    case = given(*shape, **features)
    outs, lses = run(case, plan=plan_of(case.problem, promises=True, splits=1))
    out, lse = strips_machine.run(case)
    assert np.array_equal(out, np.concatenate(outs))
    assert np.array_equal(lse, np.concatenate(lses))
    whole = [one.reshape(case.problem.batch, -1, *one.shape[1:]) for one in (out, lse)]
    check_whole_rows(case, *map(list, whole), most_void=0)


def test_a_step_has_the_bits_of_the_prompts_last_row(exact):  # noqa: F811
    """The unsplit kernel computes the prompt, in tiles of 128 rows, and strips the step: alone, and in a batch."""
    prompt = given(300, 300, heads=(4, 2), causal=True)
    (want,), (want_lse,) = run(prompt, plan=plan_of(prompt.problem, promises=True, splits=1))
    for batch, place in ((1, 0), (3, 1)):
        for queries in (1, 7):
            step = given(queries, 300, batch, heads=(4, 2), causal=True)
            step.operands.q[place].copy_(prompt.operands.q[0, -queries:])
            step.operands.k[place].copy_(prompt.operands.k[0])
            step.operands.v[place].copy_(prompt.operands.v[0])
            out, lse = strips_machine.run(step)
            mine = slice(place * queries, (place + 1) * queries)
            assert np.array_equal(out[mine], want[-queries:])
            assert np.array_equal(lse[mine], want_lse[-queries:])


HOPPER = "tilestream.kernels.hopper.attention_strips"
#: Sums in an order that depends on what is beside a row, or in another than the kernel's. Their values are as good.
EDITS = {
    "a sum begins anew in every other stage": at(
        f"{HOPPER}:add_stages",
        replace("o * rescale[:, None]", "(stage % 2) * o * rescale[:, None]"),
        replace(
            "row_sum = row_sum * rescale + more",
            "row_sum, rest = row_sum * rescale + more, (1 - stage % 2) * o * rescale[:, None]",
        ),
        replace("warpgroup_mma_wait(...)", "warpgroup_mma_wait(0, (product,)) + rest"),
    ),
    "the running maximum leaves out the block before": at(
        f"{HOPPER}:running_max", replace("range(block + 1, end, C.BLOCK)", "range(block + 2, end, C.BLOCK)")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_another_order_is_found(name, exact):  # noqa: F811
    # Many numbers: rounding to 16 bits hides most differences of a float32's last bit.
    case = given(4, 1000, 2, heads=(16, 2), dims=(64, 128), causal=True)
    outs, lses = run(case, plan=plan_of(case.problem, promises=True, splits=1))
    out, lse = strips_machine.run(case, edits=EDITS[name])
    if "maximum" not in name:
        whole = [one.reshape(case.problem.batch, -1, *one.shape[1:]) for one in (out, lse)]
        check_whole_rows(case, *map(list, whole), most_void=0)
    assert not (np.array_equal(out, np.concatenate(outs)) and np.array_equal(lse, np.concatenate(lses)))


WAIT = "wait_for_groups({})"
#: Copies and instructions that are not kept apart.
RACES = {
    "copies are a block further ahead": ("a barrier stands between", replace("STAGES - 2", "STAGES - 1")),
    "a group more is on the way": ("has landed", replace(WAIT.format("AHEAD - 1"), WAIT.format("AHEAD"), 2)),
    "no barrier": ("behind the barrier", delete("barrier()", 2)),
    "no fence in the loop": ("a fence stands between", delete("fence_async_shared()", 2, 1)),
    "no fence before the loop": ("a fence stands between", delete("fence_async_shared()", 2, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_found(name, exact):  # noqa: F811
    says, edit = RACES[name]
    case = given(1, 1100, heads=(2, 1), causal=True)
    with pytest.raises(AssertionError, match=says):
        strips_machine.run(case, edits=at(f"{HOPPER}:add_stages", edit))
