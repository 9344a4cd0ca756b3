import csv

import pytest

from tilestream_tools.sweep import record
from tilestream_tools.sweep.record import Point, Sweep

pytest.importorskip("yaml")


def point(taken, implementation="dynamic"):
    return Point(
        "64x64x64", "", "bfloat16", "neighbour", taken, 132 - taken, 132, implementation, 1, 1e-6, 1e-6, 1.1e-6, 5,
        0.5 * (132 - taken) / 132, "", 1e-3,
    )  # fmt: skip


@pytest.fixture
def saved(tmp_path):
    for name, implementation in (("a", "dynamic"), ("b", "torch")):
        Sweep({"device": name}, [point(taken, implementation) for taken in (0, 8)]).write(tmp_path / f"{name}.json")
    return tmp_path


def test_records_are_laid_over_one_another_anywhere(cli, saved):
    pytest.importorskip("matplotlib")
    result = cli("sweep", "--plot", saved / "a.json", saved / "b.json", "--out", saved / "both.png")
    assert result.exit_code == 0, result.output
    assert (saved / "both.png").stat().st_size > 1000
    assert f"picture: {saved / 'both.png'}" in result.stdout


def test_on_the_cpu(cli, tmp_path):
    out = tmp_path / "cpu.json"
    result = cli(
        "sweep", "--backend", "cpu", "--shape", "64x48x32", "--dtype", "float32", "--ways", "static,dynamic,torch",
        "--queues", "1,2", "--taken", "0", "--rounds", 3, "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = record.read(out)
    assert [point.label for point in found.points] == ["static", "dynamic", "dynamic, 2 queues", "torch"]
    assert found.about["by"] == "busy"
    with out.with_suffix(".csv").open() as file:
        assert len(list(csv.DictReader(file))) == 4
    assert out.with_suffix(".png").exists()


def test_without_a_gpu_it_says_so(cli, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = cli("sweep")
    assert result.exit_code == 2
    assert "there is no GPU here: sweep on one, draw records with --plot, or try --backend cpu" in result.stderr


def test_peers_that_are_not_installed_are_left_out(cli, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "quack.gemm_interface", None)
    out = tmp_path / "cpu.json"
    result = cli(
        "sweep", "--backend", "cpu", "--shape", "16x16x16", "--dtype", "float32", "--ways", "torch,quack",
        "--taken", "0", "--rounds", 3, "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "not installed here, and left out: quack" in result.stdout
    assert {point.implementation for point in record.read(out).points} == {"torch"}


def test_nothing_to_run_is_said_before_anything_is(cli, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "quack.gemm_interface", None)
    result = cli("sweep", "--backend", "cpu", "--ways", "quack,quack-dynamic")
    assert (result.exit_code, "--ways quack,quack-dynamic: not installed here" in result.stderr) == (2, True)


def test_refused_points_end_with_status_1(cli, tmp_path, monkeypatch):
    from tilestream.core.device import DeviceProperties

    monkeypatch.setattr(DeviceProperties, "peak", lambda self, dtype, units: 1.0)
    result = cli(
        "sweep", "--backend", "cpu", "--shape", "16x16x16", "--dtype", "float32", "--ways", "torch", "--taken", "0",
        "--rounds", 3, "--out", tmp_path / "x.json",
    )  # fmt: skip
    assert result.exit_code == 1
    assert "no point was measured" in result.stderr
    assert "above the peak" in result.stdout


def test_a_device_that_is_not_ours_is_one_line(cli, tmp_path, monkeypatch):
    from tilestream_tools.sweep import contention as takers

    def busy(self, count):
        raise RuntimeError("the neighbour holds 3 SMs, not 4: something else runs on this GPU")

    monkeypatch.setattr(takers.BusyCores, "left", busy)
    result = cli("sweep", "--backend", "cpu", "--shape", "16x16x16", "--taken", "0", "--out", tmp_path / "x.json")
    assert (result.exit_code, result.stderr.strip()) == (
        1, "tilestream: the neighbour holds 3 SMs, not 4: something else runs on this GPU",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["--plot"], "--plot: name the records to draw"),
        (["x.json"], "x.json: records are named for --plot"),
        (["--backend", "tpu"], "--backend tpu: it is gpu or cpu"),
        (["--by", "busy"], "--by busy: with --backend gpu it is one of neighbour, green, cu_mask, nccl"),
        (["--backend", "cpu", "--by", "green"], "--by green: with --backend cpu it is one of busy"),
        (["--suite", "9k"], "suite '9k': give a .yaml file, or one of 8k"),
        (["--shape", "8k"], "shape '8k': give M, N and K as 4096x8192x28672"),
        (["--shape", "1x2x3", "--dtype", "int8"], "--dtype int8: it must be one of bfloat16, float16, float32"),
        (["--ways", "static,best"], "implementation 'best': it must be one of auto"),
        (["--backend", "cpu", "--queues", "0"], "queues 0: it must be a positive whole number"),
        (["--backend", "cpu", "--queues", "x"], "--queues x: give numbers as 4,8,16, or FIRST:LAST:STEP"),
        (["--backend", "cpu", "--taken", "0:4"], "--taken 0:4: give numbers"),
        (["--backend", "cpu", "--taken", "4:0:1"], "--taken 4:0:1: give numbers"),
        (["--backend", "cpu", "--taken", "0:4:0"], "--taken 0:4:0: give numbers"),
        (["--backend", "cpu", "--taken", "1000"], "--taken 1000: the device has"),
        (["--plot", "none.json"], "none.json: No such file"),
        (["--out", "no_such_folder/x.json"], "--out no_such_folder/x.json: there is no folder no_such_folder"),
    ],
)
def test_bad_input(cli, given, what):
    result = cli("sweep", *given)
    assert (result.exit_code, what in result.stderr) == (2, True), result.stderr


def test_numbers():
    from tilestream_tools.cli.sweep import numbers

    assert numbers("--taken", "0:12:4") == [0, 4, 8, 12]
    assert numbers("--taken", "4,8,64") == [4, 8, 64]
