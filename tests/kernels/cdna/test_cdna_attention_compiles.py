"""The compile gate of CDNA's attention (`cdna_attention_gate.py`), and what must be true of it.

See `test_cdna_compiles`. Nothing of this was run: there is no such GPU here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tritons import TRITONS, check, gate_rows, processes, triton

GATE = Path(__file__).parent / "cdna_attention_gate.py"
SHARED = {"gfx942": 65536, "gfx950": 163840}
#: Bytes beside the stages: an atomic's answer, on its way to all lanes.
SLACK = 1024
#: What a wait for all that is under way breaks.
DRAINS = ("a full drain", "what waits leave of the other operand")


def faults(found: dict) -> list[str]:
    """What is not as it should be."""
    if "error" in found:
        return [found["error"]]
    expected = found["expected"]
    rules = {
        # What 3.9 moves to an accumulation register it counts as spilled, too: it is not in memory. And it reserves
        # memory that no instruction touches.
        "spills": not found["scratch"] and (found["accumulators"] > 0 or not found["spilled"]["vgpr_spill_count"]),
        "loops": len(found["loops"]) == expected["loops"],
        "order": not found["order"],
        "shared memory": 0 <= found["shared"] - expected["shared"] <= SLACK
        and found["shared"] <= SHARED[found["name"].split()[0]],
    }
    for loop in found["loops"]:
        counts, waits = loop["counts"], loop["waits"]
        # 3.9 puts a barrier of its own between a block's reads and its copies.
        barriers = expected["barriers"] + (found["triton"] >= "3.9" and bool(expected["waits"]))
        copies = {key: value for key, value in counts.items() if key.startswith("load_to_lds")}
        of_a_loop = {
            "instructions of the matrix units": loop["mfma"] == expected["mfma"],
            "copies past the registers": copies == expected["load_to_lds"],
            "what waits leave in flight": expected["waits"] is None or waits == expected["waits"],
            "a full drain": 0 not in waits,
            "what waits leave of the other operand": not waits or min(waits) >= expected["least"],
            "barriers": counts.get("barrier", 0) == barriers,
            "shuffles": counts.get("shuffle 32", 0) == expected["shuffles"],
            "scratch": not any(key.startswith("scratch") for key in counts),
            "loads of less than 32 bits": not counts.keys() & {"load 8", "load 16", "lds_write 8", "lds_write 16"},
            "order": not loop["order"],
            "branches": loop["branches"] == 1,  # a second one would be a loop over lanes
        }
        rules |= {name: kept and rules.get(name, True) for name, kept in of_a_loop.items()}
    return [name for name, kept in rules.items() if not kept and name not in known(found)]


def known(found: dict) -> tuple[str, ...]:
    """Rules that are not kept, and why.

    Columns that are cut off, of rows that are gathered from pages: LLVM unpacks one element of a block of keys where it
    is fetched, and waits there.
    """
    dims, how = found["name"].split()[1], found["name"].split()[-1]
    return DRAINS if dims.startswith("40-") and how == "gathered" else ()


@pytest.mark.timeout(110)
def test_a_sample_compiles_as_it_should(tmp_path):
    check(gate_rows(sys.executable, GATE, "quick", processes(), cache=tmp_path, seconds=100), 3, faults)


RIGHT = {
    "name": "gfx950 right", "triton": "3.7.1", "spilled": {"vgpr_spill_count": 0, "private_segment_fixed_size": 0},
    "accumulators": 0, "registers": 200, "shared": 1200, "order": [], "scratch": 0,
    "expected": {
        "mfma": {"32x32x16_bf16": 32}, "loops": 1, "load_to_lds": {"load_to_lds 128": 4}, "waits": [4], "least": 1,
        "barriers": 1, "shuffles": 0, "shared": 1024,
    },
}  # fmt: skip
LOOP = {
    "mfma": {"32x32x16_bf16": 32}, "counts": {"load_to_lds 128": 4, "lds_read 128": 12, "barrier": 1}, "waits": [4],
    "order": [], "branches": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"mfma": {"16x16x32_bf16": 64}}, "instructions of the matrix units"),
        ({"counts": {"load_to_lds 32": 16, "barrier": 1}}, "copies past the registers"),
        ({"counts": {"load_to_lds 128": 4, "barrier": 1, "shuffle 32": 1}}, "shuffles"),
        ({"counts": {"load_to_lds 128": 4, "barrier": 1, "scratch 32": 1}}, "scratch"),
        ({"counts": {"load_to_lds 128": 4, "barrier": 2}}, "barriers"),
        ({"counts": {"load_to_lds 128": 4, "barrier": 1, "load 16": 8}}, "loads of less than 32 bits"),
        ({"waits": [2]}, "what waits leave in flight"),
        ({"waits": [4, 0]}, "a full drain"),
        ({"waits": [4, 0]}, "what waits leave of the other operand"),
        ({"order": ["a step begins without a wait"]}, "order"),
        ({"branches": 2}, "branches"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_each_rule_of_a_loop_is_kept(change, fault):
    assert not faults({**RIGHT, "loops": [LOOP]})
    assert fault in faults({**RIGHT, "loops": [{**LOOP, **change}]})


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"scratch": 1}, "spills"),
        ({"spilled": {"vgpr_spill_count": 1, "private_segment_fixed_size": 0}}, "spills"),
        ({"loops": [LOOP, LOOP]}, "loops"),
        ({"order": ["ds_read_b128 at once behind a wait for copies"]}, "order"),
        ({"shared": 170000}, "shared memory"),
        ({"error": "RuntimeError: PassManager::run failed"}, "RuntimeError: PassManager::run failed"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_each_rule_of_a_kernel_is_kept(change, fault):
    assert faults({**RIGHT, "loops": [LOOP], **change}) == [fault]


def test_a_known_fault_is_no_others():
    one_more = {**LOOP, "counts": {**LOOP["counts"], "barrier": 2}, "waits": [4, 0]}
    for name in ("gfx950 64-64 256x64 staged gathered", "gfx950 40-64 256x64 staged paged"):
        assert set(DRAINS) <= set(faults({**RIGHT, "name": name, "loops": [one_more]}))
    found = faults({**RIGHT, "name": "gfx950 40-64 256x64 staged gathered", "loops": [one_more]})
    assert "barriers" in found
    assert not set(DRAINS) & set(found)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", TRITONS)
def test_everything_compiles_as_it_should(version, tmp_path):
    found = gate_rows(triton(version), GATE, "all", processes(), cache=tmp_path, seconds=3500)
    assert {one["triton"].split("+")[0] for one in found if "triton" in one} == {version}
    check(found, 100, faults)
