"""What the documentation links to is there, and what is there is in it. Its figures: tests/benchmarks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
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
