"""The compile gate of the CDNA GEMM (`cdna_gate.py`): to gfx942 and gfx950 with no GPU, and what must be true of it.

The quick tier takes a sample through the Triton that is installed. The slow one takes every tile, layout and schedule
through Triton 3.6, 3.7 and 3.9, each in a virtual environment of its own under TILESTREAM_TRITONS (default: the user's
cache). Nothing of this was run: there is no such GPU here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tritons import TRITONS, check, environment, gate_rows, processes, triton

GATE = Path(__file__).parent / "cdna_gate.py"
SHARED = {"gfx942": 65536, "gfx950": 163840}
#: Bytes beside the stages: an atomic's answer, on its way to all lanes.
SLACK = 1024
#: Scalar registers that are kept in lanes of vector ones, at most, by whether there is a gate: the recorded ceiling.
IN_LANES = {True: 192, False: 96}


def faults(found: dict) -> list[str]:
    """What is not as it should be."""
    if "error" in found:
        return [found["error"]]
    expected, counts = found["expected"], found["counts"]
    ((shape, count),) = expected["mfma"].items()
    # Steps of an iteration: the compiler unrolls short loops.
    steps, beside = divmod(found["mfma"].get(shape, 0), count)
    # 3.9 puts a barrier of its own between a step's reads and its copies.
    barriers = expected["barriers"] + (found["triton"] >= "3.9" and bool(expected["waits"]))
    copies = {key: value for key, value in counts.items() if key.startswith("load_to_lds")}
    rules = {
        "instructions of the matrix units": len(found["mfma"]) == 1 and steps >= 1 and not beside,
        # What 3.9 moves to an accumulation register it counts as spilled, too: it is not in memory.
        "spills": not found["spilled"]["private_segment_fixed_size"]
        and (found["accumulators"] > 0 or not found["spilled"]["vgpr_spill_count"]),
        "copies past the registers": copies == {key: steps * n for key, n in expected["load_to_lds"].items()},
        "loads": expected["load"] is None or counts.get("load 128", 0) == steps * expected["load"],
        "writes to shared memory": expected["lds_write"] is None
        or counts.get("lds_write 128", 0) == steps * expected["lds_write"],
        "loads of less than 32 bits": not counts.keys() & {"load 8", "load 16", "lds_write 8", "lds_write 16"},
        "shuffles": not counts.get("shuffle", 0),
        "scalar registers in lanes": found["in_lanes"] <= IN_LANES[expected["gated"]],
        "scratch": not any(key.startswith("scratch") for key in counts),
        "what waits leave in flight": expected["waits"] is None or found["waits"] == steps * expected["waits"],
        "a full drain": 0 not in found["waits"],
        "what waits leave of the other operand": min(found["waits"], default=0) >= expected["least"],
        "barriers": counts.get("barrier", 0) == steps * barriers,
        "order": not found["order"] and not found["order_behind"],
        "branches": found["branches"] == 1,  # a second one would be a loop over lanes
        # Addresses of copies, in LDS and of buffers, are the wave's: none is brought together from its lanes.
        "lanes' own addresses": not found["first_lanes"],
        "a polling loop": found["polling"] == ([] if expected["gated"] else ["no polling loop"]),
        "shared memory": 0 <= found["shared"] - expected["shared"] <= SLACK
        and found["shared"] <= SHARED[found["name"].split()[0]],
    }
    return [name for name, kept in rules.items() if not kept]


@pytest.mark.timeout(110)
def test_a_sample_compiles_as_it_should(tmp_path):
    check(gate_rows(sys.executable, GATE, "quick", processes(), cache=tmp_path, seconds=100), 9, faults)


SEEDED = """
import dataclasses, json, sys, cdna_gate as gate
name = "gfx942 128x128 direct bfloat16 plain nt"
made = next(c for c in gate.configurations("quick") if c.name == name)
options, (*filled, config) = gate.fill(made.plan, made.layout)
fields = {key: tuple(x) if isinstance(x, list) else x for key, x in json.loads(sys.argv[1]).items()}
config = dataclasses.replace(config, **fields)
kernel, _ = gate.build(gate.gemm, (*filled, config), options, made.arch)
print(json.dumps(gate.report(made, kernel)))
"""


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({}, set()),
        # Two stages: each step waits for every copy. Another depth: other waits, and more shared memory.
        ({"STAGES": 2}, {"a full drain", "what waits leave in flight", "shared memory"}),
        ({"DIRECT": False}, {"copies past the registers", "barriers"}),
        ({"SHAPE": [32, 32, 8], "STRIP": 64, "STRIP_M": 64}, {"instructions of the matrix units"}),
    ],
    ids=["none", "two stages", "staged", "another instruction"],
)
def test_the_gate_sees_a_fault(change, seen, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SEEDED, json.dumps(change)], env=environment(tmp_path), cwd=GATE.parent,
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout.splitlines()[-1])
    assert seen <= set(faults(found)), (faults(found), found)
    assert seen or not faults(found)


RIGHT = {
    "name": "gfx950 right", "triton": "3.7.1", "spilled": {"vgpr_spill_count": 0, "private_segment_fixed_size": 0},
    "accumulators": 0, "registers": 200, "shared": 1200, "mfma": {"16x16x32_bf16": 32},
    "counts": {"load_to_lds 128": 4, "lds_read 128": 12, "barrier": 1}, "waits": [8], "order": [], "order_behind": [],
    "branches": 1, "first_lanes": 0, "polling": [], "in_lanes": 60,
    "expected": {
        "mfma": {"16x16x32_bf16": 32}, "load_to_lds": {"load_to_lds 128": 4}, "load": None, "lds_write": None,
        "waits": [8], "least": 8, "barriers": 1, "shared": 1024, "gated": True,
    },
}  # fmt: skip

STAGED = {**RIGHT["expected"], "waits": None, "least": 2}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spilled": {"vgpr_spill_count": 0, "private_segment_fixed_size": 4}}, "spills"),
        ({"spilled": {"vgpr_spill_count": 1, "private_segment_fixed_size": 0}}, "spills"),
        ({"mfma": {"16x16x32_bf16": 33}}, "instructions of the matrix units"),
        ({"counts": {"load_to_lds 32": 16, "barrier": 1}}, "copies past the registers"),
        ({"counts": {"load_to_lds 128": 4, "barrier": 1, "shuffle": 4}}, "shuffles"),
        ({"counts": {"load_to_lds 128": 4, "barrier": 1, "scratch 32": 1}}, "scratch"),
        ({"counts": {"load_to_lds 128": 4, "barrier": 2}}, "barriers"),
        ({"counts": {"load_to_lds 128": 4, "barrier": 1, "load 16": 8}}, "loads of less than 32 bits"),
        ({"waits": [9]}, "what waits leave in flight"),
        ({"expected": STAGED, "waits": [3, 2, 3, 1]}, "what waits leave of the other operand"),
        ({"order": ["a step begins without a wait"]}, "order"),
        ({"order_behind": ["ds_read_b128 at once behind a wait for copies"]}, "order"),
        ({"branches": 2}, "branches"),
        ({"first_lanes": 1}, "lanes' own addresses"),
        ({"in_lanes": 193}, "scalar registers in lanes"),
        ({"polling": ["no time in the loop"]}, "a polling loop"),
        ({"shared": 170000}, "shared memory"),
        ({"error": "RuntimeError: PassManager::run failed"}, "RuntimeError: PassManager::run failed"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_each_rule_is_kept(change, fault):
    assert not faults(RIGHT)
    assert faults({**RIGHT, **change}) == [fault]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", TRITONS)
def test_everything_compiles_as_it_should(version, tmp_path):
    found = gate_rows(triton(version), GATE, "all", processes(), cache=tmp_path, seconds=3500)
    assert {one["triton"].split("+")[0] for one in found if "triton" in one} == {version}
    check(found, 150, faults)
