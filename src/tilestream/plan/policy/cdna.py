"""The cost model of AMD's CDNA 3 and 4 (MI300X, MI325X, MI350X, MI355X), and the candidates it chooses between.

Pure arithmetic on published figures: there was no such GPU to fit to.

A K step of a tile takes, in cycles of a compute unit, the longest of

* its multiplications at the share of the peak that the kernel's main loop reaches (`tilestream isa` estimates it);
* its bytes at 44 KiB, the most in flight to a compute unit, for each round trip of about 1000 cycles
  (AMD, *gfx950-gluon-tutorials*, ``docs/tcp_bound_tile_model.md``: tiles below 256 x 128 are bound by it);
* its bytes from L2: 2 KiB a cycle for all workers of a die;
* what the die's workers read beyond L2: the rows and columns of tiles that they work at together, once each, at the
  die's share of the Infinity Cache. That is where raster and queues count: see `group_of`.

A launch takes as many waves of tiles as there are workers for, each with an epilogue in which all store at once. The
clock falls with the share of cycles that the matrix units work, down to what AMD publishes for full load.
`tests/plan/test_cdna_plan.py` holds all of it to published measurements, within 12 %.
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
#: Bytes that can be under way to a compute unit, and cycles that each takes to come.
UNDER_WAY, ROUND_TRIP = 44 << 10, 1000
#: What is read beyond L2 costs, by its time, where that is hidden: power, and so clock. AMD measured 1 to 2 % between
#: rasters of 39 and of 13 tiles a step (*gfx950-gluon-tutorials*, ``kernels/gemm/gfx942/README.md``, 3.2).
DRAWN = 0.1
#: K steps that the workers of a die drift apart: L2 keeps what they share for so long.
DRIFT = 4
#: Share of memory's bandwidth that a wave of epilogues reaches, all stores and nothing else.
STORING = 0.6
#: Compute units of a shader engine, where it is not known; of CDNA 3 and 4 it has 8 to 10.
_UNITS_OF_AN_ENGINE = 8
#: Seconds of a launch, until its first items are under way.
LAUNCH_SECONDS = 8e-6
#: By how much the loop is slower in the kernel that can also split a tile.
STREAM_K_LOSS = 1.06
#: Share of the smaller of work and memory traffic that does not overlap. Where memory binds, less work is preferred.
NOT_HIDDEN = 0.1


class Row(NamedTuple):
    """A tile that a kernel has, with K of a step; warps of a worker, stages of its ring.

    ``efficiency`` is the share of the matrix units' peak that its main loop reaches, by `tilestream isa`.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    efficiency: float


def knows(device: DeviceProperties) -> bool:
    """Whether the constants of this device are published."""
    return device.arch in ARCHS and device.clock > 0 and device.l2 > 0


def workers_beside_producers(arrives: bool, device: DeviceProperties, workers: int) -> int:
    """Workers that may wait for chunks, of ``workers``: one compute unit of each shader engine stays free.

    All of ``workers`` where nothing ``arrives``, and on other GPUs.

    What signals a chunk on an AMD GPU is a kernel: ROCclr writes a word in a stream's order by a kernel of one lane,
    and copies of 16 KiB and less by one too. Work groups are dealt out to the shader engines in turn, and one that is
    dealt to an engine without a place waits there, behind workers that wait for it (invariant 10).
    """
    if not device.arch.startswith("gfx") or not arrives:
        return workers
    free = device.shader_engines or cdiv(device.workers, _UNITS_OF_AN_ENGINE)
    return max(1, min(workers, device.workers - free))


def group_of(block: tuple[int, int, int], grid: Grid, workers: int, dies: int) -> int:
    """Row tiles of a raster's group, with which the workers of one die read the least together.

    ``p`` of them in groups of ``g`` row tiles read ``g`` rows of tiles and ``ceil(p / g)`` columns. For square tiles
    that is AMD's ``g + ceil(p / g)`` (*gfx950-gluon-tutorials*, v9: 4, 6 and 8 are the best of 32).
    """
    together = cdiv(workers, dies)
    most = max(1, min(grid.num_m, together))
    return min(range(1, most + 1), key=lambda g: (g * block[0] + cdiv(together, g) * block[1], g))


class Step(NamedTuple):
    """A K step of a tile, in cycles of a compute unit.

    ``peak``: its multiplications at the data sheet's rate. The others are its bounds: see the module.
    """

    peak: float
    loop: float
    under_way: float
    l2: float
    beyond: float

    @property
    def cycles(self) -> float:
        """The longest, and what the way from beyond L2 draws."""
        return max(self.loop, self.under_way, self.l2, self.beyond) + DRAWN * self.beyond

    @property
    def share(self) -> float:
        """Of the peak."""
        return self.peak / self.cycles


def step(
    problem: Problem, device: DeviceProperties, schedule: Schedule, block: tuple[int, int, int], efficiency: float
) -> Step:
    """A K step of a tile of ``block``, while all of ``schedule``'s workers are at one of theirs."""
    rate = device.peak(problem.kind, 1) / device.clock
    peak = 2 * math.prod(block) / rate
    line = block[2] * ITEMSIZE[problem.dtype]
    read = (block[0] + block[1]) * line
    workers = min(schedule.workers, max(1, schedule.grid.tiles))
    together = cdiv(workers, device.xcds)
    rows, columns = _distinct(schedule, workers, together, device.xcds)
    shared = (rows * block[0] + columns * block[1]) * line
    kept = min(1.0, device.l2 / (shared * DRIFT))  # of the rest, each worker reads its own
    beyond = kept * shared + (1 - kept) * together * read
    cycle = device.cache_bandwidth / device.xcds / device.clock
    return Step(
        peak, peak / efficiency, read * ROUND_TRIP / UNDER_WAY,
        together * read / (device.l2_bandwidth / device.clock), beyond / cycle,
    )  # fmt: skip


def _distinct(schedule: Schedule, workers: int, together: int, dies: int) -> tuple[float, float]:
    """Rows and columns of tiles that the workers of one die are at together.

    With a queue a die, its workers take a stripe's tiles in order. With one queue, program ids, dealt out to the dies
    in turn, take tiles in the order in which they come free: any of those that are under way.
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
    """How many of ``places`` are expected to be met in so many draws."""
    return places * (1.0 - (1.0 - 1.0 / places) ** draws)


def clock(device: DeviceProperties, kind: str, share: float) -> float:
    """Cycles a second that are left where the matrix units work for so much of the time."""
    full = dict(device.sustained).get(kind, device.clock)
    return device.clock - (device.clock - full) * min(1.0, share)


def seconds(
    problem: Problem, device: DeviceProperties, schedule: Schedule, block: tuple[int, int, int], efficiency: float
) -> float:
    """What a launch takes. ``efficiency``: share of the peak that the kernel's main loop reaches with data in time."""
    grid, workers = schedule.grid, schedule.workers
    one = step(problem, device, schedule, block, efficiency)
    hertz = clock(device, problem.kind, one.share)
    item = (grid.k_steps * one.cycles + 2 * ROUND_TRIP) / hertz
    tile_bytes = block[0] * block[1] * ITEMSIZE[problem.out_dtype]
    store = tile_bytes / (STORING * device.bandwidth)  # of one tile; a wave's go out together
    partials = 0.0
    if schedule.kind == "stream_k" and schedule.remainder:
        partials = 2 * 4 * schedule.slots * block[0] * block[1] / device.bandwidth  # written, and read again
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
    """Every way of a kernel that has the tiles ``rows``, within what the caller forces.

    With a queue, there is one, or one a die: then the workers of a die go through a stripe of their own, and steal from
    the others' once it is empty.
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
    """Numbers of queues that are considered. Of fewer tiles than dies, some would have no stripe."""
    if forced.queues:
        return (forced.queues,)
    if forced.order is not None or device.xcds == 1 or max(grid.num_m, grid.num_n) < device.xcds:
        return (1,)
    return (1, device.xcds)


def _split(grid: Grid, raster: Raster, queues: int) -> Split:
    """What several queues split: rows, too, where nothing arrives and there are fewer columns than queues."""
    if queues == 1:
        return "items"
    split = split_of(raster)
    return "rows" if split == "columns" and raster.order == "grouped" and grid.num_n < queues <= grid.num_m else split
