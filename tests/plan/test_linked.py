"""Plans for operands that a stream brings over the host's link."""

from __future__ import annotations

from dataclasses import replace

import pytest
from made_up import BF16, H100, reason

from tilestream.core.chunks import LINK_BYTES, Chunks, Incoming
from tilestream.core.integers import cdiv
from tilestream.plan import Problem, plan_problem
from tilestream.plan.linked import WITHIN, first_to_end, linked
from tilestream.plan.planner import ranked
from tilestream.plan.policy import hopper


def problem(m: int, n: int, k: int, per: int, on: str = "rows", is_linked: bool = True, pivot: int = 0) -> Problem:
    coming = Incoming(Chunks.uniform(m if on == "rows" else n, per), pivot, linked=is_linked)
    return Problem(m, n, k, **BF16, **{on: coming})


@pytest.mark.parametrize("on", ["rows", "columns"])
def test_a_long_k_over_the_link_takes_small_tiles(on):
    """A tile of 256 x 128 has 14336 of K for itself when the last rows are there, and most workers have none."""
    asked = {name: problem(4096, 4096, 14336, 256, on, name == "link") for name in ("link", "there")}
    made = {name: plan_problem(one, device=H100) for name, one in asked.items()}
    area = {name: one.block[0] * one.block[1] for name, one in made.items()}
    assert area["link"] <= area["there"] / 2
    assert made["link"].predicted > made["there"].predicted, "it is slower, were everything there"
    assert made["link"].predicted < 2 * 4096 * 14336 / LINK_BYTES, "and still faster than the link"
    assert made["link"].why.endswith("candidates the first to end behind the link")
    assert "; its last tiles end later" not in made["there"].explain()
    tiles = next(r.why for r in made["link"].refused if r.what.endswith("tiles"))
    assert tiles.endswith(", without the link; its last tiles end later")


def test_a_product_that_is_slower_than_the_link_keeps_its_plan():
    made = [plan_problem(problem(16384, 8192, 8192, 512, "columns", is_linked), device=H100) for is_linked in (0, 1)]
    assert made[0].block == made[1].block
    assert made[0].why == made[1].why


def test_it_is_the_first_to_end_by_hand():
    asked = problem(4096, 4096, 14336, 1000, pivot=2)
    ranking = ranked(hopper.candidates(asked, H100, 132, kinds=("static", "dynamic")))
    first, last = 1000, 1000  # the pivot's chunk, and the one before it

    def end(one):
        waves = cdiv(cdiv(last, one.block[0]) * cdiv(4096, one.block[1]), 132)
        item = one.predicted / max(cdiv(4096, one.block[0]) * cdiv(4096, one.block[1]) / one.workers, 1)
        row = 14336 * 2 / LINK_BYTES
        return max(first * row + one.predicted, 4096 * row + waves * item)

    least = min(map(end, ranking))
    assert first_to_end(asked, asked.rows, ranking) == [one for one in ranking if end(one) <= (1 + WITHIN) * least]


def test_two_that_arrive_or_that_nothing_brings_over_the_link_have_no_link():
    one = problem(4096, 4096, 4096, 512)
    assert linked(one) is one.rows
    assert linked(problem(670, 4096, 4096, 128)) is None, "it is there before the host has done much"
    assert linked(problem(680, 4096, 4096, 128)) is not None
    assert linked(problem(4096, 4096, 4096, 512, is_linked=False)) is None
    assert linked(replace(one, columns=one.rows)) is None
    assert linked(Problem(64, 64, 64, **BF16)) is None


def test_a_given_tile_is_kept():
    made = plan_problem(problem(4096, 4096, 14336, 256), device=H100, tile=(256, 128))
    assert made.tile == (256, 128)
    assert reason(made, "static") or made.kind == "static"
