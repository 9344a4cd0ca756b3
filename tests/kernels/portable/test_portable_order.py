"""What the device takes, in which order: the host's protocol, step by step, for every schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from interpreted import DEVICE, KINDS, captured, check_product, crossed, plan_for, product

from device_order import check_order, follow
from error_rule import rand
from tilestream.core.structs import Cursor
from tilestream.kernels.device.schedule import with_asked, with_noted
from tilestream.plan.planner import plan_problem
from tilestream.plan.problem import Problem
from tilestream.runtime import device_workspace as workspaces
from tilestream.runtime.device_workspace import DeviceWorkspace
from tilestream.schedule import Raster, Schedule

RASTERS = [
    Raster(), Raster("grouped", group=3), Raster("grouped", group=2, transposed=True),
    Raster("chunk_major", 2, 2, 2), Raster("chunk_major", 1, 3, 2, True), Raster("longest_first", 2),
]  # fmt: skip


def probed(plan, k=40):
    from tilestream.launch.launch import Probe

    problem = plan.problem
    a, b = rand(problem.batch, problem.m, k), rand(problem.batch, k, problem.n)
    probe = Probe(plan.workers, 400, a.device)
    check_product(plan, a, b, probe=probe)
    return [probe.log(worker) for worker in range(plan.workers)]


def make(kind, raster, workers, queues=1, split="items", shares=0, m=70, n=60, k=40, batch=2):
    plan = plan_problem.__wrapped__(Problem(m, n, k, batch), workers, device=DEVICE)
    return replace(plan, schedule=Schedule(kind, plan.schedule.grid, raster, workers, queues, split, shares))


@pytest.mark.parametrize(("made", "field"), [(with_noted, "noted"), (with_asked, "asked")])
def test_a_cursor_with_another_field_keeps_the_others(made, field):
    cursor = Cursor(*range(7))
    assert made.fn(cursor, 9) == cursor._replace(**{field: 9})


@crossed(
    "kind, raster", KINDS, RASTERS,
    ids=lambda x: x if isinstance(x, str) else f"{x.order}{'-transposed' if x.transposed else ''}",
)  # fmt: skip
def test_rasters(kind, raster):
    plan = make(kind, raster, 7)
    check_order(plan.schedule, probed(plan))


@crossed("queues, split", [2, 3, 7], ["items", "columns", "rows", "strides"])
def test_queues_and_stealing(queues, split):
    # More queues than workers, so that some are nobody's own; than columns, so that some are empty.
    plan = make("dynamic", Raster("grouped", group=2), 3, queues, split)
    check_order(plan.schedule, probed(plan))


@crossed("kind, workers", KINDS, range(1, 12))
def test_workers(kind, workers):
    plan = make(kind, Raster("grouped", group=2), workers, batch=1)
    check_order(plan.schedule, probed(plan))


@pytest.mark.parametrize("shares", [1, 3, 5, 20, 60])
def test_shares(shares):
    plan = make("stream_k", Raster(), 11, shares=shares, batch=1)
    check_order(plan.schedule, probed(plan))


def test_the_checker_sees_a_wrong_item_and_a_missing_one():
    plan = make("dynamic", Raster(), 2, batch=1)
    logs = probed(plan)
    wrong = [list(map(list, log)) for log in logs]
    item = next(row for row in wrong[0] if row[0] == 2)
    item[1] += 1
    with pytest.raises(AssertionError, match="device"):
        follow(plan.schedule, 0, wrong[0])
    with pytest.raises(AssertionError):
        check_order(plan.schedule, [[logs[0][-2], logs[0][-1]], logs[1]])


def test_counters_are_never_cleared():
    from tilestream.kernels.device.schedule import LINE

    workspaces._workspaces.clear()
    a, b = rand(50, 40), rand(40, 50)
    last = torch.zeros((), dtype=torch.int64)
    for _ in range(3):
        plan = plan_for(a, b, "dynamic", 3)
        product(plan, a, b)
        (space,) = workspaces._workspaces.values()
        counter = space._counters[0].clone()
        assert last < counter <= space._base
        last = counter
    assert LINE.value == workspaces.LINE


def test_a_second_launch_counts_from_its_base():
    """A worker looks at a victim's counter that its own worker has not raised yet: none of its tickets is taken."""
    workspaces._workspaces.clear()
    plan = make("dynamic", Raster("grouped", group=2), 3, 7, "columns")
    for _ in range(2):
        check_order(plan.schedule, probed(plan))


def test_counters_are_a_cache_line_apart():
    """Two workers that take from two queues must not write to one line, of 128 bytes."""
    workspaces._workspaces.clear()
    a, b = rand(70, 40), rand(40, 130)
    plan = plan_for(a, b, "dynamic", 5, queues=8)
    product(plan, a, b)
    (space,) = workspaces._workspaces.values()
    used = space._counters.nonzero().flatten().tolist()
    assert used == [queue * 16 for queue in range(8)]
    assert workspaces.LINE * space._counters.element_size() == 128


def test_words_grow_and_keep_their_base():
    space = DeviceWorkspace(torch.device("cpu"))
    small, large = (make("dynamic", Raster(), 3, queues) for queues in (1, 9))
    first = space.open(small.schedule, small.block)
    second = space.open(large.schedule, large.block)
    assert second.base >= first.base + small.schedule.grid.tiles + small.schedule.workers
    assert second.counters.numel() >= 10 * workspaces.LINE
    assert space.open(small.schedule, small.block).counters is second.counters


@pytest.mark.parametrize("kind", ["dynamic", "stream_k"])
def test_the_last_worker_out_restores_a_captured_launchs_words(kind, monkeypatch):
    plan = make(kind, Raster(), 5, 3 if kind == "dynamic" else 1, batch=1)
    words = captured(monkeypatch, plan)
    for _ in range(3):
        check_order(plan.schedule, probed(plan))
        assert not words.counters.any()
        assert words.counts is None or not words.counts.any()
