"""Run benchmarks: ``python benchmarks/run.py SUBJECT SCRIPT [ARGUMENTS]``, from a checkout, with PYTHONPATH=src."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

#: Scripts by subject; each is a module with a ``main``.
SUBJECTS = {
    "gemm": ("suites", "portable", "counters"),
    "attention": ("prefill", "fp8", "portable", "tiles", "timeline"),
    "arrival": ("signals", "stream"),
    "distributed": (
        "all_gather", "all_reduce", "mlp", "llama", "copies", "gather_timeline", "mlp_timeline", "dispatch_table",
    ),
    "contention": ("neighbours",),
    "cpu": ("matmul", "stream", "first_call"),
    "amd": ("table", "selfcheck"),
    "report": ("render", "schedule_pictures"),
}  # fmt: skip


def main() -> int:
    """Run the script that the command line names."""
    given = sys.argv[1:]
    if len(given) < 2 or given[1] not in SUBJECTS.get(given[0], ()):
        print(__doc__, *(f"{subject}: {', '.join(scripts)}" for subject, scripts in SUBJECTS.items()), sep="\n")
        return 2
    sys.argv = [" ".join(["run.py", *given[:2]]), *given[2:]]
    return int(importlib.import_module(f"benchmarks.{given[0]}.{given[1]}").main() or 0)


if __name__ == "__main__":
    sys.exit(main())
