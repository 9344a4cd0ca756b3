"""The portable attention, compiled with no GPU: every tile of its plan, for NVIDIA and AMD, on three Tritons."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_portable_compiles import TARGETS, check

from tritons import TRITONS, gate_rows, triton

GATE = Path(__file__).parent / "attention_gate.py"
#: What AMD's compiler spills at most, in Triton 3.7: a row's worth of what is worked out before the loops.
AMD_SPILLS = {"vgpr_spill_count": 8, "private_segment_fixed_size": 32}


def allowed(target: str) -> dict[str, int]:
    return AMD_SPILLS if target.startswith("gfx") else {}


@pytest.mark.timeout(110)
@pytest.mark.parametrize("target", TARGETS)
def test_a_sample_compiles(target, tmp_path):
    check(
        gate_rows(sys.executable, GATE, "quick", target, cache=tmp_path, seconds=100), 2, allowed(target), matmul=False
    )


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", TRITONS)
def test_everything_compiles(version, target, tmp_path):
    found = gate_rows(triton(version), GATE, "all", target, cache=tmp_path, seconds=2900)
    assert {one["triton"].split("+")[0] for one in found} == {version}
    check(found, 190, allowed(target), matmul=False)
