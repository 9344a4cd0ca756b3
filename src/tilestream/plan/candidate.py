"""A way to run a problem: what the policies of all devices make, and compare."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.schedule.schedule import Schedule


@dataclass(frozen=True)
class Candidate:
    """A way to run a problem, and what the device's cost model says it costs.

    Attributes
    ----------
    warps, stages
        Of a worker, and of its ring; 0 where the backend has none.
    """

    variant: str
    block: tuple[int, int, int]
    schedule: Schedule
    seconds: float
    warps: int = 0
    stages: int = 0
