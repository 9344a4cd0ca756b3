"""``tilestream demo`` on a GPU: what it says and writes. No time is judged: the shapes are small."""

from __future__ import annotations

import functools
import json
import re

import pytest
import torch
from gpu_cases import K, M, N

import tilestream as ts

pytest.importorskip("typer", reason="the command line is an extra")
pytest.importorskip("rich", reason="the command line is an extra")

from typer.testing import CliRunner

from tilestream.cli.app import app
from tilestream.cli.demo import example

WAYS = ["copy", "multiply", "torch.mm", "in turn", "streamed"]
#: The backend of a GPU that has one of its own.
FASTEST = "hopper" if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else "portable"
SMALL = ("--rows", M, "--n", N, "--k", K, "--rows-per-chunk", 128, "--repeats", 2)
BF16 = torch.bfloat16
pytestmark = pytest.mark.timeout(300)


def demo(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


def test_a_small_problem_on_the_gpu_that_auto_finds(tmp_path):
    result = demo(*SMALL, "--json", tmp_path / "figures.json", "--out-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for words in ("copy ", "answer right", "copied to cuda:0", f"backend   {FASTEST}"):
        assert words in result.stdout
    assert not (tmp_path / "out").exists()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["device"] == torch.cuda.get_device_name()
    assert figures["versions"]["torch"] == torch.__version__
    assert figures["answer"]["right"]
    assert figures["answer"]["missing"] == 0
    assert (figures["problem"]["m"], figures["problem"]["n"], figures["problem"]["k"]) == (M, N, K)
    assert figures["problem"]["dtype"] == "bfloat16"
    assert "rows in 8 chunks of 128 rows" in result.stdout
    assert list(figures["samples_ms"]) == WAYS
    assert all(len(samples) == 2 and min(samples) > 0 for samples in figures["samples_ms"].values())
    assert figures["gb_per_s"]["copy"] > 0
    assert figures["tflop_per_s"].keys() == {"multiply", "torch.mm"}
    assert figures["streamed_over_larger"] > 0


@pytest.mark.parametrize("schedule", ["static", "dynamic", "stream_k"])
def test_schedules_and_workers(schedule):
    result = demo(*SMALL, "--device", "cuda", "--schedule", schedule, "--workers", 60)
    assert result.exit_code == 0, result.output
    workers = re.search(rf"schedule  {schedule}, (\d+) workers", result.stdout)
    assert workers, result.stdout
    assert 1 <= int(workers[1]) <= 60  # fewer, where the plan has fewer tiles


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_file_of_ones_own(tmp_path, dtype):
    numpy = pytest.importorskip("numpy")
    path = tmp_path / "mine.npy"
    numpy.save(path, numpy.random.default_rng(0).standard_normal((3, 150, 264)).astype(dtype))
    result = demo("--device", "cuda", "--input", path, "--n", 200, "--repeats", 1)
    assert result.exit_code == 0, result.output
    assert f"[450, 264] @ [264, 200], {dtype}" in result.stdout
    assert "read into pinned memory first" in result.stdout


def test_a_dtype_that_the_gpu_does_not_multiply_is_one_line(tmp_path):
    numpy = pytest.importorskip("numpy")
    numpy.save(tmp_path / "f.npy", numpy.ones((64, 32)))
    result = demo("--device", "cuda", "--input", tmp_path / "f.npy", "--n", 16)
    assert result.exit_code == 2
    assert result.stderr.startswith("tilestream: dtype: float64 on a GPU")


def test_a_wrong_answer_is_status_1(monkeypatch):
    right = ts.matmul

    def corrupt(a, b, *, out, arrival=None, **options):
        right(a, b, out=out, arrival=arrival, **options)
        if arrival is not None:
            out[300:310, 10:20] = 7.0
        return out

    monkeypatch.setattr(ts, "matmul", corrupt)
    result = demo(*SMALL)
    assert result.exit_code == 1, result.output
    assert "ANSWER WRONG" in result.stdout


def test_a_matmul_that_does_not_wait_is_found(monkeypatch):
    # Launched before the copies, on rows that are still NaN.
    pending = []
    restart, wait = ts.Stream.restart, ts.Stream.wait

    def late(self, timeout=None):
        if pending:
            restart(pending.pop())
        return wait(self, timeout)

    monkeypatch.setattr(ts.Stream, "restart", lambda self: pending.append(self))
    monkeypatch.setattr(ts.Stream, "wait", late)
    monkeypatch.setattr(ts, "matmul", lambda a, b, *, out, **_: torch.mm(a, b, out=out))
    result = demo(*SMALL)
    assert result.exit_code == 1, result.output
    assert "ANSWER WRONG" in result.stdout


class TestCheck:
    """The input on the host, the rest on the GPU."""

    def answers(self):
        x, w = torch.randn(M, K).to(BF16).pin_memory(), torch.randn(K, N, device="cuda").to(BF16)
        by_torch = torch.mm(x.cuda(), w)
        return functools.partial(example("demo").check, x, w, by_torch), by_torch.clone()

    def test_torchs_own_answer_is_right(self):
        check, out = self.answers()
        error = check(out)
        assert error.right
        assert error.ours == error.torch < error.allowed

    @pytest.mark.parametrize("where", [(0, 0), (M - 1, N - 1), (500, 333)])
    @pytest.mark.parametrize("value", [500.0, float("nan")])
    def test_one_wrong_element_anywhere_is_found(self, where, value):
        check, out = self.answers()
        out[where] = value
        assert not check(out).right
