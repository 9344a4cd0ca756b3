"""Launches on a GPU, without one: what they are planned with, and which are traced.

Those inside a `record` block are traced, captured ones by their replays. Kernels that write no trace are not: a warning
names them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from on_gpu import on_gpu
from tilestream.core.gpu_specs import named
from tilestream.core.operands import AttentionOperands, GemmOperands
from tilestream.launch import cache, trace
from tilestream.launch.gate import bounds_of
from tilestream.launch.observe import WORDS
from tilestream.launch.trace import SpanLog
from tilestream.ops import attention_gpu, gpu
from tilestream.ops.attention_operands import Settings
from tilestream.ops.gated import Gate
from tilestream.plan import DeviceProperties, Problem
from tilestream.plan.planner import plan_problem
from tilestream.trace import faults, record

SETTINGS = Settings(False, "bottom_right", -1, -1, 0.0, 0.3)


class Launch:
    """A launch that does all items in its worker 0, a microsecond each."""

    def __init__(self, backend: str, variant: str = "persistent") -> None:
        device = DeviceProperties("a stub", "portable", 4, 1e12, 1e12, "", "sm_90", 232448)
        plan = plan_problem(Problem(512, 512, 512, 1, "bfloat16", "bfloat16"), device=device, backend="portable")
        self.plan = replace(plan, backend=backend, variant=variant)
        self.given: list[object] = []

    def __call__(self, x, awaited=None, probe=None) -> None:
        self.given.append(probe)
        if isinstance(probe, SpanLog):
            for place in range(self.plan.schedule.grid.tiles):
                begin = 1000 * (place + 1)
                probe.words[place] = torch.tensor([1, 0, 5, begin, begin, 2 * (begin + 1000) + 1, 0, 0, 0])


@pytest.fixture
def issue(monkeypatch):
    """Issue the launch of a backend's plan."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the CPU's index

    def call(launch: Launch) -> None:
        x = torch.zeros(1)
        gpu.issue(launch, GemmOperands(x, x, x), None, "linear")

    return call


def test_inside_a_block_each_launch_has_a_log_that_is_read_at_its_end(issue):
    launch = Launch("hopper")
    issue(launch)
    assert launch.given == [None], "outside of a block"
    with record() as recorder:
        issue(launch)
        issue(launch)
        assert [one.tiles_done for one in recorder.launches] == [0, 0]
    assert [isinstance(log, SpanLog) for log in launch.given] == [False, True, True]
    for one in recorder.launches:
        assert one.op == "linear"
        assert not faults(one, launch.plan.schedule)
        assert one.end - one.begin == pytest.approx(1e-6 * one.tiles, rel=1e-3)


class Graph:
    """What a capture keeps of the logs, and a replay: the kernel writes its log, which is copied to the host."""

    def __init__(self, monkeypatch) -> None:
        self.kept: list[SpanLog] = []
        self.copies: list[tuple[int, ...]] = []
        self.relaxed: list[bool] = []
        zeros = torch.zeros

        def zeros_of_the_host(*size, pin_memory=False, **how):
            assert not pin_memory or self.relaxed, "torch may ask about events, which would end the capture"
            return zeros(*size, **how)

        @contextlib.contextmanager
        def relaxed():
            self.relaxed.append(True)
            yield
            self.relaxed.pop()

        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=5))
        monkeypatch.setattr(torch, "zeros", zeros_of_the_host)
        monkeypatch.setattr(trace.driver, "captures_relaxed", relaxed)
        monkeypatch.setattr(trace.driver, "copy_out", lambda *copy: self.copies.append(copy))
        monkeypatch.setattr(trace, "keep", lambda stream, copy, log: self.kept.append(copy))

    def replay(self, launch: Launch, begin: int) -> None:
        for log, (stream, to, source, size) in zip(launch.given, self.copies, strict=True):
            for place in range(len(log.words)):
                ends = [2 * (begin + 1000) + 1, 0, 0]
                log.words[place] = torch.tensor([1, 0, 5, begin, begin, *ends, 0])
                begin += 1000
            assert (stream, source, size) == (5, log.words.data_ptr(), 8 * log.words.numel())
            ctypes.memmove(to, source, size)


@pytest.fixture(autouse=True)
def waited(monkeypatch):
    """The devices that were waited for."""
    devices: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", devices.append)
    return devices


def test_a_captured_launch_is_read_after_each_replay_and_its_memory_outlives_the_recorder(issue, monkeypatch, waited):
    launch = Launch("hopper")
    graph = Graph(monkeypatch)
    with record() as recorder:
        issue(launch)
        issue(launch)
    assert not recorder.launches, "nothing has run"
    assert not waited
    assert [one.spans for one in recorder.replayed()] == [[], []], "and nothing was replayed"
    assert waited == [torch.device("cpu")] * 2
    tiles, read = launch.plan.schedule.grid.tiles, []
    for begin in (10**6, 10**9):
        graph.replay(launch, begin)
        read.append(recorder.replayed())
    for one in (one for of in read for one in of):
        assert one.op == "linear"
        assert not faults(one, launch.plan.schedule)
        assert one.end - one.begin == pytest.approx(1e-6 * tiles, rel=1e-3)
    (first, second), (third, _) = read
    assert second.begin - first.end == pytest.approx(0.0, abs=1e-9), "one right behind the other"
    assert third.begin - first.begin == pytest.approx((10**9 - 10**6) * 1e-9), "one clock for all replays"
    copies = [weakref.ref(copy) for copy in graph.kept]
    del recorder
    gc.collect()
    assert all(copy() is not None for copy in copies)
    graph.replay(launch, 10**9)  # writes to what the graph keeps
    graph.kept.clear()
    gc.collect()
    assert not any(copy() for copy in copies), "nothing else keeps it"


def test_a_recorder_still_reads_when_its_graph_is_gone(issue, monkeypatch):
    launch = Launch("hopper")
    graph = Graph(monkeypatch)
    with record() as recorder:
        issue(launch)
    graph.replay(launch, 10**6)
    graph.kept.clear()
    gc.collect()
    (one,) = recorder.replayed()
    assert not faults(one, launch.plan.schedule)


def test_captured_and_eager_launches_of_a_block_have_one_clock(issue, monkeypatch):
    launch, other = Launch("hopper"), Launch("hopper")
    with record() as recorder:
        issue(launch)  # begins at 1000 ns
        with pytest.MonkeyPatch.context() as patch:
            graph = Graph(patch)
            issue(other)
    graph.replay(other, 10**6)
    (eager,), (replayed,) = recorder.launches, recorder.replayed()
    assert replayed.begin - eager.begin == pytest.approx(1e-9 * (10**6 - 1000))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(
    ("launch", "why"),
    [(("cdna",), "the CDNA kernel writes no trace"), (("hopper", "paired"), "a pair of CTAs writes no trace")],
)
def test_a_launch_that_is_not_recorded_is_named(issue, monkeypatch, caplog, launch, captured, why):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    launch = Launch(*launch)
    with caplog.at_level(logging.WARNING), record() as recorder:
        issue(launch)
    assert launch.given == [None]
    assert not recorder.launches
    assert not recorder.replayed()
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.startswith("linear: ")
    assert why in said


def test_attention_is_planned_with_the_limit_and_issued(monkeypatch):
    seen, planned, device = [], attention_gpu.plan_attention, named("h100")
    monkeypatch.setattr(cache, "context_units", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(attention_gpu, "launch_cache", cache.LaunchCache())
    monkeypatch.setattr(attention_gpu, "check_device", lambda index: None)
    monkeypatch.setattr(attention_gpu, "cuda_properties", lambda index: device)
    monkeypatch.setattr(
        attention_gpu, "plan_attention", lambda *args, limit, **how: seen.append(limit) or planned(*args, **how)
    )
    monkeypatch.setattr(attention_gpu, "launch_of", lambda plan, layout, aligned: plan)
    monkeypatch.setattr(attention_gpu, "issue", lambda *args: seen.append(args))
    x = AttentionOperands(*(on_gpu(1, 4, 2, 8, dtype=torch.float32) for _ in range(4)), 0.3)
    attention_gpu.run(x, SETTINGS, None, 1.0, 7)
    limit, (plan, operands, awaited, op) = seen
    assert (limit, plan.device, operands, awaited, op) == (7, device, x, None, "attention")


@pytest.mark.parametrize("by_matmul", [False, True])
@pytest.mark.parametrize("which", ["rows", "columns"])
def test_the_allocator_is_told_of_what_a_matmul_has_published(which, by_matmul, monkeypatch):
    """Its memory may be of that matmul's stream."""

    class Operand:
        def __init__(self) -> None:
            self.device, self.streams = torch.device("cuda", 0), []

        def record_stream(self, stream: object) -> None:
            self.streams.append(stream)

    x, issued = SimpleNamespace(a=Operand(), b=Operand()), []
    awaited = SimpleNamespace(rows=None, columns=None)
    setattr(awaited, which, SimpleNamespace(by_matmul=by_matmul))
    monkeypatch.setattr(gpu, "check_device", lambda index: None)
    monkeypatch.setattr(gpu.Awaited, "of", lambda *given: awaited)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "a stream")
    monkeypatch.setattr(gpu, "find", lambda *given: "a launch")
    monkeypatch.setattr(gpu, "issue", lambda *given: issued.append(given))
    gpu.run(x, gpu.How())
    told = {"rows": x.a.streams, "columns": x.b.streams}
    assert told.pop(which) == ["a stream"] * by_matmul
    assert not any(told.values())
    assert issued == [("a launch", x, awaited, "matmul")]


@pytest.mark.parametrize("publishes", [False, True])
def test_a_native_launch_is_told_its_words_in_order(publishes):
    words = [torch.zeros(1, dtype=torch.int32) for _ in range(6)]
    rows = SimpleNamespace(eager_words=(words[0], words[1], 11, 12))
    columns = SimpleNamespace(eager_words=(words[2], words[3], 21, 22))
    publication = SimpleNamespace(eager_publication=(words[4], words[5], 31))
    made = Gate(rows, columns, publication if publishes else None, [1, 2, 3, 4], 0, 0.5, "attention").words()
    told = dict(zip(WORDS, made, strict=True))
    signals = ("row_signals", "row_quarantine", "column_signals", "column_quarantine")
    assert [told[name] for name in signals] == [one.data_ptr() for one in words[:4]]
    assert [told[f"row_{name}"] for name in ("epoch", "key")] == [11, 12]
    assert [told[f"column_{name}"] for name in ("epoch", "key")] == [21, 22]
    of_output = [told[name] for name in ("out_signals", "out_counts", "out_epoch")]
    assert of_output == ([words[4].data_ptr(), words[5].data_ptr(), 31] if publishes else [0, 0, of_output[2]])
    assert (told["allowed"], told["op"]) == ((0, 0) if publishes else bounds_of(0.5, "attention"))
