"""Memory that is kept from call to call is made where no pool of the calling thread is."""

from __future__ import annotations

import threading

import pytest
import torch

from fake_cuda import fake_cuda
from tilestream.core.schedule import Grid, Schedule
from tilestream.launch import launch
from tilestream.launch.launch import Table
from tilestream.runtime import channel, device_workspace
from tilestream.runtime.channel import Channel
from tilestream.runtime.device_workspace import DeviceWorkspace
from tilestream.runtime.outliving import outliving

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


def test_another_thread_makes_it_on_the_same_stream():
    with fake_cuda() as cuda, torch.inference_mode():
        side = cuda.stream()
        with cuda.on(side):
            made = outliving(GPU, lambda: (threading.get_ident(), cuda.current, torch.is_inference_mode_enabled()))
        assert made[0] != threading.get_ident()
        assert made[1:] == (side, False)


def test_its_error_is_the_callers():
    def fail():
        raise MemoryError("no room")

    with fake_cuda(), pytest.raises(MemoryError, match="no room"):
        outliving(GPU, fail)


def test_on_the_cpu_this_thread_makes_it():
    with torch.inference_mode():
        ident, inference = outliving(CPU, lambda: (threading.get_ident(), torch.is_inference_mode_enabled()))
    assert (ident, inference) == (threading.get_ident(), False)


def test_what_launches_keep_is_made_so(monkeypatch):
    kept = []

    def recorded(device, make):
        made = make()
        kept.extend(made if isinstance(made, tuple) else [made])
        return made

    for module in (channel, device_workspace, launch):
        monkeypatch.setattr(module, "outliving", recorded)
    schedule = Schedule("stream_k", Grid(1, 3, 5, 4), workers=7)
    words = DeviceWorkspace(CPU).open(schedule, (2, 2), listed=4)
    assert words.listed is not None
    held = [words.counters, words.counts, words.partials, *words.listed, Channel(CPU).claims, Table([1, 2]).on(CPU)]
    assert all(any(one is x for x in kept) for one in [*held, device_workspace._Slab(CPU)._words])
