"""Operands that arrive: filled chunk by chunk from a stream of their own, while a kernel waits for them."""

from __future__ import annotations

import os
import time

import pytest
import torch
from gpu_runs import BF16, poison

import tilestream as ts
from device_order import check_gates, check_order
from tilestream.arrival.flat import Awaited, FlatArrival
from tilestream.core.operands import GemmOperands
from tilestream.launch.launch import Launch, Probe
from tilestream.runtime.streams import lend_to

#: Each launch is waited for: one that waits for a chunk that is issued after it would expire.
BLOCKING = os.environ.get("CUDA_LAUNCH_BLOCKING") == "1"
launch_first = pytest.mark.skipif(BLOCKING, reason="launches before its chunks are issued")


def pinned(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype).pin_memory()


def refused_in_quarantine() -> None:
    """Wait for the GPU: a launch has reported that its signals are in quarantine."""
    torch.cuda.synchronize()
    with pytest.raises(ts.TilestreamError, match=r"arrival\.reset"):
        ts.check()


def in_order(arrival: ts.Arrival) -> list[int]:
    """The chunks, from the pivot on."""
    return [(arrival.pivot + i) % arrival.num_chunks for i in range(arrival.num_chunks)]


class Feed:
    """A tensor of NaN that a stream of its own fills with ``source``, chunk by chunk."""

    def __init__(self, arrival: ts.Arrival, source: torch.Tensor) -> None:
        self.arrival, self.source = arrival, source
        self.bounds = arrival.chunks(source.shape[:-1].numel()).bounds
        self.tensor = poison(torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, device="cuda"))
        self.stream = lend_to(self, self.tensor.device)  # torch's own may be the one on which the kernel waits
        self.stream.wait_stream(torch.cuda.current_stream())

    @property
    def order(self) -> list[int]:
        return in_order(self.arrival)

    def rows(self, chunk: int) -> slice:
        return slice(*self.bounds[chunk : chunk + 2])

    def _parts(self, x: torch.Tensor, chunk: int) -> list[torch.Tensor]:
        """A chunk of a tensor, batch by batch."""
        begin, end = self.bounds[chunk : chunk + 2]
        planes = x if x.dim() == 3 else x[None]
        m = planes.shape[1]
        return [plane[max(0, begin - i * m) : max(0, end - i * m)] for i, plane in enumerate(planes)]

    def copy(self, chunk: int) -> None:
        """Copy a chunk, and do not signal it."""
        with torch.cuda.stream(self.stream):
            for into, source in zip(self._parts(self.tensor, chunk), self._parts(self.source, chunk), strict=True):
                into.copy_(source, non_blocking=True)

    def __call__(self, *chunks: int, pause: float = 0.0) -> Feed:
        """Copy and signal chunks; ``pause``: seconds after each."""
        for chunk in chunks:
            self.copy(chunk)
            with torch.cuda.stream(self.stream):
                self.arrival.signal(chunk)
            if pause:
                self.stream.synchronize()
                time.sleep(pause)
        return self

    def all(self) -> Feed:
        return self(*self.order)

    def but(self, missing: int) -> Feed:
        """All chunks but one."""
        return self(*(chunk for chunk in self.order if chunk != missing))

    def again(self) -> None:
        """The next epoch, with nothing there."""
        self.arrival.advance()
        poison(self.tensor)
        self.stream.wait_stream(torch.cuda.current_stream())


def check_gate(launch: Launch, feed: Feed, b: torch.Tensor, out: torch.Tensor, pause: float = 0.0) -> None:
    """Launch before anything is there: workers take and wait for what the host's text says."""
    plan = launch.plan
    probe = Probe(plan.workers, 512, out.device)
    signals = FlatArrival.of(feed.arrival).signals("matmul", out.device)
    launch(GemmOperands(feed.tensor, b, out), Awaited(signals, None, 5.0, "matmul"), probe)
    feed(*feed.order, pause=pause)
    logs = [probe.log(worker) for worker in range(plan.workers)]
    check_order(plan.schedule, logs)
    check_gates(plan.gate, plan.schedule, logs)
