"""The compile gate of Hopper's grouped GEMM by source: each tile of `tilestream.plan.policy.hopper.TILES`, both ways.

* ``worst``: 256 groups, counts and rows that arrive, fp32 out, a scale a row and column, a bias a group, exact gelu;
* ``arrives``: rows arrive, no epilogue, 64 groups; ``there``: all is there, the epilogue of ``worst``, and results are
  signalled;
* ``halves``: swiglu of two halves, beside the epilogue of ``worst``; ``blocks``: of 8 bits, scales of blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from gates.engine import Case, IsWanted, Rules
from gates.hopper import Assembly, described
from gates.hopper_grouped import kernel_rules, of_tiles
from gates.portable_grouped_sources import shared_words
from tilestream.kernels.hopper.grouped_sources import grouped_gemm_by_source
from tilestream.launch.gate import NO_GATE, NO_PUBLISH, GateArguments, PublishArguments
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.grouped_arguments import Bias
from tilestream.launch.hopper.sources import HopperSourcesArguments
from tilestream.plan.problem import GroupedProblem
from tilestream_tools.isa.kernels import pointer

_SIZE, _SOURCES = 4096, 8


class How(NamedTuple):
    """How many groups there are, and what else a case is of."""

    groups: int = 64
    full: bool = False
    arrives: bool = True
    two_halves: bool = False
    blocks: bool = False


HOWS = {
    "worst": How(256, full=True),
    "arrives": How(),
    "there": How(full=True, arrives=False),
    "halves": How(full=True, two_halves=True),
    "blocks": How(blocks=True),
}
QUICK = (
    "cooperative 128x128 bfloat16 worst", "cooperative 128x256 bfloat16 arrives", "ping_pong 64x128 bfloat16 there",
    "single 64x16 swapped bfloat16 worst", "cooperative 128x128 float8_e4m3fn blocks",
    "cooperative 128x128 bfloat16 halves",
)  # fmt: skip


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    return of_tiles(HOWS, ("arrives", "worst"), is_wanted, _problem, lambda how: "auto", _layout)


def _problem(inputs: str, how: How) -> GroupedProblem:
    dtype = inputs if inputs in ("bfloat16", "float8_e4m3fn") else "float8_e4m3fn"
    return GroupedProblem(
        _SOURCES * _SIZE, _SIZE, _SIZE, 1, dtype, "float32" if how.full else "bfloat16",
        plain=not how.full and not how.two_halves and (dtype == "bfloat16" or how.blocks),
        scales="block" if how.blocks else "row" if how.full else "none" if dtype == "bfloat16" else "tensor",
        fast_accum=inputs != "fp8 precise", groups=how.groups, two_halves=how.two_halves, arrives=how.arrives,
        sources=_SOURCES, likely=_SIZE,
    )  # fmt: skip


def _layout(how: How) -> tuple[Layout, Bias]:
    row_major = (0, _SIZE, 1)
    layout, bias = Layout(row_major, (_SIZE * _SIZE, 1, _SIZE), row_major), Bias()
    if how.full:
        layout = layout._replace(activation="gelu", scale_a=(0, 1), scale_b=(_SIZE, 1))
        bias = Bias("columns", _SIZE, 1)
    if how.two_halves:
        layout = layout._replace(activation="swiglu")
    if how.blocks:
        layout = layout._replace(scale_a=(0, 32), scale_b=(1024, 1), scale_k=(1, 32))
    return layout, bias


def _arguments(case: Case, trace: bool = False) -> HopperSourcesArguments:
    publishes = not case.plan.problem.arrives
    return HopperSourcesArguments(case.plan, case.layout, case.how, publishes=publishes, trace=trace)


def source(case: Case, *, trace: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    problem, arguments = case.plan.problem, _arguments(case, trace)
    scale = pointer("float32", problem.scales != "none")
    maps = [described(one, problem.out_dtype if one is arguments.out else problem.dtype) for one in arguments.maps]
    words, records = pointer("int32", address=4), pointer("int64")
    gate: GateArguments = NO_GATE
    if problem.arrives:
        gate = NO_GATE._replace(row_signals=words, row_quarantine=words, records=records, claims=records)
    filled = arguments.fill((
        *maps, words, pointer(problem.out_dtype), pointer("bfloat16", case.how.along != "none"), None, scale, scale,
        None, None, pointer("int64"), None, pointer("int64", trace), 0, 0, 1.0, 1.0,
    ), gate=gate, publish=NO_PUBLISH if problem.arrives else PublishArguments(words, words, 1))  # fmt: skip
    return grouped_gemm_by_source, tuple(filled), arguments.options


def rules(case: Case, kernel: Any, said: str) -> Rules:
    arguments, found = _arguments(case), Assembly(kernel, said)
    count, shared = shared_words(kernel.asm["ttgir"], arguments.config.LANES)
    return kernel_rules(case, arguments, found) | {
        # The load warp's, behind what it has seen of a tile's words; and each consumer's, behind its stores.
        "fences of global memory": (
            found.count_ptx(r"\bfence\.proxy\.async\.global\b"),
            1 + arguments.config.LOOPS * arguments.config.PUBLISHES,
        ),
        "words that lanes read": (count, range(2, 10)),
        "words that several threads read": (shared, int(not case.plan.problem.arrives)),  # `publish_empty`: they stay
    }
