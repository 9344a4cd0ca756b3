"""The compile gate of the Hopper GEMM: compiled with no GPU, as its launch has it compiled, and what came out of it.

Run by `test_hopper_compiles`, in a process of its own and by whatever Python has the Triton that is meant: needs
Triton, no torch. ``python hopper_gate.py quick|all [processes]`` prints one JSON object a line; with ``names`` only
what all of them are called, and compiles nothing.

What is compiled of each tile of `tilestream.plan.policy.hopper.TILES`, both ways round (`HOWS`):

* ``plain``: a queue, no epilogue: what runs most; in the four layouts of the operands;
* ``worst``: stream_k, a batch, fp32 out, alpha, a scale a row and column, bias, residual, exact gelu;
* ``direct``, ``wide``: all of that, but stored from registers; and with 64-bit offsets;
* ``across``: stream_k, no epilogue, into an output that lies in columns;
* ``static``, ``stealing``, ``table``: the rest of the schedules;
* ``rows``, ``weight``: ``plain``, with A's rows in uniform chunks; with B's columns in ragged ones; in arrival order;
* ``copied``, ``copied weight``: ``rows`` and ``weight``, with copies that the kernel makes itself, in words of 16 and
  of 2 bytes;
* ``ordered``: ``worst``, with A's rows in ragged chunks, in arrival order;
* ``split``: ``worst``, with A's rows in ragged chunks;
* ``arriving``: ``worst``, with both, and a queue: with both there is no stream_k;
* ``apart``: ``rows``, some of which stand apart, as a rank's own rows do of what it gathers;
* ``published``: ``plain``, with the output in chunks that are signalled; ``parted``: the same by stream_k;
* ``probed``: ``plain``, which notes what workers take, for tests;
* ``slim``: ``plain`` with fewer registers of the load warp's; or another so (``full``: ``worst``, by a queue);

as far as the plan has the tile for that; with 16-bit operands, with float32 ones as tf32, and with 8-bit ones of one
and of two dtypes, with and without fast accumulation.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "portable"))

import triton
from gate import TARGETS, Pointer, _caught, _NoGpu, gate_arguments
from gate import gemm as portable_gemm  # noqa: F401
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilestream.core.chunks import Chunks
from tilestream.core.copy_items import WORDS_A_THREAD
from tilestream.core.device import DeviceProperties
from tilestream.kernels.hopper.gemm import gemm
from tilestream.kernels.hopper.ring import ITEMS
from tilestream.launch.gate import NO_PUBLISH, PublishArguments
from tilestream.launch.gemm_arguments import Layout
from tilestream.launch.hopper.arguments import Arguments, Map
from tilestream.plan.arrival_order import in_arrival_order
from tilestream.plan.candidate import Candidate, Forced
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy import hopper
from tilestream.plan.policy.hopper import TILES, Tile
from tilestream.plan.problem import FP8, ITEMSIZE, Incoming, Problem
from tilestream_tools.isa import sass
from tilestream_tools.isa.kernels import copy_arguments
from tilestream_tools.verify.protocol import Ring

_TYPES = {
    "bfloat16": gl.bfloat16, "float16": gl.float16, "float32": gl.float32, "float8_e4m3fn": gl.float8e4nv,
    "float8_e5m2": gl.float8e5,
}  # fmt: skip


def described(made: Map | None, dtype: str) -> TensorDescriptor | None:
    """`tilestream.launch.hopper.launch.described_by`, without torch."""
    if made is None:
        return None
    element = _TYPES[dtype]
    rows = math.prod(made.box[:-1])
    swizzle = gl.NVMMASharedLayout.get_default_for([rows, made.box[-1]], element).swizzle_byte_width
    layout = gl.NVMMASharedLayout(swizzle, element.primitive_bitwidth, len(made.box))
    rank = len(made.box)
    return TensorDescriptor(Pointer(dtype), [16] * rank, [256] * (rank - 2) + [16, 1], list(made.box), layout)


def fill(
    plan: Plan, layout: Layout, out_address: int = 0, bias_address: int = 0, probe: bool = False, trace: bool = False,
    apart: int | None = None,
) -> tuple[dict[str, Any], tuple[Any, ...]]:  # fmt: skip
    """What `tilestream.launch.hopper.launch.GemmLaunch` has compiled: options, and arguments of no address.

    Parameters
    ----------
    out_address, bias_address
        Modulo 16.
    apart
        Rows that stand apart.
    """
    arguments = Arguments(plan, layout, out_address % 16 == 0, probe, trace, apart)
    problem, schedule = plan.problem, plan.schedule
    x, y = problem.dtypes[::-1] if plan.swap_ab else problem.dtypes
    parts = (
        (arguments.x, x), (arguments.local, x), *((part, y) for part in arguments.y),
        (arguments.out, problem.out_dtype),
    )  # fmt: skip
    maps = [described(made, dtype) for made, dtype in parts]
    addend = "bfloat16" if problem.fp8 else problem.dtype
    scale = None if problem.scales == "none" else Pointer("float32")
    given = (
        Pointer(problem.out_dtype, out_address),
        None if layout.bias is None else Pointer(addend, bias_address),
        None if layout.residual is None else Pointer(addend),
        scale, scale,
        Pointer("float32") if schedule.slots else None,
        Pointer("int32") if schedule.slots else None,
        None if schedule.kind == "static" and plan.gate is None else Pointer("int64"),
        None if schedule.raster.table is None else Pointer("int32"),
        Pointer("int64") if trace else Pointer("int32") if probe else None,
    )  # fmt: skip
    gate, copies = gate_arguments(plan), copy_arguments(plan)
    publish = NO_PUBLISH if problem.publishes is None else PublishArguments(Pointer("int32", 4), Pointer("int32", 4), 1)
    tiles = (0, 0, 0) if apart is None else (3, 5, 8)
    return arguments.options, arguments.fill(
        (*maps, *given, 0, 0, 1.5, 0.5), 1024 if probe else 0, gate, publish, copies, tiles
    )


def no_gpu() -> None:
    """From now on this process compiles for an H100 that is not there."""
    triton.runtime.driver.set_active(_NoGpu(TARGETS["sm_90a"]))


def build(options: dict[str, Any], filled: tuple[Any, ...], kernel: Any = gemm) -> tuple[Any, str]:
    """Compile, by way of the kernel's own launch path: the kernel, and what the assembler said."""
    no_gpu()
    with _caught() as said:
        made = kernel.run(*filled, grid=(1,), warmup=True, **options)
        if hasattr(made, "result"):
            made = made.result()
    return made, said[0]


# What is compiled ----------------------------------------------------------------------------------------------------

DEVICE = DeviceProperties("an H100", "portable", 132, 5e11, 3.3e12, "a stub", "sm_90", 232448)
HOWS = (
    "plain", "across", "worst", "direct", "wide", "uncut", "rows", "split", "arriving", "ordered", "published",
    "static", "stealing", "table", "weight", "parted", "copied", "copied weight", "apart", "probed", "slim static",
    "slim table", "slim full",
)  # fmt: skip
LAYOUTS = ("nn", "nt", "tn", "tt")
#: A's dtype, B's, whether 8-bit products may stay in the tensor cores.
INPUTS = {
    "bfloat16": ("bfloat16", "", True),
    "float16": ("float16", "", True),
    "fp8": ("float8_e4m3fn", "", True),
    "fp8 precise": ("float8_e4m3fn", "", False),
    "fp8 mixed": ("float8_e5m2", "float8_e4m3fn", True),
    "tf32": ("float32", "", True),
}
_SIZE = 4096
#: Of a residual that is a view of something wider.
_WIDE = (0, 2**20, 1)


class Configuration(NamedTuple):
    """A launch, and what its kernel is."""

    name: str
    plan: Plan
    layout: Layout
    tile: Tile
    apart: int | None = None
    probe: bool = False


def configurations(what: str) -> Iterator[Configuration]:
    """Those of ``"all"``, or of ``"quick"``: of the latter each is a tile of the plan's."""
    left = set(QUICK)
    for row in TILES:
        # Of a square tile there is one way round; the schedules and layouts are the load warp's, whatever the tile.
        for swapped in (False, True)[: 1 if row.rows == row.columns else 2]:
            for inputs, how, layout in _of_a_tile(row, swapped):
                if what == "all" or (row[:3], swapped, inputs, how, layout) in QUICK:
                    made = _make(row, swapped, inputs, how, layout)
                    if made is not None:
                        left.discard((row[:3], swapped, inputs, how, layout))
                        yield made
    assert not left, f"the plan has no candidate for {left}"


#: One of each that is told apart, those that compile in a second or two.
QUICK = (
    (("cooperative", 128, 256), False, "bfloat16", "plain", "nt"),
    (("cooperative", 256, 192), False, "bfloat16", "plain", "nt"),
    (("cooperative", 128, 128), False, "fp8", "plain", "nt"),
    (("ping_pong", 64, 128), False, "bfloat16", "plain", "nn"),
    (("cooperative", 128, 128), False, "fp8 precise", "plain", "nt"),
    (("ping_pong", 64, 128), True, "tf32", "plain", "nt"),
    (("ping_pong", 64, 128), True, "bfloat16", "across", "nt"),
    (("single", 64, 64), False, "bfloat16", "worst", "nt"),
    (("cooperative", 128, 256), False, "bfloat16", "rows", "nt"),
    (("cooperative", 128, 192), False, "bfloat16", "apart", "nt"),
    (("ping_pong", 64, 128), True, "bfloat16", "weight", "nt"),
    (("cooperative", 128, 128), False, "bfloat16", "copied", "nt"),
    (("single", 64, 64), False, "bfloat16", "copied weight", "nt"),
    (("single", 64, 32), False, "bfloat16", "split", "nt"),
    (("single", 64, 64), False, "bfloat16", "arriving", "nt"),
    (("cooperative", 128, 192), False, "bfloat16", "ordered", "nt"),
    (("single", 64, 16), True, "bfloat16", "direct", "nt"),
    (("cooperative", 128, 16), True, "bfloat16", "plain", "nt"),
    (("cooperative", 128, 128), False, "bfloat16", "published", "nt"),
    (("ping_pong", 64, 128), True, "bfloat16", "parted", "nt"),
    (("cooperative", 128, 128), False, "bfloat16", "probed", "nt"),
    (("cooperative", 128, 128), False, "fp8", "slim", "nt"),
    (("ping_pong", 64, 128), False, "bfloat16", "slim full", "nt"),
)


def _of_a_tile(row: Tile, swapped: bool) -> Iterator[tuple[str, str, str]]:
    """Inputs, how, layout."""
    few = row[:3] in (
        ("cooperative", 128, 128), ("cooperative", 128, 192), ("ping_pong", 64, 128), ("single", 64, 64)
    )  # fmt: skip
    for layout in LAYOUTS if few else ("nt",):
        yield "bfloat16", "plain", layout
        yield "bfloat16", "slim", layout
    for how in HOWS[1:] if few else HOWS[1:10]:
        yield "bfloat16", how, "nt"
    for inputs in ("fp8", "fp8 precise"):
        yield inputs, "plain", "nt"
        yield inputs, "slim", "nt"
        if few or not swapped:
            yield inputs, "worst", "nt"
            yield inputs, "split", "nt"
            yield inputs, "arriving", "nt"
    if row[:3] in (("cooperative", 128, 256), ("cooperative", 128, 224)):  # which gathers get
        yield "bfloat16", "apart", "nt"
        if row.columns == 256:
            yield "bfloat16", "apart", "nn"
    yield "tf32", "plain", "nt"
    yield "tf32", "slim", "nt"
    if few:
        yield "tf32", "worst", "nt"
        yield "tf32", "split", "nt"
        yield "fp8", "apart", "nt"
        yield "float16", "wide", "nt"
        yield "fp8 mixed", "plain", "nt"


def _make(row: Tile, swapped: bool, inputs: str, how: str, layout: str) -> Configuration | None:
    dtype, other, fast = INPUTS[inputs]
    name = f"{row.variant} {row.rows}x{row.columns}{' swapped' * swapped} {inputs} {how} {layout}"
    slim, how = how.startswith("slim"), how.removeprefix("slim").strip() or "plain"
    full = how in ("worst", "direct", "wide", "uncut", "split", "arriving", "ordered", "full")
    batch = 2 if how in ("worst", "split", "arriving", "ordered", "full") else 1
    rows = Incoming(Chunks.uniform(batch * _SIZE, 512)) if how in ("rows", "arriving", "apart") else None
    rows = Incoming(Chunks.uniform(_SIZE, 512), 0, 16) if how == "copied" else rows
    rows = Incoming(Chunks((0, 5, 5, batch * _SIZE))) if how in ("split", "ordered") else rows
    columns = Incoming(Chunks((0, 5, 5, _SIZE))) if how in ("weight", "arriving") else None
    columns = Incoming(Chunks((0, 5, 5, _SIZE)), 0, 2) if how == "copied weight" else columns
    scales = "row" if full else "tensor" if dtype in FP8 else "none"
    publishes = Incoming(Chunks.uniform(_SIZE, 500), 3) if how in ("published", "parted") else None
    out = "bfloat16" if batch == 1 and inputs != "tf32" else "float32"
    problem = Problem(
        _SIZE, _SIZE, _SIZE, batch, dtype, out, rows, columns, b_dtype=other, scales=scales, fast_accum=fast,
        plain=not full, tf32=inputs == "tf32", publishes=publishes,
    )  # fmt: skip
    parts = (full and how not in ("uncut", "arriving", "ordered", "full")) or how in ("across", "parted")
    kind = "stream_k" if parts else "static" if how == "static" else "dynamic"
    tile = (row.columns, row.rows) if swapped else (row.rows, row.columns)
    order = tuple(range(-(-_SIZE // tile[0]) * -(-_SIZE // tile[1]))) if how == "table" else None
    queues, registers = 2 if how == "stealing" else None, hopper.REGISTERS[1] if slim else None
    found = _candidates(problem, row, swapped, kind, tile, order, queues, registers)
    if not found and how in ("across", "parted"):
        found = _candidates(problem, row, swapped, "static", tile)
    if not found and how in ("worst", "direct", "wide"):  # of tiles that are not cut along K
        found = _candidates(problem, row, swapped, "dynamic", tile)
    if not found or (how == "apart" and swapped):  # of columns none stand apart
        return None
    chosen = found[0]
    if how in ("rows", "weight", "ordered", "copied", "copied weight", "apart"):
        chosen, _ = in_arrival_order(problem, "hopper", chosen, False, "arrival", None)
    plan = of_candidate(problem, DEVICE, "hopper", chosen, "the gate's")
    strides = {"n": (0, _SIZE, 1), "t": (0, 1, _SIZE)}
    a, b, stored = strides[layout[0]], strides[layout[1]], strides["t" if how == "across" else "n"]
    if how in ("direct", "wide", "uncut"):
        stored = (0, _SIZE + 1, 1)
    made = Layout(a, b, stored)
    if full:
        made = made._replace(
            bias=1, residual=_WIDE if how == "wide" else stored, scaled=True, activation="gelu", scale_a=(0, 1),
            scale_b=(0, 1),
        )  # fmt: skip
    if batch > 1:
        step = _SIZE * _SIZE
        made = made._replace(a=(step, *a[1:]), b=(step, *b[1:]), out=(step, *stored[1:]), residual=(step, *stored[1:]))
    # Without fast accumulation a stage is 128 of K, whatever the tile.
    return Configuration(
        name, plan, made, row if fast else row._replace(lines=1), 512 if how == "apart" else None, how == "probed"
    )


def _candidates(
    problem: Problem, row: Tile, swapped: bool, kind: Any, tile: tuple[int, int], order: Any = None,
    queues: int | None = None, registers: tuple[int, int] | None = None,
) -> list[Candidate]:  # fmt: skip
    """The plan's own, of one row of `TILES`, one way round: what the plan does not have is not compiled."""
    made = hopper.candidates(
        problem, DEVICE, 131, kinds=(kind,),
        forced=Forced(tile, order, queues, variant=row.variant, registers=registers),
    )  # fmt: skip
    return [one for one in made if one.swap_ab == swapped]


# What came out -------------------------------------------------------------------------------------------------------


def report(configuration: Configuration, kernel: Any, said: str) -> dict[str, Any]:
    """What a test asserts on, and what it should be."""
    ptx, (code, usage) = kernel.asm["ptx"], sass.disassembled(kernel.asm["cubin"])
    return {
        "name": configuration.name,
        "triton": triton.__version__,
        "spilled": sass.spilled_bytes(said),
        "stack": sass.stack_bytes(usage),
        "local": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "notes": sorted(set(re.findall(r"C7[56]\d\d|[^\n]*ignored[^\n]*", said))),
        "registers": sorted(set(map(int, re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx)))),
        "wgmma": sorted(sass.wgmma_shapes(ptx)),
        "loads": len(re.findall(r"\bUTMALDG", code)),
        "stores": len(re.findall(r"\bUTMASTG", code)),
        "k_loops": sass.k_loops(code),
        # The gate's: looks at signals, pauses between them, fences before copies.
        "looks": sass.looks(ptx),
        "naps": len(re.findall(r"\bnanosleep\.", ptx)),
        # Error records, signals of what is copied, and of what is published: each must be seen by whom they tell.
        "exchanges": sorted(set(re.findall(r"\batom\.global\.([\w.]*)\bexch\.", ptx))),
        "fences": len(re.findall(r"\bfence\.proxy\.async\.global\b", ptx)),
        # Copies that the kernel makes: a thread's loads of a round, by their width.
        "rounds": dict(Counter(re.findall(r"\bLDG\.E\.(U8|U16|64|128)\.STRONG\.GPU\b", code))),
        "shared": kernel.metadata.shared,
        # Barriers: how many arrivals each takes; arrays that nobody uses; places that something else has.
        "barriers": [arrivals for _, arrivals in sass.made_barriers(ptx)],
        "idle": sass.idle_barriers(ptx, arrays(configuration.plan)),
        "reused": sass.reused_barriers(ptx),
        "matrix_stores": len(re.findall(r"\bstmatrix\.", ptx)),
        "expected": expected(configuration),
    }


def ring_of(plan: Plan) -> Ring:
    """What the checker explores of such a kernel."""
    return Ring(plan.stages, ITEMS.value, plan.variant)


def arrays(plan: Plan) -> list[int]:
    """Barriers of each name, in the order they are made."""
    return list(Counter(barrier.name for barrier in ring_of(plan).barriers()).values())


def expected(configuration: Configuration) -> dict[str, Any]:
    """By what the plan says."""
    _, plan, layout, row, *_ = configuration
    problem = plan.problem
    arguments = Arguments(plan, layout)
    size, out_size = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]
    names = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float32": "tf32"}
    x, y = problem.dtypes[::-1] if plan.swap_ab else problem.dtypes
    depth = 32 // size
    halves = 2 if row.variant == "cooperative" else 1
    copies = [
        row.lines if made.box[-1] == plan.block[2] else -(-made.box[-1] * size // 128)
        for made in (arguments.x, *arguments.y)
        if made is not None
    ]
    strips = row.columns // plan.strip
    arriving = (problem.rows is not None) + (problem.columns is not None)
    buffers = row.loops * row.buffers(out_size) * row.rows_per_loop * plan.strip * out_size
    stored = arguments.out is not None
    asks = plan.schedule.kind != "static" and not plan.schedule.slots and not arriving
    return {
        # Before the partitions begin, while they wait, and what they then have: see the facts of setmaxnreg in
        # `test_hopper_compiles`.
        "registers": sorted((*plan.registers, *((24, 232) if row.loops == 1 else (120, 256)))),
        "wgmma": sorted({f"m64n{width}k{depth}.f32.{names[x]}.{names[y]}" for width in arguments.widths}),
        # Where the load warp asks for its next ticket, there is a loop before that and one behind it.
        # Rows that stand apart are loaded by the instruction that loads the others: its map is selected.
        "loads": (halves * copies[0] + sum(copies[1:])) * (2 if asks else 1),
        # One instruction does for four copies, each a warp's.
        "stores": row.loops * strips if arguments.out else 0,
        "k_loops": row.loops,
        "gmma": row.rows_per_loop // 64 * plan.block[2] // depth * len(arguments.widths),
        # Without fast accumulation each product is waited for; a narrow part that takes x from registers is, too.
        "narrow": hopper.rs_tail(arguments.widths, 8 * size),
        "in_flight": 0
        if problem.fp8 and not problem.fast_accum
        else (len(arguments.widths) - hopper.rs_tail(arguments.widths, 8 * size)),
        # An operand's chunks are waited for by items, and by the last worker out; each looks, and then naps and looks.
        # In arrival order, before them by who takes: that looks, and naps, in one place.
        "looks": (4 * arriving + (plan.schedule.split == "chunks"), 0),
        "naps": 2 * arriving + (plan.schedule.split == "chunks"),
        # The load warp's behind the gate; each math loop's behind its stores, where it publishes.
        "fences": row.loops if problem.publishes is not None else min(1, arriving),
        "exchanges": ["sys.release."] if arriving or problem.publishes is not None else [],
        "round": {{16: "128", 2: "U16"}[one.copied]: WORDS_A_THREAD for one in (problem.rows, problem.columns) if one}
        if plan.copies != "none"
        else {},
        "barriers": list(ring_of(plan).barriers().values()),
        # A warp's instruction stores 8 x 8 elements of 16 bits four times.
        "matrix_stores": row.rows * row.columns * (row.loops * row.rows_per_loop // row.rows) // 1024
        if stored and out_size == 2
        else 0,
        "shared": plan.stages * 128 * row.lines * (row.rows + row.columns) + (buffers if stored else 0),
    }


def launched(configuration: Configuration) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """`fill`, of such a launch."""
    _, plan, layout, _, apart, probe = configuration
    return fill(plan, layout, probe=probe, apart=apart)


def one(configuration: Configuration) -> dict[str, Any]:
    """Compiled, and reported on."""
    try:
        return report(configuration, *build(*launched(configuration)))
    except Exception as error:
        return {"name": configuration.name, "error": f"{type(error).__name__}: {error}"[-600:]}


def main() -> None:
    what, processes = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    if what == "names":
        for made in configurations("all"):
            tile = made.name.split()[:2]
            print(json.dumps({"name": made.name, "tile": " ".join(tile)}))
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for found in pool.imap_unordered(one, configurations(what), 1):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
