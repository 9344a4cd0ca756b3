"""``tilestream demo`` on a GPU: what it says and writes. No time is judged: the shapes are small.

That it finds answers that are wrong, or launches that do not wait, is in ``tests/tools/cli/test_demo.py``.
"""

from __future__ import annotations

import json

import pytest
import torch
from gpu_cases import BF16, K, M, N
from gpu_runs import ON_HOPPER

pytest.importorskip("typer", reason="the command line is an extra")
pytest.importorskip("rich", reason="the command line is an extra")

from typer.testing import CliRunner

from tilestream_tools.cli.app import app
from tilestream_tools.installed import example

SMALL = ("--rows", M, "--n", N, "--k", K, "--rows-per-chunk", 128, "--repeats", 2)
pytestmark = pytest.mark.timeout(300)


def demo(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


def test_a_small_problem_on_the_gpu_that_auto_finds(tmp_path):
    result = demo(*SMALL, "--figures", tmp_path / "figures.json", "--out-dir", tmp_path / "out")
    assert result.exit_code == 0, result.output
    backend = "hopper" if ON_HOPPER else "portable"
    for words in ("copy ", "answer right", "copied to cuda:0", f"backend   {backend}", "8 chunks of 128 rows"):
        assert words in result.stdout
    assert not (tmp_path / "out").exists()
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["device"] == torch.cuda.get_device_name()
    assert figures["answer"]["right"]
    assert figures["answer"]["missing"] == 0
    problem = figures["problem"]
    assert [problem[name] for name in ("m", "n", "k", "dtype")] == [M, N, K, "bfloat16"]
    assert list(figures["samples_ms"]) == ["copy", "multiply", "torch.mm", "in turn", "streamed"]
    assert all(len(samples) == 2 and min(samples) > 0 for samples in figures["samples_ms"].values())
    assert figures["gb_per_s"]["copy"] > 0
    assert figures["tflop_per_s"].keys() == {"multiply", "torch.mm"}
    assert figures["streamed_over_larger"] > 0


@pytest.mark.parametrize("value", [500.0, float("nan")])
def test_one_wrong_element_is_found_where_the_input_is_on_the_host(value):
    x, w = torch.randn(M, K).to(BF16).pin_memory(), torch.randn(K, N, device="cuda").to(BF16)
    by_torch = torch.mm(x.cuda(), w)
    out = by_torch.clone()
    error = example("demo").check(x, w, by_torch, out)
    assert error.right
    assert error.ours == error.torch < error.allowed
    out[500, 333] = value
    assert not example("demo").check(x, w, by_torch, out).right
