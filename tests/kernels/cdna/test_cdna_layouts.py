"""Which lane copies, fetches, reads and holds what: the layouts of GEMM and attention, by Gluon's own linear maps."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language")

from triton.experimental.gluon import language as gl

from layouts import elements, holdings
from tilestream.core.gpu_specs import named
from tilestream.core.swizzle import BANK, BANKS, swizzled
from tilestream.kernels.cdna.attention_copy import VECTOR
from tilestream.kernels.cdna.attention_softmax import KEYS, pair_layout
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
from tilestream.plan.policy import cdna_attention as attention
from tilestream.plan.policy.cdna_tiles import TILES, instruction, lane_bytes, spread, stage_swizzle

LANES = 64


def plain(function):
    """A function of the compiler's constants, as Python calls it."""
    return getattr(function, "fn", function)


def mathematics(arch, shape, warps):
    return plain(math_layout)(4 if arch == "gfx950" else 3, shape, warps)


def permutation(swizzle):
    return plain(permuted)((swizzle.vector, swizzle.every, swizzle.period))


def check_copies(rows, columns, vector, warps):
    """Assert the hardware's rule, one address a warp, then lanes side by side; the elements of each lane's copies."""
    found = []
    for lanes in holdings(plain(copy_layout)(columns, vector, warps), [rows, columns]):
        assert len(lanes[0]) % vector == 0
        for first in range(0, len(lanes[0]), vector):
            copied = [lane[first : first + vector] for lane in lanes]
            places = [[i * columns + j for i, j in vectors] for vectors in copied]
            begin = places[0][0]
            assert places == [[begin + n * vector + v for v in range(vector)] for n in range(LANES)]
            found += [element for vectors in copied for element in vectors]
    assert sorted(found) == [(i, j) for i in range(rows) for j in range(columns)], "every element is copied once"
    return found


def check_reads(layout, index, shape, swizzle, vector, arch, size):
    """Assert that a lane reads 16 bytes, or a vector, at once, and that lanes served at once meet no bank twice.

    ``index``: of the operand; the second one's rows are its columns to the multiplication.
    """
    places = {element: place for place, element in enumerate(elements(permutation(swizzle), shape))}
    width = size * vector
    together = BANKS[arch] * BANK // width
    lanes = holdings(layout, shape if index == 0 else shape[::-1])[0]
    for first in range(0, len(lanes[0]), vector):
        at = []
        for lane in lanes:
            read = [element if index == 0 else element[::-1] for element in lane[first : first + vector]]
            found = [places[element] * size for element in read]
            assert found == list(range(found[0], found[0] + width, size)), "one read"
            at.append(found[0])
        for group in range(0, LANES, together):
            begins = set(at[group : group + together])
            met = [(begin + byte) // BANK % BANKS[arch] for begin in begins for byte in range(0, width, BANK)]
            assert len(met) == len(set(met)), "a bank met twice"


# GEMM -----------------------------------------------------------------------------------------------------------------

CASES = [
    (arch, tile, size, k_major)
    for arch, rows in TILES.items()
    for at, tile in enumerate(rows)
    for size in ((2, 1) if at in (1, 6) else (2,))
    for k_major in (True, False)
]
COPIED = [c for c in CASES if c[1].copies == "direct" and (c[0] == "gfx950" or c[3])]


def name(value):
    if hasattr(value, "copies"):
        rows, columns = value[:2] if hasattr(value, "rows") else (value.block_m, value.block_n)
        return f"{rows}x{columns}-{value.copies}"
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def test_a_stage_is_linear_to_copies():
    for shape in ([64, 32], [32, 256]):
        assert elements(plain(linear)(), shape) == [(i // shape[1], i % shape[1]) for i in range(shape[0] * shape[1])]


@pytest.mark.parametrize(("arch", "tile", "size", "k_major"), COPIED, ids=name)
def test_a_warps_copies_land_one_lane_behind_the_other(arch, tile, size, k_major):
    for rows in {tile.block_m, tile.block_n}:
        outer, inner = plain(tile_shape)(rows, tile.block_k(size), k_major)
        check_copies(outer, inner, lane_bytes(tile, arch) // size, tile.warps)


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
    down, across = spread(tile.block_m, tile.block_n, tile.warps)
    math, vector = mathematics(arch, instruction(arch, size), (down, across)), 16 // size
    for index, rows in ((0, tile.block_m), (1, tile.block_n)):
        shape = [rows, tile.block_k(size)]
        swizzle = stage_swizzle(*shape, size, arch, True)
        check_reads(gl.DotOperandLayout(index, math, vector), index, shape, swizzle, vector, arch, size)


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


# Attention ------------------------------------------------------------------------------------------------------------

DEVICES = {"gfx942": named("mi300x"), "gfx950": named("mi355x")}
DIMS = {64: ((64, 64),), 128: ((128, 128), (96, 96), (96, 128)), 192: ((192, 128),), 256: ((256, 256),)}
OF_ATTENTION = [
    (arch, tile, dims)
    for arch, tiles in attention.TILES.items()
    for tile in tiles
    for dims in DIMS[tile.columns]
    if not attention.why_not(tile, *(attention.parts_of(columns, arch) for columns in dims), arch, DEVICES[arch].shared)
]
each_case = pytest.mark.parametrize(("arch", "tile", "dims"), OF_ATTENTION, ids=name)


def parts(arch, tile, dims):
    """Parts of a head's keys and of its values; the swizzles of queries, keys and values."""
    keys, values = (attention.parts_of(columns, arch) for columns in dims)
    return keys, values, attention.swizzles(tile, keys, values, arch)


def operands(arch, tile):
    """The scores' layout, and those of the first and the second operand of the other product."""
    math = mathematics(arch, attention.instruction(arch), (tile.warps, 1))
    return math, *(gl.DotOperandLayout(index, math, KEYS.value) for index in (0, 1))


@pytest.mark.parametrize(
    ("arch", "tile", "dims"), [case for case in OF_ATTENTION if case[1].copies == "direct"], ids=name
)
def test_what_is_copied_is_what_is_read(arch, tile, dims):
    """Where a lane's copy lands, the reader's layout has the element that was copied."""
    keys, values, hows = parts(arch, tile, dims)
    for rows, width, how in (
        (tile.rows, keys.width, hows.q), (tile.block, keys.width, hows.k), (tile.block, values.width, hows.v),
    ):  # fmt: skip
        how.check(width)
        seen = elements(permutation(how), [rows, width])
        for i, j in check_copies(rows, width, attention.lane_bytes(rows, width, tile.warps, arch) // 2, tile.warps):
            cell = swizzled(i, j // how.vector, how.every, how.period)
            assert seen[i * width + j] == (i, cell * how.vector + j % how.vector)


@each_case
def test_every_key_and_value_is_fetched_once(arch, tile, dims):
    keys, values, _ = parts(arch, tile, dims)
    across = attention.turned(arch, tile.copies)
    for columns, rows, k_major, turned in (
        (tile.block, keys.width, True, False), (values.width, tile.block, False, across),
    ):  # fmt: skip
        layout = plain(fetch_layout)(columns, rows, k_major, turned, VECTOR.value, tile.warps)
        width = keys.width if k_major else values.width
        found = {element for warp in holdings(layout, [tile.block, width]) for lane in warp for element in lane}
        assert found == {(i, j) for i in range(tile.block) for j in range(width)}


@each_case
def test_reads_of_attention_meet_no_bank_twice(arch, tile, dims):
    """Of queries and keys; and of values, where they have been transposed: across is another instruction's business."""
    keys, values, hows = parts(arch, tile, dims)
    math, *_ = operands(arch, tile)
    reads = [(0, [tile.rows, keys.width], hows.q, VECTOR.value), (1, [tile.block, keys.width], hows.k, VECTOR.value)]
    if attention.turned(arch, tile.copies):
        reads.append((1, [values.width, tile.block], hows.v, KEYS.value))
    for index, shape, how, vector in reads:
        check_reads(gl.DotOperandLayout(index, math, vector), index, shape, how, vector, arch, 2)


@each_case
def test_weights_are_operands_where_they_lie(arch, tile, dims):
    shape, (math, of_weights, _) = [tile.rows, tile.block], operands(arch, tile)
    scores = holdings(math, shape)
    assert scores == holdings(of_weights, shape), "from lane to lane, nor from register to register"
    # And two lanes have a row: what each has of its sum is that lane's.
    pairs = holdings(plain(pair_layout)(tile.warps), [tile.rows, 2])
    for warp, warps_pairs in zip(scores, pairs, strict=True):
        for lane, pair in zip(warp, warps_pairs, strict=True):
            assert {row for row, _ in lane} == {row for row, _ in pair}
            assert {column // 4 % 2 for _, column in lane} == {half for _, half in pair}


@each_case
def test_a_lanes_weights_meet_the_values_of_their_keys(arch, tile, dims):
    """gfx950's instruction takes eight keys of a lane, twice four neighbours: the same ones of both operands."""
    _, values, _ = parts(arch, tile, dims)
    _, of_weights, of_values = operands(arch, tile)
    weights = holdings(of_weights, [tile.rows, tile.block])[0]
    for mine, theirs in zip(weights, holdings(of_values, [tile.block, values.width])[0], strict=True):
        assert len({row for row, _ in mine}) == 1
        assert [key for _, key in mine] == [key for key, column in theirs if column == theirs[0][1]]
