"""What the GEMM benchmarks do without a GPU: shapes and classes, arithmetic, plans, words on losses, a dry run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.core.records import text_of
from benchmarks.core.section import sections
from benchmarks.core.session import Session
from benchmarks.gemm import (
    bench,
    compiling,
    counters,
    cutlass,
    deepgemm,
    grouped,
    grouped_peers,
    grouped_sources,
    search,
    shapes,
)
from benchmarks.report import gemm, pages
from benchmarks.report import gemm_losses as losses
from benchmarks.report import grouped as report_grouped
from board_records import board_record, written

import tilestream as ts
from benchmarks import run
from tilestream.launch.hopper import arguments as hopper_arguments
from tilestream.launch.hopper import realign_launch
from tilestream.launch.portable import arguments as portable_arguments
from tilestream.plan import DeviceProperties

ROOT = Path(__file__).parents[2]


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
    fitted = {s[:3] for s in (*shapes.suite(), *shapes.QUACK)}
    assert len(shapes.SEARCH) == 16
    assert not fitted & {s[:3] for s in shapes.SEARCH}


@pytest.mark.parametrize("skew", grouped.SKEWS)
def test_rows_of_experts_are_all_rows_and_skewed(skew) -> None:
    given = grouped.sizes(16384, 128, skew)
    assert (len(given), sum(given)) == (128, 16384)
    assert min(given) >= 0
    largest = {"uniform": (128, 128), "mild": (150, 250), "zipf": (3000, 6000)}[skew]
    assert largest[0] <= max(given) <= largest[1]
    assert given == grouped.sizes(16384, 128, skew)


def test_the_loop_is_the_grouped_product() -> None:
    given, layer = [3, 0, 9], grouped.Layer("", 12, 8, 16, 3)
    for gradient in (False, True):
        a, b = grouped.operands(layer, gradient, torch.rand)
        ends = torch.tensor(given).cumsum(0).to(torch.int32)
        assert torch.allclose(grouped.loop(a, b, given), ts.grouped_mm(a, b, ends), atol=1e-5)
    assert len(grouped.launches()) == 2 * len(grouped.LAYERS)


class Package:
    """DeepGEMM as its kernel works: by blocks of as many rows as groups are padded to, of their first row's group."""

    __version__ = "0.1.4"

    def __init__(self, wrong: Exception | float | None = None) -> None:
        self.wrong = wrong

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return 16

    def m_grouped_bf16_gemm_nt_contiguous(self, a, b, d, grouped_layout) -> None:
        assert (a.dtype, grouped_layout.dtype, len(grouped_layout)) == (torch.bfloat16, torch.int32, len(a))
        assert all(x.is_contiguous() for x in (a, b, d, grouped_layout))
        if isinstance(self.wrong, Exception):
            raise self.wrong
        for rows, out, of in zip(a.split(16), d.split(16), grouped_layout.split(16), strict=True):
            out.copy_(rows @ b[of[0]].T * (self.wrong or 1.0))


def test_rows_of_sources_are_found_in_the_order_of_the_groups() -> None:
    order = grouped_sources.by_group([2, 0, 1], sources=2, capacity=9)
    assert order.tolist() == [0, 1, 9, 10, 2, 11]


def test_the_page_says_what_the_kernel_of_sources_gains() -> None:
    us = {"hopper": 10.0, "hopper, signalled": 11.0, "portable": 20.0, "portable, signalled": 22.0, "sorted": 9.0}
    row = {
        "layer": "a layer", "shape": "8x8x8, 2 experts", "skew": "zipf", "us": us, "plans": {"hopper": "a plan"},
        "ratio": 2.0, "band": [1.9, 2.1], "ratio, signalled": 2.0, "band, signalled": [1.9, 2.1],
    }  # fmt: skip
    data = {
        "name": "gemm_grouped_sources",
        "device": "a GPU",
        "torch": "2",
        "commit": "c",
        "date": "d",
        "rows": [row],
        "missing": [],
        "failures": [],
    }
    text = "\n".join(report_grouped.sources(data))
    assert "| all there | 2.000 | 2.000 | 1 / 0 / 0 | 0.900 |" in text
    assert "| a layer | 8x8x8, 2 experts | zipf | 10 | 11 | 20 | 22 | 9 | 2.000 | 2.000 | a plan |" in text


def dry_row(peers: list[grouped_peers.Peer], gradient: bool = False) -> dict:
    at = SimpleNamespace(dry=True, device="cpu", clock=bench.WallClock())
    return grouped.row(at, grouped.Layer("a layer", 60, 32, 48, 4), "zipf", gradient, peers)


def of_package(package: Package) -> grouped_peers.Peer:
    return grouped_peers.Peer("DeepGEMM", "0", lambda *given: grouped_peers.of_deepgemm(package, *given))


def test_deepgemm_is_a_peer_of_products() -> None:
    row = dry_row([of_package(Package())])
    given, theirs = grouped.sizes(60, 4, "zipf"), row["peers"]["DeepGEMM"]
    assert theirs["padded_rows"] == sum(-(-size // 16) * 16 for size in given) > 60
    assert set(row["us"]) == set(row["tflops"]) == {"torch", "ours", "loop", "DeepGEMM"}
    assert theirs["ratio"] == pytest.approx(row["us"]["DeepGEMM"] / row["us"]["ours"], rel=0.01)
    assert row["seed"] == grouped.SKEWS["zipf"]
    assert "refused" not in row
    assert "peers" not in dry_row([of_package(Package())], gradient=True)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [(RuntimeError("no compiler"), "RuntimeError: no compiler"), (1.5, "AssertionError: wrong answer")],
)
def test_deepgemm_is_left_out_of_a_row_where_it_fails_or_is_wrong(wrong, why) -> None:
    row = dry_row([of_package(Package(wrong))])
    assert row["refused"]["DeepGEMM"].startswith(why)
    assert set(row["us"]) == {"torch", "ours", "loop"}
    assert "peers" not in row


def test_the_fastest_right_configuration_of_a_peer_is_its_time() -> None:
    def ways(a, b, given) -> grouped_peers.Ways:
        ends = torch.tensor(given).cumsum(0).to(torch.int32)

        def right(repeats: int) -> torch.Tensor:
            return [torch._grouped_mm(a, b, ends) for _ in range(repeats)][-1]

        def raises() -> torch.Tensor:
            raise RuntimeError("not of this shape")

        calls = {"slow": lambda: right(300), "wrong": lambda: 2 * right(1), "raises": raises, "fast": lambda: right(1)}
        return grouped_peers.Ways(calls, lambda out: out, {})

    theirs = dry_row([grouped_peers.Peer("a peer", "1", ways)])["peers"]["a peer"]
    assert theirs["config"] == "fast"
    assert theirs["refused"]["raises"] == "RuntimeError: not of this shape"
    assert theirs["refused"]["wrong"].startswith("AssertionError: wrong answer")


def test_quack_is_given_where_groups_begin_and_end() -> None:
    seen = []

    def product(a, b, out, *, cu_seqlens_m, config, dynamic_scheduler) -> None:
        seen.append((cu_seqlens_m.dtype, config["tile_n"], dynamic_scheduler))
        out.copy_(torch._grouped_mm(a, b, cu_seqlens_m[1:]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "quack", SimpleNamespace())
        patch.setitem(sys.modules, "quack.gemm_config", SimpleNamespace(GemmConfig=dict))
        interface = SimpleNamespace(gemm_tuned=SimpleNamespace(fn=product))
        row = dry_row([grouped_peers.Peer("quack", "1", lambda *given: grouped_peers.of_quack(interface, *given))])
    assert row["peers"]["quack"]["config"] in grouped_peers._QUACK
    assert set(seen) >= {(torch.int32, 192, False), (torch.int32, 192, True), (torch.int32, 256, False)}


def test_peers_are_found_where_they_are(monkeypatch, tmp_path) -> None:
    for name in ("deep_gemm", "quack"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUTLASS_LIBRARIES", str(tmp_path))
    assert deepgemm.imported() == (None, "ModuleNotFoundError: import of deep_gemm halted; None in sys.modules")
    peers, absent = grouped_peers.found()
    assert (peers, set(absent)) == ([], {"DeepGEMM", "quack", "CUTLASS"})
    assert absent["CUTLASS"] == "no nvcc on PATH"
    assert len(grouped.launches()) == 2 * len(grouped.LAYERS)
    monkeypatch.setitem(sys.modules, "deep_gemm", Package())
    assert deepgemm.imported()[1] == "0.1.4"
    assert len(grouped.launches()) == 3 * len(grouped.LAYERS)
    some = next(iter(cutlass.CONFIGS))
    cutlass._file(cutlass.CONFIGS[some]).touch()
    (_, found), absent = grouped_peers.found()
    assert (found.name, found.configs, set(absent)) == ("CUTLASS", [some], {"quack"})
    cutlass.build(some)  # it is there
    with pytest.raises(RuntimeError, match="nvcc did not compile it"):
        cutlass.library(next(name for name in cutlass.CONFIGS if name != some))


def test_parse() -> None:
    assert shapes.parse("1x2x3,40x50x60") == [shapes.Shape(1, 2, 3), shapes.Shape(40, 50, 60)]


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


def test_plans_differ_in_knobs() -> None:
    plans = [ts.plan(512, 512, 512, workers=2, schedule=kind, tile=(64, 64)) for kind in ("static", "dynamic")]
    fields = [bench.plan_fields(plan) for plan in plans]
    assert fields[0]["block"].startswith("64x64x")
    assert (fields[0]["kind"], fields[1]["kind"]) == ("static", "dynamic")
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


def words(shape: str, tiles: str, device: str, ours: float = 10.0, **more) -> str:
    """What is said of a row that cuBLAS wins on a device."""
    row = {"shape": shape, "plan": f"single, {tiles} tiles", "us": {"cublas": 0.95 * ours, "ours": ours}, **more}
    return losses.why(row, {"device": f"NVIDIA {device}", "empty_us": {"eager": 3.25, "graph": 4.5}})


def test_words_on_a_loss_are_of_a_device_and_have_the_figures_of_its_row() -> None:
    cold = "1024x1024x1024", "64x128"
    assert words(*cold, "H200", timed="graph").startswith("an empty kernel reads 4.5 us of it;")
    assert words(*cold, "H200", timed="eager").startswith("an empty kernel reads 3.2 us of it;")
    assert words(*cold, "L4") == words("1x6144x4096", "16x64", "H100") == "not looked into"
    idle = words("1x6144x4096", "16x64", "H200", 20.0, weight_read={"of_ours": 0.875, "of_cublas": 0.95})
    assert idle.startswith("96 tiles: SMs without a tile")
    assert "(0.88 of the rate of a kernel that only reads the weights; cuBLAS 0.95)" in idle
    for part in (part for part in losses.NOTES.parts if part.startswith("loss ")):
        _, device, shape, tiles = part.split()
        said = words(shape, tiles, device)
        assert "not looked" not in said
        assert "{" not in said
        assert not re.search(r"\d\.\d", losses.NOTES.parts[part]), "a figure that is typed"


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


def test_the_kernels_of_a_product_are_ours() -> None:
    products = (hopper_arguments.gemm, portable_arguments.gemm, portable_arguments.one_tile, realign_launch.realign)
    assert {kernel.__name__ for kernel in products} == counters.OURS
    assert counters.is_ours("one_tile (132, 1, 1)x(128, 1, 1)")
    assert not any(map(counters.is_ours, ("nvjet_tst_gemm", "splitKreduce_kernel", "void gemm<float>(int)")))


@pytest.mark.parametrize("name", ["5x7x9", "1:200:27", "1:200:56"])
def test_counters_are_of_a_product_and_of_the_same_by_torch(name) -> None:
    problem = counters.named(name).small()._replace(dtype="float16")
    calls = counters.calls_of(problem, "cpu")
    torch.testing.assert_close(calls["ours"](), calls["cublas"](), rtol=1e-2, atol=1e-2)


def of_ncu(*launches: tuple[str, float]) -> str:
    """What ncu says of launches."""
    lines = ['"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"']
    for number, (kernel, us) in enumerate(launches):
        for metric in counters.METRICS.values():
            lines.append(f'"{number}","{kernel}","{metric}","us","{us if "duration" in metric else 1}"')  # noqa: PERF401
    return "\n".join(lines)


def test_counters_of_the_worst_problems_of_the_boards_stand_beside_them(results, monkeypatch) -> None:
    record = board_record()
    ranked = sorted(record["rows"], key=lambda row: row["ratio"])
    (path,) = written(results, record)
    assert len(counters.worst([path.parent])) == sum(row["ratio"] < counters.BELOW for row in ranked) == 1
    monkeypatch.setattr(counters, "BELOW", 9.0)
    names = counters.worst([results / "h200", path.parent])
    assert [str(counters.named(name)) for name in names] == [row["shape"] for row in ranked][: counters.WORST]
    assert all(name.startswith("1:30:") for name in names)
    with pytest.raises(FileNotFoundError, match="run gemm random"):
        counters.worst([results / "h200"])

    def ncu(command, **how):
        assert command[-3:-1] == ["gemm", "_ncu"]
        said = of_ncu(("one_tile", 5), ("nvjet_tst", 3)) if command[-1] != names[1] else "no such counter"
        if command[-1] == names[0]:
            said = of_ncu(("realign", 2), ("gemm", 5), ("splitk", 1), ("nvjet_tst", 3))
        return SimpleNamespace(stdout=said, stderr="")

    monkeypatch.setattr(counters, "subprocess", SimpleNamespace(run=ncu))
    monkeypatch.setattr(counters, "folder_of", lambda device: "h100")
    session = Session(run.options("gemm", "counters", str(results), "--shapes", "board"))
    assert session.run(sections("gemm"), ["counters"]) == 1, "one of them failed"
    found = json.loads((results / "no_gpu" / "gemm_counters_board.json").read_text(encoding="utf-8"))
    assert [row["shape"] for row in found["rows"]] == [row["shape"] for row in (ranked[0], *ranked[2 : len(names)])]
    assert [failure["what"] for failure in found["failures"]] == [names[1]]
    assert "**What `ncu` counts" not in pages.text("gemm_random", results)
    (path.parent / "gemm_counters_board.json").write_text(text_of(found), encoding="utf-8")
    text = pages.text("gemm_random", results).replace("`", "")
    assert "What ncu counts in the worst of these" in text
    assert f"| {ranked[0]['shape']} | ours | 5.0 of 7.0 |" in text
    assert "|  | torch | 3.0 of 4.0 |" in text
    assert f"| {ranked[2]['shape']} | ours | 5.0 |" in text


def test_a_dry_run_writes_records_that_can_be_rendered(results: Path) -> None:
    rows = {"suite": 2, "search": 2, "fp8": 2 * 4, "epilogue": 8}
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
