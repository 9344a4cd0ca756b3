"""What the GEMM benchmarks do without a GPU: shapes and classes, arithmetic, plans, a dry run; their page."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.core.timing import quartiles
from benchmarks.gemm import bench, compiling, counters, search, shapes
from benchmarks.report import gemm, plots
from benchmarks.report import gemm_losses as losses
from benchmarks.report.tables import geomean, incomplete, verdict

import tilestream as ts
from tilestream.plan import DeviceProperties

ROOT = Path(__file__).parents[2]


def joined(parts: list[str]) -> str:
    """A page, each paragraph of prose a line."""
    return "\n".join(part if "|" in part else " ".join(part.split()) for part in parts)


# Shapes and their arithmetic ----------------------------------------------------------------------------------------


def test_projections_are_those_of_the_models() -> None:
    small, large = shapes.MODELS.values()
    assert small.projections() == {
        "QKV": (6144, 4096), "O": (4096, 4096), "gate+up": (28672, 4096), "down": (4096, 14336),
    }  # fmt: skip
    assert large.projections() == {
        "QKV": (10240, 8192), "O": (8192, 8192), "gate+up": (57344, 8192), "down": (8192, 28672),
    }  # fmt: skip


def test_the_suite_has_every_class_and_shape_once() -> None:
    suite = shapes.suite()
    assert {group: sum(s.group == group for s in suite) for group in shapes.GROUPS} == {
        "square": 5, "decode": 24, "middle": 8, "prefill": 24, "short K": 3, "odd": 2,
    }  # fmt: skip
    assert len(set(suite)) == len(suite) == 66
    assert shapes.Shape(64, 8192, 28672, "decode", "70B down") in suite
    odd = [s for s in suite if s.group == "odd"]
    assert all(s.n % 2 == 1 and s.k % 8 == 0 for s in odd)
    assert any(s.m % 2 == 1 for s in odd)


def test_a_suite_cut_short_has_some_of_each_class() -> None:
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
def test_classes_by_rows(m: int, group: str) -> None:
    assert shapes.group_of(m) == group


def test_the_search_shapes_are_none_the_model_was_fitted_to() -> None:
    fitted = {s[:3] for s in (*shapes.suite(), *shapes.VARIANTS, *shapes.QUACK)}
    assert len(shapes.SEARCH) == 16
    assert not fitted & {s[:3] for s in shapes.SEARCH}


def test_parse() -> None:
    assert shapes.parse("1x2x3,40x50x60") == [shapes.Shape(1, 2, 3), shapes.Shape(40, 50, 60)]


def test_geometric_mean() -> None:
    assert geomean([0.5, 2.0]) == pytest.approx(1)
    assert geomean([1.0, 1.0, 8.0]) == pytest.approx(2)
    assert math.isnan(geomean([]))


def test_quartiles_and_verdict() -> None:
    assert quartiles([5, 1, 4, 2, 3]) == (2, 4)
    assert quartiles([7]) == (7, 7)
    assert verdict(1.01, (0.99, 1.02)) == "even"
    assert verdict(1.05, (1.02, 1.08)) == "won"
    assert verdict(0.97, (0.95, 0.99)) == "lost"


def test_the_floor_and_what_binds() -> None:
    peaks = shapes.peaks_of("NVIDIA H100 80GB HBM3")
    seconds, binds = peaks.floor(shapes.Shape(8192, 8192, 8192))
    assert (round(seconds * 1e6), binds) == (1111, "operations")
    seconds, binds = peaks.floor(shapes.Shape(1, 8192, 8192))
    assert (round(seconds * 1e6), binds) == (40, "bytes")
    assert peaks.floor(shapes.Shape(8192, 8192, 8192), itemsize=1)[0] == pytest.approx(1111e-6 / 2, rel=1e-3)
    assert shapes.peaks_of("NVIDIA H200").bandwidth > peaks.bandwidth


def test_impossible_times_are_refused() -> None:
    peaks, shape = shapes.PEAKS["H100"], shapes.Shape(8192, 8192, 8192)
    shapes.refuse_impossible(shape, peaks, {"ours": 1.3e-3})
    with pytest.raises(AssertionError, match=r"8192x8192x8192: ours took 1000\.00 us, the device's peak allows 1111"):
        shapes.refuse_impossible(shape, peaks, {"cublas": 1.3e-3, "ours": 1.0e-3})
    with pytest.raises(AssertionError, match="the answer or the timing is wrong"):
        shapes.refuse_impossible(shapes.Shape(1, 8192, 8192), peaks, {"ours": 30e-6})


def test_rounds_go_by_the_expected_time() -> None:
    assert shapes.rounds_for(1e-6, 2, 1.0) == 100
    assert shapes.rounds_for(1.0, 2, 1.0) == 9
    assert shapes.rounds_for(12e-3, 2, 1.0) == 40


# Plans --------------------------------------------------------------------------------------------------------------


def test_plans_as_rows_of_a_table() -> None:
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


def test_each_kernel_is_compiled_ahead_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = DeviceProperties("a Hopper", "portable", 132, 5e11, 3e12, "", "sm_90", 227 * 1024, (("bfloat16", 8e12),))
    asked = bench.planned
    monkeypatch.setattr(compiling, "planned", lambda shape, device: asked(shape, hopper))
    monkeypatch.setattr(compiling.torch, "cuda", SimpleNamespace(synchronize=lambda: None, empty_cache=lambda: None))
    run: list[object] = []
    monkeypatch.setattr(compiling, "_run", lambda shape, function, **_: run.append(function))
    for index in range(4):
        compiling.compile_part("space", shapes.SEARCH, index, 4)
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
    "counters": {"rows": []}, "since": [], "folder": "h200",
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


def test_the_suites_tables() -> None:
    text = joined(gemm.suite({**ABOUT, "rows": suite_rows(), "missing": ["8192x512x8192"]}))
    assert "NVIDIA H200, torch 2.11, Triton 3.6, commit `abc`, then. The flush reads 256 MiB before each call." in text
    assert "reads 4.0 us, in a graph 5.5 us." in text
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


def test_means_by_rows_alone_and_of_the_rate_at_which_weights_are_read() -> None:
    rows = [
        *suite_rows(), row("256x8192x8192", "middle", "70B O", ratio=0.9), row("4096x4097x4096", "odd", ratio=8.0),
        row("64x4096x4096", "decode", "8B O", ratio=1.25, weight_read={"us": 36.0, "of_ours": 0.8, "of_cublas": 0.6}),
        row("16x8192x8192", "decode", "70B O", ratio=1.25, weight_read={"us": 36.0, "of_ours": 0.9, "of_cublas": 0.7}),
    ]  # fmt: skip
    text = joined(gemm.suite({**ABOUT, "rows": rows}))
    assert "| **big**: M of 1024 and more | 2 | 2.000 | 0.500 | 1 / 0 / 1 |" in text
    assert "| **big**, without the odd shapes | 1 | 0.500 | 0.500 | 0 / 0 / 1 |" in text
    assert "| **middle**: M of 65 to 1023 | 1 | 0.900 | 0.900 | 0 / 0 / 1 |" in text
    few = (0.8 * 1.25 * 1.005 * 1.25 * 1.25) ** 0.2
    assert f"| **few rows**: M of 1 to 64 | 5 | {few:.3f} | 0.800 | 3 / 1 / 1 |" in text
    assert "Over 2 shapes ours reaches 85.0% of its rate in the mean (80.0% at least), cuBLAS 65.0%." in text


def test_a_run_that_was_cut_off_is_told() -> None:
    cut = {**ABOUT, "rows": suite_rows(), "planned": 48}
    assert incomplete(cut) == ["4 of 48 planned rows: the run was cut off."]
    failure = {"what": "1x2x3", "error": "E"}
    said = "Failed: 1x2x3 (E). 4 of 6 planned rows. Not measured, for want of time: 5x6x7."
    assert incomplete({**cut, "planned": 6, "failures": [failure], "missing": ["5x6x7"]}) == [said]
    assert incomplete({**cut, "planned": 4}) == []


def test_failures_stand_in_the_text() -> None:
    failure = {"what": "1x2x3", "error": "AssertionError: a|b", "at": "x.py:1"}
    text = joined(gemm.suite({**ABOUT, "rows": suite_rows(), "failures": [failure]}))
    assert "Failed: 1x2x3 (AssertionError: a/b)." in text


def test_the_other_tables() -> None:
    rows = [
        row("64x8192x8192", ratios={"cublas": 1.1, "quack": 2.0}, tflops={"ours": 100.0, "cublas": 90.0, "quack": 50.0})
    ]
    text = joined(gemm.quack({**ABOUT, "quack": "0.6.5", "rows": rows}))
    assert "| 64x8192x8192 | 100 | 90 (1.100) | 50 (2.000) | - | - | won |" in text
    assert "cublas 1.100, quack 2.000. Against the best of all, cuBLAS or quack, shape by shape: 1.100" in text

    rates = {"scaled_mm": 1000.0, "ours": 1250.0}
    text = joined(
        gemm.fp8(
            {
                **ABOUT,
                "rows": [
                    row("1x2x3", scales="row", fast_accum=False, us={"scaled_mm": 5.0, "ours": 4.0}, tflops=rates)
                ],
            }
        )
    )
    assert "| 1x2x3 | row, precise | 5.0 | 4.0 | 1000 | 1250 | 1.250 | won |" in text
    assert "row-wise 1.250; row, precise 1.250." in text

    best = "compile, max-autotune-no-cudagraphs"
    us = {"torch": 9.0, "ours": 4.0, "ours, no epilogue": 3.0, best: 5.0}
    long = row("1x2x2049", activation="gelu", us=us, best=best, ratio=0.5)
    text = joined(gemm.epilogue({**ABOUT, "rows": [row("1x2x3", activation="gelu", us=us, best=best), long]}))
    assert "0.791, 1.250 of the 1 with K of 2048 and less, 0.500 of the 1 with longer K." in text
    assert "| 1x2x3 | gelu | 9 | 5 (max-autotune) | 4 | 3 | 1.250 | won |" in text

    found = {"space": 80, "of_best": 0.96, "best": "another", "wrong": [{"plan": "p", "error": "e"}]}
    text = joined(
        gemm.search({**ABOUT, "rows": [row("1x2x3", us={"plan": 5.0, "best": 4.8, "cublas": 6.25}, **found)]})
    )
    assert "| 1x2x3 | 80 | 5.0 | 4.8 | 0.960 | 1.250 | some plan | another |" in text
    assert "Geometric mean 0.960, worst 0.960. 1 plans failed" in text

    us = {"cublas": 9.0, **{f"ping_pong 128x128 {way} {g}": t + g for way, t in WAYS.items() for g in (4, 8)}}
    made = {"shape": "1x2x3", "us": us, "held_us": {name: 2 * value for name, value in us.items()}, "wrong": []}
    text = joined(gemm.queues({**ABOUT, "held": 16, "early": 4, "rows": [made]}))
    assert "| 1x2x3 | ping-pong 128x128 | 9.0 | 14.0 (4) | 24.0 (4) | 9.0 (4) | 18.0 | 28.0 | 48.0 | 18.0 |" in text
    assert "prefetched 4 K steps before" in text
    assert "drawn when they are needed" in joined(gemm.queues({**ABOUT, "held": 16, "early": 0, "rows": [made]}))

    calls = {"what": "call", "shape": "256x256x256", "us": {"torch.mm": 8.25, "ts.mm": 9.0}}
    shape = {"shape": "4096x4096x4096", "first_s": 1.5, "second_s": 0.001}
    first = {"what": "first call", "name": "empty cache", "shapes": [shape]}
    text = joined(gemm.host({**ABOUT, "batch": 64, "batches": 50, "rows": [calls, first]}))
    assert "| 256x256x256 | 8.2 | 9.0 |" in text
    assert "| empty cache | 1.500 |" in text


#: Microseconds of each way that tiles are handed out.
WAYS = {"static": 10.0, "queue": 20.0, "queues": 5.0}


def test_where_cublas_is_ahead_is_counted() -> None:
    us = {"ours": 28.0, "cublas": 25.0}
    lost = row("256x6144x4096", ratio=0.9, plan="static, 96 workers, 128x128 tiles, x", us=us, of_floor=0.61)
    known = row("64x64x64", ratio=0.95, plan="portable", us=us, of_floor=0.5)
    won = row("2048x2048x2048", ratio=1.01, us=us, of_floor=0.9)
    nothing, about = {"rows": []}, {"device": "NVIDIA H100", "empty_us": {"eager": 3.3, "graph": 3.4}}
    text = joined(losses.losses({**about, "rows": [known, lost, won]}, nothing))
    first, second = text.splitlines()[-2:]
    known_row = "| 256x6144x4096 | 0.900 | 96 | 0.73 | 73% | 56 MB | 1.98 | 0.61, bytes | "
    assert first == f"{known_row}not looked into: what is known is of 128x96 tiles |"
    assert second == "| 64x64x64 | 0.950 | - | - | - | 0 MB | 0.00 | 0.50, bytes | not looked into |"
    assert losses.losses({**about, "rows": [won]}, nothing) == []
    counts = {"us": 28.0, "dram read": 56e6, "dram %": 60.4, "l2 read": 120e6, "l2 hit %": 50, "sm active %": 73,
              "issue %": 8}  # fmt: skip
    counted = {
        "device": "a GPU", "commit": "0", "rows": [{"shape": "256x6144x4096", "ours": counts, "cublas": counts}]
    }  # fmt: skip
    *_, ours, theirs = joined(losses.losses({**about, "rows": [lost]}, counted)).splitlines()
    assert ours == "| 256x6144x4096 | ours | 28.0 | 56 | 2.00 | 60% | 120 | 50% | 73% | 8% |"
    assert theirs.startswith("|  | cuBLAS | 28.0 |")


def test_words_on_a_loss_are_of_a_device_and_have_the_figures_of_its_row() -> None:
    about = {"device": "NVIDIA H200", "empty_us": {"eager": 3.25, "graph": 4.5}}
    cold = row(
        "1024x1024x1024", ratio=0.9, plan="single, 64x128 tiles", us={"ours": 10.0, "cublas": 9.0}, timed="graph"
    )
    assert losses.why(cold, about).startswith("an empty kernel reads 4.5 us of it;")
    assert losses.why({**cold, "timed": "eager"}, about).startswith("an empty kernel reads 3.2 us of it;")
    assert losses.why(cold, {**about, "device": "another GPU"}) == "not looked into"
    read = {"of_ours": 0.875, "of_cublas": 0.95}
    idle = row("1x6144x4096", plan="single, 16x64 tiles", us={"ours": 20.0, "cublas": 19.0}, weight_read=read)
    assert losses.why(idle, about).startswith("96 tiles: SMs without a tile")
    assert "(0.88 of the rate of a kernel that only reads the weights; cuBLAS 0.95)" in losses.why(idle, about)
    assert losses.why(idle, {**about, "device": "NVIDIA H100"}) == "not looked into"
    for part in (part for part in losses.NOTES.parts if part.startswith("loss ")):
        _, device, shape, tiles = part.split()
        of = row(shape, plan=f"{tiles} tiles", us={"ours": 10.0, "cublas": 9.0})
        words = losses.why(of, {**about, "device": device})
        assert "not looked" not in words
        assert "{" not in words
        assert not re.search(r"\d\.\d", losses.NOTES.parts[part]), "a figure that is typed"


def test_losses_to_other_peers_are_counted() -> None:
    def fp8(shape: str, fast: bool, ratio: float, binds: str, ours: float, theirs: float) -> dict:
        us = {"ours": ours, "scaled_mm": theirs}
        return row(shape, ratio=ratio, scales="row", fast_accum=fast, binds=binds, us=us, of_floor=0.7)

    rows = [
        fp8("1x2x3", True, 0.9, "bytes", 10.0, 9.0), fp8("4x5x6", True, 0.95, "operations", 10.0, 9.5),
        fp8("4x5x6", False, 0.99, "operations", 11.0, 10.9),
    ]  # fmt: skip
    head, text = losses.of_fp8(rows)
    assert head == "**Behind** by more than 2% in 2 of 3 rows:"
    few, many = (f"- {' '.join(item.split())}" for item in text.removeprefix("- ").split("\n- "))
    assert few.startswith("- bytes bind: 1, down to 0.900. ")
    assert many.startswith(
        "- operations bind: 1, down to 0.950, at 0.70 to 0.70 of the floor. Precise sums take 1.100 "
    )
    assert "torch's 1.147, so precise sums are not the reason." in many
    assert losses.of_fp8(rows[2:]) == []

    us = {"ours": 110.0, "ours, no epilogue": 100.0}
    (text,) = losses.of_epilogue([row("1x2x3", activation="gelu", ratio=0.95, us=us), row("4x5x6", activation="gelu")])
    assert text.startswith("**Behind**: 1x2x3, gelu (0.950): the epilogue adds 10 us to the product's 100")
    assert losses.of_epilogue([row("4x5x6", activation="gelu")]) == []

    ratios = {"ours": 1.0, "cublas": 1.01, "quack": 0.9, "quack tuned": 1.2}
    beside = [row("1x2x3", ratios=ratios), row("4x5x6", ratios={**ratios, "quack": 0.99})]
    (text,) = losses.of_quack(beside, [row("1x2x3", ratio=1.07)])
    assert "1x2x3 (0.900, quack), 1.010 of cuBLAS then and 1.070 in the suite's record. Next" in " ".join(text.split())
    assert losses.of_quack(beside[1:], []) == []


def test_what_ncu_says_is_read() -> None:
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


def test_records_of_two_devices_stand_side_by_side(results: Path, write) -> None:
    assert gemm.page(results) == [gemm.NOTES("page")]
    for folder, device in (("h100", "NVIDIA H100 80GB HBM3"), ("h200", "NVIDIA H200")):
        write(folder, "gemm_suite", {**ABOUT, "device": device, "rows": suite_rows()})
    write("h100", "gemm_host", {**ABOUT, "batch": 64, "batches": 50, "rows": []})
    heads = [line for line in "\n".join(gemm.page(results)).splitlines() if re.match(r"#|!|\*\*Where", line)]
    assert heads == [
        "# GEMM on one GPU",
        "## Beside cuBLAS",
        "### Beside cuBLAS, NVIDIA H100 80GB HBM3",
        "![Ratio to cuBLAS by shape, NVIDIA H100 80GB HBM3](../images/gemm_h100.png)",
        "**Where cuBLAS is ahead**",
        "### Beside cuBLAS, NVIDIA H200",
        "![Ratio to cuBLAS by shape, NVIDIA H200](../images/gemm_h200.png)",
        "**Where cuBLAS is ahead**",
    ]


def test_the_plot_is_drawn(results: Path, write) -> None:
    pytest.importorskip("matplotlib")
    write("h200", "gemm_suite", {**ABOUT, "rows": suite_rows()})
    plots.draw_all(results, results / "images")
    assert (results / "images" / "gemm_h200.png").read_bytes().startswith(b"\x89PNG")


def test_a_dry_run_writes_records_that_can_be_rendered(results: Path) -> None:
    rows = {"suite": 2, "search": 2, "variants": 2, "fp8": 2 * 4, "epilogue": 8}
    command = [
        sys.executable, str(ROOT / "benchmarks" / "run.py"), "gemm", ",".join(rows),
        str(results), "--dry", "--shapes", "1024x1024x1024,64x28672x4096",
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    records = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in (results / "no_gpu").iterdir()}
    assert {name: len(record["rows"]) for name, record in records.items()} == {
        f"gemm_{name}.json": count for name, count in rows.items()
    }
    assert not any(record[what] for record in records.values() for what in ("failures", "missing"))
    text = "\n".join(gemm.page(results))
    assert "**Decode**" in text
    assert "### fp8, no GPU" in text
