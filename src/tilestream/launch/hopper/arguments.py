"""What `tilestream.kernels.hopper.gemm.gemm` is launched with: the part that a plan and a layout decide.

No torch here, as in `tilestream.launch.portable.arguments`, whose `Layout` it takes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.core.copy_items import NO_COPIES, CopyArguments
from tilestream.kernels.config import HopperConfig
from tilestream.launch.gate import NO_GATE, NO_PUBLISH, GateArguments, PublishArguments, chunk_numbers
from tilestream.launch.portable.arguments import (
    Layout,
    arrival_fields,
    block_fields,
    epilogue_fields,
    numbers_of,
    schedule_fields,
)
from tilestream.plan.plan import Plan
from tilestream.plan.policy.hopper import MOST_PARTS, rs_tail, widest, widths
from tilestream.plan.problem import ITEMSIZE
from tilestream.plan.tma import major_of, store_major_of

_INT31 = 2**31
#: A load warp and one consumer are two warp groups: with so many registers each at first, the consumer gets 216.
_SINGLE_REGISTERS = 128
#: Elements of a strip that a consumer stores from registers at a time: in strips of twice as many Triton 3.6 spills 170
#: to 320 words of a full epilogue. And columns of it where an element's offset takes two registers (64 bits).
_DIRECT, _WIDE_STRIP = 2048, 16
#: Whether launches may begin before the kernel ahead has ended. Not one that waits for chunks: its workers would hold
#: SMs while that kernel still needs them.
_CHAINED = True


class Map(NamedTuple):
    """What a tensor map is made of, but for the address.

    Attributes
    ----------
    shape, strides
        In elements, outermost first; the last stride is 1.
    box
        What one copy brings.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]


class Arguments:
    """The kernel's arguments for one plan and one layout, but for addresses and what changes from call to call.

    Parameters
    ----------
    out_aligned
        Whether the output's address is a multiple of 16.
    apart
        How many rows of x stand apart from the others: see `tilestream.kernels.hopper.load`. None: it has no such map.

    Attributes
    ----------
    x, apart, y, out
        Maps, of y three, one for each part of a tile's columns: None where there are fewer, where no rows stand apart,
        and where TMA cannot address the output.
    options
        How the kernel is compiled.
    """

    def __init__(
        self, plan: Plan, layout: Layout, out_aligned: bool = True, probe: bool = False, trace: bool = False,
        apart: int | None = None,
    ) -> None:  # fmt: skip
        self.plan, self.layout = plan, layout
        problem, swapped = plan.problem, plan.swap_ab
        block_m, block_n, block_k = plan.block
        batches = problem.batch if problem.batch > 1 else 0
        (ab, am, ak), (bb, bk, bn), (ob, om, on) = layout.a, layout.b, layout.out
        a, b = (problem.m, block_m, ab, am, ak, problem.dtypes[0]), (problem.n, block_n, bb, bn, bk, problem.dtypes[1])
        x, y = (b, a) if swapped else (a, b)
        self._halves = 2 if plan.variant == "cooperative" else 1
        self.rows, self.widths = x[1], widths(y[1], widest(problem))
        self.x, self._x_major = _operand(x, self.rows // self._halves, problem.k, block_k, batches)
        self._may_stand_apart = problem.rows is not None and not swapped and not batches and self._x_major
        self.apart = self.x._replace(shape=(apart, problem.k), strides=(problem.k, 1)) if apart is not None else None
        made = [_operand(y, width, problem.k, block_k, batches) for width in self.widths]
        self.y: tuple[Map | None, ...] = (*(one for one, _ in made), *[None] * (MOST_PARTS - len(made)))
        self._y_major = made[0][1]
        # The load warp has no registers for it where there are shares, or y is read across, in three boxes a step.
        if plan.schedule.slots or (len(made) > 2 and not self._y_major):
            self._may_stand_apart = False
        extents, strides = (x[0], y[0]), (on, om) if swapped else (om, on)
        size = ITEMSIZE[problem.out_dtype]
        major = store_major_of(extents, strides, ob if batches else 0, size) if out_aligned else None
        self._flipped = major == 0
        self.out = None
        if major is not None:
            box = (self.rows // self._halves, plan.strip)
            if self._flipped:
                extents_, strides_, box = extents[::-1], strides[::-1], box[::-1]
            else:
                extents_, strides_ = extents, strides
            self.out = _map(extents_, strides_, box, batches, ob)
        residual = layout.residual or (0, 0, 0)
        rb, rr, rc = (residual[0], *(residual[:0:-1] if swapped else residual[1:]))
        scales = (layout.scale_b, layout.scale_a) if swapped else (layout.scale_a, layout.scale_b)
        self._extents = (
            int(bool(batches) and bool(x[2])), int(bool(batches) and bool(y[2])), *extents,
            ob, *strides, layout.bias or 0, rb, rr, rc, *scales[0], *scales[1],
        )  # fmt: skip
        self._schedule = numbers_of(plan.schedule)
        self._chunks = chunk_numbers(plan)
        self._published = 1, 0
        if problem.publishes is not None:
            # Two consumers with half of a tile's rows each both count its columns.
            times = plan.schedule.grid.num_n * (self._halves if swapped else 1)
            self._published = problem.publishes.chunks.rows_per_chunk, times
        self._chained = _CHAINED and plan.gate is None
        self.config = self._config(probe, trace)
        self.options: dict[str, Any] = {"num_warps": plan.warps, "launch_pdl": self._chained}
        if plan.variant == "single":
            self.options["maxnreg"] = _SINGLE_REGISTERS

    def tiles_apart(self, first: int, height: int, period: int) -> tuple[int, int, int] | None:
        """Rows of A that stand apart (`tilestream.arrival.device.LocalRows`), in tiles of x: see `fill`.

        None where they cannot be read there: they are no whole tiles of x, or not x's, or not K-major, or the load warp
        has no registers for it.
        """
        numbers = first, height, period
        if not self._may_stand_apart or any(number % self.rows for number in numbers):
            return None
        return first // self.rows, height // self.rows, period // self.rows

    def fill(
        self, operands: tuple[Any, ...], capacity: int = 0, gate: GateArguments = NO_GATE,
        publish: PublishArguments = NO_PUBLISH, copies: CopyArguments = NO_COPIES, apart: tuple[Any, ...] = (0, 0, 0),
    ) -> tuple[Any, ...]:  # fmt: skip
        """All of them, in the kernel's order.

        Parameters
        ----------
        operands
            The maps of x, of its rows that stand apart, of y's parts (three: None where there are fewer) and of the
            output; then out, bias, residual, scale of the rows, scale of the columns, partials, counts, counters,
            table, probe, base, reset, alpha, beta: values, or whatever stands in for them.
        apart
            Fields of `tilestream.core.structs.LocalRows`: first, tiles, period.
        """
        base, reset, alpha, beta = operands[16:]
        return (
            *operands[:16], *gate.pointers, *copies.pointers, *publish[:2], base, reset, *gate.numbers, copies.copiers,
            publish.epoch, *self._published, *self._chunks, *apart, *self._extents, alpha, beta, *self._schedule,
            capacity, self.config,
        )  # fmt: skip

    def _config(self, probe: bool, trace: bool) -> HopperConfig:
        """What the kernel is compiled with."""
        plan, layout = self.plan, self.layout
        problem = plan.problem
        fields = epilogue_fields(layout, "none" if problem.scales == "none" else "row")
        if plan.swap_ab and layout.bias is not None:
            fields["BIAS"] = "rows"
        return HopperConfig(
            **schedule_fields(plan, probe),
            **fields,
            **arrival_fields(plan),
            **block_fields(plan.block),
            WIDTHS=self.widths,
            STAGES=plan.stages,
            STRIP=self._strip(),
            BUFFERS=plan.buffers,
            X_K_MAJOR=self._x_major,
            Y_K_MAJOR=self._y_major,
            BATCHED=problem.batch > 1,
            SWAP_AB=plan.swap_ab,
            CONSUMERS=plan.variant,
            PROMOTED=problem.fp8 and not problem.fast_accum,
            RS_TAIL=rs_tail(self.widths, 8 * ITEMSIZE[problem.dtype]),
            LOAD_REGISTERS=plan.registers[0],
            MATH_REGISTERS=plan.registers[1],
            STORE="direct" if self.out is None else "tma",
            FLIPPED=self._flipped,
            OFFSETS_64BIT=self._wide(),
            N_DIVISIBLE_BY_8=(problem.m if plan.swap_ab else problem.n) % 8 == 0,
            CHAINED=self._chained,
            TRACE=trace,
            PUBLISH="none" if problem.publishes is None else "columns" if plan.swap_ab else "rows",
            LOCAL_ROWS=self.apart is not None,
        )

    def _strip(self) -> int:
        """Columns that are finished at a time: fewer where there is no C buffer, and registers are short."""
        if self.out is not None:
            return self.plan.strip
        return min(self.plan.strip, _DIRECT * self._halves // self.rows, _WIDE_STRIP if self._wide() else _DIRECT)

    def _wide(self) -> bool:
        """Whether an offset inside one batch of what is addressed without TMA leaves 31 bits."""
        problem = self.plan.problem
        return any(
            (problem.m - 1) * strides[1] + (problem.n - 1) * strides[2] >= _INT31
            for strides in (self.layout.out, self.layout.residual)
            if strides is not None
        )


def _operand(
    operand: tuple[int, int, int, int, int, str], box_rows: int, k: int, block_k: int, batches: int
) -> tuple[Map, bool]:
    """The map of an operand ``[rows, K]``, and whether it is K-major."""
    rows, _, batch_stride, row_stride, k_stride, dtype = operand
    extents, strides = (rows, k), (row_stride, k_stride)
    major = major_of(extents, strides, batch_stride if batches else 0, ITEMSIZE[dtype])
    if major is None:
        raise ValueError(f"an operand of extents {extents} and strides {strides}: TMA cannot address it")
    if major == 1:
        return _map(extents, strides, (box_rows, block_k), batches, batch_stride), True
    return _map(extents[::-1], strides[::-1], (block_k, box_rows), batches, batch_stride), False


def _map(
    extents: tuple[int, int], strides: tuple[int, int], box: tuple[int, int], batches: int, batch_stride: int
) -> Map:
    strides = (strides[0], 1)
    if not batches:
        return Map(extents, strides, box)
    # One that all batches share is a batch of one, which the kernel stays at.
    return Map((batches if batch_stride else 1, *extents), (batch_stride, *strides), (1, *box))
