"""A way to run a problem: what the policies of all devices make, and compare."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.core.schedule import Schedule


@dataclass(frozen=True)
class Candidate:
    """A way to run a problem, and what the device's cost model says it costs.

    Attributes
    ----------
    warps, stages
        Of a worker (hopper: of a math loop), and of its ring; 0 where the backend has none.
    swapped
        hopper: whether the tensor cores' rows are B's columns.
    strip
        hopper: columns that go through a C buffer at a time.
    buffers
        hopper: C buffers of a math loop.
    registers
        hopper: of a thread of the load warp, and of the math warps.
    """

    variant: str
    block: tuple[int, int, int]
    schedule: Schedule
    seconds: float
    warps: int = 0
    stages: int = 0
    swapped: bool = False
    strip: int = 0
    buffers: int = 0
    registers: tuple[int, int] = (0, 0)
