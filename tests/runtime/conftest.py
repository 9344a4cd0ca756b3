"""Fixtures of the runtime's tests."""

from __future__ import annotations

import shutil

import pytest

from small_tiles import use_small_tiles


@pytest.fixture
def small_tiles(monkeypatch):
    """Ops whose small operands still make many tiles: 16 x 16, K steps of 8."""
    yield from use_small_tiles(monkeypatch)


@pytest.fixture
def stub():
    """CUDA's driver without a device: see `cuda_stub`."""
    from cuda_stub import cuda_stub

    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    with cuda_stub() as made:
        yield made
