"""The compile gate of Hopper's grouped GEMM: each tile of `tilestream.plan.policy.hopper.TILES`, both ways round.

* ``plain``: groups of rows, 64 of them, no epilogue; ``many``: 256, static;
* ``full``: fp32 out, a scale a row and column, a bias a group, exact gelu; ``row bias``: the same with a bias a row;
* ``turned``: of an output whose columns are contiguous, stored from registers;
* ``gradient``: groups of K; ``full gradient``;
* ``halves``: swiglu of two halves; ``full halves``: with a scale a row and column and a bias;
* ``blocks``: of 8 bits, scales of blocks; ``full blocks``: with a bias and exact gelu; ``halves blocks``: with a bias.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from gates.engine import Case, IsWanted, Rules
from gates.hopper import DEVICE, Assembly, described
from tilestream.kernels.hopper.grouped import grouped_gemm
from tilestream.kernels.hopper.ring import ITEMS
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.grouped_arguments import Bias
from tilestream.launch.hopper.grouped import HopperGroupedArguments
from tilestream.plan.candidate import Asked
from tilestream.plan.grouped import hopper_candidates
from tilestream.plan.plan import of_candidate
from tilestream.plan.policy.hopper import TILES
from tilestream.plan.problem import GroupedProblem
from tilestream_tools.isa import sass
from tilestream_tools.isa.kernels import pointer
from tilestream_tools.verify.protocol import Ring

_SIZE = 4096
_ROW_MAJOR, _COLUMN_MAJOR = (0, _SIZE, 1), (0, 1, _SIZE)


class How(NamedTuple):
    """What groups divide, how many there are, the schedule; along what there is a bias; the output's strides."""

    along: Any = "rows"
    groups: int = 64
    schedule: str = "dynamic"
    bias: str = ""
    out: tuple[int, int, int] = _ROW_MAJOR
    two_halves: bool = False
    blocks: bool = False


HOWS = {
    "plain": How(),
    "many": How(groups=256, schedule="static"),
    "full": How(groups=256, bias="columns"),
    "row bias": How(bias="rows"),
    "turned": How(bias="rows", out=_COLUMN_MAJOR),
    "gradient": How("k"),
    "full gradient": How("k", 256, bias="columns"),
    "halves": How(two_halves=True),
    "full halves": How(groups=256, bias="columns", two_halves=True),
    "blocks": How(blocks=True),
    "full blocks": How(groups=256, bias="columns", blocks=True),
    "halves blocks": How(bias="columns", two_halves=True, blocks=True),
}
INPUTS = ("bfloat16", "float8_e4m3fn", "fp8 precise")
QUICK = (
    "cooperative 128x256 bfloat16 plain", "cooperative 128x128 bfloat16 full", "ping_pong 64x128 bfloat16 turned",
    "single 64x16 swapped bfloat16 plain", "cooperative 128x192 bfloat16 gradient",
    "cooperative 128x128 float8_e4m3fn plain", "cooperative 128x256 bfloat16 halves",
    "cooperative 128x128 float8_e4m3fn halves blocks", "single 64x32 swapped float8_e4m3fn blocks",
)  # fmt: skip


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    return of_tiles(HOWS, ("plain", "full", "full halves"), is_wanted, _problem, lambda how: how.schedule, _layout)


def of_tiles(
    hows: dict[str, Any], of_8_bits: tuple[str, ...], is_wanted: IsWanted,
    problem_of: Callable[[str, Any], GroupedProblem], schedule_of: Callable[[Any], str],
    layout_of: Callable[[Any], tuple[Layout, Bias]],
) -> Iterator[Case]:  # fmt: skip
    """A case of each tile, both ways round, of each dtype; ``of_8_bits``: the ``hows`` that there are with 8 bits."""
    for tile in TILES:
        for swapped in (False, True)[: 1 if tile.rows == tile.columns else 2]:
            for inputs, (how, made) in itertools.product(INPUTS, hows.items()):
                name = f"{tile.variant} {tile.rows}x{tile.columns}{' swapped' * swapped} {inputs} {how}"
                fits = inputs == "float8_e4m3fn" if made.blocks else inputs == "bfloat16" or how in of_8_bits
                if not fits or not is_wanted("sm_90a", name):
                    continue
                problem = problem_of(inputs, made)
                block = (tile.columns, tile.rows) if swapped else (tile.rows, tile.columns)
                for one in hopper_candidates(problem, DEVICE, 132, Asked(schedule=schedule_of(made), tile=block)):
                    if one.swap_ab == swapped and one.variant == tile.variant:
                        plan = of_candidate(problem, DEVICE, "hopper", one, "the gate's")
                        yield Case("sm_90a", name, plan, *layout_of(made))
                        break


def _problem(inputs: str, how: How) -> GroupedProblem:
    dtype = inputs if inputs in ("bfloat16", "float8_e4m3fn") else "float8_e4m3fn"
    full = bool(how.bias)
    return GroupedProblem(
        _SIZE, _SIZE, _SIZE, 1, dtype, "float32" if full else "bfloat16",
        plain=not full and not how.two_halves and (dtype == "bfloat16" or how.blocks),
        scales="block" if how.blocks else "row" if full else "none" if dtype == "bfloat16" else "tensor",
        fast_accum=inputs != "fp8 precise", groups=how.groups, along=how.along, two_halves=how.two_halves,
    )  # fmt: skip


def _layout(how: How) -> tuple[Layout, Bias]:
    step = _SIZE * _SIZE
    operands = (_ROW_MAJOR, (step, 1, _SIZE)) if how.along == "rows" else (_COLUMN_MAJOR, _ROW_MAJOR)
    out = how.out if how.along == "rows" else (step, *how.out[1:])
    layout = Layout(*operands, out, activation="swiglu" if how.two_halves else "gelu" if how.bias else "none")
    if how.blocks:
        layout = layout._replace(scale_a=(0, 32), scale_b=(1024, 1), scale_k=(1, 32))
    if not how.bias:
        return layout, Bias()
    of_group = _SIZE if how.along == "k" else 0
    if not how.blocks:
        layout = layout._replace(scale_a=(of_group, 1), scale_b=(_SIZE, 1))
    return layout, Bias(how.bias, _SIZE if how.bias == "columns" else 0, 1)


def source(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    plan, problem, bias = case.plan, case.plan.problem, case.how
    arguments = HopperGroupedArguments(plan, case.layout, bias)
    scale = pointer("float32", problem.scales != "none")
    maps = [described(one, problem.out_dtype if one is arguments.out else problem.dtype) for one in arguments.maps]
    filled = arguments.fill((
        *maps, pointer("int32", address=4), pointer(problem.out_dtype), pointer("bfloat16", bias.along != "none"), None,
        scale, scale, None, None, pointer("int64", plan.schedule.kind != "static"), None, None, 0, 0, 1.0, 1.0,
    ))  # fmt: skip
    return grouped_gemm, tuple(filled), arguments.options


def rules(case: Case, kernel: Any, said: str) -> Rules:
    return kernel_rules(case, HopperGroupedArguments(case.plan, case.layout, case.how), Assembly(kernel, said))


def kernel_rules(case: Case, arguments: HopperGroupedArguments, found: Assembly) -> Rules:
    ring = Ring(case.plan.stages, ITEMS.value, case.plan.variant)
    return {
        "spills": (found.spills, (0, 0, 0)),
        "barriers whose place something else takes": (sass.reused_barriers(found.ptx), []),
        "barriers": ([count for _, count in sass.made_barriers(found.ptx)], list(ring.barriers().values())),
        "stores by TMA": (found.count_sass(r"\bUTMASTG") > 0, arguments.out is not None),
        "shared memory": (found.kernel.metadata.shared, range(232448 + 1)),
    }
