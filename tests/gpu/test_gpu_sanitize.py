"""The Hopper kernels under compute-sanitizer's tools, all at once, each in a process of its own.

Racecheck does not follow two kinds of hand-over, and reports them in whatever kernel has them: `races` says which, and
lets them pass; `handover.py`, a few lines that are right, shows it.
"""

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

from races import races

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "sanitize.py"
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
#: Processes of a tool: most of what they do is the host's.
SHARES = 3
LIMIT = 540
Run = subprocess.CompletedProcess[str]


def sanitizer() -> str | None:
    """The program, on PATH or where CUDA lies."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    paths = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)])
    return shutil.which("compute-sanitizer", path=paths)


def sanitized(program: str, tool: str, share: int) -> Run:
    of = f"{share}/{SHARES}"
    return subprocess.run(
        [*command(program, tool), str(PROGRAM), of], capture_output=True, text=True, timeout=LIMIT, check=False
    )


def command(program: str, tool: str) -> list[str]:
    """Everything is printed, so that all of it can be looked at."""
    return [program, "--tool", tool, "--print-limit", "100000", "--launch-timeout", "300", sys.executable]


@pytest.fixture(scope="module")
def runs(request) -> Iterator[dict[tuple[str, int], Future[Run]]]:
    program = sanitizer()
    if program is None:
        pytest.skip("no compute-sanitizer")
    wanted = [
        (item.callspec.params["tool"], item.callspec.params["share"])
        for item in request.session.items
        if item.path == request.path and "tool" in item.fixturenames
    ]
    pool = ThreadPoolExecutor(len(TOOLS) * SHARES)
    yield {one: pool.submit(sanitized, program, *one) for one in wanted}
    pool.shutdown(wait=False, cancel_futures=True)  # whoever interrupts a run does not wait for the rest of it


def summary(said: str) -> list[int]:
    """How many errors, by the last line of each tool."""
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) error)", said)
    return [int(errors or hazards) for errors, hazards in found]


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_reported(runs, tool, share):
    run = runs[tool, share].result()
    said = run.stdout + run.stderr
    assert "all right" in said, said[-3000:]
    assert summary(said), f"no summary: {said[-2000:]}"
    if tool == "racecheck":
        unknown, count = races(said)
        assert not unknown, "\n".join(unknown)[:4000]
        assert count == sum(summary(said)), f"{count} of {summary(said)} reports read: {said[-2000:]}"
    else:
        assert not any(summary(said)), said[-4000:]


@pytest.mark.timeout(LIMIT)
def test_racecheck_still_reports_what_is_no_race():
    """If it does not, there is nothing to let pass any more."""
    if (program := sanitizer()) is None:
        pytest.skip("no compute-sanitizer")
    script = [*command(program, "racecheck"), str(PROGRAM.with_name("handover.py"))]
    said = subprocess.run(script, capture_output=True, text=True, timeout=LIMIT, check=False).stdout
    assert "all right" in said, said[-3000:]
    unknown, count = races(said)
    assert count > 0, said[-3000:]
    assert not unknown, "\n".join(unknown)[:4000]
