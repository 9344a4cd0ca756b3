"""The cost model of the Hopper kernel: what a launch takes, and the constants of it, by device.

::

    a K step:  its multiplications, and its bytes' way from L2
    an item:   its K steps and its epilogue
    a launch:  items in waves, stream_k's last wave in shares; and memory

Two things that run side by side take ``(x**p + y**p) ** (1 / p)``: about the longer one, if one is much longer.

`FITTED` has the constants. ``benchmarks/run.py gemm sweep`` measures every candidate of drawn problems, and
``benchmarks/run.py gemm fit`` fits the constants to that record and prints them as they stand here.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.core.integers import cdiv
from tilestream.core.schedule import Kind, Schedule
from tilestream.plan.problem import ITEMSIZE, Problem

#: Bytes of a line of L2, and of a row of a stage; bytes that L2 and memory move at least.
LINE, SECTOR = 128, 32


@dataclass(frozen=True, eq=False)  # told apart by identity: caches have them in their keys
class Costs:
    """Constants of the model. What matters is the order that they put candidates in: single ones measure nothing."""

    #: cooperative, triple, ping_pong, single, paired: by variant, the tensor cores' rate beside the nominal one. A
    #: single consumer's short steps are charged to ``feed``. That of three consumers is by 3072 x 3072 x 3072 on an
    #: H200, that of pairs by 2048 x 13312 x 15872 (benchmarks/results/h100/gemm_pitch.json).
    cooperative: float = 0.9341
    triple: float = 0.83
    ping_pong: float = 0.9609
    single: float = 0.9776
    paired: float = 0.60
    #: The rate of ping-pong where a worker has one item: its other consumer has nothing to multiply meanwhile.
    alone: float = 0.8189
    #: The share of a tile's time that ping-pong takes for it where epilogues are longer than K steps: half, were the
    #: consumers never in each other's way.
    in_turns: float = 0.6293
    #: lines, shallow_loss: the loss for each line of K that a ring holds less than so many: its copies run less ahead.
    lines: int = 4
    shallow_loss: float = 0.0409
    #: Cycles that the tensor cores wait for shared memory in an instruction of 64 rows and no columns. Each column adds
    #: its bytes at 4 a cycle; with fewer than 64 columns this is the bound.
    rows_cycles: float = 13.81
    #: The same where the instruction before was another part of the same tile: its rows at 128 bytes a cycle.
    further_cycles: float = 16.75
    #: rs_tail_loss, parts_loss: the loss of a tile with a narrow part, whose x is read into registers, and of any other
    #: tile in several parts, whose rows are read for each: power, which bounds big shapes.
    rs_tail_loss: float = 1.097
    parts_loss: float = 1.021
    #: feed, feed_of_one: bytes a second from L2 to all SMs, and to one, in rows that begin at lines.
    feed: float = 11.53e12
    #: The share of ``feed`` where groups divide K, whose copies are clipped at a group's end: it puts the tiles of
    #: gradients of weights in the measured order (benchmarks/results/h100/gemm_grouped_search.json).
    feed_along_k: float = 0.75
    feed_of_one: float = 171.7e9
    #: crossed, fifth: what a row of 128 bytes costs more, beside one that begins at a line of L2: where it lies in two,
    #: and where it lies in five sectors.
    crossed: float = 0.5178
    fifth: float = 1.612
    #: Bytes a second to and from memory, of partial results and by one SM.
    partials: float = 59.18e9
    #: Seconds that an epilogue takes longer for each register of a thread where TMA does not store: by consecutive
    #: elements (see `by_lines`), and as registers hold them. ``_swap_ab``: the accumulator's columns are output rows.
    lined: float = 13.8e-9
    lined_swap_ab: float = 11.26e-9
    direct: float = 110.2e-9
    direct_swap_ab: float = 59.65e-9
    #: scaled, scaled_column: seconds that an epilogue takes longer for each register of a thread, and for each column,
    #: where it has vectors of scales: products of two scales, and the vectors' addresses, which every strip finds anew.
    scaled: float = 0.34e-9
    scaled_column: float = 3.743e-9
    #: step, epilogue, register, fix, launch: seconds of a K step beside its work; of an epilogue, and more for each
    #: register of a thread; of reducing a tile's partial results; of a launch.
    step: float = 12.09e-9
    epilogue: float = 11e-9
    register: float = 11.29e-9
    fix: float = 3.717e-6
    launch: float = 5.35e-6
    #: drifted, scattered: what the way from L2 to the SMs costs in several waves, where copies for the next item run
    #: under this one's end; and where one queue hands out the tiles, so that neighbours share little of what they read.
    drifted: float = 0.7986
    scattered: float = 1.036
    #: Seconds that a queue costs an item, beside a static grid of several waves: none that could be measured, down to
    #: items of 8 K steps (benchmarks/results/h100/neighbours_idle.json: 0.999 to 1.006 of static's throughput).
    ticket: float = 0.0
    #: Seconds that a launch takes longer where workers have several items, beside these: a worker waits for its first
    #: ticket before it loads, and looks for others' items after its last.
    several: float = 0.0
    #: step_overlap, overlap: the p of two things side by side, in a step, and in a launch: the higher, the better the
    #: shorter one is hidden.
    step_overlap: float = 5.433
    overlap: float = 3.102
    #: Bytes of an operand that L2 keeps beside the other's.
    l2_bytes: float = 28e6
    #: The loss of an output that is written across, or of a tile of B's rows.
    swapped_loss: float = 0.9994
    #: Slowdown of ping-pong without fast accumulation: while one consumer promotes its products, the other cannot
    #: multiply.
    promoted_loss: float = 1.7
    #: Share of the nominal bandwidth that memory gives.
    memory: float = 0.92
    #: Bytes that each row of a tile of the output counts for more where rows do not begin at lines of L2: the lines at
    #: its ends are written in two parts, by two tiles.
    ends: float = 54.52
    #: copy, copied: seconds of the launch that realigns operands, and the share of the nominal bandwidth that it has.
    copy: float = 2.7e-6
    copied: float = 0.7366


#: By a part of the device's name; a device without constants of its own has the first ones. The H100's are of
#: 2026-11-24: candidates of 92 problems, the drawn ones of seed 1 and a part of seed 2, and 12 large ones. The H200's
#: are of 2026-11-30: 54 problems, 28 of seed 1 of the sweeps and 26 of seed 3001, most of these with a short K. They
#: choose 0.988 of the best candidates' speed, where the H100's choose 0.986, and 0.973 without ``scaled_column``. Of
#: the boards of seeds 1 and 2, to which they were not fitted, they tell the times within 8.6 %, the H100's within 10 %.
FITTED = {
    "H100": Costs(),
    "H200": Costs(
        cooperative=0.9245, ping_pong=0.931, single=0.927, alone=1.091, in_turns=0.6022, shallow_loss=0.04643,
        rows_cycles=12.98, further_cycles=15.05, rs_tail_loss=1.117, parts_loss=0.9943, feed=13.29e12,
        feed_of_one=136.9e9, crossed=0.5131, fifth=1.272, partials=66.98e9, lined=16.57e-9, lined_swap_ab=9.753e-9,
        step=8.932e-9, epilogue=11.44e-9, register=11.6e-9, fix=6.323e-6, launch=5.684e-6, drifted=0.8775,
        scattered=1.03, several=0.946e-6, step_overlap=8.127, overlap=4.393, swapped_loss=0.9701, ends=19.74,
        copied=0.6988,
    ),
}  # fmt: skip


def costs_of(device: DeviceProperties) -> Costs:
    """The constants of a device."""
    return next((costs for name, costs in FITTED.items() if name in device.name), next(iter(FITTED.values())))


class Cut(NamedTuple):
    """What the model knows of a schedule; ``together``: workers take the tiles that a static grid gives them."""

    kind: Kind
    tiles: int
    num_m: int
    k_steps: int
    workers: int
    together: bool
    group: int
    shares: int = 0

    @classmethod
    def of(cls, schedule: Schedule) -> Cut:
        """A schedule's."""
        grid, together = schedule.grid, schedule.kind == "static" or schedule.split == "strides"
        return cls(
            schedule.kind, grid.tiles, grid.num_m, grid.k_steps, schedule.workers, together, schedule.raster.group,
            schedule.shares,
        )  # fmt: skip


class TileFacts(NamedTuple):
    """What the model knows of a tile.

    ``rows`` are those of a CTA; a worker has ``ctas`` CTAs. ``lines`` is K of a stage, and ``depth`` that of the ring,
    in lines of 128 bytes. ``parts`` are the widths that the columns are multiplied in, and ``rs_tail`` says whether the
    last has its x in registers.
    """

    variant: str
    rows: int
    columns: int
    lines: int
    depth: int
    registers: int
    parts: tuple[int, ...]
    rs_tail: bool
    ctas: int = 1


@functools.lru_cache(maxsize=1024)
def multiplying(tile: TileFacts, costs: Costs) -> tuple[float, float]:
    """Cycles of a K step's multiplications, had the tensor cores their nominal rate; and of a worker with one item."""
    # Cycles of one instruction: by columns, at 2 a cycle; or by the bytes that it reads from shared memory.
    cycles = 0.0
    for i, width in enumerate(tile.parts):
        last = i == len(tile.parts) - 1
        rows = 0.0 if tile.rs_tail and last else costs.further_cycles if i else costs.rows_cycles
        cycles += max(width / 2, width / 4 + rows)
    cycles *= tile.rows // 64 * tile.lines * LINE // 32  # instructions, of 32 bytes of K of every type
    if len(tile.parts) > 1:
        cycles *= costs.rs_tail_loss if tile.rs_tail else costs.parts_loss
    cycles *= 1 + costs.shallow_loss * max(0, costs.lines - tile.depth)
    rate: float = getattr(costs, tile.variant)
    return cycles / rate, cycles / (costs.alone if tile.variant == "ping_pong" else rate)


def row_cost(multiple: int, costs: Costs) -> float:
    """What the copy of a row of 128 bytes costs, beside one that begins at a line of L2.

    ``multiple``: bytes that the beginnings of rows are multiples of, a power of two from 16 to 128. So a row in
    ``LINE / multiple`` begins at a line, and all others lie in two; with 16, half of them lie in five sectors.
    """
    return 1 + costs.crossed * (1 - multiple / LINE) + (costs.fifth / 2 if multiple < SECTOR else 0.0)


def by_lines(tile: TileFacts, splits: bool) -> bool:
    """Whether an output that TMA does not store is stored by lines, where no epilogue takes the registers for it.

    ``splits``: whether a schedule splits tiles along K.
    """
    rows = 128 * tile.registers // sum(tile.parts)  # of a math loop
    return len(tile.parts) < 3 and tile.variant != "triple" and not (rows > 64 and splits)


def beside(one: float, other: float, overlap: float) -> float:
    """Seconds of two things side by side."""
    longer, shorter = (one, other) if one > other else (other, one)
    return longer * math.pow(1 + math.pow(shorter / longer, overlap), 1 / overlap)


class Model:
    """The model of a problem on a device.

    Parameters
    ----------
    problem, device, costs
        ``costs``: those of another fit; None: the device's.
    """

    def __init__(self, problem: Problem, device: DeviceProperties, costs: Costs | None = None) -> None:
        self.problem, self.costs = problem, costs or costs_of(device)
        self.cycles = device.peak("bfloat16", 1) / 4096  # a second
        self.row_costs = tuple(row_cost(multiple, self.costs) for multiple in problem.row_multiples)
        self.bandwidth = device.bandwidth * self.costs.memory
        self.bytes = problem.bytes
        self.feed = self.costs.feed * (self.costs.feed_along_k if problem.divides_k else 1.0)
        row = problem.out_columns * ITEMSIZE[problem.out_dtype]
        self.by_tma = row % 16 == 0
        # Scales of one element are a factor that is loaded once, but not by a kernel of groups, nor behind a gate.
        vectors = ("row",) if type(problem) is Problem and not problem.arriving else ("row", "tensor")
        self.scaled = problem.scales in vectors
        self.ends = self.costs.ends * problem.out_rows if row % LINE else 0.0

    @property
    def floor(self) -> float:
        """No launch takes less: memory moves each byte once."""
        return self.costs.launch + self.bytes / self.bandwidth

    def seconds(self, tile: TileFacts, swap_ab: bool, cut: Cut) -> float:
        """What a launch takes."""
        of_tile = TileModel(self, tile, swap_ab, cut.tiles, cut.num_m, cut.k_steps)
        return of_tile.seconds(cut.kind, cut.workers, cut.together, cut.group, cut.shares)


class TileModel:
    """The model of a problem in tiles of one kind: what is the same of all their schedules.

    Parameters
    ----------
    model, tile, swap_ab
        ``swap_ab``: whether the rows of ``tile`` are the output's columns.
    tiles, num_m, k_steps
        See `tilestream.core.grid.Grid`.
    """

    def __init__(self, model: Model, tile: TileFacts, swap_ab: bool, tiles: int, num_m: int, k_steps: int) -> None:
        costs = model.costs
        self.model, self.costs, self.tile, self.swap_ab = model, costs, tile, swap_ab
        self.tiles, self.num_m, self.k_steps = tiles, num_m, k_steps
        self.cycles, self.cycles_alone = multiplying(tile, costs)
        of_rows, of_columns = model.row_costs[::-1] if swap_ab else model.row_costs
        self.step_bytes = LINE * tile.lines * (tile.rows * of_rows + tile.columns * of_columns)
        self.ends = model.ends * cdiv(model.problem.n, tile.rows if swap_ab else tile.columns)
        whole = self._epilogue(splits=False)
        self.epilogues = whole, whole if model.by_tma else self._epilogue(splits=True)  # the second if tiles are split

    def step(self, kind: Kind, workers: int, together: bool) -> float:
        """Seconds of a K step: its multiplications beside its bytes' way from L2."""
        model, costs = self.model, self.costs
        alone = kind != "stream_k" and self.tiles <= workers
        readers = self.tile.ctas * (self.tiles if alone else workers)
        feed = self.step_bytes / min(model.feed / readers, costs.feed_of_one)
        if alone:
            return beside(self.cycles_alone / model.cycles, feed, costs.step_overlap) + costs.step
        feed *= costs.drifted if together else costs.scattered
        return beside(self.cycles / model.cycles, feed, costs.step_overlap) + costs.step

    def _epilogue(self, splits: bool) -> float:
        costs, registers = self.costs, self.tile.registers
        seconds = costs.epilogue + costs.register * registers
        if self.model.scaled:
            seconds += costs.scaled * registers + costs.scaled_column * self.tile.columns
        if self.model.by_tma:
            return seconds
        if by_lines(self.tile, splits):
            return seconds + (costs.lined_swap_ab if self.swap_ab else costs.lined) * registers
        return seconds + (costs.direct_swap_ab if self.swap_ab else costs.direct) * registers

    def seconds(self, kind: Kind, workers: int, together: bool, group: int, shares: int = 0) -> float:
        """What a launch takes: items in waves, beside memory. The schedule's fields are as in `Cut`."""
        model, costs, tile, tiles, k_steps = self.model, self.costs, self.tile, self.tiles, self.k_steps
        remainder, slots = tiles % workers if kind == "stream_k" else 0, 0
        step, epilogue = self.step(kind, workers, together), self.epilogues[remainder > 0]
        steps = k_steps * step
        item, tail = steps + epilogue + (costs.ticket if kind != "static" else 0.0), 0.0
        if tile.variant == "ping_pong":  # a tile's epilogue runs under the other's steps, as far as these reach
            item, tail = max(steps, costs.in_turns * item), epilogue
        if remainder:
            units = remainder * k_steps
            shares = min(shares or workers, units)
            slots = shares + remainder - 1
            share = units / shares * step * cdiv(shares, workers)
            share = max(share, self._unshared_bytes(group, remainder, shares) / model.bandwidth)
            # A share writes one partial, or two where it crosses from tile to tile; the last to come reads a tile's.
            partials = (2 if shares % remainder else 1) + max(shares / remainder, 1)
            fix = costs.fix + partials * 4 * tile.rows * tile.columns / costs.partials
            busy = (tiles - remainder) // workers * item + share + fix + epilogue
        else:
            busy = cdiv(tiles, workers) * item + tail
        if self.swap_ab:
            busy *= costs.swapped_loss
        if tile.variant == "ping_pong" and model.problem.promoted:
            busy *= costs.promoted_loss
        partials_bytes = 2 * 4 * slots * tile.rows * tile.columns  # written, and read again
        memory = (model.bytes + partials_bytes + self.ends) / model.bandwidth
        launch = costs.launch + (costs.several if kind == "stream_k" or tiles > workers else 0.0)
        return launch + beside(busy, memory, costs.overlap)

    def _unshared_bytes(self, group: int, remainder: int, shares: int) -> float:
        """Bytes that come from memory for stream-K's remainder, where its shares cross from tile to tile.

        They begin at all places of K then, so tiles that share an operand read it at different times: unless L2 keeps
        it, each of them reads its own.
        """
        if not shares % remainder:
            return 0.0
        problem, tile, most = self.model.problem, self.tile, self.costs.l2_bytes
        block_m, block_n = (tile.columns, tile.rows) if self.swap_ab else (tile.rows, tile.columns)
        group = min(group, self.num_m)
        line = problem.k * ITEMSIZE[problem.dtype]
        rows, columns = min(problem.m, group * block_m), cdiv(remainder, group) * block_n
        reread = (block_m if rows * line > most else 0) + (block_n if columns * line > most else 0)
        return float(remainder * reread * line)
