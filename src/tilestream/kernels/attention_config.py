"""The compile-time configurations of attention's kernels: one frozen value, ``C``, the kernel's only constexpr."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tilestream.kernels.config import ScheduleConfig, Stage, chunk_kind

#: Elements of 16 bits in a cell of CDNA's stages.
_CELL = 8


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(ScheduleConfig):
    """The configuration that all backends' kernels share."""

    ROWS: int  # rows of a tile
    BLOCK: int  # keys of a block
    PACK: int  # query heads, of one K/V head, in a tile's rows
    PAGE: int  # keys of a page; 0: keys are not in pages
    SPLIT_KEYS: bool  # whether a tile's keys are split into shares
    LATE: tuple[int, ...]  # the bounds of shares of keys that arrive: see `AttentionCandidate.late`
    TOP_LEFT: bool  # whether the diagonal begins in the top left corner
    #: LEFT, RIGHT: whether the window has a bound on the left, and on the right.
    LEFT: bool
    RIGHT: bool
    CAPPED: bool  # whether scores are capped
    KEYS: str  # the chunks of keys: ``"none"`` (they do not arrive), ``"uniform"`` or ``"ragged"``
    TRACE: bool  # whether the kernel logs items

    @property
    def POSITIONS(self) -> int:
        """The query positions of a tile."""
        return self.ROWS // self.PACK

    @property
    def GATED(self) -> bool:
        """Whether keys arrive."""
        return self.KEYS != "none"

    @property
    def ROW_CHUNKS(self) -> str:
        """The gate's kind of chunks when a worker begins and leaves. Any chunk may be unread there."""
        return "uniform" if self.GATED else "none"

    @property
    def COLUMN_CHUNKS(self) -> str:
        """The gate's kind for columns: ``"none"``, because values share the keys' signals."""
        return "none"

    @staticmethod
    def _shared(plan: Any, layout: Any) -> dict[str, Any]:
        p = plan.problem
        return {
            **dict(zip(("ROWS", "BLOCK"), plan.block, strict=True)),
            "PACK": plan.pack,
            "PAGE": p.page_size,
            "SPLIT_KEYS": plan.shares > 1,
            "LATE": plan.late,
            "TOP_LEFT": p.alignment == "top_left",
            "LEFT": p.left is not None,
            "RIGHT": p.right is not None,
            "CAPPED": p.softcap > 0,
            "KEYS": chunk_kind(p.keys),
        }


@dataclass(frozen=True, kw_only=True)
class HopperAttentionConfig(AttentionConfig):
    """The configuration of the Hopper kernel."""

    CONSUMERS: int  # math loops; each has 64 rows of a tile
    PARTS: int  # boxes of columns of queries and keys, each multiplied by itself
    COLUMNS: int  # columns of V, rounded up to a power of two; copies fill the additional ones with zeros
    #: STAGES, QUERIES, BUFFERS: stages of keys and of values; items whose queries fit; C buffers of a consumer, each
    #: for a strip of the output.
    STAGES: int
    QUERIES: int
    BUFFERS: int
    #: RAGGED_Q, RAGGED_K: whether tensor maps clip copies at any row, as packed sequences and pages need.
    RAGGED_Q: bool
    RAGGED_K: bool
    ASCENDING: bool  # whether the first key block is taken first, instead of the last
    OWN: bool  # whether consumers leave out key blocks that none of their rows sees
    ORDERED: bool  # whether consumers take turns at starting their multiplications
    CHAINED: bool  # whether a launch may begin before the previous kernel has ended
    #: SCALED, SCALES: whether there are scales; the strides of sequences and heads of each.
    SCALED: bool
    SCALES: tuple[int, ...]
    #: MATH_REGISTERS, LOAD_REGISTERS, CONVERT_REGISTERS: registers of a thread of these warps.
    MATH_REGISTERS: int
    LOAD_REGISTERS: int
    CONVERT_REGISTERS: int

    @property
    def TAKES_AHEAD(self) -> bool:
        """Whether the load loop takes the next item before the last values of this one.

        With pages, or a left bound, the load warp has no registers for that.
        """
        return not (self.PAGE or self.LEFT)

    @property
    def PREFETCHES_TICKETS(self) -> bool:
        """Whether tickets are prefetched. Not with a gate: a waiting worker would hold a ticket others could use."""
        return self.TAKES_AHEAD and self.KIND == "dynamic" and not self.GATED

    @property
    def CONSUMER_POSITIONS(self) -> int:
        """The query positions of a consumer."""
        return self.POSITIONS // self.CONSUMERS

    @property
    def LAZY_RESCALE(self) -> bool:
        """Whether O is rescaled only if a row's maximum has grown a lot: see `hopper.attention_softmax`."""
        return self.COLUMNS > 128

    @property
    def PAIRS(self) -> bool:
        """Whether loops carry two weights in a register. A cap, or a left bound, leaves no registers for that."""
        return not (self.LEFT or self.CAPPED)


@dataclass(frozen=True, kw_only=True)
class PortableAttentionConfig(AttentionConfig):
    """The configuration of the portable kernel."""

    #: D, DV, BLOCK_D, BLOCK_DV: columns of a head of keys and of values, and the next power of two.
    D: int
    DV: int
    BLOCK_D: int
    BLOCK_DV: int
    #: ALIGN, ALIGN_OUT: the common divisors of the strides of q, k and v, and of the output.
    ALIGN: int
    ALIGN_OUT: int
    OFFSETS_64BIT: bool  # whether offsets inside a tile or a block may exceed 31 bits
    #: Whether the scale of scores is known to be positive, so that the largest product is the largest score.
    POSITIVE: bool
    PRECISION: str  # the precision of products: ``"tf32"`` or ``"ieee"``
    #: Whether 8-bit q and k are converted to float16 for the matrix units. P and V always are.
    CONVERT: bool


@dataclass(frozen=True)
class Columns:
    """CDNA's partition of a head's columns into tiles of shared memory."""

    #: PARTS, WIDTH, REST: the number of parts, the columns of a part, the head's columns in the last part.
    PARTS: int
    WIDTH: int
    REST: int
    SWIZZLE: tuple[int, int, int]  # ``(vector, every, period)`` of `tilestream.core.swizzle`
    LANE: int  # elements of a lane in a direct copy; 0: no direct copies

    @property
    def COLUMNS(self) -> int:
        """The columns of a head."""
        return (self.PARTS - 1) * self.WIDTH + self.REST


@dataclass(frozen=True, kw_only=True)
class CdnaAttentionConfig(AttentionConfig):
    """The configuration of the CDNA kernel."""

    #: STAGES, DIRECT: stages of keys and values, and whether copies bypass the registers.
    STAGES: int
    DIRECT: bool
    #: Q, K, V: the columns of queries, keys and values.
    Q: Columns
    K: Columns
    V: Columns
    TRANSPOSED_V: bool  # whether values are transposed in registers
    #: VERSION, SHAPE: the version of the matrix instruction's layout; its M, N, K.
    VERSION: int
    SHAPE: tuple[int, int, int]
    XCDS: int  # dies; neighbouring program ids are on different dies
    #: Q_64BIT, KEYS_64BIT, OUT_64BIT: whether a tile of queries, of keys, of the output exceeds a buffer's 32-bit
    #: offsets.
    Q_64BIT: bool
    KEYS_64BIT: bool
    OUT_64BIT: bool
    VECTOR_OUT: int  # neighbouring columns of the output in an aligned vector

    @property
    def WARPS(self) -> int:
        """The warps of a workgroup; each has 32 rows."""
        return self.ROWS // self.SHAPE[0]

    @property
    def QUERY_STAGE(self) -> Stage:
        """The stage of a part of queries."""
        return Stage(self.ROWS, self.Q.WIDTH, True, False, self.Q.SWIZZLE, _CELL, self.Q.LANE, self.WARPS)

    @property
    def KEY_STAGE(self) -> Stage:
        """The stage of a part of a block of keys."""
        return Stage(self.BLOCK, self.K.WIDTH, True, False, self.K.SWIZZLE, _CELL, self.K.LANE, self.WARPS)

    @property
    def VALUE_STAGE(self) -> Stage:
        """The stage of a part of a block of values. Its rows are columns of a head."""
        turned = self.TRANSPOSED_V and not self.DIRECT
        return Stage(self.V.WIDTH, self.BLOCK, False, turned, self.V.SWIZZLE, _CELL, self.V.LANE, self.WARPS)

    @property
    def GATHERED(self) -> bool:
        """Whether the rows of a key block are in several pages."""
        return 0 < self.PAGE < self.BLOCK
