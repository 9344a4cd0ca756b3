"""What the documentation says: its figures are the records', and what it links to is there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_performance_page_is_made_from_the_records() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "render.py"), "--check"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def test_the_check_of_that_page_can_fail(tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import render
    finally:
        sys.path.pop(0)
    assert render.page() != render.page().replace("1", "2")
    (tmp_path / "performance.md").write_text(render.page().replace("1", "2"), encoding="utf-8")
    before, render.PAGE = render.PAGE, tmp_path / "performance.md"
    arguments, sys.argv = sys.argv, ["render.py", "--check"]
    try:
        with pytest.raises((SystemExit, ValueError)):
            render.main()
    finally:
        render.PAGE, sys.argv = before, arguments


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_links_to_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
