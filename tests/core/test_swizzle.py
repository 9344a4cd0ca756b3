"""The swizzle: a bijection of every row, without bank conflicts, and the very map that the layouts of Gluon have."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from int31 import on_int31
from strategies import int31
from tilestream.core.swizzle import BANK, BANKS, Swizzle, swizzled

#: Head dims, and widths of a stage of a GEMM.
WIDTHS = (*range(16, 257, 8), 512)
SIZES = (1, 2, 4)
LANES = (4, 8, 16)
ROWS = [
    (width, size, lane, banks)
    for width, size, lane, banks in itertools.product(WIDTHS, SIZES, LANES, sorted(set(BANKS.values())))
    if width * size % lane == 0
]


def conflicts(swizzle, row_bytes, itemsize, rows, column, banks):
    """How often the bank that is met most is met when lanes read the cell of ``column`` in ``rows``, one each."""
    met = {}
    for row in rows:
        first = row * row_bytes + swizzle.place(row, column // swizzle.vector * swizzle.vector) * itemsize
        for at in range(first, first + swizzle.vector * itemsize, BANK):
            met.setdefault(at // BANK % banks, set()).add(at // BANK)
    return max(map(len, met.values()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_row_is_permuted_and_back_and_lanes_down_a_column_meet_no_bank_twice(width, size):
    for _, _, lane, banks in (row for row in ROWS if row[:2] == (width, size)):
        swizzle, at_once = Swizzle.of_row(width * size, lane, banks, size), banks * BANK // lane
        swizzle.check(width)
        for row in range(2 * swizzle.every * swizzle.period):
            places = [swizzle.place(row, column) for column in range(width)]
            assert sorted(places) == list(range(width))
            assert [swizzle.place(row, place) for place in places] == list(range(width))
        for first in (0, at_once, 3 * at_once):
            for column in range(0, width, swizzle.vector):
                assert conflicts(swizzle, width * size, size, range(first, first + at_once), column, banks) == 1


def test_without_it_they_do():
    # The count is one: of rows as wide as the banks every lane meets the same ones.
    plain = Swizzle(8, 1)
    assert conflicts(plain, 128, 2, range(8), 0, 32) == 8
    assert conflicts(plain, 192, 2, range(8), 0, 32) == 4
    assert conflicts(Swizzle.of_row(128, 16, 32, 2), 128, 2, range(8), 0, 32) == 1
    # Of two rows that lie side by side under the banks, one number for each is one too many.
    assert conflicts(Swizzle(8, 4, 0), 64, 2, range(8), 0, 32) == 2


@pytest.mark.parametrize(
    ("row_bytes", "lane", "banks", "size", "expected"),
    [
        (128, 16, 32, 2, Swizzle(8, 8, 0)),  # TMA, 128 bytes: the chunk's index, exclusive or the row mod 8
        (64, 16, 32, 2, Swizzle(8, 4, 1)),  # TMA, 64 bytes; 32 of K on gfx942
        (32, 16, 32, 2, Swizzle(8, 2, 2)),  # TMA, 32 bytes
        (128, 16, 64, 2, Swizzle(8, 8, 1)),  # 64 of K on gfx950
        (128, 16, 64, 1, Swizzle(16, 8, 1)),
        (256, 16, 64, 2, Swizzle(8, 16, 0)),
        (192, 16, 32, 2, Swizzle(8, 4, 1)),  # head dim 96: the period divides 12 cells
        (192, 8, 32, 2, Swizzle(4, 8, 1)),  # and 24
        (384, 16, 32, 2, Swizzle(8, 8, 0)),  # head dim 192: and 24 again
        (384, 16, 64, 2, Swizzle(8, 8, 1)),
        (48, 16, 32, 2, Swizzle(8, 1, 3)),  # an odd number of cells: the rows themselves go round the banks
    ],
)
def test_what_is_derived(row_bytes, lane, banks, size, expected):
    assert Swizzle.of_row(row_bytes, lane, banks, size) == expected


def test_one_period_does_not_fit_all():
    assert not Swizzle(4, 16).fits(96), "16 does not divide 24 cells"
    with pytest.raises(ValueError, match=r"a row of 96 elements; .* of a multiple of 64: take `Swizzle.of_row`"):
        Swizzle(4, 16).check(96)
    places = {Swizzle(4, 16).place(row, column) for row in range(16) for column in range(96)}
    assert max(places) >= 96, "and what does not fit leaves the row"


@given(int31(), int31(), st.integers(0, 30), st.integers(0, 30))
def test_twice_is_once_undone(row, cell, shift, period):
    there = on_int31(swizzled, row, cell, 2**shift, 2**period)
    assert on_int31(swizzled, row, there, 2**shift, 2**period) == cell
    assert cell // 2**period == there // 2**period, "it stays among the cells of its period"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Swizzle(0, 1), "a cell has an element at least"),
        (lambda: Swizzle(8, 8, -1), "shift is not negative"),
        (lambda: Swizzle(8, 12), "period=12; .* so it is a power of two"),
        (lambda: Swizzle(8, 0), "period=0"),
        (lambda: Swizzle.of_row(24, 16, 32, 1), "lane_bytes=16: rows of 24 bytes .* take fewer bytes a lane"),
        (lambda: Swizzle.of_row(64, 2, 32, 4), "lane_bytes=2: rows of 64 bytes of 4-byte elements"),
        (lambda: Swizzle.of_row(48, 24, 32, 1), "lane_bytes=24, banks=32: .* 128 bytes wide"),
        (lambda: Swizzle.of_row(96, 16, 48, 1), "banks=48: the banks are a power of two"),
    ],
)
def test_what_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# Gluon's own maps ----------------------------------------------------------------------------------------------------

POWERS = [row for row in ROWS if row[0] & (row[0] - 1) == 0 and row[2] >= row[1]]


@pytest.mark.parametrize(("width", "size", "lane", "banks"), POWERS)
def test_it_is_the_map_of_a_swizzled_layout(width, size, lane, banks):
    gl = pytest.importorskip("triton.experimental.gluon.language")
    from layouts import elements

    swizzle = Swizzle.of_row(width * size, lane, banks, size)
    rows = 2 * swizzle.every * swizzle.period
    layout = gl.SwizzledSharedLayout(swizzle.vector, swizzle.every, swizzle.period, [1, 0])
    found = elements(layout, [rows, width])
    assert found == [(at // width, swizzle.place(at // width, at % width)) for at in range(rows * width)]


@pytest.mark.parametrize(("row_bytes", "size"), [*itertools.product((32, 64, 128), (1, 2))])
def test_it_is_the_map_of_tma(row_bytes, size):
    gl = pytest.importorskip("triton.experimental.gluon.language")
    from layouts import elements

    width = row_bytes // size
    swizzle = Swizzle.of_row(row_bytes, 16, BANKS["sm_90"], size)
    found = elements(gl.NVMMASharedLayout(row_bytes, 8 * size, 2), [64, width])
    assert found == [(at // width, swizzle.place(at // width, at % width)) for at in range(64 * width)]
