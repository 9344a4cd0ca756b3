"""The order in which a plan adds, as a value. With the operands and the epilogue it decides an output's bits.

Two plans with equal values give equal rows equal bits. Kernels were compared bit for bit on an H100
(``benchmarks/results/h100/invariance_alike.json``). There the tensor cores' sums of 16-bit and of 8-bit products are
independent of a tile's rows and columns, of the instruction's width, of which operand gives its rows, of whether that
operand comes from registers, and of a stage's depth.

For gfx942 and gfx950 the order was read from machine code (``benchmarks/results/amd/alike.json``). A kernel's tiles
with the same instruction add alike, but for zeros that fill the last K step. Other tiles are assumed to differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilestream.core.device import DeviceProperties
from tilestream.core.integers import cdiv, part_begin
from tilestream.core.schedule import Schedule
from tilestream.plan.attention_problem import AttentionProblem
from tilestream.plan.candidate import Candidate
from tilestream.plan.policy import cdna_tiles
from tilestream.plan.problem import ITEMSIZE, Problem

#: The architecture on which tiles were compared, and the `unit` that all of its tiles share.
COMPARED, MMA = "sm_90", "mma"
#: The least rows of a tile that multiplies 8-bit operands directly. With fewer the portable kernel converts them.
LEAST_ROWS = 64
#: The least rows of a tile for which Triton takes AMD's instructions of 32 x 32, with half the K of those of 16 x 16.
_LEAST_WIDE = 32


@dataclass(frozen=True)
class Additions:
    """The order in which a plan adds the products of an output: K upwards, in steps and parts.

    Attributes
    ----------
    unit
        The unit that adds the products of a step: `MMA`, or a kernel and its tile if tiles were not compared.
    promoted
        The extent of K after which a sum is added to a float32 sum and restarted; 0: never.
    cuts
        The places at which K is cut, for each kind of tile. The parts' sums are added in float32, in the order of K.
        ``((),)``: no tile is cut.
    padded
        K with the zeros that fill the last step, where these may take instructions of their own; 0: nothing is filled.
    """

    unit: str
    promoted: int = 0
    cuts: tuple[tuple[int, ...], ...] = ((),)
    padded: int = 0

    def __str__(self) -> str:
        promoted = f", into float32 every {self.promoted} of K" if self.promoted else ""
        shown = ["whole" if not cut else f"cut at {', '.join(map(str, cut))}" for cut in self.cuts[:3]]
        more = f" and {len(self.cuts) - 3} other ways" if len(self.cuts) > 3 else ""
        padded = f", zeros up to {self.padded}" if self.padded else ""
        return f"{self.unit}{promoted}, K {' or '.join(shown)}{more}{padded}"


@dataclass(frozen=True)
class KeyOrder:
    """The order in which a plan of attention takes the keys of a query.

    Attributes
    ----------
    unit
        The unit that adds products, see `Additions`.
    block
        The number of keys of a block. Blocks begin at the first key.
    downwards
        Whether the last block is first.
    shares
        The number of shares into which a tile's blocks are split.
    late
        The bounds of shares that are not equal, as `AttentionCandidate.late` has them.
    """

    unit: str
    block: int
    downwards: bool = False
    shares: int = 1
    late: tuple[int, ...] = ()

    def __str__(self) -> str:
        uneven = " uneven" if self.late else ""
        split = f", a tile's blocks in {self.shares}{uneven} shares" if self.shares > 1 else ""
        return f"{self.unit}, blocks of {self.block} keys, the {'last' if self.downwards else 'first'} first{split}"


# The order of a candidate ---------------------------------------------------------------------------------------------


def additions(problem: Problem, device: DeviceProperties, backend: str, found: Candidate) -> Additions:
    """The order in which a backend's candidate adds."""
    block_m, _, block_k = found.block
    cuts = cuts_of(found.schedule, block_k) if found.kind == "stream_k" else ((),)
    if backend == "cpu":
        return Additions(f"cpu {found.variant} {found.tile[0]}x{found.tile[1]}", cuts=cuts)
    as_such = ITEMSIZE[problem.dtype] == 2 or (problem.fp8 and (backend == "hopper" or block_m >= LEAST_ROWS))
    if device.arch == COMPARED and as_such:
        return Additions(MMA, min(128, block_k) if problem.promoted else 0, cuts)
    if device.arch == COMPARED and backend == "hopper":  # float32: TMA rounds it to tf32
        return Additions(f"{MMA} of tf32 by TMA", cuts=cuts)
    if unit := _read(problem, device.arch, backend, found):
        return Additions(unit, cuts=cuts, padded=cdiv(problem.k, block_k) * block_k if problem.k % block_k else 0)
    tile = f"{found.tile[0]}x{found.tile[1]}x{block_k}"
    return Additions(f"{backend} {found.variant} {tile}, {found.warps} warps, {found.stages} stages", cuts=cuts)


def _read(problem: Problem, arch: str, backend: str, found: Candidate) -> str:
    """The instruction whose order was read from machine code; empty if it was not.

    Both kernels count K upwards. An instruction's places along K differ between them, so their orders do, too. Products
    by group, tf32, and operands that are unaligned, converted, or of two dtypes were not read.
    """
    size, known = ITEMSIZE[problem.dtype], (*cdna_tiles.DTYPES.get(arch, ()), "float32")
    is_plain = type(problem) is Problem and problem.aligned and problem.kind != "tf32"
    is_read = is_plain and problem.dtypes in {(one, one) for one in known}
    if arch not in cdna_tiles.DTYPES or not is_read or (size == 1 and found.block[0] < _LEAST_WIDE):
        return ""
    m, n, k = cdna_tiles.instruction(arch, size) if size < 4 else (16, 16, 4)
    wide = backend == "portable" and min(found.block[:2]) >= _LEAST_WIDE
    return f"{backend} mfma 32x32x{k // 2}" if wide else f"{backend} mfma {m}x{n}x{k}"


def cuts_of(schedule: Schedule, block_k: int) -> tuple[tuple[int, ...], ...]:
    """The distinct ways in which a schedule cuts the K of a tile; uncut tiles come first."""
    found: dict[tuple[int, ...], None] = {(): None} if schedule.full_tiles or not schedule.remainder else {}
    steps = schedule.grid.k_steps
    for tile in range(schedule.remainder):
        begins = (part_begin(schedule.units, schedule.num_shares, share) for share in schedule.contributors(tile)[1:])
        found[tuple((unit - tile * steps) * block_k for unit in begins)] = None
    return tuple(found)


def key_order(device: DeviceProperties, backend: str, problem: AttentionProblem, found: Any) -> KeyOrder:
    """The order in which a backend's `AttentionCandidate` takes keys."""
    unit = backend
    if (backend, device.arch) != ("hopper", COMPARED):
        unit = f"{backend} {found.variant} {found.block[0]}x{found.block[1]}, {found.warps} warps"
    return KeyOrder(unit, found.block[1], found.downwards, found.shares, found.late)
