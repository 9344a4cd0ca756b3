"""The policy of the portable kernel whose programs have a tile, or a share of one: for products of microseconds.

::

    a program:  its K steps, one after the other, each as long as memory answers; its end; the sum of a cluster's parts
    an SM:      beginning programs, and issuing all of their copies, or multiplying; and their bytes' way from L2
    a launch:   the programs in waves, beside the SMs' work, beside memory; then the sums of parts in global memory

Three things that run side by side take ``(x**p + y**p + z**p) ** (1 / p)``. The constants are of an H200: 3,186 times
of 96 problems (drawn by seeds 4001 and 4002; of all alignments, of 16 bits and of 8, K from 16 to 15,440), fitted to
those near a problem's best (root mean square of the logarithm: 0.08), then moved until the choice, with the Hopper
kernel's by its own model, lost least: 0.982 of the best, the worst 0.83; of halves that were not fitted to, 0.97.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from typing import NamedTuple

from tilestream.core.device import DeviceProperties
from tilestream.core.exchange import CLUSTERS, room
from tilestream.core.grid import Grid
from tilestream.core.integers import cdiv
from tilestream.core.order import Raster
from tilestream.core.schedule import Kind, Schedule
from tilestream.plan.candidate import FREE, ONE_TILE, Candidate, Deferred, Forced
from tilestream.plan.policy.hopper_costs import LINE
from tilestream.plan.problem import ITEMSIZE, Problem

#: The kinds of its schedules: a tile a program, or a share.
KINDS: tuple[Kind, ...] = ("static", "stream_k")
#: The architecture on which the kernel has been measured: elsewhere it is no candidate.
ARCH = "sm_90"
#: The most programs for each SM, of a whole tile and of a share: as many as were measured.
MOST_PROGRAMS, MOST_SHARES = 16, 4
#: The most elements of an output: twice as many as of those that were measured. With programs of 128 x 128, and outputs
#: of up to 16 million elements, 31 products of the boards took 1.00 of their time before in the mean, 0.74 to 1.68.
MOST_ELEMENTS = 2**22
#: The most operations: with more the Hopper kernel was faster, always.
MOST_OPERATIONS = 8e9
#: The most that a thread holds: an address for each copy of the K steps that are ahead, and its accumulator. With 160
#: Triton 3.6 spills up to 232 bytes.
MOST_HELD = 144
#: Of tiles of 16 bits whose K is cut, or with more than a plain epilogue: what a thread of two warps holds at most; and
#: the elements of the accumulator that a thread of four warps has with copies of vectors alone, or before more than a
#: plain epilogue with whole ones alone, of tiles with at most so many rows. Else Triton 3.9 spills up to 824 bytes, 3.7
#: and 3.6 up to 144.
MOST_OF_TWO_WARPS, ROOMY, MOST_ROWS = 96, 64, 64
#: Stages of a shallow pipeline.
SHALLOW = 3
#: The most K steps of a program with a shallow pipeline whose copies are whole vectors, and the fewest with a deep one.
MOST_SHALLOW, LEAST_DEEP = 8, 4
#: The longest K for which a step is shorter than 64: of a longer one each step takes as long.
MOST_SHORT = 64
#: Parts of a tile's K that are tried.
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
#: The most blocks of a grid in its second and third dimension.
_MOST_OF_A_GRID = 65535
#: Bytes of shared memory that programs of an SM share, its warps, and the bytes of a copy at most.
_SHARED, _WARPS, _VECTOR = 227 * 1024, 64, 16


@dataclass(frozen=True)
class Costs:
    """Constants of the model: see the module for what adds them up, and for the measurements that they are fitted to.

    ``python benchmarks/run.py gemm fit RECORD...`` fits them to records of ``gemm sweep --small``.
    """

    #: Seconds of a launch; and of an SM to begin a program.
    launch: float = 4.287e-6
    begin: float = 0.3662e-6
    #: Seconds of an SM to issue a copy of a thread, and to store an element.
    copy: float = 60.33e-12
    write: float = 73.1e-12
    #: So many times as long an element takes that is stored by itself, as the output's rows do not begin at vectors.
    narrow: float = 4.0
    #: Seconds of all SMs for a byte from L2.
    feed: float = 48.74e-15
    #: What a part of a further line of L2 counts, beside one of the line that a row begins in: of copies, and of bytes.
    lines: float = 0.6536
    #: Seconds of a program in each K step: what is always there; how long memory takes to answer, of which each stage
    #: that is ahead has its share; and more for each copy of a thread.
    step: float = 24.97e-9
    latency: float = 0.4338e-6
    thread_copy: float = 9.542e-9
    #: Seconds of a program for each element that a thread stores.
    store: float = 4.751e-9
    #: Of a tile in parts that are added in global memory: seconds of the tile, and for each element that a thread
    #: reads; and for a byte of all partial results.
    fix: float = 1.877e-6
    part: float = 9.683e-9
    partials: float = 0.4085e-12
    #: Seconds of a cluster to begin together and to meet; and for each element that a thread gives to the others.
    meet: float = 0.9945e-6
    sent: float = 58.54e-9
    #: The p of the three things that run side by side: the higher, the better the shorter ones are hidden.
    overlap: float = 1.601
    #: Of a device's SMs the share that clusters of 4, and of 8 CTAs have at once: the SMs of a cluster lie together. Of
    #: an H200's 132 these are 124 and 112.
    clusters_of_4: float = 0.94
    clusters_of_8: float = 0.85
    #: Share of the nominal bandwidth that memory gives: the Hopper kernel's.
    memory: float = 0.92

    def clustered(self, parts: int) -> float:
        """The share of a device's SMs that programs have at once whose tiles are in so many parts."""
        return {4: self.clusters_of_4, 8: self.clusters_of_8}.get(parts, 1.0)


#: Those of all devices that have the kernel.
COSTS = Costs()

#: The fields of all candidates, as they are by default.
_ALIKE: dict[str, object] = {
    **{field.name: field.default for field in fields(Candidate) if field.default is not MISSING}, "variant": ONE_TILE,
}  # fmt: skip


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
        Tile(64, 64, 32),
        Tile(64, 128, 32, stages=2),
        Tile(64, 32, 128, stages=4),
        Tile(64, 128, 64, stages=4),
        Tile(128, 64, 64, stages=5),
        Tile(128, 128, 64, warps=8, stages=4),
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
        Tile(64, 128, 128, stages=5),
        Tile(128, 128, 128, warps=8, stages=4),
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
    if problem.operations > MOST_OPERATIONS:
        return f"it takes more than {MOST_OPERATIONS:.0e} operations"
    if problem.arriving or problem.publishes is not None:
        return "chunks are waited for, or signalled, by persistent workers"
    mixed = problem.b_dtype not in ("", problem.dtype)
    if ITEMSIZE[problem.dtype] not in TILES or problem.promoted or (problem.fp8 and problem.no_tma) or mixed:
        return "it multiplies 16 bits, and 8 bits of one dtype that TMA addresses and the tensor cores add up"
    return ""


def candidates(
    problem: Problem, device: DeviceProperties, workers: int, forced: Forced = FREE, kinds: tuple[Kind, ...] = KINDS
) -> Iterator[Candidate]:
    """All candidates that match the caller's choices. Fewer ``workers`` than the device has do a program each.

    Then no tile's parts are a cluster: the CTAs of one begin together, on SMs that lie together, and who limits workers
    may have left few SMs, anywhere. Nor where a device has fewer SMs than a cluster CTAs: they might not fit together.
    """
    if refusal(problem, device) or forced.order is not None or forced.stages is not None:
        return
    limited, rates = workers < device.workers, rates_of(problem, device, COSTS)
    least = problem.batch * problem.m * problem.n / (workers if limited else MOST_PROGRAMS * workers)
    for tile in TILES[ITEMSIZE[problem.dtype]]:
        if forced.tile not in (None, tile[:2]) or tile.block_m * tile.block_n < least:
            continue  # more programs than there may be
        if tile.stages > SHALLOW and problem.k <= (LEAST_DEEP - 1) * tile.block_k:
            continue
        if tile.block_k < MOST_SHORT < problem.k:
            continue
        way = Way(problem, device, tile, rates)
        whole_fits, part_fits = (way.has_registers(is_cut) for is_cut in (False, True))
        if not whole_fits or max(problem.batch, way.num_m) > _MOST_OF_A_GRID:
            continue
        for parts in PARTS:
            most = workers if limited else (MOST_PROGRAMS if parts == 1 else MOST_SHARES) * workers
            programs = parts * way.tiles
            if programs > most:
                break
            if parts in CLUSTERS and (limited or parts > workers):
                continue
            kind: Kind = "static" if parts == 1 else "stream_k"
            steps = cdiv(way.steps, parts)  # all shares alike: none has parts of two tiles
            if kind in kinds and way.is_apt(steps, parts) and (part_fits or parts == 1):
                make = functools.partial(way.schedule, kind, steps, parts)
                yield Deferred(way.alike, kind, way.seconds(steps, parts), way.tiles, programs, "", make)


class Rates(NamedTuple):
    """What bounds all tiles of a problem: ``peak``, operations a second of an SM; ``memory``, seconds of its bytes."""

    peak: float
    memory: float


def rates_of(problem: Problem, device: DeviceProperties, costs: Costs) -> Rates:
    """The bounds of a problem on a device."""
    return Rates(device.peak(problem.kind, 1), problem.bytes / (costs.memory * device.bandwidth))


class Way:
    """A tile for a problem: what does not depend on the number of parts.

    Parameters
    ----------
    problem, device, tile
    rates
        The problem's, where they are known.
    costs
        The model's constants: others than `COSTS` while they are fitted.

    Attributes
    ----------
    tiles, steps
        The number of tiles, and the K steps of each.
    copies, held
        A thread's copies from memory in a K step; and see `MOST_HELD`.
    alike
        The fields of all its candidates.
    """

    def __init__(
        self, problem: Problem, device: DeviceProperties, tile: Tile, rates: Rates | None = None, costs: Costs = COSTS
    ) -> None:
        self.problem, self.device, self.tile, self.costs = problem, device, tile, costs
        itemsize, threads = ITEMSIZE[problem.dtype], 32 * tile.warps
        self.num_m, self.num_n = cdiv(problem.m, tile.block_m), cdiv(problem.n, tile.block_n)
        self.tiles, self.steps = problem.batch * self.num_m * self.num_n, cdiv(problem.k, tile.block_k)
        self._vectors = (_VECTOR // itemsize,) * 2 if problem.aligned else problem.vectors
        self._threads, self._elements = threads, tile.block_m * tile.block_n
        self._bytes = (tile.block_m + tile.block_n) * itemsize  # of an element of K
        of_a = tile.block_m / self._vectors[0] * tile.block_k / threads
        of_b = tile.block_n / self._vectors[1] * tile.block_k / threads
        self.copies = of_a + of_b
        # A row of a K step that does not begin at a line of L2 has a part of one more.
        row = tile.block_k * itemsize
        more_a, more_b = (costs.lines * (LINE - at) / row for at in problem.row_multiples)
        self._of_lines = of_a * (1 + more_a) + of_b * (1 + more_b)
        self._fed = itemsize * (tile.block_m * (1 + more_a) + tile.block_n * (1 + more_b))
        self.held = self.copies * (tile.stages - 1) + self._elements / threads
        self.whole = min(self._vectors) * itemsize == _VECTOR
        # Seconds of a K step's multiplications at the nominal rate: of tiles of 64 rows they are about its copies'.
        rates = rates or rates_of(problem, device, costs)
        self._multiplying, self._memory = 2 * self._elements * tile.block_k / rates.peak, rates.memory
        self.alike = {**_ALIKE, "block": tile[:3], "warps": tile.warps, "stages": tile.stages}

    def has_registers(self, is_cut: bool) -> bool:
        """Whether nothing spills, with Triton 3.6, 3.7 and 3.9. ``is_cut``: whether a program has a part of K."""
        tile, is_plain = self.tile, self.problem.plain
        if self.held > MOST_HELD or ITEMSIZE[self.problem.dtype] == 1 or (is_plain and not is_cut):
            return self.held <= MOST_HELD
        if tile.warps != 4 or self._elements < ROOMY * self._threads:
            return tile.warps > 2 or self.held <= MOST_OF_TWO_WARPS
        return min(self._vectors) > 1 if is_plain else self.whole and tile.block_m <= MOST_ROWS

    def is_apt(self, steps: int, parts: int) -> bool:
        """Whether ``steps`` of a program are what its pipeline is for, and no part is past the end of K."""
        if (parts - 1) * steps * self.tile.block_k >= self.problem.k:
            return False
        if parts > 1 or self.tile.stages > SHALLOW:
            return steps >= LEAST_DEEP and (self.tile.stages > SHALLOW or steps <= MOST_SHALLOW or not self.whole)
        return steps <= MOST_SHALLOW or not self.whole

    def schedule(self, kind: Kind, steps: int, parts: int) -> Schedule:
        """The schedule of programs that have ``steps`` each."""
        grid = Grid(self.problem.batch, self.num_m, self.num_n, parts * steps)
        shares = 0 if parts == 1 else parts * self.tiles
        return Schedule(kind, grid, Raster("row_major"), parts * self.tiles, 1, "items", shares, 0)

    def seconds(self, steps: int, parts: int = 1) -> float:
        """The predicted time: see the module."""
        tile, problem, workers, costs = self.tile, self.problem, self.device.workers, self.costs
        programs, each = parts * self.tiles, self._elements / self._threads
        clusters = parts in CLUSTERS
        stored = 1 / parts if clusters else 1.0  # of a tile's elements by a program
        held = self._bytes * tile.block_k * tile.stages + (room(*tile[:2]) if clusters else 0)
        at_once = max(1, min(_SHARED // held, _WARPS // tile.warps)) * int(costs.clustered(parts) * workers)
        step = max(costs.step + costs.latency / (tile.stages - 1) + costs.thread_copy * self.copies, self._multiplying)
        met = costs.meet + costs.sent * each if clusters else 0.0
        waves = cdiv(programs, at_once) * (steps * step + costs.store * each * stored + met)
        issued = costs.copy * self._of_lines * self._threads * min(1.0, problem.k / tile.block_k)
        issued = steps * max(issued, self._multiplying)
        written = stored * self._elements * costs.write * (1.0 if problem.out_columns % 8 == 0 else costs.narrow)
        fed = costs.feed * self.tiles * self._fed * problem.k
        sms = cdiv(programs, workers) * (costs.begin + issued + written) + fed
        p = costs.overlap
        together: float = (waves**p + sms**p + self._memory**p) ** (1 / p)
        added = parts > 1 and not clusters
        sums = costs.fix + costs.part * parts * each + costs.partials * 4 * programs * self._elements if added else 0.0
        return costs.launch + together + sums
