"""A device that does not depend on the machine the tests run on."""

from __future__ import annotations

import importlib

import pytest

from tilestream.plan import DeviceProperties

api, planner = (importlib.import_module(f"tilestream.plan.{name}") for name in ("api", "planner"))

#: 100 GFLOP/s a worker, 10 GB/s in all, four workers.
DEVICE = DeviceProperties("a test's CPU", "cpu", 4, 100e9, 10e9, "nominal: made up")


@pytest.fixture(autouse=True)
def device(monkeypatch):
    for module in (api, planner):
        monkeypatch.setattr(module, "cpu_properties", lambda: DEVICE)
    monkeypatch.setattr(api, "default_workers", lambda device: None)
    planner.plan_problem.cache_clear()
    yield DEVICE
    planner.plan_problem.cache_clear()
