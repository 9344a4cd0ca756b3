"""Whether the kernel or a copy engine copies an operand that a stream offers to the kernel."""

from __future__ import annotations

from typing import Literal

from tilestream.plan.problem import Problem

#: Which operand a kernel copies itself.
Copies = Literal["none", "rows", "columns"]

#: Workers that copy, until no piece is left. One reaches 8 GB/s from pinned memory (32 KiB in flight, 4 us latency),
#: four 33, and eight 44, as do 16 or 32: workers get no more from an H200's link. Its copy engine reaches 49
#: (`benchmarks/results/h200/stream_copies.json`).
COPIERS = 8

#: Backends whose GEMM takes copy items.
_COPY = ("portable", "hopper")


def copied_operand(problem: Problem, backend: str) -> tuple[Copies, str]:
    """The operand that the kernel copies; and why it leaves one that is offered to a copy engine."""
    rows, columns = (incoming is not None and incoming.copied > 0 for incoming in (problem.rows, problem.columns))
    if not rows and not columns:
        return "none", ""
    if backend not in _COPY:
        return "none", f"the {backend} kernel takes no copy items: copy engines copy what arrives"
    if rows and columns:
        return "rows", "a kernel copies one operand: a copy engine copies the columns"
    return ("rows" if rows else "columns"), ""
