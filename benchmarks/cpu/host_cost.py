"""What a call costs the host beside the arithmetic: tiny operands, microseconds a call.

    python benchmarks/cpu/host_cost.py [--device cuda] [--source OTHER/src ...] [--rounds 5] [--out RECORD.json]

With ``--source`` the package on PYTHONPATH is compared to other checkouts: each round measures all of them in processes
of their own, one after the other, and the medians over the rounds are printed. On a GPU a call's figure is the host's
time until it returns; the GPU is idle when a batch of calls begins.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CALLS, REPEATS = 400, 7
#: Calls on a GPU between two synchronisations: few enough that the queue of launches never fills.
BATCH = 64


def cases(device: str) -> dict[str, Callable[[], object]]:
    """The calls, by name."""
    import torch

    import tilestream as ts

    size, heads, dim = (256, 4, 64) if device == "cuda" else (8, 2, 8)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def made(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=device, dtype=dtype)

    a, b, bias, out = made(size, size), made(size, size), made(size), made(size, size)
    x, q = made(2, size // 2, size), made(1, size // 2, heads, dim)
    return {
        "torch.mm": lambda: torch.mm(a, b),
        "torch.mm, out=": lambda: torch.mm(a, b, out=out),
        "ts.mm": lambda: ts.mm(a, b),
        "ts.matmul": lambda: ts.matmul(a, b),
        "ts.matmul, out=": lambda: ts.matmul(a, b, out=out),
        "ts.linear, 3-D, bias": lambda: ts.linear(x, b, bias),
        "ts.addmm": lambda: ts.addmm(out, a, b),
        "ts.attention": lambda: ts.attention(q, q, q),
    }


def on_cpu(call: Callable[[], object]) -> float:
    """Microseconds of CPU time a call: the least of `REPEATS` means of `CALLS` calls."""
    means = []
    for _ in range(REPEATS):
        begin = time.process_time()
        for _ in range(CALLS):
            call()
        means.append((time.process_time() - begin) / CALLS * 1e6)
    return min(means)


def on_gpu(call: Callable[[], object]) -> float:
    """Microseconds of wall time until a call returns: the median of `CALLS` batches."""
    import torch

    means = []
    for _ in range(CALLS // 8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(BATCH):
            call()
        means.append((time.perf_counter() - begin) / BATCH * 1e6)
    torch.cuda.synchronize()
    return statistics.median(means)


def measure(device: str) -> dict[str, float]:
    """Microseconds a call."""
    import torch

    if device == "cpu":
        torch.set_num_threads(1)
    found = {}
    with torch.no_grad():
        for name, call in cases(device).items():
            for _ in range(CALLS // 4):
                call()
            found[name] = on_gpu(call) if device == "cuda" else on_cpu(call)
    return found


def main() -> None:
    """Measure, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="*", default=[], help="other checkouts' src to compare to")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, help="record of the medians")
    parser.add_argument("--json", action="store_true", help="measure here, and print JSON")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(measure(options.device)))
        return
    sources = ["", *options.source]
    rounds: dict[str, list[dict[str, float]]] = {source: [] for source in sources}
    for _ in range(options.rounds):
        for source in sources:
            environment = {**os.environ, "PYTHONPATH": source} if source else dict(os.environ)
            run = subprocess.run(
                [sys.executable, __file__, "--json", "--device", options.device],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
            rounds[source].append(json.loads(run.stdout))
    medians = {
        name: {source or "this": statistics.median(one[name] for one in rounds[source]) for source in sources}
        for name in rounds[""][0]
    }
    print(f"{'us a call':<24}" + "".join(f"{source or 'this':>24}" for source in sources))
    for name, found in medians.items():
        print(f"{name:<24}" + "".join(f"{median:>24.1f}" for median in found.values()))
    if options.out:
        options.out.write_text(json.dumps(record(options.device, medians), indent=1) + "\n", encoding="utf-8")


def record(device: str, medians: dict[str, dict[str, float]]) -> dict[str, object]:
    """The figures, and what they were measured on."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "a CPU"
    rounded = {call: {where: round(us, 2) for where, us in found.items()} for call, found in medians.items()}
    return {
        "name": "host_cost", "device": name, "torch": torch.__version__, "commit": os.environ.get("COMMIT", ""),
        "date": time.strftime("%Y-%m-%d"), "microseconds": rounded,
    }  # fmt: skip


if __name__ == "__main__":
    main()
