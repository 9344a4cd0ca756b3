"""A kernel's compile-time configuration: one frozen dataclass, the kernel's only constexpr, its parameter ``C``.

Names are in capitals because they are compile-time constants. Derived constants are properties. `ScheduleConfig.of`
makes the configurations of all backends from a plan and a layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from tilestream.core.chunks import Incoming
from tilestream.core.consumers import sharing
from tilestream.core.copy_items import block, vector
from tilestream.core.operands import HALVES

Config = TypeVar("Config", bound="ScheduleConfig")


@dataclass(frozen=True)
class ScheduleConfig:
    """The configuration of the schedule: see `tilestream.kernels.device.schedule.take`."""

    KIND: str  # ``"static"``, ``"dynamic"`` or ``"stream_k"``
    #: The division of tiles among queues: ``"items"``, ``"strides"``, ``"rows"``, ``"columns"``, or ``"chunks"``
    #: (arrival order).
    SPLIT: str = "items"
    STEAL: bool = False  # whether a worker takes from other queues when its own is empty
    #: ORDER, TRANSPOSED: the raster's order, ``"row_major"``, ``"grouped"``, ``"chunk_major"``, ``"longest_first"`` or
    #: ``"table"``; whether it runs down columns.
    ORDER: str = "grouped"
    TRANSPOSED: bool = False
    PROBE: bool = False  # whether the kernel logs each step of the schedule, for tests

    @classmethod
    def of(cls: type[Config], plan: Any, layout: Any, **own: Any) -> Config:
        """Make the configuration for a plan and a layout.

        Parameters
        ----------
        plan, layout
            A `tilestream.plan.Plan` or `AttentionPlan`, and the strides of its canonical operands.
        own
            The fields that only the backend's kernel has, and those with other values there.
        """
        schedule = plan.schedule
        # With nothing to split stream_k has no slots, and is the same as a queue.
        kind = "dynamic" if schedule.kind == "stream_k" and not schedule.slots else schedule.kind
        shared = {
            "KIND": kind, "SPLIT": schedule.split, "STEAL": schedule.queues > 1, "ORDER": schedule.raster.order,
            "TRANSPOSED": schedule.raster.transposed, **cls._shared(plan, layout),
        }  # fmt: skip
        return cls(**shared | own)

    @staticmethod
    def _shared(plan: Any, layout: Any) -> dict[str, Any]:
        """The fields, without the schedule's, that all backends' kernels of an op share."""
        raise NotImplementedError


def chunk_kind(incoming: Incoming | None) -> str:
    """The kind of an operand's chunks: ``"none"`` (it does not arrive), ``"uniform"`` or ``"ragged"``."""
    return "none" if incoming is None else "uniform" if incoming.chunks.rows_per_chunk else "ragged"


@dataclass(frozen=True, kw_only=True)
class GemmConfig(ScheduleConfig):
    """The configuration that all backends' GEMMs share."""

    #: BLOCK_M, BLOCK_N, BLOCK_K: a tile's rows of A and columns of B, and the K of a step.
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STRIP: int  # columns of a strip of the epilogue
    OFFSETS_64BIT: bool  # whether an offset inside a batch may exceed 31 bits
    SCALED: bool  # whether alpha is not 1
    #: ``"none"``, ``"tensor"`` (a scale for each operand), ``"row"`` (for each row of A and each column of B) or, for
    #: groups, ``"block"`` (for each row of A and 128 of K, and for each 128 x 128 of B: they scale a K step's
    #: products).
    SCALES: str
    BIAS: str  # ``"none"``, or the accumulator's extent of the bias: ``"columns"`` or ``"rows"``
    RESIDUAL: bool  # whether there is a residual
    ACTIVATION: str  # one of `tilestream.core.operands.ACTIVATIONS`; for groups also one of `HALVES`
    #: ROW_CHUNKS, COLUMN_CHUNKS: the chunks in which A's rows and B's columns arrive: ``"none"``, ``"uniform"`` or
    #: ``"ragged"``.
    ROW_CHUNKS: str
    COLUMN_CHUNKS: str
    #: The operand that the kernel copies before its tiles: ``"none"``, ``"rows"`` of A or ``"columns"`` of B.
    COPIES: str = "none"
    #: COPY_BLOCK, COPY_VECTOR: elements of a round of this copy, and of a word.
    COPY_BLOCK: int = 1
    COPY_VECTOR: int = 1
    TRACE: bool = False  # whether the kernel writes spans: see `tilestream.kernels.device.trace`

    @property
    def GATED(self) -> bool:
        """Whether an operand arrives."""
        return self.ROW_CHUNKS != "none" or self.COLUMN_CHUNKS != "none"

    @property
    def TWO_HALVES(self) -> bool:
        """Whether a tile has columns of both halves of B, which the epilogue combines."""
        return self.ACTIVATION in HALVES

    @staticmethod
    def _shared(plan: Any, layout: Any) -> dict[str, Any]:
        problem = plan.problem
        copied = {"none": None, "rows": problem.rows, "columns": problem.columns}[plan.copies]
        return {
            **dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), plan.block, strict=True)),
            "SCALED": layout.scaled,
            "SCALES": problem.scales,
            "BIAS": "none" if layout.bias is None else "columns",
            "RESIDUAL": layout.residual is not None,
            "ACTIVATION": layout.activation,
            "ROW_CHUNKS": chunk_kind(problem.rows),
            "COLUMN_CHUNKS": chunk_kind(problem.columns),
            "COPIES": plan.copies,
            "COPY_BLOCK": block(plan.warps, copied.copied) if copied else 1,
            "COPY_VECTOR": vector(copied.copied) if copied else 1,
        }


@dataclass(frozen=True, kw_only=True)
class PortableConfig(GemmConfig):
    """The configuration of the portable GEMM."""

    EVEN_K: bool  # whether K is a multiple of ``BLOCK_K``
    PRECISION: str  # the precision of float32 products: ``"tf32"`` or ``"ieee"``
    #: The most of K after which the tensor cores' accumulator of 8-bit products is added to a float32 sum; None leaves
    #: it to Triton.
    IMPRECISE: int | None
    PROMOTED: bool  # whether the kernel adds each K step's 8-bit product to the accumulator in float32
    #: A_KIND, B_KIND: 8-bit dtypes that are converted to float16, see `tilestream.kernels.portable.convert`; empty
    #: without a conversion.
    A_KIND: str
    B_KIND: str
    #: By operand the elements of a vector that it is copied in, where the compiler does not see so much itself; else 1.
    #: And whether its stride of K is 1: the other stride, the batch's and the extent along it are multiples of so many.
    VECTORS: tuple[int, int] = (1, 1)
    K_MAJOR: tuple[bool, bool] = (True, True)
    #: CLUSTER, FETCHED: CTAs that share a tile's K, and floats of a thread's fetch of their sums: see
    #: `tilestream.kernels.portable.cluster`.
    CLUSTER: int = 1
    FETCHED: int = 1


@dataclass(frozen=True, kw_only=True)
class PortableGroupedConfig(PortableConfig):
    """The configuration of the portable grouped GEMM."""

    ALONG: str  # the dimension that the groups divide: ``"rows"`` of A, or ``"k"``
    LANES: int  # a power of 2 that is at least the number of groups
    ARRIVES: bool = False  # whether the groups' matrices of B arrive, that with the most rows first

    @property
    def GATED(self) -> bool:
        """Whether an operand arrives."""
        return self.ARRIVES


@dataclass(frozen=True, kw_only=True)
class PortableSourcesConfig(PortableGroupedConfig):
    """The configuration of the portable grouped GEMM by source. ``ARRIVES``: whether counts and rows arrive."""

    PUBLISHES: bool = False  # whether each source's result is signalled
    PAST_CACHES: bool = False  # whether words that others write are read past the caches by a modifier of the load


#: A load warp of fewer registers is slim.
SLIM_REGISTERS = 40


@dataclass(frozen=True, kw_only=True)
class HopperConfig(GemmConfig):
    """The configuration of the Hopper GEMM. Its accumulator has rows of ``x`` and columns of ``y``."""

    WIDTHS: tuple[int, ...]  # columns of a tile's parts: each is the N of an instruction
    STAGES: int  # stages of the ring
    BUFFERS: int  # C buffers of a consumer
    #: X_K_MAJOR, Y_K_MAJOR: whether an operand's stride of K is 1.
    X_K_MAJOR: bool
    Y_K_MAJOR: bool
    BATCHED: bool  # whether tensor maps have a batch dimension
    SWAP_AB: bool  # whether ``x`` is B and ``y`` is A
    CONSUMERS: str  # ``"single"``, ``"cooperative"``, ``"triple"`` or ``"ping_pong"``
    PROMOTED: bool  # whether each K step's fp8 product is added in float32 (two-level accumulation)
    #: Whether the last part's product has x in registers: see `tilestream.plan.policy.hopper.rs_tail`.
    RS_TAIL: bool
    #: LOAD_REGISTERS, MATH_REGISTERS: registers of a thread of the load warp, and of the second consumer.
    LOAD_REGISTERS: int
    MATH_REGISTERS: int
    #: ``"tma"``; from registers, ``"lines"``: consecutive elements of the output, or ``"direct"``: as they are held.
    STORE: str
    FLIPPED: bool  # whether the output's contiguous dimension is the accumulator's rows
    N_DIVISIBLE_BY_8: bool  # whether the accumulator's columns are a multiple of 8
    CHAINED: bool  # whether the launch may begin before the previous kernel has ended
    PUBLISH: str  # the accumulator's extent of the output's chunks: ``"none"``, ``"rows"`` or ``"columns"``
    LOCAL_ROWS: bool  # whether some row tiles of ``x`` are in a separate tensor
    LOADS_ALPHA: bool = False  # whether alpha is the product of the scales, of one element each, which consumers load
    CTAS: int = 1  # CTAs that share a tile's rows, and their loads of ``y``: see `tilestream.kernels.hopper.pair`

    @property
    def ROWS(self) -> int:
        """The accumulator's rows for a tile, with all its consumers in a CTA."""
        return (self.BLOCK_N if self.SWAP_AB else self.BLOCK_M) // self.CTAS

    @property
    def COLUMNS(self) -> int:
        """The accumulator's columns."""
        return self.BLOCK_M if self.SWAP_AB else self.BLOCK_N

    @property
    def OUT_COLUMNS(self) -> int:
        """The columns of a tile's output."""
        return self.COLUMNS // 2 if self.TWO_HALVES else self.COLUMNS

    @property
    def HALVES(self) -> int:
        """The number of consumers that share a tile's rows."""
        return sharing(self.CONSUMERS)

    @property
    def LOOPS(self) -> int:
        """The number of math loops."""
        return max(self.HALVES, 2 if self.CONSUMERS == "ping_pong" else 1)

    @property
    def HALF_ROWS(self) -> int:
        """The rows of one consumer."""
        return self.ROWS // self.HALVES

    @property
    def PREFETCHES_TICKETS(self) -> bool:
        """Whether the next ticket is drawn while an item loads.

        A gate excludes this, because a waiting worker would hold a ticket that another could use. So does
        ``stream_k``, which leaves the load warp no registers for it.
        """
        return self.KIND == "dynamic" and not self.GATED

    @property
    def SLIM(self) -> bool:
        """Whether the load warp has too few registers to read many counters at once: see the compile gates."""
        return self.LOAD_REGISTERS < SLIM_REGISTERS

    @property
    def CLIPPED(self) -> bool:
        """Whether the output's map clips at any row, as the ends of groups need."""
        return False

    @property
    def VOIDS(self) -> bool:
        """Whether an item may be void. Its K then runs backwards, and its output is NaN."""
        return self.GATED

    @property
    def FULL(self) -> bool:
        """Whether the epilogue has vectors or a residual in registers."""
        return self.SCALED or self.SCALES != "none" or self.BIAS != "none" or self.RESIDUAL


@dataclass(frozen=True, kw_only=True)
class HopperGroupedConfig(HopperConfig):
    """The configuration of the Hopper grouped GEMM."""

    ALONG: str  # the dimension that the groups divide: ``"rows"`` of A, or ``"k"``
    LANES: int  # a power of 2 that is at least the number of groups
    PUBLISHES: bool = False  # whether each source's result is signalled

    @property
    def CLIPPED(self) -> bool:
        """See `HopperConfig`."""
        return self.ALONG == "rows"

    @property
    def VOIDS(self) -> bool:
        """See `HopperConfig`. Items are void for invalid offsets."""
        return True


@dataclass(frozen=True, kw_only=True)
class HopperSourcesConfig(HopperGroupedConfig):
    """The configuration of the Hopper grouped GEMM by source. ``ARRIVES``: whether counts and rows arrive."""

    ARRIVES: bool

    @property
    def PAST_CACHES(self) -> bool:
        """See `PortableSourcesConfig`."""
        return False

    @property
    def PREFETCHES_TICKETS(self) -> bool:
        """See `HopperConfig`. Tickets are drawn behind a look at what is there."""
        return False


@dataclass(frozen=True)
class Stage:
    """A stage of CDNA's ring, and the copy of an operand ``[rows, K]`` to it."""

    #: ROWS, K: the extents of a tile.
    ROWS: int
    K: int
    K_MAJOR: bool  # whether the operand's stride of K is 1
    TURNED: bool  # whether it is transposed in registers, into a K-major stage
    SWIZZLE: tuple[int, int, int]  # the stage's swizzle: vector, every, period
    #: VECTOR, LANE: elements of a cell, and of a lane's direct copy.
    VECTOR: int
    LANE: int
    WARPS: int  # warps of a workgroup
    OFFSETS_64BIT: bool = False  # whether a tile exceeds a buffer's 32-bit offsets


@dataclass(frozen=True, kw_only=True)
class CdnaConfig(GemmConfig):
    """The configuration of the CDNA GEMM."""

    STAGES: int  # stages of the ring if ``DIRECT``; else there is one
    STRIP_M: int  # rows of a strip of the epilogue
    DIRECT: bool  # whether copies bypass the registers
    #: X, Y: the operands' stages.
    X: Stage
    Y: Stage
    #: VERSION, SHAPE: the version of the matrix instruction's layout; its M, N, K.
    VERSION: int
    SHAPE: tuple[int, int, int]
    ACROSS: tuple[int, int]  # warps down a tile's rows, and across its columns
    WIDTH: int  # elements of K in a lane's read of shared memory
    FORMATS: tuple[str, str] | None  # A's and B's 8-bit formats on gfx950; else None
    XCDS: int  # dies; neighbouring program ids are on different dies
    EVEN_K: bool  # whether K is a multiple of ``BLOCK_K``
    #: VECTOR_C, VECTOR_RESIDUAL: neighbouring columns of an aligned vector that is entirely inside or outside.
    VECTOR_C: int
    VECTOR_RESIDUAL: int
