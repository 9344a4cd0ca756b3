"""The policy of the CDNA attention kernel: candidates -> cost -> compare.

A candidate is a row of `TILES` with a number of query heads in its rows; what bounds a row stands beside it, and
`why_not` computes it. The model has the constants of `tilestream.plan.policy.cdna`: a key block takes the longer of its
multiplications, at the share of the peak that the main loop reaches (`tilestream isa` estimates it), and its bytes from
L2; a tile's start and end are added. There was no such GPU to fit to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind
from tilestream.core.swizzle import BANKS, Swizzle
from tilestream.plan.attention_groups import heads_kept
from tilestream.plan.attention_plan import AttentionCandidate, packed_heads, schedule_of
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.candidate import require
from tilestream.plan.policy import cdna
from tilestream.plan.policy.cdna_tiles import (
    CELL_BYTES,
    DIRECT_BYTES,
    LANES,
    MOST_IN_FLIGHT,
    READS_TRANSPOSED,
    REGISTERS,
    VARIANTS,
    stage_swizzle,
)

#: Operands.
DTYPES = ("bfloat16", "float16")
#: Rows of a warp, which are a matrix instruction's.
ROWS = 32
#: Columns of a part, at least: two vectors of a lane; and at most: what a lane reads of a part is in registers
#: together, of which gfx942 has more to spare; and its squares, in which values are transposed, are larger then.
LEAST_COLUMNS = 32
MOST_COLUMNS = {"gfx942": 128, "gfx950": 64}
#: Keys of a lane in an operand of P V: neighbours of its scores.
KEYS = 4
#: Registers of a lane kept for addresses, a stage's operands on their way, and what a row has.
_SPARE = 64
#: Positions, rows and keys below this, twice and a block more, are within 31 bits.
_MOST = 2**29
#: Cycles of a tile's start and end that nothing hides: queries on their way, the first block's copies, the last stores.
TILE_CYCLES = 5 * cdna.ROUND_TRIP


class Tile(NamedTuple):
    """A tile: warps of 32 query rows each, keys of a block, and the ring that feeds it."""

    columns: int  # the most of the wider of keys and values, in whole parts
    warps: int
    block: int
    stages: int  # blocks in flight: direct, all in shared memory; staged, two, one there and one in registers
    copies: str  # one of `VARIANTS`
    #: Share of the matrix units' peak that the plain loop reaches: what `tilestream isa` estimates, not measured.
    efficiency: float
    #: For what takes more registers, which smaller blocks have: see `is_busy`. None: for both.
    busy: bool | None = None

    @property
    def rows(self) -> int:
        """Of queries."""
        return ROWS * self.warps

    @property
    def waves(self) -> int:
        """Warps of a SIMD."""
        return max(1, self.warps // 4)


#: Two warps a SIMD have 256 registers of a lane each: one's softmax runs under the other's multiplications. Sums of 256
#: columns are 128 registers beside 64 of queries, so there a SIMD has one warp. On gfx942 copies past the registers
#: have 4 bytes a lane, and values are then read an element at a time: that row is there to ask for.
TILES: dict[str, tuple[Tile, ...]] = {
    "gfx942": (
        Tile(64, 8, 64, 2, "staged", 0.51, busy=False),
        Tile(64, 8, 32, 2, "staged", 0.45, busy=True),
        Tile(64, 4, 64, 2, "staged", 0.43),
        Tile(128, 8, 32, 2, "staged", 0.61),
        Tile(128, 4, 64, 2, "staged", 0.57),
        Tile(192, 8, 32, 2, "staged", 0.60, busy=False),
        Tile(256, 4, 32, 2, "staged", 0.53),
        Tile(128, 4, 32, 3, "direct", 0.42, busy=False),
    ),
    "gfx950": (
        Tile(64, 8, 64, 4, "direct", 0.37),
        Tile(64, 4, 64, 4, "direct", 0.28),
        Tile(128, 8, 64, 3, "direct", 0.56, busy=False),
        Tile(128, 4, 64, 3, "direct", 0.40),
        Tile(192, 8, 64, 3, "direct", 0.52, busy=False),
        Tile(256, 4, 32, 3, "direct", 0.46),
        Tile(64, 8, 64, 2, "staged", 0.35),
        Tile(128, 8, 64, 2, "staged", 0.50),
        Tile(128, 4, 64, 2, "staged", 0.35),
        Tile(256, 4, 32, 2, "staged", 0.40),
    ),
}


class Parts(NamedTuple):
    """The columns of a head, as they are copied and multiplied: ``parts`` of ``width``, the last with ``rest``."""

    parts: int
    width: int
    rest: int

    @property
    def columns(self) -> int:
        """Of all parts."""
        return self.parts * self.width


def parts_of(columns: int, arch: str) -> Parts:
    """Equal parts of a power of two, as wide as can be with the fewest columns too many."""
    whole = cdiv(columns, LEAST_COLUMNS) * LEAST_COLUMNS
    width = min(MOST_COLUMNS[arch], whole & -whole)
    return Parts(whole // width, width, columns - whole + width)


def instruction(arch: str) -> tuple[int, int, int]:
    """Rows, columns and K of one MFMA, of 32 rows: a row's scores are in two lanes, those of 16 rows in four."""
    return (32, 32, 8 if arch == "gfx942" else 16)


class Swizzles(NamedTuple):
    """How queries, keys and values lie in shared memory."""

    q: Swizzle
    k: Swizzle
    v: Swizzle


def turned(arch: str, copies: str) -> bool:
    """Whether values are transposed on their way through registers, since shared memory is not read across."""
    return copies == "staged" and not READS_TRANSPOSED[arch]


def swizzles(tile: Tile, keys: Parts, values: Parts, arch: str) -> Swizzles:
    """Of rows of a part of queries, of keys and of values; of values that are transposed, rows of a block's keys."""
    if turned(arch, tile.copies):
        # A lane reads four keys at a time: cells of 8 bytes.
        v = Swizzle.of_row(2 * tile.block, 2 * KEYS, BANKS[arch], 2)
    else:
        v = stage_swizzle(values.width, tile.block, 2, arch, False)
    q = stage_swizzle(tile.rows, keys.width, 2, arch, True)
    return Swizzles(q, stage_swizzle(tile.block, keys.width, 2, arch, True), v)


def lane_bytes(rows: int, width: int, warps: int, arch: str) -> int:
    """Bytes of a lane in a copy past the registers of a part: the widest of which a warp's share is a whole number."""
    share = 2 * rows * width // (LANES * warps)
    return next((wide for wide in DIRECT_BYTES[arch] if share and share % wide == 0), 0)


def block_loads(tile: Tile, keys: Parts, values: Parts, arch: str) -> int:
    """Instructions of a warp that copy a key block: what a wait counts."""
    count = 0
    for parts in (keys, values):
        wide = lane_bytes(tile.block, parts.width, tile.warps, arch) if tile.copies == "direct" else CELL_BYTES
        count += parts.parts * cdiv(2 * tile.block * parts.width, LANES * tile.warps * max(wide, 1))
    return count


def stage_bytes(tile: Tile, keys: Parts, values: Parts) -> int:
    """Of a block of keys and values."""
    return 2 * tile.block * (keys.columns + values.columns)


def shared_bytes(tile: Tile, keys: Parts, values: Parts) -> int:
    """Shared memory: the ring, or before it is filled an item's queries, direct all parts of them, staged one."""
    stages = tile.stages if tile.copies == "direct" else 1
    queries = 2 * tile.rows * (keys.columns if tile.copies == "direct" else keys.width)
    return max(stages * stage_bytes(tile, keys, values), queries)


def gathers(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether rows of a block lie in several pages: each is found by itself, and goes through registers."""
    return 0 < problem.page_size < tile.block


def is_busy(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether a block takes more registers: scores are capped, or masked at both ends, or rows are gathered."""
    return problem.left is not None or problem.softcap > 0 or gathers(problem, tile)


def registers_of(tile: Tile, keys: Parts, values: Parts) -> int:
    """Of a lane: scores and weights, sums, queries, and what a block takes on its way through registers."""
    made = tile.block // 2 + tile.block // 4 + values.columns // 2 + keys.columns // 4
    if tile.copies == "staged":
        made += stage_bytes(tile, keys, values) // (4 * LANES * tile.warps)
    return made


def why_not(tile: Tile, keys: Parts, values: Parts, arch: str, shared: int) -> str:
    """What of a tile the hardware cannot hold or count, or the copies not do; empty if they can."""
    needed = shared_bytes(tile, keys, values)
    if needed > shared:
        return f"{needed} bytes of shared memory, of {shared}"
    room = 2 * REGISTERS // tile.waves
    if registers_of(tile, keys, values) + _SPARE > room:
        return f"{registers_of(tile, keys, values)} registers of {room}"
    if tile.copies == "staged":
        share = tile.block * values.width // (LANES * tile.warps)
        # Squares of a lane, in which values are transposed: their rows are what is fetched, and put, in one go.
        return "values are transposed an element at a time" if turned(arch, tile.copies) and share < 4 else ""
    if tile.stages < 3:
        return f"{tile.stages} stages: with fewer than three each block waits for every copy"
    if keys.rest < keys.width:
        return "columns that are not there are zeros, which copies past the registers cannot make"
    if not all(lane_bytes(tile.block, parts.width, tile.warps, arch) for parts in (keys, values)):
        return "a warp's share of a part is less than a copy"
    flying = block_loads(tile, keys, values, arch) * (tile.stages - 1)
    return f"{flying} copies in flight, a wait counts {MOST_IN_FLIGHT}" if flying > MOST_IN_FLIGHT else ""


def refusal(problem: AttentionProblem, device: DeviceProperties) -> str:
    """Why this kernel does not do such a problem; empty if it does."""
    p = problem
    if device.arch not in TILES or not cdna.knows(device):
        return f"it is for {' and '.join(TILES)}, of which the constants are known; this is {device.arch}"
    if p.dtype not in DTYPES:
        return f"it multiplies {', '.join(DTYPES)}, not {p.dtype}"
    if p.scaled:
        return "q, k or v has scales, which it does not apply"
    if p.keys is not None:
        return "keys arrive, and it has no gate yet"
    return p.unfit(_MOST) or ("" if p.aligned else "a stride or an address is no multiple of 16 bytes, a lane's vector")


def candidates(
    problem: AttentionProblem, device: DeviceProperties, workers: int, *, kind: Kind, variant: str | None = None
) -> Iterator[AttentionCandidate]:
    """Every way the model knows, with copies of one ``variant`` or, None, of any.

    A die takes the heads of a queue of its own, as many together as its L2 keeps the keys and values of.
    """
    if variant not in (None, *VARIANTS):
        raise ValueError(f"variant={variant!r}; it is one of {', '.join(VARIANTS)}, or None for the model's choice")
    require(refusal(problem, device))
    p, arch = problem, device.arch
    keys, values = parts_of(p.head_dim, arch), parts_of(p.head_dim_v, arch)
    columns = max(keys.columns, values.columns)
    fit = [
        tile
        for tile in TILES[arch]
        if tile.columns >= columns
        and tile.busy in (None, is_busy(p, tile))
        and variant in (None, tile.copies)
        and not (tile.copies == "direct" and gathers(p, tile))
        and not why_not(tile, keys, values, arch, device.shared)
    ]
    least = min((tile.columns for tile in fit), default=0)
    for tile in (tile for tile in fit if tile.columns == least):
        pack = packed_heads(p, tile.rows)
        group = heads_kept(p, pack, device.l2)
        schedule = schedule_of(p, tile.rows // pack, pack, group, kind, workers, device.xcds)
        cost = seconds(p, device, tile, keys, values, pack, schedule.grid.tiles, workers)
        yield AttentionCandidate(tile.copies, (tile.rows, tile.block), schedule, cost, pack, tile.warps, tile.stages)


def seconds(
    problem: AttentionProblem, device: DeviceProperties, tile: Tile, keys: Parts, values: Parts, pack: int, tiles: int,
    workers: int,
) -> float:  # fmt: skip
    """What a launch takes: tiles in waves, or memory, whichever is the longer.

    The matrix units work for the loop's share of the time, and the clock falls with that: see `cdna.clock`.
    """
    p = problem
    rate = device.peak(p.dtype, 1) / device.clock
    multiply = 2 * tile.rows * tile.block * (keys.columns + values.columns) / rate
    together = cdiv(min(workers, tiles), device.xcds)
    fed = together * stage_bytes(tile, keys, values) / (device.l2_bandwidth / device.clock)
    step = max(multiply / tile.efficiency, fed)
    hertz = cdna.clock(device, p.dtype, multiply / step)
    # Of a row on average; and at each masked end what only half of a tile's rows see, and half a block.
    seen = cdiv(p.pairs, max(p.rows, 1))
    ends = (p.left is not None) + (p.right is not None)
    blocks = max((seen + ends * 0.5 * (tile.rows / pack + tile.block)) / tile.block, 1.0)
    total = (blocks * step + TILE_CYCLES) * tiles / min(workers, tiles) / hertz
    # Tiles differ: what the last of them leaves undone is on average half of one.
    tail = 0.5 * step * blocks / hertz if tiles > workers else 0.0
    memory = p.bytes / device.bandwidth
    return cdna.LAUNCH_SECONDS + max(total + tail, memory) + cdna.NOT_HIDDEN * min(total, memory)
