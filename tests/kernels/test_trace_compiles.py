"""The compile gate of the trace (`trace_gate.py`): the same machine code where it is off, hardly a spill where on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tritons import triton

GATE = Path(__file__).parent / "trace_gate.py"


def compiled(python: str, what: str, cache: Path, seconds: int) -> list[dict]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    run = subprocess.run(
        [python, str(GATE), what], env={**kept, "TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"},
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def check(found: list[dict], least: int) -> None:
    assert len(found) >= least
    for one in found:
        assert one["same"], f"{one['name']}: what a trace needs is in a kernel without one"
        off, on = one["times"]
        assert off == 0 < on, f"{one['name']}: looks at the clock {off} times without a trace, {on} with one"
        # With all that an epilogue has, no register is to spare: a trace costs a few spills there, and some time.
        full = "worst" in one["name"] or "arriving" in one["name"]
        assert full or not one["spilled"], f"{one['name']}: spills where it is traced"
        assert not one["notes"], one
        assert one["registers"], f"{one['name']}: another split of registers where it is traced"


@pytest.mark.timeout(110)
def test_a_sample_is_free_where_it_is_off(tmp_path):
    check(compiled(sys.executable, "quick", tmp_path, 100), 3)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0"])
def test_it_is_free_where_it_is_off(version, tmp_path):
    check(compiled(triton(version), "all", tmp_path, 880), 12)
