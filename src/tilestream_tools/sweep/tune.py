"""Measuring a problem's best candidates on the present GPU, for `tilestream.plan.tuned`.

::

    the model's choice, and those that it expects to be nearly as fast:  each right, or left out
    a few rounds of all, L2 flushed, in another order each round
    many rounds of the fastest few beside the model's choice: another one must win by `LEAST_GAIN`
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tilestream.core.device import DeviceProperties
from tilestream.plan import tuned
from tilestream.plan.plan import Plan
from tilestream.plan.planner import search_space
from tilestream.plan.problem import Problem
from tilestream_tools.sweep.check import Check
from tilestream_tools.sweep.clock import Call, GpuClock

#: Rounds of all plans, and of those that are measured once more; how many these are.
FIRST_ROUNDS, LAST_ROUNDS, FINALISTS = 7, 40, 5
#: Share by which a plan must be faster than the model's own to be taken: medians of one run differ by less.
LEAST_GAIN = 0.01
#: Problems whose floor is below so many seconds are replayed from graphs.
_GRAPH_BELOW = 50e-6


class Tuned(NamedTuple):
    """What was found for a problem.

    Attributes
    ----------
    plan, model
        The fastest, and the cost model's own choice; the same object where that is the fastest.
    seconds, model_seconds
        Medians, side by side.
    plans
        How many were measured.
    wrong
        Plans that were left out, and why.
    """

    plan: Plan
    model: Plan
    seconds: float
    model_seconds: float
    plans: int
    wrong: list[str]

    def entry(self) -> dict[str, Any]:
        """As `tilestream.plan.tuned.save` takes it."""
        return {
            "knobs": tuned.knobs(self.plan),
            "us": round(1e6 * self.seconds, 2),
            "model_us": round(1e6 * self.model_seconds, 2),
            "plans": self.plans,
            "date": time.strftime("%Y-%m-%d"),
        }


def likely(problem: Problem, device: DeviceProperties, model: Plan, within: float) -> list[Plan]:
    """Plans that the cost model expects to take no more than ``within`` times its own choice; that one first."""
    space = [plan for plan in search_space(problem, device) if tuned.knobs(plan) != tuned.knobs(model)]
    near = [plan for plan in space if plan.predicted <= within * model.predicted]
    return [model, *sorted(near, key=lambda plan: plan.predicted)]


def right(
    plans: Sequence[Plan], a: torch.Tensor, b: torch.Tensor, check: Check,
    failed: Callable[[int, Plan, Exception], object], **given: Any,
) -> dict[str, Call]:  # fmt: skip
    """Calls of those plans that give the right answer, by their place; ``failed`` is told of the others.

    ``given`` goes to `Plan.run` beside A and B.
    """
    out = torch.empty_like(check.peer)
    calls: dict[str, Call] = {}
    for index, plan in enumerate(plans):
        try:
            out.fill_(float("nan"))
            plan.run(a, b, out=out, **given)
            check(out)
        except Exception as error:
            failed(index, plan, error)
        else:
            calls[str(index)] = functools.partial(plan.run, a, b, out=out, **given)
    return calls


def measure(
    plans: Sequence[Plan], a: torch.Tensor, b: torch.Tensor, check: Check, clock: GpuClock,
    tell: Callable[[str], object] = lambda _: None,
) -> Tuned:  # fmt: skip
    """The fastest of some plans for ``a @ b``, the first of which is the cost model's choice.

    Parameters
    ----------
    a, b
        ``[M, K]`` and ``[K, N]``.
    check
        Of the product.
    tell
        Called with a line for people, for each plan that is left out.

    Raises
    ------
    AssertionError
        If the first plan's own answer is wrong: then nothing can be said.
    """
    wrong: list[str] = []

    def failed(index: int, plan: Plan, error: Exception) -> None:
        if not index:
            raise error
        wrong.append(f"{plan.label}: {type(error).__name__}: {error}"[:200])
        tell(f"left out: {wrong[-1]}")

    calls = right(plans, a, b, check, failed)
    graphs = plans[0].floor.seconds < _GRAPH_BELOW
    first = clock.interleave(calls, rounds=FIRST_ROUNDS, warmup=1, graphs=graphs)
    ranked = sorted((name for name in calls if name != "0"), key=first.median)
    final = clock.interleave(
        {name: calls[name] for name in ("0", *ranked[:FINALISTS])}, rounds=LAST_ROUNDS, graphs=graphs
    )
    best = min(final.seconds, key=final.median)
    if final.median("0") <= (1 + LEAST_GAIN) * final.median(best):
        best = "0"
    return Tuned(plans[int(best)], plans[0], final.median(best), final.median("0"), len(calls), wrong)


def tune(
    m: int, n: int, k: int, dtype: torch.dtype, layout: str, device: DeviceProperties, clock: GpuClock,
    within: float = 1.2, tell: Callable[[str], object] = lambda _: None,
) -> Tuned:  # fmt: skip
    """Measure a matmul's likely plans on the current GPU, and save what was found where plans look for it.

    Plans made from then on know it; a call like one that this process has made already goes on as it did.

    Parameters
    ----------
    layout
        As for `tilestream.plan`.
    within
        Only plans that the cost model expects to take no more than so many times its own choice.

    Returns
    -------
    Tuned
    """
    from tilestream.core.operands import Epilogue, GemmOperands
    from tilestream.ops import gpu
    from tilestream.plan.planner import plan_problem

    a, b = (
        torch.randn(extents if letter == "n" else extents[::-1], device=clock.device).to(dtype)
        for extents, letter in zip(((m, k), (k, n)), layout, strict=True)
    )
    a, b = (x if letter == "n" else x.t() for x, letter in zip((a, b), layout, strict=True))
    peer = torch.mm(a, b)
    # The problem as an op makes it of such operands: what plans are looked up by.
    problem = gpu.find(GemmOperands(a, b, peer, Epilogue()), gpu.How()).plan.problem
    model = plan_problem(problem, device=device, consult=False)
    found = measure(likely(problem, device, model, within), a, b, Check.of_product(a, b, peer), clock, tell)
    tuned.save(problem, device, found.entry())
    plan_problem.cache_clear()
    return found
