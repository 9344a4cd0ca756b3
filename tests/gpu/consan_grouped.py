"""One launch of a Hopper grouped GEMM under Triton's concurrency sanitizer, in the frame of `consan_program`.

``python consan_grouped.py VARIANT [BUG]``. The item ring's words are in global memory, so that the sanitized kernel can
be compiled; those of the plain GEMM, whose code it is, are judged there.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch
from consan_program import descriptor, launch, main
from grouped_jobs import GroupedCase

from mutants.sanitized import BY_SOURCE, GROUPED

#: Groups without rows, of fewer than a consumer has, and of two tiles; more items than the item ring has slots.
CASES = {
    "grouped": GroupedCase((0, 3, 130, 1), 24, 400, "cooperative", (128, 16), schedule="static"),
    "grouped by source": GroupedCase(((0, 3, 70), (5, 0, 0), (0, 0, 0)), 40, 400, "single", (64, 32)),
}


def prepared(case: GroupedCase, device: str, properties: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """The operands, the plan's part of the arguments of a launch by one worker, and all arguments."""
    from tilestream.ops.grouped_library import launch_of
    from tilestream.runtime.device_workspace import words_of

    x, plan = case.operands(device), replace(case.plan(properties, 1), stages=2)
    launched: Any = launch_of(plan, x)
    made = launched._made[False]
    words = torch.zeros(words_of(plan.schedule), dtype=torch.int64, device=device)
    given = (
        x.offsets, x.out, None, None, None, None, None, None, words if plan.schedule.kind == "dynamic" else None, None,
        torch.zeros(64, dtype=torch.int32, device=device),
    )  # fmt: skip
    mapped = (made.x, x.a), *((one, x.b) for one in made.y), (made.out, x.out)
    return x, made, tuple(made.fill((*[descriptor(*one) for one in mapped], *given, 0, 1, 1.0, 1.0)))


def run(kernel: Any, case: GroupedCase) -> None:
    """A launch, whose answer is checked."""
    from tilestream.runtime.properties import cuda_properties

    x, made, filled = prepared(case, "cuda", cuda_properties())
    launch(kernel, filled, (1, 1, 1), made.options)
    try:
        case.check(x._replace(a=x.a.cpu(), b=x.b.cpu(), out=x.out.cpu(), offsets=x.offsets.cpu()))
    except AssertionError as error:
        raise SystemExit(f"a wrong answer: {error}") from error


if __name__ == "__main__":
    main(BY_SOURCE if sys.argv[1] == "grouped by source" else GROUPED, CASES, run)
