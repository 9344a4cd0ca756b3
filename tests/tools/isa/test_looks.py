"""Looks at signals in PTX: whether one lane makes each."""

from __future__ import annotations

import pytest

from tilestream_tools.isa import sass

LANE = """
mov.u32 %r1, %tid.x;
and.b32 %r18, %r1, 31;
setp.eq.b32 %p83, %r18, 0;
setp.ne.b32 %p84, %r20, 0;
and.pred %p85, %p84, %p83;
and.b32 %r19, %r1, 7;
setp.eq.b32 %p86, %r19, 0;
elect.sync _|%p87, -1;
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("@%p83 ld.global.sys.acquire.b32 %r81, [ %rd74 + 0 ];", (1, 0)),
        ("@%p83 ld.acquire.sys.global.b32 %r81, [ %rd74 + 0 ];", (1, 0)),
        ("@%p85 atom.global.sys.acquire.add.u32 %r81, [ %rd74 ], 0;", (1, 0)),
        ("@%p87 ld.global.sys.acquire.b32 %r81, [ %rd74 + 0 ];", (1, 0)),
        ("ld.global.sys.acquire.b32 %r81, [ %rd74 + 0 ];", (0, 1)),
        ("@%p84 ld.global.sys.acquire.b32 %r81, [ %rd74 + 0 ];", (0, 1)),
        ("@%p86 ld.global.sys.acquire.b32 %r81, [ %rd74 + 0 ];", (0, 1)),
        ("@%p83 ld.global.gpu.acquire.b32 %r81, [ %rd74 + 0 ];", (0, 0)),
        ("@%p83 ld.global.sys.relaxed.b32 %r81, [ %rd74 + 0 ];", (0, 0)),
    ],
)
def test_polls_are_found(line, found):
    assert sass.looks(LANE + line) == found


def test_each_is_counted():
    one, all_ = "@%p83 ld.global.sys.acquire.b32 %r81, [ %rd74 ];", "ld.global.sys.acquire.b32 %r81, [ %rd74 ];"
    assert sass.looks("\n".join([LANE, one, all_, one])) == (2, 1)
