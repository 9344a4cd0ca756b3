"""Who takes units away: a kernel that holds SMs (on a fake GPU), processes that never rest (real ones)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tilestream.plan import DeviceProperties
from tilestream_tools.sweep import contention as takers
from tilestream_tools.sweep.contention import BusyCores, CuMask, GreenContext, Neighbour, mask_words

H100 = DeviceProperties("an H100", "portable", 132, 5e11, 3.3e12, "a stub", "sm_90", 232448)


class FakeGpu:
    """A GPU on which `hold` reports at once and leaves when the stop word is written, or when a test says so."""

    def __init__(self, monkeypatch) -> None:
        self.launched: list[tuple[int, int]] = []
        self.units = lambda count: range(7, 7 + count)  # which SMs the CTAs find themselves on
        self.begins, self.expired = True, False
        stream = SimpleNamespace(synchronize=lambda: None, cuda_stream=3)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(takers, "lend_to", lambda *_: stream)
        monkeypatch.setattr(takers, "stream_write", self.write)
        monkeypatch.setattr(takers, "_memory", self.memory)
        monkeypatch.setitem(sys.modules, "tilestream_tools.sweep.sm_hog", SimpleNamespace(PIECE=32768, hold=self))

    def memory(self, units, _):
        self.words = torch.zeros(1 + 2 * units, dtype=torch.int32)
        return self.words, torch.zeros(units, dtype=torch.int64), torch.zeros(2, units, dtype=torch.int32)

    def __getitem__(self, grid):
        def launch(stop, report, left, clocks, allowed, pieces, num_warps):
            assert not stop.any()
            assert not report.any()
            assert not clocks.any()
            self.launched.append((grid[0], pieces))
            if self.begins:
                report[: grid[0]] = torch.tensor([unit + 1 for unit in self.units(grid[0])])
            self.left, self.count = left, grid[0]

        return launch

    def write(self, stream, address, value):
        assert (stream, address, value) == (3, self.words.data_ptr(), 1)
        self.left[: self.count] = 2 if self.expired else 1


@pytest.fixture
def gpu(monkeypatch):
    return FakeGpu(monkeypatch)


def test_a_neighbour_holds_as_many_sms_as_it_says(gpu):
    near = Neighbour(H100)
    assert gpu.launched == [(1, 7)], "loaded before anything is measured; 7 x 32 KiB are all of an SM's shared memory"
    with near.taking(16) as left:
        assert left == near.left(16) == 116
        assert near.held == frozenset(range(7, 23))
    with near.taking(0) as left:
        assert left == 132
    assert gpu.launched[1:] == [(16, 7)]


@pytest.mark.parametrize("count", [-1, 132, 500])
def test_one_unit_is_left_at_least(count, gpu):
    for taker in (Neighbour(H100), GreenContext(H100), BusyCores(H100)):
        with pytest.raises(ValueError, match=f"{count} taken of 132: from 0 to 131 can be"), taker.taking(count):
            pass


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"units": lambda count: [5] * count}, "holds 1 SMs, not 4: something else runs"),
        ({"begins": False}, "holds 0 SMs, not 4"),
        ({"expired": True}, r"left after its deadline of 2\.5 s, before the block ended"),
    ],
)
def test_a_neighbour_that_does_not_hold_its_sms_spoils_what_was_measured(how, message, gpu, monkeypatch):
    near = Neighbour(H100, deadline=2.5)
    monkeypatch.setattr(Neighbour, "START_SECONDS", 0.05)
    vars(gpu).update(how)
    with pytest.raises(RuntimeError, match=message), near.taking(4):
        assert "expired" in how, "the block must not run"


def test_it_is_stopped_whatever_the_block_does(gpu):
    near = Neighbour(H100)
    with pytest.raises(KeyError), near.taking(4):
        raise KeyError
    assert gpu.left[:4].tolist() == [1, 1, 1, 1]


def test_a_launch_that_blocks_is_no_neighbour(gpu, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    with pytest.raises(ValueError, match="CUDA_LAUNCH_BLOCKING is set"):
        Neighbour(H100)
    assert not gpu.launched


# CU masks ------------------------------------------------------------------------------------------------------------

MI300X = DeviceProperties("an MI300X", "portable", 304, 2e12, 5.3e12, "a stub", "gfx942", 65536, xcds=8)


@pytest.mark.parametrize("left", [304, 303, 272, 152, 33, 32, 8, 1])
def test_a_mask_has_as_many_units_of_each_die(left):
    words = mask_words(left)
    units = [32 * i + bit for i, word in enumerate(words) for bit in range(32) if word >> bit & 1]
    assert len(units) == left
    assert max(units) < MI300X.workers
    of_die = [sum(unit % MI300X.xcds == die for unit in units) for die in range(MI300X.xcds)]
    assert max(of_die) - min(of_die) <= 1
    assert max(words) < 1 << 32


@pytest.fixture
def hip(monkeypatch):
    """HIP's answers: the masks that streams were asked for, and those that a block ran on. ``code``: of its error."""
    made = SimpleNamespace(asked=[], used=[], code=0)

    def create(stream, count, words):
        made.asked.append([words[i] for i in range(count)])
        stream._obj.value = None if made.code else 0xC0 + len(made.asked)
        return made.code

    def function(name, *_):
        assert name == "hipExtStreamCreateWithCUMask"
        return create

    monkeypatch.setattr(torch.version, "hip", "7.0")
    monkeypatch.setattr(takers, "hip_function", function)
    monkeypatch.setattr(takers, "error_name", lambda code: f"error {code}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda handle: SimpleNamespace(handle=handle, synchronize=lambda: None)
    )

    @contextlib.contextmanager
    def on(stream):
        made.used.append(stream.handle)
        yield

    monkeypatch.setattr(torch.cuda, "stream", on)
    return made


def test_a_block_runs_on_a_stream_with_a_mask(hip):
    taker = takers.taker("cu_mask", MI300X)
    assert isinstance(taker, CuMask)
    for count, left in ((264, 40), (264, 40), (0, 304), (296, 8)):
        with taker.taking(count) as found:
            assert found == taker.left(count) == left
    assert hip.asked == [[0xFFFFFFFF, 0xFF], [0xFF]], "a stream a number of units, kept"
    assert hip.used == [0xC1, 0xC1, 0xC2]
    with pytest.raises(ValueError, match="304 taken of 304: from 0 to 303 can be"), taker.taking(304):
        pass


def test_a_mask_that_hip_refuses(hip):
    hip.code = 801
    message = "HIP made no stream with 40 compute units: error 801"
    with pytest.raises(RuntimeError, match=message), CuMask(MI300X).taking(264):
        raise AssertionError("the block must not run")


def test_masks_are_not_cudas():
    with pytest.raises(ValueError, match="CU masks are HIP's, and this torch is built for CUDA: take green contexts"):
        CuMask(H100)


# The CPU -------------------------------------------------------------------------------------------------------------

CPU = DeviceProperties("a CPU", "cpu", 2, 1e11, 1e10, "a stub")


@pytest.fixture
def started(monkeypatch):
    """The processes that were started."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("no affinity on this system")
    found, start = [], subprocess.Popen

    def spy(*given, **how):
        found.append(start(*given, **how))
        return found[-1]

    monkeypatch.setattr(takers.subprocess, "Popen", spy)
    return found


def wait_for(event) -> None:
    limit = time.monotonic() + 300
    while not event():
        assert time.monotonic() < limit
        time.sleep(0.01)


def cpu_ticks(process) -> int:
    return int(Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[11])


def test_busy_cores_are_busy_and_end_with_the_block(started):
    with BusyCores(CPU).taking(1) as left:
        assert left == 1
        (process,) = started
        before = cpu_ticks(process)
        wait_for(lambda: cpu_ticks(process) > before + 4)
        assert os.sched_getaffinity(process.pid) == {max(os.sched_getaffinity(0))}
    assert process.poll() is not None


def test_a_block_that_outlasts_them_counts_for_nothing(started):
    busy = BusyCores(CPU, deadline=0.1)

    def outlast() -> None:
        with busy.taking(1):
            wait_for(lambda: started[0].poll() is not None)

    with pytest.raises(RuntimeError, match="ended before the block did"):
        outlast()


def test_they_end_with_a_block_that_fails(started):
    with pytest.raises(KeyError), BusyCores(CPU).taking(1):
        raise KeyError
    assert started[0].poll() is not None
