"""What is compiled into a kernel: one frozen dataclass, the kernel's only constexpr, which its texts call ``C``.

Names are in capitals, as they are compile-time constants; derived ones are properties. `ScheduleConfig.of` makes every
backend's of a plan and a layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from tilestream.core.chunks import Incoming
from tilestream.core.copy_items import block, vector
from tilestream.core.operands import HALVES

Config = TypeVar("Config", bound="ScheduleConfig")


@dataclass(frozen=True)
class ScheduleConfig:
    """How a worker takes items: see `tilestream.kernels.device.schedule.take`."""

    KIND: str  # ``"static"``, ``"dynamic"`` or ``"stream_k"``
    #: How queues divide the tiles: ``"items"``, ``"strides"``, ``"rows"``, ``"columns"``, or ``"chunks"`` (arrival
    #: order).
    SPLIT: str = "items"
    STEAL: bool = False  # whether a worker takes from other queues when its own is empty
    #: ORDER, TRANSPOSED: the raster: ``"row_major"``, ``"grouped"``, ``"chunk_major"``, ``"longest_first"`` or
    #: ``"table"``; whether it goes down columns.
    ORDER: str = "grouped"
    TRANSPOSED: bool = False
    PROBE: bool = False  # whether each step of the schedule is written down, for tests

    @classmethod
    def of(cls: type[Config], plan: Any, layout: Any, **own: Any) -> Config:
        """What a kernel is compiled with.

        Parameters
        ----------
        plan, layout
            A `tilestream.plan.Plan` or `AttentionPlan`, and the strides of its canonical operands.
        own
            Fields of the backend's kernel alone, and those that differ there.
        """
        schedule = plan.schedule
        # With nothing to split, stream_k is a queue, and there are no slots.
        kind = "dynamic" if schedule.kind == "stream_k" and not schedule.slots else schedule.kind
        shared = {
            "KIND": kind, "SPLIT": schedule.split, "STEAL": schedule.queues > 1, "ORDER": schedule.raster.order,
            "TRANSPOSED": schedule.raster.transposed, **cls._shared(plan, layout),
        }  # fmt: skip
        return cls(**shared | own)

    @staticmethod
    def _shared(plan: Any, layout: Any) -> dict[str, Any]:
        """Fields that all backends' kernels of an op have, but for the schedule's."""
        raise NotImplementedError


def chunk_kind(incoming: Incoming | None) -> str:
    """How an operand arrives: ``"none"``, in ``"uniform"`` chunks, or in ``"ragged"`` ones."""
    return "none" if incoming is None else "uniform" if incoming.chunks.rows_per_chunk else "ragged"


@dataclass(frozen=True, kw_only=True)
class GemmConfig(ScheduleConfig):
    """What every backend's GEMM is compiled with."""

    #: BLOCK_M, BLOCK_N, BLOCK_K: a tile's rows of A and columns of B, and the K of a step.
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STRIP: int  # columns that the epilogue finishes at a time
    OFFSETS_64BIT: bool  # whether an offset inside one batch may take more than 31 bits
    SCALED: bool  # whether alpha is not 1
    #: ``"none"``, ``"tensor"`` (one scale an operand), ``"row"`` (one a row of A and a column of B) or, of groups,
    #: ``"block"`` (one a row of A and 128 of K, and one for 128 of K and of B's columns: of products, not of sums).
    SCALES: str
    BIAS: str  # ``"none"``, or along which extent of the accumulator it goes: ``"columns"``, ``"rows"``
    RESIDUAL: bool  # whether there is one
    ACTIVATION: str  # one of `tilestream.core.operands.ACTIVATIONS`, or of groups `HALVES`
    #: ROW_CHUNKS, COLUMN_CHUNKS: how A's rows and B's columns arrive: ``"none"``, in ``"uniform"`` or in ``"ragged"``
    #: chunks.
    ROW_CHUNKS: str
    COLUMN_CHUNKS: str
    #: What the kernel copies itself before its tiles: ``"none"``, ``"rows"`` of A or ``"columns"`` of B.
    COPIES: str = "none"
    #: COPY_BLOCK, COPY_VECTOR: elements of a round of such a copy, and those of a word.
    COPY_BLOCK: int = 1
    COPY_VECTOR: int = 1
    TRACE: bool = False  # whether spans are written down: see `tilestream.kernels.device.trace`

    @property
    def GATED(self) -> bool:
        """Whether an operand arrives."""
        return self.ROW_CHUNKS != "none" or self.COLUMN_CHUNKS != "none"

    @property
    def TWO_HALVES(self) -> bool:
        """Whether a tile has columns of both halves of B, of which the epilogue makes half as many."""
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
    """The portable GEMM's."""

    EVEN_K: bool  # whether K is a multiple of ``BLOCK_K``
    PRECISION: str  # of float32 products: ``"tf32"`` or ``"ieee"``
    #: Of K at most, between two times that the tensor cores' accumulator of 8-bit products is emptied; None: Triton's
    #: own choice.
    IMPRECISE: int | None
    PROMOTED: bool  # whether the kernel adds each K step's product of 8 bits to the accumulator, in float32
    #: A_KIND, B_KIND: dtypes of 8 bits that become float16 first: see `tilestream.kernels.portable.convert`; else
    #: empty.
    A_KIND: str
    B_KIND: str
    #: Elements of a vector that A and B are copied in, where the compiler does not see so much itself; else 1. And by
    #: operand whether its stride of K is 1: the other stride, the batch's and the extent along it are multiples of so
    #: many.
    VECTOR: int = 1
    K_MAJOR: tuple[bool, bool] = (True, True)


@dataclass(frozen=True, kw_only=True)
class PortableGroupedConfig(PortableConfig):
    """The portable grouped GEMM's."""

    ALONG: str  # what the groups divide: ``"rows"`` of A, or ``"k"``
    LANES: int  # a power of 2 that is at least the number of groups
    ARRIVES: bool = False  # whether each group's matrix of B arrives, most rows first

    @property
    def GATED(self) -> bool:
        """As of `GemmConfig`."""
        return self.ARRIVES


@dataclass(frozen=True, kw_only=True)
class HopperConfig(GemmConfig):
    """The Hopper GEMM's. Its accumulator has rows of ``x`` and columns of ``y``."""

    WIDTHS: tuple[int, ...]  # columns of the parts that a tile is multiplied in: the N of an instruction each
    STAGES: int  # stages of the ring
    BUFFERS: int  # C buffers of a consumer
    #: X_K_MAJOR, Y_K_MAJOR: whether an operand's stride of K is 1.
    X_K_MAJOR: bool
    Y_K_MAJOR: bool
    BATCHED: bool  # whether tensor maps have a batch
    SWAP_AB: bool  # whether ``x`` is B and ``y`` is A
    CONSUMERS: str  # ``"single"``, ``"cooperative"`` or ``"ping_pong"``
    PROMOTED: bool  # two-level accumulation: whether each K step's fp8 product is added to the accumulator in float32
    #: Whether the last part is multiplied with x in registers: see `tilestream.plan.policy.hopper.rs_tail`.
    RS_TAIL: bool
    #: LOAD_REGISTERS, MATH_REGISTERS: registers of a thread of the load warp, and of a second consumer.
    LOAD_REGISTERS: int
    MATH_REGISTERS: int
    STORE: str  # ``"tma"``, or ``"direct"`` from registers
    FLIPPED: bool  # whether the output's contiguous dimension is the accumulator's rows
    N_DIVISIBLE_BY_8: bool  # whether the accumulator's columns are a multiple of 8
    CHAINED: bool  # whether the launch may begin before the kernel ahead of it has ended
    PUBLISH: str  # where the output's chunks are: ``"none"``, the accumulator's ``"rows"`` or its ``"columns"``
    LOCAL_ROWS: bool  # whether some row tiles of ``x`` lie in a tensor of their own
    CTAS: int = 1  # CTAs that share a tile's rows, and what they load of ``y``: see `tilestream.kernels.hopper.pair`

    @property
    def ROWS(self) -> int:
        """The accumulator's rows: of one tile, all its consumers' in a CTA."""
        return (self.BLOCK_N if self.SWAP_AB else self.BLOCK_M) // self.CTAS

    @property
    def COLUMNS(self) -> int:
        """The accumulator's columns."""
        return self.BLOCK_M if self.SWAP_AB else self.BLOCK_N

    @property
    def OUT_COLUMNS(self) -> int:
        """Columns of the output that a tile makes."""
        return self.COLUMNS // 2 if self.TWO_HALVES else self.COLUMNS

    @property
    def HALVES(self) -> int:
        """Consumers that share a tile's rows."""
        return 2 if self.CONSUMERS == "cooperative" else 1

    @property
    def LOOPS(self) -> int:
        """Math loops."""
        return 1 if self.CONSUMERS == "single" else 2

    @property
    def HALF_ROWS(self) -> int:
        """Rows of one consumer."""
        return self.ROWS // self.HALVES

    @property
    def PREFETCHES_TICKETS(self) -> bool:
        """Whether the next ticket is drawn while an item loads.

        Not at a gate, where a worker would hold a ticket that another could use; nor with ``stream_k``, which leaves
        the load warp no registers for it.
        """
        return self.KIND == "dynamic" and not self.GATED

    @property
    def CLIPPED(self) -> bool:
        """Whether the output's map clips at any row: where groups' rows end."""
        return False

    @property
    def VOIDS(self) -> bool:
        """Whether an item may be void: its K runs backwards, and it becomes NaN."""
        return self.GATED

    @property
    def FULL(self) -> bool:
        """Whether an epilogue keeps vectors or a residual."""
        return self.SCALED or self.SCALES != "none" or self.BIAS != "none" or self.RESIDUAL


@dataclass(frozen=True, kw_only=True)
class HopperGroupedConfig(HopperConfig):
    """The Hopper grouped GEMM's."""

    ALONG: str  # what the groups divide: ``"rows"`` of A, or ``"k"``
    LANES: int  # a power of 2 that is at least the number of groups

    @property
    def CLIPPED(self) -> bool:
        """As of `HopperConfig`."""
        return self.ALONG == "rows"

    @property
    def VOIDS(self) -> bool:
        """As of `HopperConfig`: where offsets are no groups."""
        return True


@dataclass(frozen=True)
class Stage:
    """A stage of CDNA's ring, and how an operand ``[rows, K]`` comes to it."""

    #: ROWS, K: of a tile.
    ROWS: int
    K: int
    K_MAJOR: bool  # whether the operand's stride of K is 1
    TURNED: bool  # whether it is transposed in registers, into a stage that is K-major
    SWIZZLE: tuple[int, int, int]  # the stage's swizzle: vector, every, period
    #: VECTOR, LANE: elements of a cell, and those that a lane copies at a time past the registers.
    VECTOR: int
    LANE: int
    WARPS: int  # of a workgroup
    OFFSETS_64BIT: bool = False  # whether a tile's rows lie too far apart for a buffer's 32-bit offsets


@dataclass(frozen=True, kw_only=True)
class CdnaConfig(GemmConfig):
    """The CDNA GEMM's."""

    STAGES: int  # stages of the ring, where ``DIRECT``; else there is one
    STRIP_M: int  # rows that the epilogue finishes at a time
    DIRECT: bool  # whether copies go past the registers
    #: X, Y: stages of the operands.
    X: Stage
    Y: Stage
    #: VERSION, SHAPE: of the matrix instruction: its layout's version; M, N, K.
    VERSION: int
    SHAPE: tuple[int, int, int]
    ACROSS: tuple[int, int]  # warps down a tile's rows, and across its columns
    WIDTH: int  # elements of K that a lane reads of shared memory at a time
    FORMATS: tuple[str, str] | None  # A's and B's, of 8 bits on gfx950; else None
    XCDS: int  # dies: neighbouring program ids are on different ones
    EVEN_K: bool  # whether K is a multiple of ``BLOCK_K``
    #: VECTOR_C, VECTOR_RESIDUAL: neighbouring columns that are one aligned vector, all of it inside or none.
    VECTOR_C: int
    VECTOR_RESIDUAL: int
