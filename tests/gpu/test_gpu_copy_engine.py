"""A copy inside a GPU waits while every thread of every SM is taken, the driver's and torch's alike.

So a gather copies its own shard before its kernel starts: the kernel holds all SMs and waits for peers, which wait for
that copy (invariant 10). This test fails when a driver comes that makes such copies without an SM.
"""

from __future__ import annotations

import time

import pytest
import torch
from gpu_runs import ON_NVIDIA

if not ON_NVIDIA:
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

import triton
import triton.language as tl

from tilestream.kernels.device.clock import present
from tilestream.runtime.driver import copy_across, stream_write
from tilestream.runtime.streams import aside

#: Warps of a program; two such programs take all threads of an SM.
WARPS = 32
SECONDS = 3.0


@triton.jit
def occupy(stop, begun, clock, allowed):
    """Take a place until told to leave, or until the deadline (nanoseconds)."""
    me = tl.program_id(0)
    begin = present(clock + me)
    tl.atomic_add(begun, 1, sem="release", scope="sys")
    going = 1
    while going != 0:
        if (tl.atomic_add(stop, 0, sem="acquire", scope="sys") != 0) | (present(clock + me) - begin > allowed):
            going = 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [1 << 10, 1 << 16, 1 << 20, 64 << 20])
@pytest.mark.parametrize("how", ["driver", "torch"])
def test_a_copy_inside_a_gpu_needs_an_sm(how, size):
    device = torch.device("cuda", torch.cuda.current_device())
    places = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    words = torch.zeros(2, dtype=torch.int32, device=device)
    clock = torch.zeros(places, dtype=torch.int64, device=device)
    source = torch.randint(0, 100, (size,), dtype=torch.uint8, device=device)
    target, side = torch.zeros_like(source), torch.cuda.Stream()
    limit = int(SECONDS * 1e9)
    occupy[(1,)](torch.ones_like(words), torch.zeros_like(words), clock, limit, num_warps=WARPS)  # compiled and loaded
    with torch.cuda.stream(side):
        target.copy_(source)
        target.zero_()
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    occupy[(places,)](words, words[1:], clock, limit, num_warps=WARPS)
    begin = time.perf_counter()
    with aside(device):
        while int(words[1].cpu()) < places:
            assert time.perf_counter() < begin + SECONDS / 2, "not every place is taken"
    if how == "driver":
        copy_across(side.cuda_stream, target.data_ptr(), source.data_ptr(), size)
    else:
        with torch.cuda.stream(side):
            target.copy_(source)
    done.record(side)
    while not done.query() and time.perf_counter() < begin + SECONDS - 0.5:
        time.sleep(0.001)
    came = done.query()
    with aside(device) as stream:
        stream_write(stream.cuda_stream, words.data_ptr(), 1)
    torch.cuda.synchronize()
    assert target.equal(source)
    assert not came, "the copy did not wait for an SM: own shards may be copied beside the kernel"
