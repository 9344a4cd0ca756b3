"""A device that does not depend on the machine the tests run on."""

from __future__ import annotations

import importlib

import pytest

from tilestream.plan import DeviceProperties

ask, choose = (importlib.import_module(f"tilestream.plan.{name}") for name in ("ask", "choose"))

#: 100 GFLOP/s a worker, 10 GB/s in all, four workers.
DEVICE = DeviceProperties("a test's CPU", "cpu", 4, 100e9, 10e9, "nominal: made up")


@pytest.fixture(autouse=True)
def device(monkeypatch):
    for module in (ask, choose):
        monkeypatch.setattr(module, "cpu_properties", lambda: DEVICE)
    monkeypatch.setattr(ask, "default_workers", lambda device: None)
    choose.plan_problem.cache_clear()
    yield DEVICE
    choose.plan_problem.cache_clear()
