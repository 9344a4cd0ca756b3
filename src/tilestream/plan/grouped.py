"""The plan of a grouped matmul: candidates -> cost -> compare, for groups whose lengths only the device knows.

The compared costs are those of likely lengths: see `tilestream.core.groups.mean_row_tiles`. The launched schedule has
the largest possible number of tiles, of which the device takes the actual ones.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, get_args

from tilestream.core.arguments import is_one_of, is_whole
from tilestream.core.device import DeviceProperties, cpu_properties
from tilestream.core.grid import Grid
from tilestream.core.groups import ALONGS, SPREAD, Along, mean_row_tiles, most_row_tiles
from tilestream.core.integers import cdiv
from tilestream.core.operands import ACTIVATIONS, HALVES, SCALE_BLOCK
from tilestream.core.order import Raster
from tilestream.core.schedule import Kind, Schedule, SourceSchedule
from tilestream.plan import invariance, tma
from tilestream.plan.additions import COMPARED, MMA, Additions, additions
from tilestream.plan.api import check_forced, default_workers, device_properties
from tilestream.plan.candidate import Asked, Candidate, Refusal
from tilestream.plan.explain import log
from tilestream.plan.limit import is_invariant, promising, workers_in, workers_of
from tilestream.plan.plan import Plan, of_candidate
from tilestream.plan.planner import fast_or_portable
from tilestream.plan.policy import cpu, hopper, portable
from tilestream.plan.policy.hopper_costs import Cut, Model
from tilestream.plan.problem import ITEMSIZE, GroupedProblem, GroupedScales, dtype_name, result_name
from tilestream.plan.raster import queues_of

#: The largest accumulator of the portable kernel, in registers of a thread, with groups of rows and an epilogue that is
#: more than a store. With 128 registers Triton 3.7 spills up to 140 bytes.
MOST_REGISTERS = 64
#: The most groups among which the Hopper kernel's load warp finds that of an item, and the table's shared memory.
HOPPER_GROUPS = 256
TABLE_BYTES = 2 * 4 * HOPPER_GROUPS
#: Rows by source: the most groups of a source, and registers of a thread of the load warp, which looks at the counts,
#: tickets and words of all of them at once, and of the math warps, with two math loops and with one. And the same of
#: few groups where nothing arrives. With 104 Triton 3.7 spills 76 bytes of 256 groups; with 56 it spills 88 of 32.
SOURCE_REGISTERS = {64: ((88, 208), (88, 168)), HOPPER_GROUPS: ((136, 184), (136, 120))}
_THERE_REGISTERS = ((72, 216), (72, 184))
#: Rows by source: the most registers of a thread for an accumulator, before a plain epilogue and before any other; and
#: those that an accumulator and a product that is added to it leave. Beyond Triton 3.7 spills 16 to 1328 bytes.
_MOST_BY_SOURCE, _BESIDE_PROMOTED = (128, 96), 56
#: The most registers of a thread for an accumulator and a product that is scaled before it is added.
MOST_SCALED_REGISTERS = 160
#: The most columns of a swapped accumulator with block scales. Each column has its own scale in every K step, and a
#: thread holds a quarter of these in registers.
MOST_SCALED_ROWS = 64
#: The scales and schedules that a caller may request.
SCALES: tuple[GroupedScales, ...] = get_args(GroupedScales)
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
    scales: GroupedScales = "none",
    activation: str | None = None,
    device: object = "cpu",
    workers: int | None = None,
    schedule: str = "auto",
    tile: tuple[int, int] | None = None,
    backend: str | None = None,
    sources: int | None = None,
    capacity: int | None = None,
    arrives: bool = False,
    invariant: bool | None = None,
) -> Plan:
    """The plan of `tilestream.grouped_mm` for ``groups`` groups and contiguous operands.

    Parameters
    ----------
    m, n, k
        Extents: ``m`` rows of A, ``n`` columns of B. With ``along="rows"`` ``m`` is the sum over all groups; with
        ``along="k"`` ``k`` is.
    groups
        The number of groups, from 1 to 1024.
    along
        ``"rows"``: each group is a run of A's rows and has its own B. ``"k"``: each group is a run of K and has its own
        output.
    scales
        See `tilestream.plan`; or ``"block"``, see `tilestream.grouped_mm`.
    activation
        See `tilestream.grouped_mm`.
    dtype, out_dtype, device, workers, tile, backend
        See `tilestream.plan`. Operands have the layout of a linear layer and its gradients: along rows A is a
        contiguous ``[m, k]`` and B the transpose of ``[groups, n, k]``; along K A is the transpose of ``[k, m]`` and B
        is ``[k, n]``.
    schedule
        ``"static"``, ``"dynamic"`` or ``"auto"``.
    sources, capacity
        For rows by source (``counts=`` or a `tilestream.SourceArrival`): the number of sources, and the rows of a
        source's place; None: ``m``. ``m`` is then the rows to expect of all sources. A call expects as many as a place
        has: what all sources bring if each divides its rows among as many ranks.
    arrives
        Whether rows by source arrive; else all are there.
    invariant
        See `tilestream.plan`. A row then has the bits of `tilestream.mm` with its group's matrix.

    Returns
    -------
    Plan
        Its ``explain()`` gives the choices and their reasons. Its ``run`` raises, because a plan has no offsets.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        See `tilestream.plan`.

    Examples
    --------
    >>> grouped_plan(4096, 1024, 2048, 8, device="h100").schedule.grid.num_m <= 4096 // 64 + 8
    True
    """
    properties = device_properties(device)
    for name, extent in (("m", m), ("n", n), ("k", k), ("groups", groups)):
        if not is_whole(extent) or extent < 0:
            raise ValueError(f"{name}={extent!r}; it must be a whole number, and not negative")
    activations = (None, *ACTIVATIONS[1:], *HALVES)
    for name, word, words in (("along", along, ALONGS), ("scales", scales, SCALES)):
        if not is_one_of(word, words):
            raise ValueError(f"{name}={word!r}; it must be one of {', '.join(words)}")
    if activation is not None and not is_one_of(activation, activations):
        raise ValueError(f"activation={activation!r}; it must be None or one of {', '.join(activations[1:])}")
    check_schedule("grouped_plan", schedule)
    if properties.backend == "cpu" and tile is not None:
        raise ValueError(f"tile={tile!r}; the CPU takes each group's product whole: leave tile= away")
    kind = dtype_name(dtype)
    result = result_name(kind, None if out_dtype is None else dtype_name(out_dtype))
    aligned = k % 16 == 0 if along == "rows" else m % 16 == 0 and n % 16 == 0
    places = _places(m, sources, capacity, arrives, along, schedule)
    problem = GroupedProblem(
        places.pop("rows", m), n, k, 1, kind, result, aligned=properties.backend == "cpu" or aligned,
        no_tma="" if properties.backend == "cpu" else _no_tma(m, n, k, along, kind),
        plain=scales in ("none", "block") and activation is None, scales=scales, groups=groups, along=along,
        two_halves=activation in HALVES, **places,
    )  # fmt: skip
    asked = Asked(
        workers, schedule, tile, device=properties, default_workers=default_workers(properties), backend=backend,
        limit=promising(invariant),
    )  # fmt: skip
    return plan_groups(problem, *check_forced(asked, device))


def _places(
    m: int, sources: int | None, capacity: int | None, arrives: bool, along: Along, schedule: str
) -> dict[str, Any]:  # fmt: skip
    """What a problem of rows by source has beside others; raise for what is none."""
    if not isinstance(arrives, bool):
        raise TypeError(f"arrives={arrives!r}; it must be True or False")
    if sources is None:
        if capacity is not None or arrives:
            raise ValueError(f"capacity={capacity!r}, arrives={arrives!r} without sources=; they are of rows by source")
        return {}
    capacity = m if capacity is None else capacity
    for name, extent in (("sources", sources), ("capacity", capacity)):
        if not is_whole(extent) or extent < 1:
            raise ValueError(f"{name}={extent!r}; it must be a whole number, at least 1")
    if along != "rows":
        raise ValueError(f"along={along!r} with sources={sources}; sources bring rows: along='rows'")
    if m > sources * capacity:
        raise ValueError(f"m={m} rows; {sources} sources have places of {capacity}: {sources * capacity} at most")
    check_source_schedule("grouped_plan", schedule)
    return {"rows": sources * capacity, "sources": sources, "likely": m, "arrives": arrives}


def check_source_schedule(op: str, schedule: str) -> None:
    """Raise `ValueError` for a schedule that rows by source do not support."""
    if schedule not in ("auto", "dynamic"):
        raise ValueError(
            f"{op}: schedule={schedule!r} with rows by source; no position is known before the counts are: it is "
            "'auto' or 'dynamic'"
        )


def _no_tma(m: int, n: int, k: int, along: Along, dtype: str) -> str:
    """What of contiguous operands TMA cannot address."""
    return tma.refuse_contiguous(m, n, k, "nt" if along == "rows" else "tn", (dtype, dtype))


def refuse_invariance(op: str, asked: int, why: str = "which rows by source do not keep yet") -> None:
    """Raise where the limit of a call promises invariance, which such a call does not keep: ``why``.

    Raises
    ------
    NotImplementedError
        If it does.
    """
    if is_invariant(asked):
        raise NotImplementedError(
            f"{op}: tilestream.invariant promises each row bits of its own, {why}; multiply group by group "
            "(tilestream.mm), or call outside of the promise"
        )


def keeping(
    problem: GroupedProblem, device: DeviceProperties, backend: str, found: list[Candidate], asked: int
) -> tuple[list[Candidate], tuple[Refusal, ...]]:
    """The candidates whose rows have the bits of `tilestream.mm`, group by group, and the refusal of the others.

    A tile is chosen by the groups' mean length. So a row's bits are independent of other groups only where all tiles
    that may be chosen add alike, which was compared on one architecture. On the CPU each group is a product of its own,
    whose plan keeps the promise.
    """
    if backend == "cpu":
        return found, ()
    if device.arch != COMPARED:
        refuse_invariance("grouped_plan", asked, f"and its tiles were not compared on {device.arch}")
    if problem.scales == "block":
        refuse_invariance("grouped_plan", asked, "and scales of blocks are applied by each tile in its own steps")
    if problem.promoted and problem.k * ITEMSIZE[problem.dtype] % 16:
        refuse_invariance("grouped_plan", asked, f"and tilestream.mm adds otherwise where K is {problem.k}")
    promised = Additions(MMA, 128 if problem.promoted else 0)
    orders = [additions(problem, device, backend, one) for one in found]
    way_out = "multiply group by group (tilestream.mm), or call outside of the promise"
    kept = invariance.keeping(found, orders, promised, way_out)
    return kept, invariance.refused(orders, promised)


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
    promises = is_invariant(how.limit)
    if promises and problem.sources:
        refuse_invariance("grouped_plan", how.limit)
    device = how.device or cpu_properties()
    count, _, refused = workers_of(device, how.workers, how.default_workers, how.limit, "")
    refused += (Refusal("stream_k", "which tiles are the last wave's is known on the device alone"),)
    if device.backend == "cpu":
        found, backend = [_in_a_loop(problem, device, count)], "cpu"
    else:
        not_hopper = _not_hopper(problem, device)
        backend, found, other = fast_or_portable(
            "hopper", how.backend, not_hopper,
            (lambda: hopper_candidates(problem, device, count, how), lambda: _portable(problem, device, count, how)),
            lambda: f"it has no tile of {how.tile} here", "leave backend=, tile= and schedule= away",
        )  # fmt: skip
        refused += (other,)
    if promises:
        found, excluded = keeping(problem, device, backend, list(found), how.limit)
        refused += excluded
    best = min(found, key=lambda one: one.predicted)
    if problem.sources:
        check_source_schedule("grouped_plan", how.schedule)
    lengths = "of equal lengths" if problem.divides_k else f"whose lengths differ by up to {SPREAD:.0%} from their mean"
    why = f"least of {len(found)} candidates in the cost model, groups {lengths}"
    made = of_candidate(problem, device, backend, best, why, refused)
    if promises:
        free = plan_groups(problem, *how._replace(limit=workers_in(how.limit)))
        made = replace(made, promise=invariance.cost(made.label, made.predicted, free.label, free.predicted))
    log(made)
    return made


def check_schedule(op: str, schedule: str) -> None:
    """Raise `ValueError` for a schedule that groups do not support."""
    if is_one_of(schedule, ("stream_k",)):
        raise ValueError(
            f"{op}: schedule='stream_k'; which tiles would be cut along K is known on the device alone: it is one of "
            f"{', '.join(SCHEDULES)}"
        )
    if not is_one_of(schedule, SCHEDULES):
        raise ValueError(f"{op}: schedule={schedule!r}; it must be one of {', '.join(SCHEDULES)}")


def _in_a_loop(problem: GroupedProblem, device: DeviceProperties, workers: int) -> Candidate:
    """The CPU's candidate: the groups' matmuls one after the other, each by all threads."""
    block = (max(problem.m, 1), max(problem.n, 1), cpu.BLOCK_K)
    seconds = cpu.inline_seconds(problem, device, workers) + (problem.groups - 1) * cpu.INLINE_SECONDS
    return Candidate("inline", block, Schedule("dynamic", Grid.of(problem.m, problem.n, problem.k, *block)), seconds)


def grids(problem: GroupedProblem, block: tuple[int, int, int]) -> tuple[Grid, Grid]:
    """The grid to expect, and the grid with the largest possible number of tiles."""
    num_n, groups = cdiv(problem.n, block[1]), problem.groups
    if problem.along == "k":
        whole = Grid.of(problem.m, problem.n, problem.k, *block, batch=groups)
        return replace(whole, k_steps=max(1, cdiv(cdiv(problem.k, groups), block[2]))), whole
    if problem.sources:
        runs, capacity = problem.sources * groups, problem.m // problem.sources
        few = mean_row_tiles(problem.likely, runs, block[0])
        many = problem.sources * most_row_tiles(capacity, groups, block[0])
    else:
        few, many = (count(problem.m, groups, block[0]) for count in (mean_row_tiles, most_row_tiles))
    mean, most = (Grid(1, count, num_n, max(1, cdiv(problem.k, block[2]))) for count in (few, many))
    return mean, most


def schedules_of(
    problem: GroupedProblem, block: tuple[int, int, int], workers: int, schedule: str, group: int
) -> tuple[Schedule, Schedule]:
    """The schedule to expect, which the model costs, and the schedule that is launched."""
    mean, most = grids(problem, block)
    kind: Kind = "static" if schedule == "static" or (schedule == "auto" and most.tiles <= workers) else "dynamic"
    raster, few = Raster("grouped", group=group), max(1, min(workers, most.tiles))
    if problem.sources:
        launched = SourceSchedule("dynamic", most, raster, few, sources=problem.sources, groups=problem.groups)
        return Schedule("dynamic", mean, raster, few), launched
    count, split = queues_of(problem, kind, None, raster, few)
    return Schedule(kind, mean, raster, few, count, split), Schedule(kind, most, raster, few, count, split)


def _portable(problem: GroupedProblem, device: DeviceProperties, workers: int, how: Asked) -> Iterable[Candidate]:
    portable.refuse(problem, device)
    rows = portable.tiles(problem, device)
    rows = tuple(row for row in rows if has_registers(problem, row)) or rows
    if how.tile is not None:
        have = ", ".join(f"{row.block_m}x{row.block_n}" for row in rows)
        rows = tuple(row for row in rows if (row.block_m, row.block_n) == tuple(how.tile))
        if not rows:
            raise ValueError(f"tile={how.tile}: the portable kernel has {have} for these operands")
    for row in rows:
        block = (row.block_m, row.block_n, row.block_k)
        mean, launched = schedules_of(problem, block, workers, how.schedule, portable.GROUP)
        seconds = portable.seconds(problem, device, mean, row)
        yield Candidate("persistent", block, launched, seconds, row.warps, row.stages)


def _not_hopper(problem: GroupedProblem, device: DeviceProperties) -> str:
    """Why the Hopper kernel does not support a problem; empty if it does."""
    if problem.arrives and not problem.sources:
        return "its load warp does not wait for the chunk of an item's group yet"
    if problem.groups > HOPPER_GROUPS:
        return f"it finds an item's group among {HOPPER_GROUPS} at most, and there are {problem.groups}"
    if problem.along == "k" and ITEMSIZE[problem.dtype] != 2:
        return f"tensor cores take {problem.dtype} along K only, and groups of K end where no copy along K can"
    if problem.scales == "block" and problem.two_halves and problem.out_columns % SCALE_BLOCK:
        return f"halves of {problem.out_columns} columns: the second one begins inside a block of {SCALE_BLOCK} scales"
    return hopper.refusal(problem, device)


def has_registers(problem: GroupedProblem, tile: portable.Tile) -> bool:
    """Whether a tile of the portable kernel fits the registers. Promoted products have two accumulators."""
    registers = tile.block_m * tile.block_n // (32 * tile.warps)
    if problem.sources and problem.dtype == "float32" and not problem.plain and registers >= MOST_REGISTERS:
        return False  # Triton 3.7 spills 40 bytes: a worker's place in the sources takes registers, too
    if problem.sources and problem.arrives and tile.buffers and registers > MOST_REGISTERS:
        return False  # the next stage is in registers, too: Triton 3.9 spills 3 or 4 of them (gfx942, 128x256)
    if problem.plain or problem.along == "k":
        return problem.scales != "block" or registers <= MOST_REGISTERS
    return (2 if problem.promoted else 1) * registers <= MOST_REGISTERS


def hopper_candidates(
    problem: GroupedProblem, device: DeviceProperties, workers: int, how: Asked
) -> Iterator[Candidate]:
    """All candidates of the Hopper kernel that match the caller's choices."""
    size, out_size = ITEMSIZE[problem.dtype], ITEMSIZE[problem.out_dtype]
    # With two halves the load warp lacks the registers for the copies of a stage of two lines.
    short = problem.promoted or problem.two_halves
    rows = [row._replace(lines=1) if short else row for row in hopper.TILES]
    held = ((row, row.stages(out_size, device.shared - TABLE_BYTES)) for row in rows)
    fits = [(row, stages, hopper.facts_of(problem, device, row)) for row, stages in held if stages >= 2]
    model = Model(problem, device)
    for (row, stages, facts), swap_ab in itertools.product(fits, (False, True)):
        tile = (row.columns, row.rows) if swap_ab else (row.rows, row.columns)
        if how.tile not in (None, tile) or (swap_ab and row.rows == row.columns):
            continue
        if not fits_parts(problem, row, swap_ab) or (problem.sources and not fits_sources(problem, row, swap_ab)):
            continue
        if not hopper.has_registers(problem, row, swap_ab, "dynamic"):
            continue
        if swap_ab and not problem.plain and row.variant == "cooperative" and row.columns == 16:
            continue  # Triton 3.7 spills three words of an epilogue that is more than a store
        if not problem.plain and (len(hopper.widths(row.columns)) > 2 or (swap_ab and row.registers >= 128)):
            continue  # Triton 3.9 spills 100 to 436 bytes
        block = (*tile, row.block_k(size))
        group = hopper.group_of(block, workers, False, swap_ab)
        mean, launched = schedules_of(problem, block, workers, how.schedule, group)
        parts = parts_of(problem, row.columns)
        strip = min(row.strip(out_size), parts[-1]) if problem.two_halves else row.strip(out_size)
        buffers = min(row.buffers(out_size), parts[0] // strip) if problem.two_halves else row.buffers(out_size)
        yield Candidate(
            row.variant, block, launched, model.seconds(facts, swap_ab, Cut.of(mean)), 4, stages, swap_ab=swap_ab,
            strip=strip, buffers=buffers, registers=registers_of(problem, row),
        )  # fmt: skip


def registers_of(problem: GroupedProblem, row: hopper.Tile) -> tuple[int, int]:
    """Registers of a thread of the load warp, and of the math warps."""
    if not problem.sources:
        return hopper.registers_of(problem, row)
    few, split = next((most, split) for most, split in SOURCE_REGISTERS.items() if problem.groups <= most)
    two, one = _THERE_REGISTERS if few < HOPPER_GROUPS and not problem.arrives else split
    return one if row.loops == 1 else two


def fits_sources(problem: GroupedProblem, row: hopper.Tile, swap_ab: bool) -> bool:
    """Whether a tile's math loops have registers beside a load warp that takes tiles of sources."""
    if row.registers > _MOST_BY_SOURCE[not problem.plain]:
        return False
    if not problem.plain and swap_ab and len(parts_of(problem, row.columns)) > 1:
        return False  # Triton 3.7 spills 16 bytes
    product = row.rows_per_loop * min(row.columns, hopper.widest(problem)) // 128
    return not problem.promoted or row.registers + product <= registers_of(problem, row)[1] - _BESIDE_PROMOTED


def parts_of(problem: GroupedProblem, columns: int) -> tuple[int, ...]:
    """The widths of the products of an accumulator's columns. With two halves, each half is one product."""
    return (columns // 2,) * 2 if problem.two_halves else hopper.widths(columns, hopper.widest(problem))


def fits_parts(problem: GroupedProblem, row: hopper.Tile, swap_ab: bool) -> bool:
    """Whether a tile's parts suit two halves or block scales, and fit the registers.

    Triton 3.7 spills if a math loop has 128 rows of both halves, or scales a product of 64 registers with an
    accumulator of 128.
    """
    is_power = row.columns & (row.columns - 1) == 0
    if problem.scales == "block" and row.registers + row.rows_per_loop > MOST_SCALED_REGISTERS:
        return False
    if problem.two_halves:  # the halves are B's columns, but a swapped accumulator's columns are A's rows
        return is_power and not swap_ab and row.columns >= 32 and row.rows_per_loop <= 64
    return problem.scales != "block" or (swap_ab and row.columns <= MOST_SCALED_ROWS) or (not swap_ab and is_power)
