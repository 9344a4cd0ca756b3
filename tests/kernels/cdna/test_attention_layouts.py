"""Which lane copies, reads and holds what of attention, by the linear maps that Gluon itself has of its layouts."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language")

from test_cdna_layouts import plain
from triton.experimental.gluon import language as gl

from layouts import elements, holdings
from tilestream.core.gpu_specs import named
from tilestream.core.swizzle import BANK, BANKS, swizzled
from tilestream.kernels.cdna.attention_copy import VECTOR
from tilestream.kernels.cdna.attention_softmax import KEYS, pair_layout
from tilestream.kernels.cdna.epilogue import math_layout
from tilestream.kernels.cdna.ring import copy_layout, fetch_layout, permuted
from tilestream.plan.policy.cdna_attention import TILES, instruction, lane_bytes, parts_of, swizzles, turned, why_not

DEVICES = {"gfx942": named("mi300x"), "gfx950": named("mi355x")}
DIMS = {64: ((64, 64),), 128: ((128, 128), (96, 96), (96, 128)), 192: ((192, 128),), 256: ((256, 256),)}
CASES = [
    (arch, tile, dims)
    for arch, tiles in TILES.items()
    for tile in tiles
    for dims in DIMS[tile.columns]
    if not why_not(tile, *(parts_of(columns, arch) for columns in dims), arch, DEVICES[arch].shared)
]
DIRECT = [case for case in CASES if case[1].copies == "direct"]


def name(value):
    if isinstance(value, tuple) and hasattr(value, "rows"):
        return f"{value.rows}x{value.block}-{value.copies}"
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def mathematics(arch, tile):
    return plain(math_layout)(4 if arch == "gfx950" else 3, instruction(arch), (tile.warps, 1))


def permutation(swizzle):
    return plain(permuted)((swizzle.vector, swizzle.every, swizzle.period))


@pytest.mark.parametrize(("arch", "tile", "dims"), DIRECT, ids=name)
def test_what_is_copied_is_what_is_read(arch, tile, dims):
    """A warp's lanes land one behind the other; and where, the reader's layout has the element that was copied."""
    keys, values = (parts_of(columns, arch) for columns in dims)
    hows = swizzles(tile, keys, values, arch)
    for rows, parts, how in ((tile.rows, keys, hows.q), (tile.block, keys, hows.k), (tile.block, values, hows.v)):
        how.check(parts.width)
        vector = lane_bytes(rows, parts.width, tile.warps, arch) // 2
        seen = elements(permutation(how), [rows, parts.width])
        met = []
        for lanes in holdings(plain(copy_layout)(parts.width, vector, tile.warps), [rows, parts.width]):
            for first in range(0, len(lanes[0]), vector):
                places = [[i * parts.width + j for i, j in lane[first : first + vector]] for lane in lanes]
                begin = places[0][0]
                assert places == [[begin + n * vector + v for v in range(vector)] for n in range(64)]
                for i, j in (element for lane in lanes for element in lane[first : first + vector]):
                    cell = swizzled(i, j // how.vector, how.every, how.period)
                    assert seen[i * parts.width + j] == (i, cell * how.vector + j % how.vector)
                met += [place for lane in places for place in lane]
        assert sorted(met) == list(range(rows * parts.width))


@pytest.mark.parametrize(("arch", "tile", "dims"), CASES, ids=name)
def test_everything_is_fetched_once(arch, tile, dims):
    keys, values = (parts_of(columns, arch) for columns in dims)
    of_keys = plain(fetch_layout)(tile.block, keys.width, True, False, VECTOR.value, tile.warps)
    across = turned(arch, tile.copies)
    of_values = plain(fetch_layout)(values.width, tile.block, False, across, VECTOR.value, tile.warps)
    for layout, width in ((of_keys, keys.width), (of_values, values.width)):
        found = {element for warp in holdings(layout, [tile.block, width]) for lane in warp for element in lane}
        assert found == {(i, j) for i in range(tile.block) for j in range(width)}


def banks_met(places, lanes, vector, arch, first):
    """How often the bank that is met most is met by lanes that are served at once, each reading from element first."""
    together = BANKS[arch] * BANK // (2 * vector)
    worst = 0
    for group in range(0, 64, together):
        at = {2 * places[lane[first]] for lane in lanes[group : group + together]}
        met = [(a + b) // BANK % BANKS[arch] for a in at for b in range(0, 2 * vector, BANK)]
        worst = max(worst, *(met.count(bank) for bank in set(met)))
    return worst


@pytest.mark.parametrize(("arch", "tile", "dims"), CASES, ids=name)
def test_reads_meet_no_bank_twice(arch, tile, dims):
    """Of queries and keys; and of values, where they have been transposed: across is another instruction's business."""
    keys, values = (parts_of(columns, arch) for columns in dims)
    hows, math = swizzles(tile, keys, values, arch), mathematics(arch, tile)
    reads = [
        (0, [tile.rows, keys.width], hows.q, VECTOR.value, [tile.rows, keys.width]),
        (1, [tile.block, keys.width], hows.k, VECTOR.value, [keys.width, tile.block]),
    ]
    if turned(arch, tile.copies):
        reads.append((1, [values.width, tile.block], hows.v, KEYS.value, [tile.block, values.width]))
    for index, shape, how, vector, extent in reads:
        places = {element: place for place, element in enumerate(elements(permutation(how), shape))}
        if index == 1:
            places = {(j, i): place for (i, j), place in places.items()}
        lanes = holdings(gl.DotOperandLayout(index, math, vector), extent)[0]
        for first in range(0, len(lanes[0]), vector):
            for lane in lanes:
                found = [places[element] for element in lane[first : first + vector]]
                assert found == list(range(found[0], found[0] + vector)), "one read"
            assert banks_met(places, lanes, vector, arch, first) == 1


@pytest.mark.parametrize(("arch", "tile", "dims"), CASES, ids=name)
def test_weights_are_operands_where_they_lie(arch, tile, dims):
    shape, math = [tile.rows, tile.block], mathematics(arch, tile)
    scores, weights = holdings(math, shape), holdings(gl.DotOperandLayout(0, math, KEYS.value), shape)
    assert scores == weights, "from lane to lane, nor from register to register"
    # And two lanes have a row: what each has of its sum is that lane's.
    pairs = holdings(plain(pair_layout)(tile.warps), [tile.rows, 2])
    for warp, warps_pairs in zip(scores, pairs, strict=True):
        for lane, pair in zip(warp, warps_pairs, strict=True):
            assert {row for row, _ in lane} == {row for row, _ in pair}
            assert {column // 4 % 2 for _, column in lane} == {half for _, half in pair}


@pytest.mark.parametrize(("arch", "tile", "dims"), CASES, ids=name)
def test_a_lanes_weights_meet_the_values_of_their_keys(arch, tile, dims):
    """gfx950's instruction takes eight keys of a lane, twice four neighbours: the same ones of both operands."""
    values, math = parts_of(dims[1], arch), mathematics(arch, tile)
    weights = holdings(gl.DotOperandLayout(0, math, KEYS.value), [tile.rows, tile.block])[0]
    of_values = holdings(gl.DotOperandLayout(1, math, KEYS.value), [tile.block, values.width])[0]
    for mine, theirs in zip(weights, of_values, strict=True):
        rows, column = {row for row, _ in mine}, theirs[0][1]
        assert len(rows) == 1
        assert [key for _, key in mine] == [key for key, other in theirs if other == column]
