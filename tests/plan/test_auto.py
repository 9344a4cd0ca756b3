"""Which schedule when: `schedule="auto"` for the Hopper kernel, from the cost model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from made_up import H100, reason

from tilestream.plan import plan, planner
from tilestream.plan.planner import plan_problem
from tilestream.plan.policy.hopper_costs import FITTED


def asked(m, n, k, **how):
    return plan(m, n, k, dtype="bfloat16", device=H100, layout="nt", **how)


@pytest.fixture
def ticket(monkeypatch):
    """Set what a ticket costs."""

    def set_(seconds):
        monkeypatch.setitem(FITTED, "H100", replace(FITTED["H100"], ticket=seconds))
        plan_problem.cache_clear()

    yield set_
    plan_problem.cache_clear()


@pytest.mark.parametrize("shape", [(8192, 8192, 8192), (4096, 14336, 4096), (8192, 8192, 1024), (8192, 8192, 512)])
def test_many_waves_are_a_queues(shape):
    made = asked(*shape)
    assert made.schedule.grid.tiles > 2 * made.workers
    assert made.schedule.kind != "static", "a queue, also in front of stream_k's remainder"
    assert reason(made, "static") == planner.NO_STATIC or "late worker" in reason(made, "static")


def test_a_wave_that_is_hardly_filled_is_split():
    schedule = asked(640, 640, 20480).schedule
    assert (schedule.kind, schedule.remainder > 0) == ("stream_k", True)


def test_one_item_each_needs_no_queue():
    made = asked(256, 4096, 4096)
    assert made.schedule.grid.tiles <= made.workers
    assert made.schedule.kind == "static"
    assert "nothing for a queue" in reason(made, "dynamic")


@pytest.mark.parametrize(("tiles", "kind"), [(131, "static"), (132, "static"), (133, "dynamic")])
def test_a_grid_of_one_wave_stays_one_beside_a_queue_that_costs_nothing(tiles, kind):
    ranking = [SimpleNamespace(kind=one, tiles=tiles, workers=132, predicted=1.0) for one in ("static", "dynamic")]
    assert planner.fastest(ranking).kind == kind


def test_a_queue_that_costs_less_than_one_percent_is_taken_and_its_price_named(ticket, monkeypatch):
    ticket(0.0)
    free = asked(8192, 8192, 1024)
    ticket(free.predicted / 10)  # far more than a step, far less than an item
    costly = asked(8192, 8192, 1024)
    assert (free.schedule.kind != "static", costly.schedule.kind) == (True, "static")
    assert costly.schedule.grid.tiles > costly.workers
    assert "slower by the cost model, more than 1%" in reason(costly, "dynamic")
    assert costly.predicted == asked(8192, 8192, 1024, schedule="static").predicted
    monkeypatch.setattr(planner, "QUEUE_MAY_COST", 10.0)
    ticket(10e-6)
    made = asked(8192, 8192, 1024)
    assert made.schedule.kind != "static"
    assert "faster by the cost model on an idle device, and a late worker holds up its tiles" in reason(made, "static")


def test_shares_may_be_forced_and_are_told():
    made = asked(4096, 4096, 4096, schedule="stream_k", shares=40, tile=(128, 256), workers=100)
    assert made.schedule.num_shares == 40
    assert "12 tiles split along K into 40 shares" in made.explain()
