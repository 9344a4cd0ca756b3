"""The arguments of `tilestream.kernels.hopper.gemm.gemm` that a plan and a layout decide."""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.core.consumers import sharing
from tilestream.kernels.config import HopperConfig
from tilestream.kernels.hopper.gemm import gemm
from tilestream.launch.gemm_arguments import GemmArguments, Layout, LocalTiles
from tilestream.launch.hopper.maps import Map
from tilestream.plan.plan import Plan
from tilestream.plan.policy.hopper import MOST_PARTS, rs_tail, widest, widths
from tilestream.plan.problem import ITEMSIZE, Problem
from tilestream.plan.tma import major_of, store_major_of

_INT31 = 2**31
#: Bytes of the widest swizzle. A wider box lies in shared memory as blocks so wide, one behind the other.
_SWIZZLE = 128
#: A load warp and one consumer are two warp groups: with so many registers each at first, the consumer gets 216.
SINGLE_REGISTERS = 128
#: Elements of a strip that a consumer stores from registers at a time: in strips of twice as many Triton 3.6 spills 170
#: to 320 words of a full epilogue. And columns of it where an element's offset takes two registers (64 bits).
DIRECT, WIDE_STRIP = 2048, 16
#: Rows of an accumulator that four warps multiply at a time; its registers that leave room for a store by lines.
_LEAST_ROWS, _ROOMY = 64, 48
#: Whether launches may begin before the kernel ahead has ended. Not one that waits for chunks: its workers would hold
#: SMs while that kernel still needs them.
_CHAINED = True


class Operand(NamedTuple):
    """An operand ``[rows, K]``, before any swap of the two: strides in elements."""

    rows: int
    tile_rows: int
    batch: int
    row: int
    k: int
    dtype: str


class Arguments(GemmArguments):
    """See `GemmArguments`.

    Parameters
    ----------
    out_aligned
        Whether the output's address is a multiple of 16.
    local_rows
        How many rows of x lie in a tensor of their own: see `tilestream.kernels.hopper.load`. None: there is no such
        map.

    Attributes
    ----------
    x, local, y, out
        Maps, of y three, one for each part of a tile's columns: None where there are fewer, where no rows are local,
        and where TMA cannot address the output.
    rows, widths
        The accumulator's rows in a CTA, and the columns of each part.
    """

    kernel: Any = gemm
    matrices = ("x_map", "local_map", "y_map", "y_map_1", "y_map_2", "out_map")

    def __init__(
        self, plan: Plan, layout: Layout, out_aligned: bool = True, probe: bool = False, trace: bool = False,
        local_rows: int | None = None,
    ) -> None:  # fmt: skip
        problem, swap_ab = plan.problem, plan.swap_ab
        block_m, block_n, block_k = plan.block
        batches = problem.batch if problem.batch > 1 else 0
        (ab, am, ak), (bb, bk, bn), (ob, om, on) = layout.a, layout.b, layout.out
        a = Operand(problem.m, block_m, ab, am, ak, problem.dtypes[0])
        b = Operand(problem.n, block_n, bb, bn, bk, problem.dtypes[1])
        x, y = (b, a) if swap_ab else (a, b)
        self._batched = [int(bool(batches and one.batch)) for one in (x, y)]
        self._halves = 2 if plan.variant == "paired" else sharing(plan.variant)
        self.rows, self.widths = x.tile_rows // plan.ctas, widths(y.tile_rows, widest(problem))
        half = self.rows // self._halves
        self.x, self._x_major = operand_map(x, half, problem.k, block_k, batches)
        self.local = None if local_rows is None else Map((local_rows, problem.k), (problem.k, 1), self.x.box)
        parts = [part_map(y, width, problem.k, block_k, batches, plan.ctas) for width in self.widths]
        self.y = (*(part for part, _ in parts), *[None] * (MOST_PARTS - len(parts)))
        self._y_major = parts[0][1]
        # The load warp has no registers for it where there are shares, or y is read across, in three boxes a step.
        short = plan.schedule.slots or (len(parts) > 2 and not self._y_major)
        self._may_be_local = problem.rows is not None and not (swap_ab or batches or short) and self._x_major
        extents, strides = (x.rows, y.rows), (on, om) if swap_ab else (om, on)
        size = ITEMSIZE[problem.out_dtype]
        major = store_major_of(extents, strides, ob if batches else 0, size) if out_aligned else None
        roomy = has_room(layout, problem, self.widths, half, bool(plan.schedule.slots)) and plan.variant != "triple"
        self._store, self._flipped = store_of(major, strides, roomy)
        self.out = None
        if major is not None:
            self.out = matrix_map(extents, strides, (half, plan.strip), batches, ob, self._flipped)
        self._published = 1, 0
        if problem.publishes is not None:
            # Consumers that share a tile's rows count its columns, each of them.
            times = plan.schedule.grid.num_n * (self._halves if swap_ab else 1)
            self._published = problem.publishes.chunks.rows_per_chunk, times
        super().__init__(plan, layout, probe, trace)
        self.options = {"num_warps": plan.warps, "launch_pdl": self.config.CHAINED}
        if plan.variant == "single":
            self.options["maxnreg"] = SINGLE_REGISTERS

    def local_tiles(self, first: int, height: int, period: int) -> LocalTiles | None:
        """Local rows of A (`tilestream.arrival.device.LocalRows`), in tiles of x: see `fill`.

        None where they cannot be read in their own tensor: they are no whole tiles of x, or not x's, or not K-major, or
        the load warp has no registers for it.
        """
        numbers = first, height, period
        if not self._may_be_local or any(number % self.rows for number in numbers):
            return None
        return first // self.rows, height // self.rows, period // self.rows

    def _numbers(self) -> dict[str, Any]:
        (x, y), (per_chunk, times) = self._batched, self._published
        mine = {"x_batched": x, "y_batched": y, "out_per_chunk": per_chunk, "out_times": times}
        return super()._numbers() | mine

    def _config(self, **logs: bool) -> HopperConfig:
        plan, problem = self.plan, self.plan.problem
        wide = self._wide()
        strip = plan.strip
        # alpha multiplies what the scales have multiplied: with one of its own the product would be rounded otherwise.
        # Where rows arrive, the scale of one row may arrive with it: it is read behind the gate.
        loads_alpha = problem.scales == "tensor" and not self.layout.scaled and plan.gate is None
        if self.out is None:  # no C buffer, and registers are short
            strip = min(strip, DIRECT * self._halves // self.rows, WIDE_STRIP if wide else DIRECT)
        return HopperConfig.of(
            plan,
            self.layout,
            **logs,
            SCALES="none" if problem.scales == "none" or loads_alpha else "row",
            SCALED=self.layout.scaled or loads_alpha,
            LOADS_ALPHA=loads_alpha,
            BIAS="none" if self.layout.bias is None else "rows" if plan.swap_ab else "columns",
            WIDTHS=self.widths,
            STAGES=plan.stages,
            STRIP=strip,
            BUFFERS=plan.buffers,
            X_K_MAJOR=self._x_major,
            Y_K_MAJOR=self._y_major,
            BATCHED=problem.batch > 1,
            SWAP_AB=plan.swap_ab,
            CONSUMERS="cooperative" if plan.ctas > 1 else plan.variant,
            PROMOTED=problem.fp8 and not problem.fast_accum,
            RS_TAIL=rs_tail(self.widths, 8 * ITEMSIZE[problem.dtype]),
            LOAD_REGISTERS=plan.registers[0],
            MATH_REGISTERS=plan.registers[1],
            STORE=self._store,
            FLIPPED=self._flipped,
            OFFSETS_64BIT=wide,
            N_DIVISIBLE_BY_8=(problem.m if plan.swap_ab else problem.n) % 8 == 0,
            CHAINED=_CHAINED and plan.gate is None,
            PUBLISH="none" if problem.publishes is None else "columns" if plan.swap_ab else "rows",
            LOCAL_ROWS=self.local is not None,
            CTAS=plan.ctas,
        )

    def _wide(self) -> bool:
        """Whether an offset inside one batch of what is addressed without TMA leaves 31 bits."""
        problem = self.plan.problem
        return any(
            (problem.m - 1) * strides[1] + (problem.n - 1) * strides[2] >= _INT31
            for strides in (self.layout.out, self.layout.residual)
            if strides is not None
        )


def has_room(layout: Layout, problem: Problem, parts: tuple[int, ...], rows: int, splits: bool) -> bool:
    """Whether an accumulator leaves registers for a store by lines.

    Beside an epilogue and a large accumulator Triton 3.6 and 3.9 spill up to 144 bytes; beside one in three parts of
    columns Triton 3.9 spills 76; beside what reduces the parts of 128 rows along K Triton 3.7 spills 176.

    Parameters
    ----------
    parts, rows
        The columns of the parts that a tile is multiplied in, and the rows of a math loop.
    splits
        Whether tiles may be split along K.
    """
    vectors = layout.bias is not None or layout.residual is not None or problem.scales != "none"
    trivial = not (vectors or layout.scaled or layout.activation != "none")
    few = rows * sum(parts) // 128 <= _ROOMY
    return (few or (trivial and len(parts) < 3)) and not (rows > _LEAST_ROWS and splits)


def store_of(major: int | None, strides: tuple[int, int], roomy: bool) -> tuple[str, bool]:
    """`HopperConfig`'s ``STORE`` and ``FLIPPED``.

    Parameters
    ----------
    major
        See `tilestream.plan.tma.store_major_of`.
    strides
        The output's strides of the accumulator's rows and columns.
    roomy
        See `has_room`.
    """
    if major is not None:
        return "tma", major == 0
    return ("lines", strides[1] != 1) if 1 in strides and roomy else ("direct", False)


def operand_map(operand: Operand, box_rows: int, k: int, block_k: int, batches: int) -> tuple[Map, bool]:
    """The map of an operand, and whether it is K-major."""
    extents, strides, box = (operand.rows, k), (operand.row, operand.k), (box_rows, block_k)
    major = major_of(extents, strides, operand.batch if batches else 0, ITEMSIZE[operand.dtype])
    if major is None:
        raise ValueError(f"an operand of extents {extents} and strides {strides}: TMA cannot address it")
    return matrix_map(extents, strides, box, batches, operand.batch, major == 0), major == 1


def part_map(operand: Operand, width: int, k: int, block_k: int, batches: int, ctas: int) -> tuple[Map, bool]:
    """As `operand_map`, of ``width`` rows, of which each CTA of a pair loads a half.

    Side by side the halves must be in shared memory what a box of all rows would be. Across K such a box is blocks of
    rows, each with all K of a stage: it is halved between them. A single block is halved along K: half of its rows
    would have another swizzle. `tilestream.kernels.hopper.pair.find_half` sees by the box which it is.
    """
    made, k_major = operand_map(operand, width // ctas, k, block_k, batches)
    if ctas > 1 and not k_major and width * ITEMSIZE[operand.dtype] <= _SWIZZLE:
        made, _ = operand_map(operand, width, k, block_k // ctas, batches)
    return made, k_major


def matrix_map(
    extents: tuple[int, int], strides: tuple[int, int], box: tuple[int, int], batches: int, batch_stride: int,
    flipped: bool,
) -> Map:  # fmt: skip
    """Of a matrix in memory, or where it is ``flipped`` of its transpose, whose last stride is 1."""
    if flipped:
        extents, strides, box = extents[::-1], strides[::-1], box[::-1]
    strides = (strides[0], 1)
    if not batches:
        return Map(extents, strides, box)
    # One that all batches share is a batch of one, which the kernel stays at.
    return Map((batches if batch_stride else 1, *extents), (batch_stride, *strides), (1, *box))
