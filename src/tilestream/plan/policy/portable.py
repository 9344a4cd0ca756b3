"""The policy of the portable GPU kernel: candidates -> cost -> compare.

The comments in `TILES` give the bounds of its rows. The model adds three times: a tile's multiply-adds at the rate of
its size, a constant for each tile (taking it, filling and emptying the ring, the epilogue), and the launch. The total
is at least the memory's floor. The rates are from an H100; only the order of candidates matters. `Costs` has the other
constants. CDNA 3 and 4 have their own tiles (`CDNA`) and their own model (`tilestream.plan.policy.cdna`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.core.grid import Grid
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind, Schedule
from tilestream.plan.candidate import FREE, Candidate, Forced
from tilestream.plan.policy import cdna
from tilestream.plan.problem import FNUZ, FP8, ITEMSIZE, OCP, Problem
from tilestream.plan.raster import first_batch_of, queues_of, raster_of

#: Row tiles in a group of the raster.
GROUP = 8
#: Columns of a strip of the epilogue. With all its parts the largest tile needs 224 of a thread's 255 registers, or 240
#: for 8-bit operands; strips of 64 need 240 and more. With tensor memory, tiles of 128 columns spill up to 270 bytes in
#: strips of 32, and need 178 registers with 16; 64 columns spill 128 bytes with 16, and need 212 with 32 (Triton 3.9).
#: On gfx942 128x256 spills up to 164 bytes in strips of 32 where a tile has parts, or more than a store at its end, and
#: of 8-bit operands that are not converted 16 bytes in strips of 16 (Triton 3.9).
STRIP, NARROW_STRIP, NARROWEST_STRIP = 32, 16, 8
#: Extents below this, and a tile more, are within 31 bits.
_MOST = 2**31 - 256
#: The operands' dtypes.
DTYPES = ("float16", "bfloat16", "float32")
#: NVIDIA's first architecture with matrix units for 8-bit operands.
_FIRST_SM = 89
#: Architectures by Triton's matrix instructions. With a warp's instructions the last stage is in registers. With those
#: of Blackwell's tensor memory the whole accumulator comes to the registers: 128x256 spills, and with unaligned
#: operands or a gate 128 columns spill.
_OF_A_WARP = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_120", "sm_121")
_OF_TENSOR_MEMORY = ("sm_100", "sm_103", "sm_110")
#: AMD's architectures with matrix units for 8-bit operands, by the kind of operand.
_OCP_GFX = ("gfx950", "gfx1200", "gfx1201", "gfx1250")
_FNUZ_GFX = ("gfx942",)


@dataclass(frozen=True)
class Costs:
    """Constants of the model, beside the tiles' shares of the peak.

    ``python benchmarks/run.py gemm fit RECORD...`` fits them to records of ``gemm sweep --small``.
    """

    #: Seconds of a launch: on an H100 a call of few operations has 5 us.
    launch: float = 5e-6
    #: Seconds of a tile in addition to its multiply-adds: taking it, filling and emptying the ring, the epilogue.
    tile: float = 2e-6
    #: More seconds of a tile for each of its elements that is stored by itself: Triton writes vectors where an output
    #: has rows of a multiple of 16 elements, and single elements where not: 32 stores of a thread, not 4. A third
    #: of what the other portable kernel's constants have, ``(narrow - 1) * write``, until a sweep fits it.
    narrow: float = 80e-12
    #: The slowdown of the loop in the kernel that can also split a tile.
    stream_k_loss: float = 1.06
    #: A tile's slowdown in the kernel that draws tickets. On an H200 it is 0 to 3 % with B in a linear layer's layout,
    #: and 7 to 13 % with B row-major (benchmarks/results/h200/portable_gemm.json). A problem does not say which B has.
    queue_loss: float = 1.05
    #: Bytes a second at which the last worker of a split tile reads its partial results, one after the other (H200:
    #: 60e9 to 88e9).
    partials: float = 70e9
    #: The slowdown of 8-bit operands that TMA does not address on Hopper, as its tensor cores take them along K alone
    #: from shared memory: a guess.
    across_loss: float = 2.0
    #: The share of the tiles' time that is not hidden where memory is the bound: a candidate with less work is still
    #: the better one.
    beside_memory: float = 0.1


#: Those of all devices but AMD's.
COSTS = Costs()


class Tile(NamedTuple):
    """A tile, its warps and stages, and its share of the matrix units' peak.

    ``buffers`` stages are in shared memory, and the others in registers; 0: all are in shared memory.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    efficiency: float
    buffers: int = 0

    def ring_bytes(self, itemsize: int) -> int:
        """The stages' bytes of shared memory."""
        return (self.block_m + self.block_n) * self.block_k * itemsize * (self.buffers or self.stages)


#: Tiles by the kind of inputs. None spills with all parts of the epilogue and a gate: see the compile gate. Numbers of
#: registers, of sm_90a's 255, are the lowest limits without a spill in ptxas, the highest of Triton 3.6, 3.7 and 3.9.
TILES: dict[str, tuple[Tile, ...]] = {
    "16-bit": (
        Tile(128, 256, 64, 8, 3, 0.70),  # accumulator: 128 registers a thread; ring: 144 KiB
        Tile(128, 128, 64, 8, 4, 0.62),  # with 4 warps, the epilogue needs 248 registers
        Tile(64, 128, 64, 4, 4, 0.41),
        Tile(64, 64, 64, 4, 4, 0.25),  # 64 rows: the least of Hopper's warp-group instructions
        Tile(16, 128, 64, 4, 4, 0.12),
    ),
    # Copies of 16 bytes and of 8; and of 4, whose addresses for a K step of 64 are more than there are registers beside
    # 128x128 (Triton 3.9 spills 168 bytes). The shares of 128x128 were measured on an H100
    # (benchmarks/results/h100/gemm_pitch.json), that of single elements and 64x64 by odd rows of its random problems;
    # the other two are guesses.
    "16-bit, vectors": (Tile(128, 128, 64, 8, 4, 0.33), Tile(64, 64, 64, 4, 4, 0.15)),
    "16-bit, vectors of 2": (Tile(128, 128, 32, 8, 4, 0.23), Tile(64, 64, 32, 4, 4, 0.11)),
    # Each element has its own load, with a 64-bit address in registers.
    "16-bit, unaligned": (Tile(128, 128, 32, 8, 2, 0.15), Tile(64, 64, 32, 4, 2, 0.05)),
    "8-bit": (
        Tile(128, 256, 128, 8, 3, 0.60),  # the ring: 144 KiB
        Tile(128, 128, 128, 8, 4, 0.50),
        Tile(64, 128, 128, 4, 4, 0.35),
        Tile(64, 64, 128, 4, 4, 0.22),
        Tile(16, 128, 64, 4, 4, 0.10),  # 16 rows: multiplied as float16
    ),
    # Two accumulators: the tensor cores' own, and the float32 sum to which it is added. 128x256 spills. ptxas
    # serialises the instructions of both.
    "8-bit, promoted": (
        Tile(128, 128, 128, 8, 4, 0.45),
        Tile(64, 128, 128, 4, 4, 0.30),
        Tile(64, 64, 128, 4, 4, 0.20),
        Tile(16, 128, 64, 4, 4, 0.10),
    ),
    "8-bit, unaligned": (Tile(128, 128, 32, 8, 2, 0.08), Tile(64, 64, 32, 4, 2, 0.05)),
    "tf32": (Tile(128, 128, 32, 8, 3, 0.50), Tile(64, 64, 32, 4, 3, 0.25)),
    "float32": (Tile(128, 128, 16, 8, 3, 0.50), Tile(64, 64, 16, 8, 3, 0.35)),
    "float32, unaligned": (Tile(32, 64, 16, 4, 2, 0.20),),
}

#: Stages if copies go through registers: one in shared memory, and the next in flight.
_HIP_STAGES = 2
#: The tiles of gfx942, whose copies go through registers, and of gfx950, for which Triton 3.9 copies directly to LDS.
#: Efficiencies are estimates by `tilestream isa` (benchmarks/results/amd/isa.json), not measurements. None spills with
#: all parts of the epilogue and a gate: see the compile gate.
CDNA: dict[str, dict[str, tuple[Tile, ...]]] = {
    "gfx942": {
        "16-bit": (
            Tile(128, 256, 64, 8, 2, 0.56, 1),  # two buffers, of 48 KiB each, exceed 64 KiB
            Tile(128, 128, 64, 8, 3, 0.60, 2),
            Tile(64, 128, 64, 4, 2, 0.31, 1),
            Tile(64, 64, 64, 4, 2, 0.18, 1),
            Tile(16, 128, 64, 4, 2, 0.085, 1),
        ),
        "16-bit, unaligned": (Tile(128, 128, 32, 8, 2, 0.21, 1), Tile(64, 64, 32, 4, 2, 0.07, 1)),
        "8-bit": (
            Tile(128, 256, 128, 8, 2, 0.56, 1),
            Tile(128, 128, 128, 8, 3, 0.60, 2),
            Tile(64, 128, 128, 4, 2, 0.31, 1),
            Tile(64, 64, 128, 4, 2, 0.18, 1),
            Tile(16, 128, 64, 4, 2, 0.05, 1),
        ),
        "8-bit, unaligned": (Tile(128, 128, 32, 8, 2, 0.12, 1), Tile(64, 64, 32, 4, 2, 0.038, 1)),
        # Multiplied as float16. The share of the peak, which is that of 8 bits, is half of the share of float16's. The
        # conversion is the bound: each warp converts all operands that it reads. 128x256 with 64 of K would have 0.121,
        # but spills 36 bytes if A and B are row-major (Triton 3.9).
        "8-bit, converted": (
            Tile(128, 256, 32, 8, 2, 0.098, 1),
            Tile(128, 128, 64, 8, 2, 0.072, 1),
            Tile(64, 128, 64, 4, 2, 0.051, 1),
            Tile(64, 64, 64, 4, 2, 0.038, 1),
            Tile(16, 128, 64, 4, 2, 0.021, 1),
        ),
        "8-bit, converted, unaligned": (Tile(128, 128, 32, 8, 2, 0.052, 1), Tile(64, 64, 32, 4, 2, 0.018, 1)),
        "float32": (Tile(128, 128, 16, 8, 3, 0.95, 2), Tile(64, 64, 16, 8, 3, 0.55, 2)),
        "float32, unaligned": (Tile(32, 64, 16, 4, 2, 0.79, 1),),
    },
    "gfx950": {
        "16-bit": (
            Tile(128, 256, 64, 8, 3, 0.48),
            Tile(128, 128, 64, 8, 3, 0.32),
            Tile(64, 128, 64, 4, 3, 0.17),
            Tile(64, 64, 64, 4, 3, 0.10),
            Tile(16, 128, 64, 4, 3, 0.047),
        ),
        "16-bit, unaligned": (Tile(128, 128, 32, 8, 2, 0.17), Tile(64, 64, 32, 4, 2, 0.05)),
        "8-bit": (
            Tile(128, 256, 128, 8, 3, 0.52),
            Tile(128, 128, 128, 8, 3, 0.31),
            Tile(64, 128, 128, 4, 3, 0.18),
            Tile(64, 64, 128, 4, 3, 0.10),
            Tile(16, 128, 64, 4, 2, 0.026),
        ),
        "8-bit, unaligned": (Tile(128, 128, 32, 8, 2, 0.09), Tile(64, 64, 32, 4, 2, 0.025)),
        # With 128 rows Triton 3.9 spills.
        "8-bit, converted": (
            Tile(64, 128, 64, 4, 3, 0.035),
            Tile(64, 64, 64, 4, 3, 0.020),
            Tile(16, 128, 64, 4, 2, 0.016),
        ),
        "8-bit, converted, unaligned": (Tile(64, 64, 32, 4, 2, 0.018),),
        "float32": (Tile(128, 128, 16, 8, 3, 0.82), Tile(64, 64, 16, 8, 3, 0.50)),
        "float32, unaligned": (Tile(32, 64, 16, 4, 2, 0.49),),
    },
}


def tiles(problem: Problem, device: DeviceProperties) -> tuple[Tile, ...]:
    """The rows of `TILES` for a problem whose ring fits the device."""
    if ITEMSIZE[problem.dtype] <= 2:
        kind = f"{8 * ITEMSIZE[problem.dtype]}-bit"
        if converts(problem.dtype, device.arch):
            kind += ", converted"
        elif problem.aligned and problem.promoted and sums_lose_bits(device.arch):
            kind += ", promoted"
    else:
        kind = "tf32" if problem.tf32 else "float32"
    kinds = [kind] if problem.aligned else [f"{kind}, unaligned", kind]
    if in_vectors(problem, device):
        kinds = [f"{kind}, vectors of {problem.vector}", f"{kind}, vectors"]
    here = CDNA.get(device.arch, {})
    rows = next((here[name] for name in kinds if name in here), ())
    if not rows:
        rows = next(TILES[name] for name in kinds if name in TILES)
        if device.arch.startswith("gfx"):
            rows = tuple(row._replace(stages=_HIP_STAGES) for row in rows)
        elif device.arch in _OF_A_WARP:
            # 128x256 spills 24 bytes on sm_80 (Triton 3.9), and up to 336 on sm_120 (Triton 3.7). 128x128 of 8 bits
            # spills 16 bytes on sm_89, and 32 on sm_120 where the kernel adds an element at a time (Triton 3.9).
            blackwell = device.arch.startswith("sm_12")
            spills = not (problem.fast_accum or problem.aligned) if blackwell else problem.fast_accum
            most = 64 * 128 if problem.fp8 and spills else 128 * 128
            fit = (row for row in rows if row.block_m * row.block_n <= most)
            rows = tuple(row._replace(buffers=row.stages - 1) for row in fit)
            if problem.fp8:  # with 4 warps 64x128 spills 8 bytes on sm_120 (Triton 3.7), up to 328 on sm_89 (3.9)
                rows = tuple(row._replace(warps=8) if row.block_m == 64 else row for row in rows)
        elif has_tensor_memory(device.arch):
            small = problem.arriving or not problem.aligned
            rows = tuple(row for row in rows if row.block_n <= (64 if small else 128))
    held = tuple(row for row in rows if row.ring_bytes(ITEMSIZE[problem.dtype]) <= device.shared)
    return held or (rows[-1]._replace(stages=_HIP_STAGES),)


def in_vectors(problem: Problem, device: DeviceProperties) -> bool:
    """Whether operands that are not aligned are read in vectors of a few elements: where that has run."""
    return problem.vector > 1 and not problem.aligned and device.arch.startswith("sm_90")


def candidates(
    problem: Problem, device: DeviceProperties, workers: int, *, kinds: tuple[Kind, ...], forced: Forced = FREE
) -> Iterator[Candidate]:
    """All candidates that match the caller's choices.

    Raises
    ------
    NotImplementedError
        If this kernel does not support the problem.
    ValueError
        If it does not have the forced tile for these inputs.
    """
    refuse(problem, device)
    rows = tiles(problem, device)
    if forced.tile is not None:
        have = ", ".join(f"{row.block_m}x{row.block_n}" for row in rows)
        rows = tuple(row for row in rows if (row.block_m, row.block_n) == tuple(forced.tile))
        if not rows:
            raise ValueError(f"tile={forced.tile}: the portable kernel has {have} for these operands")
    if cdna.knows(device):
        yield from cdna.candidates(problem, device, workers, [cdna.Row(*row[:6]) for row in rows], kinds, forced)
        return
    for row in rows:
        block = (row.block_m, row.block_n, row.block_k)
        grid = Grid.of(problem.m, problem.n, problem.k, *block, batch=problem.batch)
        raster = raster_of(problem, grid, block, GROUP, forced.order)
        for kind in kinds:
            count, split = queues_of(problem, kind, forced.queues, raster, min(workers, max(1, grid.tiles)))
            schedule = Schedule(kind, grid, raster, workers, count, split, forced.shares or 0, first_batch_of(problem))
            if kind == "stream_k" and len(kinds) > 1 and not schedule.remainder:
                continue  # not forced, and nothing to split: the same as a queue, with a larger kernel
            predicted = seconds(problem, device, schedule, row)
            yield Candidate("persistent", block, schedule, predicted, row.warps, row.stages)


def has_tensor_memory(arch: str) -> bool:
    """Whether the accumulator is in tensor memory, from which it can be read in strips."""
    return arch in _OF_TENSOR_MEMORY


def strip(arch: str, columns: int, is_store: bool, dtype: str = "") -> int:
    """Columns of a strip of the epilogue, for a tile of ``columns`` and operands of ``dtype``.

    ``is_store``: whether a tile's end is a store and no more.
    """
    if arch in _FNUZ_GFX and dtype in FNUZ and columns > 128 and not is_store:
        return NARROWEST_STRIP
    narrow = columns > 64 if has_tensor_memory(arch) else arch == "gfx942" and columns > 128 and not is_store
    return min(NARROW_STRIP if narrow else STRIP, columns)


def by_model(problem: Problem, device: DeviceProperties) -> bool:
    """Whether the cost model compares a queue with a static grid: on NVIDIA's GPUs, where both were measured.

    It does not if chunks arrive: late chunks and workers decide then, and the model is of an idle GPU.
    """
    return device.arch.startswith("sm_") and not problem.arriving


def refuse(problem: Problem, device: DeviceProperties) -> None:
    """Raise `NotImplementedError` if this kernel does not support a problem."""
    for dtype, known in ((problem.dtype, (*DTYPES, *FP8)), (problem.out_dtype, DTYPES)):
        if dtype not in known:
            raise NotImplementedError(
                f"dtype: {dtype} on a GPU; the portable kernel multiplies {', '.join(known)}: use torch.matmul there"
            )
    units = fp8_units(device.arch)
    if problem.fp8 and problem.dtype not in units and not converts(problem.dtype, device.arch):
        why = "has no matrix units for operands of 8 bits"
        if units:
            why = f"has matrix units for {' and '.join(units)}, to which the same bits are other numbers"
        raise NotImplementedError(
            f"dtype: {problem.dtype}; {device.name}, {device.arch}, {why}: convert the operands to bfloat16 there"
        )
    for name in ("m", "n", "k"):
        if getattr(problem, name) >= _MOST:
            raise NotImplementedError(
                f"{name}={getattr(problem, name)}; the portable kernel counts rows, columns and K in 31 bits: cut the "
                "operands, or use torch.matmul"
            )


def fp8_units(arch: str) -> tuple[str, ...]:
    """The 8-bit dtypes of the matrix units: OCP's, the fnuz ones, or none."""
    if arch in _FNUZ_GFX:
        return FNUZ
    return OCP if arch in _OCP_GFX or (arch.startswith("sm_") and int(arch[3:]) >= _FIRST_SM) else ()


def has_fp8_units(arch: str) -> bool:
    """Whether the matrix units take OCP's 8-bit operands."""
    return fp8_units(arch) == OCP


def sums_lose_bits(arch: str) -> bool:
    """Whether the matrix units add up 8-bit products with fewer bits than float32's.

    Hopper's and Ada's do (SageAttention2, arXiv:2411.10958, section 3: 13 bits of mantissa). Nothing is published for
    sm_120; it has Ada's instructions, so the same is assumed. AMD's units, and those with Blackwell's tensor memory,
    add up in float32.
    """
    return arch == "sm_90" or adds_by_itself(arch)


def adds_by_itself(arch: str) -> bool:
    """Whether the kernel itself must add the sums of a K step in float32, because Triton does not on ``arch``."""
    return arch in _OF_A_WARP and has_fp8_units(arch)


def converts(dtype: str, arch: str) -> bool:
    """Whether the kernel converts 8-bit operands to float16, exactly, because the matrix units take other dtypes."""
    return arch in CDNA and dtype in FP8 and dtype not in fp8_units(arch)


def converted(problem: Problem, device: DeviceProperties) -> str:
    """The cost of a conversion in words; empty without a conversion."""
    if not converts(problem.dtype, device.arch):
        return ""
    return (
        f"{device.arch}'s take {' and '.join(fp8_units(device.arch))}, to which the bits of {problem.dtype} are other "
        "numbers: converted to float16 on the way, exactly, and multiplied at its rate"
    )


def seconds(
    problem: Problem, device: DeviceProperties, schedule: Schedule, tile: Tile, costs: Costs = COSTS
) -> float:  # fmt: skip
    """The predicted time of a schedule; ``costs``: others than `COSTS` while they are fitted."""
    workers, count, elements = schedule.workers, schedule.grid.tiles, tile.block_m * tile.block_n
    rate = device.peak(problem.kind, 1) * tile.efficiency
    math = 2 * elements * problem.k / rate
    if schedule.kind != "static" and by_model(problem, device):
        math *= costs.queue_loss
    if problem.fp8 and problem.not_by_tma and device.arch.startswith("sm_90"):
        math *= costs.across_loss
    of_tile = costs.tile + (costs.narrow * elements if problem.out_columns % 16 else 0.0)
    if schedule.kind == "stream_k" and schedule.remainder:
        size, parts = 4 * elements, schedule.num_shares / schedule.remainder
        partials = 2 * schedule.slots * size / device.bandwidth
        if by_model(problem, device):
            partials += max(1.0, parts) * size / costs.partials
        total = (costs.stream_k_loss * math + of_tile) * count / workers + partials + 2 * costs.tile
    else:
        total = (math + of_tile) * cdiv(count, workers)
    return costs.launch + max(total, problem.bytes / device.bandwidth) + costs.beside_memory * total
