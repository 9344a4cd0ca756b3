"""The current context's SMs, as the driver tells them: a green context has a part of the device's."""

from __future__ import annotations

import ctypes
import types

import pytest
import torch

from tilestream.runtime import device_workspace, driver, properties


class Driver:
    """Contexts with numbers and SMs; the current one; how often was asked."""

    def __init__(self, sms: dict[int, int], current: int) -> None:
        self.sms, self.current, self.asked = sms, current, 0

    def __call__(self, hip: bool, name: str, arguments: tuple[type, ...]):
        return getattr(self, name)

    def cuCtxGetId(self, context, number):  # noqa: N802
        assert context is None
        number._obj.value = self.current
        return 0 if self.current else 201

    def cuCtxGetCurrent(self, context):  # noqa: N802
        context._obj.value = 0x1000 + self.current
        return 0

    def cuCtxGetDevResource(self, context, at, kind):  # noqa: N802
        if context != 0x1000 + self.current:
            return 201  # of no context nothing is known
        assert kind == 1
        self.asked += 1
        ctypes.c_uint32.from_address(at).value = kind
        ctypes.c_uint32.from_address(at + 96).value = self.sms[self.current]  # behind the type and 92 bytes
        return 0


@pytest.fixture
def contexts(monkeypatch):
    """A device of 132 SMs: the primary context 1, and green ones of 96 and of 16."""
    made = Driver({1: 132, 5: 96, 9: 16}, 1)
    monkeypatch.setattr(driver, "_function", made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = types.SimpleNamespace(
        name="a GPU", major=9, minor=0, shared_memory_per_block_optin=232448, multi_processor_count=132,
        clock_rate=1_980_000, memory_clock_rate=2_619_000, memory_bus_width=5120,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setattr(properties, "_units", {})
    for cached in (properties._device, properties._restricted):
        cached.cache_clear()
    yield made
    for cached in (properties._device, properties._restricted):
        cached.cache_clear()


def test_the_plan_knows_of_a_green_context_which_is_asked_once(contexts):
    whole = properties.cuda_properties()
    assert (whole.workers, properties.context_units(0)) == (132, 0)
    contexts.current = 5
    assert properties.cuda_properties(1).workers == 132, "of another device the current context says nothing"
    green = properties.cuda_properties(0)
    assert (green.workers, properties.context_units(0)) == (96, 96)
    assert green.source.endswith("; this context has 96 of 132")
    assert (green.flops, green.tensor, green.bandwidth) == (whole.flops, whole.tensor, whole.bandwidth), "of one worker"
    contexts.current = 9
    assert properties.cuda_properties().workers == 16
    contexts.current = 1
    assert properties.cuda_properties() is whole
    assert contexts.asked == 3


def test_default_streams_of_two_contexts_share_no_workspace(contexts, monkeypatch):
    monkeypatch.setattr(device_workspace, "_workspaces", {})
    monkeypatch.setattr(device_workspace, "_slabs", {})
    device = torch.device("cpu")
    one, also = (device_workspace.device_workspace(device, 0) for _ in range(2))
    stream = device_workspace.device_workspace(device, 77)
    contexts.current = 5
    assert device_workspace.device_workspace(device, 0) is not one
    assert one is also
    assert device_workspace.device_workspace(device, 77) is stream, "a stream is of one context"


def test_a_driver_that_does_not_say_has_whole_devices(monkeypatch):
    def missing(*_):
        raise OSError("no such library")

    for function in (missing, lambda *_: lambda *_: 201):
        monkeypatch.setattr(driver, "_function", function)
        assert driver.context_id() == driver.context_sms() == 0
        assert properties.context_units(0) == 0
