"""The Hopper kernels under compute-sanitizer's tools, all at once, each in a process of its own.

Racecheck does not follow two kinds of hand-over, and reports them in whatever kernel has them; `handover.py`, a few
lines that are right, shows it. One is Triton's own, by which a kernel's first warps tell the others what to run. The
other is ours: a warp stores, ``bar.warp.sync``, one of its lanes arrives at an mbarrier, all who read have waited for
it. In PTX's memory model the first happens before the last. So a read of the one and writes of the other are let pass,
by the lines that they stand in, and no other report. For the words, that is ConSan's to judge, which knows mbarriers
(`test_gpu_consan`: of the GEMM, whose ring is attention's), and `tilestream.verify`'s.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

if not (torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

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


Place = tuple[str, int]
_SIDE = re.compile(r"(Read|Write) access(?:.*? in (\S+\.py):(\d+))?")


class HandOver(NamedTuple):
    """Where racecheck sees a race that is none: who writes, and who reads that (None: whoever does)."""

    reads: frozenset[Place] | None
    writes: frozenset[Place]


def handed_over() -> tuple[HandOver, ...]:
    """The item ring's words; of each kernel, what its first warps tell the others to run."""
    import handover

    from tilestream.kernels.hopper import attention, gemm, ring

    def lines(function: Any) -> list[tuple[Place, str]]:
        text, first = inspect.getsourcelines(function.fn)
        file = Path(inspect.getsourcefile(function.fn) or "").name
        return [((file, first + at), line) for at, line in enumerate(text)]

    def where(function: Any, text: str, before: int = 0) -> frozenset[Place]:
        return frozenset((file, at - back) for (file, at), line in lines(function) if text in line
                         for back in range(before + 1))  # fmt: skip

    # The words are written nowhere else, and read wherever the compiler has moved a read to.
    found = [HandOver(None, where(ring.put, ".store("))]
    for entry in (gemm.gemm, attention.attend, handover.handed):
        head = frozenset(at for at, line in lines(entry) if line.startswith("def "))
        found.append(HandOver(head, head | where(entry, "gl.warp_specialize(", 1)))  # or the branch that it is alone in
    return tuple(found)


def races(said: str) -> tuple[list[str], int]:
    """Racecheck's reports that are none of `handed_over`, and how many there are in all."""
    reports = re.findall(r"Race reported between .*?\n=+ *\n", said, re.S)
    known = handed_over()
    return [one for one in reports if not any(_is(one, of) for of in known)], len(reports)


def _is(report: str, of: HandOver) -> bool:
    """A read and the writes before or behind it, or the other way round, all of them where ``of`` says."""
    (first, *place), *others = _SIDE.findall(report)
    kinds = {kind for kind, *_ in others}
    return kinds == {"Write" if first == "Read" else "Read"} and all(
        file and ((places := of.reads if kind == "Read" else of.writes) is None or (file, int(line)) in places)
        for kind, file, line in ((first, *place), *others)
    )


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
