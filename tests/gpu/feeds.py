"""Operands that arrive: filled chunk by chunk from a stream of their own, while a kernel waits for them."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
from gpu_cases import BF16, CHUNKINGS, Case, chunks_of
from gpu_runs import Run, poison

import tilestream as ts
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


def arrival_of(bounds: tuple[int, ...], pivot: int = 0, signals: torch.Tensor | None = None) -> ts.Arrival:
    """Chunks of such bounds: uniform where they are."""
    where: dict[str, Any] = {"pivot": pivot, "signals": signals, "device": "cuda" if signals is None else None}
    if size := chunks_of(bounds).rows_per_chunk:
        return ts.Arrival.uniform(size, len(bounds) - 1, **where)
    return ts.Arrival.ragged(bounds, **where)


def pivots(chunking: str) -> list[ts.Arrival]:
    """An arrival of `gpu_cases.M` rows for each chunk that the raster may begin with."""
    bounds = CHUNKINGS[chunking]
    return [arrival_of(bounds, pivot) for pivot in range(len(bounds) - 1)]


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
        """The chunks, from the pivot on."""
        count = self.arrival.num_chunks
        return [(self.arrival.pivot + i) % count for i in range(count)]

    def rows(self, chunk: int) -> slice:
        return slice(*self.bounds[chunk : chunk + 2])

    def _parts(self, x: torch.Tensor, chunk: int) -> list[torch.Tensor]:
        """A chunk of a tensor, batch by batch."""
        begin, end = self.bounds[chunk : chunk + 2]
        planes = x if x.dim() == 3 else x[None]
        m = planes.shape[1]
        return [plane[max(0, begin - i * m) : max(0, end - i * m)] for i, plane in enumerate(planes)]

    def copy(self, *chunks: int) -> None:
        """Copy chunks, and signal none."""
        with torch.cuda.stream(self.stream):
            for chunk in chunks:
                for into, source in zip(self._parts(self.tensor, chunk), self._parts(self.source, chunk), strict=True):
                    into.copy_(source, non_blocking=True)

    def signal(self, *chunks: int) -> None:
        with torch.cuda.stream(self.stream):
            for chunk in chunks:
                self.arrival.signal(chunk)

    def __call__(self, *chunks: int, pause: float = 0.0) -> Feed:
        """Copy and signal chunks; ``pause``: seconds after each."""
        for chunk in chunks:
            self.copy(chunk)
            self.signal(chunk)
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


class GatedRun(Run):
    """A case of which operands arrive; a call launches it.

    Attributes
    ----------
    feeds
        Of ``arrival``, A's rows, and of ``weight_arrival``, B's columns, as far as they arrive.
    want
        The answer with everything there.
    """

    def __init__(self, case: Case, signals: torch.Tensor | None = None) -> None:
        super().__init__(case)
        a, b = self.operands["a"], self.operands["b"]
        self.feeds: dict[str, Feed] = {}
        if case.rows:
            self.feeds["arrival"] = Feed(arrival_of(case.rows, case.pivot, signals), a)
            self.operands["a"] = self.feeds["arrival"].tensor
        if case.columns:
            self.feeds["weight_arrival"] = Feed(arrival_of(case.columns, case.pivot), b.mT)
            self.operands["b"] = self.feeds["weight_arrival"].tensor.mT
        self.there = {**self.operands, "a": a, "b": b}
        self.want = torch.empty(0)

    def launch(self, deadline: float = 5.0) -> torch.Tensor:
        """Into a fresh output of NaN."""
        arrivals = {name: one.arrival for name, one in self.feeds.items()}
        out, _ = self.case.output("cuda")
        return self.plan.run(**self.operands, out=out, **self.how, **arrivals, deadline=deadline)

    def check(self, out: torch.Tensor, around: torch.Tensor | None = None) -> None:
        """As if everything had been there."""
        arriving, self.operands = self.operands, self.there
        super().check(out, around)
        self.operands = arriving

    def whole(self) -> torch.Tensor:
        """`want`, launched and checked."""
        self.feed_all()
        self.want = self.launch()
        self.check(self.want)
        return self.want

    def feed_all(self) -> None:
        for one in self.feeds.values():
            one.all()

    def again(self) -> None:
        for one in self.feeds.values():
            one.again()
