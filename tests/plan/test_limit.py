"""The limit on workers: what counts where several are given, and that the plan knows of it. No torch."""

from __future__ import annotations

import importlib
import itertools

import pytest
from made_up import A100, BF16, H100

from tilestream.plan import Problem, plan_problem

limits = importlib.import_module("tilestream.plan.limit")
KINDS = ("static", "dynamic", "stream_k")


@pytest.fixture(autouse=True)
def _unset(monkeypatch):
    monkeypatch.delenv(limits.ENVIRONMENT, raising=False)
    limits._of_environment.cache_clear()
    yield
    limits._of_environment.cache_clear()


def test_the_least_of_what_is_given_counts():
    for bound, workers, own in itertools.product((0, 1, 5, 9), (None, 1, 5, 9), (1, 5, 9)):
        given = [x for x in (bound or None, own if workers is None else workers) if x is not None]
        assert (limits.within(bound, workers, own) or own) == min(given)
        if not bound:
            assert limits.within(bound, workers, own) == workers, "not forced where nothing forces it"


def test_none_is_no_limit():
    assert [limits.tighter(*pair) for pair in ((0, 0), (3, 0), (0, 3), (3, 7))] == [0, 3, 3, 3]


def test_the_environment_limits_a_process(monkeypatch):
    for number in ("96", "7"):
        monkeypatch.setenv(limits.ENVIRONMENT, number)
        assert limits.limit() == 96, "read once"


@pytest.mark.parametrize("text", ["0", "-3", "many", "1.5", " 4"])
def test_an_environment_that_says_nothing_is_refused(monkeypatch, text):
    monkeypatch.setenv(limits.ENVIRONMENT, text)
    with pytest.raises(ValueError, match=r"TILESTREAM_WORKERS=.*positive whole number of workers; or unset it"):
        limits.limit()


@pytest.mark.parametrize("device", [H100, A100], ids=lambda device: device.arch)
@pytest.mark.parametrize("kind", ["auto", *KINDS])
def test_every_schedule_and_backend_keeps_to_it(kind, device):
    for m, n, k in ((8192, 8192, 8192), (4096, 4096, 4096), (64, 8192, 8192), (300, 300, 300)):
        problem = Problem(m, n, k, **BF16)
        for bound, workers in ((96, None), (96, 132), (96, 40), (1, None), (500, None), (500, 600)):
            made = plan_problem(problem, workers, kind, device=device, limit=bound)
            least = min(bound, workers or device.workers)
            assert made.workers <= least
            assert made.schedule.num_shares <= max(made.workers, made.schedule.units)
            assert (f"the limit is {bound}" in made.explain()) == (bound < (workers or device.workers))
            asked = plan_problem(problem, least, kind, device=device)
            assert (made.block, made.schedule, made.variant) == (asked.block, asked.schedule, asked.variant)


def test_a_plan_for_fewer_workers_may_take_another_tile():
    """512 tiles of 128x256 are 4 waves of 132 workers, but 6 of 100: there, smaller ones waste less of the last."""
    for bound, tile in ((0, [128, 256]), (100, [128, 128])):
        made = plan_problem(Problem(4096, 4096, 4096, **BF16), device=H100, limit=bound)
        assert (sorted(made.tile), made.workers) == (tile, bound or 132)
