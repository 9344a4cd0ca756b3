"""Torch's own tests of async TP, as they are, and again with `tilestream.distributed.async_tp` open.

    PYTHONPATH=src python tests/gpu/torch_own_tests.py FOLDER RECORD.json [--only TEXT] [--seconds 540]

FOLDER holds ``test_symmetric_memory.py`` and ``test_micro_pipeline_tp.py`` of the installed torch's version, anywhere
below it, as a checkout of torch does; its wheel has no tests. COMMIT names the commit where the tree is a copy without
its history. The record has each test's outcome in both runs, and how many calls were made by the ops of this package.

The exit status is 0 if no test fails with the handle, one passes, and the handle has replaced calls: where all tests of
several ranks are skipped, because there is one GPU, those of the compiler's pass decide. Tests run in processes of
their own, because torch skips the rest of a class behind a failure: those are run again. A test without an end is
killed, and has failed. Multicast stays off: tests of it are left out, as the record says.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: Torch's files and their classes of async TP; other classes are of symmetric memory itself, which nothing replaces.
FILES = {
    "test_symmetric_memory": ("AsyncTPTest",),
    "test_micro_pipeline_tp": ("MicroPipelineTPTest", "MicroPipelineTP4GPUTest"),
}
#: What the processes are told: the folder, whether the handle is open, and where they write what they see.
FOLDER, OPEN, LOG = "TORCH_OWN_TESTS", "TORCH_OWN_TESTS_OPEN", "TORCH_OWN_TESTS_LOG"
#: No NVLink multicast, by torch's symmetric memory or by NCCL.
QUIET = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0"}
#: Seconds without an outcome after which a process is killed: a compiled test takes 20.
SILENT = 150.0
#: By which torch's tests say that they were not run, because another one failed.
POISONED = "Previous test failed"


class LeftOut(NamedTuple):
    """Tests that are not run: a pattern of their names, why, and whether they run without the handle."""

    pattern: str
    why: str
    runs_without: bool


LEFT_OUT = (
    LeftOut("multimem|multicast|nvls", "it uses NVLink multicast, which stays off", False),
    LeftOut(
        r"test_fused_all_gather_matmul_native(?!_graph)",
        "it looks for torch's own kernel in a profile, which the handle replaces; test_gpu_distributed.py has its "
        "answers",
        True,
    ),
)


def left_out(test: str, is_open: bool) -> str:
    """Why a test is not run; empty if it is."""
    return next(
        (one.why for one in LEFT_OUT if re.search(one.pattern, test, re.IGNORECASE)
         and (is_open or not one.runs_without)), "",
    )  # fmt: skip


# In the processes that run torch's tests ------------------------------------------------------------------------------


def note(**seen: Any) -> None:
    """Append a line to the log: of any process, so in one write."""
    handle = os.open(os.environ[LOG], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(handle, f"{json.dumps(seen)}\n".encode())
    finally:
        os.close(handle)


@contextlib.contextmanager
def opened(test: str) -> Iterator[None]:
    """The handle for the default group, if this run has it; its calls are noted."""
    if os.environ[OPEN] != "1":
        yield
        return
    from tilestream.distributed import async_tp

    with async_tp() as handle:
        try:
            yield
        finally:
            note(test=test, calls={str(site.op): site.calls for site in handle.report() if not site.left})


class WithHandle:
    """Mixed into torch's classes. Their tests run in a rank's process, or, with a fake group, in the first one."""

    _opened: contextlib.ExitStack | None = None

    @classmethod
    def _run_test_given_id(cls, test_id: str, **more: Any) -> None:
        with opened(test_id.rpartition(".")[2]):
            super()._run_test_given_id(test_id, **more)  # type: ignore[misc]

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        import torch.distributed as dist

        if dist.is_initialized():
            self._opened = contextlib.ExitStack()
            self._opened.enter_context(opened(self._testMethodName))  # type: ignore[attr-defined]

    def tearDown(self) -> None:
        if self._opened is not None:
            self._opened.close()
        super().tearDown()  # type: ignore[misc]


def found_in(folder: Path) -> dict[str, Path]:
    """Torch's files.

    Raises
    ------
    FileNotFoundError
        If one of them is not there, or is there twice.
    """
    files = {}
    for name in FILES:
        there = sorted(folder.rglob(f"{name}.py"))
        if len(there) != 1:
            raise FileNotFoundError(
                f"{name}.py: {len(there)} files below {folder}; it is in torch's source, below test/distributed"
            )
        files[name] = there[0]
    return files


def classes(folder: Path) -> dict[str, type]:
    """Torch's classes with `WithHandle`, as classes of this module: ranks are spawned, and import it."""
    import importlib

    made = {}
    for name, path in found_in(folder).items():
        if str(path.parent) not in sys.path:
            sys.path.append(str(path.parent))
        module = importlib.import_module(name)
        for one in FILES[name]:
            if (of := getattr(module, one, None)) is not None:
                made[one] = type(one, (WithHandle, of), {"__module__": __name__, "__qualname__": one})
    return made


class Outcomes(unittest.TestResult):
    """Notes each outcome as it comes."""

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        note(test=_name(test), began=True)

    def addSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        note(test=_name(test), outcome="passed", why="")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        note(test=_name(test), outcome="poisoned" if reason.startswith(POISONED) else "skipped", why=reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        note(test=_name(test), outcome="failed", why=self.failures[-1][1][-3000:])

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        note(test=_name(test), outcome="failed", why=self.errors[-1][1][-3000:])


def _name(test: Any) -> str:
    """``Class.test``; of what is no test, as a class that cannot be set up, what unittest says."""
    return f"{type(test).__name__}.{test._testMethodName}" if isinstance(test, unittest.TestCase) else str(test)


def tell_tests() -> None:
    """Note the tests of all classes."""
    for name, of in classes(Path(os.environ[FOLDER])).items():
        note(tests=[f"{name}.{test}" for test in unittest.defaultTestLoader.getTestCaseNames(of)])


def run_tests(names: list[str]) -> None:
    """Run tests of one class."""
    of = getattr(sys.modules[__name__], names[0].partition(".")[0])
    unittest.TestSuite(of(name.partition(".")[2]) for name in names).run(Outcomes())


# In the first process -------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What a process noted."""

    tests: list[str]
    outcomes: dict[str, tuple[str, str]]
    calls: collections.Counter[str]
    began: list[str]


def read(log: Path) -> Seen:
    """Of each test the last outcome, and the calls of our ops on all ranks."""
    seen = Seen([], {}, collections.Counter(), [])
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else ():
        one = json.loads(line)
        seen.tests.extend(one.get("tests", ()))
        if "began" in one:
            seen.began.append(one["test"])
        if "outcome" in one:
            seen.outcomes[one["test"]] = one["outcome"], one["why"]
        if "calls" in one:
            seen.calls[one["test"]] += sum(one["calls"].values())
    return seen


def process(folder: Path, is_open: bool, code: str, names: list[str], end: float) -> tuple[Seen, str]:
    """Run a function of this module in a process; what it noted, and why it ended early."""
    with tempfile.TemporaryDirectory() as place:
        log, said = Path(place, "log"), Path(place, "said")
        paths = os.pathsep.join([str(HERE), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        told = {FOLDER: str(folder), OPEN: str(int(is_open)), LOG: str(log), "PYTHONPATH": paths}
        with said.open("wb") as output:
            command = [sys.executable, "-c", f"import torch_own_tests as t, sys; {code}", *names]
            child = subprocess.Popen(
                command, env=os.environ | QUIET | told, stdout=output, stderr=output, start_new_session=True
            )
        why, size, changed = "", -1, time.monotonic()
        while child.poll() is None and not why:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.5)
            now, before = time.monotonic(), size
            size = log.stat().st_size if log.exists() else -1
            changed = now if size != before else changed
            if now > end:
                why = "the time is over"
            elif now - changed > SILENT:
                why = f"no end in {SILENT:.0f} s"
        with contextlib.suppress(ProcessLookupError):  # its ranks, too, which outlive it where it is killed
            os.killpg(child.pid, signal.SIGKILL)
        code_of = child.wait()
        last = said.read_text(errors="replace")[-1500:]
        return read(log), why or (f"the process ended with {code_of}: {last}" if code_of else "")


Run = Callable[[list[str]], tuple[Seen, str]]


def all_of(names: list[str], run: Run) -> tuple[dict[str, tuple[str, str]], collections.Counter[str]]:
    """Outcomes of the tests of one class, and the calls; what was not run is run again while some are.

    A test in which its process ended, or was killed, has failed; the time being over, it was not run.
    """
    found: dict[str, tuple[str, str]] = {}
    calls: collections.Counter[str] = collections.Counter()
    left = list(names)
    while left:
        seen, why = run(left)
        calls += seen.calls
        done = {name: one for name, one in seen.outcomes.items() if name in left and one[0] != "poisoned"}
        over = why == "the time is over"
        within = [name for name in seen.began if name not in seen.outcomes]
        done |= dict.fromkeys(within, ("not run" if over else "failed", why or "it has no outcome"))
        found |= done
        left = [name for name in left if name not in found]
        if not done or over:
            said = why or "; ".join(f"{name}: {one[1]}" for name, one in seen.outcomes.items()) or "nothing was noted"
            found |= dict.fromkeys(left, ("not run" if over else "failed", said))
            break
    return found, calls


def verdict(rows: list[dict[str, Any]], calls: int) -> list[str]:
    """What keeps the run from being green; nothing if it is."""
    wrong = []
    if bad := [row["test"] for row in rows if row["with"] in ("failed", "not run")]:
        wrong.append(f"with the handle {len(bad)} tests fail or are not run: {', '.join(bad)}")
    if lost := [row["test"] for row in rows if row["without"] == "passed" and row["with"] == "skipped"]:
        wrong.append(f"{len(lost)} tests that pass without the handle are skipped with it: {', '.join(lost)}")
    if not any(row["with"] == "passed" for row in rows):
        wrong.append("with the handle no test passes")
    if not calls:
        wrong.append("the handle replaced nothing: no op of this package was called")
    return wrong


def record_of(folder: Path, only: str, end: float) -> dict[str, Any]:
    """Run all tests without and with the handle."""
    sys.path.insert(0, str(ROOT))
    import torch
    from benchmarks.core.records import about

    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found_in(folder).values()}
    listed, why = process(folder, False, "t.tell_tests()", [], end)
    if why or not listed.tests:
        raise RuntimeError(f"torch's tests cannot be imported: {why or 'there are none'}")
    tests = [name for name in listed.tests if only in name]
    results: dict[bool, dict[str, tuple[str, str]]] = {False: {}, True: {}}
    calls: collections.Counter[str] = collections.Counter()
    for is_open in results:
        for of in dict.fromkeys(name.partition(".")[0] for name in tests):
            names = [name for name in tests if name.startswith(f"{of}.") and not left_out(name, is_open)]

            def run(some: list[str], is_open: bool = is_open) -> tuple[Seen, str]:
                return process(folder, is_open, "t.run_tests(sys.argv[1:])", some, end)

            found, made = all_of(names, run)
            results[is_open] |= found
            calls += made
            print(of, "with the handle" if is_open else "without", collections.Counter(o for o, _ in found.values()))
    rows = []
    for name in tests:
        (without, theirs), (with_, ours) = (
            results[is_open].get(name, ("left out", left_out(name, is_open))) for is_open in results
        )
        said = {key: why for key, why in (("why_without", theirs), ("why_with", ours)) if why}
        rows.append({"test": name, "without": without, "with": with_, "calls": calls[name.partition(".")[2]], **said})
    total = sum(row["calls"] for row in rows)
    counts = {key: dict(collections.Counter(row[key] for row in rows)) for key in ("without", "with")}
    wrong = verdict(rows, total)
    return {
        **about("torch_own_tests"), "gpus": torch.cuda.device_count(), "files": sums, "counts": counts, "calls": total,
        "failed": {key: [row["test"] for row in rows if row[key] == "failed"] for key in ("without", "with")},
        "left_out": {row["test"]: row["why_with"] for row in rows if row["with"] == "left out"},
        "green": not wrong, "wrong": wrong, "rows": rows,
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    """Run, and write the record; 0 if it is green."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("--only", default="", help="tests whose names (Class.test) have this in them")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all; tests that are not run are not green")
    given = parser.parse_args(arguments)
    made = record_of(given.folder.resolve(), given.only, time.monotonic() + given.seconds)
    given.record.parent.mkdir(parents=True, exist_ok=True)
    from benchmarks.core.records import text_of

    given.record.write_text(text_of(made), encoding="utf-8")
    print(json.dumps({key: made[key] for key in ("counts", "calls", "failed", "left_out", "green", "wrong")}, indent=1))
    return 0 if made["green"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
elif FOLDER in os.environ:
    globals().update(classes(Path(os.environ[FOLDER])))
