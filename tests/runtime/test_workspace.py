"""Workspaces: made on first use, reused, never cleared, one launch's at a time; and they survive a fork."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref

import pytest
import torch

import tilestream as ts
from error_rule import Maths, check, rand
from forked import forks, in_a_child
from streaming import run_together
from tilestream.kernels.cpu.gemm import GemmBody
from tilestream.runtime import device_workspace as device_workspaces
from tilestream.runtime import workspace as module
from tilestream.runtime.device_workspace import LINE, DeviceWorkspace, captured_words, device_workspace, words_of
from tilestream.runtime.workspace import Counter, Workspace, workspace
from tilestream.schedule import Grid, Schedule


@pytest.fixture
def pool(monkeypatch):
    """A pool of this test's own."""
    fresh = module._Pool()
    monkeypatch.setattr(module, "_pool", fresh)
    return fresh


def schedule(kind="dynamic", workers=3, **options) -> Schedule:
    return Schedule(kind, Grid(1, 3, 5, 4), workers=workers, **options)


@pytest.mark.parametrize("captured", [False, True])
def test_a_launch_on_a_gpu_has_counts_for_both_halves_of_each_split_tile(captured):
    """Hopper's kernel counts the halves of a slot's tile at ``2 * slot`` and ``2 * slot + 1``."""
    split, device, block = schedule("stream_k", workers=7), torch.device("cpu"), (16, 32)
    assert split.slots
    words = captured_words(device, split, block) if captured else DeviceWorkspace(device).open(split, block)
    assert words.counts.dtype == torch.int32
    assert words.counts.numel() >= 2 * split.slots
    assert not words.counts.any()
    assert words.partials.numel() >= split.slots * 16 * 32
    assert words.counters.numel() >= words_of(split) == (split.queues + 2) * LINE


def test_a_captured_launch_has_lists_and_scratch_of_its_own():
    plan, device = schedule(), torch.device("cpu")
    assert not plan.slots
    words, again = (captured_words(device, plan, (16, 32), listed=5, floats=70) for _ in range(2))
    assert [x.numel() for x in (*words.listed, words.partials)] == [5, 5, 70]
    assert words.counters.data_ptr() != again.counters.data_ptr()
    assert captured_words(device, plan, (16, 32)).listed is None


def test_a_gpus_workspace_grows_is_kept_and_counts_on():
    space = DeviceWorkspace(torch.device("cpu"))
    small, large = (Schedule("stream_k", Grid(1, 3, n, 4), workers=workers) for n, workers in ((5, 7), (10, 13)))
    assert small.slots < large.slots
    first, grown, again = (space.open(plan, (16, 32), listed) for plan, listed in ((small, 4), (large, 9), (small, 4)))
    assert [x.numel() for x in (grown.counts, grown.partials, *grown.listed)] == [
        2 * large.slots, 16 * 32 * large.slots, 9, 9
    ]  # fmt: skip
    assert again._replace(base=0) == grown._replace(base=0), "the same tensors"
    bases = (0, small.most_tickets, small.most_tickets + large.most_tickets)
    assert (first.base, grown.base, again.base) == bases


def test_workspaces_are_kept_for_the_streams_that_were_used_last(monkeypatch):
    """Endless streams of others: a bounded number of workspaces, and always those of the default streams."""
    kept = {}
    monkeypatch.setattr(device_workspaces, "_workspaces", kept)
    monkeypatch.setattr(device_workspaces, "context_id", lambda: 7)
    cpu, split = torch.device("cpu"), schedule("stream_k", workers=7)
    default, often = device_workspace(cpu, 0), device_workspace(cpu, 1)
    for stream in range(2, 10 * device_workspaces.MOST_STREAMS):
        words = device_workspace(cpu, stream).open(split, (16, 32))
        freed = weakref.ref(words.counters)
        assert device_workspace(cpu, 1) is often
    del words
    assert len(kept) == device_workspaces.MOST_STREAMS
    assert device_workspace(cpu, 0) is default
    del kept[(None, stream, 0)]
    assert freed() is None, "nothing else holds the words"


def test_a_workspace_that_was_let_go_of_serves_the_thread_that_has_it(monkeypatch):
    """Its launch goes on, and the next one on that stream counts with words of its own."""
    monkeypatch.setattr(device_workspaces, "_workspaces", {})
    cpu, plan = torch.device("cpu"), schedule()
    held = device_workspace(cpu, 1)
    first = held.open(plan, (16, 32))
    for stream in range(2, 2 + device_workspaces.MOST_STREAMS):
        device_workspace(cpu, stream)
    other = device_workspace(cpu, 1)
    assert other is not held
    words = other.open(plan, (16, 32))
    assert words.base == first.base == 0
    assert words.counters.data_ptr() != first.counters.data_ptr()
    assert held.open(plan, (16, 32)).base == plan.most_tickets


# Counters -------------------------------------------------------------------------------------------------------------


def test_what_is_compiled_ahead_has_words_of_no_other_launch():
    meta = torch.device("meta")
    assert device_workspace(meta, 0) is not device_workspace(meta, 0)
    assert device_workspace(torch.device("cpu"), 0) is device_workspace(torch.device("cpu"), 0)


def test_a_counter_counts_from_the_base():
    counter = Counter()
    for base in (0, 10):
        assert counter.peek(base) == 0, "nothing was added since the base"
        assert [counter.add(base) for _ in range(3)] == [0, 1, 2]
        assert counter.peek(base) == 3


def test_a_counter_gives_each_ticket_once():
    counter, taken = Counter(), [[] for _ in range(6)]
    run_together(6, lambda i: taken[i].extend(counter.add(100) for _ in range(500)))
    assert sorted(itertools.chain(*taken)) == list(range(3000))


@pytest.mark.parametrize("taken", [0, 1, 4, 7, 18, None])
def test_invariant_4_opening_clears_no_counter_and_a_drained_launch_spoils_nothing(taken):
    """``taken``: tickets of each launch; None: the most that a launch can take, late workers included."""
    space, plan = Workspace(), schedule(queues=2)
    before = [0, 0]
    for _ in range(5):
        space.open(plan)
        for queue, base in enumerate(space.bases):
            assert before[queue] <= space.counters[queue]._value <= base, "the launch before took less than this base"
            assert space.counters[queue].peek(base) == 0, "a new launch finds its queues full"
            most = plan.queue_size(queue) + plan.workers
            count = most if taken is None else min(taken, most)
            assert [space.counters[queue].add(base) for _ in range(count)] == list(range(count))
            before[queue] = space.counters[queue]._value


def test_queues_are_added_as_schedules_need_them():
    space = Workspace()
    space.open(schedule(queues=2))
    first = list(space.counters)
    space.open(schedule(queues=5))
    assert space.counters[:2] == first
    assert len(space.counters) == 5
    space.open(schedule(queues=1))
    assert space.counters[:2] == first


def test_counts_are_restored_by_the_last():
    space = Workspace()
    for _ in range(2):
        assert [space.count(7, 3) for _ in range(3)] == [0, 1, 2]
    space.count(7, 3)
    space.open(schedule())
    assert space.count(7, 3) == 0, "a drained launch's count is forgotten"


def test_scratch_grows_and_is_reused():
    space = Workspace()
    large = space.slots(3, 16, 32, torch.float32)
    assert large.shape == (3, 16, 32)
    small = space.slots(2, 8, 8, torch.float32)
    assert small.is_contiguous()
    for again in (small, space.slots(3, 16, 32, torch.float32)):
        assert again.data_ptr() == large.data_ptr()
    assert space.slots(1, 8, 8, torch.float64).dtype == torch.float64


def test_scratch_of_just_the_size_is_reused_by_the_next_tile():
    space = Workspace()
    with space.borrow((4, 8), torch.float32) as first:
        pass
    with space.borrow((8, 4), torch.float32) as again, space.borrow((1, 1), torch.float32) as another:
        assert again.data_ptr() == first.data_ptr()
        assert another.data_ptr() != first.data_ptr()


def test_a_workspace_keeps_no_more_than_64_mib_of_scratch():
    """A process keeps eight: 512 MiB, whatever its launches have needed."""
    most = 64 * 2**20 // 4
    for size, is_kept in ((most, True), (most + 1, False)):
        space = Workspace()
        with space.borrow((size,), torch.float32) as scratch:
            at = scratch.data_ptr()
        space.trim()
        assert [x.data_ptr() for x in space._spare] == [at] * is_kept


# The pool -------------------------------------------------------------------------------------------------------------


def test_invariant_8_a_workspace_is_reused_and_no_other_launchs_for_the_length_of_the_block(pool):
    with workspace() as first:
        assert not pool.free
    with contextlib.suppress(ZeroDivisionError), workspace() as second:
        assert second is first
        1 / 0  # noqa: B018
    assert pool.free == [first]
    taken, together = [], threading.Barrier(module._KEPT + 4)

    def task(i):
        with workspace() as mine:
            taken.append(mine)
            together.wait(300)

    run_together(module._KEPT + 4, task)
    assert len(set(map(id, taken))) == module._KEPT + 4
    assert len(pool.free) == module._KEPT, "no more than it should keep"


@pytest.mark.usefixtures("small_tiles")
def test_invariant_4_a_thousand_calls_on_one_workspace_with_failures_between(pool, monkeypatch):
    a, b = rand(40, 24), rand(24, 40)
    correct = ts.matmul(a, b, workers=2, schedule="dynamic")
    check(correct, Maths(a, b))
    (space,) = pool.free
    values, real = [space.counters[0]._value], GemmBody.compute
    fail = [False]

    def compute(self, item):
        if fail[0] and item.tile == 4:
            raise ZeroDivisionError
        real(self, item)

    monkeypatch.setattr(GemmBody, "compute", compute)
    for call in range(1000):
        fail[0] = call % 7 == 3
        how = ("dynamic", "stream_k")[call % 2]
        workers = 1 + call % 3
        if fail[0]:
            with pytest.raises(ZeroDivisionError):
                ts.matmul(a, b, workers=workers, schedule=how)
        else:
            answer = ts.matmul(a, b, workers=workers, schedule=how)
            torch.testing.assert_close(answer, correct)
        assert pool.free == [space], "another workspace was made"
        values.append(space.counters[0]._value)
    assert all(one < two for one, two in itertools.pairwise(values)), "a counter was cleared"


@pytest.mark.usefixtures("small_tiles")
def test_invariant_4_a_launch_that_expired_leaves_the_counters_usable(pool):
    a, b = rand(64, 24), rand(24, 40)
    arrival = ts.Arrival.uniform(16, 4)
    for chunk in (0, 1):
        arrival.signal(chunk)
    for schedule_ in ("dynamic", "stream_k") * 4:
        with pytest.raises(ts.ArrivalTimeout):
            ts.matmul(a, b, arrival=arrival, deadline=0.01, workers=3, schedule=schedule_)
        check(ts.matmul(a, b, workers=3, schedule=schedule_), Maths(a, b))
    assert len(pool.free) == 1


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "how",
    [{}]
    + [
        {"workers": 2, "schedule": kind, "activation": activation}
        for kind in ("dynamic", "stream_k")
        for activation in (None, "relu")
    ],
    ids=str,
)
def test_invariant_8_a_call_allocates_its_output_and_nothing_else(how):
    # In float32: 16-bit operands with an epilogue are converted tile by tile, which the CPU backend must allocate.
    from torch.profiler import ProfilerActivity, profile

    a, b = rand(256, 64), rand(64, 256)
    output = 256 * 256 * 4
    ts.matmul(a, b, **how)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        ts.matmul(a, b, **how)
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profiler.key_averages())
    assert output <= allocated <= output + 4096


# Fork -----------------------------------------------------------------------------------------------------------------


def product() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Operands, and their product made and checked in the parent: a child compares with it and multiplies nothing."""
    a, b = rand(40, 24), rand(24, 40)
    correct = ts.matmul(a, b, workers=3)
    check(correct, Maths(a, b))
    return a, b, correct


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@forks
@pytest.mark.usefixtures("small_tiles")
class TestFork:
    @pytest.mark.usefixtures("pool")
    def test_a_forked_child_multiplies(self):
        a, b, correct = product()

        def task():
            for how in ("dynamic", "stream_k", "static"):
                torch.testing.assert_close(ts.matmul(a, b, workers=2, schedule=how), correct)
            arrival = ts.Arrival.uniform(16, 3)
            with pytest.raises(ts.ArrivalTimeout):
                ts.matmul(a, b, arrival=arrival, workers=2, deadline=0.02)

        assert in_a_child(task) == 0
        check(ts.matmul(a, b, workers=3), Maths(a, b))

    @pytest.mark.parametrize("own", [True, False], ids=["own number", "changing the default"])
    def test_each_lock_of_a_call_is_free_in_a_child(self, own, monkeypatch):
        from tilestream.launch.cpu import threads

        if not own:
            monkeypatch.setattr(threads, "own_setters", lambda: None)
        a, b, correct = product()
        with threads._changing_default, module._pool.lock:
            status = in_a_child(lambda: torch.testing.assert_close(ts.matmul(a, b, workers=2), correct))
        assert status == 0
