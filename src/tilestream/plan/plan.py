"""`Plan`: the frozen answer to "how do we run this problem on this device"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilestream.core.chunks import Arriving
from tilestream.core.device import DeviceProperties
from tilestream.core.gate import Gate
from tilestream.core.schedule import Schedule
from tilestream.plan.candidate import Candidate
from tilestream.plan.copies import COPIERS, Copies, copied_operand
from tilestream.plan.explain import explain
from tilestream.plan.hooks import hooks
from tilestream.plan.problem import Problem, gate_of
from tilestream.plan.roofline import Floor

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Refusal:
    """Something that was considered and not taken, and why."""

    what: str
    why: str


@dataclass(frozen=True)
class Plan:
    """How a problem is run: every knob, in one place.

    Attributes
    ----------
    problem
        Extents, dtypes, arrivals.
    device
        What the plan was made for.
    backend
        Which package of `tilestream.kernels` runs it.
    variant
        ``workers``: persistent workers, one intra-op thread each. ``inline``: one tile, in the calling thread with
        torch's own threads, where starting workers would cost more than it wins. ``persistent``: on a GPU, resident
        programs, one a worker. Of those on Hopper, ``cooperative``, ``ping_pong`` and ``single``: see
        `tilestream.kernels.hopper.gemm`. Of those on CDNA, ``direct`` and ``staged``: see
        `tilestream.kernels.cdna.ring`.
    block
        ``(block_m, block_n, block_k)``: a tile's rows and columns, and the length of a K step.
    schedule
        Schedule, raster, workers, queues.
    why
        Why this and not another.
    refused
        What else was considered.
    predicted
        Seconds the cost model expects, with everything arrived.
    warps, stages
        GPUs: warps of a worker (Hopper: of a math loop), stages of its ring.
    swapped
        Hopper: whether the tensor cores' rows are B's columns, and their columns A's rows.
    strip
        Hopper: columns of the accumulator that go through a C buffer at a time.
    buffers
        Hopper: C buffers of a math loop.
    copiers
        Workers that copy the operand whose copies the kernel makes itself, until no piece is left.
    registers
        Hopper: of a thread of the load warp, and of the math warps.
    """

    problem: Problem
    device: DeviceProperties
    backend: str
    variant: str
    block: tuple[int, int, int]
    schedule: Schedule
    why: str
    refused: tuple[Refusal, ...]
    predicted: float
    warps: int = 0
    stages: int = 0
    swapped: bool = False
    strip: int = 0
    buffers: int = 0
    copiers: int = 0
    registers: tuple[int, int] = (0, 0)

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.block[:2]

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.schedule.workers

    @property
    def floor(self) -> Floor:
        """What cannot be gone below on this device."""
        return Floor.of(self.problem, self.device, self.device.workers if self.variant == "inline" else self.workers)

    @property
    def gate(self) -> Gate | None:
        """What items wait for; None, and then no gate code runs, where all is there at launch."""
        return gate_of(self.problem, self.tile)

    @property
    def copies(self) -> Copies:
        """The operand whose copies the kernel makes itself."""
        return copied_operand(self.problem, self.backend)[0]

    @property
    def label(self) -> str:
        """The plan in a line."""
        schedule = self.schedule
        if self.variant == "inline":
            return f"{self.backend} inline"
        each = schedule.split == "strides"
        queues = f", {schedule.queues} queues" if schedule.queues > 1 and not each else ""
        if schedule.split == "chunks":
            queues += " in arrival order"
        backend = f"{self.backend} {self.variant}" if self.backend in ("hopper", "cdna") else self.backend
        return (
            f"{backend} {schedule.kind}{queues}, {self.workers} workers{' with a queue each' * each}, "
            f"{self.tile[0]}x{self.tile[1]} tiles, "
            f"{schedule.raster.order} raster"
        )

    def explain(self) -> str:
        """What was chosen, what was refused and why, and the floor, for people."""
        return explain(self)

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        alpha: float = 1.0,
        beta: float = 1.0,
        activation: str | None = None,
        scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None,
        arrival: Arriving | None = None,
        weight_arrival: Arriving | None = None,
        deadline: float | None = None,
    ) -> torch.Tensor:
        """Run this plan on operands of its shape; arguments as for `tilestream.matmul`, nothing broadcast.

        Eager, and without autograd: for benchmarks, and for those who choose the plan themselves.

        Parameters
        ----------
        a, b
            ``[m, k]`` and ``[k, n]``; ``[batch, m, k]`` and ``[batch, k, n]`` where the plan has several batches.
        scale_a, scale_b
            As the plan's ``scales`` has them: of one element, or of one a row of A and one a column of B. A plan for
            more takes less: one element where there could be one a row, None where there could be a scale.

        Raises
        ------
        ValueError, TypeError
            If an operand is not what the plan was made for.
        RuntimeError
            If an operand requires a gradient.
        ArrivalTimeout, Exception
            As from `tilestream.matmul`.
        """
        result: torch.Tensor = hooks.run_plan(
            self, a, b, out=out, bias=bias, residual=residual, alpha=alpha, beta=beta, activation=activation,
            scale_a=scale_a, scale_b=scale_b, arrival=arrival, weight_arrival=weight_arrival, deadline=deadline,
        )  # fmt: skip
        return result


def of_candidate(
    problem: Problem, device: DeviceProperties, backend: str, candidate: Candidate, why: str,
    refused: tuple[Refusal, ...] = (),
) -> Plan:  # fmt: skip
    """A candidate as a plan."""
    copied, _ = copied_operand(problem, backend)
    return Plan(
        problem, device, backend, candidate.variant, candidate.block, candidate.schedule, why, refused,
        candidate.seconds, candidate.warps, candidate.stages, candidate.swapped, candidate.strip,
        candidate.buffers, 0 if copied == "none" else min(COPIERS, candidate.schedule.workers), candidate.registers,
    )  # fmt: skip
