"""The tables of benchmarks/gpu_arrival.py: what a record says is what the page says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

ABOUT = {
    "device": "a GPU", "torch": "2.11", "triton": "3.6.0", "commit": "abc", "date": "2026-01-01", "failures": [],
}  # fmt: skip


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    return importlib.import_module("benchmarks.report.arrival")


def cells(text: str, first: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_memory_order(render: ModuleType) -> None:
    row = {"section": "order", "producer": "worker", "way": "relaxed", "rounds": 100000, "wrong_rounds": 1234,
           "wrong_elements": 56789, "seconds": 1.0}  # fmt: skip
    text = render.order({**ABOUT, "rows": [row]})
    assert cells(text, "worker") == ["worker", "relaxed", "100,000", "1,234", "56,789"]
    assert "Not finished" not in text
    assert "Not finished: worker, relaxed: 7 of 9." in render.order(
        {**ABOUT, "failures": ["worker, relaxed: 7 of 9"], "rows": [row]}
    )


def test_polling(render: ModuleType) -> None:
    rows = [
        {"section": "polling", "pause_ns": pause, "watts": watts, "looks_per_us_and_poller": looks, "ms": ms,
         "matmul": "8x8x8", "pollers_beside": 0 if pause is None else 16}
        for pause, watts, looks, ms in (
            (None, 100.0, None, 2.0), (64, 151.0, 1.25, 2.5), (1_000_000, None, 0.001, 2.25),
        )
    ]  # fmt: skip
    text = render.polling({**ABOUT, "rows": rows})
    assert "Then 16 of them" in text
    assert cells(text, "64") == ["64", "1.250", "151", "2.500", "0.900"]
    assert cells(text, "nobody waits") == ["nobody waits", "-", "100", "2.000", "1.125"]
    assert cells(text, "as good as asleep")[1:] == ["0.001", "not readable", "2.250", "1.000"]
    cut_off = render.polling({**ABOUT, "rows": rows[:1]})
    assert cells(cut_off, "nobody waits")[-1] == "-"


def test_records_are_found(render: ModuleType, tmp_path: Path) -> None:
    assert render.sections(tmp_path) == []
    (tmp_path / "gpu_arrival.json").write_text(json.dumps({**ABOUT, "rows": []}), encoding="utf-8")
    assert render.sections(tmp_path) == []
