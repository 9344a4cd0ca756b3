"""How portable kernels are compiled. No kernel is imported."""

from __future__ import annotations

from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.plan import Plan

#: Registers that a thread can have, and an SM. A worker has an SM to itself, and may take them all: not told so, ptxas
#: spills a few bytes, in one tile or another of each version, to get down to a count with which several workers fit.
_MOST_REGISTERS = 255
_SM_REGISTERS = 2**16


def options(plan: Plan | AttentionPlan) -> dict[str, int]:
    """How a portable kernel is compiled: a worker takes all the registers there are, where the compiler is told so."""
    most = {"maxnreg": min(_MOST_REGISTERS, _SM_REGISTERS // (32 * plan.warps))}
    return {"num_warps": plan.warps, "num_stages": plan.stages, **(most if plan.device.arch.startswith("sm_") else {})}
