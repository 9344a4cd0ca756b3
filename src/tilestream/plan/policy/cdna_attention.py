"""The policy of the CDNA attention kernel: candidates -> cost -> compare.

A candidate is a row of `TILES` with a number of query heads in its rows; `why_not` computes the bounds of a row. The
model has the constants of `tilestream.plan.policy.cdna`. A key block takes the longer of its multiplications, at the
main loop's share of the peak (estimated by `tilestream isa`), and its bytes from L2. A tile's start and end are added.
No such GPU was available for a fit.
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

#: The operands' dtypes.
DTYPES = ("bfloat16", "float16")
#: Rows of a warp and of a matrix instruction.
ROWS = 32
#: The least columns of a part (two vectors of a lane), and the most. A lane has all that it reads of a part in
#: registers at once, of which gfx942 has more to spare; wide parts also give it larger squares for transposing values.
LEAST_COLUMNS = 32
MOST_COLUMNS = {"gfx942": 128, "gfx950": 64}
#: Neighbouring keys of a lane, in its scores and in an operand of P V.
KEYS = 4
#: Registers of a lane reserved for addresses, a stage's operands in flight, and a row's values.
_SPARE = 64
#: Positions, rows and keys below this, twice and a block more, are within 31 bits.
_MOST = 2**29
#: Cycles of a tile's start and end, which do not overlap: queries, the first block's copies, the last stores.
TILE_CYCLES = 5 * cdna.ROUND_TRIP


class Tile(NamedTuple):
    """A tile: warps of 32 query rows each, keys of a block, and the ring of key blocks."""

    columns: int  # the most columns of keys or values, in whole parts
    warps: int
    block: int
    stages: int  # blocks in flight: direct, all in shared memory; staged, one there and one in registers
    copies: str  # one of `VARIANTS`
    #: The share of the matrix units' peak that the unmasked loop reaches: an estimate of `tilestream isa`.
    efficiency: float
    #: Whether it is for problems that take more registers, which smaller blocks leave: see `is_busy`. None: for both.
    busy: bool | None = None

    @property
    def rows(self) -> int:
        """Query rows."""
        return ROWS * self.warps

    @property
    def waves(self) -> int:
        """The number of warps of a SIMD."""
        return max(1, self.warps // 4)


#: With two warps a SIMD each has 256 registers a lane, and one's softmax overlaps with the other's multiplications.
#: Sums of 256 columns take 128 registers, and queries 64, so a SIMD has one warp there. gfx942's direct copies have 4
#: bytes a lane, and values are then read element by element: that row is for ``variant="direct"``.
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
    """The partition of a head's columns for copies and products: ``parts`` of ``width``; the last has ``rest``."""

    parts: int
    width: int
    rest: int

    @property
    def columns(self) -> int:
        """The columns of all parts."""
        return self.parts * self.width


def parts_of(columns: int, arch: str) -> Parts:
    """Equal parts of a power of two: the widest ones with the least padding."""
    whole = cdiv(columns, LEAST_COLUMNS) * LEAST_COLUMNS
    width = min(MOST_COLUMNS[arch], whole & -whole)
    return Parts(whole // width, width, columns - whole + width)


def instruction(arch: str) -> tuple[int, int, int]:
    """Rows, columns and K of one MFMA. With 32 rows a row's scores are in two lanes; with 16 they are in four."""
    return (32, 32, 8 if arch == "gfx942" else 16)


class Swizzles(NamedTuple):
    """The swizzles of queries, keys and values in shared memory."""

    q: Swizzle
    k: Swizzle
    v: Swizzle


def turned(arch: str, copies: str) -> bool:
    """Whether values are transposed in registers, because shared memory has no transposed reads."""
    return copies == "staged" and not READS_TRANSPOSED[arch]


def swizzles(tile: Tile, keys: Parts, values: Parts, arch: str) -> Swizzles:
    """The swizzles of parts of queries, keys and values. Transposed values have rows of a block's keys."""
    if turned(arch, tile.copies):
        # A lane reads four keys at a time: cells of 8 bytes.
        v = Swizzle.of_row(2 * tile.block, 2 * KEYS, BANKS[arch], 2)
    else:
        v = stage_swizzle(values.width, tile.block, 2, arch, False)
    q = stage_swizzle(tile.rows, keys.width, 2, arch, True)
    return Swizzles(q, stage_swizzle(tile.block, keys.width, 2, arch, True), v)


def lane_bytes(rows: int, width: int, warps: int, arch: str) -> int:
    """Bytes of a lane in a direct copy of a part: the widest that divides a warp's share; 0 for none."""
    share = 2 * rows * width // (LANES * warps)
    return next((wide for wide in DIRECT_BYTES[arch] if share and share % wide == 0), 0)


def block_loads(tile: Tile, keys: Parts, values: Parts, arch: str) -> int:
    """The number of a warp's instructions that copy a key block, which a wait counts."""
    count = 0
    for parts in (keys, values):
        wide = lane_bytes(tile.block, parts.width, tile.warps, arch) if tile.copies == "direct" else CELL_BYTES
        count += parts.parts * cdiv(2 * tile.block * parts.width, LANES * tile.warps * max(wide, 1))
    return count


def stage_bytes(tile: Tile, keys: Parts, values: Parts) -> int:
    """Bytes of a block of keys and values."""
    return 2 * tile.block * (keys.columns + values.columns)


def shared_bytes(tile: Tile, keys: Parts, values: Parts) -> int:
    """Bytes of shared memory: the larger of the ring and an item's queries (direct: all parts, staged: one)."""
    stages = tile.stages if tile.copies == "direct" else 1
    queries = 2 * tile.rows * (keys.columns if tile.copies == "direct" else keys.width)
    return max(stages * stage_bytes(tile, keys, values), queries)


def gathers(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether a block's rows are in several pages. Each row is then looked up, and copied through registers."""
    return 0 < problem.page_size < tile.block


def is_busy(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether a block takes more registers: scores are capped or have a left bound, or rows are gathered."""
    return problem.left is not None or problem.softcap > 0 or gathers(problem, tile)


def registers_of(tile: Tile, keys: Parts, values: Parts) -> int:
    """Registers of a lane: scores, weights, sums, queries, and staged copies of a block."""
    made = tile.block // 2 + tile.block // 4 + values.columns // 2 + keys.columns // 4
    if tile.copies == "staged":
        made += stage_bytes(tile, keys, values) // (4 * LANES * tile.warps)
    return made


def why_not(tile: Tile, keys: Parts, values: Parts, arch: str, shared: int) -> str:
    """The limit of the hardware, or of the copies, that a tile exceeds; empty if it exceeds none."""
    needed = shared_bytes(tile, keys, values)
    if needed > shared:
        return f"{needed} bytes of shared memory, of {shared}"
    room = 2 * REGISTERS // tile.waves
    if registers_of(tile, keys, values) + _SPARE > room:
        return f"{registers_of(tile, keys, values)} registers of {room}"
    if tile.copies == "staged":
        share = tile.block * values.width // (LANES * tile.warps)
        # Values are transposed in squares of a lane, whose rows are fetched and stored as vectors.
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
    """Why this kernel does not support a problem; empty if it does."""
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
    """All candidates with copies of a ``variant``; None allows both.

    Each die has its own queue of heads. Its L2 keeps the keys and values of a group of heads.
    """
    if variant not in (None, *VARIANTS):
        raise ValueError(
            f"variant={variant!r}; it must be one of {', '.join(VARIANTS)}, or None for the model's choice"
        )
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
    """The predicted time of a launch: the longer of tiles in waves and memory.

    The clock falls with the share of time in which the matrix units are busy: see `cdna.clock`.
    """
    p = problem
    rate = device.peak(p.dtype, 1) / device.clock
    multiply = 2 * tile.rows * tile.block * (keys.columns + values.columns) / rate
    together = cdiv(min(workers, tiles), device.xcds)
    fed = together * stage_bytes(tile, keys, values) / (device.l2_bandwidth / device.clock)
    step = max(multiply / tile.efficiency, fed)
    hertz = cdna.clock(device, p.dtype, multiply / step)
    # The average keys of a row, and at each masked end half of the tile's positions and half a block.
    seen = cdiv(p.pairs, max(p.rows, 1))
    ends = (p.left is not None) + (p.right is not None)
    blocks = max((seen + ends * 0.5 * (tile.rows / pack + tile.block)) / tile.block, 1.0)
    total = (blocks * step + TILE_CYCLES) * tiles / min(workers, tiles) / hertz
    # Tiles differ in length: the last ones add half a tile on average.
    tail = 0.5 * step * blocks / hertz if tiles > workers else 0.0
    memory = p.bytes / device.bandwidth
    return cdna.LAUNCH_SECONDS + max(total + tail, memory) + cdna.NOT_HIDDEN * min(total, memory)
