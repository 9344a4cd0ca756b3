"""The cost model of AMD's CDNA 3 and 4 (MI300X, MI325X, MI350X, MI355X), and the candidates for it.

The model is arithmetic on published figures; no such GPU was available for a fit.

A K step of a tile takes the longest of these times, in cycles of a compute unit:

* its multiplications at the share of the peak that the kernel's main loop reaches (`tilestream isa` estimates it);
* its bytes at 44 KiB, the most in flight to a compute unit, for each round trip of about 1000 cycles
  (AMD, *gfx950-gluon-tutorials*, ``docs/tcp_bound_tile_model.md``: this bounds tiles below 256 x 128);
* its bytes from L2: 2 KiB a cycle for all workers of a die;
* the die's reads beyond L2: the rows and columns of its workers' current tiles, once each, at the die's share of the
  Infinity Cache. Raster and queues decide this term: see `group_of`.

A launch takes its tiles in waves of one tile for each worker, and all workers of a wave store at once. The clock falls
with the matrix units' share of busy cycles, down to AMD's published clock at full load.
`tests/plan/test_cdna_plan.py` compares the model with published measurements, within 12 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.core.grid import Grid
from tilestream.core.integers import cdiv
from tilestream.core.order import Raster
from tilestream.core.schedule import Kind, Schedule, Split
from tilestream.plan.candidate import FREE, Candidate, Forced
from tilestream.plan.problem import ITEMSIZE, Problem
from tilestream.plan.raster import first_batch_of, raster_of, split_of

ARCHS = ("gfx942", "gfx950")
#: The most bytes in flight to a compute unit, and the latency of a byte in cycles.
UNDER_WAY, ROUND_TRIP = 44 << 10, 1000
#: The cost of hidden reads beyond L2, as a share of their time: they take power, and so clock. AMD measured 1 to 2 %
#: between rasters of 39 and of 13 tiles a step (*gfx950-gluon-tutorials*, ``kernels/gemm/gfx942/README.md``, 3.2).
DRAWN = 0.1
#: K steps that the workers of a die drift apart. L2 must keep shared data for that many steps.
DRIFT = 4
#: The share of memory's bandwidth that a wave of epilogues reaches. These are stores only.
STORING = 0.6
#: Compute units of a shader engine, if it is not known. CDNA 3 and 4 have 8 to 10.
_UNITS_OF_AN_ENGINE = 8
#: Seconds from the launch to its first items.
LAUNCH_SECONDS = 8e-6
#: The slowdown of the loop in the kernel that can also split a tile.
STREAM_K_LOSS = 1.06
#: The share of the smaller of work and memory traffic that does not overlap. It prefers less work if memory binds.
NOT_HIDDEN = 0.1


class Row(NamedTuple):
    """A kernel's tile: rows, columns, K of a step, warps of a worker, and stages of its ring.

    ``efficiency`` is the share of the matrix units' peak that the main loop reaches, estimated by `tilestream isa`.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    efficiency: float


def knows(device: DeviceProperties) -> bool:
    """Whether the model has this device's constants."""
    return device.arch in ARCHS and device.clock > 0 and device.l2 > 0


def workers_beside_producers(arrives: bool, device: DeviceProperties, workers: int) -> int:
    """The number of ``workers`` that may wait for chunks: one compute unit of each shader engine stays free.

    It is ``workers`` if nothing ``arrives``, and on other GPUs.

    On an AMD GPU kernels signal chunks: ROCclr writes a word in a stream's order, and makes copies of 16 KiB and less,
    by a kernel. Work groups go to the shader engines in turn. A work group whose engine is full waits there, behind the
    workers that wait for it (invariant 10).
    """
    if not device.arch.startswith("gfx") or not arrives:
        return workers
    free = device.shader_engines or cdiv(device.workers, _UNITS_OF_AN_ENGINE)
    return max(1, min(workers, device.workers - free))


def group_of(block: tuple[int, int, int], grid: Grid, workers: int, dies: int) -> int:
    """The number of row tiles of a raster's group with which the workers of one die together read the least.

    ``p`` workers in groups of ``g`` row tiles read ``g`` rows of tiles and ``ceil(p / g)`` columns. For square tiles
    this is AMD's ``g + ceil(p / g)`` (*gfx950-gluon-tutorials*, v9: 4, 6 and 8 are the best of 32).
    """
    together = cdiv(workers, dies)
    most = max(1, min(grid.num_m, together))
    return min(range(1, most + 1), key=lambda g: (g * block[0] + cdiv(together, g) * block[1], g))


class Step(NamedTuple):
    """A K step of a tile, in cycles of a compute unit.

    ``peak``: its multiplications at the data sheet's rate. The other fields are its bounds: see the module.
    """

    peak: float
    loop: float
    under_way: float
    l2: float
    beyond: float

    @property
    def cycles(self) -> float:
        """The longest bound, and the cost in clock of reads beyond L2."""
        return max(self.loop, self.under_way, self.l2, self.beyond) + DRAWN * self.beyond

    @property
    def share(self) -> float:
        """The share of the peak."""
        return self.peak / self.cycles


def step(
    problem: Problem, device: DeviceProperties, schedule: Schedule, block: tuple[int, int, int], efficiency: float
) -> Step:
    """A K step of a tile of ``block``, while all workers of ``schedule`` are in their K loops."""
    rate = device.peak(problem.kind, 1) / device.clock
    peak = 2 * math.prod(block) / rate
    line = block[2] * ITEMSIZE[problem.dtype]
    read = (block[0] + block[1]) * line
    workers = min(schedule.workers, max(1, schedule.grid.tiles))
    together = cdiv(workers, device.xcds)
    rows, columns = _distinct(schedule, workers, together, device.xcds)
    shared = (rows * block[0] + columns * block[1]) * line
    kept = min(1.0, device.l2 / (shared * DRIFT))  # each worker reads the rest by itself
    beyond = kept * shared + (1 - kept) * together * read
    cycle = device.cache_bandwidth / device.xcds / device.clock
    return Step(
        peak, peak / efficiency, read * ROUND_TRIP / UNDER_WAY,
        together * read / (device.l2_bandwidth / device.clock), beyond / cycle,
    )  # fmt: skip


def _distinct(schedule: Schedule, workers: int, together: int, dies: int) -> tuple[float, float]:
    """The numbers of distinct rows and columns of tiles that the workers of one die have at the same time.

    With a queue for each die, its workers take a stripe's tiles in order. With one queue a die's workers have a random
    choice of all current tiles, because they take tiles as they become free.
    """
    grid = schedule.grid
    num_m, num_n, stripes = max(1, grid.num_m), max(1, grid.num_n), schedule.queues >= dies
    count = together if stripes else workers
    if stripes and schedule.split == "columns":
        num_n = cdiv(num_n, schedule.queues)
    elif stripes and schedule.split == "rows":
        num_m = cdiv(num_m, schedule.queues)
    columns = min(num_n, cdiv(count, min(schedule.raster.group, num_m)))
    rows = min(num_m, cdiv(count, columns))
    return (rows, columns) if stripes else (_met(rows, together), _met(columns, together))


def _met(places: int, draws: int) -> float:
    """The expected number of distinct ``places`` in ``draws`` random draws."""
    return places * (1.0 - (1.0 - 1.0 / places) ** draws)


def clock(device: DeviceProperties, kind: str, share: float) -> float:
    """The clock in Hz, if the matrix units are busy for a ``share`` of the time."""
    full = dict(device.sustained).get(kind, device.clock)
    return device.clock - (device.clock - full) * min(1.0, share)


def seconds(
    problem: Problem, device: DeviceProperties, schedule: Schedule, block: tuple[int, int, int], efficiency: float
) -> float:
    """The predicted time of a launch. ``efficiency``: the main loop's share of the peak, with its data in time."""
    grid, workers = schedule.grid, schedule.workers
    one = step(problem, device, schedule, block, efficiency)
    hertz = clock(device, problem.kind, one.share)
    item = (grid.k_steps * one.cycles + 2 * ROUND_TRIP) / hertz
    tile_bytes = block[0] * block[1] * ITEMSIZE[problem.out_dtype]
    store = tile_bytes / (STORING * device.bandwidth)  # for one tile; a wave stores its tiles together
    partials = 0.0
    if schedule.kind == "stream_k" and schedule.remainder:
        partials = 2 * 4 * schedule.slots * block[0] * block[1] / device.bandwidth  # written and read
        waves = grid.tiles / workers
        busy = waves * (STREAM_K_LOSS * item + workers * store) + 4 * ROUND_TRIP / hertz
    else:
        waves = cdiv(grid.tiles, workers)
        busy = waves * item + grid.tiles * store
    memory = problem.bytes / device.bandwidth + partials
    return LAUNCH_SECONDS + max(busy, memory) + NOT_HIDDEN * min(busy, memory)


def candidates(
    problem: Problem, device: DeviceProperties, workers: int, rows: Sequence[Row], kinds: tuple[Kind, ...],
    forced: Forced = FREE, variant: str = "persistent",
) -> Iterator[Candidate]:  # fmt: skip
    """All candidates of a kernel with the tiles ``rows`` that match the caller's choices.

    A dynamic schedule has one queue, or one for each die. In the second case a die's workers take their own stripe, and
    steal from other stripes when it is empty.
    """
    for row in rows:
        block = (row.block_m, row.block_n, row.block_k)
        grid = Grid.of(problem.m, problem.n, problem.k, *block, batch=problem.batch)
        raster = raster_of(problem, grid, block, group_of(block, grid, workers, device.xcds), forced.order)
        for kind in kinds:
            for count in _queue_counts(grid, device, forced) if kind == "dynamic" else (1,):
                schedule = Schedule(
                    kind, grid, raster, workers, count, _split(grid, raster, count), forced.shares or 0,
                    first_batch_of(problem),
                )  # fmt: skip
                cost = seconds(problem, device, schedule, block, row.efficiency)
                yield Candidate(variant, block, schedule, cost, row.warps, row.stages)


def _queue_counts(grid: Grid, device: DeviceProperties, forced: Forced) -> tuple[int, ...]:
    """The numbers of queues to consider. With fewer tiles than dies some dies would have no stripe."""
    if forced.queues:
        return (forced.queues,)
    if forced.order is not None or device.xcds == 1 or max(grid.num_m, grid.num_n) < device.xcds:
        return (1,)
    return (1, device.xcds)


def _split(grid: Grid, raster: Raster, queues: int) -> Split:
    """The split among several queues. It is rows if nothing arrives and there are fewer columns than queues."""
    if queues == 1:
        return "items"
    split = split_of(raster)
    return "rows" if split == "columns" and raster.order == "grouped" and grid.num_n < queues <= grid.num_m else split
