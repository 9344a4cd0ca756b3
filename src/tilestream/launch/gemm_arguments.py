"""The arguments of all backends' GEMM kernels that a plan and a layout decide."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from tilestream.core.copy_items import NO_COPIES, CopyArguments
from tilestream.core.schedule import Schedule
from tilestream.core.structs import Work
from tilestream.kernels.config import GemmConfig
from tilestream.launch.gate import NO_GATE, NO_PUBLISH, GateArguments, PublishArguments, chunk_numbers
from tilestream.launch.pack import Pack, named
from tilestream.plan.plan import Plan

Strides = tuple[int, int, int]
ScaleStrides = tuple[int, int]
#: First, tiles and period of `tilestream.core.structs.LocalRows`.
LocalTiles = tuple[Any, Any, Any]

NO_LOCAL: LocalTiles = (0, 0, 0)

#: The arguments of each call after its matrices.
OPERANDS = (
    "out", "bias", "residual", "row_scale", "column_scale", "partials", "counts", "counters", "table", "log", "base",
    "reset", "alpha", "beta",
)  # fmt: skip
#: The arguments of a call after these and `GateArguments`: copies, what is published, local rows.
_MORE = (
    "copy_source", "copy_target", "copy_table", "copy_words", "copiers", "out_signals",
    "out_counts", "out_epoch", "local_first", "local_tiles", "local_period",
)  # fmt: skip
_NOTHING = NO_GATE._asdict() | dict(zip(_MORE, (*NO_COPIES, *NO_PUBLISH, *NO_LOCAL), strict=True))


class Layout(NamedTuple):
    """Strides of the canonical operands, in elements, and the parts of the epilogue."""

    #: a, b, out: strides of ``[B, M, K]``, ``[B, K, N]``, ``[B, M, N]``.
    a: Strides
    b: Strides
    out: Strides
    bias: int | None = None  # stride of the bias; None if there is none
    residual: Strides | None = None  # strides of the residual; None if there is none
    scaled: bool = False  # whether alpha is not 1
    activation: str = "none"
    #: scale_a, scale_b: strides from one batch's scale to the next's, and from one row's (column's); 0: one for all.
    scale_a: ScaleStrides = (0, 0)
    scale_b: ScaleStrides = (0, 0)
    #: Of scales of blocks: from one block of K to the next, of A's and of B's.
    scale_k: ScaleStrides = (0, 0)


def is_aligned(
    extents: tuple[int, int], strides: tuple[int, int], batch_stride: int, address: int, multiple: int = 16
) -> bool:
    """Whether Triton can read a matrix in vectors of 16 bytes: all numbers but the stride of 1 are multiples of 16.

    Parameters
    ----------
    extents, strides
        Those of its two dimensions.
    multiple
        What the extent along the stride of 1 and all other strides are to be multiples of, instead of 16.
    """
    if address % 16 or batch_stride % multiple:
        return False
    return any(
        strides[i] == 1 and extents[i] % multiple == 0 and strides[1 - i] % multiple == 0 for i in (1, 0)
    )  # fmt: skip


class GemmArguments:
    """A GEMM kernel's arguments for one plan and one layout, except addresses and other arguments of a call.

    Attributes
    ----------
    kernel, matrices
        The kernel's entry, and its parameters for the operands a and b.
    config
        The compile-time configuration.
    options
        The compiler's options.
    """

    kernel: Any
    matrices: tuple[str, ...]
    options: dict[str, Any]

    def __init__(self, plan: Plan, layout: Layout, probe: bool = False, trace: bool = False) -> None:
        self.plan, self.layout = plan, layout
        self.config: Any = self._config(PROBE=probe, TRACE=trace)

    def fill(
        self, operands: tuple[Any, ...], capacity: int = 0, gate: GateArguments = NO_GATE,
        publish: PublishArguments = NO_PUBLISH, copies: CopyArguments = NO_COPIES, local: LocalTiles = NO_LOCAL,
    ) -> list[Any]:  # fmt: skip
        """All arguments in the order of the kernel's entry. Those that the kernel does not have are left out.

        Parameters
        ----------
        operands
            Values of `matrices`, then of `OPERANDS`, or stand-ins for them.
        capacity
            The capacity of a probe.
        """
        more: tuple[Any, ...] = () if gate is NO_GATE else gate
        if copies is not NO_COPIES or publish is not NO_PUBLISH or local is not NO_LOCAL:
            more = (*gate, *copies, *publish, *local)
        return self._pack((*operands, capacity), more)

    @functools.cached_property
    def _pack(self) -> Pack:
        fixed = {**_NOTHING, **self._numbers(), "C": self.config}
        return Pack(self.kernel, fixed, (*self.matrices, *OPERANDS, "capacity"), GateArguments._fields, _MORE)

    def _numbers(self) -> dict[str, Any]:
        """The numbers that a plan and a layout decide, by the names of the kernel's parameters."""
        plan, layout = self.plan, self.layout
        problem, swap_ab = plan.problem, plan.swap_ab
        (ob, om, on), (rb, rm, rn) = layout.out, layout.residual or (0, 0, 0)
        row_scale, column_scale = (layout.scale_b, layout.scale_a) if swap_ab else (layout.scale_a, layout.scale_b)
        return {
            **work_of(plan.schedule)._asdict(),
            **chunk_numbers(plan),
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "rows": problem.n if swap_ab else problem.m,
            "columns": problem.m if swap_ab else problem.n,
            **named("stride_a", "bmk", layout.a),
            **named("stride_b", "bkn", layout.b),
            **named("stride_o", "brc", (ob, on, om) if swap_ab else layout.out),
            **named("stride_r", "brc", (rb, rn, rm) if swap_ab else (rb, rm, rn)),
            "stride_bias": layout.bias or 0,
            **named("stride_s", "br", row_scale),
            **named("stride_t", "bc", column_scale),
        }

    def _config(self, **logs: bool) -> GemmConfig:
        """What is compiled in; ``logs``: ``PROBE`` and ``TRACE``."""
        raise NotImplementedError


def work_of(schedule: Schedule) -> Work:
    """The schedule's numbers for kernels, without the raster's table, which is an address."""
    grid, raster = schedule.grid, schedule.raster
    return Work(
        grid.batch, grid.num_m, grid.num_n, grid.k_steps, schedule.full_tiles, schedule.num_shares, schedule.units,
        schedule.queues, None, raster.group, raster.first, raster.band, schedule.first_batch,
    )  # fmt: skip
