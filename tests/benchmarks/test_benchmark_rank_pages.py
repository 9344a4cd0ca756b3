"""The parts of the page on collectives whose records are of `calls`, `block` and `moe`, from invented figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.report import distributed, rank_calls

ABOUT = {
    "device": "NVIDIA H100", "python": "3.12", "torch": "2.11", "triton": "3.6", "commit": "0" * 7, "world": 2,
    "date": "2026-11-28", "dtype": "bfloat16", "failures": [], "missing": [],
}  # fmt: skip


def timed(**us: float) -> dict:
    """A row's clocks: the GPU takes half as long as the program sees."""
    named = {name.replace("_", " ").replace("plus", "+"): value for name, value in us.items()}
    halves = {name: value / 2 for name, value in named.items()}
    return {"wall us": named, "gpu us": halves, "host us": named, "failures": {}, "errors": {}}


ROWS = {
    "calls": [
        {
            "op": "gather", "m": 64, "n": 32, "k": 16,
            **timed(ours=100.0, nccl_plus_mm=120.0, torch_fused=110.0, ours_invariant=125.0),
        },
        {"op": "gather", "m": 32, "n": 32, "k": 16, **timed(ours=100.0, nccl_plus_mm=90.0)},
        {"op": "sum", "m": 64, "n": 32, "k": 16, **timed(nccl_plus_mm=90.0)},  # ours was wrong
    ],
    "served": [{
        "model": "8B", "tokens": 16, "prefill": False,
        **timed(ours_eager=50.0, ours_compiled=40.0, nccl_eager=60.0, nccl_compiled=44.0),
    }],
    "moe": [
        {
            "op": "moe", "of": "Mixtral", "tokens": 256, "skew": "Zipf",
            **timed(ours=100.0, ours_captured=80.0, nccl_plus_grouped=125.0, experts=60.0, rows=30.0),
        },
        {
            "op": "moe", "of": "Qwen3", "tokens": 16, "skew": "uniform",
            **timed(ours=200.0, nccl_plus_grouped=220.0, experts=30.0, rows=60.0),
        },
    ],
}  # fmt: skip


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "h100").mkdir()
    for name, rows in ROWS.items():
        record = {"name": name, **ABOUT, "rows": rows, "missing": ["70B decode 1"] if name == "served" else []}
        (tmp_path / "h100" / f"{name}_x2.json").write_text(json.dumps(record))
    return "\n".join(distributed.page(tmp_path))


@pytest.mark.parametrize(
    "line",
    [
        "## Eager calls, 2 x H100",
        # The best of two, and of one.
        "| gather, 2 rows | 0.995 (0.900) | 0.995 (0.900) | 0.880 (0.880) | 0.880 (0.880) |",
        "| sum, 1 rows | - | - | - | - |",
        "| gather 64x32x16 | 100.0 | 120.0 | 110.0 | 125.0 | 50.0 | 60.0 | 55.0 | 62.5 | 1.100 | 0.880 | 100.0 |",
        "| sum 64x32x16 | - | 90.0 | - | - | - | 45.0 | - | - | - | - | - |",
        "| decode, 1 rows | 0.880 (0.880) | 0.880 (0.880) | 1.100 (1.100) | 1.100 (1.100) |",
        "Not measured, for want of time: 70B decode 1.",
        "| Zipf, 1 rows | 1.250 (1.250) | 1.250 (1.250) | 1.562 (1.562) | 1.562 (1.562) | - | - |",
        # By the longer part and 40 us.
        "| Zipf, 1 rows | 1.000 (1.000) | 0.800 (0.800) | - | 0.714 (0.714) | 0.571 (0.571) | - |",
        "| Qwen3, 16 tokens, uniform | 2.000 | - | - | 1.429 | - | - |",
        "| target missed | 1 of 2 | 0 of 1 | 0 of 0 | 1 of 2 | 0 of 1 | 0 of 0 |",
    ],
)
def test_each_record_has_its_means_and_rows(text, line):
    assert line in text.splitlines()


def test_where_a_mixture_misses_its_target_is_told(text):
    said = " ".join(text.split())
    assert "*ours* misses it in 1 of 2 rows as called; in 1 of 2 the host takes longer than that" in said
    assert "*ours* misses it in 1 of 2: 0 of 1 of Mixtral, 1 of 1 of Qwen3." in said


def test_what_is_not_recorded_has_no_part(text, tmp_path):
    assert "Replays" not in text
    assert rank_calls.sections(tmp_path / "none") == []
