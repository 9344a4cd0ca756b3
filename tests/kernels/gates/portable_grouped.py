"""The compile gate of the portable grouped GEMM: each tile of `tilestream.plan.policy.portable.TILES`, for each device.

* ``worst``: groups of rows, 256 of them, 64-bit offsets, fp32 out, a scale a row and column, a bias a group, exact
  gelu, stealing;
* ``most``: the same, of 1024 groups, whose offsets take four registers of a thread or eight: Triton 3.9 spills a few;
* ``across``: the same, with a bias a row, of an output whose columns are contiguous;
* ``plain``: a queue a worker, no epilogue, 64 groups: what runs most; ``static``;
* ``arrives``: each group's matrix of B arrives, 256 groups;
* ``k``: groups of K, everything else as ``worst``; ``gradient``: groups of K, no epilogue;
* ``halves``: swiglu of two halves; ``worst halves``: with everything else of ``worst``;
* ``blocks``: of 8 bits, scales of blocks; ``worst blocks``, ``worst halves blocks``: with everything else.

Operands lie as a layer's and its gradients' do.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from gates.engine import AS_SM_100, DEVICES, NOT_RUN, RELEASE, Case, IsWanted, Rules
from gates.portable_gemm import INPUTS, REFUSED, common_rules
from tilestream.kernels.portable.grouped import grouped_gemm
from tilestream.launch.gate import NO_GATE, GateArguments
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.grouped_arguments import Bias
from tilestream.launch.portable.grouped import GroupedArguments
from tilestream.plan.grouped import has_registers, plan_groups
from tilestream.plan.plan import Plan
from tilestream.plan.policy.portable import tiles
from tilestream.plan.problem import FP8, GroupedProblem, result_name
from tilestream_tools.isa.kernels import pointer

_SIZE = 4096


class How(NamedTuple):
    """What groups divide, how many there are, the schedule; whether the epilogue has everything; what else it is of."""

    along: Any
    groups: int
    schedule: str
    full: bool
    two_halves: bool = False
    blocks: bool = False


HOWS = {
    "worst": How("rows", 256, "dynamic", True),
    "most": How("rows", 1024, "dynamic", True),
    "across": How("rows", 64, "dynamic", True),
    "plain": How("rows", 64, "dynamic", False),
    "static": How("rows", 64, "static", False),
    "arrives": How("rows", 256, "dynamic", False),
    "k": How("k", 1024, "dynamic", True),
    "gradient": How("k", 64, "dynamic", False),
    "halves": How("rows", 64, "dynamic", False, True),
    "worst halves": How("rows", 256, "dynamic", True, True),
    "blocks": How("rows", 64, "dynamic", False, False, True),
    "worst blocks": How("rows", 256, "dynamic", True, False, True),
    "worst halves blocks": How("rows", 256, "dynamic", True, True, True),
}  # fmt: skip
#: Of these, what needs most on an architecture on which nothing has run, and what runs most.
MOST = ("worst", "k", "plain")
#: There, what is spilled at most: the most of all (sm_100, float8, 64x128, Triton 3.9: 136 bytes), and a little.
NOT_RUN_SPILLS = {"bytes": 144, "stack": 64}
QUICK = (
    "bfloat16 128x128 worst", "bfloat16 128x256 gradient", "bfloat16 16x128 across", "bfloat16 64x64 plain",
    "float32 64x64 k", "float8 128x128 worst", "bfloat16 128x128 halves", "bfloat16 128x128 arrives",
    "float8 64x64 worst halves blocks", "sm_90a float8 128x128 blocks", "gfx950 float8 128x128 blocks",
    "sm_80 bfloat16 128x128 k", "sm_100 float8 128x128 worst", "sm_120 bfloat16 128x128 worst",
)  # fmt: skip


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    for (arch, device), inputs, aligned in itertools.product(DEVICES.items(), INPUTS, (True, False)):
        if inputs in REFUSED[arch] or inputs in ("float16", "float8 mixed", "float8 fnuz mixed"):
            continue
        dtype, _, rounded, fast = INPUTS[inputs]
        for how, (along, groups, schedule, full, two_halves, blocks) in HOWS.items():
            if blocks and (dtype not in FP8 or not fast):
                continue
            extent = _SIZE if aligned else _SIZE + 2 if two_halves else _SIZE + 1
            scales = "block" if blocks else "row" if full else "tensor" if dtype in FP8 else "none"
            problem = GroupedProblem(
                extent, extent, extent, 1, dtype, "float32" if full else result_name(dtype, None), tf32=rounded,
                aligned=aligned, fast_accum=fast, groups=groups, along=along, plain=not full and not two_halves,
                scales=scales, two_halves=two_halves, arrives=how == "arrives",
            )  # fmt: skip
            for tile in tiles(problem, device):
                if not has_registers(problem, tile) or not is_compiled(arch, inputs, aligned, how):
                    continue
                name = f"{inputs}{'' if aligned else ' unaligned'} {tile.block_m}x{tile.block_n} {how}"
                if is_wanted(arch, name):
                    block = (tile.block_m, tile.block_n)
                    plan = plan_groups.__wrapped__(problem, None, schedule, block, device=device, backend="portable")
                    yield Case(arch, name, plan, *_made(plan, how))


def _made(plan: Plan, how: str) -> tuple[Layout, Bias]:
    size, made = plan.problem.m, HOWS[how]
    row_major, column_major = (0, size, 1), (0, 1, size)
    matrices = (size * size, 1, size)  # of B's
    operands = (row_major, matrices, row_major)
    if plan.problem.along == "k":
        operands = (column_major, row_major, (size * size, size, 1))
    layout, bias = Layout(*operands), Bias()
    if made.full:
        groups = size if plan.problem.along == "k" else 0
        out = (operands[2][0], 1, 2**20) if how == "across" else (operands[2][0], 2**20, 1)
        layout = layout._replace(out=out, activation="gelu", scale_a=(groups, 1), scale_b=(size, 1))
        bias = Bias("rows", 0, 1) if how == "across" else Bias("columns", size, 1)
    if made.two_halves:
        layout = layout._replace(activation="swiglu")
    if made.blocks:
        layout = layout._replace(scale_a=(0, 32), scale_b=(1024, 1), scale_k=(1, 32))
    return layout, bias


def is_compiled(arch: str, inputs: str, aligned: bool, how: str) -> bool:
    """Whether a case is compiled for an architecture: where nothing has run, what needs most of it."""
    if arch in AS_SM_100:
        return inputs == "bfloat16" and aligned and how == "worst"
    return arch not in NOT_RUN or (inputs in ("bfloat16", "float32", "float8") and aligned and how in MOST)


def source(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    plan, problem = case.plan, case.plan.problem
    arguments = GroupedArguments(plan, case.layout, case.how)
    address = 0 if problem.aligned else 2
    scale = pointer("float32", problem.scales != "none", 4)
    addend = "bfloat16" if problem.fp8 else problem.dtype
    filled = arguments.fill((
        *[pointer(problem.dtype, address=address)] * 2, pointer("int32", address=4), pointer(problem.out_dtype),
        pointer(addend, case.how.along != "none"), None, scale, scale, None, None,
        pointer("int64", plan.schedule.kind != "static"), None, None, 0, 0, 1.0, 1.0,
    ), gate=_gate() if problem.arrives else NO_GATE)  # fmt: skip
    return grouped_gemm, tuple(filled), arguments.options


def _gate() -> GateArguments:
    words, records = pointer("int32", address=4), pointer("int64")
    return NO_GATE._replace(column_signals=words, column_quarantine=words, records=records, claims=records)


def rules(case: Case, kernel: Any, said: str) -> Rules:
    if case.arch in NOT_RUN:
        return common_rules(case, kernel, said, NOT_RUN_SPILLS)
    spills = case.arch == "sm_90a" and RELEASE >= (3, 9) and case.name.endswith(" most")
    return common_rules(case, kernel, said, {"bytes": 80, "stack": 40} if spills else {})
