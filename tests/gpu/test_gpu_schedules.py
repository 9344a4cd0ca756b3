"""Schedules on a part of the GPU: any number of workers, neighbours that hold SMs, queues, traces.

Every wait has a bound: a neighbour leaves at its deadline, and a launch beside it needs one SM.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from typing import Any

import pytest
import torch
from gpu_runs import ON_HOPPER, captured, nan, poison, randn
from hopper_cases import FEW

import tilestream as ts
from error_rule import Maths, check
from tilestream.plan import planner
from tilestream.plan.plan import Plan
from tilestream.runtime.properties import cuda_properties
from tilestream.trace import LaunchTrace, faults, record
from tilestream_tools.sweep.contention import GreenContext, Neighbour

#: 81 tiles of 128 x 128, and 324 of 64 x 64; K long enough that stream-K has something to split.
M, N, K = 1100, 1136, 1024
TILES = {"hopper": (128, 128), "portable": (64, 64)} if ON_HOPPER else {"portable": (64, 64)}
#: A schedule, and queues of dynamic; Hopper has by itself a queue a worker.
KINDS = (
    ("static", None), ("dynamic", None), ("dynamic", 1), ("dynamic", 2), ("dynamic", 8), ("stream_k", None),
)  # fmt: skip
by_kind = pytest.mark.parametrize(("kind", "queues"), KINDS, ids=[f"{k}-{q or 'own'}" for k, q in KINDS])


def plan_of(
    backend: str, kind: str, queues: int | None = None, workers: int | None = None, variant: str = "cooperative"
) -> Plan:
    """``variant``: of Hopper's, the tile of `FEW`."""
    how: dict[str, Any] = {"tile": TILES[backend]}
    if backend == "hopper":
        how = {"variant": variant, "tile": next(row[1:3] for row in FEW if row.variant == variant)}
    return ts.plan(
        M, N, K, dtype="bfloat16", device="cuda", layout="nt", schedule=kind, queues=queues, workers=workers,
        backend=backend, **how,
    )  # fmt: skip


@pytest.fixture(params=TILES)
def backend(request):
    return request.param


class Data:
    """Operands, B as in a Linear weight, and torch's answer, checked once by the error rule."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.a, self.b = randn(M, K), randn(N, K).t()
        self.maths, want = Maths(self.a, self.b), torch.mm(self.a, self.b)
        check(want, self.maths)
        self.want = want.float()

    def run(self, plan: Plan, out: torch.Tensor | None = None) -> torch.Tensor:
        return plan.run(self.a, self.b, out=nan(M, N) if out is None else poison(out))

    def traced(self, plan: Plan) -> tuple[LaunchTrace, torch.Tensor]:
        """The trace of a launch, and its answer."""
        with record() as recorder:
            out = self.run(plan)
        (launch,) = recorder.launches
        return launch, out

    def wrong(self, out: torch.Tensor) -> torch.Tensor:
        """Whether an answer differs from torch's by more than a rounding. Does not synchronise."""
        return ((out.float() - self.want).abs().nan_to_num(1e9) > 0.01 * self.want.abs() + 1.0).any()

    def check(self, out: torch.Tensor) -> None:
        check(out, self.maths)


@pytest.fixture(scope="module")
def data():
    return Data()


@pytest.fixture(scope="module")
def neighbour():
    return Neighbour(cuda_properties(), deadline=20.0)


# Workers -------------------------------------------------------------------------------------------------------------


@by_kind
def test_any_number_of_workers(backend, kind, queues, data):
    found, variants = {}, [row.variant for row in FEW] if backend == "hopper" else ["cooperative"]
    for workers, variant in itertools.product(range(1, 133), variants):
        plan = plan_of(backend, kind, queues, workers, variant)
        assert plan.workers in (workers, plan.schedule.grid.tiles), "no more than there is work for"
        found[workers, variant] = data.wrong(data.run(plan))
    torch.cuda.synchronize()
    assert not [which for which, one in found.items() if one]
    data.check(data.run(plan))


def test_a_limit_leaves_the_other_sms_alone(backend, data):
    with ts.worker_limit(40):
        plan = plan_of(backend, "dynamic")
        data.run(plan)
        launch, _ = data.traced(plan)
    assert launch.workers == plan.workers == 40
    assert len({span.unit for span in launch.spans}) <= 40


# Traces --------------------------------------------------------------------------------------------------------------


@by_kind
def test_coverage_from_the_trace(backend, kind, queues, data):
    plan = plan_of(backend, kind, queues, 50)
    data.run(plan)
    with record() as recorder:
        answers = [data.run(plan) for _ in range(3)]
    for out, launch in zip(answers, recorder.launches, strict=True):
        assert not faults(launch, plan.schedule)
        data.check(out)
        assert 0 < launch.end - launch.begin < 0.1
        for own in launch.by_worker:
            assert len({span.unit for span in own}) <= 1, "a worker stays where it is"
            assert all(0 <= span.unit < cuda_properties().workers for span in own)
            assert all(launch.begin <= span.begin <= span.end <= launch.end for span in own)
    assert recorder.launches[0].end <= recorder.launches[1].begin + 1e-6


def test_a_mutant_with_pools_that_no_worker_visits_is_caught(backend, data, monkeypatch):
    """Without stealing, the tiles of queues that belong to no worker stay NaN."""
    Arguments = importlib.import_module(f"tilestream.launch.{backend}.arguments").Arguments
    made = Arguments._config
    monkeypatch.setattr(Arguments, "_config", lambda *x, **logs: dataclasses.replace(made(*x, **logs), STEAL=False))
    # Not from the cache: another launch of this plan steals.
    planner.plan_problem.cache_clear()
    plan = plan_of(backend, "dynamic", 8, 3)
    launch, out = data.traced(plan)
    assert torch.isnan(out).any()
    assert any("done never" in fault for fault in faults(launch, plan.schedule))
    planner.plan_problem.cache_clear()


# Neighbours ----------------------------------------------------------------------------------------------------------


@by_kind
def test_beside_a_neighbour_on_1_to_131_sms(backend, kind, queues, data, neighbour):
    """Right answers, all items once, and none of it on an SM that is held."""
    plan, short = (plan_of(backend, kind, queues, workers) for workers in (None, 20))
    outs = [nan(M, N) for _ in range(2)]
    for one, out in itertools.product((plan, short), outs):  # compiled and loaded, traced and not
        with record():
            data.run(one, out)
        data.run(one, out)
    data.wrong(outs[0])
    for held in (1, 2, 4, 8, 16, 32, 64, 100, 120, 130, 131):
        with neighbour.taking(held):
            with record() as recorder:
                data.run(plan, outs[0])
            data.run(short, outs[1])
            torch.cuda.current_stream().synchronize()
        (launch,) = recorder.launches
        assert not faults(launch, plan.schedule)
        units = {span.unit for span in launch.spans}
        assert not units & neighbour.held
        assert len(units) <= 132 - held
        for out in outs:
            data.check(out)


def test_a_graph_and_launches_of_another_stream_beside_a_neighbour(kind, data, neighbour):
    """Both make do with the SMs that are left."""
    outs, streams = [nan(M, N) for _ in range(2)], [torch.cuda.Stream() for _ in range(2)]
    plan, bads = plan_of("portable", kind), [torch.zeros((), dtype=torch.bool, device="cuda") for _ in outs]
    ts.matmul(data.a, data.b, out=outs[0], schedule=kind)
    with captured() as graph:
        ts.matmul(data.a, data.b, out=outs[0], schedule=kind)
    torch.cuda.synchronize()

    def launch() -> None:
        for stream, out, bad in zip(streams, outs, bads, strict=True):
            with torch.cuda.stream(stream):
                poison(out)
                if out is outs[0]:
                    graph.replay()
                else:
                    data.run(plan, out)
                bad |= data.wrong(out)

    launch()
    torch.cuda.synchronize()  # every kernel is loaded before the neighbour comes: loading waits for it
    with neighbour.taking(100):
        for _ in range(50):
            launch()
        for stream in streams:
            stream.synchronize()
    assert not any(bad.item() for bad in bads)
    data.check(outs[0])


# Green contexts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("taken", [36, 68, 100])
def test_a_green_context_is_a_device_with_fewer_sms(backend, taken, data):
    green = GreenContext(cuda_properties())
    out = nan(M, N)
    for kind, queues in KINDS:
        data.run(plan_of(backend, kind, queues), out)
        with green.taking(taken) as left:
            assert 132 - taken <= left < 132 - taken + 16
            plan = plan_of(backend, kind, queues)
            assert plan.workers in (left, plan.schedule.grid.tiles)
            data.run(plan, out)
        data.check(out)
