"""Fixtures of the CPU backend's tests."""

from __future__ import annotations

import gc

import pytest

from small_tiles import use_small_tiles


@pytest.fixture
def small_tiles(monkeypatch):
    """Ops whose small operands still make many tiles: 16 x 16, K steps of 8."""
    yield from use_small_tiles(monkeypatch)


@pytest.fixture
def _no_collector():
    """No garbage collection: what is kept in a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    gc.collect()
