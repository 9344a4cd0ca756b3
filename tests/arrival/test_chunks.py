"""Chunks and the pivot: invariants 2, *One row*, and 3, *In range*, in the arithmetic."""

from __future__ import annotations

import re
from itertools import combinations_with_replacement, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from int31 import on_int31
from strategies import TOP, chunkings, int31
from tilestream.arrival import Chunks
from tilestream.core.chunks import chunk_of, pivot_tile


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


@pytest.mark.parametrize("size", [0, -1])
def test_bad_uniform_chunks_are_refused(size):
    message = f"rows_per_chunk={size}: a chunk of a uniform arrival has at least one row"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
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
        for chunks in every_small_chunking():
            for begin in range(chunks.rows + 1):
                for end in range(chunks.rows + 1):
                    assert chunks.of_rows(begin, end) == chunks_of_rows(chunks, begin, max(begin, end)), (
                        chunks,
                        begin,
                        end,
                    )

    @given(st.integers(0, 500).flatmap(chunkings), st.data())
    def test_of_rows_equals_asking_each_row(self, chunks, data):
        begin = data.draw(st.integers(0, chunks.rows))
        end = data.draw(st.integers(begin, chunks.rows))
        assert chunks.of_rows(begin, end) == chunks_of_rows(chunks, begin, end)

    @given(st.data(), int31(1))
    def test_uniform_and_the_same_bounds_agree_at_any_size(self, data, rows):
        size = data.draw(int31(max(1, rows // 50), TOP))
        uniform = Chunks.uniform(rows, size)
        ragged = Chunks(uniform.bounds)
        begin = data.draw(int31(0, rows - 1))
        end = data.draw(int31(begin, rows))
        assert uniform.of_rows(begin, end) == ragged.of_rows(begin, end)

    def test_chunks_without_rows_are_waited_for_by_nobody(self):
        chunks = Chunks((0, 0, 2, 2, 2, 5, 5))
        assert [chunks.of_rows(row, row + 1) for row in range(5)] == [(1,), (1,), (4,), (4,), (4,)]
        assert chunks.of_rows(0, 5) == (1, 4)

    def test_no_rows_need_no_chunk(self):
        assert Chunks((0, 5)).of_rows(3, 3) == Chunks.uniform(5, 2).of_rows(3, 3) == ()


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

    def test_the_raster_s_first_tile_needs_the_pivot(self):
        for chunks in every_small_chunking():
            for block in range(1, 6):
                for pivot in range(chunks.count):
                    begin, end = chunks.range_of(pivot)
                    if begin < end:
                        tile = chunks.pivot_tile(pivot, block, -(-chunks.rows // block))
                        assert pivot in chunks.of_rows(tile * block, min(tile * block + block, chunks.rows))

    @pytest.mark.parametrize(
        "wrong",
        [
            lambda begin, end, block, num_m: -(-begin // block),  # past the end of a ragged tail
            lambda begin, end, block, num_m: begin // block,  # straddles: also waits for the chunk before
        ],
    )
    def test_a_wrong_pivot_tile_is_found(self, wrong):
        begin, end, block, num_m = 9, 10, 4, 3
        straddled = wrong(5, 10, block, num_m) != pivot_tile(5, 10, block, num_m)
        outside = not 0 <= wrong(begin, end, block, num_m) < num_m
        assert straddled or outside
