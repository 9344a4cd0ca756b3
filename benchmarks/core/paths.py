"""Where things lie in the checkout, and the command that runs a benchmark. Imports neither torch nor Triton."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs"
IMAGES = DOCS / "images"


def command(*arguments: str) -> list[str]:
    """The command that runs ``benchmarks/run.py`` with these arguments in a process of its own."""
    return [sys.executable, str(ROOT / "benchmarks" / "run.py"), *arguments]
