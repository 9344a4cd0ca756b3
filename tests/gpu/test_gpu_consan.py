"""The Hopper kernels' use of shared memory and barriers under ConSan, Triton's concurrency sanitizer; and bugs seeded.

A sanitized kernel takes a minute or two to compile, and a launch that fails takes its process with it: so each is a
process of its own, and all that are asked for compile at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

if not (torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)):
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

import consan_attention
import consan_program

from mutants.sanitized import ATTENTION, CONVERT, GEMM

pytestmark = pytest.mark.slow

LIMIT = 420


def variant_of(bug: str) -> str:
    """The attention that a bug is seeded into: one whose values are converted, where it is in that."""
    return "attention in 8 bits" if ATTENTION.bugs[bug].edits[0].module == CONVERT else "attention"


#: The variant that a bug is seeded into: where it can be one at all, the one that compiles fastest.
SEEDED = [("single", bug) for bug in GEMM.bugs]
SEEDED += [("cooperative", "no wait for an empty stage"), *((variant_of(bug), bug) for bug in ATTENTION.bugs)]

Run = subprocess.CompletedProcess[str]


def program(variant: str, bug: str = "") -> Run:
    environment = {**os.environ, "TRITON_INSTRUMENTATION_MODE": "consan", "CUDA_LAUNCH_BLOCKING": "1"}
    file = "consan_attention.py" if variant in consan_attention.CASES else "consan_program.py"
    command = [sys.executable, str(Path(__file__).parent / file), variant, *([bug] if bug else [])]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)


@pytest.fixture(scope="module")
def runs(request) -> Iterator[dict[tuple[str, ...], Future[Run]]]:
    """Those that the tests of this run want, under way."""
    wanted = [
        tuple(item.callspec.params.get(key, "") for key in ("variant", "bug"))
        for item in request.session.items
        if item.path == request.path
    ]
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 16))
    yield {one: pool.submit(program, *one) for one in wanted}
    pool.shutdown(wait=False, cancel_futures=True)  # whoever interrupts a run does not wait for the rest of it


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("variant", [*consan_program.CASES, *consan_attention.CASES])
def test_clean(runs, variant):
    found = runs[variant, ""].result()
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]
    assert "clean" in found.stdout
    assert "Assertion" not in found.stderr


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(("variant", "bug"), SEEDED)
def test_a_seeded_bug_is_reported(runs, variant, bug):
    found = runs[variant, bug].result()
    said = found.stdout + found.stderr
    assert found.returncode != 0, f"not found: {said[-2000:]}"
    of = ATTENTION if variant in consan_attention.CASES else GEMM
    assert any(words in said for words in of.bugs[bug].found), said[-3000:]
