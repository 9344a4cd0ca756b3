"""The compile gate of the portable GEMM whose programs have a tile each: each tile of `policy.one_tile.TILES`.

* ``worst``: shares, K uneven, 64-bit offsets, fp32 out, alpha, a scale a row and column, bias, residual, exact gelu;
* ``plain``: a tile a program, even K, no epilogue, or of 8-bit operands a scale each: what runs most.

Both in the four layouts of the operands, and in vectors of each width with which the plan takes the tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gates.engine import DEVICES, Case, IsWanted, Rules, fill_gemm
from gates.portable_gemm import before_counts, common_rules
from tilestream.core.grid import Grid
from tilestream.core.order import Raster
from tilestream.core.schedule import Schedule
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.portable.arguments import arguments_of
from tilestream.plan.candidate import ONE_TILE, Candidate
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy.one_tile import MOST_HELD, TILES, Tile, Way
from tilestream.plan.problem import VECTORS, Problem

_ARCH = "sm_90a"
_SIZE, _PARTS = 512, 2
#: Inputs, and the widths of their vectors; 0: of 16 bytes, which the compiler sees itself.
INPUTS = {"bfloat16": (0, *VECTORS, 1), "float8_e4m3fn": (0,)}
QUICK = (
    "bfloat16 16x32x128 of 3 worst nt", "bfloat16 64x64x64 of 8 worst nt", "bfloat16 64x64x64 of 3 plain tn",
    "float8_e4m3fn 32x32x128 of 3 worst nt", "bfloat16 in vectors of 1 32x32x128 of 3 worst nt",
)  # fmt: skip


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    for dtype, widths in INPUTS.items():
        for vector, tile, how in itertools.product(widths, TILES[1 if "8" in dtype else 2], ("worst", "plain")):
            extent = _SIZE + vector
            problem = Problem(
                extent, extent, extent, 1, dtype, "bfloat16", aligned=not vector, vectors=(vector or 1,) * 2,
                scales="tensor" if "8" in dtype else "none",
            )  # fmt: skip
            if Way(problem, DEVICES[_ARCH], tile).held > MOST_HELD:
                continue
            for layout in ("nt",) if "8" in dtype else ("nn", "nt", "tn", "tt"):
                of_vectors = f" in vectors of {vector}" * bool(vector)
                shape = "x".join(map(str, tile[:3]))
                name = f"{dtype}{of_vectors} {shape} of {tile.stages} {how} {layout}"
                if is_wanted(_ARCH, name):
                    yield Case(_ARCH, name, *_made(problem, tile, how, layout), how)


def _made(problem: Problem, tile: Tile, how: str, layout: str) -> tuple[Plan, Layout]:
    extent = problem.m
    strides = {"n": (0, extent, 1), "t": (0, 1, extent)}
    made = Layout(strides[layout[0]], strides[layout[1]], (0, _SIZE, 1))
    if how == "worst":
        wide = (0, 2**30, 1)
        made = made._replace(
            out=wide, residual=wide, bias=1, scaled=True, activation="gelu", scale_a=(0, 1), scale_b=(0, 1)
        )
        problem = replace(problem, k=problem.k + (problem.vector if not problem.aligned else 16), scales="row",
                          out_dtype="float32")  # fmt: skip
    grid = Grid.of(problem.m, problem.n, problem.k, *tile[:3])
    schedule = Schedule("static", grid, Raster("row_major"), grid.tiles)
    if how == "worst":
        shares = _PARTS * grid.tiles
        schedule = Schedule("stream_k", replace(grid, k_steps=2 * grid.k_steps), Raster("row_major"), shares,
                            shares=shares)  # fmt: skip
    candidate = Candidate(ONE_TILE, tile[:3], schedule, 1.0, tile.warps, tile.stages)
    return of_candidate(problem, DEVICES[_ARCH], "portable", candidate, how), made


def source(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    arguments = arguments_of(case.plan, case.layout)
    address = 2 if case.plan.problem.vector == 1 and not case.plan.problem.aligned else 0
    return arguments.kernel, fill_gemm(arguments, case.plan, case.layout, address=address), arguments.options


def rules(case: Case, kernel: Any, said: str) -> Rules:
    ptx = kernel.asm["ptx"]
    found = common_rules(case, kernel, said, {})
    found["copies that do not wait"] = ("cp.async" in ptx, case.plan.problem.aligned or case.plan.problem.vector > 1)
    found["what stands before the count of a tile's parts"] = (
        before_counts(ptx),
        {"bar"} if case.how == "worst" else set(),
    )
    return found
