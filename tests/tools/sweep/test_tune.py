"""Tuning on a device that is not there: which plan is kept, when, and what is left out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tilestream.plan import DeviceProperties, Problem, plan_problem, tuned
from tilestream_tools.sweep import tune
from tilestream_tools.sweep.check import Check
from tilestream_tools.sweep.clock import Timing

HZ = 1.83e9
H100 = DeviceProperties(
    "an H100", "portable", 132, 256 * HZ, 3.35e12, "a stub", "sm_90", 232448,
    (("float16", 4096 * HZ), ("bfloat16", 4096 * HZ), ("tf32", 2048 * HZ), ("fp8", 8192 * HZ)),
)  # fmt: skip
A, B = torch.randn(40, 24), torch.randn(24, 30)


class Plan:
    """Gives an answer, right or not, in so many seconds."""

    floor = SimpleNamespace(seconds=1e-3)

    def __init__(self, label: str, seconds: float, wrong: float = 0.0) -> None:
        self.label, self.seconds, self.wrong, self.runs = label, seconds, wrong, 0

    def run(self, a, b, out):
        self.runs += 1
        return out.copy_(a @ b + self.wrong)


class Clock:
    """Says what the plans say; notes who is measured with whom."""

    device = "cpu"

    def __init__(self) -> None:
        self.measured: list[list[str]] = []

    def interleave(self, functions, *, rounds, warmup=3, graphs=False):
        plans = {name: call.func.__self__ for name, call in functions.items()}
        self.measured.append([plan.label for plan in plans.values()])
        return Timing({name: [plan.seconds] * rounds for name, plan in plans.items()}, "eager")


def measured(*plans, clock=None):
    return tune.measure(plans, A, B, Check.of_product(A, B, A @ B), clock or Clock())


def test_the_fastest_is_kept():
    model, slow, fast = Plan("model", 1.0), Plan("slow", 1.2), Plan("fast", 0.9)
    found = measured(model, slow, fast)
    assert (found.plan, found.model, found.seconds, found.model_seconds, found.plans) == (fast, model, 0.9, 1.0, 3)


def test_the_models_choice_is_kept_where_another_is_hardly_faster():
    found = measured(model := Plan("model", 1.0), Plan("hardly faster", 0.995))
    assert (found.plan, found.seconds) == (model, 1.0)


def test_the_fastest_few_are_measured_once_more_beside_the_models_choice():
    clock = Clock()
    plans = [Plan("model", 5.0), *(Plan(str(i), float(i)) for i in range(1, 12))]
    measured(*plans, clock=clock)
    assert clock.measured == [[plan.label for plan in plans], ["model", "1", "2", "3", "4", "5"]]


def test_a_plan_that_is_wrong_or_raises_is_left_out_and_told():
    told = []
    broken = Plan("broken", 0.1)
    broken.run = None
    plans = [Plan("model", 1.0), Plan("wrong", 0.1, wrong=0.1), broken, Plan("NaN", 0.1, wrong=float("nan"))]
    found = tune.measure(plans, A, B, Check.of_product(A, B, A @ B), Clock(), told.append)
    assert found.plan is plans[0]
    assert [line.split(":")[0] for line in found.wrong] == ["wrong", "broken", "NaN"]
    assert told == [f"left out: {line}" for line in found.wrong]


def test_nothing_is_said_where_the_models_own_choice_is_wrong():
    with pytest.raises(AssertionError, match="wrong answer"):
        measured(Plan("model", 1.0, wrong=1.0), Plan("right", 1.0))


def test_likely_plans_are_the_models_choice_and_those_expected_to_be_near():
    problem = Problem(2048, 6144, 4096, dtype="bfloat16", out_dtype="bfloat16")
    model = plan_problem(problem, device=H100, consult=False)
    near, all_of_them = (tune.likely(problem, H100, model, within) for within in (1.1, 1e9))
    assert near[0] is all_of_them[0] is model
    assert 2 <= len(near) < len(all_of_them)
    assert all(plan.predicted <= 1.1 * model.predicted for plan in near)
    kept = [str(tuned.knobs(plan)) for plan in all_of_them]
    assert len(set(kept)) == len(kept), "an entry names one plan"
