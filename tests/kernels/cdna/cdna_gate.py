"""The compile gate of the CDNA GEMM: compiled with no GPU, as its launch has it compiled, and what came out of it.

Run by `test_cdna_compiles`, in a process of its own and by whatever Python has the Triton that is meant: needs Triton,
no torch. ``python cdna_gate.py quick|all [processes]`` prints one JSON object a line.

What is compiled of each tile of `tilestream.plan.policy.cdna_tiles.TILES`, for each architecture:

* ``plain``: a queue, even K, no epilogue: what runs most; in the four layouts of the operands;
* ``worst``: stream_k where the tile may be cut, a batch, uneven K, fp32 out, alpha, a scale a row and column, bias,
  residual, exact gelu;
* ``arriving``: ``worst``, with A's rows in uniform chunks and B's columns in ragged ones;
* ``far``: operands, output and residual that a buffer's offsets do not reach;
* ``static``, ``stealing``, ``table``: the rest of the schedules;

with bfloat16, and some of it with float16 and 8-bit operands, of the kind that the architecture multiplies.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "portable"))

import triton
from gate import DEVICES as PORTABLE
from gate import gate_arguments

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
    outstanding,
    spread,
    stage_cost,
)
from tilestream.plan.problem import FNUZ, FP8, ITEMSIZE, OCP, Incoming, Problem, result_name
from tilestream.plan.raster import raster_of, split_of
from tilestream_tools.isa import amdgcn
from tilestream_tools.isa.build import Pointer, build

DEVICES = {arch: replace(PORTABLE[arch], backend="cdna") for arch in ("gfx942", "gfx950")}
LAYOUTS = ("nt", "nn", "tn", "tt")
_SIZE = 4096
#: Rows that lie further apart than a buffer's offsets reach, eight rows on.
_FAR = 2**27


class Configuration(NamedTuple):
    """A launch, and what its kernel is."""

    name: str
    arch: str
    plan: Plan
    layout: Layout
    tile: Tile


def configurations(what: str) -> Iterator[Configuration]:
    """Those of ``"all"``, or of ``"quick"``."""
    for arch, device in DEVICES.items():
        for tile in fitting(TILES[arch], device):
            for dtype, how, layout in _of_a_tile(tile, arch):
                if tile not in fitting((tile,), device, ITEMSIZE[dtype]):
                    continue
                if what == "all" or (arch, tile[:2], tile.copies, dtype, how, layout) in QUICK:
                    yield make(arch, tile, dtype, how, layout)


#: One of each that is told apart.
QUICK = (
    ("gfx942", (256, 256), "staged", "bfloat16", "plain", "nt"),
    ("gfx942", (128, 128), "direct", "bfloat16", "plain", "nt"),
    ("gfx942", (128, 128), "staged", "bfloat16", "plain", "nn"),
    ("gfx942", (128, 128), "staged", "float8_e4m3fnuz", "plain", "nt"),
    ("gfx950", (256, 256), "direct", "bfloat16", "plain", "nt"),
    ("gfx950", (256, 128), "direct", "bfloat16", "plain", "tn"),
    ("gfx950", (128, 128), "direct", "float8_e4m3fn", "plain", "nt"),
    ("gfx950", (32, 64), "direct", "bfloat16", "arriving", "nt"),
    ("gfx950", (128, 128), "direct", "bfloat16", "static", "nt"),
)


def _of_a_tile(tile: Tile, arch: str) -> Iterator[tuple[str, str, str]]:
    """Dtype, how, layout."""
    for layout in LAYOUTS:
        yield "bfloat16", "plain", layout
    yield "float16", "plain", "nt"
    yield "bfloat16", "worst", "nt"
    yield "bfloat16", "worst", "nn"
    for how in ("arriving", "far", "static", "stealing", "table"):
        yield "bfloat16", how, "nt"
    kinds = FNUZ if arch == "gfx942" else OCP
    yield kinds[0], "plain", "nt"
    yield kinds[1], "worst", "nt"
    yield kinds[0], "plain", "nn"


def make(arch: str, tile: Tile, dtype: str, how: str, layout: str) -> Configuration:
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
    strides = {"n": (0, _SIZE, 1), "t": (0, 1, _SIZE)}
    a, b = ((k, 1) if layout[0] == "n" else (1, _SIZE)), ((_SIZE, 1) if layout[1] == "n" else (1, k))
    made = Layout((0, *a), (0, *b), strides["n"])
    if full:
        step = _SIZE * k if how == "worst" else 0
        out = (0, _FAR, 1) if how == "far" else (step, _SIZE, 1)
        made = Layout(
            (step, *a), (step, *b), out, bias=1, residual=out, scaled=True, activation="gelu", scale_a=(0, 1),
            scale_b=(0, 1),
        )  # fmt: skip
    if how == "far":
        made = made._replace(a=(0, _FAR, 1), b=(0, 1, _FAR))
    name = f"{arch} {tile.block_m}x{tile.block_n} {tile.copies} {dtype} {how} {layout}"
    return Configuration(name, arch, plan, made, tile)


def fill(plan: Plan, layout: Layout, probe: bool = False) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """What `tilestream.launch.cdna.launch.GemmLaunch` has compiled: options, and arguments of no address."""
    arguments = Arguments(plan, layout, probe=probe)
    problem, schedule = plan.problem, plan.schedule
    addend = "bfloat16" if problem.fp8 else problem.dtype
    scale = None if problem.scales == "none" else Pointer("float32", 4)
    queue = schedule.kind != "static" or plan.gate is not None
    operands = (
        *map(Pointer, problem.dtypes), Pointer(problem.out_dtype),
        None if layout.bias is None else Pointer(addend),
        None if layout.residual is None else Pointer(addend), scale, scale,
        Pointer("float32") if schedule.slots else None,
        Pointer("int32") if schedule.slots else None,
        Pointer("int64") if queue else None,
        None if schedule.raster.table is None else Pointer("int32"),
        Pointer("int32") if probe else None, 0, 0, 1.5, 0.5,
    )  # fmt: skip
    return arguments.options, arguments.fill(operands, 1024 if probe else 0, gate_arguments(plan))


# What came out -------------------------------------------------------------------------------------------------------


def report(configuration: Configuration, kernel: Any) -> dict[str, Any]:
    """What a test asserts on, and what it should be."""
    text = amdgcn.parse(kernel.asm["amdgcn"])
    loop = text.main_loop
    assert loop is not None
    code = list(text.instructions)
    return {
        "name": configuration.name,
        "triton": triton.__version__,
        "spilled": text.spilled,
        "registers": text.vgprs,
        "accumulators": text.agprs,
        "shared": kernel.metadata.shared,
        "mfma": dict(loop.mfma),
        "counts": dict(loop.counts),
        "waits": [wait["vmcnt"] for wait in loop.waits if "vmcnt" in wait],
        "order": ring_order(loop.instructions),
        # The last steps, behind the loop, are steps too; here the text's order is the one they run in.
        "order_behind": waits_then_barriers([one for one in code if one.line > loop.instructions[-1].line])
        if any(one.kind == "load_to_lds" for one in code)
        else [],
        "branches": loop.counts["branch"],
        "first_lanes": sum(one.mnemonic.startswith("v_readfirstlane") for one in loop.instructions),
        "polling": polling_faults(text),
        "in_lanes": text.in_lanes,
        "expected": expected(configuration),
    }


def waits_then_barriers(code: Sequence[amdgcn.Instruction]) -> list[str]:
    """Whether anything of shared memory is touched between a wait for copies and the barrier that comes with it.

    Of a kernel that copies: a wait for loads into registers comes with no barrier.
    """
    faults, ready = [], True
    for one in code:
        if "vmcnt" in one.waits:
            ready = False
        elif one.kind in ("barrier", "lds_write", "store", "valu", "load"):  # the last four wait for loads
            ready = True
        elif one.kind in ("lds_read", "load_to_lds") and not ready:
            faults.append(f"{one.mnemonic} at once behind a wait for copies")
    return sorted(set(faults))


def ring_order(code: Sequence[amdgcn.Instruction]) -> list[str]:
    """What of a loop's order breaks the ring's protocol: see `tilestream.kernels.cdna.ring`."""
    kinds = [one.kind for one in code]
    copies = [i for i, kind in enumerate(kinds) if kind == "load_to_lds"]
    reads = [i for i, kind in enumerate(kinds) if kind == "lds_read"]
    barriers = [i for i, kind in enumerate(kinds) if kind == "barrier"]
    waits = [i for i, one in enumerate(code) if "vmcnt" in one.waits]
    faults = []
    if copies:
        # From a wait on: a barrier, and only then reads and copies.
        ready = False
        for one, kind in zip(code, kinds, strict=True):
            if "vmcnt" in one.waits:
                ready = False
            elif kind == "barrier":
                ready = True
            elif kind in ("lds_read", "load_to_lds") and not ready:
                faults.append("reads or copies between a wait for copies and its barrier")
        if not waits or not barriers or min(reads[0], copies[0]) < waits[0]:
            faults.append("a step begins without a wait")
    # What a warp has read is in its registers before it tells the others that they may overwrite it.
    for i in barriers:
        past = [j for j in reads if j < i] or [j - len(code) for j in reads]
        if not any(code[j].waits.get("lgkmcnt") == 0 for j in range(past[-1] + 1, i + 1)):
            faults.append("a barrier that reads of shared memory may pass")
    return sorted(set(faults))


def expected(configuration: Configuration) -> dict[str, Any]:
    """By what the plan says."""
    _, arch, plan, layout, _ = configuration
    arguments = Arguments(plan, layout)
    tile, size = arguments.tile, ITEMSIZE[plan.problem.dtype]
    m, n, k = instruction(arch, size)
    down, across = spread(tile.block_m, tile.block_n, tile.warps)
    eight = {"float8_e4m3fnuz": "fp8_fp8", "float8_e5m2fnuz": "bf8_bf8"}.get(plan.problem.dtype, "f8f6f4")
    types = {"bfloat16": "bf16", "float16": "f16"}.get(plan.problem.dtype, eight)
    direct = tile.copies == "direct"
    width = lane_bytes(tile, arch) if direct else 16
    cost = stage_cost(tile, width, tile.copies)
    turned = any(one.turned for one in (arguments.x, arguments.y))
    loads = [fetches(one, rows, plan, size) for one, rows in ((arguments.x, tile.block_m), (arguments.y, tile.block_n))]
    return {
        "mfma": {
            f"{m}x{n}x{k}_{types}": tile.block_m // m // down * (tile.block_n // n // across) * plan.block[2] // k
        },
        "load_to_lds": {f"load_to_lds {8 * width}": cost.loads} if direct else {},
        # A square of a lane may be narrower than its vectors: then there are more of them.
        "load": None if direct or turned else cost.loads,
        "lds_write": None if direct or turned else cost.writes,
        "waits": [outstanding(tile, arch)] if direct else None,
        # Through registers, an operand is put while the other one's loads are in flight.
        "least": outstanding(tile, arch) if direct else min(loads),
        "barriers": 1 if direct else 2,
        "shared": tile.stage_bytes * (tile.stages if direct else 1),
        "gated": plan.gate is not None,
    }


def fetches(operand: Operand, rows: int, plan: Plan, size: int) -> int:
    """Loads of a lane that fetch a step of an operand into registers."""
    block_k = plan.block[2]
    tile = (rows, block_k) if operand.k_major else (block_k, rows)
    share = rows * block_k // (LANES * plan.warps)
    vector = CELL_BYTES // size
    if operand.turned:
        made: Any = getattr(turned_layout, "fn", turned_layout)
        vector = made(*tile, vector, plan.warps).size_per_thread[1]
    return share // vector


def one(configuration: Configuration) -> dict[str, Any]:
    """Compiled, and reported on."""
    try:
        options, filled = fill(configuration.plan, configuration.layout)
        return report(configuration, build(gemm, filled, options, configuration.arch)[0])
    except Exception as error:
        return {"name": configuration.name, "error": f"{type(error).__name__}: {error}"[-600:]}


def main() -> None:
    what, processes = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for found in pool.imap_unordered(one, configurations(what), 4):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
