"""A matmul whose input is copied to the GPU while it runs, beside copying first and multiplying then.

Either operand: the activations by rows (``MxNxK``), or an offloaded weight by rows of ``[N, K]`` (``MxNxK weight``:
``ts.linear`` with ``weight_arrival``). bf16, from pinned memory, `stream_in`'s default chunks.

``in turn``
    One plain copy, and torch.mm behind it in the same stream.
``by chunks``
    The overlap without this library: each chunk copied on a second stream, an event, a torch.mm on its rows.
``streamed``
    `stream_in` and a matmul; ``by the raster`` is the same without arrival order.
``by the kernel``
    ``streamed`` with copies that the matmul makes itself (`stream_in`'s ``copies="kernel"``). With ``--copiers`` also
    by so many of its workers, and then without the ways of others. ``--portable``: by the portable kernel.

No overlap goes below the larger of copying and multiplying: that ratio counts. One clock for all: the host's, from an
idle GPU to an idle GPU, so that issuing counts. Before each call L2 is flushed and the output is NaN; every answer is
checked against float64 in each round.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.core.timing import gpu_peak, interleave, medians, rates, refuse_impossible
from tilestream_tools.sweep.check import errors

#: M, N, K, and what is streamed.
SHAPES = [
    (16384, 8192, 8192, "rows"), (65536, 4096, 4096, "rows"), (8192, 8192, 8192, "rows"), (16384, 4096, 8192, "rows"),
    (4096, 14336, 4096, "rows"), (4096, 14336, 4096, "weight"), (8192, 8192, 8192, "weight"),
    (16384, 8192, 8192, "weight"),
]  # fmt: skip
#: PCIe 5.0 with 16 lanes, GB/s: above this a figure is an error.
LINK_PEAK = 64.0
ROUNDS = 15


class Problem:
    """The buffers of one shape, and the ways to run it; each way ends with an idle GPU.

    ``copiers``: of each count, a plan whose kernel makes the copies; 0: as many as it has of itself.
    """

    def __init__(self, m: int, n: int, k: int, what: str, copiers: Sequence[int] = (0,), backend: Any = None) -> None:
        torch.manual_seed(m + n + k)
        self.weight = what == "weight"
        rows = n if self.weight else m
        self.host = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16).cpu().pin_memory()
        there = torch.randn((m, k) if self.weight else (k, n), device="cuda").mul_(k**-0.5).to(torch.bfloat16)
        self.out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        self.stream = ts.stream_in(self.host)
        self.x = self.stream.wait()
        self.offered = ts.stream_in(self.host, copies="kernel")
        self.backend = backend
        #: The operands: views of the resident one and of the streamed one.
        self.a, self.w = (there, self.x.mT) if self.weight else (self.x, there)
        self.plan = self._plan("chunk_major")
        self.streaming = self._plan()
        self.copying = {count: self._copying(count) for count in copiers}
        self.copies = torch.cuda.Stream()
        self.flush = torch.empty(96 * 2**20, dtype=torch.int32, device="cuda")
        brought = self.host.cuda()  # not what the stream brought: that is to be checked
        a, w = (there, brought.mT) if self.weight else (brought, there)
        self.peer = torch.mm(a, w)
        self.reference = a.double() @ w.double()
        self.errors: dict[str, dict[str, float]] = {}

    def _plan(self, order: str | None = None, stream: ts.Stream | None = None) -> ts.Plan:
        (m, k), n = self.a.shape, self.w.shape[1]
        coming = {"weight_arrival" if self.weight else "arrival": (stream or self.stream).arrival}
        layout = "nt" if self.weight else "nn"
        return ts.plan(
            m, n, k, dtype=torch.bfloat16, device="cuda", layout=layout, order=order, backend=self.backend, **coming
        )

    def _copying(self, count: int) -> ts.Plan:
        """A plan whose kernel makes the copies, by so many of its workers."""
        plan = self._plan(stream=self.offered)
        if plan.copies == "none":
            raise AssertionError(f"the kernel was to copy: {plan.explain()}")
        return dataclasses.replace(plan, copiers=count or plan.copiers)

    def ways(self, others: bool = True) -> dict[str, Callable[[], None]]:
        """The ways by name. ``others``: with all of those in which the kernel makes no copies."""
        issued: dict[str, Callable[[], object]] = {
            "copy": self._copy,
            "multiply": lambda: ts.matmul(self.a, self.w, out=self.out),
            "torch.mm": lambda: torch.mm(self.a, self.w, out=self.out),
            "in turn": self._in_turn,
            "by chunks": self._by_chunks,
            "streamed": self._streamed,
            "by the raster": lambda: self._run(self.plan, self.stream),
        }
        if not others:
            issued = {name: issued[name] for name in ("copy", "multiply", "streamed")}
        for count, plan in self.copying.items():
            copiers = f", {count} copiers" if count else ""
            issued[f"by the kernel{copiers}"] = lambda plan=plan: self._run(plan, self.offered)

        def alone(issue: Callable[[], object]) -> Callable[[], None]:
            return lambda: (issue(), torch.cuda.synchronize())[1]

        return {name: alone(issue) for name, issue in issued.items()}

    def _copy(self) -> None:
        self.stream.restart()
        self.stream.wait()

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
        if self.backend is not None:
            self._run(self.streaming, self.stream)
            return
        self.stream.restart()
        if self.weight:
            self.out = ts.linear(self.a, self.x, weight_arrival=self.stream.arrival)
        else:
            ts.matmul(self.a, self.w, out=self.out, arrival=self.stream.arrival)

    def _run(self, plan: ts.Plan, stream: ts.Stream) -> None:
        stream.restart()
        coming = {"weight_arrival" if self.weight else "arrival": stream.arrival}
        a, w = (self.a, stream.tensor.mT) if self.weight else (stream.tensor, self.w)
        plan.run(a, w, out=self.out, **coming)

    def before(self, name: str) -> None:
        """Fill the outputs of ``name`` with NaN, flush, and wait."""
        self.out.fill_(float("nan"))
        if name.startswith("by the kernel"):
            self.offered.tensor.fill_(float("nan"))
        elif name not in ("multiply", "torch.mm"):  # these multiply what was brought before
            self.x.fill_(float("nan"))
        self.flush.zero_()
        torch.cuda.synchronize()

    def after(self, name: str) -> None:
        """Check the answer, unless ``name`` only copies."""
        ts.check()
        if name != "copy":
            self.errors[name] = errors(self.out, self.peer, self.reference)


def row(m: int, n: int, k: int, what: str, copiers: Sequence[int], backend: str | None) -> dict[str, Any]:
    """One shape, every way; only ways with copy items if ``copiers`` or a backend is named."""
    problem = Problem(m, n, k, what, (0, *copiers), backend)
    ways = problem.ways(others=not copiers and backend is None)
    samples = interleave(ways, rounds=ROUNDS, before=problem.before, after=problem.after)
    ms = medians(samples)
    tflops = rates(2 * m * n * k, {name: value for name, value in ms.items() if name != "copy"})
    link = problem.host.nbytes / ms["copy"] / 1e6
    larger = max(ms["copy"], ms["multiply"])
    refuse_impossible(f"{m}x{n}x{k}", tflops, gpu_peak())
    refuse_impossible(f"{m}x{n}x{k}", {"copy": link}, LINK_PEAK, "GB/s")
    arrival = problem.stream.arrival
    return {
        "shape": name_of(m, n, k, what),
        "bytes": problem.host.nbytes,
        "chunks": [arrival.num_chunks, arrival.rows_per_chunk],
        "plan": problem._plan().label,
        "ms": {name: round(value, 4) for name, value in ms.items()},
        "copy_gb_per_s": round(link, 2),
        "tflops": tflops,
        "copies": problem.copying[0].explain().split("copies", 1)[1].split("\n")[0].strip(),
        "of_larger": round(ms["streamed"] / larger, 4),
        "of_larger_by_the_kernel": round(ms["by the kernel"] / larger, 4),
        **({"of_larger_torch": round(ms["streamed"] / max(ms["copy"], ms["torch.mm"]), 4)} if "torch.mm" in ms else {}),
        **({"of_in_turn": round(ms["streamed"] / ms["in turn"], 4)} if "in turn" in ms else {}),
        "errors": problem.errors,
        "samples": {name: [round(1e3 * s, 4) for s in seconds] for name, seconds in samples.items()},
    }


def name_of(m: int, n: int, k: int, what: str) -> str:
    return f"{m}x{n}x{k}" + (" weight" if what == "weight" else "")


def stream(session: Session) -> None:
    """Measure every shape, or those named (``MxNxK``, or ``MxNxK weight``)."""
    copiers, backend = session.options.copiers, "portable" if session.options.portable else None
    named = session.options.shapes
    shapes = [shape for shape in SHAPES if named is None or name_of(*shape) in named.split(",")]
    record = session.record("stream_copies" if copiers or backend else "stream", rounds=ROUNDS)
    session.rows(record, shapes, lambda shape: row(*shape, copiers, backend))
