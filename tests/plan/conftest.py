"""A device that does not depend on the machine the tests run on."""

from __future__ import annotations

import importlib

import pytest

from tilestream.plan import DeviceProperties

plans = importlib.import_module("tilestream.plan.plan")

#: 100 GFLOP/s a worker, 10 GB/s in all, four workers.
DEVICE = DeviceProperties("a test's CPU", "cpu", 4, 100e9, 10e9, "nominal: made up")


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(plans, "cpu_properties", lambda: DEVICE)
    monkeypatch.setattr(plans, "_default_workers", lambda device: None)
    plans.plan_problem.cache_clear()
    yield DEVICE
    plans.plan_problem.cache_clear()
