"""The policy of the Hopper kernel whose clusters share a tile's K: for fewer tiles than SMs, of a long K.

A candidate is a row of `TILES`, either way round, in as many parts of K as a cluster has CTAs, one or two of them on an
SM at once. It costs what `tilestream.plan.policy.hopper_costs` says of K steps, and what the CTAs send each other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.core.exchange import ALIGNMENT, CLUSTERS
from tilestream.core.grid import Grid
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind, Schedule
from tilestream.plan.candidate import CLUSTER, FREE, Candidate, Deferred, Forced
from tilestream.plan.policy.hopper import LEAST_STEPS, REGISTERS, SINGLE_REGISTERS, Tile, refusal
from tilestream.plan.policy.hopper_costs import Model, TileFacts, TileModel, beside
from tilestream.plan.policy.one_tile import CLUSTERED
from tilestream.plan.problem import ITEMSIZE, Problem
from tilestream.plan.raster import raster_of

#: Tiles of the accumulator. Their columns are a power of two, so that strips of them are alike in all CTAs.
TILES = (
    Tile("single", 64, 32, 2),
    Tile("single", 64, 64, 2),
    Tile("single", 64, 128, 2),
    Tile("cooperative", 128, 64, 2),
    Tile("cooperative", 128, 128),
)
#: The least columns that a CTA finishes, and the most of a strip that goes through a C buffer at a time.
_LEAST_COLUMNS, _STRIP, _STRIP_BYTES = 16, 64, 8192
#: Bytes of an SM's shared memory that each CTA on it takes beside its own.
_RESERVED = 1024


def room(rows: int, columns: int) -> int:
    """Bytes of shared memory for the exchange of a tile's sums, with those before the first aligned address."""
    return 4 * rows * columns + ALIGNMENT


def why_not(problem: Problem, device: DeviceProperties, workers: int, kinds: tuple[Kind, ...], forced: Forced) -> str:
    """Why clusters do not do a problem, within what the caller forces; empty if they do."""
    if why := refusal(problem, device):
        return why
    if type(problem) is not Problem or problem.arriving or problem.publishes is not None:
        return "clusters wait for no chunks, publish none, and have no groups"
    if problem.promoted:
        return "clusters add up fp8 with fast accumulation alone"
    if workers < device.workers:
        return f"the CTAs of a cluster begin together, on SMs that lie together: {workers} workers may have too few"
    if "stream_k" not in kinds:
        return f"clusters split K, which schedule={' or '.join(kinds)} does not"
    if forced.stages is not None or forced.registers is not None or forced.queues is not None:
        return "clusters have no queues, and the stages and registers that their tiles leave"
    return ""


class Way(NamedTuple):
    """A tile for a dtype of operands and of outputs, with parts of its K: fields of its candidates.

    ``on_an_sm``: CTAs that an SM has at once.
    """

    tile: Tile
    parts: int
    on_an_sm: int
    facts: TileFacts
    fields: dict[str, object]


@functools.lru_cache(maxsize=64)
def ways(dtype: str, out_dtype: str, shared: int) -> tuple[Way, ...]:
    """What there is shared memory for."""
    found = []
    for tile, parts, on_an_sm in itertools.product(TILES, CLUSTERS, (1, 2)):
        size, out_size, columns = ITEMSIZE[dtype], ITEMSIZE[out_dtype], tile.columns // parts
        if columns < _LEAST_COLUMNS or on_an_sm * tile.loops > 2:  # 128 registers for each of 256 threads, twice
            continue
        strip = min(columns, _STRIP, _STRIP_BYTES // (tile.rows_per_loop * out_size))
        buffers = min(2, columns // strip)
        of_store = tile.loops * buffers * tile.rows_per_loop * strip * out_size
        has = (shared + _RESERVED) // on_an_sm - _RESERVED
        stages = tile.stages_in(has - of_store - room(tile.rows, tile.columns))
        if stages < 2:
            continue
        facts = TileFacts(
            tile.variant, tile.rows, tile.columns, tile.lines, tile.lines * stages, tile.registers, (tile.columns,),
            False,
        )  # fmt: skip
        fields: dict[str, object] = {
            "variant": CLUSTER, "block": (tile.rows, tile.columns, tile.block_k(size)), "warps": 4, "stages": stages,
            "buffers": buffers, "strip": strip,
            "registers": SINGLE_REGISTERS if tile.loops == 1 else REGISTERS[0],
        }  # fmt: skip
        found.append(Way(tile, parts, on_an_sm, facts, fields))
    return tuple(found)


def candidates(
    problem: Problem, device: DeviceProperties, workers: int, *, kinds: tuple[Kind, ...], forced: Forced = FREE
) -> Iterator[Candidate]:
    """Every way the model knows, within what the caller forces."""
    if forced.variant not in (None, CLUSTER) or why_not(problem, device, workers, kinds, forced):
        return
    model = Model(problem, device)
    for way, swap_ab in itertools.product(ways(problem.dtype, problem.out_dtype, device.shared), (False, True)):
        rows, columns, block_k = way.fields["block"]  # type: ignore[misc]
        block = (columns, rows, block_k) if swap_ab else (rows, columns, block_k)
        if forced.tile not in (None, block[:2]) or (swap_ab and rows == columns):
            continue
        num_m, num_n = cdiv(problem.m, block[0]), cdiv(problem.n, block[1])
        tiles, steps = problem.batch * num_m * num_n, cdiv(cdiv(problem.k, block_k), way.parts)
        ctas = tiles * way.parts
        at_once = way.on_an_sm * CLUSTERED.get(way.parts, 1.0) * device.workers
        if not at_once / 2 * (way.on_an_sm - 1) < ctas <= at_once or forced.shares not in (None, ctas):
            continue
        if steps < LEAST_STEPS or (way.parts - 1) * steps * block_k >= problem.k:
            continue
        seconds = _seconds(TileModel(model, way.facts, swap_ab, ctas, num_m, steps), way, device)
        fields = way.fields | {"block": block, "swap_ab": swap_ab}
        make = functools.partial(_schedule, problem, block, steps, way.parts, forced)
        yield Deferred(fields, "stream_k", seconds, tiles, ctas, "", make)


def _seconds(of_part: TileModel, way: Way, device: DeviceProperties) -> float:
    """What a launch takes whose parts, ``of_part``, are one wave: their K steps and what they send, beside memory."""
    model, costs, ctas = of_part.model, of_part.costs, of_part.tiles
    together = cdiv(ctas, device.workers)  # CTAs on an SM, which share its tensor cores and its way from L2
    feed = of_part.step_bytes / min(model.feed / ctas, costs.feed_of_one / together)
    step = beside(together * of_part.cycles_alone / model.cycles, feed, costs.step_overlap) + costs.step
    end = of_part.epilogues[0] / way.parts + costs.met + costs.sent * way.facts.registers
    memory = (model.bytes + of_part.ends) / model.bandwidth
    return costs.launch + beside(of_part.k_steps * step + together * end, memory, costs.overlap)


def _schedule(problem: Problem, block: tuple[int, int, int], steps: int, parts: int, forced: Forced) -> Schedule:
    """The schedule of clusters that share a tile each, in parts of ``steps``."""
    grid = Grid.of(problem.m, problem.n, problem.k, *block, batch=problem.batch)
    raster = raster_of(problem, grid, block, grid.num_m, forced.order)
    ctas = parts * grid.tiles
    return Schedule("stream_k", Grid(grid.batch, grid.num_m, grid.num_n, parts * steps), raster, ctas, shares=ctas)
