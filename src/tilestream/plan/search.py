"""Every plan that the cost model chooses between: what it is measured against, and fitted to."""

from __future__ import annotations

from collections.abc import Iterator

from tilestream.core.device import DeviceProperties
from tilestream.core.schedule import Kind
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy import hopper, portable
from tilestream.plan.problem import Problem

_KINDS: tuple[Kind, ...] = ("dynamic", "stream_k")


def search_space(problem: Problem, device: DeviceProperties, workers: int | None = None) -> Iterator[Plan]:
    """The plans among which `plan` takes the one that its cost model expects to be the fastest, on a GPU.

    Raises
    ------
    NotImplementedError
        If no kernel does such a problem.
    """
    count = workers or device.workers
    if hopper.refusal(problem, device):
        found, backend = portable.candidates(problem, device, count, kinds=_KINDS), "portable"
    else:
        found, backend = hopper.candidates(problem, device, count, kinds=_KINDS, auto=True), "hopper"
    for candidate in found:
        yield of_candidate(problem, device, backend, candidate, "one of the search space")
