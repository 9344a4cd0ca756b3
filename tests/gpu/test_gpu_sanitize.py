"""The kernels under compute-sanitizer's tools, each in a process of its own.

Racecheck does not follow two kinds of hand-over, and reports them in whatever kernel has them: `races` says which, and
lets them pass; `handover.py`, a few lines that are right, shows it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_runs import ON_HOPPER

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

from races import races

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
#: What takes longest begins first.
TOOLS = ("racecheck", "memcheck", "synccheck", "initcheck")
#: Processes of a tool: most of what they do is the host's.
SHARES = 6
LIMIT = 540


def sanitized(tool: str, program: str, *arguments: str) -> str:
    """What is said of a program that ran to its end. Everything is printed, so that all of it can be looked at."""
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    paths = os.pathsep.join([os.environ.get("PATH", ""), *(f"{home}/bin" for home in homes if home)])
    if (sanitizer := shutil.which("compute-sanitizer", path=paths)) is None:
        pytest.skip("no compute-sanitizer")
    options = ["--tool", tool, "--print-limit", "100000", "--launch-timeout", "300"]
    command = [sanitizer, *options, sys.executable, str(HERE / program), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    said = run.stdout + run.stderr
    assert "all right" in said, said[-3000:]
    return said


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("tool", TOOLS)
def test_nothing_is_reported(tool, share):
    said = sanitized(tool, "sanitize.py", f"{share}/{SHARES}")
    # How many errors, by the last line of each tool.
    found = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) error)", said)
    summary = [int(errors or hazards) for errors, hazards in found]
    assert summary, f"no summary: {said[-2000:]}"
    if tool == "racecheck":
        unknown, count = races(said)
        assert not unknown, "\n".join(unknown)[:4000]
        assert count == sum(summary), f"{count} of {summary} reports read: {said[-2000:]}"
    else:
        assert not any(summary), said[-4000:]


@pytest.mark.timeout(LIMIT)
def test_racecheck_still_reports_what_is_no_race():
    """If it does not, there is nothing to let pass any more."""
    said = sanitized("racecheck", "handover.py")
    unknown, count = races(said)
    assert count > 0, said[-3000:]
    assert not unknown, "\n".join(unknown)[:4000]
