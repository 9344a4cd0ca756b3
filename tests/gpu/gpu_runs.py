"""What GPU tests share: poisoned tensors, captured and repeated launches, reports of deadlines that passed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import tilestream as ts

BF16 = torch.bfloat16
ON_NVIDIA = torch.cuda.is_available() and torch.version.hip is None
ON_HOPPER = ON_NVIDIA and torch.cuda.get_device_capability() == (9, 0)


# Tensors -------------------------------------------------------------------------------------------------------------


def poison(x: torch.Tensor) -> torch.Tensor:
    """Fill a tensor of any float dtype with NaN."""
    if x.element_size() == 1:
        x.view(torch.uint8).fill_(0x7F)
    else:
        x.fill_(float("nan"))
    return x


def nan(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """An output that is not written yet."""
    return poison(torch.empty(shape, dtype=dtype, device="cuda"))


def nan_like(x: torch.Tensor) -> torch.Tensor:
    return poison(torch.empty_like(x))


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def poison_around(like: torch.Tensor, before: tuple[int, ...], behind: tuple[int, ...]) -> torch.Tensor:
    """A copy of a tensor in the middle of NaN: so many elements of each dimension lie before and behind it."""
    shape = (sum(sizes) for sizes in zip(before, like.shape, behind, strict=True))
    store = torch.full(tuple(shape), float("nan"), device="cuda").to(like.dtype)
    return store[tuple(slice(b, b + n) for b, n in zip(before, like.shape, strict=True))].copy_(like)


# Launches ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def captured() -> Iterator[torch.cuda.CUDAGraph]:
    """What the block launches is captured into a graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        yield graph


def settle() -> None:
    """Wait for the GPU; no launch has reported anything."""
    torch.cuda.synchronize()
    ts.check()


def expired(match: str = "") -> ts.ArrivalTimeout:
    """Wait for the GPU: a launch has reported that its deadline passed. Returns the report."""
    torch.cuda.synchronize()
    with pytest.raises(ts.ArrivalTimeout, match=match) as caught:
        ts.check()
    return caught.value


class Differences:
    """Counts elements that differ, on the GPU: nothing is waited for until the end."""

    def __init__(self) -> None:
        self.count = torch.zeros((), dtype=torch.int64, device="cuda")

    def add(self, differ: torch.Tensor) -> None:
        """``differ``: of bools."""
        self.count += differ.sum()

    def none(self) -> bool:
        return self.count.item() == 0


def allocations() -> int:
    """How many blocks torch's allocator has handed out so far."""
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def check_allocations(into: Callable[[], object], fresh: Callable[[], object]) -> None:
    """A call that is given its output allocates nothing; one that is not, its output alone."""
    before = allocations()
    for _ in range(10):
        into()
    assert allocations() == before
    kept = [fresh() for _ in range(10)]
    assert allocations() == before + len(kept)


def on_two_streams(calls: list[Callable[[], torch.Tensor]], rounds: int = 50) -> list[list[torch.Tensor]]:
    """The answers of two calls, issued in turn, each on a stream of its own."""
    torch.cuda.synchronize()
    streams, answers = [torch.cuda.Stream() for _ in calls], [[] for _ in calls]
    for _ in range(rounds):
        for stream, call, found in zip(streams, calls, answers, strict=True):
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    return answers


def run_apart(module: str, call: str, **variables: str) -> None:
    """Run ``call`` of a test module in a process of its own, with such environment variables."""
    code = f"import sys; sys.path[:0] = ['tests', 'tests/gpu']; import {module} as t; t.{call}"
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
