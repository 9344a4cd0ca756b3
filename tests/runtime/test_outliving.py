"""Memory that is kept from call to call is made where no pool of the calling thread is."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from fake_cuda import fake_cuda
from tilestream.core.schedule import Grid, Schedule
from tilestream.launch import launch
from tilestream.launch.launch import Table
from tilestream.runtime import channel, device_workspace
from tilestream.runtime import outliving as outliving_module
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


def test_in_a_green_context_this_thread_makes_it(monkeypatch):
    """Another thread has the primary context, whose default stream is another."""
    here = threading.get_ident()
    monkeypatch.setattr(outliving_module, "context_id", lambda: 7 if threading.get_ident() == here else 1)
    with fake_cuda(), torch.inference_mode():
        ident, inference = outliving(GPU, lambda: (threading.get_ident(), torch.is_inference_mode_enabled()))
    assert (ident, inference) == (here, False)


def test_a_new_thread_takes_the_devices_context_first(monkeypatch):
    """It has none, and so not the caller's."""
    here, bound = threading.get_ident(), []
    monkeypatch.setattr(outliving_module, "bind_context", lambda: bound.append(threading.get_ident()))
    monkeypatch.setattr(outliving_module, "context_id", lambda: 1 if threading.get_ident() in (here, *bound) else 0)
    with fake_cuda():
        assert outliving(GPU, threading.get_ident) in bound
    assert here not in bound


def test_without_threads_it_fails(monkeypatch):
    """Rather than to give memory of a pool."""

    def no_thread(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with fake_cuda(), pytest.raises(RuntimeError, match="new thread"):
        outliving(GPU, lambda: 1)


AT_THE_END = """
import contextlib, sys, torch
from types import SimpleNamespace
from tilestream.runtime.outliving import outliving
torch.cuda.current_stream, torch.cuda.stream = lambda device: None, lambda stream: contextlib.nullcontext()

class Late:
    def __init__(self):
        self.kept = outliving, SimpleNamespace(type="cuda"), sys.is_finalizing, print

    def __del__(self):
        make, device, ends, say = self.kept
        say(ends(), make(device, lambda: "made"), flush=True)

sys.modules["a module that dies late"] = Late()
"""


def test_at_the_interpreters_end_it_waits_for_no_thread():
    done = subprocess.run([sys.executable, "-c", AT_THE_END], capture_output=True, text=True, check=False, timeout=850)
    assert (done.returncode, done.stdout) == (0, "True made\n"), done.stderr


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
