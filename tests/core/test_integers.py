"""Cutting ranges into parts, up to the edge of 31 bits."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import assume, given

from int31 import Int31, LeftInt31, on_int31
from strategies import TOP, int31
from tilestream.core.integers import cdiv, part_begin, part_of, part_size


class TestInt31:
    """The checked integer itself: a checker that cannot fail proves nothing."""

    @pytest.mark.parametrize(
        ("what", "expression"),
        [
            ("2147483647 + 1 = 2147483648", lambda x: x(TOP) + 1),
            ("1 + 2147483647 = 2147483648", lambda x: 1 + x(TOP)),
            ("2 - 3 = -1", lambda x: x(2) - 3),
            ("2 - 3 = -1", lambda x: 2 - x(3)),
            ("65536 * 32768 = 2147483648", lambda x: x(65536) * x(32768)),
            ("-1 is outside", lambda x: x(5) + -1),
            ("-1 is outside", lambda x: min(x(5), -1)),
            ("2147483648 is outside", lambda x: x(5) < 2**31),
            ("-3 is outside", lambda x: x(5) % -3),
            ("2.0 is a float", lambda x: x(5) // 2.0),
            ("True is a bool", lambda x: x(5) + True),
            ("truediv on 5", lambda x: x(5) / 2),
            ("rtruediv on 5", lambda x: 2 / x(5)),
            ("and on 5", lambda x: x(5) & 1),
            ("lshift on 5", lambda x: x(5) << 1),
            ("neg on 5", lambda x: -x(5)),
            ("invert on 5", lambda x: ~x(5)),
            ("pow on 5", lambda x: x(5) ** 2),
            ("divmod on 5", lambda x: divmod(x(5), 2)),
            ("int on 5", lambda x: int(x(5))),
            ("index on 5", lambda x: range(x(5))),
            ("bool on 5", lambda x: 1 if x(5) else 0),
        ],
    )
    def test_refuses(self, what, expression):
        with pytest.raises(LeftInt31, match=re.escape(what)):
            expression(Int31)

    def test_division_by_zero_is_an_error(self):
        with pytest.raises(ZeroDivisionError):
            Int31(1) // 0

    def test_catches_the_plain_way_to_write_part_begin(self):
        def plain(total, parts, part):
            return part * total // parts  # right in Python, wrong on a device

        assert plain(TOP, 100, 100) == part_begin(TOP, 100, 100) == TOP
        with pytest.raises(LeftInt31, match=r"50 \* 2147483647"):
            on_int31(plain, TOP, 100, 50)

    @given(int31(), int31(), int31(1))
    def test_computes_like_int(self, a, b, c):
        x, y, z = Int31(a), Int31(b), Int31(c)
        assert ((x // z).value, (x % z).value, max(x, y).value) == (a // c, a % c, max(a, b))
        assert (x < y, x == y, (x - min(x, y)).value) == (a < b, a == b, a - min(a, b))


@given(int31(), int31(1))
def test_cdiv_rounds_up(a, b):
    assume(a + b <= TOP)
    q = on_int31(cdiv, a, b)
    assert (q - 1) * b < a <= q * b or a == q == 0


class TestParts:
    """Invariants 1 and 3: the parts are disjoint, cover all, and differ by at most one."""

    def test_every_small_cut(self):
        for total in range(30):
            for parts in range(1, 33):
                begins = [on_int31(part_begin, total, parts, part) for part in range(parts + 1)]
                sizes = [on_int31(part_size, total, parts, part) for part in range(parts)]
                assert begins[0] == 0
                assert begins[-1] == total
                assert sizes == [b - a for a, b in itertools.pairwise(begins)]
                assert max(sizes) - min(sizes) <= 1
                assert sorted(sizes, reverse=True) == sizes, "longer parts come first"
                owner = [part for part, size in enumerate(sizes) for _ in range(size)]
                assert [on_int31(part_of, total, parts, x) for x in range(total)] == owner

    @given(int31(), int31(1), int31())
    def test_large_cuts_on_int31(self, total, parts, part):
        part %= parts
        begin, end = on_int31(part_begin, total, parts, part), on_int31(part_begin, total, parts, part + 1)
        assert on_int31(part_size, total, parts, part) == end - begin
        assert end - begin in (total // parts, total // parts + 1)
        assert on_int31(part_begin, total, parts, parts) == total

    @given(int31(1), int31(1), int31())
    def test_part_of_is_the_inverse_of_part_begin(self, total, parts, x):
        assume((total, parts) != (TOP, 1))
        x %= total
        part = on_int31(part_of, total, parts, x)
        assert 0 <= part < parts
        assert part_begin(total, parts, part) <= x < part_begin(total, parts, part + 1)

    def test_part_of_at_the_edge(self):
        assert on_int31(part_of, TOP, 1, 5) == 0
        assert on_int31(part_of, 3, TOP, 2) == 2
        assert [part_size(3, 5, part) for part in range(5)] == [1, 1, 1, 0, 0], "empty ones at the end"
