"""What `tilestream.kernels.portable.gemm.gemm` is launched with: the part that a plan and a layout decide.

No torch here: the compile gate, and whoever fills a cache for a machine with a GPU, make the same arguments from
shapes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tilestream.core.copy_items import NO_COPIES, CopyArguments
from tilestream.core.schedule import Schedule
from tilestream.core.structs import Work
from tilestream.kernels.config import PortableConfig
from tilestream.launch.gate import NO_GATE, GateArguments, chunk_kinds, chunk_numbers, copy_constants
from tilestream.plan.plan import Plan
from tilestream.plan.policy.portable import STRIP, converts

_INT31 = 2**31
#: Of K, at most, between two times that an accumulator of 8-bit products is emptied.
_PRECISE_K = 128
#: Registers that a thread can have, and an SM. A worker has an SM to itself, and may take them all: not told so, ptxas
#: spills a few bytes, in one tile or another of each version, to get down to a count with which several workers fit.
_MOST_REGISTERS = 255
_SM_REGISTERS = 2**16

Strides = tuple[int, int, int]
ScaleStrides = tuple[int, int]


class Layout(NamedTuple):
    """Strides of the canonical operands, in elements, and which parts of the epilogue there are.

    Attributes
    ----------
    a, b, out
        Strides of ``[B, M, K]``, ``[B, K, N]``, ``[B, M, N]``.
    bias
        Stride of the bias, None where there is none.
    residual
        Strides of the residual, likewise.
    scaled
        Whether alpha is not 1.
    scale_a, scale_b
        From one batch's scale to the next's, and from one row's (column's): 0 where one serves all.
    """

    a: Strides
    b: Strides
    out: Strides
    bias: int | None = None
    residual: Strides | None = None
    scaled: bool = False
    activation: str = "none"
    scale_a: ScaleStrides = (0, 0)
    scale_b: ScaleStrides = (0, 0)


def is_aligned(extents: tuple[int, int], strides: tuple[int, int], batch_stride: int, address: int) -> bool:
    """Whether a matrix can be read in vectors of 16 bytes, as Triton sees it: multiples of 16, except the stride of 1.

    Parameters
    ----------
    extents, strides
        Of its two dimensions.
    """
    if address % 16 or batch_stride % 16:
        return False
    return any(strides[i] == 1 and extents[i] % 16 == 0 and strides[1 - i] % 16 == 0 for i in (1, 0))


class Arguments:
    """The kernel's arguments for one plan and one layout, but for addresses and what changes from call to call."""

    def __init__(self, plan: Plan, layout: Layout, probe: bool = False, trace: bool = False) -> None:
        problem = plan.problem
        self._numbers = (
            *chunk_numbers(plan), problem.m, problem.n, problem.k, *layout.a, *layout.b, *layout.out,
            layout.bias or 0, *(layout.residual or (0, 0, 0)), *layout.scale_a, *layout.scale_b,
        )  # fmt: skip
        self._schedule = numbers_of(plan.schedule)
        self.config = config(plan, layout, probe, trace)
        #: How the kernel is compiled.
        self.options = options(plan)

    def fill(
        self, *operands: Any, capacity: int = 0, gate: GateArguments = NO_GATE, scales: tuple[Any, Any] = (None, None),
        copies: CopyArguments = NO_COPIES,
    ) -> tuple[Any, ...]:  # fmt: skip
        """All of them, in the kernel's order.

        Parameters
        ----------
        operands
            a, b, out, bias, residual, partials, counts, counters, table, probe (tensors, addresses, or whatever stands
            in for them), base, reset, alpha, beta.
        scales
            scale_a and scale_b.
        """
        base, reset, alpha, beta = operands[10:]
        return (
            *operands[:5], *scales, *operands[5:10], *gate.pointers, *copies.pointers, base, reset,
            *gate.numbers, copies.copiers, *self._numbers,
            alpha, beta, *self._schedule, capacity, self.config,
        )  # fmt: skip


def options(plan: Plan) -> dict[str, int]:
    """How the kernel is compiled."""
    return {"num_warps": plan.warps, "num_stages": plan.stages, **registers(plan.device.arch, plan.warps)}


def registers(arch: str, warps: int) -> dict[str, int]:
    """Leave for a worker of so many warps to take all the registers there are, where the compiler wants to be told."""
    if not arch.startswith("sm_"):
        return {}
    return {"maxnreg": min(_MOST_REGISTERS, _SM_REGISTERS // (32 * warps))}


def config(plan: Plan, layout: Layout, probe: bool = False, trace: bool = False) -> PortableConfig:
    """What the kernel is compiled with."""
    problem = plan.problem
    block_k = plan.block[2]
    kinds = problem.dtypes if converts(problem.dtype, plan.device.arch) else ("", "")
    return PortableConfig(
        **schedule_fields(plan, probe),
        **epilogue_fields(layout, problem.scales),
        **arrival_fields(plan),
        **block_fields(plan.block),
        STRIP=min(STRIP, plan.block[1]),
        OFFSETS_64BIT=_wide(plan, layout),
        EVEN_K=problem.k > 0 and problem.k % block_k == 0,
        PRECISION="tf32" if problem.kind == "tf32" else "ieee",
        # The tensor cores' own accumulator of 8-bit products has fewer bits than float32: after so much of K it is
        # emptied into one that has them. None leaves it to Triton, which does not.
        IMPRECISE=min(_PRECISE_K, block_k) if _empties(plan) else None,
        A_KIND=kinds[0],
        B_KIND=kinds[1],
        TRACE=trace,
    )


def work_of(schedule: Schedule) -> Work:
    """The schedule as the kernels take it, without the raster's table, which has an address."""
    grid, raster = schedule.grid, schedule.raster
    return Work(
        grid.batch, grid.num_m, grid.num_n, grid.k_steps, schedule.full_tiles, schedule.num_shares, schedule.units,
        schedule.queues, None, raster.group, raster.first, raster.band, schedule.first_batch,
    )  # fmt: skip


def numbers_of(schedule: Schedule) -> tuple[int, ...]:
    """`work_of`, in the order of the kernels' arguments: the table stands with what has an address."""
    work = work_of(schedule)
    return tuple(value for name, value in zip(Work._fields, work, strict=True) if name != "table")


def schedule_fields(plan: Plan, probe: bool) -> dict[str, Any]:
    """Fields of `tilestream.kernels.config.ScheduleConfig`."""
    schedule = plan.schedule
    return {
        # With nothing to split, stream_k is a queue, and there are no slots.
        "KIND": "dynamic" if schedule.kind == "stream_k" and not schedule.slots else schedule.kind,
        "SPLIT": schedule.split,
        "STEAL": schedule.queues > 1,
        "ORDER": schedule.raster.order,
        "TRANSPOSED": schedule.raster.transposed,
        "PROBE": probe,
    }


def epilogue_fields(layout: Layout, scales: str) -> dict[str, Any]:
    """Fields of `tilestream.kernels.config.GemmConfig`: its epilogue's."""
    return {
        "SCALED": layout.scaled,
        "SCALES": scales,
        "BIAS": "none" if layout.bias is None else "columns",
        "RESIDUAL": layout.residual is not None,
        "ACTIVATION": layout.activation,
    }


def arrival_fields(plan: Plan) -> dict[str, Any]:
    """Fields of `tilestream.kernels.config.GemmConfig`: what arrives, and what the kernel copies."""
    rows, columns = chunk_kinds(plan)
    return {"ROW_CHUNKS": rows, "COLUMN_CHUNKS": columns, **copy_constants(plan)}


def block_fields(block: tuple[int, int, int]) -> dict[str, Any]:
    """Fields of `tilestream.kernels.config.GemmConfig`: its tile's."""
    return dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), block, strict=True))


def _empties(plan: Plan) -> bool:
    """Whether the matrix units' accumulator is emptied now and then: AMD's is float32."""
    return plan.problem.fp8 and not plan.problem.fast_accum and not plan.device.arch.startswith("gfx")


def _wide(plan: Plan, layout: Layout) -> bool:
    """Whether an offset inside one batch leaves 31 bits. Offsets past the end are masked, so theirs may."""
    problem = plan.problem
    m, n, k = problem.m, problem.n, problem.k
    extents: dict[str, tuple[int, ...]] = {"a": (m, k), "b": (k, n), "out": (m, n), "scale_a": (m,), "scale_b": (n,)}
    strides: dict[str, tuple[int, ...]] = {"a": layout.a, "b": layout.b, "out": layout.out}
    if layout.residual is not None:
        extents["residual"], strides["residual"] = extents["out"], layout.residual
    strides |= {"scale_a": layout.scale_a, "scale_b": layout.scale_b}
    return any(
        sum(max(extent - 1, 0) * stride for extent, stride in zip(extents[name], strides[name][1:], strict=True))
        >= _INT31
        for name in extents
    )
