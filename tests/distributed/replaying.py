"""Ranks whose calls CUDA graphs hold, led through eager calls, replays and expiries in any order.

A rank has what `fake_graph_ranks.GraphRank` has: ``next``, ``capture``, ``results``, ``expected``, ``streams``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import strategies as st

from fake_cuda import FakeCuda
from tilestream.core.errors import ArrivalTimeout, GroupBroken


def prepared(cuda: FakeCuda, ranks: list[Any]) -> None:
    """All ranks have made a call, and captured one."""
    for rank in ranks:
        rank.next(False)
    cuda.run()
    for rank in ranks:
        rank.capture()


def check(rank: Any, calls: int | None = None) -> None:
    for number, result in enumerate(rank.results if calls is None else rank.results[:calls], 1):
        assert result.equal(rank.expected(number)), (rank.rank, number, result)


def in_any_order(data: st.DataObject, cuda: FakeCuda, ranks: list[Any], most: int) -> None:
    """Each rank makes so many calls, and each result is right."""
    prepared(cuda, ranks)
    while any(len(rank.results) < most for rank in ranks):
        rank = data.draw(st.sampled_from(ranks))
        if data.draw(st.integers(0, 2)) == 0 and rank.issued < most:
            rank.next(data.draw(st.booleans()))
        else:
            data.draw(st.sampled_from(rank.streams)).run(data.draw(st.integers(1, 5)))
        if data.draw(st.integers(0, 9)) == 0:
            for each in ranks:
                if each.issued < most:
                    each.next(data.draw(st.booleans()))
            cuda.run()
    for rank in ranks:
        check(rank)
        rank.gpu.channel.check()
        assert not rank.state.broken


def with_expiries(data: st.DataObject, cuda: FakeCuda, ranks: list[Any], steps: int, most: int = 1 << 30) -> None:
    """Deadlines pass anywhere, and a rank may be lost: no wrong number, no deadlock, and each rank is told."""
    prepared(cuda, ranks)
    lost = data.draw(st.sampled_from((None, *ranks)))
    for _ in range(data.draw(st.integers(5, steps))):
        rank = data.draw(st.sampled_from(ranks))
        what = data.draw(st.integers(0, 9))
        if what <= 1 and rank is not lost and rank.issued < most:
            with contextlib.suppress(GroupBroken):  # an eager call, whose host has heard
                rank.next(data.draw(st.booleans()))
        elif what == 2:
            rank.gpu.impatient = True
            data.draw(st.sampled_from(rank.streams)).run(1)
            rank.gpu.impatient = False
        else:
            data.draw(st.sampled_from(rank.streams)).run(data.draw(st.integers(1, 4)))
    for _ in range(4 * len(ranks)):  # finally every deadline passes
        cuda.run()
        for rank in ranks:
            rank.gpu.impatient = True
    cuda.run()
    has_expired = False
    for rank in ranks:
        assert rank.idle, "stuck"
        for number, result in enumerate(rank.results, 1):
            assert result.isnan().all() or result.equal(rank.expected(number)), (rank.rank, number, result)
        if any(result.isnan().any() for result in rank.results):
            with pytest.raises((ArrivalTimeout, GroupBroken)):
                rank.gpu.channel.check()
            assert rank.state.broken, "a rank that has given up knows that its group is broken"
            has_expired = True
    for rank in ranks if has_expired else ():
        rank.next(True)  # each is told, by its next replay at the latest
        cuda.run()
        assert rank.results[-1].isnan().all()
        with pytest.raises((ArrivalTimeout, GroupBroken)):
            rank.gpu.channel.check()
