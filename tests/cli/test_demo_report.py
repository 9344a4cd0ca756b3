"""What the demonstration says and writes, from results that were made up: no GPU, and no time measured."""

import io
import json

import pytest
import torch
from rich.console import Console

import tilestream as ts
from tilestream.cli.demo import machine, report
from tilestream.cli.demo.check import Verdict
from tilestream.cli.demo.measure import Result, Timings
from tilestream.core.device import DeviceProperties

RIGHT = Verdict(16, 524288, 0, 0.01, 0.01, 0.03, 1.0, 1.0, 2.5)
GPU = DeviceProperties(
    "Some GPU", "portable", 132, 1e11, 3e12, "made up", "sm_90", 232448, (("float16", 7e12), ("bfloat16", 7e12))
)
EXTENTS = (16384, 8192, 8192)


def timings(bring="read", **seconds):
    made = Timings(bring)
    for way, value in seconds.items():
        made.add(way, value)
    return made


def gpu_result(verdict=RIGHT, n_is="default", **other):
    seconds = {"copy": 5e-3, "multiply": 4e-3, "torch": 3e-3, "sequential": 9e-3, "streamed": 5.25e-3, **other}
    return Result(
        about=[("gpu", "Some GPU"), ("input", "256 MiB of [random] bfloat16"), ("copy", "copied to cuda:0")],
        facts={"input": {"bytes": 2**28}},
        nbytes=2**28,
        n_is=n_is,
        plan=ts.plan(*EXTENTS, dtype="bfloat16", device=GPU, arrival=ts.Arrival.uniform(512, 32)),
        timings=timings("copy", **seconds),
        verdict=verdict,
        trace=None,
        bring_cpu=4e-4,
    )


def shown(result, files=None):
    console = Console(file=io.StringIO(), width=160)
    report.show(console, result, files or {})
    return console.file.getvalue()


def test_overlap_is_the_time_saved_and_its_share_of_what_could_be():
    made = timings(read=0.1, multiply=0.12, torch=0.1, sequential=0.22, streamed=0.13)
    assert made.won == pytest.approx(0.09)
    assert made.hideable == 0.1
    assert made.larger == 0.12
    assert made.over_larger == pytest.approx(0.13 / 0.12)
    assert "overlap won 90.0 ms" in report._overlap(made)
    assert "90% of the 100.0 ms" in report._overlap(made)


def test_a_loss_is_called_a_loss():
    made = timings(read=0.1, multiply=0.12, torch=0.1, sequential=0.22, streamed=0.25)
    assert "no overlap won" in report._overlap(made)
    assert "30.0 ms longer" in report._overlap(made)


def test_a_gpus_report_speaks_of_copies():
    text = shown(gpu_result(), {"timeline": "none: the demo draws one on the CPU only"})
    for words in (
        "gpu       Some GPU\n",
        "input     256 MiB of [random] bfloat16\n",
        "[16384, 8192] @ [8192, 8192], bfloat16; 8192 columns: the default",
        "copy alone",
        "53.69 GB/s",
        "550 TFLOP/s",
        "733 TFLOP/s",
        "overlap won 3.750 ms: 94% of the 4.000 ms that could be hidden",
        "streamed takes 1.05 times the larger of copying and multiplying",
        "answer right",
        "backend   hopper",
        "rows in 32 chunks of 512 rows",
        "timeline  none: the demo draws one on the CPU only\n",
    ):
        assert words in text
    assert "read" not in text.partition("matmul [")[0]


@pytest.mark.parametrize(("n_is", "says"), [("given", "as asked for"), ("calibrated", "take about as long")])
def test_where_n_comes_from_is_said(n_is, says):
    assert says in shown(gpu_result(n_is=n_is))


def test_a_wrong_answer_is_shouted():
    wrong = Verdict(16, 524288, 7, 0.5, 0.01, 0.03, 9.0, 1.0, 2.5)
    text = shown(gpu_result(wrong))
    assert "ANSWER WRONG" in text
    assert "left NaN         7 of all elements" in text


def test_figures_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    figures = json.loads(json.dumps(report.figures(gpu_result())))
    assert figures["device"] == "Some GPU"
    assert figures["backend"] == "hopper"
    assert figures["workers"] == 132
    assert figures["versions"].keys() >= {"tilestream", "python", "torch", "triton", "cuda"}
    assert figures["input"] == {"bytes": 2**28}
    assert figures["problem"] == {
        "m": 16384, "n": 8192, "k": 8192, "dtype": "bfloat16", "n_calibrated": False, "chunks": 32,
        "rows_per_chunk": 512,
    }  # fmt: skip
    assert figures["median_ms"]["copy"] == 5
    assert figures["copy_cpu_ms"] == pytest.approx(0.4)
    assert figures["gb_per_s"] == {"copy": pytest.approx(2**28 / 5e-3 / 1e9)}
    operations = 2 * 16384 * 8192 * 8192
    assert figures["tflop_per_s"] == {
        "multiply": pytest.approx(operations / 4e-3 / 1e12), "torch": pytest.approx(operations / 3e-3 / 1e12)
    }  # fmt: skip
    assert figures["streamed_over_larger"] == pytest.approx(1.05)
    assert figures["answer"]["right"]


def test_the_larger_of_the_two_is_whichever_it_is():
    assert report.figures(gpu_result(multiply=10e-3))["streamed_over_larger"] == pytest.approx(0.525)


@pytest.mark.parametrize(("load", "said"), [(0.0, False), (1e6, True), (None, False)])
def test_a_busy_host_makes_times_noisy_on_a_gpu_too(monkeypatch, load, said):
    monkeypatch.setattr(report, "load_average", lambda: load)
    assert ("times are noisy" in shown(gpu_result())) is said


def test_versions_name_what_makes_kernels_only_where_there_are_some(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert machine.versions().keys() == {"tilestream", "python", "torch"}
    assert machine.versions(gpu=True)["hip"] == "7.1"
