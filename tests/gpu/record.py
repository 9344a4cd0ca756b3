"""Run the GPU tests and write down what ran where: ``python tests/gpu/record.py RECORD.json [pytest arguments]``.

On a machine with a GPU, from the repository's root, with ``src`` on PYTHONPATH. COMMIT names the commit where the tree
is a copy without its history. A second pass runs the numbers again
with CUDA_LAUNCH_BLOCKING=1, in a process of its own.
"""

from __future__ import annotations

import collections
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
OPTIONS = ["-q", "-p", "no:cacheprovider", "-o", "addopts="]


class Counts:
    """Outcomes, as pytest reports them."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or (report.when == "setup" and report.outcome != "passed"):
            self.outcomes[report.outcome] += 1
            if report.outcome == "failed":
                self.failed.append(report.nodeid)


def one_pass(arguments: list[str]) -> dict[str, object]:
    counts, begin = Counts(), time.monotonic()
    pytest.main([*OPTIONS, *arguments], plugins=[counts])
    return {**counts.outcomes, "failures": counts.failed, "seconds": round(time.monotonic() - begin, 1)}


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or run.stdout.strip()


def main() -> int:
    target, *arguments = sys.argv[1:]
    if os.environ.get("TILESTREAM_PASS"):  # the second process
        Path(target).write_text(json.dumps(one_pass(arguments)), encoding="utf-8")
        return 0
    import torch
    import triton

    passes = {"all": one_pass([str(HERE), *arguments])}
    second = Path(target).with_suffix(".blocking")
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1", "TILESTREAM_PASS": "1"}
    files = [str(HERE / name) for name in ("test_gpu_matmul.py", "test_gpu_arrival.py")]
    blocking = [*files, "-k", "not 2_to_the_31 and not 1_to_132", *arguments]
    subprocess.run([sys.executable, __file__, str(second), *blocking], env=environment, check=False)
    passes["CUDA_LAUNCH_BLOCKING=1"] = json.loads(second.read_text(encoding="utf-8"))
    second.unlink()
    record = {
        "name": "gpu_tests",
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "passes": passes,
    }
    Path(target).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    return int(any(one["failures"] for one in passes.values()))


if __name__ == "__main__":
    sys.exit(main())
