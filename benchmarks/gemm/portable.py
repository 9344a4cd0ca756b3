"""The portable kernel beside cuBLAS on one GPU: ``python benchmarks/gpu_matmul.py [RESULT.json]``.

bf16, B as it lies in a Linear weight (``nt``) and row-major (``nn``). Interleaved in one process, L2 flushed before
each call, medians, answers checked in the same run; host microseconds of a call beside torch.mm's. COMMIT names the
commit where the tree is a copy without its history.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tilestream as ts
from benchmarks.core.harness import errors, gpu_peak, gpu_record

SHAPES = [
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (2048, 2048, 2048),
    (8192, 8192, 1024),
    (4096, 14336, 4096),
    (512, 8192, 8192),
    (64, 8192, 8192),
]


def interleave(functions: dict[str, Callable[[], object]], rounds: int = 15, warmup: int = 3) -> dict[str, float]:
    """Median milliseconds of each, in turn; a spin of the GPU before each call hides what the host does."""
    flush = torch.empty(96 * 2**20, dtype=torch.int32, device="cuda")
    for function in functions.values():
        for _ in range(warmup):
            function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            flush.zero_()
            torch.cuda._sleep(400_000)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(samples) for name, samples in times.items()}


def host_us(function: Callable[[], object], calls: int = 400) -> float:
    """Median host microseconds of a call that does not wait for the GPU."""
    for _ in range(50):
        function()
    torch.cuda.synchronize()
    samples = []
    for i in range(calls):
        begin = time.perf_counter()
        function()
        samples.append((time.perf_counter() - begin) * 1e6)
        if i % 16 == 15:
            torch.cuda.synchronize()
    return statistics.median(samples)


def row(m: int, n: int, k: int, layout: str) -> dict[str, object]:
    """One shape, every schedule."""
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b = (
        torch.randn(n, k, device="cuda", dtype=a.dtype).t()
        if layout == "nt"
        else torch.randn(k, n, device="cuda", dtype=a.dtype)
    )
    out = torch.empty(m, n, device="cuda", dtype=a.dtype)
    kinds = ("auto", "static", "dynamic", "stream_k")
    functions: dict[str, Callable[[], object]] = {"cublas": lambda: torch.mm(a, b, out=out)}
    plans = {
        kind: ts.plan(m, n, k, dtype=a.dtype, device="cuda", layout=layout, schedule=kind, backend="portable")
        for kind in kinds
    }
    for kind, plan in plans.items():
        functions[kind] = lambda plan=plan: plan.run(a, b, out=out)
    rows = min(m, 1024)
    reference = a[:rows].double() @ b.double()
    figures = errors(plans["auto"].run(a, b)[:rows], torch.mm(a, b)[:rows], reference)
    milliseconds = interleave(functions)
    tflops = {name: 2e-9 * m * n * k / ms for name, ms in milliseconds.items()}
    if max(tflops.values()) > gpu_peak():
        raise AssertionError(f"{m}x{n}x{k}: {tflops}, above the peak: the answer or the timing is wrong")
    return {
        "shape": f"{m}x{n}x{k}",
        "layout": layout,
        "plan": plans["auto"].label,
        "ms": {name: round(ms, 4) for name, ms in milliseconds.items()},
        "tflops": {name: round(value, 1) for name, value in tflops.items()},
        "of_cublas": {kind: round(milliseconds["cublas"] / milliseconds[kind], 3) for kind in kinds},
        "errors": figures,
    }


def tiles(m: int, n: int, k: int) -> dict[str, float]:
    """TFLOP/s by tile: what the cost model's efficiencies are read from."""
    a, b = (torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in ((m, k), (k, n)))
    out = torch.empty(m, n, device="cuda", dtype=a.dtype)
    plans = {
        f"{tile[0]}x{tile[1]} {kind}": ts.plan(
            m, n, k, dtype=a.dtype, device="cuda", schedule=kind, tile=tile, backend="portable"
        )
        for tile in ((128, 256), (128, 128), (64, 128), (64, 64))
        for kind in ("static", "dynamic")
    }
    functions = {name: (lambda made=made: made.run(a, b, out=out)) for name, made in plans.items()}
    return {name: round(2e-9 * m * n * k / ms, 1) for name, ms in interleave(functions, rounds=9).items()}


def main() -> None:
    """Write the record."""
    rows = [row(*shape, layout) for shape in SHAPES for layout in ("nt", "nn")]
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    made = ts.plan(512, 512, 512, dtype=a.dtype, device="cuda", backend="portable")
    host = {
        "torch.mm": host_us(lambda: torch.mm(a, b)),
        "plan.run, out=": host_us(lambda: made.run(a, b, out=out)),
    }
    extra = {"host_us": {name: round(value, 1) for name, value in host.items()}, "tiles_4096": tiles(4096, 4096, 4096)}
    gpu_record("gpu_matmul", rows, Path(sys.argv[1]) if len(sys.argv) > 1 else None, **extra)
    for one in rows:
        print(one["shape"], one["layout"], one["plan"], one["tflops"], one["of_cublas"])
    print(extra)
