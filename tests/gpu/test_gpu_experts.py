"""`stream_experts` behind a router on the GPU: the native thread that waits for the offsets and issues the copies."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from gpu_runs import nan, randn
from test_gpu_grouped import BF16, SIZES, K, M, N, check_all

import tilestream as ts
from grouped_cases import offsets_of
from tilestream.arrival.filling import Filling
from tilestream.arrival.routed import Routed
from tilestream.core.errors import ProducerStopped
from tilestream.runtime import producer
from tilestream.runtime.extension import library

pytestmark = pytest.mark.usefixtures("nothing_reported")
#: Cycles of a tenth of a second, about.
SLOW = 200_000_000


def slow_for(seconds: float) -> int:
    """Cycles of a router that is at work for much longer than the host takes for a step, here ``seconds``."""
    return max(SLOW, int(20 * seconds * 10 * SLOW))


def check_landed(stream: ts.Stream, *of_call: object) -> None:
    """`check_all`, once the stream has landed.

    A copy to pageable memory would hold up the copies of a Python thread: see docs/troubleshooting.md.
    """
    stream.wait()
    check_all("rows", *of_call)


def pinned(seed: int = 0, n: int = N) -> torch.Tensor:
    made = torch.randn(8, n, K, generator=torch.Generator().manual_seed(seed)).to(BF16)
    return made.pin_memory().mT


def routed(sizes, cycles: int = SLOW, into: torch.Tensor | None = None) -> torch.Tensor:
    """Offsets that the GPU has after so many cycles; before, what is there is none."""
    found = torch.full((8,), -1, dtype=torch.int32, device="cuda") if into is None else into
    there = offsets_of(sizes).cuda()
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    return found.copy_(there)


@pytest.fixture(params=["native", "by Python"])
def way(request, monkeypatch):
    """The native thread, or a Python thread, as without the extension."""
    if request.param == "native":
        if library() is None:
            pytest.skip("there is no native extension")
        return Routed
    monkeypatch.setattr(producer, "library", lambda: None)
    monkeypatch.setattr("tilestream.arrival.lanes._idle", {})  # whose lanes have their threads already
    return Filling


def test_the_caller_does_not_wait_for_a_slow_router(way):
    a, b = randn(M, K, dtype=BF16), pinned()
    warm = offsets_of(SIZES[0]).cuda()
    with ts.stream_experts(b, warm, device="cuda") as stream:
        ts.grouped_mm(a, stream, warm)  # compiled
        stream.wait()
        begin = time.perf_counter()
        stream.restart(warm)
        ts.grouped_mm(a, stream, warm)
        cycles = slow_for(time.perf_counter() - begin)
        stream.wait()
        for sizes in SIZES:
            out = nan(M, N, dtype=BF16)
            ends, is_routed = routed(sizes, cycles), torch.cuda.Event()
            is_routed.record()
            stream.restart(ends)
            ts.grouped_mm(a, stream, ends, out=out)
            assert not is_routed.query(), "it has waited for the router"
            assert type(stream._filling) is way
            assert not stream._filling.issued
            check_landed(stream, a, b.cuda(), out, ends)
    ts.check()


def test_many_steps_of_random_skew_have_the_bits_of_a_product_of_what_is_there(way):
    choices, a, layers = random.Random(0), randn(M, K, dtype=BF16), [pinned(seed) for seed in range(3)]
    there = [layer.cuda() for layer in layers]
    ends = offsets_of(SIZES[0]).cuda()
    with ts.stream_experts(layers[0], ends, device="cuda") as stream:
        stream.wait()
        for step in range(200):
            sizes = tuple(choices.choice((0, 0, 1, 7, 64, 120)) for _ in range(8))
            layer = step % 3
            wanted = offsets_of(sizes).cuda()
            torch.cuda._sleep(choices.choice((0, 10_000, 1_000_000)))
            ends.copy_(wanted)
            stream.restart(ends, layers[layer])
            found = ts.grouped_mm(a, stream, ends)
            again = ts.grouped_mm(a, stream, ends)
            stream.wait()
            assert torch.equal(found, again), step
            assert torch.equal(found, ts.grouped_mm(a, stream, ends)), step
            if step % 20 == 0:
                check_all("rows", a, there[layer], found, ends)
            for expert, size in enumerate(sizes):
                if size:
                    assert torch.equal(stream.tensor[expert], there[layer][expert])
    ts.check()


def test_streams_that_are_dropped_at_once(way):
    a, layers = randn(M, K, dtype=BF16), [pinned(seed) for seed in range(4)]
    ends, found = offsets_of(SIZES[4]).cuda(), []
    for step in range(40):
        torch.cuda._sleep(100_000)
        found.append(ts.grouped_mm(a, ts.stream_experts(layers[step % 4], ends, device="cuda"), ends))
    torch.cuda.synchronize()  # as `check_landed` waits: the streams are gone
    for step, out in enumerate(found):
        assert torch.equal(out, found[step % 4]), step
    for layer, out in zip(layers, found, strict=False):
        check_all("rows", a, layer.cuda(), out, ends)
    gc.collect()
    assert len([task for task in Path("/proc/self/task").iterdir() if is_ours(task)]) <= 64
    ts.check()


def is_ours(task: Path) -> bool:
    try:
        return (task / "comm").read_text().startswith("tilestream-lane")
    except OSError:  # it has ended
        return False


def test_weights_that_the_caller_drops_at_once_are_not_reused_before_they_are_copied(way):
    n = 64 * N  # so that the copies take a while
    a, ends = randn(M, K, dtype=BF16), offsets_of(SIZES[5]).cuda()
    stream = ts.stream_experts(pinned(0, n), ends, device="cuda")
    for seed in range(1, 6):
        w = pinned(seed, n)
        wanted = w.cuda()
        stream.restart(ends, w)
        out = ts.grouped_mm(a, stream, ends)
        w = pinned(99, n)
        stream.restart(ends, w)  # the copies of the step before are in flight
        del w
        others = [torch.full((8, n, K), float("nan"), dtype=BF16, pin_memory=True) for _ in range(2)]
        check_landed(stream, a, wanted, out, ends)
        assert not stream.tensor.isnan().any()
        del others
    ts.check()


def test_closed_before_the_router_is_done(way):
    a, b = randn(M, K, dtype=BF16), pinned()
    ends = offsets_of(SIZES[0]).cuda()
    stream = ts.stream_experts(b, ends, device="cuda")
    check_landed(stream, a, b.cuda(), ts.grouped_mm(a, stream, ends), ends)
    begin = time.perf_counter()
    stream.restart(ends)
    ts.grouped_mm(a, stream, ends)
    cycles = slow_for(time.perf_counter() - begin)
    stream.wait()
    ends, is_routed = routed(SIZES[0], cycles, into=ends), torch.cuda.Event()
    is_routed.record()
    stream.restart(ends)
    out = ts.grouped_mm(a, stream, ends, deadline=120)
    begin = time.perf_counter()
    assert stream.close()
    if way is Routed:
        assert not is_routed.query(), "it does not wait for the router"
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 60, "nor the launch for its deadline"
    with pytest.raises(ProducerStopped, match="closed before"):
        ts.check()
    assert out[: int(ends[-1])].isnan().all()
    stream.restart(ends)
    check_landed(stream, a, b.cuda(), ts.grouped_mm(a, stream, ends), ends)


def test_offsets_that_fall_are_raised(way):
    a, b = randn(M, K, dtype=BF16), pinned()
    ends = offsets_of(SIZES[0]).cuda()
    stream = ts.stream_experts(b, ends, device="cuda")
    ts.grouped_mm(a, stream, ends)
    stream.wait()
    for wrong in ([5, 3, 9, 10, 11, 12, 13, 14], [-1, 3, 9, 10, 11, 12, 13, 14]):
        bad = torch.tensor(wrong, dtype=torch.int32).cuda()
        torch.cuda._sleep(SLOW // 10)
        stream.restart(bad)
        out = ts.grouped_mm(a, stream, bad, deadline=120)
        begin = time.perf_counter()
        with pytest.raises(ValueError, match=r"stream_experts: offsets=.* they do not fall"):
            stream.wait()
        torch.cuda.synchronize()
        assert time.perf_counter() - begin < 60, "the launch does not wait for its deadline"
        assert out.isnan().all()
        ts.check()
    stream.restart(ends)
    check_landed(stream, a, b.cuda(), ts.grouped_mm(a, stream, ends), ends)


def test_a_capture_is_refused_and_not_ended_by_a_thread_that_waits():
    b, x = pinned(), torch.zeros(8, device="cuda")
    ends = offsets_of(SIZES[0]).cuda()
    stream = ts.stream_experts(b, ends, device="cuda")
    stream.wait()
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        x + 1
    ends = routed(SIZES[1], into=ends)
    stream.restart(ends)
    with torch.cuda.stream(side):
        graph.capture_begin()
        y = x + 1
        time.sleep(0.02)  # the thread asks about its event
        with pytest.raises(RuntimeError, match=r"stream_experts: restart\(\) while a CUDA graph is captured"):
            stream.restart(ends)
        graph.capture_end()
    assert not stream._filling.issued
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 1).all()
    assert torch.equal(stream.wait()[2], b[2].cuda())


def test_two_streams_at_once_do_not_wait_for_each_other(way):
    a, layers = randn(M, K, dtype=BF16), [pinned(0), pinned(1)]
    ends = [offsets_of(SIZES[0]).cuda(), offsets_of(SIZES[4]).cuda()]
    lanes = [torch.cuda.Stream() for _ in range(2)]
    made, outs = [], [None, None]
    for i in range(2):
        with torch.cuda.stream(lanes[i]):
            made.append(ts.stream_experts(layers[i], ends[i], device="cuda"))
            ts.grouped_mm(a, made[i], ends[i])
            made[i].wait()
    torch.cuda.synchronize()
    for i in range(2):  # the first behind a slow router
        with torch.cuda.stream(lanes[i]):
            if not i:
                torch.cuda._sleep(5 * SLOW)
            made[i].restart(ends[i])
            if i:
                outs[i] = ts.grouped_mm(a, made[i], ends[i])
    lanes[1].synchronize()
    assert not made[0]._filling.issued
    check_all("rows", a, layers[1].cuda(), outs[1], ends[1])
    with torch.cuda.stream(lanes[0]):
        outs[0] = ts.grouped_mm(a, made[0], ends[0])
    torch.cuda.synchronize()
    check_all("rows", a, layers[0].cuda(), outs[0], ends[0])
    ts.check()


def test_threads_with_streams_of_their_own(way):
    a, errors = randn(M, K, dtype=BF16), []

    def work(seed: int, steps: int = 30) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                b, choices = pinned(seed), random.Random(seed)
                there, ends = b.cuda(), offsets_of(SIZES[0]).cuda()
                stream = ts.stream_experts(b, ends, device="cuda")
                for _ in range(steps):
                    ends = offsets_of(choices.choice(SIZES)).cuda()
                    torch.cuda._sleep(choices.choice((0, 100_000)))
                    stream.restart(ends)
                    check_landed(stream, a, there, ts.grouped_mm(a, stream, ends), ends)
        except BaseException as error:
            errors.append(error)

    work(0, steps=2)  # loads all kernels: a load waits for the GPU, and other threads' copies for the load
    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    ts.check()


EXIT = """
import sys, torch, tilestream as ts
b = torch.randn(8, 64, 32).to(torch.bfloat16).pin_memory().mT
ends = torch.arange(1, 9, dtype=torch.int32).cuda()
a = torch.randn(8, 32, dtype=torch.bfloat16, device="cuda")
stream = ts.stream_experts(b, ends, device="cuda")
ts.grouped_mm(a, stream, ends)
stream.wait()
torch.cuda._sleep(2_000_000_000)
stream.restart(ends)
{how}
print("well", flush=True)
"""


@pytest.mark.parametrize("how", ["", "out = ts.grouped_mm(a, stream, ends)", "del stream", "sys.exit(0)"])
def test_a_process_ends_in_the_middle(how):
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", EXIT.format(how=how)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert time.perf_counter() - begin < 120
