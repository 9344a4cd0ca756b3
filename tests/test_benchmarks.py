"""What benchmarks/ does without a GPU: shapes and classes, arithmetic, clock and checks, records, tables."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import tilestream as ts
from tilestream.plan import DeviceProperties

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)


@pytest.fixture
def shapes() -> ModuleType:
    return importlib.import_module("benchmarks.gemm.shapes")


@pytest.fixture
def render() -> ModuleType:
    return importlib.import_module("benchmarks.report.gemm")


@pytest.fixture
def clock() -> ModuleType:
    return importlib.import_module("benchmarks.core.clock")


# Shapes and their arithmetic ----------------------------------------------------------------------------------------


def test_projections_are_those_of_the_models(shapes: ModuleType) -> None:
    small, large = shapes.MODELS.values()
    assert small.projections() == {
        "QKV": (6144, 4096), "O": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336),
    }  # fmt: skip
    assert large.projections() == {
        "QKV": (10240, 8192), "O": (8192, 8192), "gate+up": (57344, 8192), "down": (8192, 28672),
    }  # fmt: skip


def test_the_suite_has_every_class_and_shape_once(shapes: ModuleType) -> None:
    suite = shapes.suite()
    assert {group: sum(s.group == group for s in suite) for group in shapes.GROUPS} == {
        "square": 5, "decode": 24, "middle": 8, "prefill": 24, "short K": 3, "odd": 2,
    }  # fmt: skip
    assert len(set(suite)) == len(suite) == 66
    assert shapes.Shape(64, 8192, 28672, "decode", "70B down") in suite
    odd = [s for s in suite if s.group == "odd"]
    assert all(s.n % 2 == 1 and s.k % 8 == 0 for s in odd)
    assert any(s.m % 2 == 1 for s in odd)


def test_a_suite_cut_short_has_some_of_each_class(shapes: ModuleType) -> None:
    suite = shapes.suite()
    assert {s.group for s in suite[:6]} == set(shapes.GROUPS)
    half = suite[: len(suite) // 2]
    for group in shapes.GROUPS:
        done, every = (sum(s.group == group for s in some) for some in (half, suite))
        assert abs(done - every / 2) <= 1
    assert len({s.name for s in suite if s.group == "decode"}) == 8
    assert len({s.name for s in [s for s in suite if s.group == "decode"][:8]}) == 8


@pytest.mark.parametrize(
    ("m", "group"), [(1, "decode"), (64, "decode"), (65, "middle"), (1024, "prefill"), (4096, "prefill")]
)
def test_classes_by_rows(shapes: ModuleType, m: int, group: str) -> None:
    assert shapes.group_of(m) == group


def test_the_search_shapes_are_none_the_model_was_fitted_to(shapes: ModuleType) -> None:
    fitted = {s[:3] for s in (*shapes.suite(), *shapes.VARIANTS, *shapes.QUACK)}
    assert len(shapes.SEARCH) == 16
    assert not fitted & {s[:3] for s in shapes.SEARCH}


def test_parse(shapes: ModuleType) -> None:
    assert shapes.parse("1x2x3,40x50x60") == [shapes.Shape(1, 2, 3), shapes.Shape(40, 50, 60)]


def test_geometric_mean(shapes: ModuleType) -> None:
    assert shapes.geomean([0.5, 2.0]) == pytest.approx(1)
    assert shapes.geomean([1.0, 1.0, 8.0]) == pytest.approx(2)
    assert math.isnan(shapes.geomean([]))


def test_quartiles_and_verdict(shapes: ModuleType, clock: ModuleType) -> None:
    assert clock.quartiles([5, 1, 4, 2, 3]) == (2, 4)
    assert clock.quartiles([7]) == (7, 7)
    assert shapes.verdict(1.01, (0.99, 1.02)) == "even"
    assert shapes.verdict(1.05, (1.02, 1.08)) == "won"
    assert shapes.verdict(0.97, (0.95, 0.99)) == "lost"


def test_the_floor_and_what_binds(shapes: ModuleType) -> None:
    peaks = shapes.peaks_of("NVIDIA H100 80GB HBM3")
    seconds, binds = peaks.floor(shapes.Shape(8192, 8192, 8192))
    assert (round(seconds * 1e6), binds) == (1111, "operations")
    seconds, binds = peaks.floor(shapes.Shape(1, 8192, 8192))
    assert (round(seconds * 1e6), binds) == (40, "bytes")
    assert peaks.floor(shapes.Shape(8192, 8192, 8192), itemsize=1)[0] == pytest.approx(1111e-6 / 2, rel=1e-3)
    assert shapes.peaks_of("NVIDIA H200").bandwidth > peaks.bandwidth


def test_impossible_times_are_refused(shapes: ModuleType) -> None:
    peaks, shape = shapes.PEAKS["H100"], shapes.Shape(8192, 8192, 8192)
    shapes.refuse_impossible(shape, peaks, {"ours": 1.3e-3})
    with pytest.raises(AssertionError, match=r"8192x8192x8192: ours took 1000\.00 us, the device's peak allows 1111"):
        shapes.refuse_impossible(shape, peaks, {"cublas": 1.3e-3, "ours": 1.0e-3})
    with pytest.raises(AssertionError, match="the answer or the timing is wrong"):
        shapes.refuse_impossible(shapes.Shape(1, 8192, 8192), peaks, {"ours": 30e-6})


def test_rounds_go_by_the_expected_time(shapes: ModuleType) -> None:
    assert shapes.rounds_for(1e-6, 2, 1.0) == 100
    assert shapes.rounds_for(1.0, 2, 1.0) == 9
    assert shapes.rounds_for(12e-3, 2, 1.0) == 40


# The clock and the check --------------------------------------------------------------------------------------------


class Graph:
    """Work that was captured."""

    current: Graph | None = None

    def __init__(self) -> None:
        self.work: list[object] = []

    def replay(self) -> None:
        for work in self.work:
            work()


@pytest.fixture
def gpu(clock: ModuleType, monkeypatch: pytest.MonkeyPatch):
    """A `GpuClock` whose GPU is fake: events count calls, graphs keep what `Graph.current` is given."""

    class Capture:
        def __init__(self, graph: Graph) -> None:
            self.graph = graph

        def __enter__(self) -> None:
            Graph.current = self.graph

        def __exit__(self, *_: object) -> None:
            Graph.current = None

    class Event:
        ticks = 0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.ticks += 1
            self.at = Event.ticks

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return float(other.at - self.at)

    fake = SimpleNamespace(
        Event=Event, CUDAGraph=Graph, graph=Capture, synchronize=lambda: None, _sleep=lambda cycles: None
    )
    monkeypatch.setattr(clock.GpuClock, "device", "cpu")
    monkeypatch.setattr(clock.GpuClock, "FLUSH_BYTES", 64)
    monkeypatch.setattr(clock.torch, "cuda", fake)
    return clock.GpuClock()


def kernel(result: torch.Tensor, value: float):
    """A call that writes ``result``, now or in the graph that is being captured."""

    def call() -> torch.Tensor:
        write = lambda: result.fill_(value)  # noqa: E731
        Graph.current.work.append(write) if Graph.current is not None else write()
        return result

    return call


def test_every_function_is_timed_in_every_round(gpu) -> None:
    timing = gpu.interleave({"a": lambda: None, "b": lambda: None}, rounds=7)
    assert timing.mode == "eager"
    assert timing.rounds == 7
    assert timing.medians() == {"a": 1e-3, "b": 1e-3}
    assert timing.band("a", "b") == (1, 1)
    assert not timing.results


def test_graphs_give_what_their_replay_wrote(gpu) -> None:
    result = torch.zeros(4)
    timing = gpu.interleave({"ours": kernel(result, 3.0)}, rounds=3, graphs=True)
    assert timing.mode == "graph"
    assert timing.results["ours"].tolist() == [3.0] * 4
    assert timing.results["ours"] is not result


def test_a_replay_that_writes_nothing_leaves_nan(gpu) -> None:
    timing = gpu.interleave({"ours": lambda: torch.ones(4)}, rounds=3, graphs=True)
    assert timing.results["ours"].isnan().all()


def test_where_one_cannot_be_captured_all_are_timed_eagerly(gpu) -> None:
    def refuses() -> torch.Tensor:
        if Graph.current is not None:
            raise RuntimeError("not in a capture")
        return torch.ones(4)

    timing = gpu.interleave({"cublas": kernel(torch.zeros(4), 1.0), "ours": refuses}, rounds=3, graphs=True)
    assert timing.mode == "eager: RuntimeError in capture"
    assert not timing.results
    assert timing.rounds == 3


def test_rows_are_sampled_over_all(clock: ModuleType) -> None:
    assert clock.sampled_rows(3).tolist() == [0, 1, 2]
    rows = clock.sampled_rows(16384)
    assert len(rows) == 256
    assert rows[0] == 0
    assert rows[-1] == 16383


@pytest.fixture
def checked(clock: ModuleType):
    a, b = torch.randn(600, 64, dtype=torch.bfloat16), torch.randn(64, 96, dtype=torch.bfloat16)
    peer = torch.mm(a, b)
    return peer, clock.Check.of_product(a, b, peer)


def test_a_right_answer_passes(checked) -> None:
    peer, check = checked
    assert check(peer.clone())["frobenius"] == check(peer)["peer_frobenius"]


def test_an_element_that_was_not_written_does_not_pass(checked) -> None:
    peer, check = checked
    missing = next(i for i in range(600) if i not in check.rows.tolist())
    got = peer.clone()
    got[missing, 5] = float("nan")
    with pytest.raises(AssertionError, match="1 elements are not finite"):
        check(got)


def test_a_wrong_tile_outside_the_sample_does_not_pass(checked) -> None:
    peer, check = checked
    missing = next(i for i in range(600) if i not in check.rows.tolist())
    got = peer.clone()
    got[missing] = 0
    with pytest.raises(AssertionError, match="distance of all rows to the peer's answer"):
        check(got)


def test_wrong_rows_of_the_sample_break_the_error_rule(checked) -> None:
    peer, check = checked
    got = peer.clone()
    got[0] *= 1.5
    with pytest.raises(AssertionError, match="wrong answer: max error"):
        check(got)


# Plans --------------------------------------------------------------------------------------------------------------


def test_plans_as_rows_of_a_table() -> None:
    bench, search = (importlib.import_module(f"benchmarks.gemm.{name}") for name in ("bench", "search"))
    plans = [ts.plan(512, 512, 512, workers=2, schedule=kind, tile=(64, 64)) for kind in ("static", "dynamic")]
    fields = [bench.plan_fields(plan) for plan in plans]
    assert fields[0]["block"].startswith("64x64x")
    assert (fields[0]["kind"], fields[1]["kind"]) == ("static", "dynamic")
    columns, constant, table = search.compact(list(zip(fields, (1e-3, 2e-3), strict=True)))
    assert columns == ["kind", "predicted_us", "us"]
    assert constant["workers"] == 2
    assert [row[0] for row in table] == ["static", "dynamic"]
    assert [row[-1] for row in table] == [1000.0, 2000.0]
    assert search.differences(*fields) == [("kind", "static", "dynamic")]
    other = ts.plan(1024, 512, 512, workers=2, schedule="static", tile=(64, 64))
    assert bench.kernel_of(other) == bench.kernel_of(plans[0]) != bench.kernel_of(plans[1])


def test_each_kernel_is_compiled_ahead_by_one_process(monkeypatch: pytest.MonkeyPatch, shapes: ModuleType) -> None:
    bench = importlib.import_module("benchmarks.gemm.bench")
    hopper = DeviceProperties("a Hopper", "portable", 132, 5e11, 3e12, "", "sm_90", 227 * 1024, (("bfloat16", 8e12),))
    asked = bench.planned
    monkeypatch.setattr(bench, "planned", lambda shape, device: asked(shape, hopper))
    monkeypatch.setattr(bench.torch, "cuda", SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None))
    run: list[object] = []
    monkeypatch.setattr(bench, "_run", lambda shape, function, **_: run.append(function))
    for index in range(4):
        bench.compile_share("space", shapes.SEARCH, index, 4)
    kernels = [bench.kernel_of(function.__self__) for function in run]
    every = {
        bench.kernel_of(plan)
        for shape in shapes.SEARCH
        for plan in bench.every_plan(asked(shape, hopper).problem, hopper)
    }
    assert len(kernels) == len(set(kernels))
    assert set(kernels) == every
    assert len(every) > 10


# Records and tables -------------------------------------------------------------------------------------------------

ABOUT = {
    "device": "NVIDIA H200", "torch": "2.11", "triton": "3.6", "commit": "abc", "date": "then", "dtype": "bfloat16",
    "flush": "reads 256 MiB before each call", "empty_us": {"eager": 4.0, "graph": 5.5}, "failures": [], "missing": [],
}  # fmt: skip


def row(shape: str, group: str = "", name: str = "", ratio: float = 1.25, **more) -> dict:
    made = {
        "shape": shape, "group": group, "name": name, "plan": "some plan", "us": {"cublas": 50.0, "ours": 50 / ratio},
        "ratio": ratio, "band": [ratio - 0.01, ratio + 0.01], "tflops": {"cublas": 600.0, "ours": 600 * ratio},
        "gbps": {"cublas": 2000, "ours": 2500}, "of_floor": 0.8, "binds": "bytes",
    }  # fmt: skip
    return {**made, **more}


def suite_rows() -> list[dict]:
    return [
        row("4096x4096x4096", "square", ratio=0.5),
        row("64x8192x8192", "decode", "70B O", ratio=0.8),
        row("1x8192x8192", "decode", "70B O", weight_read={"us": 36.0, "of_ours": 0.9}),
        row("16x4096x4096", "decode", "8B O", ratio=1.005),
    ]


def test_the_suites_tables(render: ModuleType) -> None:
    text = render.suite({**ABOUT, "rows": suite_rows(), "missing": ["8192x512x8192"]})
    assert "(NVIDIA H200, torch 2.11, Triton 3.6, commit `abc`, then)" in text
    assert "| square: M = N = K | 1 | 0.500 | 0.500 | 0 / 0 / 1 |" in text
    assert "| decode: a layer's projections at M = 1, 16, 64 | 3 | 1.002 | 0.800 | 1 / 1 / 1 |" in text
    assert "| all | 4 | 0.842 | 0.500 | 1 / 1 / 2 |" in text
    square = "| 4096x4096x4096 | 50.0 | 100.0 | 600 | 300 | 0.800 | 0.500 | 0.490 to 0.510 | **lost** |"
    assert square in text
    decode = [
        "| 16x4096x4096 8B O | 50.0 | 49.8 | - | 2500 | - | 1.005 | 0.995 to 1.015 | even |",
        "| 1x8192x8192 70B O | 50.0 | 40.0 | 36.0 | 2500 | 0.900 | 1.250 | 1.240 to 1.260 | won |",
        "| 64x8192x8192 70B O | 50.0 | 62.5 | - | 2500 | - | 0.800 | 0.790 to 0.810 | **lost** |",
    ]
    assert "\n".join(decode) in text
    assert "Not measured, for want of time: 8192x512x8192." in text
    assert "**Prefill**" not in text


def test_means_by_rows_alone_and_of_the_rate_at_which_weights_are_read(render: ModuleType) -> None:
    rows = [
        *suite_rows(), row("256x8192x8192", "middle", "70B O", ratio=0.9), row("4096x4097x4096", "odd", ratio=8.0),
        row("64x4096x4096", "decode", "8B O", ratio=1.25, weight_read={"us": 36.0, "of_ours": 0.8, "of_cublas": 0.6}),
        row("16x8192x8192", "decode", "70B O", ratio=1.25, weight_read={"us": 36.0, "of_ours": 0.9, "of_cublas": 0.7}),
    ]  # fmt: skip
    text = render.suite({**ABOUT, "rows": rows})
    assert "| **big**: M of 1024 and more | 2 | 2.000 | 0.500 | 1 / 0 / 1 |" in text
    assert "| **big**, without the odd shapes | 1 | 0.500 | 0.500 | 0 / 0 / 1 |" in text
    assert "| **middle**: M of 65 to 1023 | 1 | 0.900 | 0.900 | 0 / 0 / 1 |" in text
    few = (0.8 * 1.25 * 1.005 * 1.25 * 1.25) ** 0.2
    assert f"| **few rows**: M of 1 to 64 | 5 | {few:.3f} | 0.800 | 3 / 1 / 1 |" in text
    assert "decoding has in the mean over 2 shapes 85.0% (the least 80.0%), cuBLAS 65.0%." in text


def test_a_run_that_was_cut_off_is_told(render: ModuleType) -> None:
    cut = {**ABOUT, "rows": suite_rows(), "planned": 48}
    assert render.incomplete(cut) == ["4 of 48 planned rows: the run was cut off."]
    failure = {"what": "1x2x3", "error": "E"}
    said = "Failed: 1x2x3 (E). 4 of 6 planned rows. Not measured, for want of time: 5x6x7."
    assert render.incomplete({**cut, "planned": 6, "failures": [failure], "missing": ["5x6x7"]}) == [said]
    assert render.incomplete({**cut, "planned": 4}) == []


def test_failures_stand_in_the_text(render: ModuleType) -> None:
    failure = {"what": "1x2x3", "error": "AssertionError: a|b", "at": "x.py:1"}
    text = render.suite({**ABOUT, "rows": suite_rows(), "failures": [failure]})
    assert "Failed: 1x2x3 (AssertionError: a/b)." in text


def test_the_other_tables(render: ModuleType) -> None:
    rows = [
        row("64x8192x8192", ratios={"cublas": 1.1, "quack": 2.0}, tflops={"ours": 100.0, "cublas": 90.0, "quack": 50.0})
    ]
    text = render.quack({**ABOUT, "quack": "0.6.5", "rows": rows})
    assert "| 64x8192x8192 | 100 | 90 (1.100) | 50 (2.000) | - | - | won |" in text
    assert "cublas 1.100, quack 2.000. Of the best of all, cuBLAS or quack, a shape at a time: 1.100" in text

    rates = {"scaled_mm": 1000.0, "ours": 1250.0}
    text = render.fp8(
        {
            **ABOUT,
            "rows": [row("1x2x3", scales="row", fast_accum=False, us={"scaled_mm": 5.0, "ours": 4.0}, tflops=rates)],
        }
    )
    assert "| 1x2x3 | row, precise | 5.0 | 4.0 | 1000 | 1250 | 1.250 | won |" in text
    assert "row-wise 1.250; row, precise 1.250." in text

    best = "compile, max-autotune-no-cudagraphs"
    us = {"torch": 9.0, "ours": 4.0, "ours, no epilogue": 3.0, best: 5.0}
    long = row("1x2x2049", activation="gelu", us=us, best=best, ratio=0.5)
    text = render.epilogue({**ABOUT, "rows": [row("1x2x3", activation="gelu", us=us, best=best), long]})
    assert "0.791, 1.250 of the 1 with K of 2048 and less, 0.500 of the 1 with longer K." in text
    assert "| 1x2x3 | gelu | 9 | 5 (max-autotune) | 4 | 3 | 1.250 | won |" in text

    found = {"space": 80, "of_best": 0.96, "best": "another", "wrong": [{"plan": "p", "error": "e"}]}
    text = render.search({**ABOUT, "rows": [row("1x2x3", us={"plan": 5.0, "best": 4.8, "cublas": 6.25}, **found)]})
    assert "| 1x2x3 | 80 | 5.0 | 4.8 | 0.960 | 1.250 | some plan | another |" in text
    assert "Geometric mean 0.960, worst 0.960. 1 plans failed" in text

    us = {"cublas": 9.0, **{f"ping_pong 128x128 {way} {g}": t + g for way, t in WAYS.items() for g in (4, 8)}}
    made = {"shape": "1x2x3", "us": us, "held_us": {name: 2 * value for name, value in us.items()}, "wrong": []}
    text = render.queues({**ABOUT, "held": 16, "early": 4, "rows": [made]})
    assert "| 1x2x3 | ping-pong 128x128 | 9.0 | 14.0 (4) | 24.0 (4) | 9.0 (4) | 18.0 | 28.0 | 48.0 | 18.0 |" in text
    assert "asked for 4 steps of K before" in text
    assert "drawn when they are needed" in render.queues({**ABOUT, "held": 16, "early": 0, "rows": [made]})

    calls = {"what": "call", "shape": "256x256x256", "us": {"torch.mm": 8.25, "ts.mm": 9.0}}
    shape = {"shape": "4096x4096x4096", "first_s": 1.5, "second_s": 0.001}
    first = {"what": "first call", "name": "empty cache", "shapes": [shape]}
    text = render.host({**ABOUT, "batch": 64, "batches": 50, "rows": [calls, first]})
    assert "| 256x256x256 | 8.2 | 9.0 |" in text
    assert "| empty cache | 1.500 |" in text


#: Microseconds of each way that tiles are handed out.
WAYS = {"static": 10.0, "queue": 20.0, "queues": 5.0}


def test_where_cublas_is_ahead_is_counted(render: ModuleType) -> None:
    losses = importlib.import_module("benchmarks.report.gemm_losses").losses
    us = {"ours": 28.0, "cublas": 25.0}
    lost = row("256x6144x4096", ratio=0.9, plan="static, 96 workers, 128x128 tiles, x", us=us, of_floor=0.61)
    known = row("64x64x64", ratio=0.95, plan="portable", us=us, of_floor=0.5)
    won = row("2048x2048x2048", ratio=1.01, us=us, of_floor=0.9)
    nothing, about = {"rows": []}, {"device": "NVIDIA H100", "empty_us": {"eager": 3.3, "graph": 3.4}}
    text = losses({**about, "rows": [known, lost, won]}, nothing, render.table)
    first, second = text.splitlines()[-2:]
    counted = "| 256x6144x4096 | 0.900 | 96 | 0.73 | 73% | 56 MB | 1.98 | 0.61, bytes | "
    assert first == f"{counted}not looked into: what is known is of 128x96 tiles |"
    assert second == "| 64x64x64 | 0.950 | - | - | - | 0 MB | 0.00 | 0.50, bytes | not looked into |"
    assert losses({**about, "rows": [won]}, nothing, render.table) == ""
    counts = {"us": 28.0, "dram read": 56e6, "dram %": 60.4, "l2 read": 120e6, "l2 hit %": 50, "sm active %": 73,
              "issue %": 8}  # fmt: skip
    counters = {
        "device": "a GPU", "commit": "0", "rows": [{"shape": "256x6144x4096", "ours": counts, "cublas": counts}]
    }  # fmt: skip
    *_, ours, theirs = losses({**about, "rows": [lost]}, counters, render.table).splitlines()
    assert ours == "| 256x6144x4096 | ours | 28.0 | 56 | 2.00 | 60% | 120 | 50% | 73% | 8% |"
    assert theirs.startswith("|  | cuBLAS | 28.0 |")


def test_words_on_a_loss_are_of_a_device_and_have_the_figures_of_its_row() -> None:
    losses = importlib.import_module("benchmarks.report.gemm_losses")
    about = {"device": "NVIDIA H200", "empty_us": {"eager": 3.25, "graph": 4.5}}
    cold = row(
        "1024x1024x1024", ratio=0.9, plan="single, 64x128 tiles", us={"ours": 10.0, "cublas": 9.0}, timed="graph"
    )
    assert losses.why(cold, about).startswith("an empty kernel reads 4.5 us of it;")
    assert losses.why({**cold, "timed": "eager"}, about).startswith("an empty kernel reads 3.2 us of it;")
    assert losses.why(cold, {**about, "device": "another GPU"}) == "not looked into"
    read = {"of_ours": 0.875, "of_cublas": 0.95}
    idle = row("1x6144x4096", plan="single, 16x64 tiles", us={"ours": 20.0, "cublas": 19.0}, weight_read=read)
    assert losses.why(idle, about).startswith("96 tiles: SMs that have none")
    assert "(0.88 of the rate of a kernel that only reads the weights; cuBLAS 0.95)" in losses.why(idle, about)
    assert losses.why(idle, {**about, "device": "NVIDIA H100"}) == "not looked into"
    for (_, shape), found in losses.WHY.items():
        words = losses.why(row(shape, plan=f"{found.tiles} tiles", us={"ours": 10.0, "cublas": 9.0}), about)
        assert "{" not in words
        assert not re.search(r"\d\.\d", found.words), "a figure that is typed"


def test_losses_to_other_peers_are_counted() -> None:
    losses = importlib.import_module("benchmarks.report.gemm_losses")

    def fp8(shape: str, fast: bool, ratio: float, binds: str, ours: float, theirs: float) -> dict:
        us = {"ours": ours, "scaled_mm": theirs}
        return row(shape, ratio=ratio, scales="row", fast_accum=fast, binds=binds, us=us, of_floor=0.7)

    rows = [
        fp8("1x2x3", True, 0.9, "bytes", 10.0, 9.0), fp8("4x5x6", True, 0.95, "operations", 10.0, 9.5),
        fp8("4x5x6", False, 0.99, "operations", 11.0, 10.9),
    ]  # fmt: skip
    head, text = losses.of_fp8(rows)
    assert head == "**Behind** by more than 2% in 2 of 3 rows:"
    few, many = text.splitlines()
    assert few.startswith("- bytes bind: 1, down to 0.900. ")
    assert many.startswith(
        "- operations bind: 1, down to 0.950, at 0.70 to 0.70 of the floor. Precise sums take 1.100 "
    )
    assert "torch's 1.147, so it is not they that lose." in many
    assert losses.of_fp8(rows[2:]) == []

    us = {"ours": 110.0, "ours, no epilogue": 100.0}
    (text,) = losses.of_epilogue([row("1x2x3", activation="gelu", ratio=0.95, us=us), row("4x5x6", activation="gelu")])
    assert text.startswith("**Behind**: 1x2x3, gelu (0.950): the epilogue adds 10 us to the product's 100")
    assert losses.of_epilogue([row("4x5x6", activation="gelu")]) == []

    ratios = {"ours": 1.0, "cublas": 1.01, "quack": 0.9, "quack tuned": 1.2}
    beside = [row("1x2x3", ratios=ratios), row("4x5x6", ratios={**ratios, "quack": 0.99})]
    (text,) = losses.of_quack(beside, [row("1x2x3", ratio=1.07)])
    assert "1x2x3 (0.900, quack), 1.010 of cuBLAS then and 1.070 in the suite's record. Next" in text
    assert losses.of_quack(beside[1:], []) == []


def test_what_ncu_says_is_read() -> None:
    counters = importlib.import_module("benchmarks.gemm.counters")
    head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    lines = [
        ("0", "gemm", "dram__bytes_read.sum", "Mbyte", "12.5"), ("0", "gemm", "gpu__time_duration.sum", "ns", "1,250"),
        ("1", "nvjet_tst", "gpu__time_duration.sum", "us", "3"),
        ("2", "splitk_reduce", "gpu__time_duration.sum", "us", "1"),
        ("2", "splitk_reduce", "lts__t_sectors_op_read.sum", "sector", "n/a"),
    ]  # fmt: skip
    text = "\n".join(["==PROF== Connected", head, *(",".join(f'"{x}"' for x in line) for line in lines)])
    row = counters.row_of("1x2x3", counters.counted(text))
    assert (row["ours"]["us"], row["ours"]["dram read"]) == (1.25, 12.5e6)
    assert (row["cublas"]["kernel"], row["cublas"]["launches"], row["cublas"]["us of all"]) == ("nvjet_tst", 2, 4.0)
    with pytest.raises(RuntimeError, match="no launch of cublas"):
        counters.row_of("1x2x3", counters.counted("\n".join([head, text.splitlines()[2]])))
    with pytest.raises(RuntimeError, match="ncu says nothing"):
        counters.counted("no such program")


def test_records_of_two_devices_stand_side_by_side(render: ModuleType, tmp_path: Path) -> None:
    assert render.sections(tmp_path) == []
    for device, suffix in (("NVIDIA H100 80GB HBM3", ""), ("NVIDIA H200", "_h200")):
        record = {**ABOUT, "device": device, "rows": suite_rows()}
        (tmp_path / f"gpu_gemm_suite{suffix}.json").write_text(json.dumps(record), encoding="utf-8")
    host = {**ABOUT, "batch": 64, "batches": 50, "rows": []}
    (tmp_path / "gpu_gemm_host.json").write_text(json.dumps(host), encoding="utf-8")
    parts = render.sections(tmp_path)
    assert [part.splitlines()[0] for part in parts] == [
        "## GEMM, NVIDIA H100 80GB HBM3",
        "### Beside cuBLAS, NVIDIA H100 80GB HBM3",
        "![Ratio to cuBLAS by shape, NVIDIA H100 80GB HBM3](images/gpu_gemm.png)",
        "**Where cuBLAS is ahead**",
        "## GEMM, NVIDIA H200",
        "### Beside cuBLAS, NVIDIA H200",
        "![Ratio to cuBLAS by shape, NVIDIA H200](images/gpu_gemm_h200.png)",
        "**Where cuBLAS is ahead**",
    ]


def test_the_plot_is_drawn(render: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "gpu_gemm_suite_h200.json").write_text(json.dumps({**ABOUT, "rows": suite_rows()}), encoding="utf-8")
    render.plots(tmp_path, tmp_path / "images")
    assert (tmp_path / "images" / "gpu_gemm_h200.png").read_bytes().startswith(b"\x89PNG")


def test_names_of_records() -> None:
    harness = importlib.import_module("benchmarks.core.harness")
    names = {"NVIDIA H100 80GB HBM3": "", "NVIDIA H200": "_h200", "NVIDIA A100-SXM4": "_nvidia_a100-sxm4"}
    assert {device: harness.device_suffix(device) for device in names} == names


def test_a_dry_run_writes_records_that_can_be_rendered(render: ModuleType, tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "benchmarks" / "run.py"), "gemm", "suites", "suite,search,variants",
        str(tmp_path), "--dry", "--shapes", "1024x1024x1024,64x28672x4096",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    records = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()}
    assert sorted(records) == [f"gpu_gemm_{name}_no_gpu.json" for name in ("search", "suite", "variants")]
    for record in records.values():
        assert (len(record["rows"]), record["failures"], record["missing"]) == (2, [], [])
    assert "**Decode**" in "\n".join(render.sections(tmp_path))


@pytest.fixture
def bench(tmp_path: Path):
    """A dry bench that measures nothing, and its record."""
    made = importlib.import_module("benchmarks.gemm.bench").Bench(tmp_path, 60, dry=True)
    return made, made.record("suite")


def measured(item: str) -> dict:
    return {"shape": item}


def test_what_there_is_no_time_for_is_missing(bench) -> None:
    made, record = bench

    def measure(item: str) -> dict:
        made.section_end -= 30
        return measured(item)

    made.rows(record, "abcd", measure)
    written = json.loads(record.path.read_text(encoding="utf-8"))
    assert ([row["shape"] for row in written["rows"]], written["missing"]) == (["a", "b"], ["c", "d"])


def test_what_is_cut_off_is_missing(bench) -> None:
    made, record = bench
    over = importlib.import_module("benchmarks.gemm.bench").OutOfTime

    def measure(item: str) -> dict:
        if item == "c":
            raise over
        return measured(item)

    with pytest.raises(over):
        made.rows(record, "abcd", measure)
    written = json.loads(record.path.read_text(encoding="utf-8"))
    assert ([row["shape"] for row in written["rows"]], written["missing"]) == (["a", "b"], ["c", "d"])


def test_a_run_that_is_killed_has_said_what_is_missing(bench) -> None:
    made, record = bench

    def measure(item: str) -> dict:
        seen.append(json.loads(record.path.read_text(encoding="utf-8"))["missing"])
        return measured(item)

    seen: list[list[str]] = []
    made.rows(record, "abc", measure)
    assert seen == [["a", "b", "c"], ["b", "c"], ["c"]]
    made.rows(record, "d", measure)
    assert record.data["missing"] == []


def test_a_failure_is_kept_and_the_next_is_measured(bench, capsys: pytest.CaptureFixture) -> None:
    made, record = bench

    def measure(item: str) -> dict:
        if item == "b":
            raise AssertionError("wrong answer")
        return measured(item)

    made.rows(record, "abc", measure)
    assert made.bad == 1
    assert "FAILED b: AssertionError: wrong answer" in capsys.readouterr().out
    written = json.loads(record.path.read_text(encoding="utf-8"))
    assert [row["shape"] for row in written["rows"]] == ["a", "c"]
    assert [(one["what"], one["error"]) for one in written["failures"]] == [("b", "AssertionError: wrong answer")]


def test_a_section_that_only_fails_is_given_up(bench) -> None:
    made, record = bench

    def measure(item: str) -> dict:
        raise TypeError("no such argument")

    made.rows(record, "abcdefgh", measure)
    assert (len(record.data["failures"]), record.data["missing"]) == (4, ["e", "f", "g", "h"])
