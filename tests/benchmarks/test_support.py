"""The support matrix is what records and plans say."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.core.paths import ROOT
from benchmarks.report import support


def test_the_page_is_made_from_the_records():
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "report", "support", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert run.returncode == 0, run.stderr


def test_the_check_can_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(support, "PAGE", tmp_path / "support.md")
    assert support.main(["--check"]) == 1
    assert support.main([]) == 0
    assert support.main(["--check"]) == 0
    assert "stale" in capsys.readouterr().err


def test_counts_are_those_of_the_record(tmp_path):
    folder = tmp_path / "h100"
    folder.mkdir()
    passes = {"hopper": {"passed": 3, "failed": 1}, "hopper, again": {"passed": 5}, "all else": {"skipped": 2}}
    about = {"device": "NVIDIA H100", "torch": "2", "triton": "3", "cuda": "13", "passes": passes}
    (folder / "tests.json").write_text(json.dumps(about))
    text = support.page(tmp_path)
    assert "| matmul, Hopper kernel | 3 passed, 1 failed |" in text
    assert "| sanitizers, interrupted launches | 5 passed |" in text
    assert "| portable matmul, arrivals, all other | 2 skipped |" in text


def test_every_call_that_is_said_to_be_refused_is(monkeypatch):
    assert len(list(support.refused())) == 6
    kernels = {row[0]: row[1:] for row in support.kernels()}
    by_device = dict(zip(support.DEVICES, kernels["matmul, bfloat16"], strict=True))
    assert (by_device["cpu"], by_device["h100"], by_device["b200"]) == ("cpu", "hopper", "portable")
    assert "refused" in kernels["matmul, float64"]
