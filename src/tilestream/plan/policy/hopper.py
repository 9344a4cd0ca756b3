"""The policy of the Hopper kernel: candidates -> cost -> compare.

A candidate is a row of `TILES`, either way round, with a schedule and a raster. What bounds a row stands beside it.
`tilestream.plan.policy.hopper_costs` says what it costs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from tilestream.core.chunks import Chunks, Incoming
from tilestream.core.device import DeviceProperties
from tilestream.core.grid import INT31, Grid
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind, Schedule
from tilestream.plan.candidate import FREE, Candidate, Deferred, Forced, Refusal, ctas_of, require
from tilestream.plan.policy.hopper_costs import LINE, Cut, Model, TileFacts, TileModel
from tilestream.plan.problem import ITEMSIZE, Problem
from tilestream.plan.raster import first_batch_of, group_in, has_own_queues, queues_of, raster_of

#: What a worker is made of: see `tilestream.kernels.hopper.gemm`. The last is taken where it is forced: see `PAIRED`.
VARIANTS = ("cooperative", "triple", "ping_pong", "single", "paired")
#: Operands whose products are added in fp32, and outputs. float32 as tf32, to which the copies to shared memory round.
DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float32")
OUT_DTYPES = ("bfloat16", "float16", "float32")
#: Bytes of shared memory kept free of stages: barriers and the item ring.
_BARRIER_BYTES = 1024
#: The most bytes of a C buffer; the widest strip that goes through it; and the widest where partial results are reduced
#: before more than a plain epilogue, which takes registers.
_STRIP_BYTES, _STRIP, _NARROW = 8192, 64, 32
#: More stages gain nothing: the copies in flight already cover the memory's latency.
_MOST_STAGES = 12
#: Extents below this, and a tile more, are within 31 bits.
_MOST = 2**31 - 512
#: Clusters of SMs (GPCs) of the device: the SMs of one read from L2 by the same way.
CLUSTERS = 8
#: The fewest K steps of a part of a tile, where tiles are cut into equal parts.
LEAST_STEPS = 4
#: The most registers of a thread for an accumulator and the product of a part of 128 columns that is added to it: what
#: ptxas does without spilling, of no more than two parts.
_MOST_TWICE = {"cooperative": 192, "triple": 0, "ping_pong": 160, "single": 192, "paired": 192}
#: An accumulator of more registers leaves none for more than a plain epilogue; of yet more, for stream_k.
_ROOMY, _LEAST_ROOM = 128, 160
#: An accumulator of 128 rows and of more registers leaves none to reduce parts before more than a plain epilogue. Where
#: that stores to what TMA cannot address, which the plan cannot distinguish from a bias, Triton 3.6 and 3.9 keep up to
#: 25 words on the stack, in strips of 16 columns or of 32.
_PARTS_ROOM = 96
#: The most parts that a tile's columns are multiplied in.
MOST_PARTS = 3
#: Registers of a thread of the load warp, and of the math warps: with two math loops (the plan's choice, and what can
#: be forced), and with one.
REGISTERS, SINGLE_REGISTERS = ((40, 232), (24, 240)), (40, 216)
#: The same with three math loops, which leave the load warp no more.
TRIPLE_REGISTERS = (32, 160)
#: The same where an operand arrives. The gate needs more (with 40 Triton 3.6 spilled up to 24 bytes, 3.9 up to 68), and
#: accumulators of up to `_GATED` registers leave them.
GATED_REGISTERS, SINGLE_GATED_REGISTERS = (56, 224), (72, 184)
_GATED = 128


class Tile(NamedTuple):
    """A tile of the accumulator, whose rows are those of A (of B with swap_ab), and the math loops that compute it.

    ``lines`` is K of a stage, in lines of 128 bytes.
    """

    variant: str
    rows: int
    columns: int
    lines: int = 1

    @property
    def loops(self) -> int:
        """Math loops."""
        return {"single": 1, "triple": 3}.get(self.variant, 2)

    @property
    def ctas(self) -> int:
        """CTAs of a worker."""
        return ctas_of(self.variant)

    @property
    def rows_per_loop(self) -> int:
        """Rows of the accumulator that a math loop holds."""
        return self.rows // {"cooperative": 2, "triple": 3, "paired": 4}.get(self.variant, 1)

    @property
    def registers(self) -> int:
        """Registers of a thread that an accumulator takes."""
        return self.rows_per_loop * self.columns // 128

    def strip(self, out_size: int, most: int = _STRIP) -> int:
        """Columns that go through a C buffer at a time."""
        return min(widths(self.columns)[-1], most, _STRIP_BYTES // (self.rows_per_loop * out_size))

    def buffers(self, out_size: int) -> int:
        """C buffers of a math loop: two, if there are strips to take turns."""
        return min(2, self.columns // self.strip(out_size))

    def block_k(self, size: int) -> int:
        """Elements of K in a stage."""
        return 128 * self.lines // size

    def stages(self, out_size: int, shared: int) -> int:
        """Stages that fit the shared memory beside the C buffers."""
        buffers = self.loops * self.buffers(out_size) * self.rows_per_loop * self.strip(out_size) * out_size
        line = 128 * self.lines * (self.rows // self.ctas + self.columns)
        return min(_MOST_STAGES, (shared - buffers - _BARRIER_BYTES) // line)


#: An accumulator of 64 x 256 or 128 x 128, of fp32 in four warps, is 128 registers of a thread.
TILES = (
    Tile("cooperative", 128, 256),
    Tile("cooperative", 128, 224),
    Tile("cooperative", 128, 192),
    Tile("cooperative", 128, 160),
    Tile("cooperative", 128, 128),
    Tile("cooperative", 128, 96),
    Tile("cooperative", 256, 192),
    Tile("cooperative", 256, 160),
    Tile("cooperative", 256, 128),
    Tile("cooperative", 256, 96),
    Tile("ping_pong", 128, 128),
    Tile("ping_pong", 64, 256),
    Tile("cooperative", 128, 64, 2),
    Tile("ping_pong", 64, 128),
    Tile("single", 64, 128, 2),
    Tile("single", 64, 64, 2),
    Tile("single", 64, 32, 2),
    Tile("single", 64, 16, 4),
    Tile("cooperative", 128, 32, 2),
    Tile("cooperative", 128, 16, 2),
)
#: Tiles of three consumers, for waves that end badly with others. Plans take none unless ``variant=`` forces it: of
#: 3072 x 3072 x 3072 in bfloat16 192x192 takes 84 us on an H200, and the plan's 192x128 79, though both are 97 % of
#: whole waves. A math warp has 160 registers, and the ring three stages.
TRIPLE = (Tile("triple", 192, 192), Tile("triple", 192, 160))
#: Tiles of two CTAs that read an operand from L2 once for both: see `tilestream.kernels.hopper.pair`. In a K
#: step 256 x 256 reads 512 rows of operands from L2, and two CTAs of 128 x 256 by themselves 768. Plans take
#: none unless ``variant=`` forces it: on an H100 they are slower (benchmarks/results/h100/gemm_pitch.json).
PAIRED = (Tile("paired", 256, 256), Tile("paired", 512, 192))


@functools.cache
def widths(columns: int, widest: int = 256) -> tuple[int, ...]:
    """The parts that the columns of a tile are multiplied in, widest first: each is a power of two."""
    powers = tuple(1 << bit for bit in range(widest.bit_length() - 1, -1, -1) if columns % widest >> bit & 1)
    return (widest,) * (columns // widest) + powers


def rs_tail(parts: tuple[int, ...], bits: int) -> bool:
    """Whether the last of a tile's parts is multiplied with x in registers: shared memory does not feed x that often.

    There must be a wide part to read it under. Operands of 8 bits are not: Triton cannot wait for a multiplication that
    has them in registers.
    """
    return parts[0] >= 128 and parts[-1] < 64 and bits == 16


def widest(problem: Problem) -> int:
    """Columns that a math loop multiplies at a time, at most: without fast accumulation it holds them twice."""
    return 128 if problem.promoted else 256


def refusal(problem: Problem, device: DeviceProperties) -> str:
    """Why this kernel does not do such a problem; empty if it does."""
    if device.arch != "sm_90":
        return f"it is for sm_90, this is {device.arch}"
    if problem.dtype == "float32" and not problem.tf32:
        return "it multiplies float32 as tf32, which torch.backends.cuda.matmul does not allow (or was not asked)"
    if problem.dtype not in DTYPES:
        return f"it multiplies {', '.join(DTYPES)}, not {problem.dtype}"
    if problem.out_dtype not in OUT_DTYPES:
        return f"its outputs are {', '.join(OUT_DTYPES)}, not {problem.out_dtype}"
    if why := problem.unfit(_MOST):
        return why
    if problem.publishes is None:
        return problem.no_tma
    rows_per_chunk = problem.publishes.chunks.rows_per_chunk
    if not rows_per_chunk:
        return "it publishes chunks of one size, and these are ragged"
    if problem.batch > 1:
        return f"it publishes the rows of one output, and there are {problem.batch}"
    least = min(tile.columns for tile in TILES)
    counted = max(2 * cdiv(problem.n, least), 2) * rows_per_chunk + problem.m  # of a chunk: `kernels.hopper.publish`
    if counted >= _MOST:
        return f"rows of a chunk that is published, by column tiles: {counted}; it counts them in 31 bits"
    return problem.no_tma


def no_pairs(problem: Problem, kinds: tuple[Kind, ...], workers: int) -> str:
    """Why no two CTAs compute a tile of such a problem together; empty if they can."""
    if "static" not in kinds:
        return f"pairs of CTAs take a static grid, of which both know their items, not {' or '.join(kinds)}"
    if problem.arriving or problem.publishes is not None:
        return "pairs of CTAs wait for no chunks and publish none"
    return "a pair of CTAs takes two workers" if workers < 2 else ""


def no_parts(problem: Problem, tile: Tile | None = None) -> str:
    """Why this kernel cuts no tile, or not this one, along K; empty if it may.

    The load warp has 40 registers for schedule and gate (`REGISTERS`): Triton 3.6 spills where it also has both
    operands' chunks in mind, or the maps of several parts of a tile's columns. So do math warps, at times.
    """
    if problem.arriving > 1:
        return "with both operands arriving the load warp has no registers for it"
    if problem.kind == "tf32" and problem.batch > 1 and tile is not None and len(widths(tile.columns)) > 2:
        return "with a batch of float32 the load warp has no registers for it beside three parts of columns"
    if problem.arriving and tile is not None and len(widths(tile.columns, widest(problem))) > 1:
        return "with an operand arriving the load warp has no registers for it beside several parts of columns"
    if tile is not None and not problem.plain and tile.rows_per_loop == 128 and tile.registers > _PARTS_ROOM:
        return "with more than a plain epilogue an accumulator of 128 rows and columns leaves no registers for it"
    return ""


def registers_of(problem: Problem, tile: Tile, queues: int | None = None) -> tuple[int, int]:
    """Registers of a thread of the load warp, and of the math warps, where none are asked for."""
    if tile.loops == 1:
        return SINGLE_GATED_REGISTERS if problem.arriving else SINGLE_REGISTERS
    if tile.loops == 3:
        return TRIPLE_REGISTERS
    if problem.arriving and tile.registers <= _GATED:
        return GATED_REGISTERS
    # With 232 Triton 3.9 keeps four words of such an accumulator's epilogue on the stack. (It is not cut along K.)
    more = problem.fp8 and tile.registers > _LEAST_ROOM and not no_registers(problem, REGISTERS[1], "static", queues)
    return REGISTERS[1] if more else REGISTERS[0]


def no_registers(
    problem: Problem, registers: tuple[int, int], kind: Kind, queues: int | None = None, tile: Tile | None = None
) -> str:  # fmt: skip
    """Why this kernel does not split registers so; empty if it does.

    24 are enough for a load warp with a grid, with one queue, or with one a worker, on Triton 3.6, 3.7 and 3.9: the
    compile gate's ``slim``.
    """
    if tile is not None and tile.loops != 2:
        made, loops = registers_of(problem, tile), "one math loop has" if tile.loops == 1 else "three math loops have"
        return f"{loops} {made} registers" if registers != made else ""
    if registers == REGISTERS[0]:
        return ""
    needs = {"a gate": problem.arriving, "stream_k": kind == "stream_k", f"queues={queues}": (queues or 1) > 1}
    needed = next((need for need, there in needs.items() if there), "")
    return f"{registers[0]} registers of the load warp's are too few for {needed}" if needed else ""


class Way(NamedTuple):
    """A tile either way round, and what of its candidates no extent decides: for each kind of schedule, fields."""

    facts: TileFacts
    swap_ab: bool
    block: tuple[int, int, int]
    kinds: dict[Kind, dict[str, object]]


def ways(problem: Problem, device: DeviceProperties, kinds: tuple[Kind, ...], forced: Forced) -> tuple[Way, ...]:
    """What there are registers and shared memory for, within what is forced; no extent of ``problem`` counts."""
    size, out_size = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]
    rows = [row for row in TILES if forced.variant in (None, row.variant)]
    if forced.variant == "paired":
        rows, kinds = list(PAIRED), ("static",)
    if forced.variant == "triple":
        rows = list(TRIPLE)
    if problem.promoted:  # a stage is as much of K as the tensor cores may add up
        rows = [row._replace(lines=1) for row in rows]
    fits = [(row, fit) for row in rows if (fit := row.stages(out_size, device.shared)) >= max(2, forced.stages or 2)]
    found = []
    for (row, fit), swap_ab in itertools.product(fits, (False, True)):
        block = (row.columns, row.rows, row.block_k(size)) if swap_ab else (row.rows, row.columns, row.block_k(size))
        if forced.tile not in (None, block[:2]) or (swap_ab and row.rows == row.columns):
            continue
        registers = forced.registers or registers_of(problem, row, forced.queues)
        alike = {
            "variant": row.variant, "block": block, "warps": 4, "stages": forced.stages or fit, "swap_ab": swap_ab,
            "buffers": row.buffers(out_size), "registers": registers,
        }  # fmt: skip
        of_kinds: dict[Kind, dict[str, object]] = {}
        for kind in kinds:
            if not has_registers(problem, row, swap_ab, kind):
                continue
            if forced.registers is not None and no_registers(problem, forced.registers, kind, forced.queues, row):
                continue
            strip = row.strip(out_size, _STRIP if problem.plain or kind != "stream_k" else _NARROW)
            of_kinds[kind] = {**alike, "strip": strip}
        if of_kinds:
            found.append(Way(facts_of(problem, device, row), swap_ab, block, of_kinds))
    return tuple(found)


_known_ways = functools.lru_cache(maxsize=512)(ways)


@functools.cache
def _alike(
    batches: bool, dtype: str, out_dtype: str, tf32: bool, plain: bool, fast_accum: bool, rows: bool, columns: bool
) -> Problem:  # fmt: skip
    """The smallest problem that has all `ways` of those that differ in extents and chunks."""
    batch = 1 + batches
    return Problem(
        1, 1, 1, batch, dtype, out_dtype, Incoming(Chunks((0, batch))) if rows else None,
        Incoming(Chunks((0, 1))) if columns else None, tf32=tf32, plain=plain, fast_accum=fast_accum,
    )  # fmt: skip


def candidates(
    problem: Problem, device: DeviceProperties, workers: int, *, kinds: tuple[Kind, ...], forced: Forced = FREE,
    auto: bool = False, realigned: str = "", before: float = 0.0,
) -> Iterator[Candidate]:  # fmt: skip
    """Every way the model knows, within what the caller forces; none if there is no such tile.

    Parameters
    ----------
    auto
        Whether a static grid stands for a queue where there is nothing to even out.
    realigned, before
        The operands that are copied before, so that ``problem`` is left, and the seconds of that.
    """
    require(refusal(problem, device))
    p = problem
    if type(p) is not Problem:
        found = ways(p, device, kinds, forced)
    else:  # what no extent decides is known from earlier problems
        arrive = p.rows is not None, p.columns is not None
        alike = _alike(p.batch > 1, p.dtype, p.out_dtype, p.tf32, p.plain, p.fast_accum, *arrive)
        found = _known_ways(alike, device, kinds, forced._replace(order=None, tile=None))
    model, own_order = Model(p, device), forced.order is not None
    for way in found:
        block, swap_ab = way.block, way.swap_ab
        if forced.tile not in (None, block[:2]):
            continue
        num_m, num_n, k_steps = cdiv(p.m, block[0]), cdiv(p.n, block[1]), cdiv(p.k, block[2])
        tiles = p.batch * num_m * num_n
        if tiles >= INT31 or own_order:  # these may raise, so they are made of every tile
            raster_of(p, Grid.of(p.m, p.n, p.k, *block, batch=p.batch), block, 1, forced.order)
        few = min(workers // way.facts.ctas, tiles)
        of_tile = TileModel(model, way.facts, swap_ab, tiles, num_m, k_steps)
        for kind, fields in way.kinds.items():
            if kind == "stream_k":
                count, together, every = workers, False, _shares(tiles, k_steps, workers, forced.shares)
                group = 1 if own_order else group_in(p, block, _group(p, way, workers, kind, num_m))
            else:
                if auto and kind == "dynamic" and tiles <= workers and forced.queues is None:
                    kind = "static"  # one item each: there is nothing for a queue to even out
                    if kind in kinds:
                        continue
                count, together, every = few, kind == "static" or has_own_queues(p, forced.queues, few), (0,)
                group = 0  # the model does not need it
            for shares in every:
                predicted = before + of_tile.seconds(kind, count, together, group, shares)
                make = functools.partial(_schedule, p, way, workers, forced, kind, count, shares)
                yield Deferred(fields, kind, predicted, tiles, count, realigned, make)


def _schedule(
    problem: Problem, way: Way, workers: int, forced: Forced, kind: Kind, count: int, shares: int
) -> Schedule:  # fmt: skip
    """The schedule of a candidate that takes ``count`` of the ``workers`` there are."""
    grid = Grid.of(problem.m, problem.n, problem.k, *way.block, batch=problem.batch)
    raster = raster_of(problem, grid, way.block, _group(problem, way, workers, kind, grid.num_m), forced.order)
    queues, split = queues_of(problem, kind, forced.queues, raster, count)
    return Schedule(kind, grid, raster, count, queues, split, shares, first_batch_of(problem))


def _group(problem: Problem, way: Way, workers: int, kind: Kind, num_m: int) -> int:
    """`group_of`, and at most all rows of tiles."""
    return min(group_of(way.block, workers, kind == "stream_k" or bool(problem.arriving), way.swap_ab), num_m)


def crossing(problem: Problem) -> tuple[Refusal, ...]:
    """That the copies of rows read more of L2 than they bring, where rows do not begin at its lines."""
    found = [(name, at) for name, at in zip("AB", problem.row_multiples, strict=True) if at < LINE]
    if not found:
        return ()
    where = " and ".join(f"{name}'s at multiples of {at}" for name, at in found)
    why = f"rows begin elsewhere ({where}), so a copy of {LINE} bytes reads two: rows of multiples of {LINE} are faster"
    return (Refusal("whole lines of L2", why),)


def has_registers(problem: Problem, row: Tile, swap_ab: bool, kind: Kind) -> bool:
    """Whether nothing spills: neither the math warps beside their accumulators, nor the load warp."""
    if row.loops == 3 and (kind == "stream_k" or problem.arriving):
        return False  # three math loops leave the load warp none for a gate; a part of a tile has two counts, not three
    if row.loops == 3 and problem.fp8 and row.columns > 160:
        return False  # Triton 3.7 spills 16 bytes
    parts = len(widths(row.columns, widest(problem)))
    held = row.registers + (row.rows_per_loop if problem.promoted else 0)
    if problem.promoted and (held > _MOST_TWICE[row.variant] or parts > 2):
        return False
    if parts > {0: MOST_PARTS, 1: MOST_PARTS if problem.plain else 2}.get(problem.arriving, 1):
        return False  # the load warp spills: `no_parts`
    if row.ctas > 1 and problem.batch > 1 and row.registers > _LEAST_ROOM:
        return False  # of an item's batch: Triton 3.6, 3.7 and 3.9 keep up to 100 words on the stack
    if kind == "stream_k" and (held > _LEAST_ROOM or no_parts(problem, row)):
        return False
    if problem.plain:
        return True
    # Triton 3.9 keeps the arguments of an item's epilogue on the stack for swapped tiles of 256 rows in parts.
    return row.registers <= _ROOMY and not (swap_ab and row.rows == 256 and parts > 1)


@functools.lru_cache(maxsize=1024)
def group_of(block: tuple[int, int, int], workers: int, scattered: bool, swap_ab: bool) -> int:
    """Rows of tiles in a group of the raster, so that tiles that are under way at once read as little as they can.

    Together with all others where tickets are as chance has it; else with those of the same cluster of SMs.
    """
    sharing = workers / (4 if swap_ab else 1) if scattered else workers / CLUSTERS
    return int(2 ** round(math.log2(max(1.0, math.sqrt(sharing * block[1] / block[0])))))


def _shares(tiles: int, k_steps: int, workers: int, forced: int | None) -> tuple[int, ...]:
    """Into how many shares stream-K may cut its remainder: one a worker (0), or each tile into as many equal parts."""
    if forced:
        return (forced,)
    remainder = tiles % workers
    parts = min(workers // remainder, k_steps // LEAST_STEPS) if remainder else 0
    return (0, remainder * parts) if parts > 1 else (0,)


def seconds(problem: Problem, device: DeviceProperties, schedule: Schedule, tile: Tile, swap_ab: bool) -> float:
    """What the cost model expects of a schedule."""
    return Model(problem, device).seconds(facts_of(problem, device, tile), swap_ab, Cut.of(schedule))


def facts_of(problem: Problem, device: DeviceProperties, tile: Tile) -> TileFacts:
    """What the cost model knows of a tile, for such a problem."""
    parts = widths(tile.columns)
    depth = tile.lines * tile.stages(ITEMSIZE[problem.out_dtype], device.shared)
    tail = rs_tail(parts, 8 * ITEMSIZE[problem.dtype])
    rows = tile.rows // tile.ctas
    return TileFacts(tile.variant, rows, tile.columns, tile.lines, depth, tile.registers, parts, tail, tile.ctas)
