"""The tables of benchmarks/gpu_all_gather.py's records: what a record says is what the page says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ABOUT = {
    "device": "NVIDIA H200", "world": 2, "dtype": "bfloat16", "torch": "2.11", "triton": "3.6.0", "commit": "abc",
    "date": "2026-01-01",
}  # fmt: skip
ROW = {
    "op": "matmul_reduce_scatter", "m": 8192, "n": 4096, "k": 2048, "decided": "fused", "floor": 0.8, "best": 1.2,
    "win": 0.5,
    "ms": {
        "mm": 0.7, "ours mm": 0.6, "nccl": 0.3, "nccl + mm": 1.3, "torch fused": 1.2, "fused 1": 1.1, "fused 2": 1.0,
        "ours": 1.0,
    },
}  # fmt: skip


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module("render_ranks")


def cells(text: str, first: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row(render: ModuleType, tmp_path: Path) -> None:
    few = {**ROW, "m": 256, "win": None, "best": 0.5, "ms": {**ROW["ms"], "ours": 1.0}}
    (tmp_path / "gpu_all_gather_x2.json").write_text(json.dumps({**ABOUT, "rows": [ROW, few]}), encoding="utf-8")
    (text,) = render.sections(tmp_path)
    assert text.startswith("## Matmul, then reduce-scatter, 2 x H200")
    assert cells(text, "8192x4096x2048")[1:] == [
        "0.600", "0.300", "1.300", "1.200", "-", "1.000 in 2", "fused, 1.000", "1.200", "1.200", "0.50",
    ]  # fmt: skip
    assert cells(text, "256x4096x2048")[-3:] == ["0.500", "0.500", "-"]
    assert f"best / by itself: {(1.2 * 0.5) ** 0.5:.3f}" in text


def test_no_record(render: ModuleType, tmp_path: Path) -> None:
    assert render.sections(tmp_path) == []
