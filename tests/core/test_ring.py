"""Where a loop stands in a ring: what the load loop and the math loops rely on, exhaustively and in large."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from int31 import on_int31
from strategies import TOP
from tilestream.core.ring import after, before, skip, step


@st.composite
def standing(draw) -> tuple[int, int, int]:
    """Any place of a ring of any depth."""
    depth = draw(st.integers(1, 2**20) | st.integers(1, TOP // 2))
    return draw(st.integers(0, depth - 1)), draw(st.integers(0, 1)), depth


@pytest.mark.parametrize("depth", range(1, 14))
class TestSmall:
    def test_steps_walk_round_after_round_with_alternating_phases(self, depth):
        places, place, walked = [(stage, phase) for phase in (0, 1) for stage in range(depth)], (0, 0), []
        for _ in range(4 * depth):
            walked.append(place)
            place = on_int31(step, *place, depth)
        assert walked == 2 * places
        assert place == (0, 0), "two rounds lead back"

    def test_skip_is_so_many_steps(self, depth):
        for place in [(stage, phase) for phase in (0, 1) for stage in range(depth)]:
            stepped = place
            for count in range(5 * depth + 2):
                assert on_int31(skip, *place, count, depth) == stepped
                stepped = step(*stepped, depth)

    def test_before_and_after_are_a_step_without_its_phase(self, depth):
        for stage in range(depth):
            there, _ = step(stage, 0, depth)
            assert on_int31(after, stage, depth) == there
            assert on_int31(before, there, depth) == stage


class TestLarge:
    @given(standing())
    def test_step_stays_in_the_ring_and_is_a_skip_of_one(self, place):
        stage, phase, depth = place
        there = on_int31(step, stage, phase, depth)
        assert 0 <= there[0] < depth
        assert there[1] in (0, 1)
        assert there == skip(stage, phase, 1, depth)
        assert on_int31(before, there[0], depth) == stage

    @given(standing(), st.data())
    def test_skip_up_to_the_edge_of_31_bits(self, place, data):
        stage, phase, depth = place
        count = data.draw(st.integers(0, TOP - 1 - stage))
        there = on_int31(skip, stage, phase, count, depth)
        assert there == ((stage + count) % depth, (phase + (stage + count) // depth) % 2)
