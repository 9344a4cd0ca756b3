"""The compile gate (`gate.py`): to sm_90a, gfx942 and gfx950 with no GPU; nothing spills. AMD code is only compiled.

The quick tier takes a fixed sample through the Triton that is installed. The slow one takes every configuration through
Triton 3.6, 3.7 and 3.9, each in a virtual environment of its own under TILESTREAM_TRITONS (default: the user's cache).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tritons import triton

GATE = Path(__file__).parent / "gate.py"
TRITONS = ("3.6.0", "3.7.1", "3.9.0")
TARGETS = ("sm_90a", "gfx942", "gfx950")


def environment(cache: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    # Triton 3.9 warns where the second is not set. It is part of the key of Triton's cache: only tests set it.
    return {**kept, "TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}


def compile_all(
    python: str, what: str, targets: tuple[str, ...], cache: Path, seconds: int, gate: Path = GATE
) -> list[dict]:
    run = subprocess.run(
        [python, str(gate), what, *targets], env=environment(cache),
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


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
    assert all(bool(one["sleeps"]) == (" arriving " in one["name"]) for one in amd), "a pause between two looks"


@pytest.mark.timeout(110)
@pytest.mark.parametrize("target", TARGETS)
def test_a_sample_compiles_and_spills_nothing(target, tmp_path):
    check(compile_all(sys.executable, "quick", (target,), tmp_path, 100), 3)


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
    found = compile_all(triton(version), "all", (target,), tmp_path, 2900)
    assert {one["triton"].split("+")[0] for one in found} == {version}
    check(found, 160 if target != "gfx942" else 80)
