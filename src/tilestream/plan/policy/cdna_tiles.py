"""The tiles of the CDNA kernel, and their bounds: shared memory, registers, and the copies that a wait can count.

The cost model of these rows is `tilestream.plan.policy.cdna`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.core.schedule import Kind
from tilestream.core.swizzle import BANKS, Swizzle
from tilestream.plan.candidate import FREE, Candidate, Forced, require
from tilestream.plan.policy import cdna
from tilestream.plan.problem import FNUZ, ITEMSIZE, OCP, Problem

#: The ways of copying a stage into shared memory: ``direct`` bypasses the registers, ``staged`` goes through them.
VARIANTS = ("direct", "staged")
#: Dtypes of operands, whose products are added in fp32, and of outputs. Each architecture takes one kind of 8 bits.
DTYPES = {"gfx942": ("bfloat16", "float16", *FNUZ), "gfx950": ("bfloat16", "float16", *OCP)}
OUT_DTYPES = ("bfloat16", "float16", "float32")
#: Lanes of a warp, and the bytes of a lane's read of shared memory.
LANES, CELL_BYTES = 64, 16
#: Bytes of a lane in a direct copy. Triton lowers no other widths.
DIRECT_BYTES = {"gfx942": (4,), "gfx950": (16, 4)}
#: Whether shared memory has transposed reads. Then a stage need not be K-major.
READS_TRANSPOSED = {"gfx942": False, "gfx950": True}
#: The most copies that a wait can count: `vmcnt` has six bits.
MOST_IN_FLIGHT = 63
#: Registers of a lane with two warps a SIMD, including accumulation registers.
REGISTERS = 256
#: Registers reserved for addresses, operands of a step and the epilogue.
_SPARE = 72
#: Bytes of shared memory reserved for an atomic's answer, which all lanes read.
_BESIDE = 64
#: The bound of a buffer's offsets in bytes.
REACH = 2**31 - 16
#: Extents below this, and a tile more, are within 31 bits.
_MOST = 2**31 - 512


class Tile(NamedTuple):
    """A tile, the warps that share it, and their ring."""

    block_m: int
    block_n: int
    lines: int  # K of a stage, in lines of 64 bytes
    warps: int
    stages: int  # steps in flight: direct, all in shared memory; staged, one there and one in registers
    copies: str  # one of `VARIANTS`
    #: The share of the matrix units' peak that the main loop reaches: an estimate of `tilestream isa`.
    efficiency: float

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage of A and B."""
        return (self.block_m + self.block_n) * 64 * self.lines

    @property
    def accumulator(self) -> int:
        """Registers of a lane that hold the accumulator."""
        return self.block_m * self.block_n // (LANES * self.warps)

    @property
    def registers(self) -> int:
        """Registers of a lane for the accumulator and a staged step."""
        return self.accumulator + (self.stage_bytes // (4 * LANES * self.warps) if self.copies == "staged" else 0)

    @property
    def splits(self) -> bool:
        """Whether it may be cut along K. A large accumulator leaves no registers for partial results."""
        return self.accumulator < 128

    def block_k(self, size: int) -> int:
        """Elements of K in a stage."""
        return 64 * self.lines // size


#: An accumulator of 256 x 256 of fp32 in eight warps is 128 registers of a lane. If direct copies have 4 bytes a lane,
#: staged copies take fewer instructions, and the direct rows are for ``variant="direct"``.
TILES: dict[str, tuple[Tile, ...]] = {
    "gfx942": (
        Tile(256, 256, 1, 8, 2, "staged", 0.73),
        Tile(256, 128, 2, 8, 2, "staged", 0.54),
        Tile(128, 256, 2, 8, 2, "staged", 0.54),
        Tile(128, 128, 2, 4, 2, "staged", 0.58),
        Tile(128, 64, 2, 4, 2, "staged", 0.38),
        Tile(64, 128, 2, 4, 2, "staged", 0.38),
        Tile(64, 64, 4, 4, 2, "staged", 0.34),
        Tile(32, 64, 4, 4, 2, "staged", 0.21),
        Tile(128, 128, 1, 4, 3, "direct", 0.53),
        Tile(64, 64, 2, 4, 3, "direct", 0.37),
    ),
    "gfx950": (
        Tile(256, 256, 1, 8, 4, "direct", 0.59),
        Tile(256, 128, 2, 8, 3, "direct", 0.53),
        Tile(128, 256, 2, 8, 3, "direct", 0.55),
        Tile(128, 128, 2, 4, 4, "direct", 0.44),
        Tile(128, 64, 2, 4, 4, "direct", 0.34),
        Tile(64, 128, 2, 4, 4, "direct", 0.33),
        Tile(64, 64, 4, 4, 4, "direct", 0.29),
        Tile(32, 64, 4, 4, 4, "direct", 0.16),
        Tile(256, 256, 1, 8, 2, "staged", 0.58),
        Tile(128, 128, 2, 4, 2, "staged", 0.36),
        Tile(64, 64, 4, 4, 2, "staged", 0.20),
    ),
}


def spread(block_m: int, block_n: int, warps: int) -> tuple[int, int]:
    """The numbers of warps down a tile's rows and across its columns, so that a warp's part is nearly square."""
    down = across = 1
    while down * across < warps:
        if block_m // down > block_n // across:
            down *= 2
        else:
            across *= 2
    return down, across


class StageCost(NamedTuple):
    """A warp's instructions that copy a K step into shared memory."""

    loads: int
    writes: int

    @property
    def total(self) -> int:
        """The sum of both kinds."""
        return self.loads + self.writes


def stage_cost(tile: Tile, lane_bytes: int, copies: str) -> StageCost:
    """A warp's instructions for a stage: direct, copies of ``lane_bytes`` a lane; staged, loads and writes of vectors.

    So direct copies of 4 bytes (gfx942) take twice the instructions of staged copies, and those of 16 (gfx950) half.
    """
    share = tile.stage_bytes // (LANES * tile.warps)
    if copies == "direct":
        return StageCost(share // lane_bytes, 0)
    return StageCost(share // CELL_BYTES, share // CELL_BYTES)


def lane_bytes(tile: Tile, arch: str) -> int:
    """Bytes of a lane in a direct copy: the widest that divides a warp's share; 0 for none."""
    share = min(tile.block_m, tile.block_n) * 64 * tile.lines // (LANES * tile.warps)
    return next((width for width in DIRECT_BYTES[arch] if share and share % width == 0), 0)


def in_flight(tile: Tile, arch: str) -> int:
    """The most copies of a warp in flight, counted in instructions as the hardware does."""
    if tile.copies == "staged":
        return stage_cost(tile, CELL_BYTES, "staged").loads
    return stage_cost(tile, lane_bytes(tile, arch), "direct").loads * (tile.stages - 1)


def why_not(tile: Tile, arch: str, shared: int) -> str:
    """The limit of the hardware that a tile exceeds; empty if it exceeds none."""
    needed = tile.stage_bytes * (tile.stages if tile.copies == "direct" else 1)
    if needed > shared or (tile.copies == "direct" and needed + _BESIDE > shared):
        return f"{tile.stages} stages of {tile.stage_bytes} bytes, shared memory has {shared}"
    if tile.copies == "direct" and tile.stages < 3:
        return f"{tile.stages} stages: with fewer than three each step waits for every copy"
    if tile.copies == "direct" and not lane_bytes(tile, arch):
        return f"{tile.warps} warps: a warp's share of a stage is less than a copy"
    if in_flight(tile, arch) > MOST_IN_FLIGHT:
        return f"{in_flight(tile, arch)} copies in flight, a wait counts {MOST_IN_FLIGHT}"
    if tile.registers + _SPARE > REGISTERS:
        return f"{tile.registers} registers for the accumulator and a step, of {REGISTERS}"
    return ""


def fitting(rows: Iterable[Tile], device: DeviceProperties, size: int = 2) -> tuple[Tile, ...]:
    """The tiles that fit a device, and whose K step is a whole number of instructions."""
    arch, step = device.arch, instruction(device.arch, size)[2]
    return tuple(row for row in rows if not why_not(row, arch, device.shared) and row.block_k(size) % step == 0)


def stage_swizzle(tile_rows: int, block_k: int, size: int, arch: str, k_major: bool) -> Swizzle:
    """The swizzle of a stage of ``tile_rows`` rows: rows of ``block_k`` if K-major, else rows of ``tile_rows``."""
    return Swizzle.of_row((block_k if k_major else tile_rows) * size, CELL_BYTES, BANKS[arch], size)


def instruction(arch: str, size: int) -> tuple[int, int, int]:
    """Rows, columns and K of one MFMA. It is 16 x 16, which has the lower latency."""
    if arch == "gfx942":
        return (16, 16, 32 // size)
    return (16, 16, 32 if size == 2 else 128)


def is_far(tile_rows: int, block_k: int, stride: int, size: int, k_major: bool) -> bool:
    """Whether a step of an operand exceeds the range of a buffer's offset."""
    outer = tile_rows if k_major else block_k
    inner = block_k if k_major else tile_rows
    return ((outer - 1) * stride + inner) * size > REACH


def candidates(
    problem: Problem, device: DeviceProperties, workers: int, *, kinds: tuple[Kind, ...], forced: Forced = FREE
) -> Iterator[Candidate]:
    """All candidates that match the caller's choices; none if no tile matches."""
    require(refusal(problem, device))
    size = ITEMSIZE[problem.dtype]
    for row in TILES[device.arch]:
        stages = forced.stages or row.stages
        row = row._replace(stages=stages) if row.copies == "direct" else row
        if forced.variant not in (None, row.copies) or stages != row.stages:
            continue
        if forced.tile not in (None, row[:2]) or row not in fitting((row,), device, size):
            continue
        made = cdna.Row(row.block_m, row.block_n, row.block_k(size), row.warps, row.stages, row.efficiency)
        own_kinds = tuple(kind for kind in kinds if kind != "stream_k" or row.splits)
        yield from cdna.candidates(problem, device, workers, (made,), own_kinds, forced, row.copies)


def refusal(problem: Problem, device: DeviceProperties) -> str:
    """Why this kernel does not support a problem; empty if it does."""
    if device.arch not in TILES or not cdna.knows(device):
        return f"it is for {' and '.join(TILES)}, of which the constants are known; this is {device.arch}"
    known = DTYPES[device.arch]
    if problem.fp8 and problem.dtype not in known:
        return (
            f"{problem.dtype}: the matrix units of {device.arch} take {' and '.join(known[2:])}, to which the same "
            "bits are other numbers, and this kernel does not convert"
        )
    if problem.dtype not in known:
        return f"it multiplies {', '.join(known)} on {device.arch}, not {problem.dtype}"
    if problem.out_dtype not in OUT_DTYPES:
        return f"its outputs are {', '.join(OUT_DTYPES)}, not {problem.out_dtype}"
    if not problem.aligned and not problem.is_empty:
        return "a stride, an extent or an address is no multiple of 16"
    if why := problem.unfit(_MOST):
        return why
    if problem.k < 64 * max(tile.lines for tile in TILES[device.arch]) // ITEMSIZE[problem.dtype]:
        return f"k={problem.k}; it has no whole K step of each tile"
    return ""
