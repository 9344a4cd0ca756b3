"""Invariant 3, *In range*: every raster is a bijection on the real tiles; and each keeps the order it promises."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from int31 import on_int31
from strategies import TOP, int31, planes
from tilestream.core import raster
from tilestream.schedule import Grid, Raster

# Positions of a tile, written from the other side: how many tiles come before it. What `raster` is compared with.


def before_row_major(pm, pn, num_m, num_n):
    return pm * num_n + pn


def before_grouped(pm, pn, num_m, num_n, group):
    top = pm - pm % group
    return top * num_n + pn * (min(top + group, num_m) - top) + pm - top


def before_chunk_major(pm, pn, num_m, num_n, first, band, group):
    base, rows = (first, num_m - first) if pm >= first else (0, first)
    skipped = 0 if pm >= first else (num_m - first) * num_n
    begin = (pm - base) // band * band
    height = min(rows, begin + band) - begin
    return skipped + begin * num_n + before_grouped(pm - base - begin, pn, height, num_n, group)


def before_longest_first(pm, pn, num_m, num_n, group):
    left = pn - pn % group
    cols = min(left + group, num_n) - left
    return left * num_m + (num_m - 1 - pm) * cols + pn - left


PARAMETERS = {  # the raster's parameters, as functions of the grid: all of them, for small grids
    "row_major": lambda m, n: [()],
    "grouped": lambda m, n: product(range(1, m + 3)),
    "chunk_major": lambda m, n: product(range(m), range(1, m + 2), range(1, m + 2)),
    "longest_first": lambda m, n: product(range(1, n + 3)),
}
BEFORE = {
    "row_major": before_row_major,
    "grouped": before_grouped,
    "chunk_major": before_chunk_major,
    "longest_first": before_longest_first,
}


def is_bijection(leaf, num_m, num_n, *parameters):
    tiles = [leaf(t, num_m, num_n, *parameters) for t in range(num_m * num_n)]
    return sorted(tiles) == list(product(range(num_m), range(num_n)))


class TestInRange:
    @pytest.mark.parametrize("most", [(6, 6), pytest.param((13, 11), marks=pytest.mark.slow)])
    @pytest.mark.parametrize("order", PARAMETERS)
    def test_every_small_raster_is_a_bijection_and_where_counting_puts_it(self, order, most):
        leaf, before = getattr(raster, order), BEFORE[order]
        for num_m, num_n in product(range(1, most[0] + 1), range(1, most[1] + 1)):
            for parameters in PARAMETERS[order](num_m, num_n):
                assert is_bijection(leaf, num_m, num_n, *parameters), (num_m, num_n, parameters)
                for t in range(num_m * num_n if num_m * num_n <= 25 else 0):
                    assert before(*leaf(t, num_m, num_n, *parameters), num_m, num_n, *parameters) == t

    @given(st.data(), planes(), st.sampled_from(sorted(BEFORE)))
    def test_large_rasters_on_int31(self, data, plane, order):
        num_m, num_n = plane
        # The products group * num_n, band * num_n and group * num_m are formed: a group beyond the grid is of no use.
        ranges = {
            "row_major": (), "grouped": ((1, num_m),), "chunk_major": ((0, num_m - 1), (1, num_m), (1, num_m)),
            "longest_first": ((1, num_n),),
        }[order]  # fmt: skip
        parameters = [data.draw(int31(*ends)) for ends in ranges]
        t = data.draw(int31(0, num_m * num_n - 1))
        pm, pn = on_int31(getattr(raster, order), t, num_m, num_n, *parameters)
        assert 0 <= pm < num_m
        assert 0 <= pn < num_n
        assert BEFORE[order](pm, pn, num_m, num_n, *parameters) == t

    @pytest.mark.parametrize(
        ("leaf", "wrong"),
        [
            ("grouped", lambda t, num_m, num_n, group: (t // num_n, t % num_n + t % group)),
            # Triton's tutorial without the min(): the last group is taken for a whole one.
            (
                "grouped",
                lambda t, num_m, num_n, group: (t // (group * num_n) * group + t % group, t % (group * num_n) // group),
            ),
            # A pivot that wraps around whole bands, though the last band is short.
            (
                "chunk_major",
                lambda t, num_m, num_n, first, band, group: ((t // num_n + first) // band * band % num_m, t % num_n),
            ),
        ],
    )
    def test_a_wrong_raster_is_found(self, leaf, wrong):
        assert not all(
            is_bijection(wrong, m, n, *parameters)
            for m, n in product(range(1, 5), repeat=2)
            for parameters in PARAMETERS[leaf](m, n)
        )

    @given(planes(), int31(1), int31(1), st.sampled_from(["grouped", "chunk_major", "longest_first"]), st.booleans())
    def test_a_raster_is_refused_or_stays_in_31_bits(self, plane, group, band, order, transposed):
        chosen = Raster(order, group=group, band=band, transposed=transposed)
        num_m, num_n = plane[::-1] if transposed else plane
        parameters = {"chunk_major": (0, band, group)}.get(order, (group,))
        last = num_m * num_n - 1
        others = num_m if order == "longest_first" else num_n
        if max(group, band) * others > TOP:
            with pytest.raises(ValueError, match=f"group={group}, band={band} for {plane[0]} x {plane[1]} tiles"):
                chosen.check(Grid(1, *plane))
        else:
            chosen.check(Grid(1, *plane))
            tile = on_int31(getattr(raster, order), last, num_m, num_n, *parameters)
            assert chosen.tile(last, *plane) == (tile[::-1] if transposed else tile)


class TestOrder:
    """By hand: the rest of each order follows from `BEFORE`, with which every small raster is compared."""

    def test_grouped(self):
        order = [raster.grouped(t, 3, 2, 2) for t in range(6)]
        assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]

    def test_chunk_major_s_bands_are_those_of_its_docstring(self):
        assert [raster.chunk_major(t, 5, 1, 2, 2, 1)[0] for t in range(5)] == [2, 3, 4, 0, 1]
        bands = [
            sorted({raster.chunk_major(t, 5, 3, 2, 2, 2)[0] for t in span})
            for span in (range(6), range(6, 9), range(9, 15))
        ]
        assert bands == [[2, 3], [4], [0, 1]]

    def test_longest_first(self):
        order = [raster.longest_first(t, 2, 3, 2) for t in range(6)]
        assert order == [(1, 0), (1, 1), (0, 0), (0, 1), (1, 2), (0, 2)]

    @given(st.data(), planes(), st.sampled_from(["row_major", "grouped", "chunk_major", "longest_first"]))
    def test_transposed_swaps_rows_and_columns(self, data, plane, order):
        num_m, num_n = plane
        group, band = (data.draw(int31(1, min(num_m, num_n))) for _ in range(2))
        first = data.draw(int31(0, min(num_m, num_n) - 1)) if order == "chunk_major" else 0
        straight, turned = (Raster(order, group, first, band, transposed) for transposed in (False, True))
        t = data.draw(int31(0, num_m * num_n - 1))
        assert turned.tile(t, num_n, num_m) == straight.tile(t, num_m, num_n)[::-1]

    @pytest.mark.parametrize("order", ["row_major", "grouped", "chunk_major", "longest_first"])
    def test_raster_calls_the_leaf_of_that_name(self, order):
        chosen = Raster(order, group=2, first=3 if order == "chunk_major" else 0, band=2)
        parameters = {"row_major": (), "chunk_major": (3, 2, 2)}.get(order, (2,))
        tiles = [chosen.tile(t, 5, 4) for t in range(20)]
        assert tiles == [getattr(raster, order)(t, 5, 4, *parameters) for t in range(20)]
        assert tiles != [Raster("row_major").tile(t, 5, 4) for t in range(20)] or order == "row_major"

    def test_neighbours_of_a_group_share_a_column(self):
        # What grouping is for: inside a group, consecutive tiles share B's column except at column changes.
        tiles = [raster.grouped(t, 8, 8, 4) for t in range(64)]
        assert sum(a[1] == b[1] for a, b in pairwise(tiles)) == 64 - 16


def test_position_arithmetic_reaches_the_edge():
    assert on_int31(raster.row_major, TOP - 1, 1, TOP) == (0, TOP - 1)
    assert on_int31(raster.grouped, TOP - 1, TOP, 1, TOP) == (TOP - 1, 0)
    assert on_int31(raster.chunk_major, TOP - 1, TOP, 1, TOP - 1, TOP, TOP) == (TOP - 2, 0)
    assert on_int31(raster.longest_first, TOP - 1, 1, TOP, TOP) == (0, TOP - 1)
