"""Signals and streams on a fake GPU, and what a launch that waits for them finds."""

from __future__ import annotations

import math
import re

import pytest
import torch

from fake_cuda import DEVICE, FakeCuda
from tilestream.arrival import lanes
from tilestream.arrival.arrival import Arrival
from tilestream.arrival.device import DeviceSignals, GateWords
from tilestream.arrival.landing import DeviceLanding
from tilestream.arrival.sources import Source, tensor_source
from tilestream.arrival.stream import Stream
from tilestream.core.chunks import Chunks


def make(count: int = 3, words: torch.Tensor | None = None) -> DeviceSignals:
    return DeviceSignals(count, DEVICE, words)


def own(count: int = 3) -> torch.Tensor:
    """A caller's own words."""
    return torch.zeros(count, dtype=torch.int32)


def refused(error, message):
    return pytest.raises(error, match=f"^{re.escape(message)}")


def seen(launch: GateWords) -> list[str]:
    """What the launch finds now, chunk by chunk: as `tilestream.kernels.device.gate.poll_signal` has it."""
    words, epoch = launch.words.tolist(), launch.epoch
    return [
        "here" if (word >= epoch if epoch else word) else "failed" if epoch and word == -epoch else "missing"
        for word in words
    ]


def there(launch: GateWords) -> list[int]:
    return [chunk for chunk, state in enumerate(seen(launch)) if state == "here"]


def pinned(cuda: FakeCuda, x: torch.Tensor) -> Source:
    return tensor_source(cuda.pin(x), onward=True)


def on_gpu(source: Source, chunks: Chunks, pivot: int = 0, fill: float = math.nan, by_kernel: bool = False) -> Stream:
    """As `stream_in` does it for a GPU: here, a fake one. The tensor is ``fill`` before the rows land."""
    lane = lanes.take(chunks.count, DEVICE, torch.cuda.current_stream().cuda_stream)
    arrival = Arrival.ragged(chunks.bounds, pivot).with_signals(DeviceSignals(chunks.count, DEVICE, lane=lane))
    landing = DeviceLanding(source.tensor, DEVICE, lane)
    landing.tensor.fill_(fill)
    return Stream(arrival, source, landing, by_kernel)
