"""The checkout's root on the path, from which `benchmarks` is imported; records in a folder of results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """An empty folder of results."""
    return tmp_path / "results"


@pytest.fixture
def write(results: Path) -> Callable[..., Path]:
    """Write a record: ``write("h200", "gemm_suite", data)``."""

    def record(device: str, name: str, data: dict[str, Any]) -> Path:
        path = results / device / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data), encoding="utf-8")
        return path

    return record
