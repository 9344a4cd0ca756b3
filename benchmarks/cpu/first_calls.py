"""Seconds of a process's first calls on a GPU, with Triton's cache empty and filled, beside torch's first product.

    PYTHONPATH=src python benchmarks/cpu/first_calls.py [--seconds 60] [--out RECORD.json] [--profile]

A fresh process imports torch, multiplies once by ``torch.mm`` (which makes the context and loads cuBLAS), imports
tilestream, and makes one first call: a matmul, or an attention. Rounds of four processes (each op, with an empty cache
of its own and with a filled one) follow each other until ``ROUNDS`` are done or the time is used up; a round is not
begun that would not end in time. The figures are medians. ``--profile`` prints what one first call of each op spends
its time on, with the filled cache, and is not part of the record. ``--device cpu`` tries the script without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROUNDS = 3
OPS, CACHES = ("matmul", "attention"), ("empty", "filled")
#: Of one process; a machine that takes longer has another trouble.
PROCESS_SECONDS = 40


def main() -> None:
    """Measure, print a table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--process", choices=OPS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.process:
        print(json.dumps(process(given.process, given.device, given.profile)))
        return
    with tempfile.TemporaryDirectory(prefix="first-calls-") as folder:
        found = measure(given.seconds, given.device, Path(folder))
        if given.profile:
            for op in OPS:
                fresh_process(op, given.device, Path(folder) / "filled", "--profile")
    samples = {f"{op}, {cache} cache": rows for (op, cache), rows in found.items()}
    medians = {
        name: {what: round(statistics.median(row[what] for row in rows), 3) for what in rows[0]}
        for name, rows in samples.items()
    }
    for name, row in medians.items():
        print(f"{name:<24}", *(f"{what} {seconds:.3f}" for what, seconds in row.items()), sep="  ")
    record = {
        "name": "first_calls", "device": device_name(given.device), "torch": importlib.metadata.version("torch"),
        "commit": os.environ.get("COMMIT", ""), "date": time.strftime("%Y-%m-%d"), "seconds": medians,
        "samples": samples,
    }  # fmt: skip
    if given.out is not None:
        given.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measure(limit: float, device: str, folder: Path) -> dict[tuple[str, str], list[dict[str, float]]]:
    """The seconds of each process, by op and by cache. The first round fills the caches that all rounds find filled."""
    found: dict[tuple[str, str], list[dict[str, float]]] = {(op, cache): [] for op in OPS for cache in CACHES}
    begin, longest = time.perf_counter(), 0.0
    for number in range(ROUNDS):
        start = time.perf_counter()
        if start - begin + longest > limit:
            break
        for op in OPS:
            found[op, "empty"].append(fresh_process(op, device, folder / f"{op}-{number}"))
            found[op, "filled"].append(fresh_process(op, device, folder / f"{op}-0"))
        longest = max(longest, time.perf_counter() - start)
    return found


def fresh_process(op: str, device: str, cache: Path, *options: str) -> dict[str, float]:
    """The seconds of one process's steps."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache)}
    run = subprocess.run(
        [sys.executable, __file__, "--process", op, "--device", device, *options],
        env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=PROCESS_SECONDS,
    )  # fmt: skip
    found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
    return found


def process(op: str, device: str, profiled: bool) -> dict[str, float]:
    """The seconds of this process's steps, in order."""
    seconds: dict[str, float] = {}

    def timed(what: str, step: Callable[[], object]) -> None:
        begin = time.perf_counter()
        step()
        if device == "cuda" and "torch" in sys.modules:
            sys.modules["torch"].cuda.synchronize()
        seconds[what] = round(time.perf_counter() - begin, 4)

    def import_torch() -> None:
        import torch

        torch.set_grad_enabled(False)

    timed("import torch", import_torch)
    import torch

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    size = 4096 if device == "cuda" else 256
    timed("torch's first mm", lambda: torch.mm(*(torch.ones(64, 64, dtype=dtype, device=device),) * 2))
    a = torch.randn(size, size, dtype=dtype, device=device)
    q = torch.randn(2, size // 2, 16, 128, dtype=dtype, device=device)

    def import_tilestream() -> None:
        import tilestream  # noqa: F401

    timed("import tilestream", import_tilestream)

    def call() -> object:
        import tilestream as ts

        return ts.matmul(a, a.t()) if op == "matmul" else ts.attention(q, q, q, causal=True)

    first = call
    if profiled:
        import cProfile

        profile = cProfile.Profile()
        first = lambda: profile.runcall(call)  # noqa: E731
    timed("first call", first)
    timed("second call", call)
    if profiled:
        import pstats

        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(60)
    return seconds


def device_name(device: str) -> str:
    """Of the GPU that was measured."""
    if device == "cpu":
        return "cpu"
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
