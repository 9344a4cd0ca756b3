"""The kernels of two checkouts in one process: ``python benchmarks/refactoring.py OTHER/src RECORD.json [TEXT]``.

For a refactoring that moves machine code: calls take turns, L2 is flushed before each, medians are compared, and both
answers are compared bit for bit. TEXT chooses among the cases. OTHER's package is copied as ``tilestream_before``.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

if not __package__:  # run as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import torch

import tilestream
from tilestream_tools.sweep.clock import GpuClock

BEFORE = "tilestream_before"
Call = Callable[[], torch.Tensor]


def other(src: Path) -> ModuleType:
    """The package below ``src``, under another name; its registered ops too."""
    folder = Path(tempfile.mkdtemp(prefix="tilestream-before-"))
    ignored = shutil.ignore_patterns("__pycache__", "verify", "isa", "sweep")
    shutil.copytree(src / "tilestream", folder / BEFORE, ignore=ignored)
    for path in (folder / BEFORE).rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8").replace("tilestream", BEFORE), encoding="utf-8")
    sys.path.append(str(folder))
    return importlib.import_module(BEFORE)


def attention(head_dim: int, seqlen: int, heads: int = 16, **how: Any) -> Callable[[ModuleType], Call]:
    """16k tokens of attention; with ``apart`` elements between heads, which no tensor map can address, portable."""
    dtype, apart = how.pop("dtype", torch.bfloat16), how.pop("apart", 0)
    shape = (max(1, 16384 // seqlen), seqlen, heads, head_dim + apart)
    q, k, v = (torch.randn(shape, device="cuda").to(dtype)[..., :head_dim] for _ in range(3))

    def bound(package: ModuleType) -> Call:
        return lambda: package.attention(q, k, v, **how)

    return bound


def matmul(m: int, n: int, k: int, chunks: int = 0, **how: Any) -> Callable[[ModuleType], Call]:
    """A product; with ``chunks``, of rows that arrive and are there."""
    a, w = (torch.randn(shape, device="cuda").to(torch.bfloat16) for shape in ((m, k), (n, k)))

    def bound(package: ModuleType) -> Call:
        if not chunks:
            return lambda: package.matmul(a, w.t(), **how)
        arrival = package.Arrival.uniform(m // chunks, chunks, device="cuda")
        for chunk in range(chunks):
            arrival.signal(chunk)
        return lambda: package.matmul(a, w.t(), arrival=arrival, **how)

    return bound


CASES: dict[str, Callable[[], Callable[[ModuleType], Call]]] = {
    "attention 128, causal, 2k": lambda: attention(128, 2048, causal=True),
    "attention 128, causal, 8k": lambda: attention(128, 8192, causal=True),
    "attention 128, full, 4k": lambda: attention(128, 4096),
    "attention 64, causal, 4k": lambda: attention(64, 4096, 32, causal=True),
    "attention 256, causal, 4k": lambda: attention(256, 4096, 8, causal=True),
    "attention 128, window, 8k": lambda: attention(128, 8192, window=(1024, 0), causal=True),
    "attention 128, softcap, 4k": lambda: attention(128, 4096, softcap=30.0),
    "portable attention 128, causal, 2k": lambda: attention(128, 2048, causal=True, apart=4),
    "portable attention 64, full, 2k": lambda: attention(64, 2048, 32, apart=4),
    "portable attention 64, float32, 1k": lambda: attention(64, 1024, dtype=torch.float32),
    "matmul 4096x4096x4096": lambda: matmul(4096, 4096, 4096),
    "matmul 8192x8192x8192": lambda: matmul(8192, 8192, 8192),
    "matmul 64x8192x8192": lambda: matmul(64, 8192, 8192),
    "matmul 8192x8192x1024": lambda: matmul(8192, 8192, 1024),
    "matmul 4096x4096x4096, stream_k": lambda: matmul(4096, 4096, 4096, schedule="stream_k"),
    "matmul 8192x4096x4096, 8 chunks": lambda: matmul(8192, 4096, 4096, 8),
    "matmul 4096x3072x3072, 4 chunks": lambda: matmul(4096, 3072, 3072, 4),
}


def main() -> int:
    """Measure all cases; 1 if an answer differs."""
    before, target = other(Path(sys.argv[1])), Path(sys.argv[2])
    clock = GpuClock()
    rows = {}
    chosen = {name: make for name, make in CASES.items() if not sys.argv[3:] or sys.argv[3] in name}
    for name, make in chosen.items():
        bound = make()
        now, then = bound(tilestream), bound(before)
        same = torch.equal(now(), then())
        found = clock.interleave({"now": now, "before": then}, rounds=25).seconds
        milliseconds = {way: 1e3 * sorted(times)[len(times) // 2] for way, times in found.items()}
        rows[name] = {
            "ratio": round(milliseconds["before"] / milliseconds["now"], 4), "same_bits": same,
            **{way: round(ms, 4) for way, ms in milliseconds.items()},
        }  # fmt: skip
        print(f"{name:40} {rows[name]}", flush=True)
        record = {
            "name": "refactoring", "device": torch.cuda.get_device_name(), "torch": torch.__version__,
            "triton": importlib.import_module("triton").__version__, "commit": os.environ.get("COMMIT", ""),
            "before": os.environ.get("BEFORE", ""), "date": time.strftime("%Y-%m-%d"), "unit": "ms", "rows": rows,
        }  # fmt: skip
        target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()
    return int(not all(row["same_bits"] for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
