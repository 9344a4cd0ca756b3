"""Configurations of model 1 in arrival order, with raster and queues as a plan makes them.

They show liveness: in every order of chunks and expiries, each item is taken once, no worker waits while there is work,
and all workers end. Safety is the gate's, which every item passes as elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import get_args

from tilestream.core.chunks import Chunks
from tilestream.core.gate import arrival_order
from tilestream.plan.problem import Incoming, Problem, gate_of
from tilestream.plan.raster import first_batch_of, raster_of
from tilestream.schedule import Grid, Schedule
from tilestream_tools.verify.words import Drain
from tilestream_tools.verify.workers import Program, WorkersCase

#: Rows and columns of a tile.
BLOCK = (2, 2, 1)


def ordered(
    workers: int,
    num_m: int,
    num_n: int = 1,
    *,
    bounds: tuple[int, ...],
    pivot: int = 0,
    weight: bool = False,
    batch: int = 1,
    running: tuple[int, ...] = (),
    drain: Drain = "leave",
    program: Program | None = None,
    quarantined: bool = False,
) -> WorkersCase:
    """``num_m`` x ``num_n`` tiles, whose rows (``weight``: columns) arrive by ``bounds``, of all batches."""
    coming = Incoming(_chunks(bounds), pivot)
    m, n = (2 * num_m, bounds[-1]) if weight else (bounds[-1] // batch, 2 * num_n)
    problem = Problem(m, n, 1, batch, rows=None if weight else coming, columns=coming if weight else None)
    grid = Grid(batch, num_m, num_n)
    raster = raster_of(problem, grid, BLOCK, 1)
    schedule = Schedule("dynamic", grid, raster, workers, first_batch=first_batch_of(problem))
    gate = gate_of(problem, BLOCK[:2])
    assert gate is not None
    ends = arrival_order(schedule, gate)
    schedule = replace(schedule, split="chunks", queues=len(ends), ends=ends)
    return WorkersCase(schedule, gate, running, drain, program, quarantined)


def _chunks(bounds: tuple[int, ...]) -> Chunks:
    """As a caller gives them: those that are alike by their size, and then their raster may be arithmetic."""
    alike = Chunks.uniform(bounds[-1], max(1, bounds[1]))
    return alike if alike.bounds == bounds else Chunks(bounds)


#: Rows in chunks, under row tiles of 2: alike, straddling tiles, several to a tile, one without rows, one for all.
LAYOUTS: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((0, 2), (0, 1, 2)),
    2: ((0, 2, 4), (0, 3, 4), (0, 1, 3, 4), (0, 4)),
    3: ((0, 2, 4, 6), (0, 3, 5), (0, 1, 5, 6), (0, 2, 2, 6)),
    4: ((0, 4, 6, 8), (0, 3, 6, 8)),
}


def configurations(full: bool) -> Iterator[WorkersCase]:
    """1 to 3 workers (full: 4 too), 1 to 4 row tiles, every pivot, each way to drain; columns; batches; few running."""
    for w, num_m in product((1, 2, 3), (1, 2, 3)):
        if w == num_m == 3 and not full:
            continue
        few = w * num_m < 6
        for bounds in LAYOUTS[num_m] if few or full else LAYOUTS[num_m][1:2]:
            for pivot in range(len(bounds) - 1) if few else (len(bounds) - 2,):
                yield ordered(w, num_m, bounds=bounds, pivot=pivot)
                if few or (full and bounds == LAYOUTS[num_m][1]):
                    yield ordered(w, num_m, bounds=bounds, pivot=pivot, drain="reset")
    for pivot in range(3) if full else (1,):
        yield ordered(2, 3, 2, bounds=(0, 2, 4, 6), pivot=pivot)
        yield ordered(2, 2, 3, bounds=(0, 1, 4, 6), pivot=pivot, weight=True)
        yield ordered(2, 2, batch=2, bounds=(0, 3, 5, 8), pivot=pivot)
    for running in ((0,), (1,), (0, 2)):
        yield ordered(3, 3, bounds=(0, 3, 5), pivot=1, running=running)
        yield ordered(3, 3, bounds=(0, 3, 5), pivot=1, running=running, drain="poison")
    for w, drain in product((1, 2), get_args(Drain)[1:]):
        yield ordered(w, 2, bounds=(0, 2, 4), pivot=1, drain=drain, quarantined=True)
    if full:
        for bounds, pivot in product(LAYOUTS[4], range(3)):
            yield ordered(2, 4, bounds=bounds, pivot=pivot)
            yield ordered(2, 4, bounds=bounds, pivot=pivot, drain="reset")
        for pivot in range(2):
            yield ordered(4, 2, 2, bounds=(0, 2, 4), pivot=pivot)
