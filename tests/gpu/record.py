"""Run the GPU tests and write down what ran where: ``python tests/gpu/record.py RECORD.json [PASS ...] [-- ARGS]``.

On a machine with a GPU, from the repository's root, with ``src`` on PYTHONPATH. ARGS go to pytest. Environment
variables: COMMIT names the commit where the tree is a copy without history; JOBS is the number of processes of a pass
(default 4: most of a test's time is the host's); SAMPLE=n runs every n-th test; LIMIT is the most seconds of a pass.
The record notes SAMPLE, and tests that LIMIT cut off.

Passes are ``hopper`` (that kernel's tests), ``attention``, ``alone`` (what waits, or holds every SM: a process a GPU;
JOBS processes compile its kernels first), ``distributed`` (one process, whose ranks take the GPUs), ``faults`` (the
table of tests/fault_table, in one process; writes faults.json, too), ``sanitizers``, ``others``, and ``blocking``: what
arrives again, with CUDA_LAUNCH_BLOCKING=1. Without a name all run. What is already in the record stays if it is of the
same commit, machine and versions: so passes may be run by several commands, where a command's time is limited.

The record of faults lies beside RECORD.json where that is in a folder of its device, else in such a folder beside it.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
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
FILES = {
    "hopper": ("hopper",),
    "attention": ("attention", "hopper_attention"),
    "alone": ("again", "arrival", "arrival_order", "copy_items", "experts", "gate", "demo"),
    "distributed": ("distributed", "repeats", "graph_ranks", "moe_ranks", "invariant_ranks"),
    "faults": ("faults",),
    "sanitizers": ("consan", "sanitize"),
    "others": (),
    "blocking": ("arrival", "copy_items", "gate", "launches"),
}
#: Compiles kernels; and for how many seconds at most, and which tests it leaves out: what runs in other processes.
WARM, WARM_SECONDS = "warm", 90.0
NOT_WARM = "not (multiplies or holds or neighbour or connection or whatever_order or demo)"


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


class Queue:
    """Runs the next test that no process of the pass has begun: ``counter`` is a file with their number.

    Tests that need most of the GPU's memory are the first process's.
    """

    def __init__(self, counter: Path, job: int, sample: int) -> None:
        self.counter, self.job, self.sample = counter, job, sample
        self.large: list[pytest.Item] = []
        self.shared: list[pytest.Item] = []

    def take(self) -> pytest.Item | None:
        if self.large:
            return self.large.pop(0)
        with self.counter.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            at = int(file.read() or "0")
            file.seek(0)
            file.write(str(at + 1))
        return self.shared[at] if at < len(self.shared) else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        import torch

        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        items = [] if session.config.option.collectonly else session.items[:: self.sample]
        large = [item for item in items if "2_to_the_31" in item.nodeid]
        self.shared = [item for item in items if item not in large]
        self.large = large if self.job == 0 else []
        item = self.take()
        while item is not None:
            following = self.take()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # a process whose context is lost ends here, and takes no more tests
            item = None if session.shouldfail or session.shouldstop else following
        return True


class Dry:
    """Launches compile their kernels and do nothing, and answers are right, so that a test goes on to its next."""

    def pytest_configure(self):
        import torch

        import attention_maths
        import error_rule
        from tilestream.launch.launch import Kernel
        from tilestream.launch.launcher import Launcher

        Kernel.__call__ = lambda self, stream, filled: self.load(filled)
        Launcher.__call__ = lambda self, stream, *varying: None
        error_rule.check = lambda answer, maths: answer
        attention_maths.Call.check = lambda self, out, lse: None
        torch.equal = lambda x, y: True


def part_of_pass(name: str, job: str, sample: str, counter: str, part: str, *arguments: str) -> None:
    """What one process of a pass does."""
    counts = Counts(Path(part))
    counts.write(-1)
    plugins = [counts, Queue(Path(counter), int(job), int(sample)), *([Dry()] if name == WARM else [])]
    counts.write(int(pytest.main([*OPTIONS, *arguments_of(name), *arguments], plugins=plugins)))


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or run.stdout.strip()


def arguments_of(name: str) -> list[str]:
    """What of the tests is in a pass."""
    if name == WARM:
        return [*arguments_of("alone"), "-k", NOT_WARM]
    files = {one: [str(HERE / f"test_gpu_{file}.py") for file in files] for one, files in FILES.items()}
    if name == "others":
        passes = [paths for one, paths in files.items() if one != "blocking"]
        return [str(HERE), *(f"--ignore={path}" for paths in passes for path in paths)]
    return files[name]


def run(name: str, arguments: list[str], target: Path) -> dict[str, object]:
    """A pass, shared by JOBS processes. A process that did not reach its end counts as a failure."""
    if name == "alone":
        run(WARM, arguments, target)
    begin, jobs = time.monotonic(), _jobs(name)
    sample, limit = os.environ.get("SAMPLE", "1"), float(os.environ.get("LIMIT", "inf"))
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # all collect the same tests in the same order
    if name == "blocking":
        environment["CUDA_LAUNCH_BLOCKING"] = "1"
    if name == "faults" and sample == "1" and not arguments:  # the whole table
        environment["FAULTS"] = str(faults_folder(target))
    counter, parts = target.with_suffix(f".{name}"), [target.with_suffix(f".{name}.{job}") for job in range(jobs)]
    counter.write_text("", encoding="utf-8")
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--part", name, str(job), sample, str(counter), str(part), *arguments],
            env=environment | _device_of(job, jobs),
        )
        for job, part in enumerate(parts)
    ]
    statuses = _wait(started, begin + (min(limit, WARM_SECONDS) if name == WARM else limit))
    counter.unlink()
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
    return {**outcomes, "failures": failures, "seconds": round(time.monotonic() - begin, 1), "sample": int(sample)}


def faults_folder(target: Path) -> Path:
    """The folder of a machine's records where RECORD.json lies in one of a device, else its own."""
    sys.path.append(str(HERE.parents[1]))
    from benchmarks.core.records import DEVICES

    folder = target.absolute().parent
    return folder.parent if folder.name in DEVICES else folder


def _jobs(name: str) -> int:
    """How many processes share a pass."""
    import torch

    return {"alone": torch.cuda.device_count(), "distributed": 1, "faults": 1}.get(name) or int(
        os.environ.get("JOBS", "4")
    )


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
    if sys.argv[1] == "--part":
        part_of_pass(*sys.argv[2:])
        return 0
    target, *rest = sys.argv[1:]
    split = rest.index("--") if "--" in rest else len(rest)
    names, arguments = rest[:split] or list(FILES), rest[split + 1 :]
    if unknown := set(names) - set(FILES):
        raise SystemExit(f"passes are {', '.join(FILES)}, not {', '.join(unknown)}; pytest's arguments go behind --")
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
