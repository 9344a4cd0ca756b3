"""Which lane copies, fetches and reads what: the ring's layouts, by the linear maps that Gluon itself has of them."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language")

from triton.experimental.gluon import language as gl

from layouts import elements, holdings
from tilestream.core.swizzle import BANK, BANKS
from tilestream.kernels.cdna.epilogue import math_layout
from tilestream.kernels.cdna.ring import (
    copy_layout,
    fetch_layout,
    linear,
    permuted,
    tile_shape,
    turned_layout,
    word_layout,
)
from tilestream.launch.cdna.arguments import operand
from tilestream.plan.policy.cdna_tiles import TILES, instruction, lane_bytes, spread, stage_swizzle

CASES = [
    (arch, tile, size, k_major)
    for arch, rows in TILES.items()
    for at, tile in enumerate(rows)
    for size in ((2, 1) if at in (1, 6) else (2,))
    for k_major in (True, False)
]
COPIED = [c for c in CASES if c[1].copies == "direct" and (c[0] == "gfx950" or c[3])]


def name(value):
    return f"{value.block_m}x{value.block_n}-{value.copies}" if hasattr(value, "block_m") else str(value)


def plain(function):
    """A function of the compiler's constants, as Python calls it."""
    return getattr(function, "fn", function)


def test_a_stage_is_linear_to_copies():
    for shape in ([64, 32], [32, 256]):
        assert elements(plain(linear)(), shape) == [(i // shape[1], i % shape[1]) for i in range(shape[0] * shape[1])]


@pytest.mark.parametrize(("arch", "tile", "size", "k_major"), COPIED, ids=name)
def test_a_warps_copies_land_one_lane_behind_the_other(arch, tile, size, k_major):
    """The hardware's rule: one address a warp, then lanes side by side. And every element is copied once."""
    vector = lane_bytes(tile, arch) // size
    for rows in {tile.block_m, tile.block_n}:
        outer, inner = plain(tile_shape)(rows, tile.block_k(size), k_major)
        layout = plain(copy_layout)(inner, vector, tile.warps)
        met = []
        for lanes in holdings(layout, [outer, inner]):
            registers = len(lanes[0])
            assert registers % vector == 0
            for first in range(0, registers, vector):
                places = [[i * inner + j for i, j in lane[first : first + vector]] for lane in lanes]
                begin = places[0][0]
                assert places == [[begin + n * vector + v for v in range(vector)] for n in range(64)]
                met += [place for lane in places for place in lane]
        assert sorted(met) == list(range(outer * inner))


@pytest.mark.parametrize(("arch", "tile", "size", "k_major"), CASES, ids=name)
def test_everything_is_fetched_once(arch, tile, size, k_major):
    for rows in {tile.block_m, tile.block_n}:
        block_k = tile.block_k(size)
        turned = not k_major and arch == "gfx942"
        outer, inner = plain(tile_shape)(rows, block_k, k_major)
        layout = plain(fetch_layout)(rows, block_k, k_major, turned, 16 // size, tile.warps)
        held = [element for warp in holdings(layout, [outer, inner]) for lane in warp for element in lane]
        assert sorted(held) == [(i, j) for i in range(outer) for j in range(inner)]


@pytest.mark.parametrize(("arch", "tile", "size", "k_major"), [c for c in CASES if c[2] == 1 and not c[3]], ids=name)
def test_words_are_what_a_lane_has_of_the_elements(arch, tile, size, k_major):
    """Unpacked in a lane's registers: no data moves."""
    for rows in {tile.block_m, tile.block_n}:
        block_k = tile.block_k(size)
        outer, inner = plain(tile_shape)(rows, block_k, k_major)
        wide = holdings(plain(fetch_layout)(rows, block_k, k_major, True, 16, tile.warps), [outer, inner])
        words = holdings(plain(word_layout)(rows, block_k, k_major, 16, tile.warps), [outer, inner // 4])
        assert [[[(i, 4 * j + byte) for i, j in lane for byte in range(4)] for lane in warp] for warp in words] == wide


def test_a_square_is_contiguous_both_ways():
    layout = plain(turned_layout)(64, 256, 8, 8)
    side = layout.size_per_thread[0]
    assert layout.size_per_thread == [side, side]
    assert side >= 4, "vectors of 8 bytes at least, read and written"


@pytest.mark.parametrize(("arch", "tile", "size", "k_major"), [c for c in CASES if c[3]], ids=name)
def test_reads_of_a_stage_meet_no_bank_twice(arch, tile, size, k_major):
    """By the map of the multiplication's own operands, for each group of lanes that is served at once."""
    down, across = spread(tile.block_m, tile.block_n, tile.warps)
    shape = instruction(arch, size)
    math = plain(math_layout)(4 if arch == "gfx950" else 3, shape, (down, across))
    width, banks, block_k = 16 // size, BANKS[arch], tile.block_k(size)
    together = banks * BANK // 16
    for index, rows in ((0, tile.block_m), (1, tile.block_n)):
        swizzle = stage_swizzle(rows, block_k, size, arch, True)
        permutation = plain(permuted)((swizzle.vector, swizzle.every, swizzle.period))
        places = {element: place for place, element in enumerate(elements(permutation, [rows, block_k]))}
        dot = gl.DotOperandLayout(index, math, width)
        extent = [rows, block_k] if index == 0 else [block_k, rows]
        for lanes in holdings(dot, extent)[:1]:
            for first in range(0, len(lanes[0]), width):
                at = []
                for lane in lanes:
                    vector = [e if index == 0 else e[::-1] for e in lane[first : first + width]]
                    found = [places[element] * size for element in vector]
                    assert found == list(range(found[0], found[0] + 16, size)), "one read of 16 bytes"
                    at.append(found[0])
                for group in range(0, 64, together):
                    met = [(a + b) // BANK % banks for a in set(at[group : group + together]) for b in range(0, 16, 4)]
                    assert len(met) == len(set(met)), "a bank met twice"


def test_an_operand_says_how_it_lies():
    assert operand(128, 64, 4096, 1, 2, "gfx950") == (4096, True, False, False, (8, 2, 8))
    assert operand(128, 64, 1, 4096, 2, "gfx950") == (4096, False, False, False, (8, 1, 16))
    assert operand(128, 64, 1, 4096, 2, "gfx942").turned, "no reads across: transposed on the way, into K-major rows"
    assert operand(128, 64, 1, 4096, 2, "gfx942").swizzle == (8, 1, 8)
    with pytest.raises(ValueError, match="strides 4096, 2: neither is 1, and it is read in vectors"):
        operand(128, 64, 4096, 2, 2, "gfx950")
    reach = (2**31 - 16) // 2
    assert not operand(2, 64, reach - 64, 1, 2, "gfx950").far
    assert operand(2, 64, reach - 63, 1, 2, "gfx950").far
