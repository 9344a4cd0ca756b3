"""Captured launches that make a stream's copies, on a fake GPU: at each replay, each for itself.

Eager ones, and what these are made of, are in `test_kernel_copies.py`.
"""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from test_kernel_copies import check_there, launch, offered, other_launch

from tilestream.arrival import kernel_copies


@pytest.fixture(autouse=True)
def _captured(monkeypatch):
    monkeypatch.setattr(kernel_copies, "_captured_tables", [])


def test_a_graph_copies_at_each_replay(cuda):
    x, source = offered(cuda)
    with cuda.capture() as graph:
        copies, words = launch(cuda, x)
    assert (copies.copiers, words.epoch) == (4, 0)
    cuda.run()
    for value in (1.0, 2.0):
        source.fill_(value)
        x.tensor.fill_(float("nan"))
        graph.replay(cuda.streams[0])
        cuda.run()
        assert (x.tensor == value).all()
        assert not words.words.any()


def test_graphs_and_eager_launches_count_and_signal_apart(cuda):
    """They may run at the same time."""
    x, _ = offered(cuda)
    told = []
    for _ in range(2):
        with cuda.capture():
            told.append(launch(cuda, x))
    told.append(launch(cuda, x))
    spans = sorted(
        (y.data_ptr(), y.data_ptr() + y.nbytes) for copies, words in told for y in (copies.words, words.words)
    )
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert not any(y.any() for copies, words in told[:2] for y in (copies.words, words.words)), "a replay begins at 0"


def test_a_graph_keeps_no_operand_alive(cuda):
    """Whoever keeps the graph keeps the stream."""
    x, source = offered(cuda)
    with cuda.capture() as graph:
        table = launch(cuda, x)[0].table
    kept = {y.data_ptr() for y in kernel_copies._captured_tables}
    assert kept == {table.data_ptr()}
    gone = weakref.ref(x._copies)
    graph.work.clear()
    del x, source
    gc.collect()
    assert gone() is None


def test_a_captured_launch_that_fails_has_brought_nothing_in(cuda):
    x, source = offered(cuda)
    with cuda.capture() as graph:
        with pytest.raises(RuntimeError, match="out of shared memory"):
            launch(cuda, x, fails=True)
        with pytest.raises(RuntimeError, match=r"what ts\.stream_in copies is not in it"):
            other_launch(cuda, x)
        launch(cuda, x)  # with a smaller ring
    graph.replay(cuda.streams[0])
    cuda.run()
    assert torch.equal(x.tensor, source)


def test_restart_while_a_graph_is_captured(cuda):
    x, source = offered(cuda)
    epoch = x.arrival.epoch
    with cuda.capture() as graph, pytest.raises(RuntimeError, match="the graph makes the copies at each replay"):
        x.restart()
    assert not graph.work
    assert x.arrival.epoch == epoch
    launch(cuda, x)
    cuda.run()
    check_there(x, source)


def test_a_graph_of_a_kernel_that_makes_none_is_refused(cuda):
    x, _ = offered(cuda)
    with (
        cuda.capture(),
        pytest.raises(RuntimeError, match="or take copies='kernel' and a matmul whose plan makes them"),
    ):
        other_launch(cuda, x)
    with cuda.capture():
        launch(cuda, x)
        with pytest.raises(RuntimeError, match="a launch of this graph waits for these signals already"):
            launch(cuda, x)
