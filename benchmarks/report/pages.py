"""Make the pages of ``docs/performance`` and their plots from the records in ``benchmarks/results``.

python benchmarks/run.py report pages            # writes
python benchmarks/run.py report pages --check    # status 1 if a page is not what records and notes say
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.core.paths import DOCS, IMAGES, RESULTS
from benchmarks.report import (
    arrival,
    attention,
    contention,
    cpu,
    distributed,
    gemm,
    gemm_random,
    grouped,
    index,
    invariance,
)

FOLDER = DOCS / "performance"
PAGES: dict[str, Callable[[Path], list[str]]] = {
    "index": index.page, "gemm": gemm.page, "gemm_random": gemm_random.page, "grouped": grouped.page,
    "contention": contention.page,
    "attention": attention.page, "arrival": arrival.page, "distributed": distributed.page,
    "invariance": invariance.page, "cpu": cpu.page,
}  # fmt: skip


def text(name: str, results: Path = RESULTS) -> str:
    return "\n\n".join(part.strip() for part in PAGES[name](results)) + "\n"


def main(arguments: list[str]) -> int:
    made = {FOLDER / f"{name}.md": text(name) for name in PAGES}
    if arguments == ["--check"]:
        there = {path: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
        wrong = sorted(path.name for path in {*made, *there} if made.get(path) != there.get(path))
        if wrong:
            said = "not what records and notes say: run python benchmarks/run.py report pages"
            print(f"docs/performance: {', '.join(wrong)}: {said}", file=sys.stderr)
        return int(bool(wrong))
    FOLDER.mkdir(exist_ok=True)
    for path, page in made.items():
        path.write_text(page, encoding="utf-8")
    from benchmarks.report.plots import draw_all

    draw_all(RESULTS, IMAGES)
    return 0
