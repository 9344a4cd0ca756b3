"""What the documentation says: its figures are the records', and what it links to is there."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_performance_page_is_made_from_the_records() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "run.py"), "report", "render", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.fixture
def render(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.report.render")


def test_the_check_of_that_page_can_fail(tmp_path: Path, render: ModuleType) -> None:
    assert render.page() != render.page().replace("1", "2")
    (tmp_path / "performance.md").write_text(render.page().replace("1", "2"), encoding="utf-8")
    before, render.PAGE = render.PAGE, tmp_path / "performance.md"
    arguments, sys.argv = sys.argv, ["render.py", "--check"]
    try:
        with pytest.raises((SystemExit, ValueError)):
            render.main()
    finally:
        render.PAGE, sys.argv = before, arguments


def test_the_page_has_the_sections_of_the_records_there_are(
    tmp_path: Path, render: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    assert render.page().strip() == render.HEAD.strip()
    ways = {"copy": 5.0, "multiply": 4.0, "torch.mm": 3.5, "in turn": 8.5, "by chunks": 5.5, "streamed": 5.25}
    row = {"shape": "16384x8192x8192", "ms": ways, "of_larger": 1.05, "of_in_turn": 5.25 / 8.5, "copy_gb_per_s": 53.7}
    about = {"device": "Some GPU", "torch": "2.11", "triton": "3.6", "commit": "abc", "date": "then"}
    record = {**about, "dtype": "bfloat16", "rows": [row, {**row, "copy_gb_per_s": 55.2}]}
    (tmp_path / "gpu_stream.json").write_text(json.dumps(record), encoding="utf-8")
    text = render.page()
    assert "at 54 to 55 GB/s" in text
    assert "Some GPU, torch 2.11, Triton 3.6, commit `abc`, then" in text
    assert "| 16384x8192x8192 | 5.00 | 4.00 | 3.50 | 8.50 | 5.50 | 5.25 | 1.050 | 1.619 | 1.048 |" in text
    assert "by the matmul itself" not in text
    ways |= {"by the kernel": 5.75, "by the kernel, 4 copiers": 7.5}
    row |= {
        "plan": "hopper cooperative", "copies": "rows by the kernel: the first 8 of 132 workers copy",
        "of_larger_by_the_kernel": 1.15,
    }  # fmt: skip
    (tmp_path / "gpu_stream_copies_h200.json").write_text(json.dumps({**record, "rows": [row]}), encoding="utf-8")
    assert "| 16384x8192x8192 | hopper | 8 | 5.00 | 4.00 | 5.25 | 5.75 | 7.50 | 1.050 | 1.150 |" in render.page()


def test_the_steps_of_a_first_call(tmp_path: Path, render: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "RESULTS", tmp_path)
    about = {"device": "a CPU", "cores": 2, "torch": "2.13", "triton": "3.7", "commit": "abc", "date": "then"}
    rows = [{"step": "import", "whose": "ours", "seconds": 0.25}, {"step": "op", "whose": "ours", "seconds": 0.5}]
    before = {"commit": "def", "seconds": {"import": 0.25, "op": 1.5}}
    (tmp_path / "cpu_first_call.json").write_text(json.dumps({**about, "processes": 7, "before": before, "rows": rows}))
    text = render.page()
    assert "| import | ours | 0.25 | 0.25 |\n| op | ours | 1.50 | 0.50 |\n| all |  | 1.75 | 0.75 |" in text
    assert "imports sympy (1.50 s, now 0.50)" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_links_to_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_every_folder_is_said_to_be_there(page: str) -> None:
    text = (ROOT / page).read_text()
    folders = [x.parent.name for x in (ROOT / "src" / "tilestream").glob("*/__init__.py")]
    assert folders
    assert [name for name in folders if f"{name}/" not in text] == []


@pytest.mark.parametrize("plan", ["Plan", "AttentionPlan", "DistributedPlan"])
def test_what_plan_functions_return_is_in_the_reference(plan: str) -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    assert re.search(rf"autoclass:: (\S+\.)?{plan}\(\)", text)
