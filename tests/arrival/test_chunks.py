"""Chunks and the pivot: invariants 2, *One row*, and 3, *In range*, in the arithmetic."""

from __future__ import annotations

import re
from itertools import combinations_with_replacement, pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from int31 import on_int31
from strategies import TOP, int31
from tilestream.arrival import Chunks
from tilestream.core.chunks import Incoming, chunk_of, pivot_tile


def chunks_of_rows(chunks: Chunks, begin: int, end: int) -> tuple[int, ...]:
    """The chunks that hold rows [begin, end), asked row by row."""
    owner = [c for c in range(chunks.count) for _ in range(*chunks.range_of(c))]
    return tuple(sorted(set(owner[begin:end])))


def every_small_chunking():
    for rows in range(8):
        yield from (Chunks.uniform(rows, size) for size in range(1, 10))
        for count in range(1, 4):
            yield from (Chunks((0, *cuts, rows)) for cuts in combinations_with_replacement(range(rows + 1), count - 1))


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((), "bounds=[]: no chunk; give the first row of each chunk and then the number of rows"),
        ((0,), "bounds=[0]: no chunk; give the first row of each chunk and then the number of rows"),
        ((1, 5), "bounds=[1, 5]: they begin with 1; the first chunk begins at row 0"),
        ((-1, 5), "bounds=[-1, 5]: they begin with -1; the first chunk begins at row 0"),
        ((0, 5, 4), "bounds=[0, 5, 4]: chunk 1 would end at row 4, before its first row 5"),
        ((0, -5), "bounds=[0, -5]: chunk 0 would end at row -5, before its first row 0"),
        ((0, 2**31), "bounds=[0, 2147483648]: 2147483648 rows; rows are counted in 31 bits"),
        ((*range(20), 3), "bounds=[0, 1, 2, 3, ..., 3]: chunk 19 would end at row 3, before its first row 19"),
    ],
)
def test_bad_bounds_are_refused(bounds, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Chunks(bounds)


def test_bad_uniform_chunks_are_refused():
    for size in (0, -1):
        message = f"^rows_per_chunk={size}: a chunk of a uniform arrival has at least one row$"
        with pytest.raises(ValueError, match=message):
            Chunks.uniform(5, size)


@pytest.mark.parametrize(
    ("rows", "size", "bounds"),
    [(10, 4, (0, 4, 8, 10)), (8, 4, (0, 4, 8)), (3, 4, (0, 3)), (1, 1, (0, 1)), (0, 4, (0, 0)), (TOP, TOP, (0, TOP))],
)
def test_uniform_chunks_leave_what_is_left_to_the_last(rows, size, bounds):
    chunks = Chunks.uniform(rows, size)
    assert (chunks.bounds, chunks.rows, chunks.count) == (bounds, rows, len(bounds) - 1)
    assert [chunks.range_of(c) for c in range(chunks.count)] == list(pairwise(bounds))


class TestOneRow:
    def test_every_small_chunking_and_every_range_of_rows(self):
        """A chunk without rows is waited for by no item."""
        for chunks in every_small_chunking():
            for begin, end in product(range(chunks.rows + 1), repeat=2):
                assert chunks.of_rows(begin, end) == chunks_of_rows(chunks, begin, max(begin, end)), (begin, end)

    @given(st.data(), int31(1))
    def test_uniform_and_the_same_bounds_agree_at_any_size(self, data, rows):
        size = data.draw(int31(max(1, rows // 50), TOP))
        uniform = Chunks.uniform(rows, size)
        ragged = Chunks(uniform.bounds)
        begin = data.draw(int31(0, rows - 1))
        end = data.draw(int31(begin, rows))
        assert uniform.of_rows(begin, end) == ragged.of_rows(begin, end)


class TestInRange:
    @given(int31(), int31(1))
    def test_chunk_of_on_int31(self, row, rows_per_chunk):
        chunk = on_int31(chunk_of, row, rows_per_chunk)
        assert chunk * rows_per_chunk <= row < (chunk + 1) * rows_per_chunk

    @given(st.data(), int31(1), int31(1))
    def test_pivot_tile_on_int31_is_a_real_tile(self, data, rows, block):
        begin = data.draw(int31(0, rows))
        end = data.draw(int31(begin, rows))
        num_m = -(-rows // block)
        assert 0 <= on_int31(pivot_tile, begin, end, block, num_m) < num_m

    def test_pivot_tile_on_int31_at_the_edge(self):
        num_m = -(-TOP // 128)
        assert on_int31(pivot_tile, TOP - 1, TOP, 128, num_m) == num_m - 1
        assert on_int31(pivot_tile, TOP - 129, TOP, 128, num_m) == num_m - 1
        assert on_int31(pivot_tile, 5, TOP, TOP, 1) == 0

    def test_pivot_tile_is_the_first_that_begins_in_the_chunk_else_the_one_that_holds_its_first_row(self):
        for chunks in every_small_chunking():
            for block in range(1, 6):
                num_m = -(-chunks.rows // block)
                for pivot in range(chunks.count):
                    if not num_m:
                        continue
                    begin, end = chunks.range_of(pivot)
                    inside = [tile for tile in range(num_m) if begin <= tile * block < end]
                    expected = inside[0] if inside else begin // block % num_m
                    assert chunks.pivot_tile(pivot, block, num_m) == expected, (chunks, block, pivot)


def test_launches_differ_by_where_chunks_begin_and_by_the_first():
    ways = [
        Incoming(Chunks((0, 5, 64))), Incoming(Chunks((0, 9, 64))), Incoming(Chunks((0, 9, 64)), pivot=1),
        Incoming(Chunks.uniform(64, 32)), Incoming(Chunks.uniform(64, 40)), Incoming(Chunks.uniform(64, 32), copied=4),
    ]  # fmt: skip
    assert len({one.chunking for one in ways}) == len(ways)
