"""The compile gate of the copies ahead of a product: words of each width, blocks of each shape, one operand and two.

No register is spilled. Each element is loaded and stored by one instruction of its word's width, and goes through
shared memory only where the copy lies across.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from gates.engine import DEVICES, Case, IsWanted, Rules
from gates.portable_gemm import common_rules
from tilestream.kernels.portable.realign import realign
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.hopper.realign import RealignArguments
from tilestream.plan.plan import Plan
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import Problem
from tilestream_tools.isa.kernels import pointer

_ARCH = "sm_90a"
_EITHER = frozenset((False, True))


class How(NamedTuple):
    """Operands and how they lie: dtype, which are copied, the extents, A's and B's strides, their words' bytes."""

    dtype: str
    which: str
    extents: tuple[int, int, int]
    a: tuple[int, int, int]
    b: tuple[int, int, int]
    words: tuple[int, ...]
    #: Whether the copy lies across. None: where neither stride is 1, Triton 3.6 goes through shared memory, too.
    across: bool | None = False


HOWS = {
    "odd rows": How("bfloat16", "ab", (4096, 4096, 4097), (0, 4097, 1), (0, 1, 4097), (2, 2)),
    "rows of 2": How("bfloat16", "ab", (4096, 4096, 4098), (0, 4098, 1), (0, 1, 4098), (4, 4)),
    "rows of 4": How("float16", "ab", (4096, 4096, 4100), (0, 4100, 1), (0, 1, 4100), (8, 8)),
    "columns": How("float16", "a", (4097, 4096, 4096), (0, 1, 4097), (0, 4096, 1), (2,)),
    "short rows": How("bfloat16", "a", (4096, 4096, 19), (0, 19, 1), (0, 4096, 1), (2,)),
    "every other": How("bfloat16", "a", (4096, 4096, 4096), (0, 8192, 2), (0, 4096, 1), (2,), None),
    "16 bits, across": How("bfloat16", "b", (4096, 19, 4096), (0, 4096, 1), (0, 19, 1), (2,), True),
    "8 bits": How("float8_e4m3fn", "b", (4096, 4096, 4097), (0, 4112, 1), (0, 1, 4097), (1,)),
    "8 bits, across": How("float8_e4m3fn", "b", (4096, 4096, 4096), (0, 4096, 1), (0, 4096, 1), (1,), True),
    "tf32, across": How("float32", "b", (4096, 4096, 4096), (0, 4096, 1), (0, 4096, 1), (4,), True),
}
QUICK = ("odd rows", "short rows", "8 bits, across")


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    for name, how in HOWS.items():
        if is_wanted(_ARCH, name):
            result = "float32" if how.dtype == "float32" else "bfloat16"
            problem = Problem(
                *how.extents, 1, how.dtype, result, no_tma="odd", not_by_tma=how.which, aligned=False,
                tf32=how.dtype == "float32",
            )  # fmt: skip
            plan = plan_problem(problem, device=DEVICES[_ARCH], backend="hopper")
            yield Case(_ARCH, name, plan, Layout(how.a, how.b, (0, how.extents[1], 1)), how)


def source(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    made = _arguments(case.plan, case.layout)
    a, b = (pointer(case.how.dtype, name in case.how.which) for name in "ab")
    return realign, made.fill(a, b, pointer("float32")), {}


def _arguments(plan: Plan, layout: Layout) -> RealignArguments:
    return RealignArguments(plan, layout, plan.schedule.slots * plan.tile[0] * plan.tile[1], (True, True))


def rules(case: Case, kernel: Any, said: str) -> Rules:
    ptx, made = kernel.asm["ptx"], _arguments(case.plan, case.layout)
    words = tuple(one.word for one in made.copies.values())
    found = {kind: re.findall(rf"{kind}\.global\.(?:\w+\.)*?((?:v\d\.)?b\d+)", ptx) for kind in ("ld", "st")}
    wide = {f"b{8 * word}" for word in words}
    elements = sum(one.block[0] * one.block[1] // 128 for one in made.copies.values())
    return {
        **common_rules(case, kernel, said, {}),
        "words": (words, case.how.words),
        "widths of loads and stores": ({*found["ld"], *found["st"]} - wide, set()),
        "loads of a thread": (len(found["ld"]), elements),
        "stores of a thread": (len(found["st"]), elements),
        "through shared memory": ("st.shared" in ptx, _EITHER if case.how.across is None else case.how.across),
    }
