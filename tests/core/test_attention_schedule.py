"""Attention's blocks of keys: compared with the plain rule, pair by pair; and the list of a varlen call."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from int31 import on_int31
from strategies import TOP, int31
from tilestream.core import attention, integers, raster

MOST = 2**29 - 1  # 2 * (queries + keys) + block stays in 31 bits


def sees(i, j, shift, left, right):
    """The rule, with a shift that may be negative; None is no limit."""
    return (left is None or j >= i + shift - left) and (right is None or j <= i + shift + right)


def blocks_by_hand(first, last, shift, left, right, keys, block):
    """``{block: plain}`` of all blocks that hold a key that one of the positions sees."""
    found = {}
    for b in range(integers.cdiv(keys, block)):
        pairs = [
            j < keys and sees(i, j, shift, left, right)
            for i in range(first, last + 1)
            for j in range(b * block, (b + 1) * block)
        ]
        if any(pairs):
            found[b] = all(pairs)
    return found


LIMITS = (None, 0, 1, 3)


def problems(most_queries, most_keys):
    """``(queries, keys, top_left, left, right)`` of all small problems."""
    yield from product(range(1, most_queries + 1), range(most_keys + 1), (False, True), LIMITS, LIMITS)


def told(queries, keys, top_left, left, right):
    """A problem as the leaves take it, and its shift."""
    ahead, behind = (0, 0) if top_left else attention.diagonal(queries, keys)
    wide = queries + keys
    return ahead, behind, wide if left is None else left, wide if right is None else right, ahead - behind


def check_tile(first, last, problem, block, blocks):
    queries, keys, top_left, left, right = problem
    shift = 0 if top_left else keys - queries
    expected = blocks_by_hand(first, last, shift, left, right, keys, block)
    begin, plain_begin, plain_end, end = blocks
    assert begin <= plain_begin <= plain_end <= end
    assert set(range(begin, end)) >= expected.keys(), (problem, first, last, block)
    # Of blocks that hold no key that is seen there are none at the ends; inside there are none at all.
    assert (begin, end) == ((min(expected), max(expected) + 1) if expected else (begin, begin))
    for b in range(plain_begin, plain_end):
        assert expected[b], (problem, first, last, block, b)
    # And none that is plain is masked.
    assert {b for b, plain in expected.items() if plain} == set(range(plain_begin, plain_end))


class TestKeyBlocks:
    @pytest.mark.parametrize(
        ("most", "sizes"),
        [
            ((5, 6), ((1, 1), (2, 2), (3, 2), (2, 4))),
            pytest.param((9, 11), tuple(product((1, 2, 4, 5), (1, 2, 3, 4))), marks=pytest.mark.slow),
        ],
    )
    def test_every_small_tile(self, most, sizes):
        for problem in problems(*most):
            queries, keys = problem[:2]
            ahead, behind, left, right, _ = told(*problem)
            for (size, block), first in product(sizes, range(queries)):
                if first % size == 0:
                    last = min(first + size, queries) - 1
                    found = on_int31(attention.key_blocks, first, last, ahead, behind, left, right, keys, block)
                    check_tile(first, last, problem, block, found)

    @given(st.data(), int31(1, MOST // 2), int31(0, MOST // 2), st.sampled_from((16, 64, 128, 256)), st.booleans())
    def test_large_ones_on_int31(self, data, queries, keys, block, top_left):
        first = data.draw(int31(0, queries - 1))
        last = data.draw(int31(first, min(queries - 1, first + 255)))
        left, right = (data.draw(st.one_of(st.none(), int31(0, queries + keys))) for _ in range(2))
        ahead, behind, least, most, shift = told(queries, keys, top_left, left, right)
        blocks = on_int31(attention.key_blocks, first, last, ahead, behind, least, most, keys, block)
        begin, plain_begin, plain_end, end = blocks
        assert begin <= plain_begin <= plain_end <= end <= integers.cdiv(keys, block)
        seen = [on_int31(attention.seen_keys, i, ahead, behind, least, most, keys) for i in (first, last)]
        for i, (low, high) in zip((first, last), seen, strict=True):
            if low < high:
                assert begin * block <= low
                assert high <= end * block
            for j in (low - 1, low, high - 1, high):
                if 0 <= j < keys:
                    assert (low <= j < high) == sees(i, j, shift, left, right)
        for b in (plain_begin, plain_end - 1) if plain_begin < plain_end else ():
            assert all(low <= b * block and (b + 1) * block <= high for low, high in seen)
        for b in (begin, plain_begin - 1, plain_end, end - 1):
            if begin <= b < end and not plain_begin <= b < plain_end:
                assert any(low > b * block or high < (b + 1) * block for low, high in seen)

    def test_causal_by_hand(self):
        wide = 512 + 512
        assert attention.key_blocks(256, 383, 0, 0, wide, 0, 512, 128) == (0, 0, 2, 3)
        assert attention.key_blocks(256, 383, 0, 0, wide, wide, 512, 128) == (0, 0, 4, 4)
        assert attention.key_blocks(256, 383, 0, 0, 128, 0, 512, 128) == (1, 2, 2, 3)
        # The last key block is short: masked, for all it is seen whole.
        assert attention.key_blocks(0, 127, 0, 0, wide, wide, 500, 128) == (0, 0, 3, 4)

    @given(int31(1, MOST), int31(0, MOST))
    def test_the_last_query_s_diagonal_is_the_last_key(self, queries, keys):
        ahead, behind = on_int31(attention.diagonal, queries, keys)
        assert ahead - behind == keys - queries
        assert min(ahead, behind) == 0
        _, end = attention.seen_keys(queries - 1, ahead, behind, queries + keys, 0, keys)
        assert end == keys


class TestBlocksOfPart:
    def test_every_part_of_every_small_tile(self):
        for problem in problems(6, 7):
            queries, keys = problem[:2]
            ahead, behind, left, right, shift = told(*problem)
            for size, part, block in ((4, 2, 1), (4, 1, 2), (6, 3, 2)):
                for first in range(0, queries, size):
                    last = min(first + size, queries) - 1
                    low, _, _, high = attention.key_blocks(first, last, ahead, behind, left, right, keys, block)
                    if low == high:
                        continue
                    for at in range(first, last + 1, part):
                        to = min(at + part, queries) - 1
                        sides = [max(i + shift - left, 0) for i in (at, to)]
                        sides += [max(min(i + shift + right + 1, keys), 0) for i in (at, to)]
                        begin, plain_begin, plain_end, end = found = on_int31(
                            attention.blocks_of_part, low, high, *sides, block
                        )
                        assert low <= begin <= plain_begin <= plain_end <= end <= high
                        runs = attention.key_blocks(at, to, ahead, behind, left, right, keys, block)
                        masked = (end - begin, plain_end - plain_begin) == (1, 0)
                        # They see keys: those of the tile are all that there are. Else one block, and that masked.
                        assert found == runs if runs[0] < runs[3] else masked

    @given(
        int31(0, 2**20), int31(1, 2**10), st.lists(int31(0, 2**28), min_size=4, max_size=4), st.sampled_from((32, 128))
    )
    def test_no_block_of_another_share(self, low, blocks, sides, block):
        # A share of a tile's keys is all that its consumers may look at, wherever their rows' keys are.
        high = low + blocks
        from_first, from_last, until_first, until_last = *sorted(sides[:2]), *sorted(sides[2:])
        begin, plain_begin, plain_end, end = on_int31(
            attention.blocks_of_part, low, high, from_first, from_last, until_first, until_last, block
        )
        assert low <= begin <= plain_begin <= plain_end <= end <= high
        assert begin < end
        for b in (low, begin - 1, end, high - 1):
            if low <= b < high and not begin <= b < end:  # left out: no row sees it, if any row sees a block
                assert b * block >= until_last or (b + 1) * block <= from_first
        for b in (plain_begin, plain_end - 1) if plain_begin < plain_end else ():
            assert from_last <= b * block
            assert (b + 1) * block <= until_first


def test_the_keys_of_every_small_position():
    for problem in problems(6, 7):
        queries, keys, _, left, right = problem
        ahead, behind, least, most, shift = told(*problem)
        for i in range(queries):
            begin, end = on_int31(attention.seen_keys, i, ahead, behind, least, most, keys)
            assert begin <= end
            assert list(range(begin, end)) == [j for j in range(keys) if sees(i, j, shift, left, right)]


class TestShares:
    def test_shares_are_the_blocks_in_order_and_nearly_equal(self):
        runs = [r for r in product(range(7), repeat=4) if list(r) == sorted(r)]
        for run in runs:
            for shares in range(1, 5):
                parts = [on_int31(attention.share_of_keys, *run, shares, share) for share in range(shares)]
                begin, plain_begin, plain_end, end = run
                assert [b for low, _, _, high in parts for b in range(low, high)] == list(range(begin, end))
                assert [b for _, low, high, _ in parts for b in range(low, high)] == [*range(plain_begin, plain_end)]
                assert all(list(part) == sorted(part) for part in parts)
                sizes = [part[3] - part[0] for part in parts]
                assert max(sizes) - min(sizes) <= 1

    @given(int31(0, MOST), int31(0, MOST), int31(1, 1024), st.data())
    def test_a_share_is_that_of_the_integers(self, begin, count, shares, data):
        share = data.draw(int31(0, shares - 1))
        end = begin + count
        low, _, _, high = on_int31(attention.share_of_keys, begin, begin, end, end, shares, share)
        assert low == begin + integers.part_begin(count, shares, share)
        assert high - low == integers.part_size(count, shares, share)

    @given(st.data(), int31(0, 2**20), int31(0, 2**25), int31(1, 2**23 - 1))
    def test_late_shares_are_the_blocks_in_order_and_grow_with_the_place(self, data, begin, count, places):
        """Whatever the bounds: each begins where the one before may end at most."""
        inner = sorted(data.draw(st.lists(int31(0, 256), min_size=1, max_size=7)))
        bounds = [(0, 0), *((at, after - at) for at, after in pairwise([*inner, 256])), (256, 0)]
        place = data.draw(int31(0, places - 1))
        here = [on_int31(attention.late_bound, begin, begin + count, *bound, place, places) for bound in bounds]
        assert (here[0], here[-1]) == (begin, begin + count)
        assert here == sorted(here)
        later = data.draw(int31(place, places - 1))
        then = [on_int31(attention.late_bound, begin, begin + count, *bound, later, places) for bound in bounds]
        assert all(one <= other for one, other in zip(here, then, strict=True))
        for bound, at in zip(bounds, here, strict=True):
            assert abs(at - begin - count * (bound[0] + bound[1] * place / places) / 256) <= count / 256 + 1


def list_of(lengths, heads, positions):
    """What the device makes of ``(queries, keys)`` by sequence: first tiles and sequences, by place."""
    tiles = [heads * integers.cdiv(queries, positions) for queries, _ in lengths]
    starts, sequences = [0] * len(lengths), [0] * len(lengths)
    for s, (_, keys) in enumerate(lengths):
        earlier = [attention.comes_before(other[1], o, keys, s) for o, other in enumerate(lengths)]
        starts[sum(earlier)] = sum(t for t, before in zip(tiles, earlier, strict=True) if before)
        sequences[sum(earlier)] = s
    return starts, sequences, sum(tiles)


def place_of(position, starts):
    low, high = 0, len(starts)
    for _ in range(len(starts).bit_length()):
        low, high = on_int31(attention.halved, low, high, starts[(low + high) // 2], position)
    return low


class TestVarlen:
    @given(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=12), st.integers(1, 3),
        st.integers(1, 4),
    )  # fmt: skip
    def test_positions_are_a_bijection_on_the_tiles_longest_first(self, lengths, heads, positions):
        starts, sequences, total = list_of(lengths, heads, positions)
        assert sorted(sequences) == list(range(len(lengths)))
        assert [lengths[s][1] for s in sequences] == sorted((keys for _, keys in lengths), reverse=True)
        found = []
        for t in range(total):
            place = place_of(t, starts)
            blocks = integers.cdiv(lengths[sequences[place]][0], positions)
            found.append((sequences[place], *raster.longest_first(t - starts[place], blocks, heads, heads)))
        assert sorted(found) == [
            (s, m, h)
            for s, (queries, _) in enumerate(lengths)
            for m in range(integers.cdiv(queries, positions))
            for h in range(heads)
        ]

    @given(int31(0, MOST), int31(0, TOP - 1), int31(0, MOST), int31(0, TOP - 1))
    def test_one_of_two_sequences_comes_first(self, keys, sequence, other_keys, other):
        first = on_int31(attention.comes_before, keys, sequence, other_keys, other)
        second = on_int31(attention.comes_before, other_keys, other, keys, sequence)
        assert first + second == (0 if (keys, sequence) == (other_keys, other) else 1)
        assert first == ((-keys, sequence) < (-other_keys, other))


@given(int31(0), int31(1))
def test_rows_hold_the_heads_of_a_position_side_by_side(row, pack):
    position, head = on_int31(attention.row_of, row, pack)
    assert position * pack + head == row
    assert head < pack
