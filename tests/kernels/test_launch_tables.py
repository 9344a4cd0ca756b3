"""What a launch keeps, and for how long; without a launch."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from fake_cuda import DEVICE
from tilestream.core.chunks import Chunks, Incoming
from tilestream.core.gpu_specs import named
from tilestream.launch.gate import chunk_numbers, chunk_table, chunks_of, queue_table
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import Problem

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


@pytest.mark.parametrize("chunks", [2, 3, 8])
def test_the_table_of_queues_says_where_the_chunks_of_each_are(chunks):
    problem = Problem(1024, 256, 64, rows=Incoming(Chunks.uniform(1024, 1024 // chunks)))
    plan = plan_problem(problem, schedule="dynamic", device=named("h100"), backend="portable")
    queues, table = plan.schedule.queues, queue_table(plan)
    assert table[: queues + 1] == [0, *plan.schedule.ends]
    starts = table[queues + 1 : 2 * queues + 2]
    found = [tuple(table[begin:end]) for begin, end in itertools.pairwise(starts)]
    assert found == [tuple(one) for one in chunks_of(plan.schedule, plan.gate)]
    assert starts[-1] == len(table)


@pytest.mark.parametrize(
    ("n", "chunks", "unread"),
    [
        (64, Chunks.uniform(64, 16), []), (64, Chunks((0, 5, 5, 64)), [1]),
        (0, Chunks.uniform(64, 16), [0, 1, 2, 3]), (0, Chunks((0, 5, 5, 64)), [0, 1, 2]),
    ],
)  # fmt: skip
def test_the_last_worker_out_sees_the_chunks_that_no_tile_reads(n, chunks, unread):
    """Those without rows; and all, where the output has no columns."""
    plan = plan_problem(Problem(64, n, 64, rows=Incoming(chunks)), device=named("h100"), backend="portable")
    numbers = chunk_numbers(plan)
    count, number = numbers["row_chunks"], numbers["row_unread"]
    assert (count, number) == (chunks.count, len(unread))
    table = chunk_table(plan, 0)
    assert (table is None) == bool(chunks.rows_per_chunk)
    if table is not None:
        assert table[len(table) - number :] == unread
