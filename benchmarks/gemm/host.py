"""The section of `gpu_gemm` on the host's part: microseconds of a call, and seconds of the first one."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

import tilestream as ts
from benchmarks.core.clock import Call
from benchmarks.gemm.bench import Bench, Row, here, operands
from benchmarks.gemm.shapes import Shape, parse

#: Small enough that the GPU is done before the host is.
SIZES = (256, 512)
#: Calls between two looks at the clock, and such batches.
BATCH, BATCHES = 64, 50
#: Made in this order in one process: three classes of shape, and another shape of the first class.
FIRST = "4096x4096x4096,5120x5120x4096,16x8192x8192,4095x4097x4096"


def run_host(bench: Bench) -> None:
    """Cached calls, then first calls in fresh processes: Triton's cache empty, and filled by the process before."""
    record = bench.record("host", batch=BATCH, batches=BATCHES)
    bench.rows(record, SIZES, lambda size: calls_row(bench, size))
    folder = tempfile.mkdtemp(prefix="triton-cache-")
    bench.rows(record, ("empty cache", "filled cache"), lambda what: first_row(bench, what, folder))


def calls(size: int, device: str) -> dict[str, Call]:
    """What is called, on square operands."""
    shape = Shape(size, size, size)
    a, w = operands(shape, device)
    b, bias = w.t(), torch.randn(size, device=device, dtype=a.dtype)
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, w))
    b8 = b8.t()
    one = torch.ones(1, device=device)
    fp8 = {"scale_a": one, "scale_b": one, "use_fast_accum": True, "out_dtype": torch.bfloat16}
    return {
        "torch.mm": lambda: torch.mm(a, b),
        "ts.mm": lambda: ts.mm(a, b),
        "F.linear, bias": lambda: F.linear(a, w, bias),
        "ts.linear, bias": lambda: ts.linear(a, w, bias),
        "torch._scaled_mm": lambda: torch._scaled_mm(a8, b8, **fp8),
        "ts.matmul, fp8": lambda: ts.matmul(a8, b8, **fp8),
    }


def calls_row(bench: Bench, size: int) -> Row:
    """Host microseconds of each call: the median of batches, taken in turn, without a wait inside a batch."""
    functions, refused = calls(size, bench.device), {}
    for name, function in list(functions.items()):
        try:
            for _ in range(20):
                function()
        except Exception as error:
            refused[name] = f"{type(error).__name__}: {error}"[:200]
            del functions[name]
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(3 if bench.dry else BATCHES):
        for name, function in functions.items():
            bench.clock.synchronize()
            begin = time.perf_counter()
            for _ in range(BATCH):
                function()
            samples[name].append((time.perf_counter() - begin) / BATCH)
    us = {name: round(1e6 * statistics.median(values), 2) for name, values in samples.items()}
    return {"what": "call", "shape": f"{size}x{size}x{size}", "us": us, "refused": refused}


def first_row(bench: Bench, what: str, folder: str) -> Row:
    """The first calls of a process of its own."""
    environment = {**os.environ, "TRITON_CACHE_DIR": folder}
    device = ["--dry"] if bench.dry else []
    run = subprocess.run(
        here("--first-call", FIRST if not bench.dry else "64x64x64,16x64x64", *device),
        env=environment, capture_output=True, text=True, timeout=max(bench.left, 10), check=False,
    )  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"first call, {what}: {run.stderr[-400:]}")
    return {"what": "first call", "name": what, **json.loads(run.stdout.strip().splitlines()[-1])}


def first_calls(text: str, device: str, import_seconds: float) -> dict[str, Any]:
    """In this process, which has called nothing yet: seconds of the first call of each shape, and of the second."""
    found: dict[str, Any] = {"import_tilestream_s": round(import_seconds, 3), "shapes": []}
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    small = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    torch.mm(small, small)  # the device's and cuBLAS's own start
    synchronize()
    for shape in parse(text):
        a, w = operands(shape, device)
        b = w.t()
        synchronize()
        seconds = []
        for _ in range(2):
            begin = time.perf_counter()
            ts.mm(a, b)
            synchronize()
            seconds.append(round(time.perf_counter() - begin, 5))
        found["shapes"].append({"shape": str(shape), "first_s": seconds[0], "second_s": seconds[1]})
    return found
