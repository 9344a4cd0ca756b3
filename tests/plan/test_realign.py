"""Operands that are copied before a product: when the plan does so, what it costs, what it leaves."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilestream.core.chunks import Chunks, Incoming
from tilestream.core.gpu_specs import named
from tilestream.plan import plan, plan_problem, realign, tma, tuned
from tilestream.plan.candidate import FREE
from tilestream.plan.limit import INVARIANT
from tilestream.plan.planner import search_space
from tilestream.plan.policy.hopper_costs import costs_of
from tilestream.plan.problem import Problem
from tilestream.plan.realign import MOST_BYTES, candidates, copied_bytes, pitch_of, realigned, refusal
from tilestream.plan.tuned import knobs, matching

H100 = named("h100")
BF16 = {"dtype": "bfloat16", "out_dtype": "bfloat16"}
ODD = {"no_tma": "a has strides (1001, 1) of 2 bytes", "not_by_tma": "ab", "aligned": False, "row_multiples": (2, 2)}


def reasons(made):
    return {refusal.what: refusal.why for refusal in made.refused}


@given(st.integers(1, 40000), st.sampled_from([1, 2, 4]))
def test_rows_of_a_copy_begin_where_tma_takes_them_and_grow_by_an_eighth_at_most(extent, size):
    pitch = pitch_of(extent, size)
    assert pitch >= extent
    assert pitch * size % tma.ALIGNMENT == 0
    if extent * size >= 1024:
        assert pitch * size % 128 == 0
    assert (pitch - extent) * size <= max(15, extent * size / 8)


def test_a_copy_reads_and_writes_each_operand_once():
    problem = Problem(100, 300, 1001, 4, **BF16, **ODD)
    assert pitch_of(1001, 2) == 1024
    assert copied_bytes(problem, "") == (0, 0)
    assert copied_bytes(problem, "a") == (4 * 100 * 1001 * 2, 4 * 100 * 1024 * 2)
    assert copied_bytes(problem, "ab") == (4 * 400 * 1001 * 2, 4 * 400 * 1024 * 2)
    assert copied_bytes(dataclasses.replace(problem, shared_rows=True), "a") == (100 * 1001 * 2, 100 * 1024 * 2)
    once, twice = (realign.seconds(problem, H100, operands) for operands in ("a", "ab"))
    assert 0 == realign.seconds(problem, H100, "") < once < twice
    moved = sum(copied_bytes(problem, "ab")) - sum(copied_bytes(problem, "a"))
    assert twice - once == pytest.approx(moved / (costs_of(H100).copied * H100.bandwidth)), "one launch for both"


def test_what_is_left_is_a_problem_of_the_hopper_kernel():
    problem = Problem(4096, 4096, 1001, **BF16, **ODD)
    assert realigned(problem, "") is problem
    of_a = realigned(problem, "a")
    assert (of_a.not_by_tma, of_a.no_tma, of_a.row_multiples) == ("b", problem.no_tma, (128, 2))
    both = realigned(problem, "ab")
    assert (both.not_by_tma, both.no_tma, both.row_multiples, both.aligned) == ("", "", (128, 128), True)
    short = realigned(Problem(4096, 4096, 65, **BF16, **ODD), "ab")
    assert short.row_multiples == (16, 16), "65 elements would be 128 of a whole line"


@pytest.mark.parametrize(
    ("extents", "layout", "operands"),
    [
        ((4096, 4096, 4097), "nt", "ab"), ((4096, 4097, 4096), "nn", "b"), ((4097, 4096, 4096), "tn", "a"),
        ((4096, 4096, 4097), "nn", "a"), ((4097, 4096, 4097), "tt", "ab"),
    ],
)  # fmt: skip
def test_large_products_are_of_copies(extents, layout, operands):
    made = plan(*extents, dtype="bfloat16", device=H100, layout=layout)
    assert (made.backend, made.realigned) == ("hopper", operands)
    here = plan(*extents, dtype="bfloat16", device=H100, layout=layout, backend="portable")
    assert made.predicted < 0.5 * here.predicted
    times = [f"{1e3 * one.predicted:.3g}" for one in (here, made)]
    names = " and ".join(operands.upper())
    assert reasons(made)["portable"] == (
        f"the cost model expects {times[0]} ms on operands as they lie, {times[1]} ms with {names} copied first"
    )
    assert f"realigned {names} first, " in made.explain()
    assert made.label.startswith(f"{names} realigned, hopper ")
    assert made.problem.no_tma, "the plan is of the operands as they lie"


def test_a_copy_that_costs_more_than_it_gains_is_not_made():
    made = plan(1024, 3184, 17, dtype="bfloat16", device=H100, layout="nt")
    assert (made.backend, made.realigned) == ("portable", "")
    why = reasons(made)["hopper"]
    assert why.startswith("a has strides (17, 1) of 2 bytes")
    assert "with A and B copied first" in why
    forced = plan(1024, 3184, 17, dtype="bfloat16", device=H100, layout="nt", backend="hopper")
    assert (forced.backend, forced.realigned) == ("hopper", "ab")
    assert forced.predicted > made.predicted


def test_a_copy_has_a_most_size_which_the_reason_names():
    rows = MOST_BYTES // (2 * pitch_of(8191, 2))
    fits, more = (Problem(one, 4096, 8191, **BF16, **{**ODD, "not_by_tma": "a"}) for one in (rows, rows + 1))
    assert refusal(fits, H100) == ""
    assert refusal(more, H100) == f"{ODD['no_tma']}; a copy that it can would be 256 MiB, more than 256"
    assert plan_problem(more, device=H100).backend == "portable"
    with pytest.raises(NotImplementedError, match="a copy that it can would be"):
        plan_problem(more, device=H100, backend="hopper")


def test_operands_that_arrive_or_results_that_are_published_are_not_copied_first():
    chunks = Incoming(Chunks.uniform(4096, 512))
    for what in ({"rows": chunks}, {"publishes": chunks}):
        problem = Problem(4096, 4096, 1001, **BF16, **ODD, **what)
        assert refusal(problem, H100) == ODD["no_tma"]
    arriving = plan_problem(Problem(4096, 4096, 1001, **BF16, **ODD, rows=chunks), device=H100)
    assert (arriving.backend, arriving.realigned) == ("portable", "")
    # What TMA can address is not copied either, however its rows lie.
    crossing = Problem(4096, 4096, 4104, **BF16, rows=chunks, row_multiples=(16, 16))
    assert plan_problem(crossing, device=H100).realigned == ""


def test_only_gains_are_candidates_where_tma_could_address_the_operands():
    crossing = Problem(2048, 13312, 15800, **BF16, row_multiples=(16, 16))
    found = list(search_space(crossing, H100))
    as_it_lies = min(one.predicted for one in found if not one.realigned)
    copied = [one for one in found if one.realigned]
    assert {one.realigned for one in copied} == {"a"}, "of B's copy, 420 MB, there is no gain"
    assert max(one.predicted for one in copied) < (1 - realign.LEAST_GAIN) * as_it_lies
    aligned = dataclasses.replace(crossing, row_multiples=(128, 128))
    assert not [one for one in search_space(aligned, H100) if one.realigned]


def test_each_set_of_operands_that_may_gain_is_tried():
    tried = set()

    def make(problem, forced, operands, before):
        tried.add((operands, problem.row_multiples))
        (one,) = [c for c in search_space(Problem(4096, 4096, 4096, **BF16), H100) if c.block == (128, 256, 64)][:1]
        return [dataclasses.replace(one, predicted=before + sum(128 / at for at in problem.row_multiples) * 1e-3)]

    problem = Problem(4096, 4096, 4104, **BF16, row_multiples=(16, 16))
    found = list(candidates(problem, H100, FREE, make))
    for operands in ("a", "b", "ab"):
        assert (operands, tuple(128 if name in operands else 16 for name in "ab")) in tried
    assert min(found, key=lambda one: one.predicted).predicted < 3e-3


def test_a_tuned_plan_says_what_is_copied_and_older_files_still_name_theirs():
    crossing = Problem(2048, 13312, 15800, **BF16, row_multiples=(16, 16))
    found = list(search_space(crossing, H100))
    copied = next(one for one in found if one.realigned)
    assert knobs(copied)["realigned"] == "a"
    assert matching({"knobs": knobs(copied)}, found) is copied
    as_it_lies = next(one for one in found if not one.realigned)
    assert "realigned" not in knobs(as_it_lies)
    assert matching({"knobs": knobs(as_it_lies)}, found) is as_it_lies


@pytest.mark.parametrize("k", [4096, 4097])
def test_the_promise_holds_for_operands_as_they_lie(k):
    """A copy changes no bit of an operand, so rows keep theirs whatever the layout."""
    with_promise = {"dtype": "bfloat16", "device": H100, "invariant": True}
    orders = {
        plan(m, 4097, k, layout=layout, **with_promise).additions for m in (1, 200, 4097) for layout in ("nt", "tt")
    }
    assert len(orders) == 1


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("extents", [(4096, 4096, 1001), (7, 64, 1001)])
def test_what_was_measured_is_planned_whether_it_copies_or_not(extents, backend, monkeypatch, tmp_path):
    monkeypatch.setenv(tuned.ENVIRONMENT, str(tmp_path / "tuned.json"))
    problem = Problem(*extents, **BF16, **ODD)
    one = next(found for found in search_space(problem, H100) if found.backend == backend)
    tuned.forget()
    tuned.save(problem, H100, {"knobs": knobs(one), "us": 1.0, "model_us": 2.0, "plans": 9, "date": "2026-11-24"})
    plan_problem.cache_clear()
    made = plan_problem(problem, device=H100)
    assert (made.backend, knobs(made)) == (backend, knobs(one))
    assert made.why == "fastest of 9 plans that tilestream tune measured here on 2026-11-24"
    other = "portable" if backend == "hopper" else "hopper"
    assert "tilestream tune measured it slower" in reasons(made)[other]
    tuned.forget()
    plan_problem.cache_clear()


TF32 = {"dtype": "float32", "out_dtype": "float32", "tf32": True}
SUMMED_TWICE = {
    "dtype": "float8_e4m3fn", "out_dtype": "bfloat16", "scales": "row", "plain": False, "fast_accum": False,
}  # fmt: skip


@pytest.mark.parametrize("how", [TF32, SUMMED_TWICE], ids=["tf32", "two sums of fp8"])
def test_a_promise_is_kept_for_all_rows_and_strides(how):
    """Also where all rows are too many to be copied; K is no multiple of 16 bytes."""
    for n in (64, 1000, 8192):
        problems = [
            Problem(m, n, 4099, **how, **lies) for m in (1, 128, 8192, 2**19) for lies in (ODD, {"aligned": False})
        ]
        assert len({plan_problem(one, device=H100, limit=INVARIANT).additions for one in problems}) == 1


def test_a_promise_of_copies_is_kept_where_the_cost_model_would_not_copy():
    orders = set()
    for m in (1, 128, 1024, 8192):
        problem = Problem(m, 64, 1024, **TF32, **ODD)
        made = plan_problem(problem, device=H100, limit=INVARIANT)
        orders.add(made.additions)
        assert made.realigned == "ab"
    assert len(orders) == 1
    assert plan_problem(problem, device=H100).backend == "portable"
    assert reasons(made)["portable"] == "it adds in another order than is promised"


def test_every_other_device_copies_nothing():
    for device in ("a100", "b200", "mi300x", "cpu"):
        assert plan(4096, 4096, 1001, dtype="bfloat16", device=device).realigned == ""
