"""``python -m tilestream_tools.report`` on a GPU: both clocks, warm kernels, a streamed matmul, timelines."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu


def test_a_quick_report_of_this_gpu(tmp_path):
    shapes = ("gemm 512,512,512", "gemm 2048,2048,512,bias,gelu", "attention 1,1024,8,2,64,causal",
              "gemm 64,64,64,float8_e4m3fnuz")  # fmt: skip
    (tmp_path / "shapes.txt").write_text("\n".join(shapes))
    options = "--quick", "--device", "cuda", "--shapes", tmp_path / "shapes.txt", "--out", tmp_path / "r.html"
    command = [sys.executable, "-m", "tilestream_tools.report", *map(str, options)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    data = json.loads((tmp_path / "r.json").read_text())
    *measured, refused = data["calls"]
    assert "why" in refused
    for row in measured:
        assert "why" not in row, row
        assert {"device", "host"} <= set(row["clocks"])
        assert row["clocks"]["device"]["tilestream"][0] > 0
    assert data["machine"]["workers"] == torch.cuda.get_device_properties(0).multi_processor_count
    assert "why" not in data["warm"], data["warm"]
    assert len(data["warm"]["kernels"]) >= 3
    assert "why" not in data["stream"], data["stream"]
    assert data["stream"]["answer"]["right"]
    assert len(data["timelines"]) == 3
    assert all(any(one["workers"]) for one in data["timelines"])
    assert (tmp_path / "r.html").read_text().count("<canvas") == 3
