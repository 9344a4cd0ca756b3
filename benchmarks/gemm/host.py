"""The host's part: microseconds of a call, and seconds of a process's first ones."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile

import torch
from torch.nn import functional as F  # noqa: N812

import tilestream as ts
from benchmarks.core.paths import command
from benchmarks.core.timing import Call, host_microseconds
from benchmarks.gemm.bench import Bench, Row, operands
from benchmarks.gemm.shapes import Shape

#: Small enough that the GPU is done before the host is.
SIZES = (256, 512)
#: Calls a batch, and batches.
BATCH, BATCHES = 64, 50
#: Made in this order in one process: three classes of shape, and another shape of the first class.
FIRST = "4096x4096x4096,5120x5120x4096,16x8192x8192,4095x4097x4096"


def host(bench: Bench) -> None:
    """Cached calls, then first calls in fresh processes, with Triton's cache empty and filled."""
    record = bench.gemm_record("host", batch=BATCH, batches=BATCHES)
    bench.rows(record, SIZES, lambda size: calls_row(bench, size))
    folder = tempfile.mkdtemp(prefix="triton-cache-")
    bench.rows(record, ("empty cache", "filled cache"), lambda what: first_row(bench, what, folder))


def calls(size: int, device: str) -> dict[str, Call]:
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
    us, refused = host_microseconds(
        calls(size, bench.device), batch=BATCH, batches=3 if bench.dry else BATCHES, synchronize=bench.clock.synchronize
    )
    return {"what": "call", "shape": f"{size}x{size}x{size}", "us": us, "refused": refused}


def first_row(bench: Bench, what: str, folder: str) -> Row:
    environment = {**os.environ, "TRITON_CACHE_DIR": folder}
    given = ("64x64x64,16x64x64", "cpu") if bench.dry else (FIRST, "cuda")
    run = subprocess.run(
        command("gemm", "_first_calls", *given),
        env=environment, capture_output=True, text=True, timeout=max(bench.left, 10), check=False,
    )  # fmt: skip
    if run.returncode:
        raise RuntimeError(f"first call, {what}: {run.stderr[-400:]}")
    return {"what": "first call", "name": what, **json.loads(run.stdout.strip().splitlines()[-1])}
