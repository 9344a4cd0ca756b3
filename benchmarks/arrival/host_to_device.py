"""A pinned tensor to the GPU and a matmul of it, beside the same written by hand; and what a chunk costs the link.

``host_to_device``: bf16, rows of A, or (``weight``) rows of a ``linear``'s weight; each way issues its copies anew.

``copy``, ``multiply``, ``torch.mm``
    One copy of it all; a matmul of what is there.
``by hand``
    A copy stream; for each of 8 chunks a copy, an event, and behind it a torch.mm on the chunk.
``by hand, our chunks``
    As it, in chunks of as many rows as ours.
``restarted``
    `Stream.restart` of a stream that is kept, and a matmul of it.
``streamed``
    `stream_in`, a matmul of the stream, and its end.
``captured``, ``by hand, captured``
    ``restarted`` and ``by hand`` as a CUDA graph, replayed: each replay copies anew.

Two clocks: ``ms``, the host's from an idle GPU to an idle GPU; ``gpu_ms``, between two events behind a spin that hides
the host. ``host_us``: what the calls cost the host until they return, the GPU idle; "to the first copy": until they
issue the first copy. Meanwhile the link is idle.

``chunk_cost``: copies of one tensor in more and more chunks, with what may stand between two of them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.core.timing import HiddenLaunchClock, gpu_peak, interleave, medians, rates, refuse_impossible
from tilestream.runtime.sequence import CopyIn, Event, Operation, Record, Sequence, Slot, WaitEvent, Write
from tilestream.runtime.streams import lend
from tilestream_tools.sweep.check import errors

#: M, N, K, and what is streamed: those of `benchmarks.arrival.stream`, and four more.
SHAPES = [
    (16384, 8192, 8192, "rows"), (65536, 4096, 4096, "rows"), (8192, 8192, 8192, "rows"), (16384, 4096, 8192, "rows"),
    (4096, 14336, 4096, "rows"), (4096, 14336, 4096, "weight"), (8192, 8192, 8192, "weight"),
    (16384, 8192, 8192, "weight"), (12288, 8192, 8192, "rows"), (4096, 4096, 14336, "rows"),
    (49152, 4096, 4096, "rows"), (16384, 10240, 2048, "rows"),
]  # fmt: skip
BY_HAND_CHUNKS = 8
ROUNDS, GPU_ROUNDS, HOST_CALLS = 9, 5, 15
MOST_BYTES = 2 * max((n if what == "weight" else m) * k for m, n, k, what in SHAPES)


class Problem:
    """The buffers of one shape, and the ways to run it; each issues, and waits for nothing."""

    def __init__(self, m: int, n: int, k: int, what: str, pinned: torch.Tensor) -> None:
        torch.manual_seed(m + n + k)
        self.weight, rows = what == "weight", n if what == "weight" else m
        self.host = pinned[: 2 * rows * k].view(torch.bfloat16).view(rows, k)
        self.brought = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        self.host.copy_(self.brought)
        self.there = torch.randn(m if self.weight else n, k, device="cuda").mul_(k**-0.5).to(torch.bfloat16)
        self.other = self.there if self.weight else self.there.mT.contiguous()
        self.x = torch.empty_like(self.brought)
        self.out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self.stream = ts.stream_in(self.host)
        self.stream.wait()
        self.copies, self.events = torch.cuda.Stream(), [torch.cuda.Event() for _ in range(64)]
        self.flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
        self.peer = self.mm(self.brought)
        left, right = (self.there, self.brought.mT) if self.weight else (self.brought, self.other)
        self.reference = left.double() @ right.double()
        self.errors: dict[str, dict[str, float]] = {}
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def mm(self, x: torch.Tensor) -> torch.Tensor:
        """Torch's product with what ``x`` holds."""
        return torch.mm(self.there, x.mT) if self.weight else torch.mm(x, self.other)

    def ways(self) -> dict[str, Callable[[], object]]:
        """The ways by name."""
        ours, rows = self.stream.arrival.chunks(self.host.shape[0]).bounds, self.host.shape[0]
        eight = [rows * i // BY_HAND_CHUNKS for i in range(BY_HAND_CHUNKS + 1)]
        return {
            "copy": lambda: self.x.copy_(self.host, non_blocking=True),
            "multiply": lambda: self._ours(self.brought),
            "torch.mm": lambda: self._torch(self.brought),
            "by hand": lambda: self._by_hand(eight),
            "by hand, our chunks": lambda: self._by_hand(ours),
            "restarted": self._restarted,
            "streamed": self._streamed,
            "captured": self._graph("captured", self._restarted).replay,
            "by hand, captured": self._graph("by hand", lambda: self._by_hand(eight)).replay,
        }

    def _graph(self, name: str, issue: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """What ``issue`` issues, captured once."""
        if name not in self.graphs:
            issue()  # compiled and loaded
            torch.cuda.synchronize()
            self.graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graphs[name]):
                issue()
        return self.graphs[name]

    def _ours(self, x: Any) -> None:
        if self.weight:
            ts.linear(self.there, x, out=self.out)
        else:
            ts.matmul(x, self.other, out=self.out)

    def _torch(self, x: torch.Tensor) -> None:
        left, right = (self.there, x.mT) if self.weight else (x, self.other)
        torch.mm(left, right, out=self.out)

    def _by_hand(self, bounds: Any) -> None:
        here, copies = torch.cuda.current_stream(), self.copies
        copies.wait_stream(here)
        for event, (begin, end) in zip(self.events, itertools.pairwise(bounds), strict=False):
            with torch.cuda.stream(copies):
                self.x[begin:end].copy_(self.host[begin:end], non_blocking=True)
                event.record(copies)
            here.wait_event(event)
            if self.weight:
                self.out[:, begin:end] = torch.mm(self.there, self.x[begin:end].mT)
            else:
                torch.mm(self.x[begin:end], self.other, out=self.out[begin:end])

    def _restarted(self) -> None:
        self.stream.restart()
        self._ours(self.stream)

    def _streamed(self) -> None:
        self._ours(ts.stream_in(self.host))

    def before(self, name: str) -> None:
        """NaN in what ``name`` is to write, L2 flushed, and an idle GPU."""
        self.out.fill_(float("nan"))
        self.x.fill_(float("nan"))
        self.stream.tensor.fill_(float("nan"))
        self.flush.zero_()
        torch.cuda.synchronize()

    def check(self, name: str) -> None:
        """The answer of one call of ``name``, made once more."""
        self.before(name)
        self.ways()[name]()
        torch.cuda.synchronize()
        ts.check()
        if name == "copy":
            assert torch.equal(self.x, self.brought)
        else:
            self.errors[name] = errors(self.out, self.peer, self.reference)

    def host_microseconds(self) -> dict[str, float]:
        """What the calls that issue cost the host."""
        calls = {
            "stream_in": lambda: ts.stream_in(self.host),
            "restart": self.stream.restart,
            "stream_in, matmul": self._streamed,
            "restart, matmul": self._restarted,
            "by hand": self.ways()["by hand"],
        }
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(HOST_CALLS):
            for name, call in calls.items():
                torch.cuda.synchronize()
                begin = time.perf_counter()
                kept = call()
                samples[name].append(time.perf_counter() - begin)
                if name in ("stream_in", "restart"):
                    started = (self.stream if name == "restart" else kept).started
                    samples.setdefault(f"{name}, to the first copy", []).append(started - begin)
                torch.cuda.synchronize()
                del kept
        return {name: round(1e6 * statistics.median(seconds), 1) for name, seconds in samples.items()}


def row(m: int, n: int, k: int, what: str, pinned: torch.Tensor) -> dict[str, Any]:
    """One shape, every way, by both clocks."""
    problem = Problem(m, n, k, what, pinned)
    ways, shape = problem.ways(), f"{m}x{n}x{k}" + (" weight" if what == "weight" else "")
    for name in ways:
        problem.check(name)
    waiting = {name: lambda issue=issue: (issue(), torch.cuda.synchronize()) for name, issue in ways.items()}
    ms = medians(interleave(waiting, rounds=ROUNDS, warmup=1, before=problem.before))
    gpu_ms = HiddenLaunchClock().milliseconds(ways, rounds=GPU_ROUNDS, warmup=1)
    for name in ways:
        problem.check(name)
    tflops = rates(2 * m * n * k, {name: value for name, value in gpu_ms.items() if name != "copy"})
    refuse_impossible(shape, tflops, gpu_peak())
    arrival, hands = problem.stream.arrival, ("by hand", "by hand, our chunks")
    larger = max(ms["copy"], min(ms["multiply"], ms["torch.mm"]))
    return {
        "shape": shape,
        "bytes": problem.host.nbytes,
        "chunks": [arrival.num_chunks, arrival.rows_per_chunk],
        "ms": {name: round(value, 4) for name, value in ms.items()},
        "gpu_ms": {name: round(value, 4) for name, value in gpu_ms.items()},
        "host_us": problem.host_microseconds(),
        "of_by_hand": {
            **{name: round(ms[name] / min(ms[hand] for hand in hands), 4) for name in ("restarted", "streamed")},
            "captured": round(ms["captured"] / ms["by hand, captured"], 4),
        },
        "over_larger_us": {
            name: round(1e3 * (ms[name] - larger), 1) for name in ("restarted", "streamed", "captured", *hands)
        },
        "errors": problem.errors,
    }


def host_to_device(session: Session) -> None:
    """Measure every shape, or those named (``MxNxK``, or ``MxNxK weight``)."""
    named = session.options.shapes
    shapes = [
        shape for shape in SHAPES
        if named is None or f"{'x'.join(map(str, shape[:3]))}{' weight' * (shape[3] == 'weight')}" in named.split(",")
    ]  # fmt: skip
    record = session.record("host_to_device", rounds=ROUNDS)
    pinned = torch.empty(MOST_BYTES, dtype=torch.uint8, pin_memory=True)
    session.rows(record, shapes, lambda shape: row(*shape, pinned))


# What a chunk costs the link ------------------------------------------------------------------------------------------

COST_BYTES, COST_ROUNDS = 128 * 2**20, 7
#: What stands behind each copy: nothing; a signal; an event; an event that another stream waits for, and signals; and
#: two streams that take turns, each with its signals.
BETWEEN = ("nothing", "signal", "event", "signal by another stream", "signal, two streams")


def chunked(count: int, between: str, events: list[Event]) -> Sequence:
    """So many copies; slots: the calling stream, two of ours, where to, where from, the words, the epoch."""
    calling, first, second, to, source, words, epoch = map(Slot, range(7))
    size, start, *ends = COST_BYTES // count, *events
    made: list[Operation] = [Record(calling, start), WaitEvent(first, start), WaitEvent(second, start)]
    for chunk in range(count):
        lane = second if between == "signal, two streams" and chunk % 2 else first
        made.append(CopyIn(lane, to + chunk * size, source + chunk * size, size))
        if "event" in between or "another" in between:
            made.append(Record(lane, ends[chunk]))
        if "another" in between:
            made.append(WaitEvent(second, ends[chunk]))
        if "signal" in between:
            made.append(Write(second if "another" in between else lane, words + 4 * chunk, epoch))
    return Sequence(7, [*made, Record(first, ends[-2]), Record(second, ends[-1])])


def chunk_cost(session: Session) -> None:
    """GPU time of 128 MiB in 1 to 64 chunks, and what each chunk more costs."""
    device = torch.device("cuda", torch.cuda.current_device())
    host = torch.empty(COST_BYTES, dtype=torch.uint8, pin_memory=True)
    there, words = torch.empty(COST_BYTES, dtype=torch.uint8, device=device), torch.zeros(64, dtype=torch.int32).cuda()
    streams, events, epoch = [lend(device), lend(device)], [Event() for _ in range(67)], itertools.count(1)
    ways = {}
    for between, count in itertools.product(BETWEEN, (1, 8, 16, 32, 64)):
        made = chunked(count, between, events)

        def issue(made: Sequence = made) -> None:
            here = torch.cuda.current_stream()
            handles = here.cuda_stream, streams[0].cuda_stream, streams[1].cuda_stream
            made.issue(*handles, there.data_ptr(), host.data_ptr(), words.data_ptr(), next(epoch))
            events[-2].hold(handles[0])
            events[-1].hold(handles[0])

        ways[f"{between}, {count}"] = issue
    ms = HiddenLaunchClock().milliseconds(ways, rounds=COST_ROUNDS)
    record = session.record("chunk_cost", rounds=COST_ROUNDS, bytes=COST_BYTES)
    session.rows(record, BETWEEN, lambda between: {
        "between": between,
        "ms": {count: round(ms[f"{between}, {count}"], 4) for count in (1, 8, 16, 32, 64)},
        "us_a_chunk": round(1e3 * (ms[f"{between}, 64"] - ms[f"{between}, 1"]) / 63, 2),
    })  # fmt: skip
