"""What attention's kernels are compiled for: one frozen value a kernel, ``C``, their only constexpr."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilestream.kernels.config import ScheduleConfig, Stage, chunk_kind

#: Elements of 16 bits in a cell of CDNA's stages.
_CELL = 8


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ScheduleConfig):
    """What every backend's kernel is compiled for."""

    ROWS: int  # rows of a tile
    BLOCK: int  # keys of a block
    PACK: int  # query heads of one K/V head side by side in a tile's rows
    PAGE: int  # keys of a page; 0: keys are not in pages
    SPLIT_KEYS: bool  # whether a tile's keys are split into shares
    TOP_LEFT: bool  # whether the diagonal begins in the first corner
    #: LEFT, RIGHT: whether the window has that side.
    LEFT: bool
    RIGHT: bool
    CAPPED: bool  # whether scores are capped
    KEYS: str  # how keys arrive: ``"none"`` (they are there), ``"uniform"``, ``"ragged"``
    TRACE: bool  # whether items are logged

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

    @staticmethod
    def _shared(plan: Any, layout: Any) -> dict[str, Any]:
        p = plan.problem
        return {
            **dict(zip(("ROWS", "BLOCK"), plan.block, strict=True)),
            "PACK": plan.pack,
            "PAGE": p.page_size,
            "SPLIT_KEYS": plan.shares > 1,
            "TOP_LEFT": p.alignment == "top_left",
            "LEFT": p.left is not None,
            "RIGHT": p.right is not None,
            "CAPPED": p.softcap > 0,
            "KEYS": chunk_kind(p.keys),
        }


@dataclass(frozen=True, kw_only=True)
class HopperAttentionConfig(AttentionConfig):
    """The Hopper kernel's."""

    CONSUMERS: int  # math loops, of 64 rows of a tile each
    PARTS: int  # boxes of columns that queries and keys are multiplied in
    COLUMNS: int  # columns of V, a power of two; of K they are more than there are, which copies fill with zeros
    #: STAGES, QUERIES, BUFFERS: stages of keys and of values; items whose queries there is room for; strips of the
    #: output a consumer.
    STAGES: int
    QUERIES: int
    BUFFERS: int
    #: RAGGED_Q, RAGGED_K: whether tensor maps clip copies at any row: of packed sequences and of pages.
    RAGGED_Q: bool
    RAGGED_K: bool
    ASCENDING: bool  # whether key blocks are taken from the first on, and not from the last
    OWN: bool  # whether consumers leave out key blocks that none of their rows sees
    ORDERED: bool  # whether consumers take turns at starting their multiplications
    CHAINED: bool  # whether a launch may begin before the kernel ahead of it has ended
    #: SCALED, SCALES: whether there are scales; of each, the strides of sequences and heads.
    SCALED: bool
    SCALES: tuple[int, ...]
    #: MATH_REGISTERS, LOAD_REGISTERS, CONVERT_REGISTERS: registers of a thread.
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
    """The portable kernel's."""

    #: D, DV, BLOCK_D, BLOCK_DV: columns of a head of keys and of values, and the next power of two.
    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    #: ALIGN, ALIGN_OUT: what the strides of q, k and v, and of the output, are multiples of.
    ALIGN: int
    ALIGN_OUT: int
    OFFSETS_64BIT: bool  # whether offsets inside a tile or a block leave 31 bits
    #: Whether the scale of scores is known to be positive: the largest score is the largest scaled one, too.
    POSITIVE: bool
    PRECISION: str  # of products: ``"tf32"`` or ``"ieee"``
    #: Whether the matrix units take 8-bit q and k as float16. P and V they always do.
    CONVERT: bool


@dataclass(frozen=True)
class Columns:
    """How CDNA cuts a head's columns into tiles of shared memory."""

    #: PARTS, WIDTH, REST: parts, columns of one, columns of the last that there are.
    PARTS: int
    WIDTH: int
    REST: int
    SWIZZLE: tuple[int, int, int]  # ``(vector, every, period)`` of `tilestream.core.swizzle`
    LANE: int  # elements of a lane in a copy past the registers; 0: none is made

    @property
    def COLUMNS(self) -> int:
        """Columns of a head."""
        return (self.PARTS - 1) * self.WIDTH + self.REST


@dataclass(frozen=True, kw_only=True)
class CdnaAttentionConfig(AttentionConfig):
    """The CDNA kernel's."""

    #: STAGES, DIRECT: stages of keys and values, and whether copies go past the registers.
    STAGES: int
    DIRECT: bool
    #: Q, K, V: columns of queries, keys and values.
    Q: Columns
    K: Columns
    V: Columns
    TRANSPOSED_V: bool  # whether values are transposed on their way through registers
    #: VERSION, SHAPE: of the matrix instruction.
    VERSION: int
    SHAPE: tuple[int, int, int]
    XCDS: int  # neighbouring program ids are on different ones
    #: Q_64BIT, KEYS_64BIT, OUT_64BIT: whether a tile of queries, of keys, of the output leaves a buffer's 32-bit
    #: offsets.
    Q_64BIT: bool
    KEYS_64BIT: bool
    OUT_64BIT: bool
    VECTOR_OUT: int  # neighbouring columns of the output that are one aligned vector

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
