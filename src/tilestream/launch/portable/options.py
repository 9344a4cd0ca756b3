"""The compiler's options of portable kernels. Imports no kernel."""

from __future__ import annotations

from tilestream.plan.attention_plan import AttentionPlan
from tilestream.plan.plan import Plan

#: The most registers of a thread, and the registers of an SM. A worker has an SM to itself and may take all. Unless
#: told so, ptxas spills a few bytes in some tiles of each version, to reach a count with which several workers fit.
_MOST_REGISTERS = 255
_SM_REGISTERS = 2**16
#: Rows of AMD's matrix instruction in attention. Triton gives each warp rows of its own, as far as there are rows: of
#: 32 rows, four of eight warps would compute the scores of the other four once more, and spill (Triton 3.9). Tiles with
#: fewer rows than `_LEAST_ROWS` leave it to Triton: 32x16 spills with 16 (gfx950, float32, Triton 3.9).
_MATRIX_ROWS, _LEAST_ROWS = 16, 64


def options(plan: Plan | AttentionPlan) -> dict[str, int]:
    """The compiler's options of a plan's kernel. They let a worker take all registers of an SM."""
    more = {}
    if plan.device.arch.startswith("sm_"):
        more["maxnreg"] = min(_MOST_REGISTERS, _SM_REGISTERS // (32 * plan.warps))
    elif isinstance(plan, AttentionPlan) and plan.block[0] >= _LEAST_ROWS:
        more["matrix_instr_nonkdim"] = _MATRIX_ROWS
    return {"num_warps": plan.warps, "num_stages": plan.stages, **more}
