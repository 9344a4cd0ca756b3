"""The compile gate (`gate.py`): to sm_90a, gfx942 and gfx950 with no GPU; nothing spills. AMD code is only compiled.

The quick tier takes a fixed sample through the Triton that is installed. The slow one takes every configuration through
Triton 3.6, 3.7 and 3.9, each in a virtual environment of its own under TILESTREAM_TRITONS (default: the user's cache).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tritons import TRITONS, environment, gate_rows, triton

GATE = Path(__file__).parent / "gate.py"
TARGETS = ("sm_90a", "gfx942", "gfx950")


def check(found: list[dict], least: int, spills: dict[str, int] | None = None, *, matmul: bool = True) -> None:
    """Assert that at least so many compiled, and that none spills, or no more than ``spills`` allows.

    Of a ``matmul`` for AMD the main loop is looked at, too.
    """
    assert len(found) >= least
    failed = [one for one in found if "error" in one]
    assert not failed, failed[:3]
    allowed = spills or {}
    spilled = [one for one in found if any(x > allowed.get(key, 0) for key, x in one["spilled"].items())]
    assert not spilled, spilled
    limits = {"sm_90a": 232448, "gfx942": 65536, "gfx950": 163840}
    assert all(one["shared"] <= limits[one["target"]] for one in found)
    amd = [one for one in found if one["target"].startswith("gfx") and matmul]
    assert all(len(one["mfma"]) == 1 for one in amd), "one kind of matrix instruction, in the main loop"
    waits = (" arriving ", " ordered ")
    assert all(bool(one["sleeps"]) == any(how in one["name"] for how in waits) for one in amd), "a pause between looks"


@pytest.mark.timeout(110)
@pytest.mark.parametrize("target", TARGETS)
def test_a_sample_compiles_and_spills_nothing(target, tmp_path):
    check(gate_rows(sys.executable, GATE, "quick", target, cache=tmp_path, seconds=100), 3)


def test_the_gate_sees_a_spill(tmp_path):
    code = (
        "import gate, dataclasses as d\n"
        "name, plan, layout, aligned = next(gate.configurations('sm_90a', 'all'))\n"
        "print(gate.spilled(*gate.build(d.replace(plan, warps=4), layout, aligned, 'sm_90a'))['bytes'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), cwd=GATE.parent,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(run.stdout) > 0, "128 x 256 with 4 warps does not fit the registers"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("version", TRITONS)
def test_everything_compiles_and_spills_nothing(version, target, tmp_path):
    found = gate_rows(triton(version), GATE, "all", target, cache=tmp_path, seconds=2900)
    assert {one["triton"].split("+")[0] for one in found} == {version}
    check(found, 160 if target != "gfx942" else 80)
