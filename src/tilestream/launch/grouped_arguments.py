"""What the grouped kernels of all backends are told beside a plain product's layout."""

from __future__ import annotations

from typing import NamedTuple

from tilestream.plan.plan import Plan
from tilestream.plan.problem import GroupedProblem

#: Lanes that look at offsets, at least: those of a warp.
_LEAST_LANES = 32


class Bias(NamedTuple):
    """How a bias lies."""

    along: str = "none"  # ``"columns"`` or ``"rows"`` of the output; ``"none"``: there is no bias
    #: batch, step: strides, from one group's to the next, and inside of it.
    batch: int = 0
    step: int = 0


def lanes_of(groups: int) -> int:
    """A power of 2 that is at least the number of groups."""
    return max(_LEAST_LANES, 1 << (groups - 1).bit_length())


def problem_of(plan: Plan) -> GroupedProblem:
    """The problem of a plan of groups."""
    assert isinstance(plan.problem, GroupedProblem)
    return plan.problem
