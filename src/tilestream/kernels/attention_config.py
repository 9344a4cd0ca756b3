"""What attention's kernels are compiled for: one frozen value a kernel, ``C``, their only constexpr.

The launches make it: see ``config_of`` in `tilestream.launch`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.kernels.config import ScheduleConfig, Stage

#: Elements of 16 bits in a cell of CDNA's stages.
_CELL = 8


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ScheduleConfig):
    """What every backend's kernel is compiled for.

    Attributes
    ----------
    ROWS
        Rows of a tile.
    BLOCK
        Keys of a block.
    PACK
        Query heads of one K/V head side by side in a tile's rows.
    PAGE
        Keys of a page; 0: keys are not in pages.
    SPLIT_KEYS
        Whether a tile's keys are split into shares.
    TOP_LEFT
        Whether the diagonal begins in the first corner.
    LEFT, RIGHT
        Whether the window has that side.
    CAPPED
        Whether scores are capped.
    KEYS
        How keys arrive: ``"none"`` (they are there), ``"uniform"``, ``"ragged"``.
    TRACE
        Whether items are logged.
    """

    ROWS: int
    BLOCK: int
    PACK: int
    PAGE: int
    SPLIT_KEYS: bool
    TOP_LEFT: bool
    LEFT: bool
    RIGHT: bool
    CAPPED: bool
    KEYS: str
    TRACE: bool

    @property
    def POSITIONS(self) -> int:
        """Query positions of a tile."""
        return self.ROWS // self.PACK

    @property
    def GATED(self) -> bool:
        """Whether keys arrive."""
        return self.KEYS != "none"

    @property
    def ROW_CHUNKS(self) -> str:
        """What the gate is told when a worker begins and leaves: that any chunk may be one that no tile reads."""
        return "uniform" if self.GATED else "none"

    @property
    def COLUMN_CHUNKS(self) -> str:
        """Values arrive as keys do."""
        return "none"


@dataclass(frozen=True, kw_only=True)
class HopperAttentionConfig(AttentionConfig):
    """The Hopper kernel's.

    Attributes
    ----------
    CONSUMERS
        Math loops, of 64 rows of a tile each.
    PARTS
        Boxes of columns that queries and keys are multiplied in.
    COLUMNS
        Columns of V, a power of two; of K they are more than there are, which copies fill with zeros.
    STAGES, QUERIES, BUFFERS
        Stages of keys and of values; items whose queries there is room for; strips of the output a consumer.
    RAGGED_Q, RAGGED_K
        Whether tensor maps clip copies at any row: of packed sequences and of pages.
    OWN
        Whether consumers leave out key blocks that none of their rows sees.
    ORDERED
        Whether consumers take turns at starting their multiplications.
    CHAINED
        Whether a launch may begin before the kernel ahead of it has ended.
    SCALED, SCALES
        Whether there are scales; of each, the strides of sequences and heads.
    MATH_REGISTERS, LOAD_REGISTERS, CONVERT_REGISTERS
        Registers of a thread.
    """

    CONSUMERS: int
    PARTS: int
    COLUMNS: int
    STAGES: int
    QUERIES: int
    BUFFERS: int
    RAGGED_Q: bool
    RAGGED_K: bool
    OWN: bool
    ORDERED: bool
    CHAINED: bool
    SCALED: bool
    SCALES: tuple[int, ...]
    MATH_REGISTERS: int
    LOAD_REGISTERS: int
    CONVERT_REGISTERS: int

    @property
    def TAKES_AHEAD(self) -> bool:
        """Whether the load loop takes the next item before the last values of this one.

        With pages, or a left side, the load warp has no registers for that.
        """
        return not (self.PAGE or self.LEFT)

    @property
    def PREFETCHES_TICKETS(self) -> bool:
        """Whether tickets are asked for ahead. A worker that may wait at a gate holds none that another could use."""
        return self.TAKES_AHEAD and self.KIND == "dynamic" and not self.GATED

    @property
    def CONSUMER_POSITIONS(self) -> int:
        """Query positions of a consumer."""
        return self.POSITIONS // self.CONSUMERS

    @property
    def LAZY_RESCALE(self) -> bool:
        """Whether O is rescaled only where a row's largest score has grown a lot: see `hopper.attention_softmax`."""
        return self.COLUMNS > 128

    @property
    def PAIRS(self) -> bool:
        """Whether loops carry weights two to a register. Caps and a left side leave no registers for that."""
        return not (self.LEFT or self.CAPPED)


@dataclass(frozen=True, kw_only=True)
class PortableAttentionConfig(AttentionConfig):
    """The portable kernel's.

    Attributes
    ----------
    D, DV, BLOCK_D, BLOCK_DV
        Columns of a head of keys and of values, and the next power of two.
    ALIGN, ALIGN_OUT
        What the strides of q, k and v, and of the output, are multiples of.
    OFFSETS_64BIT
        Whether offsets inside a tile or a block leave 31 bits.
    POSITIVE
        Whether the scale of scores is known to be positive: the largest score is the largest scaled one, too.
    PRECISION
        Of products: ``"tf32"`` or ``"ieee"``.
    CONVERT
        Whether the matrix units take 8-bit q and k as float16. P and V they always do.
    """

    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    ALIGN: int
    ALIGN_OUT: int
    OFFSETS_64BIT: bool
    POSITIVE: bool
    PRECISION: str
    CONVERT: bool


@dataclass(frozen=True)
class Columns:
    """How CDNA cuts a head's columns into tiles of shared memory.

    Attributes
    ----------
    PARTS, WIDTH, REST
        Parts, columns of one, columns of the last that there are.
    SWIZZLE
        ``(vector, every, period)`` of `tilestream.core.swizzle`.
    LANE
        Elements of a lane in a copy past the registers; 0: none is made.
    """

    PARTS: int
    WIDTH: int
    REST: int
    SWIZZLE: tuple[int, int, int]
    LANE: int

    @property
    def COLUMNS(self) -> int:
        """Columns of a head."""
        return (self.PARTS - 1) * self.WIDTH + self.REST


@dataclass(frozen=True, kw_only=True)
class CdnaAttentionConfig(AttentionConfig):
    """The CDNA kernel's.

    Attributes
    ----------
    STAGES, DIRECT
        Stages of keys and values, and whether copies go past the registers.
    Q, K, V
        Columns of queries, keys and values.
    TRANSPOSED_V
        Whether values are transposed on their way through registers.
    VERSION, SHAPE
        Of the matrix instruction.
    XCDS
        Neighbouring program ids are on different ones.
    FAR_Q, FAR_KEYS, FAR_OUT
        Whether a tile of queries, of keys, of the output reaches beyond a buffer's 32-bit offset.
    VECTOR_OUT
        Neighbouring columns of the output that are one aligned vector.
    """

    STAGES: int
    DIRECT: bool
    Q: Columns
    K: Columns
    V: Columns
    TRANSPOSED_V: bool
    VERSION: int
    SHAPE: tuple[int, int, int]
    XCDS: int
    FAR_Q: bool
    FAR_KEYS: bool
    FAR_OUT: bool
    VECTOR_OUT: int

    @property
    def WARPS(self) -> int:
        """Warps of a workgroup, 32 rows each."""
        return self.ROWS // self.SHAPE[0]

    @property
    def QUERY_STAGE(self) -> Stage:
        """Of a part of queries."""
        return Stage(self.ROWS, self.Q.WIDTH, True, False, self.Q.SWIZZLE, _CELL, self.Q.LANE, self.WARPS)

    @property
    def KEY_STAGE(self) -> Stage:
        """Of a part of a block of keys."""
        return Stage(self.BLOCK, self.K.WIDTH, True, False, self.K.SWIZZLE, _CELL, self.K.LANE, self.WARPS)

    @property
    def VALUE_STAGE(self) -> Stage:
        """Of a part of a block of values, whose rows are columns of a head."""
        turned = self.TRANSPOSED_V and not self.DIRECT
        return Stage(self.V.WIDTH, self.BLOCK, False, turned, self.V.SWIZZLE, _CELL, self.V.LANE, self.WARPS)

    @property
    def GATHERED(self) -> bool:
        """Whether rows of a key block lie in several pages."""
        return 0 < self.PAGE < self.BLOCK
