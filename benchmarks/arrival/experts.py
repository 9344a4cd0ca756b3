"""Experts of a mixture in pinned memory: those with rows are copied, and multiplied as they land; beside it by hand.

A row is a number of experts that have rows, of `EXPERTS` of 32 MB each, and how many rows an expert has in the mean;
lengths fall as Zipf's. Where each expert's rows end is known on the GPU, as behind a router.

``copy``, ``multiply``
    Copies of the active experts alone; our grouped matmul of what is there.
``by hand``
    The host reads the ends; for each active expert, most rows first, a copy, an event, and behind it a torch.mm.
``by hand, ends known``
    As it, by ends that the host has: nothing of it waits for the GPU.
``restarted``
    `Stream.restart` of a kept `stream_experts`, and a grouped matmul of it.
``streamed``
    `stream_experts` made anew, and a grouped matmul of it.

Milliseconds by two clocks: ``ms``, the host's, calls back to back; ``gpu_ms``, between two events behind a spin that
hides the host, of all but ``by hand``, whose host waits for the GPU. With ``--dry`` on the CPU, with small extents.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.core.timing import HiddenLaunchClock, WallClock, both_clocks
from tilestream_tools.sweep.check import errors

#: Experts, and rows and columns of each.
EXPERTS, DEPTH, COLUMNS = 64, 4096, 4096
#: How many have rows, and how many rows each has in the mean.
CASES = list(itertools.product((8, 16, 32, 64), (16, 256)))
#: Samples of each way by each clock, and calls of a sample as called.
ROUNDS, MANY = 7, 3
#: The ways whose host waits for the GPU: it cannot be ahead.
WAITING = ("by hand",)


def lengths(active: int, mean: int) -> list[int]:
    """Rows of each expert: those that have some are spread over all; lengths as Zipf's, one at least."""
    weights = [1 / (rank + 1) ** 0.8 for rank in range(active)]
    sizes = [max(1, round(mean * active * weight / sum(weights))) for weight in weights]
    found = [0] * EXPERTS
    for rank, size in enumerate(sizes):
        found[(rank * 29) % active * (EXPERTS // active)] = size  # 29: prime to each number of experts
    return found


class Problem:
    """The buffers of a case, and the ways to run it; each issues, and waits for nothing but what it says."""

    def __init__(self, active: int, mean: int, host: torch.Tensor) -> None:
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.sizes, self.host = lengths(active, mean), host
        self.ends = torch.tensor(self.sizes).cumsum(0).int().to(self.device)
        rows, columns, depth = sum(self.sizes), host.shape[1], host.shape[2]
        self.x = (torch.randn(rows, depth, device=self.device) * depth**-0.5).to(torch.bfloat16)
        self.there = torch.empty_like(host, device=self.device).copy_(host)
        self.place = torch.empty_like(self.there)
        self.out = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
        if self.device == "cuda":
            self.copies, self.events = torch.cuda.Stream(), [torch.cuda.Event() for _ in self.sizes]
        self.stream = ts.stream_experts(host.mT, self.ends)
        self.stream.wait()

    def groups(self, by_load: bool = False, known: bool = False) -> list[tuple[int, slice]]:
        """Experts that have rows, and their rows; unless they are ``known``, the host reads the ends."""
        ends = list(itertools.accumulate(self.sizes)) if known else self.ends.tolist()
        found = [(e, slice(b, t)) for e, (b, t) in enumerate(itertools.pairwise([0, *ends])) if b < t]
        return sorted(found, key=lambda one: one[1].start - one[1].stop) if by_load else found

    def exact(self) -> torch.Tensor:
        """In float64."""
        return torch.cat([self.x[rows].double() @ self.there[e].double().mT for e, rows in self.groups()])

    def by_torch(self) -> torch.Tensor:
        """By torch, expert by expert."""
        return torch.cat([self.x[rows] @ self.there[e].mT for e, rows in self.groups()])

    def copy(self) -> None:
        """The active experts' copies alone."""
        for e, size in enumerate(self.sizes):
            if size:
                self.place[e].copy_(self.host[e], non_blocking=True)

    def multiply(self) -> None:
        """Our product of what is there."""
        ts.grouped_mm(self.x, self.there.mT, self.ends, out=self.out)

    def by_hand(self, known: bool = False) -> None:
        """A copy, an event and a product an expert."""
        on_gpu = self.device == "cuda"
        if on_gpu:
            here = torch.cuda.current_stream()
            self.copies.wait_stream(here)
        for e, rows in self.groups(by_load=True, known=known):
            if on_gpu:
                with torch.cuda.stream(self.copies):
                    self.place[e].copy_(self.host[e], non_blocking=True)
                    self.events[e].record(self.copies)
                here.wait_event(self.events[e])
            else:
                self.place[e].copy_(self.host[e])
            torch.mm(self.x[rows], self.place[e].mT, out=self.out[rows])

    def restarted(self) -> None:
        """The stream that is kept, filled again."""
        self.stream.restart(self.ends, self.host.mT)
        ts.grouped_mm(self.x, self.stream, self.ends, out=self.out)

    def streamed(self) -> None:
        """A new stream."""
        ts.grouped_mm(self.x, ts.stream_experts(self.host.mT, self.ends), self.ends, out=self.out)

    def ways(self) -> dict[str, Callable[[], object]]:
        """The ways by name."""
        return {
            "copy": self.copy, "multiply": self.multiply, "by hand": self.by_hand,
            "by hand, ends known": lambda: self.by_hand(known=True), "restarted": self.restarted,
            "streamed": self.streamed,
        }  # fmt: skip

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def before(self, name: str) -> None:
        """NaN in what is to be written, and an idle GPU."""
        self.out.fill_(float("nan"))
        self.synchronize()


def row(active: int, mean: int, host: torch.Tensor, rounds: int, clock: Any) -> dict[str, Any]:
    """A case, every way, by both clocks."""
    problem = Problem(active, mean, host)
    ways, exact, peer, wrong = problem.ways(), problem.exact(), problem.by_torch(), {}
    for name, issue in ways.items():
        if name != "copy":
            problem.before(name)
            issue()
            problem.synchronize()
            ts.check()
            wrong[name] = errors(problem.out, peer, exact)
    clocks = both_clocks(ways, clock, rounds=rounds, many=MANY, waiting=WAITING)
    ts.check()
    ms, gpu_ms = clocks["ms"], clocks["gpu_ms"]
    larger, gpu_larger = (max(one["copy"], one["multiply"]) for one in (ms, gpu_ms))
    ours = ("restarted", "streamed")
    return {
        "what": f"{active} of {EXPERTS} experts, {mean} rows each",
        "active": active, "rows": sum(problem.sizes), "bytes": active * host[0].nbytes,
        **{name: {way: round(value, 4) for way, value in of.items()} for name, of in clocks.items()},
        "of_larger": {name: round(ms[name] / larger, 4) for name in (*ours, "by hand")},
        "gpu_of_larger": {name: round(gpu_ms[name] / gpu_larger, 4) for name in (*ours, "by hand, ends known")},
        "of_by_hand": {name: round(ms["by hand"] / ms[name], 4) for name in ours},
        "errors": wrong,
    }  # fmt: skip


def experts(session: Session) -> None:
    """Measure every case."""
    depth, columns = (64, 48) if session.dry else (DEPTH, COLUMNS)
    host = torch.empty(EXPERTS, columns, depth, dtype=torch.bfloat16, pin_memory=torch.cuda.is_available())
    generator = torch.Generator().manual_seed(0)
    for matrix in host:
        matrix.copy_(torch.randn(columns, depth, generator=generator))
    record = session.record("stream_experts", rounds=ROUNDS)
    clock = WallClock() if session.dry else HiddenLaunchClock()
    session.rows(record, CASES, lambda case: row(*case, host, session.options.rounds or ROUNDS, clock))
