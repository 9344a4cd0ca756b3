"""The policy of the portable kernel whose programs have a tile, or a share of one: for products of microseconds.

::

    a program:  its K steps, one after the other, each as long as memory answers; its end
    an SM:      beginning programs, and issuing all of their copies; and their bytes' way from L2
    a launch:   the programs in waves, beside the SMs' work, beside memory; then the sums of parts

Three things that run side by side take ``(x**p + y**p + z**p) ** (1 / p)``. The constants are of an H200: every tile of
62 small problems, of 35 with few tiles and a long K, of all alignments, and the chosen ones of 64 more (seed 3 of the
random board; root mean square of the logarithm: 0.09).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.core.grid import Grid
from tilestream.core.integers import cdiv
from tilestream.core.order import Raster
from tilestream.core.schedule import Kind, Schedule
from tilestream.plan.candidate import FREE, ONE_TILE, Candidate, Forced
from tilestream.plan.problem import ITEMSIZE, Problem

#: The kinds of its schedules: a tile a program, or a share.
KINDS: tuple[Kind, ...] = ("static", "stream_k")
#: The architecture on which the kernel has been measured: elsewhere it is no candidate.
ARCH = "sm_90"
#: The most programs for each SM, of a whole tile and of a share: as many as were measured.
MOST_PROGRAMS, MOST_SHARES = 16, 4
#: The most elements of an output: twice as many as of those that were measured.
MOST_ELEMENTS = 2**22
#: The most copies of a thread in a K step: more leave no registers for their addresses.
MOST_COPIES = 64
#: Stages of a shallow pipeline.
SHALLOW = 3
#: The most K steps of a program with a shallow pipeline whose copies are whole vectors, and the fewest with a deep one.
MOST_SHALLOW, LEAST_DEEP = 8, 4
#: Parts of a tile's K that are tried.
PARTS = (2, 3, 4, 6, 8, 12, 16, 24)
#: Bytes of shared memory that programs of an SM share, its warps, and the bytes of a copy at most.
_SHARED, _WARPS, _VECTOR = 227 * 1024, 64, 16

# Constants of the model, in seconds.
LAUNCH = 4.387e-6
BEGIN = 0.269e-6  # of an SM, to begin a program
COPY = 68.3e-12  # of an SM, to issue a copy
WRITE, NARROW = 73.1e-12, 4.0  # of an SM, for an element that it stores; so many times where rows are of odd lengths
FEED = 52.7e-15  # of all SMs, for a byte from L2
STEP = 79.6e-9  # of a program, in each K step
LATENCY = 0.3071e-6  # of a program, in each K step, divided by the stages that are ahead
THREAD_COPY = 7.64e-9  # of a program, for each copy of a thread in a K step
STORE = 13.4e-9  # of a program, for each element that a thread stores
FIX = 3.306e-6  # of a tile in parts
PART = 10.01e-9  # of a tile in parts, for each element that a thread reads
PARTIALS = 0.45e-12  # of all partial results, for a byte
OVERLAP = 2.92
#: Share of the nominal bandwidth that memory gives.
MEMORY = 0.92


class Tile(NamedTuple):
    """A tile, its warps, and the stages of Triton's pipeline."""

    block_m: int
    block_n: int
    block_k: int
    warps: int = 4
    stages: int = SHALLOW


#: Tiles by the bytes of an element. Tensor cores take 64 rows of a warp group at once; smaller tiles use a warp's
#: instructions, and there are more of them to fill the SMs. Of 8 bits Triton multiplies those as float16.
TILES = {
    2: (
        Tile(16, 32, 128, warps=2),
        Tile(32, 32, 64),
        Tile(32, 32, 128),
        Tile(64, 16, 128),
        Tile(64, 32, 64),
        Tile(64, 32, 128),
        Tile(64, 64, 64),
        Tile(64, 128, 64),
        Tile(128, 64, 64),
        Tile(16, 32, 128, warps=2, stages=5),
        Tile(64, 16, 128, stages=5),
        Tile(64, 32, 128, stages=5),
        Tile(64, 64, 64, stages=5),
        Tile(64, 64, 64, stages=8),
        Tile(64, 64, 128, stages=4),
        Tile(64, 128, 64, stages=5),
    ),
    1: (
        Tile(16, 32, 128, warps=2),
        Tile(32, 32, 128),
        Tile(64, 16, 128),
        Tile(64, 32, 128),
        Tile(64, 64, 128),
        Tile(64, 128, 128),
        Tile(128, 64, 128),
        Tile(64, 16, 128, stages=5),
        Tile(64, 32, 128, stages=6),
        Tile(64, 64, 128, stages=5),
        Tile(64, 64, 128, stages=8),
    ),
}


def refusal(problem: Problem, device: DeviceProperties) -> str:
    """Why the kernel does not do a problem; empty if it does."""
    if device.arch != ARCH:
        return f"a program a tile was measured on {ARCH} alone"
    if type(problem) is not Problem or problem.is_empty:
        return "there is a group, or nothing to multiply"
    if problem.batch * problem.m * problem.n > MOST_ELEMENTS:
        return f"its output has more than {MOST_ELEMENTS} elements"
    if problem.arriving or problem.publishes is not None:
        return "chunks are waited for, or signalled, by persistent workers"
    mixed = problem.b_dtype not in ("", problem.dtype)
    if ITEMSIZE[problem.dtype] not in TILES or problem.promoted or (problem.fp8 and problem.no_tma) or mixed:
        return "it multiplies 16 bits, and 8 bits of one dtype that TMA addresses and the tensor cores add up"
    return ""


def candidates(
    problem: Problem, device: DeviceProperties, workers: int, forced: Forced = FREE, kinds: tuple[Kind, ...] = KINDS
) -> Iterator[Candidate]:
    """All candidates that match the caller's choices. Fewer ``workers`` than the device has do a program each."""
    if refusal(problem, device) or forced.order is not None or forced.stages is not None:
        return
    limited = workers < device.workers
    for tile in TILES[ITEMSIZE[problem.dtype]]:
        if forced.tile not in (None, tile[:2]) or copies_of(problem, tile) > MOST_COPIES:
            continue
        whole = Grid.of(problem.m, problem.n, problem.k, *tile[:3], batch=problem.batch)
        for parts in (1, *PARTS):
            grid = replace(whole, k_steps=parts * cdiv(whole.k_steps, parts))  # all shares alike: none has two tiles
            most = workers if limited else (MOST_PROGRAMS if parts == 1 else MOST_SHARES) * workers
            kind: Kind = "static" if parts == 1 else "stream_k"
            if kind not in kinds or parts * grid.tiles > most or not is_apt(problem, tile, grid.k_steps, parts):
                continue
            shares = 0 if parts == 1 else parts * grid.tiles
            schedule = Schedule(kind, grid, Raster("row_major"), parts * grid.tiles, 1, "items", shares, 0)
            predicted = seconds(problem, device, tile, grid, parts)
            yield Candidate(ONE_TILE, tile[:3], schedule, predicted, tile.warps, tile.stages)


def is_apt(problem: Problem, tile: Tile, steps: int, parts: int) -> bool:
    """Whether a program has as many of ``steps`` as its pipeline is for, and no part is past the end of K."""
    own = steps // parts
    if (parts - 1) * own * tile.block_k >= problem.k:
        return False
    whole = problem.aligned or problem.vector * ITEMSIZE[problem.dtype] == _VECTOR
    return (parts == 1 or own >= LEAST_DEEP) and (
        own >= LEAST_DEEP if tile.stages > SHALLOW else own <= MOST_SHALLOW or not whole
    )


def copies_of(problem: Problem, tile: Tile) -> float:
    """A thread's copies from memory in a K step."""
    vector = _VECTOR // ITEMSIZE[problem.dtype] if problem.aligned else problem.vector
    return (tile.block_m + tile.block_n) * tile.block_k / vector / (32 * tile.warps)


def seconds(problem: Problem, device: DeviceProperties, tile: Tile, grid: Grid, parts: int = 1) -> float:
    """The predicted time: see the module."""
    threads, steps, programs = 32 * tile.warps, grid.k_steps // parts, parts * grid.tiles
    copies, elements = copies_of(problem, tile), tile.block_m * tile.block_n / threads
    size = (tile.block_m + tile.block_n) * ITEMSIZE[problem.dtype]
    at_once = max(1, min(_SHARED // (size * tile.block_k * tile.stages), _WARPS // tile.warps))
    step = STEP + LATENCY / (tile.stages - 1) + THREAD_COPY * copies
    waves = cdiv(programs, device.workers * at_once) * (steps * step + STORE * elements)
    issued = steps * COPY * copies * threads * min(1.0, problem.k / tile.block_k)
    written = tile.block_m * tile.block_n * WRITE * (1.0 if problem.out_columns % 8 == 0 else NARROW)
    sms = programs / device.workers * (BEGIN + issued + written) + FEED * grid.tiles * size * problem.k
    memory = problem.bytes / (MEMORY * device.bandwidth)
    sums = FIX + PART * parts * elements + PARTIALS * 4 * programs * tile.block_m * tile.block_n if parts > 1 else 0.0
    together: float = (waves**OVERLAP + sms**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP)
    return LAUNCH + together + sums
