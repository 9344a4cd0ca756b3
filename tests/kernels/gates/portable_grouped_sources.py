"""The compile gate of the portable grouped GEMM by source: each tile of the portable kernel, for each device.

* ``worst``: 256 groups, counts and rows that arrive, 64-bit offsets, fp32 out, a scale a row and column, a bias a
  group, exact gelu; ``most``: the same, of 1024 groups;
* ``arrives``: rows arrive, no epilogue, 64 groups: what runs most; ``there``: all is there, and results are signalled;
* ``halves``: swiglu of two halves, of rows that arrive; ``blocks``: of 8 bits, scales of blocks.

Operands lie as a layer's do. A rule beside those of the other portable kernels: no word that lanes read is read by more
than one thread, since it may change in between, and threads that differ would wait for each other without end.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from gates.engine import DEVICES, NOT_RUN, RELEASE, Case, IsWanted, Rules
from gates.portable_gemm import INPUTS, REFUSED, common_rules
from gates.portable_grouped import NOT_RUN_SPILLS
from tilestream.kernels.portable.grouped_sources import grouped_gemm_by_source
from tilestream.launch.gate import NO_GATE, NO_PUBLISH, GateArguments, PublishArguments
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.grouped_arguments import Bias
from tilestream.launch.portable.sources import SourcesArguments
from tilestream.plan.grouped import has_registers, plan_groups
from tilestream.plan.policy.portable import tiles
from tilestream.plan.problem import FP8, GroupedProblem, result_name
from tilestream_tools.isa.kernels import pointer

_SIZE, _SOURCES = 4096, 8


class How(NamedTuple):
    """How many groups there are, and what else a case is of."""

    groups: int
    full: bool = False
    arrives: bool = True
    two_halves: bool = False
    blocks: bool = False


HOWS = {
    "worst": How(256, full=True),
    "most": How(1024, full=True),
    "arrives": How(64),
    "there": How(64, arrives=False),
    "halves": How(64, two_halves=True),
    "blocks": How(64, blocks=True),
}
#: What Triton 3.9 spills at most of an epilogue with everything: 16 bytes of 128x128, and a little.
NEWEST_SPILLS = {"bytes": 80, "stack": 40}
QUICK = (
    "bfloat16 128x128 worst", "bfloat16 128x128 arrives", "bfloat16 64x64 there", "bfloat16 16x128 most",
    "bfloat16 128x128 halves", "float8 64x64 blocks", "sm_100 bfloat16 64x64 worst",
)  # fmt: skip


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    for (arch, device), inputs in itertools.product(DEVICES.items(), ("bfloat16", "float32", "float8", "float8 fnuz")):
        if inputs in REFUSED[arch] or inputs not in INPUTS:
            continue
        dtype, _, rounded, fast = INPUTS[inputs]
        for how, (groups, full, arrives, two_halves, blocks) in HOWS.items():
            if blocks and (dtype not in FP8 or not fast):
                continue
            if arch in NOT_RUN and (how != "worst" or inputs != "bfloat16"):
                continue
            scales = "block" if blocks else "row" if full else "tensor" if dtype in FP8 else "none"
            problem = GroupedProblem(
                _SOURCES * _SIZE, _SIZE, _SIZE, 1, dtype, "float32" if full else result_name(dtype, None),
                tf32=rounded, fast_accum=fast, groups=groups, plain=not full and not two_halves, scales=scales,
                two_halves=two_halves, arrives=arrives, sources=_SOURCES, likely=_SIZE,
            )  # fmt: skip
            for tile in tiles(problem, device):
                name = f"{inputs} {tile.block_m}x{tile.block_n} {how}"
                if has_registers(problem, tile) and is_wanted(arch, name):
                    block = (tile.block_m, tile.block_n)
                    plan = plan_groups.__wrapped__(problem, None, "auto", block, device=device, backend="portable")
                    yield Case(arch, name, plan, *_made(HOWS[how]))


def _made(how: How) -> tuple[Layout, Bias]:
    row_major = (0, _SIZE, 1)
    layout, bias = Layout(row_major, (_SIZE * _SIZE, 1, _SIZE), row_major), Bias()
    if how.full:
        out = (0, 2**20, 1)
        layout = layout._replace(out=out, activation="gelu", scale_a=(0, 1), scale_b=(_SIZE, 1))
        bias = Bias("columns", _SIZE, 1)
    if how.two_halves:
        layout = layout._replace(activation="swiglu")
    if how.blocks:
        layout = layout._replace(scale_a=(0, 32), scale_b=(1024, 1), scale_k=(1, 32))
    return layout, bias


def source(case: Case, *, trace: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    plan, problem = case.plan, case.plan.problem
    publishes = not problem.arrives
    arguments = SourcesArguments(plan, case.layout, case.how, publishes, trace)
    scale = pointer("float32", problem.scales != "none", 4)
    addend = "bfloat16" if problem.fp8 else problem.dtype
    words, records = pointer("int32", address=4), pointer("int64")
    gate: GateArguments = NO_GATE
    if problem.arrives:
        gate = NO_GATE._replace(row_signals=words, row_quarantine=words, records=records, claims=records)
    filled = arguments.fill((
        *[pointer(problem.dtype)] * 2, pointer("int32", address=4), pointer(problem.out_dtype),
        pointer(addend, case.how.along != "none"), None, scale, scale, None, None, pointer("int64"), None,
        pointer("int64", trace), 0, 0, 1.0, 1.0,
    ), gate=gate, publish=PublishArguments(words, words, 1) if publishes else NO_PUBLISH)  # fmt: skip
    return grouped_gemm_by_source, tuple(filled), arguments.options


_LAYOUT = re.compile(
    r"(#\w+) = #ttg\.blocked<\{sizePerThread = \[(\d+)\], threadsPerWarp = \[(\d+)\], warpsPerCTA = \[(\d+)\]"
)


def shared_words(ttgir: str, lanes: int) -> tuple[int, int]:
    """Of the loads of a word a lane: how many there are, and how many of them several threads make."""
    layouts = {name: int(per) * int(of_warp) * int(warps) for name, per, of_warp, warps in _LAYOUT.findall(ttgir)}
    loads = re.findall(rf"_?load\b.*tensor<{lanes}x(?:!tt\.ptr<i\d+>|i\d+), (#\w+)>", ttgir)
    return len(loads), sum(layouts[layout] > lanes for layout in loads)


def rules(case: Case, kernel: Any, said: str) -> Rules:
    most = NOT_RUN_SPILLS if case.arch in NOT_RUN else {}
    if case.arch == "sm_90a" and RELEASE >= (3, 9) and case.name.endswith((" worst", " most")):
        most = NEWEST_SPILLS
    count, shared = shared_words(kernel.asm["ttgir"], SourcesArguments(case.plan, case.layout, case.how).config.LANES)
    return {
        **common_rules(case, kernel, said, most),
        "words that lanes read": (count, range(2, 10)),
        "words that several threads read": (shared, 0),
    }
