"""Copy items: copies of an operand that the kernel makes which reads it.

Copies from outside may not progress beside a kernel that waits for them: copy engines may be busy, streams may run one
after the other, a graph may have to hold everything. Then the kernel copies by itself. Its queue begins with *copy
items*. A worker that takes one copies pieces until none is left. A **piece** is a part of a chunk.

`tilestream_tools.verify.copies.copy_items` is the protocol of a worker before its first tile. `piece_chunk` is a leaf
in the sense of `tilestream.core.integers`; with that module's `part_begin` and `part_size` it gives the words of a
ticket. `Pieces` is the host's description.

Every wait ends (invariant 10): when a worker reaches a tile, all copy items have been taken, so at least one running
worker copies until no piece is left and waits for nothing meanwhile. Any worker may be that one. The workers need not
all run at the same time, since pieces are tickets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tilestream.core.chunks import Chunks
from tilestream.core.grid import INT31
from tilestream.core.integers import cdiv, part_begin, part_size

#: Approximate bytes of a piece: a few rounds of `block`, which take much longer than a ticket and a count.
PIECE_BYTES = 128 * 2**10

#: The largest number of words of a piece: its elements, four to a word, are counted in 31 bits.
PIECE_WORDS = 2**28

#: Words in flight for each thread, in 64 registers where a word has 16 bytes: 32 KiB for four warps. At the measured
#: latency of 4 us that is 8 GB/s a worker: see `tilestream.plan.plan.COPIERS`.
WORDS_A_THREAD = 16

#: The number of entries of `Pieces.table` before the bounds.
HEAD = 5
#: The number of counters before those of the chunks: copy items taken, and pieces taken.
COUNTERS = 2


class CopyArguments(NamedTuple):
    """The copies that a launch makes: tensors, or stand-ins for them; None if it makes none."""

    #: source, target: the operand's source and destination, as words of one size.
    source: Any = None
    target: Any = None
    table: Any = None  # `Pieces.table`
    #: ``int32[COUNTERS + chunks]``: the counters of `copy_items`. All are 0 between two launches.
    words: Any = None
    #: The number of copy items. 0: an earlier launch has taken them.
    copiers: Any = None

    @property
    def pointers(self) -> tuple[Any, ...]:
        """The tensors, in the kernels' order."""
        return self[:4]


NO_COPIES = CopyArguments()


def piece_chunk(ticket: int, per_chunk: int, chunks: int, pivot: int) -> int:
    """The chunk of a piece. Chunks are in order from the pivot; each has ``per_chunk`` pieces."""
    return (pivot + ticket // per_chunk) % chunks


@dataclass(frozen=True)
class Pieces:
    """The pieces of an operand's rows.

    Parameters
    ----------
    chunks, pivot
        The operand's chunks, and the chunk that is copied first.
    row_words
        Words of a row. They have 16 bytes if that divides the row's bytes.
    per_chunk
        Pieces of each chunk. Their sizes differ by at most one word; a chunk without rows has as many empty pieces. So
        each chunk is signalled, and all counts end at the same number.

    Raises
    ------
    ValueError
        If the words of a chunk, or all pieces, exceed 31 bits.
    """

    chunks: Chunks
    pivot: int
    row_words: int
    per_chunk: int

    def __post_init__(self) -> None:
        largest = _largest(self.chunks)
        if largest * self.row_words >= INT31 or self.count >= INT31:
            raise ValueError(
                f"chunks: one of {largest} rows has {largest * self.row_words} words, and there are {self.count} "
                "pieces; both are counted in 31 bits: take smaller chunks, by rows_per_chunk= or bounds="
            )

    @classmethod
    def of(cls, chunks: Chunks, pivot: int, row_words: int, word_bytes: int) -> Pieces:
        """Pieces of about `PIECE_BYTES` on average.

        Each chunk has the same number of pieces, so larger chunks have larger pieces. With a number that suits the
        largest chunk, small chunks would have tiny pieces, each of which costs a ticket and a count. So there are at
        most ``bytes / PIECE_BYTES + chunks.count`` pieces, unless one would exceed `PIECE_WORDS`.
        """
        mean = cdiv(chunks.rows * row_words * word_bytes, chunks.count * PIECE_BYTES)
        return cls(chunks, pivot, row_words, max(1, mean, cdiv(_largest(chunks) * row_words, PIECE_WORDS)))

    @property
    def count(self) -> int:
        """The number of all pieces."""
        return self.chunks.count * self.per_chunk

    def chunk(self, piece: int) -> int:
        """The chunk of a piece."""
        return piece_chunk(piece, self.per_chunk, self.chunks.count, self.pivot)

    def words(self, piece: int) -> range:
        """The words of a piece, counted from the operand's first."""
        begin, end = self.chunks.range_of(self.chunk(piece))
        size, part = (end - begin) * self.row_words, piece % self.per_chunk
        first = begin * self.row_words + part_begin(size, self.per_chunk, part)
        return range(first, first + part_size(size, self.per_chunk, part))

    def table(self) -> list[int]:
        """The pieces as the kernel reads them: `HEAD` numbers, then the bounds of the chunks."""
        return [self.count, self.per_chunk, self.chunks.count, self.pivot, self.row_words, *self.chunks.bounds]


def _largest(chunks: Chunks) -> int:
    """Rows of the largest chunk."""
    return max(end - begin for begin, end in zip(chunks.bounds, chunks.bounds[1:], strict=False))


def word_bytes(row_bytes: int) -> int:
    """Bytes of the widest word, at most 16, that divides ``row_bytes``."""
    size = 16
    while row_bytes % size:
        size //= 2
    return size


def word_dtype(word_bytes: int) -> str:
    """The dtype of a word's elements. A word of 16 bytes has four, others one."""
    return {16: "int32", 8: "int64", 4: "int32", 2: "int16", 1: "int8"}[word_bytes]


def vector(word_bytes: int) -> int:
    """Elements of a word: four of int32 for 16 bytes, else one."""
    return 4 if word_bytes == 16 else 1


def block(warps: int, word_bytes: int) -> int:
    """Elements that a worker copies in one round."""
    return 32 * warps * WORDS_A_THREAD * vector(word_bytes)
