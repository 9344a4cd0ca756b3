"""The floor: the least time of any implementation on a device."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.core.device import DeviceProperties
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.problem import Problem


@dataclass(frozen=True)
class Floor:
    """The roofline's two bounds (Williams, Waterman, Patterson, CACM 2009)."""

    #: operations, bytes: the number of operations, and the least number of bytes to move.
    operations: int
    bytes: int
    #: compute, memory: the seconds of the operations and of the bytes at the device's peaks.
    compute: float
    memory: float

    @classmethod
    def of(cls, problem: Problem | AttentionProblem, device: DeviceProperties, workers: int) -> Floor:
        """The floor of ``problem`` on ``workers`` of the device's workers."""
        operations, moved = problem.operations, problem.bytes
        return cls(operations, moved, operations / device.peak(problem.kind, workers), moved / device.bandwidth)

    @property
    def seconds(self) -> float:
        """The larger of both bounds."""
        return max(self.compute, self.memory)

    @property
    def binds(self) -> str:
        """The larger bound's name: ``operations`` or ``bytes``."""
        return "operations" if self.compute >= self.memory else "bytes"

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.operations / self.bytes if self.bytes else 0.0
