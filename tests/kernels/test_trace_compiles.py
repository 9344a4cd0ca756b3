"""The compile gate of the trace (`trace_gate.py`): the same machine code where it is off, hardly a spill where on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tritons import gate_rows, triton

GATE = Path(__file__).parent / "trace_gate.py"


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
        assert not one["reused"], f"{one['name']}: something else has the place of barriers where it is traced"
        assert one["registers"], f"{one['name']}: another split of registers where it is traced"


@pytest.mark.timeout(110)
def test_a_sample_is_free_where_it_is_off(tmp_path):
    check(gate_rows(sys.executable, GATE, "quick", cache=tmp_path, seconds=100), 5)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.9.0"])
def test_it_is_free_where_it_is_off(version, tmp_path):
    check(gate_rows(triton(version), GATE, "all", cache=tmp_path, seconds=1480), 18)
