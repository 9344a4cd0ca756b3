import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tilestream_tools import verify as checker
from tilestream_tools.verify import report as reports

VIOLATION = checker.Violation(
    "deadlock", "worker 0 waits for worker 1", "static, 2 workers", ("worker 0: Poll", "worker 1: Poll")
)


@pytest.fixture
def small(monkeypatch):
    """The sweep's first three configurations of each model."""
    every = reports.configurations
    monkeypatch.setattr(reports, "configurations", lambda model, level: every(model, level)[:3])


def fake_run(monkeypatch, *results):
    asked = {}

    def run(level, progress, *, models, jobs):
        asked.update(level=level, models=tuple(models), jobs=jobs)
        for done, result in enumerate(results, 1):
            progress(result, done, len(results))
        return checker.Report(level, results, 1.0)

    monkeypatch.setattr(checker, "run", run)
    return asked


def test_a_sweep_that_holds(cli, small):
    result = cli("verify", "--quick", "--jobs", 1)
    assert result.exit_code == 0, result.output
    for word in (*checker.MODELS, "every property holds", "quick: "):
        assert word in result.stdout


def test_several_processes(cli, small):
    result = cli("verify", "--quick", "--jobs", 2, "--model", "workers")
    assert result.exit_code == 0, result.output
    assert "ring" not in result.stdout


def test_its_help_names_every_model(cli):
    said = cli("verify", "--help").stdout
    assert not [model for model in checker.MODELS if model not in said]


def test_options_are_handed_on(cli, monkeypatch):
    asked = fake_run(monkeypatch, checker.Result("ring", "a ring", 5, 0.1))
    assert cli("verify", "--jobs", 3, "--model", "ring").exit_code == 0
    assert asked == {"level": "full", "models": ("ring",), "jobs": 3}
    assert cli("verify", "--quick").exit_code == 0
    assert asked["level"] == "quick"
    assert asked["models"] == checker.MODELS
    assert asked["jobs"] >= 1


def test_a_violation_is_printed_with_its_counterexample_and_status_1(cli, monkeypatch):
    fake_run(
        monkeypatch,
        checker.Result("ring", "a ring", 5, 0.1),
        checker.Result("workers", "static, 2 workers", 9, 0.1, VIOLATION),
    )
    result = cli("verify")
    assert result.exit_code == 1
    assert str(VIOLATION) in result.stdout
    assert "NO" in result.stdout
    assert result.stderr == "tilestream: a property does not hold\n"


@pytest.mark.parametrize(("options", "says"), [(("--quick", "--model", "cake"), "cake"), (("--jobs", 0), "jobs")])
def test_an_unknown_model_and_no_process_are_status_2(cli, options, says):
    result = cli("verify", *options)
    assert (result.exit_code, says in result.stderr) == (2, True)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")
@pytest.mark.parametrize("to", ["the terminal's processes", "the command"])
def test_ctrl_c_ends_it_and_leaves_no_process(to):
    """Within a minute, or ten times what this machine takes to start it; a full sweep takes several."""
    # A process of a shell's background ignores Ctrl-C, and so would its children.
    text = (
        "import signal as s; s.signal(s.SIGINT, s.default_int_handler); from tilestream_tools.cli.app import app; app()"
    )
    command = [sys.executable, "-c", text, "verify", "--jobs", "2"]
    began = time.monotonic()
    run = subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        while sum("spawn_main" in line for line in processes_of(run.pid)) < 2:
            assert run.poll() is None
            time.sleep(0.05)
        (os.kill if to == "the command" else os.killpg)(run.pid, signal.SIGINT)
        patience = max(60.0, 10 * (time.monotonic() - began))
        end = time.monotonic() + patience
        out, err = run.communicate(timeout=patience)
        assert (run.returncode, err) == (130, ""), out
        # Those that were killed, and multiprocessing's own, end soon; those of the sweep would take minutes.
        while processes_of(run.pid):
            assert time.monotonic() < end, processes_of(run.pid)
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def processes_of(session: int) -> list[str]:
    """The command lines of a session's processes."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, *fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[2]) == session and state != "Z":
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found
