"""Which operand a kernel copies itself, by how many workers, and what is said of it."""

from __future__ import annotations

import dataclasses

import pytest
from made_up import BF16, lines

from tilestream.core.chunks import Chunks
from tilestream.core.gpu_specs import named
from tilestream.plan.plan import COPIERS, copied_operand
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import Incoming, Problem

H100 = named("h100")


def problem(*words: int | None) -> Problem:
    """For A's rows and B's columns: None where it is there, else the bytes of a word that is offered, 0 for none."""
    made = (None if word is None else Incoming(Chunks.uniform(4096, 512), 1, word) for word in words)
    return Problem(4096, 4096, 4096, **BF16, **dict(zip(("rows", "columns"), made, strict=False)))


@pytest.mark.parametrize("backend", ["hopper", "portable"])
@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
@pytest.mark.parametrize(("words", "operand"), [((16,), "rows"), ((None, 2), "columns")])
def test_what_is_offered_is_copied_by_the_kernel(backend, schedule, words, operand):
    plan = plan_problem(problem(*words), None, schedule, device=H100, backend=backend)
    assert (plan.copies, plan.copiers) == (operand, COPIERS)
    copiers = f"the first {COPIERS} of {plan.workers} workers that run"
    what = f"{operand} by the kernel: {copiers} copy until no piece is left, and then take tiles"
    assert lines(plan, "copies") == [what]


@pytest.mark.parametrize(
    ("words", "name", "backend", "operand", "said"),
    [
        ((), "h100", None, "none", []),
        ((0,), "h100", None, "none", []),
        ((0, 0), "h100", None, "none", []),
        ((0, 8), "h100", None, "columns", []),
        ((16, 16), "h100", None, "rows", ["a kernel copies one operand: a copy engine copies the columns"]),
        ((16,), "mi300x", "cdna", "none", ["the cdna kernel takes no copy items: copy engines copy what arrives"]),
    ],
)
def test_one_operand_at_most_and_none_that_is_not_offered(words, name, backend, operand, said):
    plan = plan_problem(problem(*words), device=named(name), backend=backend)
    copiers = 0 if operand == "none" else COPIERS
    assert (plan.copies, plan.copiers, lines(plan, "copies")[bool(copiers) :]) == (operand, copiers, said)


def test_the_cpu_takes_no_copy_items():
    why = "the cpu kernel takes no copy items: copy engines copy what arrives"
    assert copied_operand(problem(16), "cpu") == ("none", why)


def test_no_more_copiers_than_workers():
    for workers in (1, 3, COPIERS + 1):
        plan = plan_problem(problem(16), workers, "dynamic", device=H100)
        assert plan.copiers == min(workers, COPIERS)


def test_an_offer_makes_another_plan_of_no_other_schedule():
    offered, engine = (plan_problem(problem(word), device=H100) for word in (16, 0))
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
