"""A matmul whose input is read cold from disk while it runs, beside reading first and multiplying then.

Floor: the longer of reading and multiplying, where the multiplying also pays for the CPU time that reading takes from
its cores; and nothing can be multiplied before the first chunk is there:

    bound = 1.15 * max(read, multiply + CPU time of the read / cores) + first chunk

Every time is of a cold read (the page cache dropped before each), into one buffer used over and over.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import tilestream as ts
from benchmarks.core.session import Session
from benchmarks.core.timing import cpu_peak, medians, rates, refuse_impossible
from tilestream.arrival.files import drop_from_page_cache
from tilestream_tools.sweep.check import errors

ROWS, DEPTH = 16384, 4096  # 256 MiB of float32
WIDTHS = (64, 128, 192, 256, 384, 512)


def measure(path: Path, n: int, rounds: int) -> dict[str, Any]:
    """One row: read alone, multiply alone, both in turn, streamed; in interleaved rounds."""
    torch.manual_seed(n)
    w = torch.randn(DEPTH, n)
    out = torch.empty(ROWS, n)
    samples: dict[str, list[float]] = {
        name: [] for name in ("read", "multiply", "in turn", "streamed", "first", "cpu", "torch")
    }
    drop_from_page_cache(path)
    with ts.stream_in(path, tensor="x") as stream:
        x = stream.wait()
        how = stream.explain()
        peer = torch.mm(x, w)
        reference = x.double() @ w.double()
        plan = ts.plan(ROWS, n, DEPTH, arrival=stream.arrival)
        for round_ in range(rounds + 1):
            timed: dict[str, float] = {}
            drop_from_page_cache(path)
            stream.restart()
            stream.wait()
            timed["read"] = time.perf_counter() - stream.started
            timed["cpu"] = stream.cpu_seconds
            timed["first"] = min(t for t in stream.arrival.times if t is not None) - stream.started
            begin = time.perf_counter()
            ts.matmul(x, w, out=out)
            timed["multiply"] = time.perf_counter() - begin
            timed["in turn"] = timed["read"] + timed["multiply"]
            begin = time.perf_counter()
            torch.mm(x, w, out=out)
            timed["torch"] = time.perf_counter() - begin
            out.fill_(float("nan"))
            drop_from_page_cache(path)
            stream.restart()
            ts.matmul(x, w, out=out, arrival=stream.arrival)
            timed["streamed"] = time.perf_counter() - stream.started
            figures = errors(out, peer, reference)
            if round_:  # the first round warms up
                for name, seconds in timed.items():
                    samples[name].append(seconds)
    ms = medians(samples)
    refuse_impossible(f"N = {n}", rates(2 * ROWS * n * DEPTH, {"streamed": ms["streamed"]}), cpu_peak())
    longer = max(ms["read"], ms["multiply"] + ms["cpu"] / torch.get_num_threads())
    bound = 1.15 * longer + ms["first"]
    return {
        "shape": [ROWS, n, DEPTH],
        "ms": ms,
        "bound": bound,
        "of_bound": ms["streamed"] / bound,
        "speedup": ms["in turn"] / ms["streamed"],
        "hidden": (ms["in turn"] - ms["streamed"]) / min(ms["read"], ms["multiply"]),
        "source": how,
        "plan": plan.label,
        "errors": figures,
        "samples": {name: [round(1e3 * s, 3) for s in values] for name, values in samples.items()},
    }


def stream(session: Session) -> None:
    with tempfile.TemporaryDirectory(dir=session.options.folder) as folder:
        path = Path(folder) / "activations.safetensors"
        torch.manual_seed(0)
        save_file({"x": torch.randn(ROWS, DEPTH)}, path)
        record = session.record("stream", cpu=True, bytes=4 * ROWS * DEPTH)
        session.rows(record, WIDTHS, lambda n: measure(path, n, session.options.rounds or 11))
