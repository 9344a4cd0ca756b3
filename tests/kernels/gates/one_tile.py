"""The compile gate of the portable GEMM whose programs have a tile each: each tile of `policy.one_tile.TILES`.

* ``worst``: shares, K uneven, 64-bit offsets, fp32 out, alpha, a scale a row and column, bias, residual, exact gelu;
* ``plain``: a tile a program, even K, no epilogue, or of 8-bit operands a scale each: what runs most;
* ``clusters of 2``, ``of 8``: as ``worst``, with parts that are added in a cluster's shared memory.

Tiles with a plain epilogue alone have ``shares`` for ``worst``, and a plain epilogue in clusters.

In the four layouts of the operands, clusters in one; in vectors of each width with which the plan takes the tile, and
in widths of which each operand has one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gates.engine import DEVICES, Case, IsWanted, Pointer, Rules, fill_gemm
from gates.portable_gemm import before_counts, common_rules
from tilestream.core.exchange import room
from tilestream.core.grid import Grid
from tilestream.core.order import Raster
from tilestream.core.schedule import Schedule
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.portable.arguments import arguments_of
from tilestream.plan.candidate import ONE_TILE, Candidate
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy.one_tile import TILES, Tile, Way
from tilestream.plan.problem import VECTORS, Problem

_ARCH = "sm_90a"
_SIZE = 512
#: Inputs, and the widths of their vectors; 0: of 16 bytes, which the compiler sees itself.
INPUTS = {"bfloat16": (*((x, x) for x in (0, *VECTORS, 1)), (8, 1), (1, 8)), "float8_e4m3fn": ((0, 0),)}
#: And the parts of a tile's K.
HOWS = {"worst": 2, "plain": 1, "clusters of 2": 2, "clusters of 8": 8}
QUICK = (
    "bfloat16 16x32x128 of 3 worst nt", "bfloat16 64x64x64 of 8 worst nt", "bfloat16 64x64x64 of 3 plain tn",
    "float8_e4m3fn 32x32x128 of 3 worst nt", "bfloat16 in vectors of 1 32x32x128 of 3 worst nt",
    "bfloat16 64x64x64 of 3 clusters of 8 nt", "bfloat16 in vectors of 1 and 8 64x32x64 of 3 worst nt",
)  # fmt: skip


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    for dtype, widths in INPUTS.items():
        for vectors, tile, how in itertools.product(widths, TILES[1 if "8" in dtype else 2], HOWS):
            aligned = vectors == (0, 0)
            extent = _SIZE if aligned else _SIZE + max(vectors)
            problem = Problem(
                extent, extent, extent, 1, dtype, "bfloat16", aligned=aligned, vectors=(1, 1) if aligned else vectors,
                scales="tensor" if "8" in dtype else "none",
            )  # fmt: skip
            way, more = (Way(replace(problem, plain=plain), DEVICES[_ARCH], tile) for plain in (True, False))
            is_plain = how == "plain" or not more.has_registers(True)
            if not way.has_registers(how != "plain"):
                continue
            named = "shares" if how == "worst" and is_plain else how
            for layout in ("nt",) if "8" in dtype or "clusters" in how else ("nn", "nt", "tn", "tt"):
                widths_of = str(vectors[0]) if vectors[0] == vectors[1] else f"{vectors[0]} and {vectors[1]}"
                of_vectors = f" in vectors of {widths_of}" * (not aligned)
                shape = "x".join(map(str, tile[:3]))
                name = f"{dtype}{of_vectors} {shape} of {tile.stages} {named} {layout}"
                if is_wanted(_ARCH, name):
                    yield Case(_ARCH, name, *_made(problem, tile, how, layout, is_plain), how)


def _made(problem: Problem, tile: Tile, how: str, layout: str, is_plain: bool) -> tuple[Plan, Layout]:
    extent, parts = problem.m, HOWS[how]
    strides = {"n": (0, extent, 1), "t": (0, 1, extent)}
    made = Layout(strides[layout[0]], strides[layout[1]], (0, _SIZE, 1))
    if not is_plain:
        wide = (0, 2**30, 1)
        made = made._replace(
            out=wide, residual=wide, bias=1, scaled=True, activation="gelu", scale_a=(0, 1), scale_b=(0, 1)
        )
        more = 16 if problem.aligned else max(problem.vectors)
        problem = replace(problem, k=problem.k + more, scales="row", out_dtype="float32")
    grid = Grid.of(problem.m, problem.n, problem.k, *tile[:3])
    schedule = Schedule("static", grid, Raster("row_major"), grid.tiles)
    if parts > 1:
        # Shares that begin inside of a tile are no cluster's.
        shares, steps = parts * grid.tiles + (how == "worst"), parts * grid.k_steps
        schedule = Schedule("stream_k", replace(grid, k_steps=steps), Raster("row_major"), shares, shares=shares)
    candidate = Candidate(ONE_TILE, tile[:3], schedule, 1.0, tile.warps, tile.stages)
    return of_candidate(problem, DEVICES[_ARCH], "portable", candidate, how), made


def source(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    arguments = arguments_of(case.plan, case.layout)
    problem = case.plan.problem
    given = [Pointer(problem.dtype, 2 * (vector == 1 and not problem.aligned)) for vector in problem.vectors]
    return arguments.kernel, fill_gemm(arguments, case.plan, case.layout, given), arguments.options


def rules(case: Case, kernel: Any, said: str) -> Rules:
    ptx = kernel.asm["ptx"]
    found = common_rules(case, kernel, said, {})
    problem = case.plan.problem
    found["copies that do not wait"] = ("cp.async" in ptx, problem.aligned or max(problem.vectors) > 1)
    found["CTAs that share a tile meet"] = (ptx.count("barrier.cluster"), 4 * ("clusters" in case.how))
    if "clusters" in case.how:
        needed = kernel.metadata.shared + room(*case.plan.block[:2])
        found["shared memory has room for the sums"] = (needed <= DEVICES[_ARCH].shared, True)
    found["what stands before the count of a tile's parts"] = (
        before_counts(ptx),
        {"bar"} if case.how == "worst" else set(),
    )
    return found
