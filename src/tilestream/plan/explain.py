"""The table of `Plan.explain` and `AttentionPlan.explain`, and a new plan's line in the log."""

from __future__ import annotations

import logging
from typing import Any

from tilestream.core.gpu_specs import GPU_SPECS

logger = logging.getLogger(__name__)

Lines = list[tuple[str, str]]


def number(x: float) -> str:
    """A number with at least three digits and without an exponent: ``16,100``, ``98.3``, ``0.0123``."""
    return f"{x:,.0f}" if x >= 999.5 else f"{x:.3g}" if x >= 1e-3 else f"{x:.6f}"


def checked(arch: str, grouped: bool = False) -> str:
    """How far the kernels were tested for ``arch``, if they have not run on such a GPU; empty if they have.

    ``grouped``: for the grouped kernels, which the gates compile for fewer architectures, and no emulator executes.
    """
    if arch in ("", "sm_90"):
        return ""
    on_amd = arch.startswith("gfx")
    if arch not in {spec.arch for spec in GPU_SPECS.values()} or (grouped and not on_amd):
        return f"neither compiled nor run for {arch}: its shared memory and registers are not checked"
    how = "compiled, and executed on an emulator" if on_amd and not grouped else "compiled"
    return f"{how}, not run: no {arch} GPU was there"


def table(head: str, plan: Any, chosen: Lines, floor: str) -> str:
    """A plan as lines: device, backend, choices, floor, expected time, tests, and refused alternatives.

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
    """The lines of the promise of `tilestream.invariant` and its cost; empty without a promise."""
    if not promise:
        return []
    return [("promise", f"the same bits for each row, whatever is beside it: {order}"), ("costs", promise)]


def log(plan: Any) -> None:
    """Log the plan and its refused alternatives (invariant 12). Plans are cached, so this is once for a problem."""
    if logger.isEnabledFor(logging.INFO):
        problem = plan.explain().partition("\n")[0]
        refused = "; ".join(f"{refusal.what}: {refusal.why}" for refusal in plan.refused)
        logger.info("%s: %s; refused: %s", problem, plan.label, refused)
