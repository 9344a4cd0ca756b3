"""The code of the documentation: pages for users run as a user would run them; the others' blocks compile."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from markdown_code import blocks, run_page, runs

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RUN = [DOCS / "start.md", *sorted((DOCS / "tutorials").glob("*.md")), *sorted((DOCS / "howto").glob("*.md"))]
RUN = [page for page in RUN if any(runs(block) for block in blocks(page))]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", RUN, ids=name)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran, skipped = run_page(page, tmp_path)
    if not ran:
        pytest.skip("; ".join(skipped) or "nothing but fragments")


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python" and not block.text.startswith(">>>"):
            compile(block.text, block.at, "exec")


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Each ``tilestream`` command line of a page's shell blocks, with where it stands."""
    found = []
    for block in blocks(page):
        if block.language == "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words and re.fullmatch(r"(\.venv/bin/)?tilestream", words[0]):
                    found.append((f"{block.at}: {line}", words[1:]))
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name)
def test_commands_and_options_exist(page: Path) -> None:
    from typer.main import get_command

    from tilestream_tools.cli.app import app

    group = get_command(app)
    for where, words in commands(page):
        command = group.commands.get(words[0])
        assert command is not None, where
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        given = {word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)}
        assert given <= known | {"--help", "-h"}, where
