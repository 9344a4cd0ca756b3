"""What the parts of the Hopper GEMM hand each other, by name: a kernel's arguments in groups, and its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Config:
    """All that is compiled in. ``rows`` and ``columns`` are the accumulator's."""

    ROWS: int
    WIDTHS: tuple[int, ...]
    BLOCK_K: int
    STAGES: int
    STRIP: int
    BUFFERS: int
    X_K_MAJOR: bool
    Y_K_MAJOR: bool
    BATCHED: bool
    SWAPPED: bool
    KIND: str
    SPLIT: str
    STEAL: bool
    ORDER: str
    TRANSPOSED: bool
    CONSUMERS: str
    PROMOTE: bool
    LOAD_REGISTERS: int
    MATH_REGISTERS: int
    STORE: str
    FLIPPED: bool
    WIDE: bool
    EIGHTS: bool
    SCALED: bool
    SCALES: bool
    BIAS: str
    RESIDUAL: bool
    ACTIVATION: str
    CHAINED: bool
    ROW_CHUNKS: str
    COLUMN_CHUNKS: str
    COPIES: str
    COPY_BLOCK: int
    COPY_VECTOR: int
    PROBE: bool
    TRACE: bool
    PUBLISH: str
    APART: bool

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
    def COLUMNS(self) -> int:
        """Columns of a tile."""
        return sum(self.WIDTHS)

    @property
    def GATED(self) -> bool:
        """Whether an operand arrives."""
        return self.ROW_CHUNKS != "none" or self.COLUMN_CHUNKS != "none"

    @property
    def ASKS(self) -> bool:
        """Whether tickets are asked for ahead."""
        return self.KIND == "dynamic" and not self.GATED

    @property
    def FULL(self) -> bool:
        """Whether an epilogue keeps vectors or a residual."""
        return self.SCALED or self.SCALES or self.BIAS != "none" or self.RESIDUAL


class Matrix(NamedTuple):
    """A matrix in global memory, and its strides."""

    at: Any
    batch: Any
    row: Any
    column: Any


class Vector(NamedTuple):
    """A vector a batch, and its strides."""

    at: Any
    batch: Any
    step: Any


class Epilogue(NamedTuple):
    """What a tile's accumulator becomes, and where it goes."""

    map: Any
    buffers: Any
    out: Any
    residual: Any
    bias: Any
    row_scale: Any
    column_scale: Any
    alpha: Any
    beta: Any
    rows: Any
    columns: Any


class Work(NamedTuple):
    """The schedule."""

    batches: Any
    num_m: Any
    num_n: Any
    k_steps: Any
    full_tiles: Any
    shares: Any
    units: Any
    queues: Any
    table: Any
    group: Any
    first: Any
    band: Any
    first_batch: Any


class Words(NamedTuple):
    """The launch's words, and its log."""

    counters: Any
    base: Any
    reset: Any
    probe: Any
    capacity: Any


class Loads(NamedTuple):
    """Where operands come from."""

    x: Any
    y: Any
    apart: Any
    x_batched: Any
    y_batched: Any


class Ring(NamedTuple):
    """Stages, and their barriers."""

    x: Any
    y: Any
    full: Any
    empty: Any


class Items(NamedTuple):
    """The item ring."""

    slots: Any
    full: Any
    empty: Any


@dataclass(frozen=True)
class AttentionConfig:
    """All of attention that is compiled in."""

    CONSUMERS: int
    PACK: int
    PARTS: int
    BLOCK: int
    COLUMNS: int
    STAGES: int
    QUERIES: int
    BUFFERS: int
    KIND: str
    ORDER: str
    PAGE: int
    RAGGED_Q: bool
    RAGGED_K: bool
    SPLIT: bool
    TOP_LEFT: bool
    LEFT: bool
    RIGHT: bool
    CAPPED: bool
    OWN: bool
    ORDERED: bool
    KEYS: str
    CHAINED: bool
    TRACE: bool
    SCALED: bool
    SCALES: tuple[int, ...]
    MATH_REGISTERS: int
    LOAD_REGISTERS: int
    CONVERT_REGISTERS: int

    @property
    def ARRIVING(self) -> bool:
        """Whether keys arrive."""
        return self.KEYS != "none"


class AttentionRing(NamedTuple):
    """Stages of queries, keys and values, and their barriers."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any


class AttentionItems(NamedTuple):
    """The item ring, what a trace and scales add to it."""

    slots: Any
    full: Any
    empty: Any
    places: Any
    scales: Any


class Scores(NamedTuple):
    """What is done to scores, and comes of them."""

    scale: Any
    inner: Any
    sinks: Any
    lse: Any


class At(NamedTuple):
    """Where a consumer stands."""

    stage: Any
    phase: Any
    turn: Any


class Sums(NamedTuple):
    """Online softmax: sums, the weights of the block before, largest scores, totals."""

    o: Any
    p: Any
    top: Any
    total: Any


class Mask(NamedTuple):
    """Which keys the rows of a consumer see."""

    position: Any
    keys: Any
    until: Any
    since: Any


class Source(NamedTuple):
    """Where queries, keys and values come from."""

    q_map: Any
    k_map: Any
    v_map: Any
    starts: Any
    order_of: Any
    sequences: Any
    cu_queries: Any
    cu_keys: Any
    lengths: Any
    table: Any
    table_stride: Any
    rows_q: Any
    rows_k: Any
    queries: Any
    keys: Any
    columns: Any
    shared_by: Any
    left: Any
    right: Any
    batch_rows_k: Any
    batch_rows_v: Any
    page_rows_k: Any
    page_rows_v: Any
    stride_lb: Any
    stride_lh: Any
    stride_lr: Any
    shares: Any
    scale_q: Any
    scale_k: Any
    scale_v: Any


class AttentionWork(NamedTuple):
    """The schedule's words and numbers."""

    counters: Any
    base: Any
    reset: Any
    tiles: Any
    num_m: Any
    num_n: Any
    group: Any
    log: Any


class Item(NamedTuple):
    """A work item."""

    batch: Any
    pm: Any
    pn: Any
    k_begin: Any
    k_end: Any
    part: Any
    parts: Any
    partial: Any


class Cursor(NamedTuple):
    """Where a worker stands in the schedule, and at its gate."""

    ticket: Any
    source: Any
    share: Any
    unit: Any
    unit_end: Any
    queue: Any
    empty: Any
    noted: Any
    asked: Any
    carried: Any


class Place(NamedTuple):
    """Where a loop stands in a ring."""

    at: Any
    phase: Any
