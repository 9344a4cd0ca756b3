"""The sweep, on the CPU: every way's answers checked, impossible figures refused, what fails refused by name."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tilestream.plan import DeviceProperties
from tilestream_tools.sweep import run
from tilestream_tools.sweep.record import Sweep
from tilestream_tools.sweep.run import CpuClock, Runner, Way, ways
from tilestream_tools.sweep.suite import Shape, Suite

SUITE = Suite("small", "float32", (Shape(96, 80, 64, "one"), Shape(40, 50, 60)))


class Nobody:
    """Takes nothing, and says that it did."""

    name, units, shares, tells = "nobody", 8, False, False

    def __init__(self) -> None:
        self.took: list[int] = []

    def left(self, count):
        return self.units - count

    @contextlib.contextmanager
    def taking(self, count):
        self.took.append(count)
        yield self.units - count


def device(flops=1e15) -> DeviceProperties:
    return DeviceProperties("a CPU", "cpu", 8, flops, 1e10, "a stub")


def sweep(todo, taken=(0, 3), flops=1e15, suite=SUITE, taker=None):
    made, taker, lines = Sweep({}), taker or Nobody(), []
    saved = []
    runner = Runner(taker, device(flops), 3, lines.append)
    assert isinstance(runner.clock, CpuClock)
    runner.run(made, suite, taken, todo, lambda: saved.append(len(made.points)))
    return made, taker, lines, saved


def test_a_point_for_each_shape_way_and_number_taken():
    todo = ways(["auto", "static", "dynamic", "stream_k", "told", "torch"], [1, 2])
    made, taker, lines, saved = sweep(todo)
    assert not made.refused
    assert len(made.points) == 2 * 2 * 7
    assert saved == [7, 14, 21, 28], "kept as it goes"
    assert taker.took == [0, 3, 0, 3]
    first = made.points[0]
    assert (first.shape, first.name, first.by, first.taken, first.left, first.units) == (
        "96x80x64", "one", "nobody", 0, 8, 8,
    )  # fmt: skip
    assert first.rounds == 3
    assert first.low <= first.seconds <= first.high
    assert first.tflops == pytest.approx(2 * 96 * 80 * 64 / first.seconds / 1e12)
    assert {point.label for point in made.points} == {str(way) for way in todo}
    plans = {point.implementation: point.plan for point in made.points if point.left == 5 and point.queues == 1}
    assert plans["torch"] == ""
    assert "dynamic, 5 workers" in plans["told"], "it is told what is left"
    assert "static" in plans["static"]
    assert "2 queues" in next(point.plan for point in made.points if point.queues == 2)
    assert len(lines) == 4


def test_figures_above_the_peak_of_what_is_left_are_refused():
    made, *_ = sweep(ways(["torch"]), taken=(0,), flops=1.0)
    assert not made.points
    assert len(made.refused) == 2
    assert "above the peak of" in made.refused[0]["why"]
    assert "of the 8 units that were left: the answer or the timing is wrong" in made.refused[0]["why"]


def test_the_peak_is_that_of_the_units_left(monkeypatch):
    made, *_ = sweep(ways(["torch"]), taken=(0,))
    rate = min(point.tflops for point in made.points) * 1e12
    monkeypatch.setattr(Runner, "_timed", lambda *given: (timed, 5))
    timed = run.Timing({"torch": [2 * 96 * 80 * 64 / rate] * 3}, "eager")
    one = Suite("one", "float32", SUITE.shapes[:1])
    enough, few = rate / 8 * 1.1, rate / 5 * 0.9
    assert not sweep(ways(["torch"]), (3,), enough * 8 / 5, one)[0].refused
    assert "of the 5 units" in sweep(ways(["torch"]), (3,), few, one)[0].refused[0]["why"]


@pytest.fixture
def calls(monkeypatch):
    """Changes the calls that are prepared: ``calls(lambda way, call: ...)``."""
    prepare = run.prepare

    def change(to):
        def prepared(way, *given, **how):
            one = prepare(way, *given, **how)
            one.call = to(way, one.call)
            return one

        monkeypatch.setattr(run, "prepare", prepared)

    return change


def test_a_wrong_answer_is_refused_and_the_others_go_on(calls):
    calls(lambda way, call: (lambda: call().mul_(1.01)) if way.implementation == "static" else call)
    made, *_ = sweep(ways(["static", "dynamic"]), (0,))
    assert {point.implementation for point in made.points} == {"dynamic"}
    assert {refused["way"] for refused in made.refused} == {"static"}
    assert "wrong answer" in made.refused[0]["why"]


def test_an_answer_that_is_wrong_only_beside_the_neighbour_is_refused(calls):
    """The answer that counts is the one made while the units are taken."""
    inside = []

    class Somebody(Nobody):
        @contextlib.contextmanager
        def taking(self, count):
            inside.append(count)
            with super().taking(count) as left:
                yield left
            inside.pop()

    calls(lambda way, call: lambda: call().fill_(float("nan")) if inside else call())
    made, *_ = sweep(ways(["dynamic"]), (2,), taker=Somebody())
    assert not made.points
    assert "not finite" in made.refused[0]["why"] or "wrong answer" in made.refused[0]["why"]


def test_units_that_were_not_taken_are_no_points():
    class Absent(Nobody):
        @contextlib.contextmanager
        def taking(self, count):
            raise RuntimeError("nobody came")
            yield

    made, *_ = sweep(ways(["dynamic", "torch"]), (2,), taker=Absent())
    assert not made.points
    assert {(refused["way"], refused["why"]) for refused in made.refused} == {
        ("dynamic", "RuntimeError: nobody came"), ("torch", "RuntimeError: nobody came"),
    }  # fmt: skip


def test_ways():
    assert ways(["dynamic", "torch"], [1, 2, 8]) == [
        Way("dynamic"), Way("dynamic", 2), Way("dynamic", 8), Way("torch"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="implementation 'cublas': it must be one of auto, static"):
        ways(["cublas"])
    with pytest.raises(ValueError, match="queues 0: it must be a positive whole number"):
        ways(["dynamic"], [0])


def test_operands_are_a_weights(monkeypatch):
    """B is the transpose of a row-major matrix, as in a Linear layer."""
    seen, prepare = [], run.prepare

    def spy(way, shape, dtype, left, a, b, *given, **how):
        seen.append((a.is_contiguous(), b.t().is_contiguous(), a.dtype, b.shape))
        return prepare(way, shape, dtype, left, a, b, *given, **how)

    monkeypatch.setattr(run, "prepare", spy)
    sweep(ways(["torch"]), [0], suite=Suite("x", "bfloat16", (Shape(16, 32, 48),)))
    assert set(seen) == {(True, True, torch.bfloat16, (48, 32))}


def test_what_is_said_of_the_device():
    said = run.about(device())
    assert (said["device"], said["units"]) == ("a CPU", 8)
    assert "triton" not in said


def test_a_reported_rest_of_the_device_is_compiled_for(monkeypatch):
    class Telling(Nobody):
        tells = True

    asked = []
    make = run.plan
    monkeypatch.setattr(run, "plan", lambda *given, **how: asked.append(how["workers"]) or make(*given, **how))
    sweep(ways(["static"]), (3,), suite=Suite("one", "float32", SUITE.shapes[:1]), taker=Telling())
    assert asked == [5, None], "before the block for what will be left; inside it the plan asks for itself"


def test_what_a_sample_launches_is_loaded_before_anything_is_taken(monkeypatch):
    seen = []
    monkeypatch.setattr(CpuClock, "_sample", lambda self, call: seen.append(call) or 1.0)
    taker = Nobody()
    Runner(taker, device(), 3)
    assert len(seen) == 1
    assert not taker.took
