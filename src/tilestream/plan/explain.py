"""The table that `Plan.explain` and `AttentionPlan.explain` print, and the line that is logged of a new plan."""

from __future__ import annotations

import logging
from typing import Any

from tilestream.core.gpu_specs import GPU_SPECS

logger = logging.getLogger(__name__)

Lines = list[tuple[str, str]]


def number(x: float) -> str:
    """Three digits at least, and no exponent: ``16,100``, ``98.3``, ``0.0123``."""
    return f"{x:,.0f}" if x >= 999.5 else f"{x:.3g}" if x >= 1e-3 else f"{x:.6f}"


def checked(arch: str, grouped: bool = False) -> str:
    """What is known of the kernels on GPUs of ``arch`` on which they have not run; empty where they have.

    ``grouped``: of the grouped ones, which the gates compile for fewer architectures, and no emulator executes.
    """
    if arch in ("", "sm_90"):
        return ""
    on_amd = arch.startswith("gfx")
    if arch not in {spec.arch for spec in GPU_SPECS.values()} or (grouped and not on_amd):
        return f"neither compiled nor run for {arch}: its shared memory and registers are not checked"
    how = "compiled, and executed on an emulator" if on_amd and not grouped else "compiled"
    return f"{how}, not run: no {arch} GPU was there"


def table(head: str, plan: Any, chosen: Lines, floor: str) -> str:
    """A plan as lines: where it runs, what was chosen, the floor, what was checked, and what was refused.

    ``plan`` is a `Plan` or an `AttentionPlan`, whose modules import this one.
    """
    device, bound = plan.device, plan.floor
    known = checked(device.arch, grouped=hasattr(plan.problem, "along"))
    lines = [
        ("device", f"{device.name}, {device.workers} workers ({device.source})"),
        ("backend", f"{plan.backend}, variant {plan.variant}: {plan.why}"),
        *chosen,
        ("floor", f"{floor}: {number(bound.seconds * 1e3)} ms, bound by {bound.binds}"),
        ("expected", f"{number(plan.predicted * 1e3)} ms by the cost model, with everything arrived"),
        *([("checked", known)] if known else []),
        *(("refused", f"{refusal.what}: {refusal.why}") for refusal in plan.refused),
    ]
    return "\n".join([head, *(f"  {name:<9} {text}" for name, text in lines)])


def promise_lines(promise: str, order: object) -> Lines:
    """What `tilestream.invariant` promises of a plan, and what that costs; nothing where it is not asked for."""
    if not promise:
        return []
    return [("promise", f"the same bits for each row, whatever is beside it: {order}"), ("costs", promise)]


def log(plan: Any) -> None:
    """Log what runs, and what does not and why (invariant 12): once a problem, because plans are cached."""
    logger.info("%s: %s; refused: %s", plan.problem, plan.label, "; ".join(f"{r.what}: {r.why}" for r in plan.refused))
