"""Where a loop stands in a ring: what the load loop and the math loops rely on, exhaustively and in large."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from int31 import on_int31
from strategies import TOP
from tilestream.core.ring import before, skip, step

DEPTHS = range(1, 14)


def places(depth: int) -> list[tuple[int, int]]:
    return [(stage, phase) for phase in (0, 1) for stage in range(depth)]


def after(count: int, depth: int) -> tuple[int, int]:
    """Where ``count`` steps from the start lead, counted out."""
    return list(itertools.islice(itertools.cycle(places(depth)), count + 1))[-1]


@st.composite
def standing(draw) -> tuple[int, int, int]:
    """Any place of a ring of any depth."""
    depth = draw(st.integers(1, 2**20) | st.integers(1, TOP // 2))
    return draw(st.integers(0, depth - 1)), draw(st.integers(0, 1)), depth


@pytest.mark.parametrize("depth", DEPTHS)
class TestSmall:
    def test_steps_walk_round_after_round_with_alternating_phases(self, depth):
        place, walked = (0, 0), []
        for _ in range(4 * depth):
            walked.append(place)
            place = on_int31(step, *place, depth)
        assert walked == 2 * places(depth)
        assert place == (0, 0), "two rounds lead back"

    def test_skip_is_so_many_steps(self, depth):
        for place in places(depth):
            stepped = place
            for count in range(3 * depth + 2):
                assert on_int31(skip, *place, count, depth) == stepped
                stepped = step(*stepped, depth)

    def test_skips_add_up(self, depth):
        for place, a, b in itertools.product(places(depth), range(2 * depth + 1), range(2 * depth + 1)):
            assert skip(*skip(*place, a, depth), b, depth) == skip(*place, a + b, depth)

    def test_before_undoes_a_step_and_a_step_before(self, depth):
        for stage, phase in places(depth):
            there, _ = step(stage, phase, depth)
            assert on_int31(before, there, depth) == stage
            assert step(before(stage, depth), phase, depth)[0] == stage

    def test_step_never_leads_to_one_place_from_two(self, depth):
        assert {step(*place, depth) for place in places(depth)} == set(places(depth))

    def test_counted_out(self, depth):
        assert all(skip(0, 0, count, depth) == after(count, depth) for count in range(5 * depth))


def test_at_depth_1_each_step_is_a_round():
    assert step(0, 0, 1) == (0, 1)
    assert step(0, 1, 1) == (0, 0)
    assert before(0, 1) == 0


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
        at, then = on_int31(skip, stage, phase, count, depth)
        assert (at, then) == ((stage + count) % depth, (phase + (stage + count) // depth) % 2)
        assert skip(stage, phase, count % (2 * depth), depth) == (at, then), "two rounds lead back"

    @given(standing(), st.data())
    def test_rounds_flip_the_phase_and_nothing_else(self, place, data):
        stage, phase, depth = place
        rounds = data.draw(st.integers(0, (TOP - 1 - stage) // depth))
        assert skip(stage, phase, rounds * depth, depth) == (stage, (phase + rounds) % 2)
