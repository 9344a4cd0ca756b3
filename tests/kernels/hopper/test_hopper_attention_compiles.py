"""The compile gate of the Hopper attention kernel (`hopper_attention_gate.py`): to sm_90a with no GPU, and what must be
true of the code.

The quick tier takes a sample through the Triton that is installed. The slow one takes every tile of the plan, with all
kinds of problems, through Triton 3.6, 3.7 and 3.9: see `test_hopper_compiles`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_hopper_compiles import SHARED, SLACK

from tritons import TRITONS, check, gate_rows, processes, triton

GATE = Path(__file__).parent / "hopper_attention_gate.py"


def faults(found: dict) -> list[str]:
    """What is not as it should be."""
    if "error" in found:
        return [found["error"]]
    expected = found["expected"]
    rules = {
        "spills": not (found["spilled"] or found["stack"] or found["local"]),
        "the assembler's notes": not found["notes"],
        "registers": set(expected["registers"]) <= set(found["registers"]),
        "instructions of the tensor cores": found["wgmma"] == expected["wgmma"],
        "TMA loads": found["loads"] >= expected["loads"],  # more, where the compiler unrolls
        "TMA stores": found["stores"] == expected["stores"],
        # The sinks' two exponentials a row are beside the loops.
        "exponentials": 0 <= found["exponentials"] - expected["exponentials"] <= 12,
        "barriers that something else takes the place of": not found["reused"],
        "shared memory": -SLACK <= found["shared"] - expected["shared"] <= 0 and found["shared"] <= SHARED,
    }
    return [name for name, kept in rules.items() if not kept]


@pytest.mark.timeout(200)
def test_a_sample_compiles_as_it_should(tmp_path):
    check(gate_rows(sys.executable, GATE, "quick", processes(), cache=tmp_path, seconds=190), 5, faults)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"spilled": 8}, "spills"),
        ({"notes": ["C7510"]}, "the assembler's notes"),
        ({"registers": [24, 240]}, "registers"),
        ({"wgmma": ["m64n64k16.f32.bf16.bf16"]}, "instructions of the tensor cores"),
        ({"loads": 7}, "TMA loads"),
        ({"stores": 5}, "TMA stores"),
        ({"exponentials": 300}, "exponentials"),
        ({"shared": 240000}, "shared memory"),
        ({"reused": [229376]}, "barriers that something else takes the place of"),
        ({"error": "ValueError: out of memory"}, "ValueError: out of memory"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_each_rule_is_kept(change, fault):
    right = {
        "name": "", "spilled": 0, "stack": 0, "local": 0, "reused": [], "notes": [], "shared": 800,
        "registers": [48, 232, 256],
        "wgmma": ["m64n128k16.f32.bf16.bf16"], "loads": 8, "stores": 4, "exponentials": 200,
        "expected": {
            "registers": [48, 232], "wgmma": ["m64n128k16.f32.bf16.bf16"], "loads": 8, "stores": 4,
            "exponentials": 196, "shared": 1000,
        },
    }  # fmt: skip
    assert not faults(right)
    assert faults({**right, **change}) == [fault]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", TRITONS)
def test_everything_compiles_as_it_should(version, tmp_path):
    found = gate_rows(triton(version), GATE, "all", processes(), cache=tmp_path, seconds=3500)
    assert {one["triton"].split("+")[0] for one in found} == {version}
    check(found, 40, faults)
