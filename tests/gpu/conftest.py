"""Tests that need a GPU; skipped where there is none, or where Triton's interpreter is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

#: The native call path on AMD GPUs, where it is used only if it is asked for: these tests are to show that it works.
os.environ.setdefault("TILESTREAM_NATIVE_HIP", "1")


def pytest_collection_modifyitems(items):
    here = str(Path(__file__).parent)
    usable = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.gpu)
            if not usable:
                item.add_marker(pytest.mark.skip(reason="needs a GPU, and no TRITON_INTERPRET"))


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture
def portable(monkeypatch):
    """Every plan is the portable kernel's, as where there is no other; what was decided before is forgotten."""
    from tilestream.launch.cache import launch_cache
    from tilestream.plan.grouped import plan_groups
    from tilestream.plan.planner import plan_problem
    from tilestream.plan.policy import hopper

    def forget():
        launch_cache.clear()
        plan_problem.cache_clear()
        plan_groups.cache_clear()

    forget()
    monkeypatch.setattr(hopper, "refusal", lambda problem, device: "a test asks for the portable kernel")
    yield
    forget()


@pytest.fixture(params=["picked", "portable"])
def backend(request):
    """What the plan picks, and the portable kernel."""
    if request.param == "portable":
        request.getfixturevalue("portable")
    return request.param


@pytest.fixture(params=["hopper", "portable"])
def kernel(request):
    """A grouped matmul's kernel: the Hopper one, by source too, or the portable one."""
    from tilestream.launch.cache import launch_cache
    from tilestream.plan.grouped import plan_groups

    if request.param == "portable":
        request.getfixturevalue("portable")
    elif torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels for sm_90")
    plan_groups.cache_clear()
    launch_cache.clear()
    yield request.param
    plan_groups.cache_clear()
    launch_cache.clear()


@pytest.fixture
def nothing_reported():
    """No launch of the test has reported anything in the end."""
    import tilestream as ts

    yield
    torch.cuda.synchronize()
    ts.check()


@pytest.fixture(params=["native", "python"])
def way(request, monkeypatch):
    """Which way public ops are launched.

    ``native``: a call that waits for nothing is made twice, so that the second, equal one is the extension's; the first
    writes into an output of its own. ``python``: the extension is not used.
    """
    from gpu_runs import twice

    import tilestream as ts
    from tilestream.launch.native import extension, why_not
    from tilestream.ops import native

    native._load()
    if request.param == "python":
        monkeypatch.setattr(native._loaded, "extension", None)
        return
    if extension() is None:
        pytest.skip(f"no native call path: {why_not()}")
    for op in ("matmul", "mm", "bmm", "addmm", "linear", "attention"):
        monkeypatch.setattr(ts, op, twice(getattr(ts, op)))


@pytest.fixture(params=["static", "dynamic", "stream_k"])
def kind(request):
    """Of the schedule."""
    return request.param


@pytest.fixture(params=["uniform", "odd", "ragged"])
def chunking(request):
    """Of `gpu_cases.CHUNKINGS`."""
    return request.param
