"""Who makes the copies of an operand that a stream offers to the kernel: that, or a copy engine after all."""

from __future__ import annotations

from typing import Literal

from tilestream.plan.problem import Problem

#: Which operand a kernel copies itself.
Copies = Literal["none", "rows", "columns"]

#: Workers that copy, until no piece is left. Each has `tilestream.arrival.copy_items.block` on its way at once, 32 KiB
#: of four warps: with 2 us from request to answer that is 16 GB/s. So four hold a link to the host of 55 GB/s, and the
#: rest is for pauses (a ticket, a count) and for longer ways.
COPIERS = 16

#: Backends whose GEMM takes copy items.
_COPY = ("portable", "hopper")


def copied_operand(problem: Problem, backend: str) -> tuple[Copies, str]:
    """The operand that the kernel copies; and where it leaves one that is offered to a copy engine, why."""
    rows, columns = (incoming is not None and incoming.copied > 0 for incoming in (problem.rows, problem.columns))
    if not rows and not columns:
        return "none", ""
    if backend not in _COPY:
        return "none", f"the {backend} kernel takes no copy items: copy engines copy what arrives"
    if rows and columns:
        return "rows", "a kernel copies one operand: a copy engine copies the columns"
    return ("rows" if rows else "columns"), ""
