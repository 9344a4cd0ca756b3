"""The pages of docs/performance: what the records and the notes say, and no part of the notes unused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.core.paths import RESULTS
from benchmarks.report import arrival, attention, blocks, contention, cpu, distributed, gemm, gemm_losses, index, pages
from benchmarks.report import notes as notes_module
from benchmarks.report.notes import NOTES, Notes

ROOT = Path(__file__).parents[2]


def test_the_pages_are_made_from_the_records():
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "report", "pages", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_the_check_of_the_pages_can_fail(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(pages, "FOLDER", tmp_path)
    for name in pages.PAGES:
        (tmp_path / f"{name}.md").write_text(pages.text(name), encoding="utf-8")
    assert pages.main(["--check"]) == 0
    (tmp_path / "gemm.md").write_text(pages.text("gemm").replace("1", "2"), encoding="utf-8")
    (tmp_path / "old.md").write_text("", encoding="utf-8")
    assert pages.main(["--check"]) == 1
    assert "gemm.md, old.md: not what records and notes say" in capsys.readouterr().err


def test_without_records_a_page_is_its_head(results):
    for name, page in pages.PAGES.items():
        if name != "index":
            assert page(results) == [Notes(name)("page")]
    assert "| --- |" not in pages.text("index", results)


@pytest.mark.parametrize("name", pages.PAGES)
def test_every_part_of_the_notes_is_used(name, monkeypatch):
    used = set()

    class Parts(dict):
        def __getitem__(self, part):
            used.add(part)
            return super().__getitem__(part)

    for module in (arrival, attention, blocks, contention, cpu, distributed, gemm, gemm_losses, index):
        monkeypatch.setattr(module.NOTES, "parts", Parts(module.NOTES.parts))
    text = pages.text(name)
    # Words on shapes that were lost then, and sentences on what no record has now.
    now = {part for part in Notes(name).parts if not re.match(r"why |loss |behind |unknown|title|timeline|lanes", part)}
    now -= {"search wrong", "host hidden", "means no handshake", "all_reduce no loss", "no loss", "lists alone"}
    assert not now - used - {part for part in now if part.endswith("title")}
    assert not re.findall(r"\{[a-z_]+[^}]*\}", text.replace("{toctree}", "")), "a field without its figure"


def test_notes_are_named_and_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(notes_module, "NOTES", tmp_path)
    (tmp_path / "x.md").write_text("<!-- a -->\nA {ms:.1f}\nb\n\n<!--\nb 1\nb 2\n-->\n{tiles}: {no}\n")
    notes = Notes("x")
    assert list(notes.parts) == ["a", "b 1", "b 2"]
    assert notes("a", ms=1.25) == "A 1.2\nb"
    assert notes.line("b 2", {"tiles": "5"}) == "5: -"
    with pytest.raises(KeyError):
        notes("a")


def test_the_steps_of_a_first_call(results, write):
    about = {"device": "a CPU", "cores": 2, "torch": "2.13", "triton": "3.7", "commit": "abc", "date": "then"}
    rows = [{"step": "import", "whose": "ours", "seconds": 0.25}, {"step": "op", "whose": "ours", "seconds": 0.5}]
    before = {"commit": "def", "seconds": {"import": 0.25, "op": 1.5}}
    write("cpu", "first_call", {**about, "processes": 7, "before": before, "rows": rows})
    text = "\n".join(cpu.page(results))
    assert "| import | ours | 0.25 | 0.25 |\n| op | ours | 1.50 | 0.50 |\n| all |  | 1.75 | 0.75 |" in text
    assert "imports sympy\n(1.50 s, now 0.50)" in text


def test_what_a_page_names_of_the_benchmarks_is_there():
    """Paths of records and files, and subjects and sections, in the pages, the documentation, the source and tests."""
    from benchmarks.core.section import SUBJECTS, sections

    there = {(subject, name) for subject in SUBJECTS for name in sections(subject)}
    files = [ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
    files += [path for folder in ("docs", "src", "benchmarks") for path in (ROOT / folder).rglob("*.*")
              if path.suffix in (".md", ".py")]  # fmt: skip
    wrong = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"benchmarks/[\w/.*-]*\w", text)
        wrong += [f"{path.relative_to(ROOT)}: {one}" for one in named if not list(ROOT.glob(one))]
        for subject, names in re.findall(r"benchmarks/run\.py (\w+) ([\w,]+)", text):
            wrong += [f"{path.relative_to(ROOT)}: run.py {subject} {name}" for name in names.split(",")
                      if (subject, name) not in there and subject.islower()]  # fmt: skip
    assert not wrong
    assert RESULTS.is_dir()
    assert NOTES.is_dir()
