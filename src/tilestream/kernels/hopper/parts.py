"""What the parts of Hopper's attention hand each other, by name: its arguments in groups, and its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


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
