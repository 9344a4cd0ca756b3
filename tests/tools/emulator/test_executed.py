"""AMD's machine code, executed: kernels of the project on the emulator, by the error rule, under several orders.

The quick tier runs a sample; the slow one all cases of `executed.cases`, and seeds faults into the machine code.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from tritons import environment

EXECUTED = Path(__file__).parent / "executed"
#: Kinds of seeded faults that are always found.
ALWAYS = {
    "a wait is deleted", "a barrier is deleted", "a scope is narrowed", "an invalidation is deleted",
    "a write-back is deleted", "a poll never looks", "a store is deleted", "a matrix instruction is deleted",
    "matrix operands are swapped", "a swizzle is another",
}  # fmt: skip


def executed(*arguments: str, cache: Path, seconds: float, **environ: str) -> list[dict]:
    run = subprocess.run(
        [sys.executable, EXECUTED, *arguments], env=environment(cache) | environ, capture_output=True, text=True,
        timeout=seconds, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def check(rows: list[dict], count: int) -> None:
    assert len(rows) == count
    wrong = [row for row in rows if row["right"] != row["orders"] or not row["instructions"]]
    assert not wrong, f"{len(wrong)} of {count}, such as {wrong[:3]}"


def test_a_sample_is_right_when_loads_and_stores_land_late_and_at_random(tmp_path):
    rows = executed("quick", cache=tmp_path, seconds=850)
    check(rows, 39)
    assert {(row["kernel"], row["arch"]) for row in rows} >= {
        ("portable GEMM, stream-K", "gfx942"), ("portable GEMM, stream-K", "gfx950"),
        ("portable GEMM, copied", "gfx942"), ("cdna GEMM, stream-K", "gfx950"), ("cdna attention", "gfx942"),
        ("portable attention, gated", "gfx942"), ("portable GEMM, captured", "gfx950"),
        ("cdna attention", "gfx950"), ("portable attention", "gfx942"), ("portable attention", "gfx950"),
    }  # fmt: skip


@pytest.mark.parametrize(("what", "count"), [("elementwise", 2 * (26 + 29)), ("moves", 2 * (20 + 4 + 2 + 2))])
def test_single_operations_are_numpys(what, count, tmp_path):
    rows = executed(what, cache=tmp_path, seconds=850)
    assert len({(row["arch"], row["operation"]) for row in rows}) == len(rows) == count
    assert [row for row in rows if row["wrong"]] == []


def test_single_operations_are_what_llvm_folds(tmp_path):
    rows = executed("folding", cache=tmp_path, seconds=850)
    assert len({(row["arch"], row["operation"]) for row in rows}) == len(rows) == 2 * (382 + 255)
    assert [row for row in rows if row["wrong"]] == []


def test_single_operations_are_the_interpreters(tmp_path):
    file = str(tmp_path / "interpreted.npz")
    executed("interpreted", "--file", file, cache=tmp_path, seconds=850, TRITON_INTERPRET="1")
    rows = executed("interpreted", "--file", file, cache=tmp_path, seconds=850)
    assert len(rows) == 2 * (23 + 29)
    assert [row for row in rows if row["wrong"]] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_case_is_right_in_every_order(tmp_path):
    check(executed("all", "--seeds", "3", "--landing", "late,random,early", cache=tmp_path, seconds=3500), 270)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_seeded_faults_are_found(tmp_path):
    rows = executed("faults", "--seeds", "8", cache=tmp_path, seconds=3500)
    assert {row["fault"] for row in rows if row["found"] == row["tried"]} >= ALWAYS
    missed = [(row["fault"], one) for row in rows for one in row["missed"]]
    assert sum(row["found"] for row in rows) >= 0.98 * sum(row["tried"] for row in rows) > 98, missed


def test_a_hand_over_without_its_drain_is_wrong(tmp_path):
    """One lane's release covers no other wave's stores: as `tilestream.kernels.device.schedule.drain` says."""
    rows = executed("undrained", cache=tmp_path, seconds=850)
    assert len(rows) == 5
    assert all(row["right"] == row["orders"] and row["undrained wrong"] > row["orders"] / 2 for row in rows), rows
