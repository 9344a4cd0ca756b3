"""The section that times plans of new shapes: each is made anew, and its row can be rendered."""

from __future__ import annotations

from pathlib import Path

from benchmarks.core.records import load
from benchmarks.cpu import planning
from benchmarks.report import cpu
from benchmarks.run import options

from tilestream.plan import plan_problem


def test_each_round_plans_each_shape_anew():
    plans = planning.problems(5)["matmul"]
    row = planning.row_of("matmul", plans, 2)
    assert (row["what"], row["shapes"], plan_problem.cache_info().misses) == ("matmul", 3, 5)
    assert 0 < row["ms"]["25 %"] <= row["ms"]["median"] <= row["ms"]["95 %"]


def test_the_section_leaves_a_record_that_can_be_rendered(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planning, "COUNT", 4)
    monkeypatch.setattr(planning, "BEFORE", 1)
    planning.planning(planning.Session(options("cpu", "planning", str(tmp_path))))
    data = load(tmp_path / "cpu" / "planning.json")
    assert [row["what"] for row in data["rows"]] == list(planning.problems(1))
    data["before"] = {"commit": "x", "ms": {row["what"]: row["ms"] for row in data["rows"]}}
    said, shown = cpu.planning(data)
    assert "for an H100" in said
    assert "| grouped_mm |" in shown
