"""The Hopper kernels under compute-sanitizer's tools, all at once, each in a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

if not (torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "sanitize.py"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
LIMIT = 540
Run = subprocess.CompletedProcess[str]


def sanitizer() -> str | None:
    """The program, on PATH or where CUDA lies."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    paths = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)])
    return shutil.which("compute-sanitizer", path=paths)


def sanitized(program: str, tool: str) -> Run:
    command = [program, "--tool", tool, "--launch-timeout", "300", sys.executable, str(PROGRAM)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.fixture(scope="module")
def runs(request) -> Iterator[dict[str, Future[Run]]]:
    program = sanitizer()
    if program is None:
        pytest.skip("no compute-sanitizer")
    wanted = [item.callspec.params["tool"] for item in request.session.items if item.path == request.path]
    with ThreadPoolExecutor(len(TOOLS)) as pool:
        yield {tool: pool.submit(sanitized, program, tool) for tool in wanted}


def summary(said: str) -> list[int]:
    """How many errors, and of racecheck hazards, by the last line of each tool."""
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", said)
    return [int(errors or hazards) for errors, hazards in found]


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_reported(runs, tool):
    run = runs[tool].result()
    said = run.stdout + run.stderr
    assert "all right" in said, said[-3000:]
    assert summary(said), f"no summary: {said[-2000:]}"
    assert not any(summary(said)), said[-4000:]
