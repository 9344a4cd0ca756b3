"""The checkout's root on the path, from which `benchmarks` is imported; a folder of results."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """An empty folder of results."""
    return tmp_path / "results"
