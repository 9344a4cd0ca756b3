"""The compile gate of Hopper's GEMM: each tile of `tilestream.plan.policy.hopper.TILES`, both ways round (`HOWS`).

Registers of a thread, by ``setmaxnreg``. With two math loops: 256 before the partitions begin, 120 each while they
wait, then 232, 232 and 40 for the load warp's group (or 240, 240 and 24): all that an SM has. With one: 232 and 24,
then 216 and 40. With three: 256 and 80, then 160 three times and 32.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from gates.engine import RELEASE, Case, IsWanted, Rules, fill_gemm, shared_memory
from gates.hopper import DEVICE, Assembly, described
from tilestream.core.chunks import Chunks
from tilestream.core.consumers import sharing
from tilestream.core.copy_items import WORDS_A_THREAD
from tilestream.kernels.hopper.gemm import gemm
from tilestream.kernels.hopper.ring import ITEMS
from tilestream.launch.gate import NO_PUBLISH, PublishArguments
from tilestream.launch.gemm_arguments import NO_LOCAL, Layout
from tilestream.launch.hopper.arguments import Arguments
from tilestream.launch.hopper.multicast import rewritten
from tilestream.plan.arrival_order import in_arrival_order
from tilestream.plan.candidate import Forced
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy import hopper
from tilestream.plan.policy.hopper import PAIRED, TILES, TRIPLE, Tile
from tilestream.plan.problem import FP8, ITEMSIZE, Incoming, Problem
from tilestream_tools.isa import sass
from tilestream_tools.isa.kernels import copy_arguments, pointer
from tilestream_tools.verify.protocol import Ring

_SIZE, _BATCH = 4096, 2
_ROW_MAJOR, _COLUMN_MAJOR = (0, _SIZE, 1), (0, 1, _SIZE)
#: Of an output that TMA cannot address.
_ODD = (0, _SIZE + 1, 1)


def _uniform(rows: int, *how: int) -> Incoming:
    return Incoming(Chunks.uniform(rows, 512), *how)


def _ragged(rows: int, *how: int) -> Incoming:
    return Incoming(Chunks((0, 5, 5, rows)), *how)


#: Registers of a thread before the partitions begin, and while they wait, by the number of math loops.
WAITING = {1: (24, 232), 2: (120, 256), 3: (80, 256)}


class How(NamedTuple):
    """What a launch has beside its tile and operands.

    Attributes
    ----------
    kinds
        Of schedules: the first that the plan has for the tile.
    full
        fp32 out, alpha, a scale a row and column, bias, residual, exact gelu.
    batch, out, residual
        Matrices; strides of the output, and of the residual where they are others.
    rows, columns
        Chunks of A's rows and of B's columns.
    in_order
        Whether tiles are taken as their chunks arrive.
    publishes
        Whether chunks of the output are signalled.
    table, queues
        Whether the order is the caller's; queues that are shared.
    local
        Whether the rank holds some rows itself.
    probe
        Whether the kernel notes what workers take, for tests.
    """

    kinds: tuple[Any, ...] = ("dynamic",)
    full: bool = False
    batch: int = 1
    out: tuple[int, int, int] = _ROW_MAJOR
    residual: tuple[int, int, int] | None = None
    rows: Incoming | None = None
    columns: Incoming | None = None
    in_order: bool = False
    publishes: bool = False
    table: bool = False
    queues: int | None = None
    local: bool = False
    probe: bool = False


_SPLIT = ("stream_k", "dynamic")
HOWS = {
    "plain": How(),
    "across": How(("stream_k", "static"), out=_COLUMN_MAJOR),
    "worst": How(_SPLIT, full=True, batch=_BATCH),
    "direct": How(_SPLIT, full=True, out=_ODD),
    "wide": How(_SPLIT, full=True, out=_ODD, residual=(0, 2**20, 1)),
    "uncut": How(full=True, out=_ODD),
    "odd": How(_SPLIT, out=_ODD),
    "rows": How(rows=_uniform(_SIZE), in_order=True),
    "split": How(("stream_k",), full=True, batch=_BATCH, rows=_ragged(_BATCH * _SIZE)),
    "arriving": How(full=True, batch=_BATCH, rows=_uniform(_BATCH * _SIZE), columns=_ragged(_SIZE)),
    "ordered": How(full=True, batch=_BATCH, rows=_ragged(_BATCH * _SIZE), in_order=True),
    "published": How(publishes=True),
    "static": How(("static",)),
    "stealing": How(queues=2),
    "table": How(table=True),
    "weight": How(columns=_ragged(_SIZE), in_order=True),
    "parted": How(("stream_k", "static"), publishes=True),
    "copied": How(rows=_uniform(_SIZE, 0, 16), in_order=True),
    "copied weight": How(columns=_ragged(_SIZE, 0, 2), in_order=True),
    "local": How(rows=_uniform(_SIZE), in_order=True, local=True),
    "probed": How(probe=True),
    "full": How(full=True, batch=_BATCH),
    "batched": How(("static",), batch=_BATCH),
}
#: With fewer registers of the load warp's.
_SLIM = ("slim static", "slim table", "slim full")
#: A's dtype, B's, whether 8-bit products may stay in the tensor cores.
INPUTS = {
    "bfloat16": ("bfloat16", "", True),
    "float16": ("float16", "", True),
    "fp8": ("float8_e4m3fn", "", True),
    "fp8 precise": ("float8_e4m3fn", "", False),
    "fp8 mixed": ("float8_e5m2", "float8_e4m3fn", True),
    "tf32": ("float32", "", True),
}
#: One of each kind, those that compile in a second or two.
QUICK = (
    "cooperative 128x256 bfloat16 plain nt", "cooperative 256x192 bfloat16 plain nt",
    "cooperative 128x128 fp8 plain nt", "ping_pong 64x128 bfloat16 plain nn",
    "cooperative 128x128 fp8 precise plain nt",
    "ping_pong 64x128 swapped tf32 plain nt", "ping_pong 64x128 swapped bfloat16 across nt",
    "single 64x64 bfloat16 worst nt", "cooperative 128x256 bfloat16 rows nt", "cooperative 128x192 bfloat16 local nt",
    "ping_pong 64x128 swapped bfloat16 weight nt", "cooperative 128x128 bfloat16 copied nt",
    "single 64x64 bfloat16 copied weight nt", "single 64x32 bfloat16 split nt", "single 64x64 bfloat16 arriving nt",
    "cooperative 128x192 bfloat16 ordered nt", "single 64x16 swapped bfloat16 direct nt",
    "cooperative 128x256 bfloat16 odd nt", "ping_pong 64x128 swapped bfloat16 odd nt",
    "cooperative 128x16 swapped bfloat16 plain nt", "cooperative 128x128 bfloat16 published nt",
    "ping_pong 64x128 swapped bfloat16 parted nt", "cooperative 128x128 bfloat16 probed nt",
    "cooperative 128x128 fp8 slim nt", "ping_pong 64x128 bfloat16 slim full nt",
    "paired 256x256 bfloat16 plain nt", "paired 512x192 swapped bfloat16 plain nn",
)  # fmt: skip
#: Tiles that are compiled in every way: one of each kind.
_EVERY_WAY = (("cooperative", 128, 128), ("cooperative", 128, 192), ("ping_pong", 64, 128), ("single", 64, 64))
#: Tiles that gathers get.
_GATHERS = (("cooperative", 128, 256), ("cooperative", 128, 224))


def cases(is_wanted: IsWanted) -> Iterator[Case]:
    for tile in (*TILES, *TRIPLE, *PAIRED):
        # A square tile has one way round.
        for swapped in (False, True)[: 1 if tile.rows == tile.columns else 2]:
            for inputs, how, layout in _of_a_tile(tile, swapped):
                name = f"{tile.variant} {tile.rows}x{tile.columns}{' swapped' * swapped} {inputs} {how} {layout}"
                if is_wanted("sm_90a", name):
                    yield from _made(name, tile, swapped, inputs, how, layout)


def _of_a_tile(tile: Tile, swapped: bool) -> Iterator[tuple[str, str, str]]:
    """Inputs, how, layout. Schedules and layouts are the load warp's, whatever the tile: few tiles have them all."""
    if tile in PAIRED:
        yield from itertools.product(("bfloat16",), ("plain",), ("nn", "nt", "tn", "tt"))
        yield from itertools.product(("bfloat16",), ("slim", "direct", "across", "table", "full", "batched"), ("nt",))
        yield from itertools.product(("fp8", "fp8 precise", "tf32", "float16"), ("plain",), ("nt",))
        return
    every_way = tile[:3] in _EVERY_WAY
    for layout in ("nn", "nt", "tn", "tt") if every_way else ("nt",):
        yield "bfloat16", "plain", layout
        yield "bfloat16", "slim", layout
    hows = [how for how in HOWS if how not in ("plain", "full", "batched")]
    for how in (*hows, *_SLIM) if every_way else hows[:10]:
        yield "bfloat16", how, "nt"
    for inputs in ("fp8", "fp8 precise"):
        rest = ("worst", "split", "arriving") if every_way or not swapped else ()
        for how in ("plain", "slim", *rest):
            yield inputs, how, "nt"
    if tile[:3] in _GATHERS:
        yield "bfloat16", "local", "nt"
        if tile.columns == 256:
            yield "bfloat16", "local", "nn"
    for how in ("plain", "slim", *(("worst", "split") if every_way else ())):
        yield "tf32", how, "nt"
    if every_way:
        yield "fp8", "local", "nt"
        yield "float16", "wide", "nt"
        yield "fp8 mixed", "plain", "nt"


def _made(name: str, tile: Tile, swapped: bool, inputs: str, how: str, layout: str) -> Iterator[Case]:
    """The case, if the plan has a candidate for it."""
    dtype, other, fast = INPUTS[inputs]
    slim, how = how.startswith("slim"), how.removeprefix("slim").strip() or "plain"
    made = HOWS[how]
    if made.local and swapped:  # of columns none stand apart
        return
    problem = Problem(
        _SIZE, _SIZE, _SIZE, made.batch, dtype, "bfloat16" if made.batch == 1 and inputs != "tf32" else "float32",
        made.rows, made.columns, b_dtype=other, scales="row" if made.full else "tensor" if dtype in FP8 else "none",
        fast_accum=fast, plain=not made.full and made.out != _ODD, tf32=inputs == "tf32",
        publishes=Incoming(Chunks.uniform(_SIZE, 500), 3) if made.publishes else None,
    )  # fmt: skip
    block = (tile.columns, tile.rows) if swapped else (tile.rows, tile.columns)
    order = tuple(range(-(-_SIZE // block[0]) * -(-_SIZE // block[1]))) if made.table else None
    forced = Forced(
        block, order, made.queues, variant=tile.variant, registers=hopper.REGISTERS[1] if slim else None
    )  # fmt: skip
    found = [
        one
        for kind in made.kinds
        for one in hopper.candidates(problem, DEVICE, 131, kinds=(kind,), forced=forced)
        if one.swap_ab == swapped
    ]
    if not found:
        return
    chosen = found[0]
    if made.in_order:
        chosen, _ = in_arrival_order(problem, "hopper", chosen, False, "arrival", None)
    plan = of_candidate(problem, DEVICE, "hopper", chosen, "the gate's")
    # Without fast accumulation a stage is 128 of K, whatever the tile.
    row = tile if fast else tile._replace(lines=1)
    yield Case("sm_90a", name, plan, _layout(made, layout), (row, made))


def _layout(how: How, layout: str) -> Layout:
    a, b = ({"n": _ROW_MAJOR, "t": _COLUMN_MAJOR}[letter] for letter in layout)
    made = Layout(a, b, how.out)
    if how.full:
        made = made._replace(
            bias=1, residual=how.residual or how.out, scaled=True, activation="gelu", scale_a=(0, 1), scale_b=(0, 1)
        )
    if how.batch > 1:
        step = _SIZE * _SIZE
        out = (step, *how.out[1:])
        made = made._replace(a=(step, *a[1:]), b=(step, *b[1:]), out=out, residual=out)
    return made


def source(case: Case, trace: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    _, how = case.how
    more = {"trace": True} if trace else {"probe": how.probe, "local_rows": 512 if how.local else None}
    options, filled = fill(case.plan, case.layout, **more)
    return gemm, filled, options


def fill(
    plan: Plan, layout: Layout, out_address: int = 0, probe: bool = False, trace: bool = False,
    local_rows: int | None = None,
) -> tuple[dict[str, Any], tuple[Any, ...]]:  # fmt: skip
    """What `tilestream.launch.hopper.launch.GemmLaunch` has compiled: options, and arguments of no address.

    ``out_address``: modulo 16. ``local_rows``: rows that the rank holds itself.
    """
    arguments = Arguments(plan, layout, out_address % 16 == 0, probe, trace, local_rows)
    problem = plan.problem
    x, y = problem.dtypes[::-1] if plan.swap_ab else problem.dtypes
    parts = (
        (arguments.x, x), (arguments.local, x), *((part, y) for part in arguments.y),
        (arguments.out, problem.out_dtype),
    )  # fmt: skip
    maps = [described(*part) for part in parts]
    words = pointer("int32", problem.publishes is not None, 4)
    log = pointer("int64" if trace else "int32", trace or probe)
    return arguments.options, fill_gemm(
        arguments, plan, layout, maps, out_address=out_address, log=log, capacity=1024 if probe else 0,
        publish=NO_PUBLISH if words is None else PublishArguments(words, words, 1), copies=copy_arguments(plan),
        local=NO_LOCAL if local_rows is None else (3, 5, 8),
    )  # fmt: skip


def again(case: Case, kernel: Any) -> dict[str, Any]:
    """Pairs of CTAs are assembled from PTX that is rewritten."""
    return rewritten(kernel) if case.plan.ctas > 1 else {}


# What must be true of it ----------------------------------------------------------------------------------------------


def rules(case: Case, kernel: Any, said: str) -> Rules:
    plan, (tile, _), found = case.plan, case.how, Assembly(kernel, said)
    problem, arguments = plan.problem, Arguments(plan, case.layout)
    size, out_size = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]
    names = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "float32": "tf32"}
    x, y = (names[dtype] for dtype in (problem.dtypes[::-1] if plan.swap_ab else problem.dtypes))
    depth, parts = 32 // size, len(arguments.widths)
    copies = [
        tile.lines if made.box[-1] == plan.block[2] else -(-made.box[-1] * size // 128)
        for made in (arguments.x, *arguments.y)
        if made is not None
    ]
    arriving = (problem.rows is not None) + (problem.columns is not None)
    in_order, publishes = plan.schedule.split == "chunks", problem.publishes is not None
    stored = arguments.out is not None
    buffers = tile.loops * tile.buffers(out_size) * tile.rows_per_loop * plan.strip * out_size
    prefetches = plan.schedule.kind != "static" and not plan.schedule.slots and not arriving
    # Without fast accumulation each product is waited for; so is a narrow part that takes x from registers.
    narrow = hopper.rs_tail(arguments.widths, 8 * size)
    in_flight = 0 if problem.fp8 and not problem.fast_accum else parts - narrow
    # Of a consumer's warps: before a wait and an arrival, and, where x is read into registers, behind that: not by 3.9.
    most_barriers = 3 if narrow and RELEASE < (3, 9) else 2
    round_of = {16: "128", 2: "U16"}
    rounds = Counter(re.findall(r"\bLDG\.E\.(U8|U16|64|128)\.STRONG\.GPU\b", found.sass))
    copied = [one for one in (problem.rows, problem.columns) if one] if plan.copies != "none" else []
    paired = plan.ctas > 1
    halves = (2 if paired else sharing(tile.variant)) - 1
    ring = Ring(plan.stages, ITEMS.value, "cooperative" if paired else plan.variant, ctas=plan.ctas)
    loops = sass.k_loops(found.sass)
    # A strip that is stored line by line goes through shared memory, too, of which plans keep more for C buffers.
    lines = tile.loops * tile.rows_per_loop * arguments.config.STRIP * out_size * (arguments.config.STORE == "lines")
    assert lines <= buffers
    shared = plan.stages * 128 * tile.lines * (arguments.rows + tile.columns) + (buffers if stored else lines)
    return {
        **found.rules(
            registers={*plan.registers, *WAITING[tile.loops]},
            products={f"m64n{width}k{depth}.f32.{x}.{y}" for width in arguments.widths},
            # Where the load warp prefetches a ticket, there is a loop before that and one behind it. Rows that stand
            # apart are loaded by the instruction that loads the others: its map is selected.
            loads=(copies[0] * (1 + halves) + sum(copies[1:])) * (1 + prefetches),
            # One instruction does for four copies, each a warp's.
            stores=tile.loops * (tile.columns // plan.strip) if stored else 0,
            # An operand's chunks are waited for by items, and by the last worker out; each looks, then naps and looks.
            # In arrival order the worker that takes an item looks and naps before them, in one place.
            looks=4 * arriving + in_order,
            naps=2 * arriving + in_order,
        ),
        "copies to both CTAs of a pair": (found.count_sass(r"\bUTMALDG\S*MULTICAST"), paired * sum(copies[1:])),
        # Each part of a worker's warps: before its first step, and behind its last. The three that only meet the others
        # have one text on 3.9.
        "meetings of a pair": (
            found.count_ptx(r"\bbarrier\.cluster\.wait"),
            2 * (4 if RELEASE >= (3, 9) else 6) if paired else 0,
        ),
        "arrivals at both CTAs of a pair": (
            found.count_ptx(r"\bmbarrier\.arrive\.release\.cluster"), paired * tile.loops * (1 + bool(in_flight))
        ),
        "K loops": (
            [loop["gmma"] for loop in loops], [tile.rows_per_loop // 64 * plan.block[2] // depth * parts] * tile.loops
        ),
        "multiplications in flight": ({loop["in_flight"] for loop in loops}, {in_flight}),
        "barriers of a K step": (
            # Without fast accumulation a step waits for its product anyway.
            max((loop["barriers"] for loop in loops), default=0) if in_flight else 0, range(most_barriers + 1)
        ),
        # The load warp's behind the gate; each math loop's behind its stores, where it publishes.
        "fences": (
            found.count_ptx(r"\bfence\.proxy\.async\.global\b"), tile.loops if publishes else min(1, arriving)
        ),
        # Error records, signals of what is copied, and of what is published: each must be seen by the host and peers.
        "signals and records": (
            sorted(set(re.findall(r"\batom\.global\.([\w.]*)\bexch\.", found.ptx))),
            ["sys.release."] if arriving or publishes else [],
        ),
        # A thread's loads of a round of copies, by width; loads of 8 bytes are other counts.
        "a round of copies": (
            {width: count for width, count in rounds.items() if width != "64"},
            {round_of[one.copied]: WORDS_A_THREAD for one in copied},
        ),
        # A warp's instruction stores 8 x 8 elements of 16 bits four times.
        "matrix stores": (
            found.count_ptx(r"\bstmatrix\."),
            tile.loops * tile.rows_per_loop * tile.columns // 1024 if stored and out_size == 2 else 0,
        ),
        # How many arrivals each takes.
        "barriers": ([count for _, count in sass.made_barriers(found.ptx)], list(ring.barriers().values())),
        "barriers that are not used": (
            sass.idle_barriers(found.ptx, list(Counter(barrier.name for barrier in ring.barriers()).values())), []
        ),
        "shared memory": shared_memory(kernel, case.arch, shared),
    }  # fmt: skip
