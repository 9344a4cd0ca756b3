"""The compile gate of the Hopper attention kernel (`hopper_attention_gate.py`): to sm_90a with no GPU, and what must be
true of the code.

Of registers a partition has what ``setmaxnreg`` says: see `hopper_attention_gate.expected`.

The quick tier takes a sample through the Triton that is installed. The slow one takes every tile of the plan, with all
kinds of problems, through Triton 3.6, 3.7 and 3.9: see `test_hopper_compiles`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_hopper_compiles import SHARED, SLACK

from tritons import TRITONS, check, environment, gate_rows, processes, triton

GATE = Path(__file__).parent / "hopper_attention_gate.py"


#: Bytes that are known to be spilled, by Triton and configuration: between a tile's loops, and in no loop over blocks.
#: Nine ways to write it otherwise spilled there as well, or with the log-sum-exp, or in other tiles.
KNOWN = {("3.9.0", "64-64 alone turns 3x128"): 72}


def faults(found: dict) -> list[str]:
    """What is not as it should be."""
    if "error" in found:
        return [found["error"]]
    expected, loops = found["expected"], found["key_loops"]
    known = KNOWN.get((found["triton"].split("+")[0], found["name"]), 0)
    spills = found["spilled"] or found["stack"] or found["local"]
    rules = {
        "spills": found["spilled"] <= known and not any(loop["local"] for loop in loops) if known else not spills,
        "the assembler's notes": not found["notes"],
        "registers": found["registers"] == expected["registers"],
        "instructions of the tensor cores": found["wgmma"] == expected["wgmma"],
        "sums that are left as they are": found["lazily"] == expected["lazily"],
        "TMA loads": found["loads"] in expected["loads"],
        "TMA stores": found["stores"] == expected["stores"],
        "loops over key blocks": len(loops) == expected["key_loops"]
        and all(loop[name] == count for loop in loops for name, count in expected["key_loop"].items()),
        "barriers of a key block": all(loop["barriers"] == expected["barriers"] for loop in loops),
        "looks at signals, each a lane's": [*found["looks"]] == [*expected["looks"]],  # tuples are lists to JSON
        "naps": found["naps"] == expected["naps"],
        "fences": found["fences"] == expected["fences"],
        # The sinks' two exponentials a row are beside the loops.
        "exponentials": 0 <= found["exponentials"] - expected["exponentials"] <= 12,
        "barriers that something else takes the place of": not found["reused"],
        "shared memory": -SLACK <= found["shared"] - expected["shared"] <= 0 and found["shared"] <= SHARED,
    }
    return [name for name, kept in rules.items() if not kept]


@pytest.mark.timeout(200)
def test_a_sample_compiles_as_it_should(tmp_path):
    found = gate_rows(sys.executable, GATE, "quick", processes(), cache=tmp_path, seconds=190)
    check(found, 6, faults)
    assert len(found) == 6


SEEDED = """
import json, sys, hopper_attention_gate as gate
from dataclasses import replace
made = next(gate.configurations("64-64 full turns 3x128"))
options, (*filled, config) = gate.fill(made.plan, gate.layout_of(made.plan.problem))
config = replace(config, **{
    "none": {},
    "registers": {"LOAD_REGISTERS": 24},
    "stages": {"STAGES": config.STAGES - 1},
    "turns": {"ORDERED": False},
    "spills": {"MATH_REGISTERS": 96},
}[sys.argv[1]])
print(json.dumps(gate.report(made, *gate.build(options, (*filled, config), kernel=gate.attend))))
"""


@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("seed", "seen"),
    [
        ("none", set()), ("registers", {"registers"}), ("stages", {"shared memory"}),
        ("turns", {"loops over key blocks", "barriers of a key block"}), ("spills", {"spills"}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_the_gate_sees_a_fault(seed, seen, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", SEEDED, seed], env=environment(tmp_path), cwd=GATE.parent, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert seen <= set(faults(found)), (faults(found), found)
    assert seen or not faults(found)


_LOOP = {"gmma": 16, "in_flight": 1, "mbarrier": 4, "rounded": 32, "permuted": 0, "local": 0, "barriers": 3}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spilled": 8}, "spills"),
        ({"notes": ["C7510"]}, "the assembler's notes"),
        ({"registers": [48, 120, 224, 232]}, "registers"),
        ({"registers": [24, 48, 120, 224, 232, 256]}, "registers"),
        ({"wgmma": ["m64n64k16.f32.bf16.bf16"]}, "instructions of the tensor cores"),
        ({"loads": 7}, "TMA loads"),
        ({"loads": 9}, "TMA loads"),
        ({"key_loops": [_LOOP] * 3}, "loops over key blocks"),
        ({"key_loops": [_LOOP, _LOOP | {"gmma": 8}]}, "loops over key blocks"),
        ({"key_loops": [_LOOP, _LOOP | {"mbarrier": 6}]}, "loops over key blocks"),
        ({"key_loops": [_LOOP, _LOOP | {"rounded": 64}]}, "loops over key blocks"),
        ({"key_loops": [_LOOP, _LOOP | {"permuted": 64}]}, "loops over key blocks"),
        ({"key_loops": [_LOOP, _LOOP | {"barriers": 4}]}, "barriers of a key block"),
        ({"looks": [3, 0]}, "looks at signals, each a lane's"),
        ({"looks": [3, 1]}, "looks at signals, each a lane's"),
        ({"naps": 0}, "naps"),
        ({"fences": [0, 4]}, "fences"),
        ({"fences": [1, 3]}, "fences"),
        ({"stores": 5}, "TMA stores"),
        ({"exponentials": 300}, "exponentials"),
        ({"shared": 240000}, "shared memory"),
        ({"lazily": False}, "sums that are left as they are"),
        ({"lazily": None}, "sums that are left as they are"),
        ({"reused": [229376]}, "barriers that something else takes the place of"),
        ({"error": "ValueError: out of memory"}, "ValueError: out of memory"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_each_rule_is_kept(change, fault):
    right = {
        "name": "", "triton": "3.7.1", "spilled": 0, "stack": 0, "local": 0, "reused": [], "notes": [], "shared": 800,
        "lazily": True,
        "registers": [48, 120, 224, 232, 256], "wgmma": ["m64n128k16.f32.bf16.bf16"], "loads": 8, "stores": 4,
        "exponentials": 200, "key_loops": [_LOOP] * 2, "looks": [4, 0], "naps": 2, "fences": [1, 4],
        "expected": {
            "registers": [48, 120, 224, 232, 256], "wgmma": ["m64n128k16.f32.bf16.bf16"], "loads": [8, 10],
            "stores": 4, "exponentials": 196, "shared": 1000, "key_loops": 2, "barriers": 3, "looks": [4, 0], "naps": 2,
            "key_loop": {"gmma": 16, "in_flight": 1, "mbarrier": 4, "rounded": 32, "permuted": 0}, "fences": [1, 4],
            "lazily": True,
        },
    }  # fmt: skip
    assert not faults(right)
    assert faults({**right, **change}) == [fault]


def test_what_is_known_to_spill_does_it_in_no_loop():
    known = next(iter(KNOWN))
    found = {"triton": known[0], "name": known[1], "spilled": 72, "stack": 24, "local": 22}
    right = {"key_loops": [_LOOP], "expected": {"key_loop": {}, "key_loops": 1, "barriers": 3, "exponentials": 0}}
    rest = dict.fromkeys(("registers", "wgmma", "stores", "naps", "fences", "shared", "exponentials"), 0)  # fmt: skip
    right["expected"] |= rest | {"lazily": None, "loads": [0], "looks": []}
    found |= rest | {"lazily": None, "notes": [], "loads": 0, "looks": [], "reused": [], **right}
    assert not faults(found)
    assert faults({**found, "spilled": 76}) == ["spills"]
    assert faults({**found, "key_loops": [_LOOP | {"local": 1}]}) == ["spills"]
    assert faults({**found, "triton": "3.7.1"}) == ["spills"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", TRITONS)
def test_everything_compiles_as_it_should(version, tmp_path):
    found = gate_rows(triton(version), GATE, "all", processes(), cache=tmp_path, seconds=3500)
    assert {one["triton"].split("+")[0] for one in found} == {version}
    check(found, 126, faults)
    assert len(found) == 126


@pytest.mark.parametrize(
    ("change", "right"),
    [
        (("", ""), True),
        (("mul.f32 %r3, %r3, %r9;", "mul.f32 %r3, %r3, %r8;"), False),
        (("mul.f32 %r3, %r3, %r9;", "mul.f32 %r7, %r3, %r9;"), False),
        (("other, %r9,", "other, %r8,"), False),
        (("other, any", "one"), None),
    ],
)
def test_sums_are_multiplied_by_what_is_theirs(change, right):
    from hopper_attention_gate import lazily

    ptx = """
    { .reg .pred other, any;
    setp.neu.f32 other, %r8, 0f3F800000;
    setp.neu.or.f32 other, %r9, 0f3F800000, other;
    vote.sync.any.pred any, other, -1;
    @!any bra.uni DONE;
    mul.f32 %r1, %r1, %r8;
    mul.f32 %r2, %r2, %r8;
    mul.f32 %r3, %r3, %r9;
    mul.f32 %r4, %r4, %r9;
    DONE: }
    """
    assert lazily(ptx.replace(*change)) is right
