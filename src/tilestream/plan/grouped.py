"""The plan of a grouped matmul: candidates -> cost -> compare, for groups whose lengths the device alone knows.

What is compared is the cost where all groups are of one size. What is launched is a schedule of the most tiles that
there can be (`tilestream.core.groups`), of which the device takes as many as there are.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from tilestream.core.device import DeviceProperties, cpu_properties
from tilestream.core.grid import Grid
from tilestream.core.groups import Along, mean_row_tiles, most_row_tiles
from tilestream.core.integers import cdiv
from tilestream.core.order import Raster
from tilestream.core.schedule import Kind, Schedule
from tilestream.plan.api import check_forced, default_workers, device_properties, is_whole
from tilestream.plan.candidate import Asked, Candidate, Refusal
from tilestream.plan.explain import log
from tilestream.plan.limit import limit, workers_of
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.policy import cpu, portable
from tilestream.plan.problem import GroupedProblem, Scales, dtype_name, result_name
from tilestream.plan.raster import queues_of

#: Registers of a thread that the portable kernel's accumulator takes at most beside an epilogue that is more than a
#: store, and a group's rows: with 128 of them Triton 3.7 spills up to 140 bytes.
MOST_REGISTERS = 64
#: Schedules that a caller may ask for.
SCHEDULES = ("auto", "static", "dynamic")


def grouped_plan(
    m: int,
    n: int,
    k: int,
    groups: int,
    *,
    along: Along = "rows",
    dtype: object = "bfloat16",
    out_dtype: object | None = None,
    scales: Scales = "none",
    device: object = "cpu",
    workers: int | None = None,
    schedule: str = "auto",
    tile: tuple[int, int] | None = None,
    backend: str | None = None,
) -> Plan:
    """How `tilestream.grouped_mm` would run a product of ``groups`` groups, of contiguous operands.

    Parameters
    ----------
    m, n, k
        Extents. Along rows ``m`` are the rows of all groups together; along K ``k`` is that of all groups.
    groups
        How many there are, from 1 to 1024.
    along
        ``"rows"``: each group is a run of A's rows, multiplied with a B of its own. ``"k"``: each group is a run of K,
        and has an output of its own.
    dtype, out_dtype, scales, device, workers, tile, backend
        As for `tilestream.plan`. Operands lie as a layer's and its gradients' do: along rows A is ``[m, k]``
        contiguous and B the transpose of ``[groups, n, k]``; along K A is the transpose of ``[k, m]`` and B is
        ``[k, n]``.
    schedule
        ``"static"``, ``"dynamic"`` or ``"auto"``.

    Returns
    -------
    Plan
        Its ``explain()`` says what was chosen and why. Its ``run`` is refused: a plan has no offsets.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        As from `tilestream.plan`.

    Examples
    --------
    >>> grouped_plan(4096, 1024, 2048, 8, device="h100").schedule.grid.num_m <= 4096 // 64 + 8
    True
    """
    properties = device_properties(device)
    for name, extent in (("m", m), ("n", n), ("k", k), ("groups", groups)):
        if not is_whole(extent) or extent < 0:
            raise ValueError(f"{name}={extent!r}; it is a whole number, and not negative")
    kind = dtype_name(dtype)
    result = result_name(kind, None if out_dtype is None else dtype_name(out_dtype))
    aligned = k % 16 == 0 if along == "rows" else m % 16 == 0 and n % 16 == 0
    problem = GroupedProblem(
        m, n, k, 1, kind, result, aligned=properties.backend == "cpu" or aligned, scales=scales, groups=groups,
        along=along, plain=scales == "none",
    )  # fmt: skip
    asked = Asked(
        workers, schedule, tile, device=properties, default_workers=default_workers(properties), backend=backend,
        limit=limit(),
    )  # fmt: skip
    return plan_groups(problem, *check_forced(asked, device))


@functools.lru_cache(maxsize=1024)
def plan_groups(problem: GroupedProblem, *asked: Any, **more: Any) -> Plan:
    """As `tilestream.plan.planner.plan_problem`, of groups.

    Raises
    ------
    ValueError
        For a schedule that cuts tiles along K.
    """
    how = Asked(*asked, **more)
    check_schedule("grouped_plan", how.schedule)
    device = how.device or cpu_properties()
    count, _, refused = workers_of(device, how.workers, how.default_workers, how.limit, "")
    refused += (Refusal("stream_k", "which tiles are the last wave's is known on the device alone"),)
    if device.backend == "cpu":
        found, backend = [_in_a_loop(problem, device, count)], "cpu"
    else:
        found, backend = list(_portable(problem, device, count, how)), "portable"
    best = min(found, key=lambda one: one.predicted)
    why = f"least of {len(found)} candidates in the cost model, groups of one size"
    made = of_candidate(problem, device, backend, best, why, refused)
    log(made)
    return made


def check_schedule(op: str, schedule: str) -> None:
    """Raise for a schedule that there is not for groups."""
    if schedule == "stream_k":
        raise ValueError(
            f"{op}: schedule='stream_k'; which tiles would be cut along K is known on the device alone: it is one of "
            f"{', '.join(SCHEDULES)}"
        )
    if schedule not in SCHEDULES:
        raise ValueError(f"{op}: schedule={schedule!r}; it is one of {', '.join(SCHEDULES)}")


def _in_a_loop(problem: GroupedProblem, device: DeviceProperties, workers: int) -> Candidate:
    """The CPU's way: a matmul a group, one after the other, by all threads."""
    block = (max(problem.m, 1), max(problem.n, 1), cpu.BLOCK_K)
    seconds = cpu.inline_seconds(problem, device, workers) + (problem.groups - 1) * cpu.INLINE_SECONDS
    return Candidate("inline", block, Schedule("dynamic", Grid.of(problem.m, problem.n, problem.k, *block)), seconds)


def grids(problem: GroupedProblem, block: tuple[int, int, int]) -> tuple[Grid, Grid]:
    """The grid where all groups are of one size, and that of the most tiles that there can be."""
    num_n, groups = cdiv(problem.n, block[1]), problem.groups
    if problem.along == "k":
        whole = Grid.of(problem.m, problem.n, problem.k, *block, batch=groups)
        return replace(whole, k_steps=max(1, cdiv(cdiv(problem.k, groups), block[2]))), whole
    tiles = (count(problem.m, groups, block[0]) for count in (mean_row_tiles, most_row_tiles))
    mean, most = (Grid(1, count, num_n, max(1, cdiv(problem.k, block[2]))) for count in tiles)
    return mean, most


def schedules(
    problem: GroupedProblem, block: tuple[int, int, int], workers: int, schedule: str, group: int
) -> Iterator[tuple[Schedule, Schedule]]:
    """Each kind's schedule where all groups are of one size, and the one that is launched."""
    mean, most = grids(problem, block)
    kinds: tuple[Kind, ...] = ("dynamic",) if most.tiles > workers else ("static",)
    if schedule != "auto":
        kinds = ("static",) if schedule == "static" else ("dynamic",)
    raster = Raster("grouped", group=group)
    few = max(1, min(workers, most.tiles))
    for kind in kinds:
        count, split = queues_of(problem, kind, None, raster, few)
        yield Schedule(kind, mean, raster, few, count, split), Schedule(kind, most, raster, few, count, split)


def _portable(
    problem: GroupedProblem, device: DeviceProperties, workers: int, how: Asked
) -> Iterable[Candidate]:  # fmt: skip
    portable.refuse(problem, device)
    rows = portable.tiles(problem, device)
    if problem.along == "rows" and not problem.plain:
        roomy = tuple(row for row in rows if row.block_m * row.block_n <= MOST_REGISTERS * 32 * row.warps)
        rows = roomy or rows
    if how.tile is not None:
        have = ", ".join(f"{row.block_m}x{row.block_n}" for row in rows)
        rows = tuple(row for row in rows if (row.block_m, row.block_n) == tuple(how.tile))
        if not rows:
            raise ValueError(f"tile={how.tile}: the portable kernel has {have} for these operands")
    for row in rows:
        block = (row.block_m, row.block_n, row.block_k)
        for mean, launched in schedules(problem, block, workers, how.schedule, portable.GROUP):
            seconds = portable.seconds(problem, device, mean, row)
            yield Candidate("persistent", block, launched, seconds, row.warps, row.stages)
