"""Which operand a kernel copies itself, by how many workers, and what is said of it."""

from __future__ import annotations

import dataclasses

import pytest

from tilestream.core.chunks import Chunks
from tilestream.core.gpu_specs import named
from tilestream.plan.copies import COPIERS, copied_operand
from tilestream.plan.plan import Plan
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import Incoming, Problem

H100, MI300X = named("h100"), named("mi300x")


def problem(rows: int | None = None, columns: int | None = None, m: int = 4096, n: int = 4096) -> Problem:
    """``None``: that operand is there; else the bytes of a word in which it is offered, 0 where it is not."""
    made = [
        None if word is None else Incoming(Chunks.uniform(size, 512), 1, word)
        for word, size in ((rows, m), (columns, n))
    ]
    return Problem(m, n, 4096, 1, "bfloat16", "bfloat16", *made)


def explained(plan: Plan) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in plan.explain().splitlines() if line.split()[0] == "copies"]


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
@pytest.mark.parametrize(("rows", "columns", "operand"), [(16, None, "rows"), (None, 2, "columns")])
def test_what_is_offered_is_copied_by_the_kernel(backend, schedule, rows, columns, operand):
    plan = plan_problem(problem(rows, columns), None, schedule, device=H100, backend=backend)
    assert (plan.copies, plan.copiers) == (operand, COPIERS)
    who = f"the first {COPIERS} of {plan.workers} workers that run"
    assert explained(plan) == [f"{operand} by the kernel: {who} copy until no piece is left, and then take tiles"]


@pytest.mark.parametrize(("rows", "columns"), [(None, None), (0, None), (0, 0)])
def test_what_is_not_offered_is_not(rows, columns):
    plan = plan_problem(problem(rows, columns), device=H100)
    assert (plan.copies, plan.copiers, explained(plan)) == ("none", 0, [])


def test_of_two_that_arrive_the_one_that_is_offered():
    assert plan_problem(problem(0, 8), device=H100).copies == "columns"


def test_of_two_the_kernel_copies_the_rows_and_says_so():
    plan = plan_problem(problem(16, 16), device=H100)
    assert (plan.copies, plan.copiers) == ("rows", COPIERS)
    assert explained(plan)[1:] == ["a kernel copies one operand: a copy engine copies the columns"]


def test_a_kernel_that_takes_no_copy_items_says_so():
    plan = plan_problem(problem(16), device=MI300X, backend="cdna")
    assert (plan.copies, plan.copiers) == ("none", 0)
    assert explained(plan) == ["the cdna kernel takes no copy items: copy engines copy what arrives"]
    assert copied_operand(problem(16), "cpu") == (
        "none",
        "the cpu kernel takes no copy items: copy engines copy what arrives",
    )


def test_no_more_copiers_than_workers():
    for workers in (1, 3, COPIERS + 1):
        plan = plan_problem(problem(16), workers, "dynamic", device=H100)
        assert plan.copiers == min(workers, COPIERS)


def test_an_offer_makes_another_plan_of_no_other_schedule():
    offered, engine = (plan_problem(problem(word), device=H100) for word in (16, 0))
    assert offered.schedule == engine.schedule
    assert dataclasses.replace(offered, problem=engine.problem, copiers=0) == engine


@pytest.mark.parametrize("copiers", [0, 4])
def test_a_launch_with_too_few_or_too_many_copiers_is_refused(copiers):
    pytest.importorskip("triton")
    from tilestream.launch.gemm_arguments import Layout
    from tilestream.launch.portable.launch import GemmLaunch

    plan = plan_problem(problem(16), 3, "dynamic", device=H100, backend="portable")
    strides = (0, 4096, 1)
    with pytest.raises(ValueError, match=f"^plan: copiers={copiers} of 3 workers; where the kernel makes the copies"):
        GemmLaunch(dataclasses.replace(plan, copiers=copiers), Layout(strides, strides, strides))
