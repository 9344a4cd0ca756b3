"""What tests of the Hopper kernels share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cases(monkeypatch):
    """The module of the GPU tests' cases."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "gpu"))
    import hopper_cases

    return hopper_cases
