"""Schedules on a part of the GPU: any number of workers, neighbours that hold SMs, queues, traces.

Every wait has a bound: a neighbour leaves at its deadline, and a launch beside it needs one SM.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from gpu_runs import Differences, captured, nan, poison, randn
from schedule_cases import BACKENDS, HELD, KINDS, WORKERS, K, M, N, plan_of

import tilestream as ts
from error_rule import Maths, check
from tilestream.plan import planner
from tilestream.runtime.properties import cuda_properties
from tilestream.trace import draw, export, faults, load, record
from tilestream_tools.sweep.contention import GreenContext, Neighbour

by_kind = pytest.mark.parametrize(("kind", "queues"), KINDS, ids=[f"{k}-{q or 'own'}" for k, q in KINDS])


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "hopper" and cuda_properties().arch != "sm_90":
        pytest.skip("needs Hopper")
    return request.param


@pytest.fixture(scope="module")
def data():
    """Operands, B as in a Linear weight, and torch's answer, checked once by the error rule."""
    torch.manual_seed(1)
    a, b = randn(M, K), randn(N, K).t()
    maths, want = Maths(a, b), torch.mm(a, b)
    check(want, maths)
    return SimpleNamespace(a=a, b=b, maths=maths, want=want.float())


@pytest.fixture(scope="module")
def neighbour():
    return Neighbour(cuda_properties(), deadline=20.0)


def run(plan, data, out=None):
    return plan.run(data.a, data.b, out=nan(M, N) if out is None else poison(out))


def traced(plan, data):
    """The trace of a launch, and its answer."""
    with record() as recorder:
        out = run(plan, data)
    (launch,) = recorder.launches
    return launch, out


def wrong(out, data) -> torch.Tensor:
    """Whether an answer differs from torch's by more than a rounding. Does not synchronise."""
    return ((out.float() - data.want).abs().nan_to_num(1e9) > 0.01 * data.want.abs() + 1.0).any()


# Workers -------------------------------------------------------------------------------------------------------------


@by_kind
def test_any_number_of_workers(backend, kind, queues, data):
    found = {}
    for workers in WORKERS:
        plan = plan_of("cuda", backend, kind, queues, workers)
        assert plan.workers in (workers, plan.schedule.grid.tiles), "no more than there is work for"
        found[workers] = wrong(run(plan, data), data)
    torch.cuda.synchronize()
    assert not [workers for workers, one in found.items() if one]
    check(run(plan, data), data.maths)


def test_a_limit_leaves_the_other_sms_alone(backend, data):
    with ts.worker_limit(40):
        plan = plan_of("cuda", backend, "dynamic")
        run(plan, data)
        launch, _ = traced(plan, data)
    assert launch.workers == plan.workers == 40
    assert len({span.unit for span in launch.spans}) <= 40


# Traces --------------------------------------------------------------------------------------------------------------


@by_kind
def test_coverage_from_the_trace(backend, kind, queues, data):
    plan = plan_of("cuda", backend, kind, queues, 50)
    run(plan, data)
    with record() as recorder:
        answers = [run(plan, data) for _ in range(3)]
    for out, launch in zip(answers, recorder.launches, strict=True):
        assert not faults(launch, plan.schedule)
        check(out, data.maths)
        assert 0 < launch.end - launch.begin < 0.1
        for own in launch.by_worker:
            assert len({span.unit for span in own}) <= 1, "a worker stays where it is"
            assert all(0 <= span.unit < cuda_properties().workers for span in own)
            assert all(launch.begin <= span.begin <= span.end <= launch.end for span in own)
    assert recorder.launches[0].end <= recorder.launches[1].begin + 1e-6


def test_static_order_is_the_hosts_and_deterministic(backend, data):
    plan = plan_of("cuda", backend, "static", workers=37)
    launch, _ = traced(plan, data)
    grid = plan.schedule.grid
    for worker, own in enumerate(launch.by_worker):
        items = [plan.schedule.ticket(0, at)[0] for at in range(worker, grid.tiles, 37)]
        assert [(span.pm, span.pn) for span in own] == [(item.pm, item.pn) for item in items]


@pytest.mark.parametrize("backend", ["hopper"], indirect=True)
def test_on_hopper_each_worker_begins_with_what_a_static_grid_would_give_it(backend, data):
    plan = plan_of("cuda", "hopper", "dynamic", workers=37)
    assert (plan.schedule.queues, plan.schedule.split) == (37, "strides")
    launch, _ = traced(plan, data)
    static = plan_of("cuda", "hopper", "static", workers=37).schedule
    firsts = [(own[0].pm, own[0].pn) for own in launch.by_worker if own]
    items = [static.ticket(0, worker)[0] for worker in range(37)]
    assert firsts == [(item.pm, item.pn) for item in items]


@pytest.mark.parametrize("queues", [2, 8])
def test_a_worker_begins_in_its_own_queue(backend, queues, data):
    plan = plan_of("cuda", backend, "dynamic", queues, 16)
    assert plan.schedule.split == "columns"
    launch, _ = traced(plan, data)
    mine = {
        queue: {plan.schedule.ticket(queue, ticket)[0].pn for ticket in range(plan.schedule.queue_size(queue))}
        for queue in range(queues)
    }
    firsts = [(worker, own[0].pn) for worker, own in enumerate(launch.by_worker) if own]
    assert len(firsts) == 16
    assert all(column in mine[worker % queues] for worker, column in firsts)


def test_a_mutant_with_pools_that_no_worker_visits_is_caught(backend, data, monkeypatch):
    """Without stealing, the tiles of queues that belong to no worker stay NaN."""
    Arguments = importlib.import_module(f"tilestream.launch.{backend}.arguments").Arguments
    made = Arguments._config
    monkeypatch.setattr(Arguments, "_config", lambda *given: dataclasses.replace(made(*given), STEAL=False))
    # Not from the cache: another launch of this plan steals.
    planner.plan_problem.cache_clear()
    plan = plan_of("cuda", backend, "dynamic", 8, 3)
    launch, out = traced(plan, data)
    assert torch.isnan(out).any()
    assert any("done never" in fault for fault in faults(launch, plan.schedule))
    planner.plan_problem.cache_clear()


def test_a_trace_is_drawn_and_exported(data, tmp_path):
    pytest.importorskip("matplotlib")
    with record() as recorder:
        ts.mm(data.a, data.b)
        ts.matmul(data.a, data.b, schedule="stream_k", workers=100)
    assert draw(recorder.launches[0], tmp_path / "launch.png").stat().st_size > 5000
    path = export(recorder.launches, tmp_path / "launches.json")
    assert len(json.loads(path.read_text())["traceEvents"]) > 80
    for before, after in zip(recorder.launches, load(path), strict=True):
        assert [span.unit for span in before.spans] == [span.unit for span in after.spans]


def test_what_is_captured_is_not_recorded(data, caplog):
    ts.mm(data.a, data.b)
    with record() as recorder, captured() as graph:
        out = ts.mm(data.a, data.b)
    assert not recorder.launches
    assert "captured" in caplog.text
    poison(out)
    graph.replay()
    check(out, data.maths)


# Neighbours ----------------------------------------------------------------------------------------------------------


def test_the_neighbour_says_which_sms_it_holds_and_leaves_when_it_is_told(neighbour):
    for count in (1, 66, 131):
        with neighbour.taking(count) as left:
            assert left == 132 - count
            assert len(neighbour.held) == count
            assert neighbour.held <= set(range(132))
    with pytest.raises(ValueError, match="132 taken of 132"), neighbour.taking(132):
        pass


def test_a_block_that_outlasts_the_neighbour_counts_for_nothing():
    brief = Neighbour(cuda_properties(), deadline=0.2)

    def outlast() -> None:
        with brief.taking(3):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                torch.cuda._sleep(40_000_000)
            end.record()
            end.synchronize()
            assert begin.elapsed_time(end) > 250

    with pytest.raises(RuntimeError, match="left after its deadline"):
        outlast()


@by_kind
def test_beside_a_neighbour_on_1_to_131_sms(backend, kind, queues, data, neighbour):
    """Right answers, all items once, and none of it on an SM that is held."""
    plan, short = (plan_of("cuda", backend, kind, queues, workers) for workers in (None, 20))
    outs = [nan(M, N) for _ in range(2)]
    for one, out in itertools.product((plan, short), outs):  # compiled and loaded, traced and not
        with record():
            run(one, data, out)
        run(one, data, out)
    wrong(outs[0], data)
    for held in HELD:
        with neighbour.taking(held):
            with record() as recorder:
                run(plan, data, outs[0])
            run(short, data, outs[1])
            torch.cuda.current_stream().synchronize()
        (launch,) = recorder.launches
        assert not faults(launch, plan.schedule)
        units = {span.unit for span in launch.spans}
        assert not units & neighbour.held
        assert len(units) <= 132 - held
        for out in outs:
            check(out, data.maths)


def test_a_graph_is_replayed_beside_a_neighbour(kind, data, neighbour):
    out = nan(M, N)
    ts.matmul(data.a, data.b, out=out, schedule=kind)
    with captured() as graph:
        ts.matmul(data.a, data.b, out=out, schedule=kind)
    graph.replay()
    bad = wrong(out, data)
    bad |= wrong(out, data)  # every kernel is loaded before the neighbour comes: loading waits for it
    with neighbour.taking(100):
        for _ in range(50):
            poison(out)
            graph.replay()
            bad |= wrong(out, data)
        torch.cuda.current_stream().synchronize()
    assert not bad.item()
    check(out, data.maths)


def test_two_streams_beside_a_neighbour(kind, data, neighbour):
    streams = [torch.cuda.Stream() for _ in range(2)]
    outs = [nan(M, N) for _ in streams]
    plan = plan_of("cuda", "portable", kind)
    bads = []
    for stream, out in zip(streams, outs, strict=True):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            bads.append(wrong(run(plan, data, out), data))
            bads[-1] |= wrong(out, data)
    torch.cuda.synchronize()
    with neighbour.taking(64):
        for _ in range(50):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    bads[i] |= wrong(run(plan, data, outs[i]), data)
        for stream in streams:
            stream.synchronize()
    assert not any(bad.item() for bad in bads)


# Many launches -------------------------------------------------------------------------------------------------------


def test_ten_thousand_launches_on_one_workspace(backend, data):
    from tilestream.runtime import device_workspace as workspaces

    plans = [
        plan_of("cuda", backend, kind, queues, workers)
        for (kind, queues), workers in itertools.product(KINDS[1:], (132, 17, 101, 1))
        if workers > 1 or kind == "dynamic"
    ]
    out = nan(M, N)
    want = [run(plan, data) for plan in plans]
    before = len(workspaces._workspaces)
    bad = Differences()
    for i in range(10_000):
        number = i * 7 % len(plans)
        if i % 10 == 0:
            poison(out)
        plans[number].run(data.a, data.b, out=out)
        bad.add(out != want[number])  # the same bits each time, of stream_k too
    assert bad.none()
    assert not any(wrong(one, data).item() for one in want)
    assert len(workspaces._workspaces) == before


# Green contexts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [36, 68, 100])
def test_a_green_context_is_a_device_with_fewer_sms(backend, taken, data):
    green = GreenContext(cuda_properties())
    out = nan(M, N)
    for kind, queues in KINDS:
        run(plan_of("cuda", backend, kind, queues), data, out)
        with green.taking(taken) as left:
            assert 132 - taken <= left < 132 - taken + 16
            plan = plan_of("cuda", backend, kind, queues)
            assert plan.workers in (left, plan.schedule.grid.tiles)
            run(plan, data, out)
        check(out, data.maths)
