"""The policy of the portable GPU attention kernel: candidates -> cost -> compare.

What bounds a row of `TILES` stands beside it. The model: blocks of keys at the rate that a tile's size reaches, and a
constant a tile. The largest rows' rates, and the constant, were read off an H100 (bfloat16, S = 1k to 16k: 3 us a tile
of 64 columns, 11 of 128); the others are estimates, and what matters is the order they put rows in.
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
from tilestream.plan.policy.portable import has_fp8_units
from tilestream.plan.problem import ITEMSIZE

#: Seconds a tile costs beside its blocks (taking it, the ring's start and end, the epilogue), and a launch.
TILE_SECONDS = 6e-6
LAUNCH_SECONDS = 8e-6
#: Bytes of K and V that the heads that are taken together may have: half of what an H100's L2 holds, or that of a GPU
#: whose L2 is known; an MI300's XCD has 4 MiB, and a queue of its own.
L2_BYTES = 24 * 2**20
XCD_BYTES, XCDS = 4 * 2**20, 8
#: Positions, rows and keys below this, twice and a block more, are within 31 bits.
_MOST = 2**29


class AttentionTile(NamedTuple):
    """A tile, the warps and stages that go with it, and the share of the matrix units' peak that it reaches."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    efficiency: float


#: By columns of a head, rounded up to a power of two, and bytes of an element. None spills on sm_90a, with all that the
#: kernel has: see the compile gate.
TILES: dict[tuple[int, int], tuple[AttentionTile, ...]] = {
    (64, 2): (
        AttentionTile(128, 64, 8, 3, 0.35),  # with 4 warps, scores and sums are 128 registers a thread, and it spills
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
#: Where an element is loaded at a time: one 64-bit address each, in registers.
UNALIGNED: dict[tuple[int, int], tuple[AttentionTile, ...]] = {
    (64, 2): (AttentionTile(32, 32, 4, 1, 0.05),),
    (128, 2): (AttentionTile(32, 32, 8, 1, 0.05),),
    (256, 2): (AttentionTile(32, 32, 8, 1, 0.04),),
    (64, 4): (AttentionTile(32, 32, 8, 1, 0.08),),
    (128, 4): (AttentionTile(16, 16, 8, 1, 0.05),),
    (256, 4): (AttentionTile(16, 16, 8, 1, 0.04),),
}
#: Keys of a block at least. Where keys arrive a block has half as many as else: the gate needs registers, too.
_LEAST_KEYS = 16
#: NVIDIA's architecture whose registers hold the blocks of `TILES`.
_TILED_FOR = "sm_90"
#: Stages where copies go through registers.
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
    masked = {problem.head_dim, problem.head_dim_v} != {size}  # columns that are not there
    # AMD's registers are too few for large blocks of 8 bits, or of an address an element: see the compile gate.
    if itemsize == 1 and not has_fp8_units(device.arch):  # q and k are converted in registers
        rows = tuple(_of_keys(row, row.block_n // 2) for row in rows[1:])
    elif hip and itemsize == 1 and (masked or size == 256):
        rows = tuple(_of_keys(row, row.block_n // 2) for row in rows)
    elif not hip and device.arch != _TILED_FOR and itemsize == 2 and size >= 128 and problem.aligned:
        rows = tuple(_of_keys(row, row.block_n // 2) for row in rows)  # 128x64 spills 176 bytes on sm_120
    if hip and not problem.aligned:
        rows = tuple(_of_keys(row, _LEAST_KEYS) for row in rows)
    if hip:
        return tuple(row._replace(stages=_HIP_STAGES) for row in rows)
    ring = 2 * size * itemsize
    # The ring, and a tile of queries or output beside it.
    fit = [(device.shared - row.block_m * ring // 2) // (row.block_n * ring) for row in rows]
    return tuple(row._replace(stages=max(1, min(row.stages, most))) for row, most in zip(rows, fit, strict=True))


def _of_keys(row: AttentionTile, keys: int) -> AttentionTile:
    """The row with blocks of so many keys, or of as few as there may be."""
    return row._replace(block_n=max(_LEAST_KEYS, keys))


def candidates(
    problem: AttentionProblem, device: DeviceProperties, workers: int, *, kind: Kind
) -> Iterator[AttentionCandidate]:
    """Every way the model knows; `NotImplementedError` if this kernel does not do such a problem."""
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
        if hip:  # each XCD has heads of its own
            group = heads_kept(problem, pack, XCD_BYTES)
        else:
            beside = TILE_SECONDS / (a_key * row.block_n)
            cache = device.l2 // 2 or L2_BYTES
            group = heads_together(problem, kind, row.block_m, pack, cache, workers, row.block_n, beside)
        schedule = schedule_of(problem, row.block_m // pack, pack, group, kind, workers, XCDS if hip else 1)
        rows = max(problem.rows, 1)
        keys = cdiv(problem.pairs, rows) + row.block_n  # of a row, on average, and what a block has too many
        math = keys * a_key
        total = (math + TILE_SECONDS) * cdiv(schedule.grid.tiles, workers)
        seconds = LAUNCH_SECONDS + max(total, problem.bytes / device.bandwidth) + 0.1 * total
        block = (row.block_m, row.block_n)
        yield AttentionCandidate("persistent", block, schedule, seconds, pack, row.warps, row.stages)
