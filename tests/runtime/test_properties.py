"""What a driver says of a GPU, as the plan sees it; the driver is made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tilestream.core.gpu_specs import named
from tilestream.plan.policy import cdna
from tilestream.runtime import properties


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(hip, ...)``: the GPU that torch sees, and its properties."""

    def made(hip: str | None, **said):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**said))
        return properties.cuda_properties(0)

    def forget():
        for function in vars(properties).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()

    forget()
    yield made
    forget()


def test_an_mi300x_is_the_one_that_is_published(gpu):
    found = gpu(
        "7.0", name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-", multi_processor_count=304,
        shared_memory_per_block=65536, clock_rate=2_100_000, memory_clock_rate=1_300_000, memory_bus_width=8192,
    )  # fmt: skip
    published = named("mi300x")
    for name in ("arch", "workers", "shared", "bandwidth", "clock", "xcds", "shader_engines", "sustained", "tensor"):
        assert getattr(found, name) == getattr(published, name), name
    assert cdna.knows(found)
    assert found.source.startswith("gfx942, one worker a CU; nominal: data sheet's operations a cycle at 2.10 GHz")


def test_a_part_of_one_has_its_share(gpu):
    found = gpu(
        "7.0", name="AMD Instinct MI300X VF", gcnArchName="gfx942", multi_processor_count=76,
        shared_memory_per_block=65536, clock_rate=2_100_000,
    )  # fmt: skip
    assert (found.xcds, found.shader_engines, found.bandwidth) == (2, 8, 5.3e12 / 4)


def test_a_gpu_that_nobody_published_is_as_its_driver_says(gpu):
    found = gpu(
        "7.0", name="a GPU", gcnArchName="gfx1100", multi_processor_count=96, shared_memory_per_block=65536,
        clock_rate=2_500_000, memory_clock_rate=1_250_000, memory_bus_width=384,
    )  # fmt: skip
    assert (found.arch, found.workers, found.xcds) == ("gfx1100", 96, 1)
    assert found.bandwidth == 2 * 1.25e9 * 384 / 8
    assert not cdna.knows(found)


def test_an_h100_is_nvidias(gpu):
    found = gpu(
        None, name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132,
        shared_memory_per_block_optin=232448, clock_rate=1_980_000, memory_clock_rate=2_619_000, memory_bus_width=5120,
    )  # fmt: skip
    assert (found.arch, found.shared, found.shader_engines) == ("sm_90", 232448, 0)
    assert found.source.startswith("sm_90, one worker an SM")
