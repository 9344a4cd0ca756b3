"""The plan's choice of tile, overruled: small operands make many tiles, so that a test is fast and still has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tilestream.plan.planner import plan_problem
from tilestream.plan.policy import cpu

#: Rows and columns of a tile.
TILE = 16
#: K elements of a K step.
STEP = 8


def use_small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For the body of a fixture. Plans made before or meanwhile are forgotten: they are cached."""
    plan_problem.cache_clear()
    monkeypatch.setattr(cpu, "_tiles", lambda problem: [(TILE, TILE)])
    monkeypatch.setattr(cpu, "BLOCK_K", STEP)
    yield
    monkeypatch.undo()
    plan_problem.cache_clear()
