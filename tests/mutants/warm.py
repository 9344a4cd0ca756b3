"""A process that has imported what takes seconds (torch, Triton, pytest), and forks for each run of tests.

    python -m mutants.warm          # requests on stdin, answers on stdout: one line of JSON each

A request is the arguments of `run`. The child puts ``source`` in front of sys.path and of PYTHONPATH, so that it and
the processes that its tests start import the package from there; the server itself has never imported it. `Warm` starts
a server and talks to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

TESTS = Path(__file__).parents[1]
_QUIET = ("-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow and not gpu", "--tb=no")


class Outcome(NamedTuple):
    """How a run ended: pytest's status, -1 if it ran out of time; the test that failed first; what was printed."""

    status: int
    by: str
    output: str


class Watch:
    """Writes down which test runs, and which failed first; chooses the tests as `run` says."""

    def __init__(self, path: Path, only: Sequence[str], cases: int) -> None:
        self.path, self.only, self.cases, self.failed = path, {name: at for at, name in enumerate(only)}, cases, False

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        if self.only:
            chosen = [one for one in items if _node(one.nodeid) in self.only]
            config.hook.pytest_deselected(items=[one for one in items if _node(one.nodeid) not in self.only])
            items[:] = sorted(chosen, key=lambda one: self.only[_node(one.nodeid)])
        if self.cases:
            of_function = defaultdict(list)
            for at, one in enumerate(items):
                of_function[one.nodeid.partition("[")[0]].append(at)
            # Evenly: the first cases of a test are often much alike.
            kept = {at for all_of in of_function.values() for at in all_of[:: max(1, -(-len(all_of) // self.cases))]}
            items[:] = [one for at, one in enumerate(items) if at in kept]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._note(report.nodeid, failed=True)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        if not self.failed:
            self._note(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._note(report.nodeid, failed=True)

    def _note(self, nodeid: str, failed: bool = False) -> None:
        if not self.failed:
            self.path.write_text(_node(nodeid), encoding="utf-8")
            self.failed = failed


class Reach:
    """Writes down, for each test, its seconds and which functions under ``source`` ran in its process."""

    def __init__(self, path: Path, source: str) -> None:
        self.path, self.source = path, source.rstrip("/") + "/"
        self.names: dict[str, int] = {}
        self.tests: dict[str, tuple[float, list[int]]] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        self.met: dict[int, Any] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        met = self.met = {}

        def note(frame: Any, event: str, argument: Any) -> None:
            code = frame.f_code
            met[id(code)] = code  # a code's hash is slow

        threading.settrace(note)
        sys.settrace(note)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] += report.duration

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        found = {
            f"{code.co_filename[len(self.source) : -3].replace('/', '.')}:{code.co_qualname.replace('.<locals>', '')}"
            for code in list(self.met.values())
            if code.co_filename.startswith(self.source)
        }
        numbers = sorted(self.names.setdefault(name, len(self.names)) for name in found)
        self.tests[_node(nodeid)] = round(self.seconds[nodeid], 3), numbers

    def pytest_sessionfinish(self) -> None:
        self.path.write_text(json.dumps({"names": list(self.names), "tests": self.tests}), encoding="utf-8")


def _node(nodeid: str) -> str:
    return nodeid.removeprefix("tests/")


def run(
    source: str, tests: list[str], only: list[str], cpu: int, seconds: float, cases: int, reach: str
) -> dict[str, Any]:  # fmt: skip
    """Fork, and run tests until the first fails.

    Parameters
    ----------
    source
        The folder that the package is imported from.
    tests, only
        Arguments of pytest, from `TESTS`; the tests among them that run, or all of them if there is none.
    cpu, seconds
        CPU seconds of each process of the run; seconds of the run.
    cases
        Cases of each test function at most; 0: all.
    reach
        Where to write what ran (`Reach`), or "": then every test runs.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-run-") as folder:
        output, at = Path(folder) / "output", Path(folder) / "test"
        child = os.fork()
        if child == 0:
            _child(source, tests, Watch(at, only, cases), cpu, reach, output)
        status = _wait(child, seconds)
        read = (path.read_text(encoding="utf-8", errors="replace") if path.exists() else "" for path in (output, at))
        text, by = read
    return {"status": -1 if status in (-signal.SIGXCPU, -signal.SIGKILL) else status, "by": by, "output": text[-4000:]}


def _child(source: str, tests: list[str], watch: Watch, cpu: int, reach: str, output: Path) -> None:
    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 10))
        file = os.open(output, os.O_CREAT | os.O_WRONLY, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        sys.path.insert(0, source)
        os.environ["PYTHONPATH"] = source
        import pytest

        stop = () if reach else ("-x",)
        plugins = [watch, *([Reach(Path(reach), source)] if reach else [])]
        status = int(pytest.main([*_QUIET, *stop, "--timeout", str(max(cpu, 100)), *tests], plugins=plugins))
    finally:
        sys.stdout.flush()
        os._exit(status)


def _wait(child: int, seconds: float) -> int:
    """The child's status; it and what it has started are ended."""
    end, pause = time.monotonic() + seconds, 0.005
    status = None
    try:
        while status is None and time.monotonic() < end:
            time.sleep(pause)
            pause = min(0.1, 1.2 * pause)
            done, found = os.waitpid(child, os.WNOHANG)
            status = os.waitstatus_to_exitcode(found) if done else None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        if status is None:
            os.waitpid(child, 0)
    return -signal.SIGKILL if status is None else status


class Warm:
    """A server of this module, in a session of its own; ``interpreted``: with Triton's interpreter."""

    def __init__(self, interpreted: bool) -> None:
        left_out = ("PYTHONPATH", "TRITON_INTERPRET", "PYTHONDONTWRITEBYTECODE")  # tests are compiled once
        environment = {name: value for name, value in os.environ.items() if name not in left_out}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mutants.warm"], cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment | ({"TRITON_INTERPRET": "1"} if interpreted else {}), text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, source: Path, tests: Sequence[str], only: Sequence[str] = (), *, cpu: int, seconds: float,
            cases: int = 0, reach: str = "") -> Outcome:  # fmt: skip
        """See `run`."""
        request = {"source": str(source), "tests": list(tests), "only": list(only), "cpu": cpu, "seconds": seconds,
                   "cases": cases, "reach": reach}  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the server of the test runs ended: {self._process.wait()}")
        return Outcome(**json.loads(line))

    def close(self) -> None:
        """End it and what it runs: SIGTERM reaches the run by `_serve`."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.kill()
        self._process.wait()


def _serve() -> None:
    import hypothesis  # noqa: F401
    import pytest
    import torch.distributed
    import torch.library  # noqa: F401

    with contextlib.suppress(ImportError):
        import triton.experimental.gluon  # noqa: F401
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    with (
        Path(os.devnull).open("w") as nothing,
        contextlib.redirect_stdout(nothing),
        contextlib.redirect_stderr(nothing),
    ):
        pytest.main(["--version"])  # imports the plugins
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
