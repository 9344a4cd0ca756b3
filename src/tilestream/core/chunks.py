"""Chunks: which rows arrive together, and which chunks a range of rows needs.

`chunk_of`, `rows_in` and `pivot_tile` are leaves in the sense of `tilestream.core.integers`; `Chunks` is what the
host knows.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, runtime_checkable

from tilestream.core.grid import INT31

#: Chunks of an arrival: the host keeps a few words of each.
MOST_CHUNKS = 2**24

#: Bytes a second of one copy from pinned memory over PCIe 5.0 (16 lanes): benchmarks/results/h100/stream.json, 268 MB
#: in 4.84 ms.
LINK_BYTES = 55e9


def chunk_of(row: int, rows_per_chunk: int) -> int:
    """The chunk that brings ``row``, where all chunks but the last bring ``rows_per_chunk`` rows."""
    return row // rows_per_chunk


def rows_in(begin: int, end: int, chunk: int, rows_per_chunk: int) -> int:
    """How many of the rows [begin, end) a chunk brings, one of those that they are in."""
    return min(end, (chunk + 1) * rows_per_chunk) - max(begin, chunk * rows_per_chunk)


def pivot_tile(row_begin: int, row_end: int, block_m: int, num_m: int) -> int:
    """The row tile a raster starts from when the chunk of rows [row_begin, row_end) is the pivot.

    The first tile that begins inside the chunk: a tile that straddles its beginning also waits for the chunk before,
    so it comes last, not first. Where no tile begins inside (a chunk smaller than a tile), the tile that holds the
    chunk's first row. Always in [0, num_m).
    """
    tile = row_begin // block_m
    before = row_begin % block_m  # rows of that tile that lie before the chunk
    if before > 0 and block_m - before < row_end - row_begin:
        tile = tile + 1
    return tile % num_m


@dataclass(frozen=True)
class Chunks:
    """``rows`` rows in chunks: ``bounds[c]`` to ``bounds[c + 1]`` are the rows of chunk ``c``.

    Chunks may have any number of rows, none included: no item waits for a chunk without rows.

    Parameters
    ----------
    bounds
        First row of each chunk, then the number of rows: from 0, never falling.
    rows_per_chunk
        The rows of each chunk but the last where they are all alike, else 0. Set by `uniform`.

    Raises
    ------
    ValueError
        If there is no chunk, or the bounds do not begin at 0 or fall.
    """

    bounds: tuple[int, ...]
    rows_per_chunk: int = 0

    def __post_init__(self) -> None:
        bounds = f"bounds={_short(self.bounds)}"
        if len(self.bounds) < 2:
            raise ValueError(f"{bounds}: no chunk; give the first row of each chunk and then the number of rows")
        if self.bounds[0] != 0:
            raise ValueError(f"{bounds}: they begin with {self.bounds[0]}; the first chunk begins at row 0")
        for c, (begin, end) in enumerate(pairwise(self.bounds)):
            if end < begin:
                raise ValueError(f"{bounds}: chunk {c} would end at row {end}, before its first row {begin}")
        if self.rows >= INT31:
            raise ValueError(f"{bounds}: {self.rows} rows; rows are counted in 31 bits")

    @classmethod
    def uniform(cls, rows: int, rows_per_chunk: int) -> Chunks:
        """``rows`` rows, ``rows_per_chunk`` to a chunk; the last chunk has what is left."""
        if rows_per_chunk < 1:
            raise ValueError(f"rows_per_chunk={rows_per_chunk}: a chunk of a uniform arrival has at least one row")
        if rows // rows_per_chunk >= MOST_CHUNKS:
            raise ValueError(f"rows_per_chunk={rows_per_chunk}: {rows} rows have at most {MOST_CHUNKS} chunks")
        return cls((*range(0, max(rows, 1), rows_per_chunk), rows), rows_per_chunk)

    @property
    def rows(self) -> int:
        """Rows of all chunks."""
        return self.bounds[-1]

    @property
    def count(self) -> int:
        """Number of chunks."""
        return len(self.bounds) - 1

    def range_of(self, chunk: int) -> tuple[int, int]:
        """First row of ``chunk``, and the row behind its last."""
        return self.bounds[chunk], self.bounds[chunk + 1]

    def of_rows(self, begin: int, end: int) -> tuple[int, ...]:
        """The chunks that bring rows [begin, end), in order; those without rows left out (invariant 2, *One row*)."""
        if begin >= end:
            return ()
        if self.rows_per_chunk:
            return tuple(range(chunk_of(begin, self.rows_per_chunk), chunk_of(end - 1, self.rows_per_chunk) + 1))
        first = bisect_right(self.bounds, begin) - 1
        last = bisect_right(self.bounds, end - 1) - 1
        return tuple(c for c in range(first, last + 1) if self.bounds[c] < self.bounds[c + 1])

    def pivot_tile(self, pivot: int, block: int, num_tiles: int) -> int:
        """The row tile of ``block`` rows to start from when chunk ``pivot`` is the pivot; see `pivot_tile`."""
        return pivot_tile(*self.range_of(pivot), block, num_tiles)


@dataclass(frozen=True)
class Incoming:
    """An operand that arrives, as a plan knows it."""

    #: chunks, pivot: its chunks, and the one that the raster starts from.
    chunks: Chunks
    pivot: int = 0
    #: Bytes of the words in which the kernel may make the copies itself; 0 where something else makes them.
    copied: int = 0
    own_words: bool = False  # of an output's chunks: whether they are signalled by words of the caller's own
    #: Whether a `tilestream.Stream` has a copy engine bring them, at `LINK_BYTES` a second at most.
    linked: bool = False

    @property
    def chunking(self) -> tuple[object, ...]:
        """What a launch depends on: not the epoch, nor the signals."""
        return self.pivot, self.chunks.count, self.chunks.rows_per_chunk or self.chunks.bounds, self.copied, self.linked


@runtime_checkable
class Arriving(Protocol):
    """What a plan must know of an arrival: `tilestream.Arrival` is one."""

    def incoming(self, rows: int) -> Incoming:
        """How an operand of ``rows`` rows arrives."""

    def published(self, rows: int) -> Incoming:
        """How the chunks of an output of ``rows`` rows are signalled."""


@functools.lru_cache(maxsize=256)
def chunks_of(
    rows: int, num_chunks: int, rows_per_chunk: int, bounds: tuple[int, ...], argument: str = "arrival",
    whose: str = "the input",
) -> Chunks:  # fmt: skip
    """The chunks described by an arrival's integers, checked against the rows that they are of."""
    if not rows_per_chunk:
        chunks = Chunks(bounds)
        if chunks.rows != rows:
            raise ValueError(
                f"{argument}: its bounds end at row {chunks.rows}, {whose} has {rows} rows; the last bound is the "
                "number of rows"
            )
        return chunks
    chunks = Chunks.uniform(rows, rows_per_chunk)
    if chunks.count != num_chunks:
        raise ValueError(
            f"{argument}: {num_chunks} chunks of {rows_per_chunk} rows bring {(num_chunks - 1) * rows_per_chunk + 1} "
            f"to {num_chunks * rows_per_chunk} rows, {whose} has {rows}; it takes num_chunks={chunks.count}"
        )
    return chunks


def _short(bounds: Sequence[int]) -> str:
    return str(list(bounds)) if len(bounds) <= 8 else f"[{', '.join(map(str, bounds[:4]))}, ..., {bounds[-1]}]"
