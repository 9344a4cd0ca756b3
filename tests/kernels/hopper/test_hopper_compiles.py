"""The compile gate of the Hopper kernel (`hopper_gate.py`): to sm_90a with no GPU, and what must be true of the code.

The quick tier takes a sample through the Triton that is installed. The slow one takes every tile of the plan, both ways
round, through Triton 3.6, 3.7 and 3.9, each in a virtual environment of its own under TILESTREAM_TRITONS (default: the
user's cache).

Of registers a partition has what ``setmaxnreg`` says. With two math loops: 256 before the partitions begin, while they
wait 120 each; then 232, 232 and 40 for the load warp's group (or 240, 240 and 24), which together are what an SM has.
With one: 232 and 24; then 216 and 40.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from releases import release
from tritons import TRITONS, check, environment, gate_rows, processes, triton

GATE = Path(__file__).parent / "hopper_gate.py"
SHARED = 232448
#: Bytes of barriers and of the item ring, and what lies between.
SLACK = 1024
#: Configurations of each tile, both ways round: what the plan has no candidate for is not compiled, and missed here.
COUNTS = {
    "cooperative 128x256": 40, "cooperative 128x224": 26, "cooperative 128x192": 78, "cooperative 128x160": 32,
    "cooperative 128x128": 47, "cooperative 128x96": 32, "cooperative 256x192": 16, "cooperative 256x160": 16,
    "cooperative 256x128": 30, "cooperative 256x96": 22, "ping_pong 128x128": 16, "ping_pong 64x256": 33,
    "cooperative 128x64": 40, "ping_pong 64x128": 92, "single 64x128": 32, "single 64x64": 37, "single 64x32": 32,
    "single 64x16": 32, "cooperative 128x32": 40, "cooperative 128x16": 40,
}  # fmt: skip


def faults(found: dict) -> list[str]:
    """What is not as it should be."""
    if "error" in found:
        return [found["error"]]
    expected, loops = found["expected"], found["k_loops"]
    # Of a consumer's warps: before a wait and an arrival, and, where x is read into registers, behind that: not by 3.9.
    barriers = 3 if expected["narrow"] and release(found["triton"]) < (3, 9) else 2
    rules = {
        "spills": not (found["spilled"] or found["stack"] or found["local"]),
        "the assembler's notes": not found["notes"],
        "registers": found["registers"] == expected["registers"],
        "instructions of the tensor cores": found["wgmma"] == expected["wgmma"],
        "TMA loads": found["loads"] == expected["loads"],
        "TMA stores": found["stores"] == expected["stores"],
        "K loops": len(loops) == expected["k_loops"] and all(x["gmma"] == expected["gmma"] for x in loops),
        "multiplications in flight": all(x["in_flight"] == expected["in_flight"] for x in loops),
        # Without fast accumulation a step waits for its product anyway.
        "barriers of a K step": not expected["in_flight"] or all(x["barriers"] <= barriers for x in loops),
        "looks at signals, each a lane's": [*found["looks"]] == [*expected["looks"]],  # tuples are lists to JSON
        "naps": found["naps"] == expected["naps"],
        "fences": found["fences"] == expected["fences"],
        "signals and records": found["exchanges"] == expected["exchanges"],
        # Those of 8 bytes: other counts. A kernel that makes no copies has not one of the others.
        "a round of copies": expected["round"] == {size: n for size, n in found["rounds"].items() if size != "64"},
        "matrix stores": found["matrix_stores"] == expected["matrix_stores"],
        "barriers": found["barriers"] == expected["barriers"],
        "barriers that nobody uses": not found["idle"],
        "barriers that something else takes the place of": not found["reused"],
        "shared memory": 0 <= found["shared"] - expected["shared"] <= SLACK and found["shared"] <= SHARED,
    }
    return [name for name, kept in rules.items() if not kept]


@pytest.mark.timeout(190)
def test_a_sample_compiles_as_it_should(tmp_path):
    found = gate_rows(sys.executable, GATE, "quick", processes(), cache=tmp_path, seconds=180)
    assert len(found) == len({one["name"] for one in found}) == 23
    check(found, 23, faults)


def test_no_tile_has_dropped_out(tmp_path):
    named = gate_rows(sys.executable, GATE, "names", cache=tmp_path, seconds=100)
    assert len(named) == len({one["name"] for one in named})
    assert Counter(one["tile"] for one in named) == COUNTS


SEEDED = """
import dataclasses, json, sys
sys.path.append("../..")
import hopper_gate as gate
from mutants import engine, kernel_text
seed, name = sys.argv[1:]
made = next(c for c in gate.configurations("all") if c.name == name)
options, (*filled, config) = gate.fill(made.plan, made.layout)
fields = {
    "registers": {"MATH_REGISTERS": 120}, "few registers": {"LOAD_REGISTERS": 24, "MATH_REGISTERS": 240},
    "stages": {"STAGES": config.STAGES + 1},
}
config = dataclasses.replace(config, **fields.get(seed, {}))
if seed == "spills":
    options |= {"maxnreg": 64}
kernel = gate.gemm
if seed in kernel_text.COMPILED:
    kernel = engine.load(kernel_text.HOPPER_MODULES, kernel_text.COMPILED[seed])[kernel_text.GEMM].gemm
print(json.dumps(gate.report(made, *gate.build(options, (*filled, config), kernel))))
"""


@pytest.mark.parametrize(
    ("seed", "seen"),
    [
        ("none", set()),
        ("registers", {"registers"}),
        ("stages", {"shared memory", "barriers"}),
        ("spills", {"spills"}),
        (
            "no turns",
            {"barriers", "barriers that nobody uses", "barriers that something else takes the place of"},
        ),
        ("scattered", {"matrix stores"}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_gate_sees_a_fault(seed, seen, tmp_path):
    name = "single 64x64 bfloat16 worst nt" if seed == "spills" else "cooperative 128x256 bfloat16 plain nt"
    found = seeded(sys.executable, seed, name, tmp_path)
    assert seen <= set(faults(found)), (faults(found), found)
    assert seen or not faults(found)


def seeded(python: str, seed: str, name: str, cache: Path) -> dict:
    """The gate's report on a configuration that is changed so."""
    run = subprocess.run(
        [python, "-c", SEEDED, seed, name], env=environment(cache), cwd=GATE.parent, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        pytest.param(version, f"{name} nt", marks=() if version == "installed" else pytest.mark.slow)
        for version, name in (
            *itertools.product(
                ("installed", *TRITONS),
                ("cooperative 128x256 bfloat16 worst", "cooperative 128x256 bfloat16 ordered"),
            ),
            ("3.9.0", "ping_pong 64x128 bfloat16 stealing"),
        )
    ],
)
def test_fewer_registers_spill_where_they_cannot_be_forced(version, name, tmp_path):
    """By stream_k, at a gate, with queues that are shared: `tilestream.plan.policy.hopper.no_registers`,
    docs/design.md.
    """
    python = sys.executable if version == "installed" else triton(version)
    found = seeded(python, "few registers", name, tmp_path)
    assert set(faults(found)) == {"spills", "registers"}, found
    assert 0 < found["stack"] <= 80


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"notes": ["C7514"]}, "the assembler's notes"),
        ({"wgmma": ["m64n64k16.f32.bf16.bf16"]}, "instructions of the tensor cores"),
        ({"looks": [3, 0]}, "looks at signals, each a lane's"),
        ({"looks": [3, 1]}, "looks at signals, each a lane's"),
        ({"naps": 0}, "naps"),
        ({"fences": 0}, "fences"),
        ({"exchanges": ["gpu.relaxed.", "sys.release."]}, "signals and records"),
        ({"rounds": {"64": 32}}, "a round of copies"),
        ({"rounds": {"64": 11, "128": 16, "U16": 1}}, "a round of copies"),
        ({"stores": 0}, "TMA stores"),
        ({"loads": 1}, "TMA loads"),
        ({"local": 1}, "spills"),
        ({"k_loops": [{"gmma": 4, "barriers": 4, "in_flight": 1}] * 2}, "barriers of a K step"),
        ({"k_loops": [{"gmma": 4, "barriers": 2, "in_flight": 0}] * 2}, "multiplications in flight"),
        ({"k_loops": [{"gmma": 4, "barriers": 2, "in_flight": 1}]}, "K loops"),
        ({"triton": "3.9.0"}, "barriers of a K step"),
        ({"barriers": [1, 1, 1, 1]}, "barriers"),
        ({"barriers": []}, "barriers"),
        ({"idle": [4]}, "barriers that nobody uses"),
        ({"matrix_stores": 0}, "matrix stores"),
        ({"triton": "3.10.0+git"}, "barriers of a K step"),
        ({"reused": [229376]}, "barriers that something else takes the place of"),
        ({"error": "ValueError: out of memory"}, "ValueError: out of memory"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_each_rule_is_kept(change, fault):
    right = {
        "name": "", "triton": "3.7.1", "spilled": 0, "stack": 0, "local": 0, "reused": [], "notes": [], "shared": 1200,
        "barriers": [1, 1, 2, 2], "idle": [], "matrix_stores": 16,
        "registers": [40], "wgmma": ["m64n128k16.f32.bf16.bf16"], "loads": 2, "stores": 4, "looks": [4, 0], "naps": 2,
        "fences": 1, "exchanges": ["sys.release."],
        "k_loops": [{"gmma": 4, "barriers": 3, "in_flight": 1}] * 2, "rounds": {"64": 11, "128": 16},
        "expected": {
            "registers": [40], "wgmma": ["m64n128k16.f32.bf16.bf16"], "loads": 2, "stores": 4, "k_loops": 2, "gmma": 4,
            "in_flight": 1, "shared": 1000, "looks": [4, 0], "naps": 2, "fences": 1,
            "exchanges": ["sys.release."],
            "round": {"128": 16}, "barriers": [1, 1, 2, 2], "matrix_stores": 16, "narrow": True,
        },
    }  # fmt: skip
    assert not faults(right)
    assert faults({**right, **change}) == [fault]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", TRITONS)
def test_everything_compiles_as_it_should(version, tmp_path):
    named = gate_rows(triton(version), GATE, "names", cache=tmp_path, seconds=100)
    found = gate_rows(triton(version), GATE, "all", processes(), cache=tmp_path, seconds=3500)
    assert {one["triton"].split("+")[0] for one in found} == {version}
    check(found, [one["name"] for one in named], faults)
