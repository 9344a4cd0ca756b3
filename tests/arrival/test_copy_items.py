"""Copy items: which words a piece is made of.

The text of a worker before its first tile is explored by ``tilestream verify``: see `tilestream_tools.verify.copies`.
"""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import chunkings
from tilestream.core.chunks import Chunks
from tilestream.core.copy_items import HEAD, PIECE_BYTES, Pieces, block, vector, word_bytes


@st.composite
def cut(draw) -> Pieces:
    chunks = draw(chunkings(draw(st.integers(0, 30))))
    pivot = draw(st.integers(0, chunks.count - 1))
    return Pieces(chunks, pivot, draw(st.integers(0, 9)), draw(st.integers(1, 7)))


@given(cut())
def test_every_word_is_in_one_piece_and_chunks_go_in_order_from_the_pivot(pieces):
    seen: list[int] = []
    for piece in range(pieces.count):
        begin, end = pieces.chunks.range_of(pieces.chunk(piece))
        words = pieces.words(piece)
        assert begin * pieces.row_words <= words.start <= words.stop <= end * pieces.row_words
        seen += words
    assert sorted(seen) == list(range(pieces.chunks.rows * pieces.row_words))
    order = [pieces.chunk(piece) for piece in range(0, pieces.count, pieces.per_chunk)]
    assert order == [(pieces.pivot + i) % pieces.chunks.count for i in range(pieces.chunks.count)]
    assert all(pieces.chunk(piece) == order[piece // pieces.per_chunk] for piece in range(pieces.count))


@given(cut())
def test_the_table_says_all_of_it(pieces):
    table = pieces.table()
    bounds = table[HEAD:]
    again = Pieces(Chunks(tuple(bounds)), table[3], table[4], table[1])
    assert (again.count, again.chunks.count) == (table[0], table[2])
    assert [again.words(piece) for piece in range(again.count)] == [pieces.words(p) for p in range(pieces.count)]


@pytest.mark.parametrize(
    ("row_bytes", "size"), [(16384, 16), (0, 16), (1000, 8), (404, 4), (406, 2), (7, 1)],
)  # fmt: skip
def test_the_widest_word(row_bytes, size):
    assert word_bytes(row_bytes) == size
    assert block(4, size) % (32 * 4 * vector(size)) == 0


def test_pieces_of_about_their_size():
    chunks = Chunks.uniform(16384, 512)
    pieces = Pieces.of(chunks, 0, 16384 // 16, 16)
    assert pieces.per_chunk == 64
    assert len(pieces.words(0)) * 16 == PIECE_BYTES
    assert Pieces.of(Chunks((0, 0)), 0, 8, 16).count == 1, "a chunk without rows is signalled, too"


@pytest.mark.parametrize("sizes", [(131072, *63 * (128,)), (262144, *512 * (64,)), (65536, *8 * (0,)), 4 * (1000,)])
@pytest.mark.parametrize("row_bytes", [8192, 16])
def test_chunks_of_unlike_sizes_make_no_crumbs(sizes, row_bytes):
    chunks = Chunks(tuple(itertools.accumulate(sizes, initial=0)))
    pieces = Pieces.of(chunks, 0, row_bytes // 16, 16)
    assert pieces.count <= chunks.rows * row_bytes / PIECE_BYTES + chunks.count


@pytest.mark.parametrize("empty", [0, 1, 2**16 - 1])
def test_the_elements_of_a_piece_are_counted_in_31_bits(empty):
    chunks = Chunks((0, *[2**27 - 1] * (empty + 1)))
    pieces = Pieces.of(chunks, 0, 16, 16)
    assert 0 < max(len(pieces.words(piece)) for piece in range(pieces.per_chunk)) * vector(16) + block(8, 16) < 2**31


@pytest.mark.parametrize("rows", [2**30, 2**31 - 1])
def test_what_is_counted_in_31_bits(rows):
    with pytest.raises(ValueError, match=f"^{re.escape(f'chunks: one of {rows} rows has {rows * 2} words')}"):
        Pieces(Chunks.uniform(rows, rows), 0, 2, 1)
