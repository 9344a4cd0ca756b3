"""What a call costs the host beside the arithmetic: tiny operands on the CPU, microseconds a call.

    python benchmarks/cpu/host_cost.py [--source OTHER/src ...] [--rounds 5]

With ``--source`` the installed package is compared to other checkouts: each round measures all of them in processes of
their own, one after the other, and the medians over the rounds are printed.
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

CALLS, REPEATS = 400, 7


def cases() -> dict[str, Callable[[], object]]:
    """The calls, by name."""
    import torch

    import tilestream as ts

    a, b, x = torch.rand(8, 8), torch.rand(8, 8), torch.rand(2, 4, 8)
    bias, out = torch.rand(8), torch.empty(8, 8)
    q = torch.rand(1, 4, 2, 8)
    return {
        "torch.mm": lambda: torch.mm(a, b),
        "ts.mm": lambda: ts.mm(a, b),
        "ts.matmul": lambda: ts.matmul(a, b),
        "ts.matmul, out=": lambda: ts.matmul(a, b, out=out),
        "ts.linear, 3-D, bias": lambda: ts.linear(x, b, bias),
        "ts.addmm": lambda: ts.addmm(out, a, b),
        "ts.attention": lambda: ts.attention(q, q, q),
    }


def measure() -> dict[str, float]:
    """Microseconds of CPU time a call: the least of `REPEATS` means of `CALLS` calls."""
    import torch

    torch.set_num_threads(1)
    found = {}
    with torch.no_grad():
        for name, call in cases().items():
            for _ in range(CALLS // 4):
                call()
            means = []
            for _ in range(REPEATS):
                begin = time.process_time()
                for _ in range(CALLS):
                    call()
                means.append((time.process_time() - begin) / CALLS * 1e6)
            found[name] = min(means)
    return found


def main() -> None:
    """Measure, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", nargs="*", default=[], help="other checkouts' src to compare to")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="measure here, and print JSON")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(measure()))
        return
    sources = ["", *options.source]
    rounds: dict[str, list[dict[str, float]]] = {source: [] for source in sources}
    for _ in range(options.rounds):
        for source in sources:
            environment = {**os.environ, "PYTHONPATH": source} if source else dict(os.environ)
            run = subprocess.run(
                [sys.executable, __file__, "--json"], env=environment, capture_output=True, text=True, check=True
            )
            rounds[source].append(json.loads(run.stdout))
    print(f"{'us a call':<24}" + "".join(f"{source or 'this':>24}" for source in sources))
    for name in rounds[""][0]:
        medians = [statistics.median(one[name] for one in rounds[source]) for source in sources]
        print(f"{name:<24}" + "".join(f"{median:>24.1f}" for median in medians))


if __name__ == "__main__":
    main()
