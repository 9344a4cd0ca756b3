"""Records and pages name commits of this history: what they say can be looked up, and measured again."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from benchmarks.core.paths import DOCS, RESULTS

ROOT = Path(__file__).parents[2]
RECORDS = (*sorted(RESULTS.rglob("*.json")), ROOT / "tests/mutants/record.json")
_IN_A_RECORD, _ON_A_PAGE = re.compile(r'"commit": "([0-9a-f]{7,40})'), re.compile(r"\bcommit `?([0-9a-f]{7,40})\b")


def git(*arguments: str, given: str = "") -> str:
    run = subprocess.run(["git", *arguments], cwd=ROOT, input=given, capture_output=True, text=True, check=False)
    return run.stdout if run.returncode == 0 else ""


def unknown(commits: set[str]) -> set[str]:
    """Those that the repository does not have."""
    said = git("cat-file", "--batch-check", given="".join(f"{one}^{{commit}}\n" for one in sorted(commits)))
    return {line.partition("^")[0] for line in said.splitlines() if line.endswith(" missing")}


@pytest.fixture(scope="module", autouse=True)
def _whole_history():
    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no history here, or its end alone")


def test_records_and_pages_name_commits_of_this_history():
    named = {path: set(_IN_A_RECORD.findall(path.read_text(encoding="utf-8"))) for path in RECORDS}
    named |= {path: set(_ON_A_PAGE.findall(path.read_text(encoding="utf-8"))) for path in sorted(DOCS.rglob("*.md"))}
    gone = unknown(set().union(*named.values()))
    wrong = {str(path.relative_to(ROOT)): sorted(commits & gone) for path, commits in named.items() if commits & gone}
    assert not wrong, "measure anew from a commit that stays"
    assert sum(map(len, named.values())) > 100, "names are found"


def test_a_commit_that_is_not_there_is_seen():
    there = git("rev-parse", "HEAD").strip()
    assert unknown({there, there[:8], "0" * 40, "1234567"}) == {"0" * 40, "1234567"}
