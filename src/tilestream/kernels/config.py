"""What is compiled into a kernel: one frozen dataclass, the kernel's only constexpr, which its texts call ``C``.

Names are in capitals, as they are compile-time constants; derived ones are properties.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleConfig:
    """How a worker takes items: see `tilestream.kernels.device.schedule.take`.

    Attributes
    ----------
    KIND
        ``"static"``, ``"dynamic"`` or ``"stream_k"``.
    SPLIT
        How queues divide the tiles: ``"items"``, ``"strides"``, ``"rows"``, ``"columns"``, or ``"chunks"`` (arrival
        order).
    STEAL
        Whether a worker takes from other queues when its own is empty.
    ORDER, TRANSPOSED
        The raster: ``"row_major"``, ``"grouped"``, ``"chunk_major"``, ``"longest_first"`` or ``"table"``; whether it
        goes down columns.
    PROBE
        Whether each step of the schedule is written down, for tests.
    """

    KIND: str
    SPLIT: str = "items"
    STEAL: bool = False
    ORDER: str = "grouped"
    TRANSPOSED: bool = False
    PROBE: bool = False


@dataclass(frozen=True, kw_only=True)
class GemmConfig(ScheduleConfig):
    """What every backend's GEMM is compiled with.

    Attributes
    ----------
    BLOCK_M, BLOCK_N, BLOCK_K
        A tile's rows of A and columns of B, and the K of a step.
    STRIP
        Columns that the epilogue finishes at a time.
    OFFSETS_64BIT
        Whether an offset inside one batch may take more than 31 bits.
    SCALED
        Whether alpha is not 1.
    SCALES
        ``"none"``, ``"tensor"`` (one scale an operand) or ``"row"`` (one a row of A and a column of B).
    BIAS
        ``"none"``, or along which extent of the accumulator it goes: ``"columns"``, ``"rows"``.
    RESIDUAL
        Whether there is one.
    ACTIVATION
        One of `tilestream.core.operands.ACTIVATIONS`.
    ROW_CHUNKS, COLUMN_CHUNKS
        How A's rows and B's columns arrive: ``"none"``, in ``"uniform"`` or in ``"ragged"`` chunks.
    COPIES
        What the kernel copies itself before its tiles: ``"none"``, ``"rows"`` of A or ``"columns"`` of B.
    COPY_BLOCK, COPY_VECTOR
        Elements of a round of such a copy, and those of a word.
    TRACE
        Whether spans are written down: see `tilestream.kernels.device.trace`.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STRIP: int
    OFFSETS_64BIT: bool
    SCALED: bool
    SCALES: str
    BIAS: str
    RESIDUAL: bool
    ACTIVATION: str
    ROW_CHUNKS: str
    COLUMN_CHUNKS: str
    COPIES: str = "none"
    COPY_BLOCK: int = 1
    COPY_VECTOR: int = 1
    TRACE: bool = False

    @property
    def GATED(self) -> bool:
        """Whether an operand arrives."""
        return self.ROW_CHUNKS != "none" or self.COLUMN_CHUNKS != "none"


@dataclass(frozen=True, kw_only=True)
class PortableConfig(GemmConfig):
    """The portable GEMM's.

    Attributes
    ----------
    EVEN_K
        Whether K is a multiple of ``BLOCK_K``.
    PRECISION
        Of float32 products: ``"tf32"`` or ``"ieee"``.
    IMPRECISE
        Of K at most, between two times that the tensor cores' accumulator of 8-bit products is emptied; None: Triton's
        own choice.
    A_KIND, B_KIND
        Dtypes of 8 bits that become float16 first: see `tilestream.kernels.portable.convert`; else empty.
    """

    EVEN_K: bool
    PRECISION: str
    IMPRECISE: int | None
    A_KIND: str
    B_KIND: str


@dataclass(frozen=True, kw_only=True)
class HopperConfig(GemmConfig):
    """The Hopper GEMM's. Its accumulator has rows of ``x`` and columns of ``y``.

    Attributes
    ----------
    WIDTHS
        Columns of the parts that a tile is multiplied in: the N of an instruction each.
    STAGES
        Stages of the ring.
    BUFFERS
        C buffers of a consumer.
    X_K_MAJOR, Y_K_MAJOR
        Whether an operand's stride of K is 1.
    BATCHED
        Whether tensor maps have a batch.
    SWAP_AB
        Whether ``x`` is B and ``y`` is A.
    CONSUMERS
        ``"single"``, ``"cooperative"`` or ``"ping_pong"``.
    PROMOTED
        Two-level accumulation: whether each K step's fp8 product is added to the accumulator in float32.
    RS_TAIL
        Whether the last part is multiplied with x in registers: see `tilestream.plan.policy.hopper.rs_tail`.
    LOAD_REGISTERS, MATH_REGISTERS
        Registers of a thread of the load warp, and of a second consumer.
    STORE
        ``"tma"``, or ``"direct"`` from registers.
    FLIPPED
        Whether the output's contiguous dimension is the accumulator's rows.
    N_DIVISIBLE_BY_8
        Whether the accumulator's columns are a multiple of 8.
    CHAINED
        Whether the launch may begin before the kernel ahead of it has ended.
    PUBLISH
        Where the output's chunks are: ``"none"``, the accumulator's ``"rows"`` or its ``"columns"``.
    LOCAL_ROWS
        Whether some row tiles of ``x`` lie in a tensor of their own.
    """

    WIDTHS: tuple[int, ...]
    STAGES: int
    BUFFERS: int
    X_K_MAJOR: bool
    Y_K_MAJOR: bool
    BATCHED: bool
    SWAP_AB: bool
    CONSUMERS: str
    PROMOTED: bool
    RS_TAIL: bool
    LOAD_REGISTERS: int
    MATH_REGISTERS: int
    STORE: str
    FLIPPED: bool
    N_DIVISIBLE_BY_8: bool
    CHAINED: bool
    PUBLISH: str
    LOCAL_ROWS: bool

    @property
    def ROWS(self) -> int:
        """The accumulator's rows: of one tile, all its consumers'."""
        return self.BLOCK_N if self.SWAP_AB else self.BLOCK_M

    @property
    def COLUMNS(self) -> int:
        """The accumulator's columns."""
        return self.BLOCK_M if self.SWAP_AB else self.BLOCK_N

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
    def FULL(self) -> bool:
        """Whether an epilogue keeps vectors or a residual."""
        return self.SCALED or self.SCALES != "none" or self.BIAS != "none" or self.RESIDUAL


@dataclass(frozen=True)
class Stage:
    """A stage of CDNA's ring, and how an operand ``[rows, K]`` comes to it.

    Attributes
    ----------
    ROWS, K
        Of a tile.
    K_MAJOR
        Whether the operand's stride of K is 1.
    TURNED
        Whether it is transposed in registers, into a stage that is K-major.
    SWIZZLE
        The stage's swizzle: vector, every, period.
    VECTOR, LANE
        Elements of a cell, and those that a lane copies at a time past the registers.
    WARPS
        Of a workgroup.
    FAR
        Whether a tile's rows lie too far apart for a buffer's 32-bit offsets.
    """

    ROWS: int
    K: int
    K_MAJOR: bool
    TURNED: bool
    SWIZZLE: tuple[int, int, int]
    VECTOR: int
    LANE: int
    WARPS: int
    FAR: bool = False


@dataclass(frozen=True, kw_only=True)
class CdnaConfig(GemmConfig):
    """The CDNA GEMM's.

    Attributes
    ----------
    STAGES
        Stages of the ring, where ``DIRECT``; else there is one.
    STRIP_M
        Rows that the epilogue finishes at a time.
    DIRECT
        Whether copies go past the registers.
    X, Y
        Stages of the operands.
    VERSION, SHAPE
        Of the matrix instruction: its layout's version; M, N, K.
    ACROSS
        Warps down a tile's rows, and across its columns.
    WIDTH
        Elements of K that a lane reads of shared memory at a time.
    FORMATS
        A's and B's, of 8 bits on gfx950; else None.
    XCDS
        Dies: neighbouring program ids are on different ones.
    EVEN_K
        Whether K is a multiple of ``BLOCK_K``.
    VECTOR_C, VECTOR_RESIDUAL
        Neighbouring columns that are one aligned vector, all of it inside or none.
    """

    STAGES: int
    STRIP_M: int
    DIRECT: bool
    X: Stage
    Y: Stage
    VERSION: int
    SHAPE: tuple[int, int, int]
    ACROSS: tuple[int, int]
    WIDTH: int
    FORMATS: tuple[str, str] | None
    XCDS: int
    EVEN_K: bool
    VECTOR_C: int
    VECTOR_RESIDUAL: int
