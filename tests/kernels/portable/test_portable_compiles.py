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
#: AMD: scalar registers that are kept in lanes of vector ones, at most, by what is in the kernel: the recorded ceiling,
#: the most of a sample of every tile on Triton 3.6, 3.7 and 3.9, and a little. What runs most has none; a gate's two
#: operands have the most, outside the main loop. Of vector registers none goes to memory.
IN_LANES = {"plain": 0, "static": 0, "stealing": 0, "worst": 64, "arriving": 160, "ordered": 160, "copied": 160}
#: The same where operands of 8 bits are converted: each comparison is a mask in two of them.
CONVERTING = {"plain": 80, "static": 80, "stealing": 80, "worst": 112, "arriving": 224, "ordered": 224, "copied": 224}


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
    waits = (" arriving ", " ordered ", " copied ")
    assert all(bool(one["sleeps"]) == any(how in one["name"] for how in waits) for one in amd), "a pause between looks"
    assert all(one["polling"] == ([] if one["sleeps"] else ["no polling loop"]) for one in amd), (
        "how chunks are awaited"
    )
    assert all(one["small_halves"] == 3 for one in amd), "what is below float16's normal numbers is not zero"
    parted = [one["name"] for one in amd if not reads_at_once(one)]
    assert not parted, f"a barrier between the reads of A and those of B: {parted}"
    over = [(one["name"], one["in_lanes"]) for one in amd if one["in_lanes"] > ceiling(one)]
    assert not over, f"scalar registers in lanes of vector ones: {over}"


def reads_at_once(one: dict) -> bool:
    """Whether no barrier of the main loop parts the reads of A from those of B: see the kernel's `product`.

    Of gfx950, where the loop has two stages or more; Triton 3.9 orders it by rules of its own.
    """
    return one["target"] != "gfx950" or one["triton"] >= "3.9" or one["reading"] == 1


def test_a_barrier_between_reads_is_seen():
    right = {"target": "gfx950", "triton": "3.7.1", "reading": 1}
    assert reads_at_once(right)
    assert not reads_at_once(right | {"reading": 2})
    assert reads_at_once(right | {"reading": 2, "triton": "3.9.0"})
    assert reads_at_once(right | {"reading": 2, "target": "gfx942"})


def ceiling(one: dict) -> int:
    """Scalar registers in lanes that a configuration may have."""
    converts = one["name"].startswith("float8") and ("fnuz" in one["name"]) == (one["target"] == "gfx950")
    return (CONVERTING if converts else IN_LANES)[one["name"].split()[-2]]


def test_the_ceiling_is_by_what_is_compiled():
    assert ceiling({"name": "bfloat16 64x64 plain nt", "target": "gfx942"}) == 0
    assert ceiling({"name": "float8 fnuz 64x64 plain nt", "target": "gfx942"}) == 0
    assert ceiling({"name": "float8 fnuz 64x64 plain nt", "target": "gfx950"}) == 80
    assert ceiling({"name": "float8 64x64 worst nn", "target": "gfx942"}) == 112


@pytest.mark.timeout(110)
@pytest.mark.parametrize("target", TARGETS)
def test_a_sample_compiles_and_spills_nothing(target, tmp_path):
    check(gate_rows(sys.executable, GATE, "quick", target, cache=tmp_path, seconds=100), 3)


@pytest.mark.parametrize(("target", "at_once"), [("gfx942", False), ("gfx950", False), ("sm_90a", True)])
def test_waves_do_not_read_counters_for_themselves(target, at_once, tmp_path):
    """A wave of 64 lanes would hold all of them, keep its own answer, and go another way than the next."""
    code = (
        "import gate\n"
        f"made = next(x for x in gate.configurations('{target}', 'all') if x[0] == 'bfloat16 64x64 stealing nt')\n"
        f"kernel, _ = gate.build(*made[1:], '{target}')\n"
        "print(kernel.asm['ttgir'].count('tensor<64xi64'))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), cwd=GATE.parent,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (int(run.stdout) > 0) == at_once


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
