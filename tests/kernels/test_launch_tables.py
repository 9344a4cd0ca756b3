"""What a launch keeps, and for how long; without a launch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fake_cuda import DEVICE

launch = pytest.importorskip("tilestream.launch.launch", exc_type=ImportError)

#: As a launch on a GPU asks it; nothing is brought there, since the table is there already.
GPU = SimpleNamespace(type="cuda")


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(launch, "_captured_tables", [])
    return launch._captured_tables


def test_a_captured_launch_keeps_the_table_that_an_eager_one_brought(cuda, kept):
    table = launch.Table([3, 1, 2])
    there = table.on(DEVICE)
    assert there.tolist() == [3, 1, 2]
    with cuda.capture():
        assert table.on(GPU) is there
    assert any(one is there for one in kept)


def test_an_eager_launch_keeps_nothing_and_tells_the_allocator_of_its_stream(cuda, kept):
    table, stream = launch.Table([3, 1, 2]), cuda.stream()
    there = table.on(DEVICE)
    with cuda.on(stream):
        assert table.on(GPU) is there
    assert cuda.records(there, stream)
    assert not kept


def test_no_table(cuda, kept):
    assert launch.Table(None).on(GPU) is None
