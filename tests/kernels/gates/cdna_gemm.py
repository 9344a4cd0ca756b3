"""The compile gate of CDNA's GEMM: each tile of `tilestream.plan.policy.cdna_tiles.TILES`. Nothing of it was run.

* ``plain``: a queue, even K, no epilogue: what runs most; in the four layouts of the operands;
* ``worst``: stream_k where the tile may be cut, a batch, uneven K, fp32 out, alpha, a scale a row and column, bias,
  residual, exact gelu;
* ``arriving``: ``worst``, with A's rows in uniform chunks and B's columns in ragged ones;
* ``far``: operands, output and residual that a buffer's offsets do not reach;
* ``static``, ``stealing``, ``table``: the rest of the schedules;

with bfloat16, and some of it with float16 and 8-bit operands, of the kind that the architecture multiplies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gates.cdna import DEVICES, loop_rules, spills, waits_then_barriers
from gates.engine import Case, IsWanted, Rules, fill_gemm, shared_memory
from polling import polling_faults
from tilestream.core.chunks import Chunks
from tilestream.core.grid import Grid
from tilestream.core.schedule import Schedule
from tilestream.kernels.cdna.gemm import gemm
from tilestream.kernels.cdna.ring import turned_layout
from tilestream.launch.cdna.arguments import Arguments, Operand
from tilestream.launch.gemm_arguments import Layout
from tilestream.plan.candidate import Candidate
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy.cdna_tiles import (
    CELL_BYTES,
    LANES,
    TILES,
    Tile,
    fitting,
    instruction,
    lane_bytes,
    spread,
    stage_cost,
)
from tilestream.plan.problem import FNUZ, FP8, ITEMSIZE, OCP, Incoming, Problem, result_name
from tilestream.plan.raster import raster_of, split_of
from tilestream_tools.isa import amdgcn

_SIZE = 4096
#: Rows that lie further apart than a buffer's offsets reach, eight rows on.
_FAR = 2**27
#: Of an instruction's name; what is not here is a float8 of gfx950's.
_TYPES = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fnuz": "fp8_fp8", "float8_e5m2fnuz": "bf8_bf8"}
#: Scalar registers that are kept in lanes of vector ones, at most, by whether there is a gate: the recorded ceiling.
IN_LANES = {True: 192, False: 96}
QUICK = (
    "gfx942 256x256 staged bfloat16 plain nt", "gfx942 128x128 direct bfloat16 plain nt",
    "gfx942 128x128 staged bfloat16 plain nn", "gfx942 128x128 staged float8_e4m3fnuz plain nt",
    "gfx950 256x256 direct bfloat16 plain nt", "gfx950 256x128 direct bfloat16 plain tn",
    "gfx950 128x128 direct float8_e4m3fn plain nt", "gfx950 32x64 direct bfloat16 arriving nt",
    "gfx950 128x128 direct bfloat16 static nt",
)  # fmt: skip
#: Dtype, how, layout. What is None is a kind of 8 bits that the architecture multiplies: the first, then the second.
OF_A_TILE = (
    ("bfloat16", "plain", "nt"), ("bfloat16", "plain", "nn"), ("bfloat16", "plain", "tn"), ("bfloat16", "plain", "tt"),
    ("float16", "plain", "nt"), ("bfloat16", "worst", "nt"), ("bfloat16", "worst", "nn"),
    ("bfloat16", "arriving", "nt"), ("bfloat16", "far", "nt"), ("bfloat16", "static", "nt"),
    ("bfloat16", "stealing", "nt"), ("bfloat16", "table", "nt"), (0, "plain", "nt"), (1, "worst", "nt"),
    (0, "plain", "nn"),
)  # fmt: skip


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    for arch, device in DEVICES.items():
        kinds = FNUZ if arch == "gfx942" else OCP
        for tile in fitting(TILES[arch], device):
            for dtype, how, layout in OF_A_TILE:
                dtype = kinds[dtype] if isinstance(dtype, int) else dtype
                name = f"{tile.block_m}x{tile.block_n} {tile.copies} {dtype} {how} {layout}"
                if tile in fitting((tile,), device, ITEMSIZE[dtype]) and is_wanted(arch, name):
                    yield made(arch, name, tile, dtype, how, layout)


def made(arch: str, name: str, tile: Tile, dtype: str, how: str, layout: str) -> Case:
    """A plan as the cost model would make it, of one tile."""
    full = how in ("worst", "arriving", "far")
    size, k = ITEMSIZE[dtype], _SIZE + (16 if full else 0)
    problem = Problem(
        _SIZE, _SIZE, k, 2 if how == "worst" else 1, dtype, "float32" if full else result_name(dtype, None),
        scales="row" if full else "tensor" if dtype in FP8 else "none",
    )  # fmt: skip
    if how == "arriving":
        rows, columns = Incoming(Chunks.uniform(_SIZE, 512)), Incoming(Chunks((0, 5, 5, _SIZE)))
        problem = replace(problem, rows=rows, columns=columns)
    block = (tile.block_m, tile.block_n, tile.block_k(size))
    grid = Grid.of(problem.m, problem.n, problem.k, *block, batch=problem.batch)
    order = tuple(range(grid.num_m * grid.num_n)) if how == "table" else None
    raster = raster_of(problem, grid, block, 8, order)
    kind: Any = "stream_k" if full and tile.splits else "static" if how == "static" else "dynamic"
    queues = 8 if how == "stealing" else 1
    workers = DEVICES[arch].workers - (1 if full else 0)
    schedule = Schedule(kind, grid, raster, workers, queues, split_of(raster) if queues > 1 else "items")
    found = Candidate(tile.copies, block, schedule, 0.0, tile.warps, tile.stages)
    plan = of_candidate(problem, DEVICES[arch], "cdna", found, "the gate's")
    step, row = _SIZE * k if how == "worst" else 0, _FAR if how == "far" else _SIZE
    a = (step, k, 1) if layout[0] == "n" else (step, 1, _SIZE)
    b = (step, _SIZE, 1) if layout[1] == "n" else (step, 1, k)
    if how == "far":
        a, b = (0, _FAR, 1), (0, 1, _FAR)
    strides = Layout(a, b, (step, row, 1))
    if full:
        strides = strides._replace(
            bias=1, residual=(step, row, 1), scaled=True, activation="gelu", scale_a=(0, 1), scale_b=(0, 1)
        )
    return Case(arch, name, plan, strides)


def source(case: Case) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    arguments = Arguments(case.plan, case.layout)
    return gemm, fill_gemm(arguments, case.plan, case.layout), arguments.options


# What must be true of it ----------------------------------------------------------------------------------------------


def rules(case: Case, kernel: Any, _: str) -> Rules:
    parsed, plan, arch = amdgcn.parse(kernel.asm["amdgcn"]), case.plan, case.arch
    loop = parsed.main_loop
    assert loop is not None
    arguments = Arguments(plan, case.layout)
    tile, size = arguments.tile, ITEMSIZE[plan.problem.dtype]
    m, n, k = instruction(arch, size)
    down, across = spread(tile.block_m, tile.block_n, tile.warps)
    shape = f"{m}x{n}x{k}_{_TYPES.get(plan.problem.dtype, 'f8f6f4')}"
    products = tile.block_m // m // down * (tile.block_n // n // across) * plan.block[2] // k
    # Steps of an iteration: the compiler unrolls short loops.
    steps = max(1, loop.mfma.get(shape, 0) // products)
    direct = tile.copies == "direct"
    width = lane_bytes(tile, arch) if direct else 16
    cost = stage_cost(tile, width, tile.copies)
    operands = ((arguments.x, tile.block_m), (arguments.y, tile.block_n))
    # Copies that may remain in flight when the loop waits for a step: the operand of the wait. Through registers, an
    # operand is put while the other one's loads are in flight.
    left = cost.loads * (tile.stages - 2)
    least = left if direct else min(_fetches(one, rows, plan, size) for one, rows in operands)
    is_gated = plan.gate is not None
    # The last steps, behind the loop, are steps too; here the text's order is the one they run in.
    behind = [one for one in parsed.instructions if one.line > loop.instructions[-1].line]
    copies = any(one.kind == "load_to_lds" for one in parsed.instructions)
    found = {
        **loop_rules(
            loop, {f"load_to_lds {8 * width}": cost.loads} if direct else {},
            [left] if direct else None, least, steps,
        ),
        "instructions of the matrix units": (dict(loop.mfma), {shape: steps * products}),
        "waits": (any("vmcnt" in wait for wait in loop.waits), True),
        "spills": (spills(parsed), (0, 0)),
        "shuffles": (loop.counts.get("shuffle", 0), 0),
        "scalar registers in lanes": (parsed.in_lanes, range(IN_LANES[is_gated] + 1)),
        "order behind the loop": (waits_then_barriers(behind) if copies else [], []),
        # Addresses of copies, in LDS and of buffers, are the wave's: none is brought together from its lanes.
        "lanes' own addresses": (sum(one.mnemonic.startswith("v_readfirstlane") for one in loop.instructions), 0),
        "a polling loop": (polling_faults(parsed), [] if is_gated else ["no polling loop"]),
        "shared memory": shared_memory(kernel, arch, tile.stage_bytes * (tile.stages if direct else 1)),
    }  # fmt: skip
    # A square of a lane may be narrower than its vectors: then there are more loads and writes.
    if not direct and not any(one.turned for one, _ in operands):
        found["loads"] = (loop.counts.get("load 128", 0), steps * cost.loads)
        found["writes to shared memory"] = (loop.counts.get("lds_write 128", 0), steps * cost.writes)
    return found


def _fetches(operand: Operand, rows: int, plan: Plan, size: int) -> int:
    """Loads of a lane that fetch a step of an operand into registers."""
    block_k = plan.block[2]
    tile = (rows, block_k) if operand.k_major else (block_k, rows)
    vector = CELL_BYTES // size
    if operand.turned:
        layout: Any = getattr(turned_layout, "fn", turned_layout)
        vector = layout(*tile, vector, plan.warps).size_per_thread[1]
    return rows * block_k // (LANES * plan.warps) // vector
