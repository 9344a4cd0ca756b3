"""The CPU's policy: candidates -> cost -> compare.

The model adds five times, fitted on an EPYC (Zen 5) with MKL. Only the order of candidates matters. The times are of:

* a tile's multiply-adds, at the BLAS's rate;
* the BLAS's copy of a tile's rows of A and columns of B into its own layout, after a table lookup for 8-bit operands;
* Python's work for a tile: taking it, and the call;
* the start of the workers;
* the memory traffic, of which nothing is assumed to overlap.
"""

from __future__ import annotations

from collections.abc import Iterator

from tilestream.core.device import DeviceProperties
from tilestream.core.grid import Grid
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind, Schedule
from tilestream.plan.candidate import FREE, Candidate, Forced
from tilestream.plan.problem import ITEMSIZE, Problem
from tilestream.plan.raster import first_batch_of, raster_of, split_of

#: The share of the nominal peak that a BLAS reaches with large matrices.
BLAS_EFFICIENCY = 0.45
#: Bytes a second of one worker that copies operands into the BLAS's layout.
PACK_BANDWIDTH = 12e9
#: 8-bit elements a second that one worker, or one thread in a launch without workers, converts by table lookup.
WIDEN_RATE = 1.7e9
#: Seconds of a tile in Python, of a launch on workers, of each worker, and of a launch in the calling thread.
TILE_SECONDS = 25e-6
START_SECONDS = 150e-6
WORKER_SECONDS = 60e-6
INLINE_SECONDS = 30e-6
#: K elements in a K step. Only stream-K cuts at steps, and a smaller part is not worth a BLAS call.
BLOCK_K = 256

#: Row tiles in a group of the raster.
GROUP = 4

#: A tile under `tilestream.invariant`: its rows, to which the last tile is padded, and its most columns. All calls of
#: the BLAS then have one shape, because its bits depend on the shape.
PROMISED_TILE = (64, 512)

_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048)


def candidates(
    problem: Problem, device: DeviceProperties, workers: int, *, kinds: tuple[Kind, ...], inline: bool,
    forced: Forced = FREE,
) -> Iterator[Candidate]:  # fmt: skip
    """All candidates that match the caller's choices."""
    if inline:
        block = (max(problem.m, 1), max(problem.n, 1), BLOCK_K)
        # One item has all batches, which the BLAS takes in one call.
        schedule = Schedule("dynamic", Grid.of(problem.m, problem.n, problem.k, *block, batch=min(problem.batch, 1)))
        yield Candidate("inline", block, schedule, inline_seconds(problem, device, workers))
    for block_m, block_n in [forced.tile] if forced.tile else _tiles(problem):
        block = (block_m, block_n, BLOCK_K)
        grid = _grid(problem, block)
        raster = raster_of(problem, grid, block, GROUP, forced.order)
        for kind in kinds:
            count = forced.queues or 1 if kind == "dynamic" else 1
            split = split_of(raster) if count > 1 else "items"
            schedule = Schedule(kind, grid, raster, workers, count, split, forced.shares or 0, first_batch_of(problem))
            yield Candidate("workers", block, schedule, _seconds(problem, device, schedule, block))


def promised_tile(asked: tuple[int, int] | None, problem: Problem) -> tuple[int, int]:
    """The tile under `tilestream.invariant`.

    Raises
    ------
    NotImplementedError
        For another tile, and for float64: MKL's sums of a float64 row depend on its place even in calls of one shape.
    """
    if problem.dtype == "float64":
        raise NotImplementedError(
            "float64 under tilestream.invariant on the CPU: the BLAS adds its rows by their place; take float32"
        )
    tile = PROMISED_TILE[0], min(PROMISED_TILE[1], max(problem.n, 1))
    if asked not in (None, tile):
        raise NotImplementedError(
            f"tile={asked} under tilestream.invariant: the BLAS's bits depend on a call's shape, so the CPU takes "
            f"tiles of {tile[0]}x{tile[1]}; leave tile= away"
        )
    return tile


def _tiles(problem: Problem) -> list[tuple[int, int]]:
    return [(m, n) for m in _blocks(problem.m) for n in _blocks(problem.n)]


def _blocks(extent: int) -> list[int]:
    """Block sizes to consider for an extent: those below it, and the extent itself (a single tile)."""
    blocks = [block for block in _BLOCKS if block < extent]
    return [*blocks[-5:], extent] if 0 < extent <= _BLOCKS[-1] else blocks[-5:] or [1]


def _grid(problem: Problem, block: tuple[int, int, int]) -> Grid:
    return Grid.of(problem.m, problem.n, problem.k, *block, batch=problem.batch)


def inline_seconds(problem: Problem, device: DeviceProperties, workers: int) -> float:
    """The predicted time of a launch in the calling thread."""
    rate = device.peak(problem.dtype, workers) * BLAS_EFFICIENCY
    widen = problem.batch * (problem.m + problem.n) * problem.k / WIDEN_RATE if problem.fp8 else 0.0
    return INLINE_SECONDS + problem.operations / rate + widen + problem.bytes / device.bandwidth


def _seconds(problem: Problem, device: DeviceProperties, schedule: Schedule, block: tuple[int, int, int]) -> float:
    grid, workers = schedule.grid, schedule.workers
    block_m, block_n = min(block[0], problem.m), min(block[1], problem.n)
    math = 2 * block_m * block_n * problem.k / (device.peak(problem.dtype, 1) * BLAS_EFFICIENCY)
    pack = (block_m + block_n) * problem.k * ITEMSIZE[problem.dtype] / PACK_BANDWIDTH
    if problem.fp8:
        pack = (block_m + block_n) * problem.k * (1 / WIDEN_RATE + ITEMSIZE["float32"] / PACK_BANDWIDTH)
    tile = math + pack + TILE_SECONDS
    if schedule.kind == "stream_k" and schedule.remainder:
        partials = 2 * schedule.slots * block_m * block_n * 4 / PACK_BANDWIDTH
        total = tile * grid.tiles / workers + (partials + TILE_SECONDS * schedule.num_shares) / workers + TILE_SECONDS
    else:
        total = tile * cdiv(grid.tiles, workers)
    total += START_SECONDS + WORKER_SECONDS * workers + problem.bytes / device.bandwidth
    # The work that remains when the last chunk arrives overlaps with nothing.
    for incoming, size, others in ((problem.rows, block[0], grid.num_n), (problem.columns, block[1], grid.num_m)):
        if incoming is not None:
            chunks = incoming.chunks
            last = cdiv(cdiv(chunks.rows, chunks.count), size) + (1 if chunks.rows_per_chunk % size else 0)
            total += tile * cdiv(last * others, workers)
    return total
