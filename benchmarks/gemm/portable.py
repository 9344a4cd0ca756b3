"""The portable kernel beside cuBLAS: bf16, B as it lies in a Linear weight (``nt``) and row-major (``nn``)."""

from __future__ import annotations

from collections.abc import Callable

import torch

import tilestream as ts
from benchmarks.core.records import Row
from benchmarks.core.timing import gpu_peak, host_microseconds, medians, rates, refuse_impossible
from benchmarks.gemm.bench import Bench
from tilestream_tools.sweep.check import errors

SHAPES = [
    (4096, 4096, 4096), (8192, 8192, 8192), (2048, 2048, 2048), (8192, 8192, 1024), (4096, 14336, 4096),
    (512, 8192, 8192), (64, 8192, 8192),
]  # fmt: skip


def row(bench: Bench, m: int, n: int, k: int, layout: str) -> Row:
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
    milliseconds = medians(bench.clock.interleave(functions, rounds=15).seconds)
    tflops = rates(2 * m * n * k, milliseconds)
    refuse_impossible(f"{m}x{n}x{k}", tflops, gpu_peak())
    return {
        "shape": f"{m}x{n}x{k}",
        "layout": layout,
        "plan": plans["auto"].label,
        "ms": {name: round(ms, 4) for name, ms in milliseconds.items()},
        "tflops": tflops,
        "of_cublas": {kind: round(milliseconds["cublas"] / milliseconds[kind], 3) for kind in kinds},
        "errors": figures,
    }


def tiles(bench: Bench, m: int, n: int, k: int) -> dict[str, float]:
    """TFLOP/s by tile: the cost model's efficiencies are read from these."""
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
    return rates(2 * m * n * k, medians(bench.clock.interleave(functions, rounds=9).seconds))


def portable(bench: Bench) -> None:
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    made = ts.plan(512, 512, 512, dtype=a.dtype, device="cuda", backend="portable")
    host, _ = host_microseconds({
        "torch.mm": lambda: torch.mm(a, b), "plan.run, out=": lambda: made.run(a, b, out=out),
    })  # fmt: skip
    more = {"host_us": {name: round(us, 1) for name, us in host.items()}, "tiles_4096": tiles(bench, 4096, 4096, 4096)}
    items = [(shape, layout) for shape in SHAPES for layout in ("nt", "nn")]
    bench.rows(bench.record("portable_gemm", **more), items, lambda item: row(bench, *item[0], item[1]))
    print(more)
