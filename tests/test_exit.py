"""Nobody is inside torch when the interpreter exits: each of these once ended in SIGABRT."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = {
    "a tensor that is being copied": "s = ts.stream_in(torch.randn(20000, 2000))",
    "an iterator at work": """
def blocks():
    while True:
        yield torch.randn(100, 2000)
s = ts.stream_in(blocks(), shape=(100000, 2000), dtype=torch.float32)
""",
    "an iterator that is blocked": """
def blocks():
    threading.Event().wait()
    yield
s = ts.stream_in(blocks(), shape=(100, 20), dtype=torch.float32)
""",
    "workers of a daemon thread's call": """
a = torch.randn(2000, 2000)
threading.Thread(target=lambda: [ts.matmul(a, a, workers=2) for _ in range(1000)], daemon=True).start()
time.sleep(0.3)
""",
    "workers that wait": """
arrival = ts.Arrival.uniform(10, 2)
a = torch.randn(20, 20)
threading.Thread(target=lambda: ts.matmul(a, a, arrival=arrival), daemon=True).start()
time.sleep(0.3)
""",
}


def run_of(program: str, first: str = "") -> subprocess.CompletedProcess[str]:
    """A process of its own that runs it; ``first`` before anything is imported."""
    paths = [str(Path(__file__).parent.parent / "src"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", f"{first}\nimport threading, time, torch, tilestream as ts\n{program}"],
        capture_output=True,
        text=True,
        timeout=850,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_interpreter_exits_in_order(program: str) -> None:
    run = run_of(PROGRAMS[program])
    assert run.returncode == 0, run.stderr


def test_a_daemon_thread_goes_no_further() -> None:
    # Not into its caller's code either, where torch may free what it has returned. It would have the time: what is
    # registered first is called last.
    first = "import atexit, time; atexit.register(time.sleep, 0.5)"
    program = """
a = torch.randn(500, 500)
def work():
    try:
        while True:
            ts.matmul(a, a, workers=2)
    finally:
        print("went on", flush=True)
threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""
    run = run_of(program, first)
    assert run.returncode == 0, run.stderr
    assert (run.stdout, run.stderr) == ("", "")
