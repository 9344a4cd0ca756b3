"""Beside a collective: the arithmetic, and two ranks on the CPU that do all of it but NCCL."""

from __future__ import annotations

import pytest
import torch

from tilestream_tools.sweep import collective_overlap as beside
from tilestream_tools.sweep.run import ways
from tilestream_tools.sweep.suite import Shape, Suite

SUITE = Suite("small", "float32", (Shape(32, 48, 64),))


def test_what_both_take_at_least():
    assert beside.floor(comm=3.0, matmul=1.0, taken=16, units=132) == 3.0
    assert beside.floor(comm=1.0, matmul=2.0, taken=33, units=132) == pytest.approx(2.25)


def test_bad_input():
    with pytest.raises(ValueError, match="collective='gather'; it must be one of all_reduce, all_gather"):
        beside.sweep_beside(SUITE, [0], ways(["torch"]), collective="gather")
    with pytest.raises(ValueError, match=r"head_start=-1\.0: it is 0 or more seconds"):
        beside.sweep_beside(SUITE, [0], ways(["torch"]), head_start=-1.0)
    if torch.cuda.device_count() < 2:
        with pytest.raises(ValueError, match=r"2 ranks take 2 GPUs; there are [01]"):
            beside.sweep_beside(SUITE, [0], ways(["torch"]))


def test_a_sample_is_taken_anew_on_all_ranks(monkeypatch):
    """Here it was not late, but on another rank: a call made there alone would wait for this rank's."""

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, _: Event) -> float:
            return 1.0

    class Clock(beside._GpuClock):
        device, group, CYCLE = "cpu", None, 1.0
        _source, _sink = torch.ones(1), torch.empty(())

        def __init__(self) -> None: ...

    late, spins, calls = iter([1, 0]), [], []
    monkeypatch.setattr(beside.dist, "barrier", lambda group: None)
    monkeypatch.setattr(beside.dist, "all_reduce", lambda found, op, group: found.fill_(next(late)))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", spins.append)
    assert Clock()._sample(lambda: calls.append(0)) == 1e-3
    assert (len(calls), spins) == (2, [Clock.SPIN_CYCLES, 2 * Clock.SPIN_CYCLES])


@pytest.mark.slow
@pytest.mark.parametrize("collective", beside.COLLECTIVES)
def test_two_ranks(collective):
    made = beside.sweep_beside(
        SUITE, [0], ways(["dynamic", "torch"]), collective=collective, megabytes=1, rounds=3, backend="gloo"
    )
    assert [point.implementation for point in made.points] == ["dynamic", "torch"]
    for point in made.points:
        assert point.by == "nccl"
        assert point.more["floor"] == beside.floor(point.more["comm"], point.more["matmul"], 0, point.units)
        assert point.seconds > 0
    assert made.about["collective"] == collective
    assert made.about["head_start_us"] == 20.0


@pytest.mark.slow
def test_ranks_that_do_not_end_are_ended():
    with pytest.raises(RuntimeError, match=r"beside all_reduce: the ranks have not ended in 0\.1 s"):
        beside.sweep_beside(SUITE, [0], ways(["torch"]), rounds=3, backend="gloo", deadline=0.1)


@pytest.mark.slow
def test_a_rank_that_fails_is_told_of():
    bad = Suite("bad", "int1", SUITE.shapes)
    with pytest.raises(RuntimeError, match="beside all_reduce: a rank failed: "):
        beside.sweep_beside(bad, [0], ways(["torch"]), rounds=3, backend="gloo")
