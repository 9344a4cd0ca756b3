"""Arrival order: decides whether workers take items as chunks arrive, or in the raster's order.

A late chunk then delays only the tiles that read it. The cost is small. An item costs one atomic add, as with a single
queue. A queue has all tiles of the same chunks, and costs each worker a poll of its chunks, an atomic max, and the void
ticket that shows it empty. So dynamic schedules with one arriving operand use it, unless a reason below holds.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from tilestream.core.gate import arrival_order
from tilestream.core.schedule import MOST_QUEUES
from tilestream.plan.candidate import Candidate
from tilestream.plan.problem import Problem, gate_of

#: Orders by name: ``arrival``, as chunks arrive; ``chunk_major``, the raster's order from the pivot.
OrderName = Literal["arrival", "chunk_major"]


def in_arrival_order(
    problem: Problem, backend: str, best: Candidate, own_order: bool, named: str | None, queues: int | None
) -> tuple[Candidate, str]:
    """The candidate in arrival order, or the unchanged candidate with the reason.

    Parameters
    ----------
    own_order
        Whether the caller gives an order of tiles.
    named
        One of `OrderName`, or None for the plan's choice.
    queues
        The caller's number of queues.

    Raises
    ------
    ValueError
        If the caller names arrival order, and the candidate cannot have it.
    """
    kind = best.schedule.kind
    reasons = {
        "the caller's own order is kept": own_order,
        "order='chunk_major' given": named == "chunk_major",
        f"only dynamic schedules have queues for chunks, this one is {kind}": kind != "dynamic",
        f"queues={queues} given: they split the dimension that does not arrive": queues is not None,
        "both operands arrive, and a queue waits for chunks of one": problem.arriving > 1,
        "the CDNA kernel takes items in the raster's order": backend == "cdna",
        "there is no tile": not best.schedule.grid.tiles,
    }
    why = next((reason for reason, holds in reasons.items() if holds), "")
    if not why:
        schedule = replace(best.schedule, split="items", queues=1)
        gate = gate_of(problem, best.tile)
        assert gate is not None, "nothing arrives"
        ends = arrival_order(schedule, gate)
        if len(ends) <= MOST_QUEUES:
            return best.with_schedule(replace(schedule, split="chunks", queues=len(ends), ends=ends)), ""
        why = f"{len(ends)} queues, one for each set of chunks that tiles read: there are {MOST_QUEUES} at most"
    if named == "arrival":
        raise ValueError(
            f"order='arrival': {why}; leave order= away, or give a dynamic schedule and fewer, larger chunks of one "
            "operand"
        )
    return best, why
