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


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_interpreter_exits_in_order(program: str) -> None:
    source = "import threading, time, torch, tilestream as ts\n" + PROGRAMS[program]
    paths = [str(Path(__file__).parent.parent / "src"), os.environ.get("PYTHONPATH", "")]
    run = subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert run.returncode == 0, run.stderr
