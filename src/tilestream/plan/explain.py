"""The table that `Plan.explain` and `AttentionPlan.explain` print."""

from __future__ import annotations

from typing import Any

Lines = list[tuple[str, str]]


def table(head: str, plan: Any, chosen: Lines, floor: str, remarks: Lines) -> str:
    """A plan as lines: where it runs, what was chosen, the floor, remarks, and what was refused.

    ``plan`` is a `Plan` or an `AttentionPlan`, whose modules import this one.
    """
    device, bound = plan.device, plan.floor
    lines = [
        ("device", f"{device.name}, {device.workers} workers ({device.source})"),
        ("backend", f"{plan.backend}, variant {plan.variant}: {plan.why}"),
        *chosen,
        ("floor", f"{floor}: {bound.seconds * 1e3:.3g} ms, bound by {bound.binds}"),
        ("expected", f"{plan.predicted * 1e3:.3g} ms by the cost model, with everything arrived"),
        *remarks,
        *(("refused", f"{refusal.what}: {refusal.why}") for refusal in plan.refused),
    ]
    return "\n".join([head, *(f"  {name:<9} {text}" for name, text in lines)])
