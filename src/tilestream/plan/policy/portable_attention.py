"""The policy of the portable GPU attention kernel: candidates -> cost -> compare.

The comments in `TILES` give the bounds of its rows. The model adds key blocks, at the rate of a tile's size, and a
constant for each tile. The largest rows' rates, and the constant, are from an H100 (bfloat16, S = 1k to 16k: 3 us a
tile of 64 columns, 11 of 128). The others are estimates; only the order of candidates matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind
from tilestream.plan.attention_groups import heads_kept, heads_together
from tilestream.plan.attention_plan import AttentionCandidate, packed_heads, schedule_of
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.policy.portable import has_fp8_units, has_tensor_memory
from tilestream.plan.problem import ITEMSIZE

#: Seconds of a tile in addition to its blocks (taking it, the ring's start and end, the epilogue), and of a launch.
TILE_SECONDS = 6e-6
LAUNCH_SECONDS = 8e-6
#: The most bytes of K and V of a group of heads: half of an H100's L2, if the GPU's own is not known. An MI300's XCD
#: has 4 MiB, and its own queue.
L2_BYTES = 24 * 2**20
XCD_BYTES, XCDS = 4 * 2**20, 8
#: Positions, rows and keys below this, twice and a block more, are within 31 bits.
_MOST = 2**29


class AttentionTile(NamedTuple):
    """A tile, its warps and stages, and its share of the matrix units' peak."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    efficiency: float


#: Tiles by columns of a head, rounded up to a power of two, and bytes of an element. None spills on sm_90a with all
#: features of the kernel: see the compile gate.
TILES: dict[tuple[int, int], tuple[AttentionTile, ...]] = {
    (64, 2): (
        AttentionTile(128, 64, 8, 3, 0.35),  # it spills with 4 warps: scores and sums are 128 registers a thread
        AttentionTile(64, 64, 4, 3, 0.25),
        AttentionTile(16, 64, 4, 3, 0.08),
    ),
    (128, 2): (
        AttentionTile(128, 64, 8, 3, 0.48),
        AttentionTile(64, 64, 8, 3, 0.30),
        AttentionTile(16, 64, 4, 3, 0.08),
    ),
    (256, 2): (
        AttentionTile(64, 32, 8, 3, 0.25),  # 128 rows: sums alone are 128 registers a thread
        AttentionTile(16, 32, 4, 2, 0.05),
    ),
    (64, 4): (AttentionTile(64, 32, 8, 2, 0.25), AttentionTile(16, 32, 4, 2, 0.08)),
    (128, 4): (AttentionTile(32, 32, 8, 2, 0.20), AttentionTile(16, 32, 8, 2, 0.08)),
    (256, 4): (AttentionTile(32, 16, 8, 2, 0.13), AttentionTile(16, 16, 8, 2, 0.06)),
}
#: Tiles for unaligned operands: each element has its own load, with a 64-bit address in registers.
UNALIGNED: dict[tuple[int, int], tuple[AttentionTile, ...]] = {
    (64, 2): (AttentionTile(32, 32, 4, 1, 0.05),),
    (128, 2): (AttentionTile(32, 32, 8, 1, 0.05),),
    (256, 2): (AttentionTile(32, 32, 8, 1, 0.04),),
    (64, 4): (AttentionTile(32, 32, 8, 1, 0.08),),
    (128, 4): (AttentionTile(16, 16, 8, 1, 0.05),),
    (256, 4): (AttentionTile(16, 16, 8, 1, 0.04),),
}
#: The least keys of a block. If keys arrive a block has half its keys, because the gate needs registers, too.
_LEAST_KEYS = 16
#: The architecture of NVIDIA on which the blocks of `TILES` fit the registers.
_TILED_FOR = "sm_90"
#: Stages if copies go through registers.
_HIP_STAGES = 1


def tiles(problem: AttentionProblem, device: DeviceProperties) -> tuple[AttentionTile, ...]:
    """The rows of `TILES` for a problem."""
    columns = max(problem.head_dim, problem.head_dim_v)
    size = 64 if columns <= 64 else 128 if columns <= 128 else 256
    itemsize = ITEMSIZE[problem.dtype]
    rows = (TILES if problem.aligned else UNALIGNED)[size, max(2, itemsize)]
    if problem.keys is not None:
        rows = tuple(_of_keys(row, row.block_n // 2) for row in rows)
    hip = device.arch.startswith("gfx")
    masked = {problem.head_dim, problem.head_dim_v} != {size}  # columns beyond the head's are masked
    # Large blocks of 8 bits, or with an address for each element, exceed AMD's registers: see the compile gate.
    if itemsize == 1 and not has_fp8_units(device.arch):  # q and k are converted in registers
        rows = tuple(_of_keys(row, row.block_n // 2) for row in rows[1:])
    elif hip and itemsize == 1 and (masked or size == 256):
        rows = tuple(_of_keys(row, row.block_n // 2) for row in rows)
    elif not hip and device.arch != _TILED_FOR and itemsize == 2 and size >= 128 and problem.aligned:
        rows = tuple(_of_keys(row, row.block_n // 2) for row in rows)  # 128x64 spills 176 bytes on sm_120
    if size == 256 and itemsize <= 2 and problem.aligned:
        rows = tuple(_that_fits(row, itemsize, device.arch) for row in rows)
    # On sm_80 and sm_89, too, 32x32 of 256 columns spills up to 204 bytes (Triton 3.9).
    if not problem.aligned and (hip or (device.arch.startswith("sm_8") and size == 256)):
        rows = tuple(_of_keys(row, _LEAST_KEYS) for row in rows)
    if hip:
        return tuple(row._replace(stages=_HIP_STAGES) for row in rows)
    ring = 2 * size * itemsize
    # Shared memory has the ring and a tile of queries or output.
    fit = [(device.shared - row.block_m * ring // 2) // (row.block_n * ring) for row in rows]
    return tuple(row._replace(stages=max(1, min(row.stages, most))) for row, most in zip(rows, fit, strict=True))


def _that_fits(row: AttentionTile, itemsize: int, arch: str) -> AttentionTile:
    """A tile for heads of 256 columns, of 16 bits or fewer, where that of `TILES` spills."""
    if has_tensor_memory(arch) and row.block_n == _LEAST_KEYS:
        return row._replace(stages=1)  # with more, 64x16 spills 36 bytes, and 152 at a gate (Triton 3.7)
    if arch.startswith("sm_12") and row.block_m == 16 and itemsize == 1:
        return row._replace(warps=8)  # with 4, 16x32 spills 8 bytes (Triton 3.7)
    return row


def _of_keys(row: AttentionTile, keys: int) -> AttentionTile:
    """The row with blocks of ``keys`` keys, or of the least number."""
    return row._replace(block_n=max(_LEAST_KEYS, keys))


def candidates(
    problem: AttentionProblem, device: DeviceProperties, workers: int, *, kind: Kind
) -> Iterator[AttentionCandidate]:
    """All candidates. Raises `NotImplementedError` if this kernel does not support the problem."""
    if problem.dtype == "float64":
        raise NotImplementedError("dtype: float64 on a GPU; only the CPU takes it: convert to float32 there")
    for name in ("seqlen_q", "seqlen_k", "tokens_q", "tokens_k"):
        if getattr(problem, name) >= _MOST:
            raise NotImplementedError(
                f"{name}={getattr(problem, name)}; the portable kernel counts rows in 31 bits: cut the keys, and join "
                "the parts with merge_attention"
            )
    hip = device.arch.startswith("gfx")
    if problem.dtype == "float8_e4m3fn" and not (hip or has_fp8_units(device.arch)):
        raise NotImplementedError(
            f"dtype: {problem.dtype}; {device.name}, {device.arch}, has no instructions for it: convert q, k and v to "
            "bfloat16 there"
        )
    itemsize = ITEMSIZE[problem.dtype]
    for row in tiles(problem, device):
        pack = packed_heads(problem, row.block_m)
        rate = device.peak("fp8" if itemsize == 1 else problem.dtype, 1) * row.efficiency
        a_key = 2 * row.block_m * (problem.head_dim + problem.head_dim_v) / rate
        if hip:  # each XCD has its own heads
            group = heads_kept(problem, pack, XCD_BYTES)
        else:
            beside = TILE_SECONDS / (a_key * row.block_n)
            cache = device.l2 // 2 or L2_BYTES
            group = heads_together(problem, kind, row.block_m, pack, cache, workers, row.block_n, beside)
        schedule = schedule_of(problem, row.block_m // pack, pack, group, kind, workers, XCDS if hip else 1)
        rows = max(problem.rows, 1)
        keys = cdiv(problem.pairs, rows) + row.block_n  # a row's average keys, and the excess of blocks
        math = keys * a_key
        total = (math + TILE_SECONDS) * cdiv(schedule.grid.tiles, workers)
        seconds = LAUNCH_SECONDS + max(total, problem.bytes / device.bandwidth) + 0.1 * total
        block = (row.block_m, row.block_n)
        yield AttentionCandidate("persistent", block, schedule, seconds, pack, row.warps, row.stages)
