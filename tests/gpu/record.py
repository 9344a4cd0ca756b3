"""Run the GPU tests and write down what ran where: ``python tests/gpu/record.py RECORD.json [PASS ...] [-- ARGS]``.

On a machine with a GPU, from the repository's root, with ``src`` on PYTHONPATH. ARGS go to pytest. Environment
variables: COMMIT names the commit where the tree is a copy without history; JOBS is the number of processes of a pass
(default 4: most of a test's time is the host's); SAMPLE=n runs every n-th test; LIMIT is the most seconds of a pass.
The record notes SAMPLE, and tests that LIMIT cut off.

Passes are ``hopper`` (that kernel's tests), ``attention``, ``alone`` (what waits, or holds every SM: a process a GPU),
``distributed`` (one process, whose ranks take the GPUs), ``sanitizers``, ``others``, and ``blocking``: numbers again,
with CUDA_LAUNCH_BLOCKING=1. Without a name all run. What is already in the record stays if it is of the same commit,
machine and versions: so passes may be run by several commands, where a command's time is limited.
"""

from __future__ import annotations

import collections
import contextlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
OPTIONS = ["-q", "-p", "no:cacheprovider", "-o", "addopts="]


class Counts:
    """Outcomes as pytest reports them, written to ``part`` after each test: they outlast a process that is killed."""

    def __init__(self, part: Path) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.failed: list[str] = []
        self.part = part

    def pytest_runtest_logreport(self, report):
        failed = report.outcome == "failed"  # in a fixture, before or behind it, too
        if report.when == "call" or failed or (report.when == "setup" and report.outcome != "passed"):
            self.outcomes[report.outcome] += 1
            if failed:
                self.failed.append(report.nodeid)
            self.write(-1)

    def write(self, status: int) -> None:
        """``status``: pytest's, -1 before its end."""
        found = {"outcomes": self.outcomes, "failures": self.failed, "status": status}
        self.part.write_text(json.dumps(found), encoding="utf-8")


class Share:
    """Every ``jobs``-th test; tests that need most of the GPU's memory all go to the first process."""

    def __init__(self, job: int, jobs: int) -> None:
        self.job, self.jobs = job, jobs

    def pytest_collection_modifyitems(self, items):
        items[:] = [
            item
            for index, item in enumerate(items)
            if (0 if "2_to_the_31" in item.nodeid else index % self.jobs) == self.job
        ]


def part_of_pass(part: Path, arguments: list[str], job: int, jobs: int) -> None:
    counts = Counts(part)
    counts.write(int(pytest.main([*OPTIONS, *arguments], plugins=[counts, Share(job, jobs)])))


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or run.stdout.strip()


def arguments_of(name: str) -> list[str]:
    """What of the tests is in a pass."""

    def files(*names: str) -> list[str]:
        return [str(HERE / f"test_gpu_{name}.py") for name in names]

    passes = {
        "hopper": files("hopper"),
        "attention": files("attention", "hopper_attention"),
        "alone": files("again", "arrival", "arrival_order", "copy_items", "hopper_arrival", "demo"),
        "distributed": files("distributed"),
        "sanitizers": files("consan", "sanitize"),
    }
    rest = [f"--ignore={path}" for paths in passes.values() for path in paths]
    passes["others"] = [str(HERE), *rest]
    passes["blocking"] = [
        *files("matmul", "arrival", "copy_items", "hopper"), "-k",
        "not 2_to_the_31 and not 1_to_132 and (test_error_rule or not test_gpu_hopper)",
    ]  # fmt: skip
    return passes[name]


PASSES = ("hopper", "attention", "alone", "distributed", "sanitizers", "others", "blocking")


def run(name: str, arguments: list[str], target: Path) -> dict[str, object]:
    """A pass, shared by JOBS processes. A process that did not reach its end counts as a failure."""
    begin, jobs = time.monotonic(), _jobs(name)
    sample, end = int(os.environ.get("SAMPLE", "1")), begin + float(os.environ.get("LIMIT", "inf"))
    environment = {**os.environ, "TILESTREAM_PASS": name}
    if name == "blocking":
        environment["CUDA_LAUNCH_BLOCKING"] = "1"
    parts = [target.with_suffix(f".{name}.{job}") for job in range(jobs)]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(part), *arguments],
            env={**environment, "TILESTREAM_SHARE": f"{job}/{jobs * sample}"} | _device_of(job, jobs),
        )
        for job, part in enumerate(parts)
    ]
    statuses = _wait(started, end)
    outcomes: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    for job, (part, status) in enumerate(zip(parts, statuses, strict=True)):
        found = json.loads(part.read_text(encoding="utf-8")) if part.exists() else {}
        part.unlink(missing_ok=True)
        outcomes.update(found.get("outcomes", {}))
        failures += found.get("failures", [])
        if (ended := found.get("status", -1)) not in (0, 1, 5):  # 5: no test fell to this process
            what = "was interrupted" if ended == 2 else f"ended with status {status}"
            failures.append(f"process {job} of {jobs} {what}")
    return {**outcomes, "failures": failures, "seconds": round(time.monotonic() - begin, 1), "sample": sample}


def _jobs(name: str) -> int:
    """How many processes share a pass."""
    import torch

    return {"alone": torch.cuda.device_count(), "distributed": 1}.get(name) or int(os.environ.get("JOBS", "4"))


def _device_of(job: int, jobs: int) -> dict[str, str]:
    """Processes that share a pass take the GPUs in turn; a single process has all GPUs."""
    import torch

    count = torch.cuda.device_count()
    return {"CUDA_VISIBLE_DEVICES": str(job % count)} if jobs > 1 and count > 1 else {}


def _wait(started: list[subprocess.Popen[bytes]], end: float) -> list[int]:
    """Their statuses. At ``end`` the processes that still run are interrupted together, and write what they have."""
    _ended(started, end)
    for signal_, seconds in ((signal.SIGINT, 10.0), (signal.SIGKILL, 10.0)):
        for process in started:
            if process.poll() is None:
                process.send_signal(signal_)
        _ended(started, time.monotonic() + seconds)
    return [process.wait() for process in started]


def _ended(started: list[subprocess.Popen[bytes]], end: float) -> None:
    """Wait for them until ``end``."""
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(None if math.isinf(end) else max(end - time.monotonic(), 0.0))


def main() -> int:
    target, *rest = sys.argv[1:]
    if os.environ.get("TILESTREAM_PASS"):  # one of those processes
        job, jobs = map(int, os.environ["TILESTREAM_SHARE"].split("/"))
        part_of_pass(Path(target), [*arguments_of(os.environ["TILESTREAM_PASS"]), *rest], job, jobs)
        return 0
    split = rest.index("--") if "--" in rest else len(rest)
    names, arguments = rest[:split] or PASSES, rest[split + 1 :]
    unknown = set(names) - set(PASSES)
    if unknown:
        raise SystemExit(f"passes are {', '.join(PASSES)}, not {', '.join(unknown)}; pytest's arguments go behind --")
    import torch
    import triton

    record: dict[str, Any] = {
        "name": "gpu_tests",
        "device": torch.cuda.get_device_name(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    before = json.loads(Path(target).read_text(encoding="utf-8")) if Path(target).exists() else {}
    same = all(before.get(key) == value for key, value in record.items() if key != "date")
    record["passes"] = before["passes"] if same else {}
    for name in names:
        record["passes"][name] = run(name, arguments, Path(target))
        Path(target).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=1))
    return int(any(one["failures"] for one in record["passes"].values()))


if __name__ == "__main__":
    sys.exit(main())
