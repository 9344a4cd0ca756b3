"""Plans of drawn problems, for those who measure them, who fit to them and who tell of them."""

from __future__ import annotations

from typing import Any

from benchmarks.gemm.draw import Draw
from tilestream.core.device import DeviceProperties
from tilestream.plan import Plan, tuned
from tilestream.plan import plan as ask


def planned(problem: Draw, device: str | DeviceProperties) -> Plan:
    """The plan that the op takes: such operands are contiguous as their layout says, which a plan is told."""
    return ask(
        problem.m, problem.n, problem.k, batch=problem.batch, dtype=problem.dtype, layout=problem.layout,
        scales=problem.scales, device=device,
    )  # fmt: skip


def key_of(candidate: Any) -> str:
    """What tells a plan, or a candidate, from the others of its problem."""
    return " ".join(f"{name}={value}" for name, value in tuned.knobs(candidate).items())
