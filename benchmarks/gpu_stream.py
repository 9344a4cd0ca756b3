"""A matmul whose input is copied to the GPU while it runs, beside copying first and multiplying then.

    PYTHONPATH=src python benchmarks/gpu_stream.py [RESULT.json [SHAPE,...]]

Either operand: the activations by rows (``MxNxK``), or an offloaded weight by rows of ``[N, K]`` (``MxNxK weight``:
``ts.linear`` with ``weight_arrival``). ``by the raster`` is ``streamed`` without arrival order.

bf16, from pinned memory, `stream_in`'s default chunks. No overlap goes below the larger of copying and multiplying:
that ratio is the one to look at. ``in turn`` is one plain copy and torch.mm behind it in the same stream; ``by chunks``
is the overlap as one writes it without this library: each chunk copied on a second stream, an event, a torch.mm on its
rows. One clock for all: the host's, from an idle GPU to an idle GPU, so that what it costs to issue counts. L2 is
flushed and what shall be written is NaN before each call; every answer is checked against float64 in each round.
COMMIT names the commit where the tree is a copy without its history.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tilestream as ts
from harness import errors, gpu_peak, gpu_record, interleave

#: M, N, K, and what is streamed.
SHAPES = [
    (16384, 8192, 8192, "rows"), (65536, 4096, 4096, "rows"), (8192, 8192, 8192, "rows"), (16384, 4096, 8192, "rows"),
    (4096, 14336, 4096, "rows"), (4096, 14336, 4096, "weight"), (8192, 8192, 8192, "weight"),
]  # fmt: skip
#: PCIe 5.0 with 16 lanes, GB/s: above this a figure is an error.
LINK_PEAK = 64.0
ROUNDS = 15


class Problem:
    """The buffers of one shape, and each way to run it; every way leaves the GPU idle."""

    def __init__(self, m: int, n: int, k: int, what: str) -> None:
        torch.manual_seed(m + n + k)
        self.weight = what == "weight"
        rows = n if self.weight else m
        self.host = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16).cpu().pin_memory()
        there = torch.randn((m, k) if self.weight else (k, n), device="cuda").mul_(k**-0.5).to(torch.bfloat16)
        self.out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self.stream = ts.stream_in(self.host)
        self.x = self.stream.wait()
        #: What is multiplied: views of what is there and of what the stream brings.
        self.a, self.w = (there, self.x.mT) if self.weight else (self.x, there)
        self.plan = self._plan("chunk_major")
        self.copies = torch.cuda.Stream()
        self.flush = torch.empty(96 * 2**20, dtype=torch.int32, device="cuda")
        brought = self.host.cuda()  # not what the stream brought: that is to be checked
        a, w = (there, brought.mT) if self.weight else (brought, there)
        self.peer = torch.mm(a, w)
        self.reference = a.double() @ w.double()
        self.errors: dict[str, dict[str, float]] = {}

    def _plan(self, order: str | None = None) -> ts.Plan:
        (m, k), n = self.a.shape, self.w.shape[1]
        coming = {"weight_arrival" if self.weight else "arrival": self.stream.arrival}
        layout = "nt" if self.weight else "nn"
        return ts.plan(m, n, k, dtype=torch.bfloat16, device="cuda", layout=layout, order=order, **coming)

    def ways(self) -> dict[str, Callable[[], None]]:
        """By name."""
        return {
            "copy": self._copy,
            "multiply": lambda: self._alone(lambda: ts.matmul(self.a, self.w, out=self.out)),
            "torch.mm": lambda: self._alone(lambda: torch.mm(self.a, self.w, out=self.out)),
            "in turn": lambda: self._alone(self._in_turn),
            "by chunks": lambda: self._alone(self._by_chunks),
            "streamed": lambda: self._alone(self._streamed),
            "by the raster": lambda: self._alone(self._by_the_raster),
        }

    def _copy(self) -> None:
        self.stream.restart()
        self.stream.wait()

    def _alone(self, issue: Callable[[], object]) -> None:
        issue()
        torch.cuda.synchronize()

    def _in_turn(self) -> None:
        self.x.copy_(self.host, non_blocking=True)
        torch.mm(self.a, self.w, out=self.out)

    def _by_chunks(self) -> None:
        bounds = self.stream.arrival.chunks(self.x.shape[0]).bounds
        here = torch.cuda.current_stream()
        self.copies.wait_stream(here)
        for begin, end in itertools.pairwise(bounds):
            with torch.cuda.stream(self.copies):
                self.x[begin:end].copy_(self.host[begin:end], non_blocking=True)
                landed = self.copies.record_event()
            here.wait_event(landed)
            if self.weight:
                self.out[:, begin:end] = torch.mm(self.a, self.w[:, begin:end])
            else:
                torch.mm(self.a[begin:end], self.w, out=self.out[begin:end])

    def _streamed(self) -> None:
        self.stream.restart()
        if self.weight:
            self.out = ts.linear(self.a, self.x, weight_arrival=self.stream.arrival)
        else:
            ts.matmul(self.a, self.w, out=self.out, arrival=self.stream.arrival)

    def _by_the_raster(self) -> None:
        self.stream.restart()
        coming = {"weight_arrival" if self.weight else "arrival": self.stream.arrival}
        self.plan.run(self.a, self.w, out=self.out, **coming)

    def before(self, name: str) -> None:
        """Poison what ``name`` shall write, flush, and wait."""
        self.out.fill_(float("nan"))
        if name not in ("multiply", "torch.mm"):  # these multiply what was brought before
            self.x.fill_(float("nan"))
        self.flush.zero_()
        torch.cuda.synchronize()

    def after(self, name: str) -> None:
        """Check the answer, unless ``name`` only copies."""
        ts.check()
        if name != "copy":
            self.errors[name] = errors(self.out, self.peer, self.reference)


def row(m: int, n: int, k: int, what: str) -> dict[str, Any]:
    """One shape, every way."""
    problem = Problem(m, n, k, what)
    samples = interleave(problem.ways(), rounds=ROUNDS, before=problem.before, after=problem.after)
    ms = {name: statistics.median(seconds) * 1e3 for name, seconds in samples.items()}
    tflops = {name: 2e-9 * m * n * k / ms[name] for name in ms if name != "copy"}
    link = problem.host.nbytes / ms["copy"] / 1e6
    if max(tflops.values()) > gpu_peak() or link > LINK_PEAK:
        raise AssertionError(f"{m}x{n}x{k}: {tflops}, {link} GB/s, above the peak: the answer or the timing is wrong")
    arrival = problem.stream.arrival
    return {
        "shape": name_of(m, n, k, what),
        "bytes": problem.host.nbytes,
        "chunks": [arrival.num_chunks, arrival.rows_per_chunk],
        "plan": problem._plan().label,
        "ms": {name: round(value, 4) for name, value in ms.items()},
        "copy_gb_per_s": round(link, 2),
        "tflops": {name: round(value, 1) for name, value in tflops.items()},
        "of_larger": round(ms["streamed"] / max(ms["copy"], ms["multiply"]), 4),
        "of_larger_torch": round(ms["streamed"] / max(ms["copy"], ms["torch.mm"]), 4),
        "of_in_turn": round(ms["streamed"] / ms["in turn"], 4),
        "errors": problem.errors,
        "samples": {name: [round(1e3 * s, 4) for s in seconds] for name, seconds in samples.items()},
    }


def name_of(m: int, n: int, k: int, what: str) -> str:
    """What a shape is called."""
    return f"{m}x{n}x{k}" + (" weight" if what == "weight" else "")


def main() -> None:
    """Measure every shape, or those named, and write the record."""
    rows = []
    named = sys.argv[2].split(",") if len(sys.argv) > 2 else None
    for shape in SHAPES:
        if named is not None and name_of(*shape) not in named:
            continue
        rows.append(row(*shape))
        one = rows[-1]
        times = ", ".join(f"{name} {value:.3f}" for name, value in one["ms"].items())
        print(f"{one['shape']}: {times} ms; streamed {one['of_larger']:.3f} of the larger, "
              f"{one['of_in_turn']:.3f} of in turn; {one['copy_gb_per_s']:.1f} GB/s", flush=True)  # fmt: skip
    print(gpu_record("gpu_stream", rows, Path(sys.argv[1]) if len(sys.argv) > 1 else None, rounds=ROUNDS))


if __name__ == "__main__":
    main()
