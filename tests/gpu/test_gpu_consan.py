"""The Hopper kernels' use of shared memory and barriers under ConSan, Triton's concurrency sanitizer; and bugs seeded.

A sanitized kernel takes a minute or two to compile, and a launch that fails takes its process with it: so each is a
process of its own. They compile at once where tests run at once, as those of a pass of `record` do.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from gpu_runs import ON_HOPPER

if not ON_HOPPER:
    pytest.skip("needs a Hopper GPU", allow_module_level=True)

import consan_attention
import consan_grouped
import consan_portable
import consan_program

from mutants.sanitized import ATTENTION, CONVERT, GEMM, GROUPED

pytestmark = pytest.mark.slow

LIMIT = 420


def variant_of(bug: str) -> str:
    """The attention that a bug is seeded into: one whose values are converted, where it is in that."""
    return "attention in 8 bits" if ATTENTION.bugs[bug].edits[0].module == CONVERT else "attention"


#: The variant that a bug is seeded into: where it can be one at all, the one that compiles fastest.
SEEDED = [("paired" if bug.startswith("a pair") else "single", bug) for bug in GEMM.bugs]
SEEDED += [(variant, "no wait for an empty stage") for variant in ("cooperative", "paired")]
SEEDED += [*(("grouped", bug) for bug in GROUPED.bugs), *((variant_of(bug), bug) for bug in ATTENTION.bugs)]
#: The programs with their cases; those that take longest to compile begin first.
PROGRAMS = (consan_program, consan_grouped, consan_attention, consan_portable)
CASES = {name: module for module in PROGRAMS for name in module.CASES}


def program(variant: str, *bug: str) -> tuple[int, str]:
    """The status of a launch, and what was said of it."""
    environment = {**os.environ, "TRITON_INSTRUMENTATION_MODE": "consan", "CUDA_LAUNCH_BLOCKING": "1"}
    command = [sys.executable, str(CASES[variant].__file__), variant, *bug]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False)
    return run.returncode, run.stdout + run.stderr


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize("variant", CASES)
def test_clean(variant):
    status, said = program(variant)
    assert status == 0, said[-3000:]
    assert "clean" in said
    assert "Assertion" not in said


@pytest.mark.timeout(LIMIT + 60)
@pytest.mark.parametrize(("variant", "bug"), SEEDED)
def test_a_seeded_bug_is_reported(variant, bug):
    status, said = program(variant, bug)
    assert status != 0, f"not found: {said[-2000:]}"
    of = {consan_attention: ATTENTION, consan_grouped: GROUPED}.get(CASES[variant], GEMM)
    assert any(words in said for words in of.bugs[bug].found), said[-3000:]
