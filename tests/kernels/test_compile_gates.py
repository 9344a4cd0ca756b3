"""The compile gates (`gates`): every kernel compiles with no GPU, and keeps the rules of its gate.

The emulator knows each instruction of AMD's: `tests/tools/emulator` executes kernels on it.

The quick tier takes a sample of each gate through the Triton that is installed. The slow one takes every case through
Triton 3.6, 3.7 and 3.9 (see `tritons`), but those whose kernels are as they were when they held: see `gates.held`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from gates import engine
from gates.cdna_attention import known
from gates.held import Held, Part, left_of, named
from gates.hopper_attention import rescales_lazily

from releases import release
from tilestream_tools.emulator.program import unknown_of
from tritons import TRITONS, gate_rows, processes, triton

GATES = Path(__file__).parent / "gates"
#: Cases by architecture: what the plan has no candidate for is not compiled, and missed here.
COUNTS = {
    "portable gemm": {
        "sm_90a": 395, "gfx942": 345, "gfx950": 291, "sm_80": 29, "sm_89": 51, "sm_100": 36, "sm_103": 8, "sm_110": 8,
        "sm_120": 56,
    },
    "portable attention": {
        "sm_90a": 241, "gfx942": 206, "gfx950": 236, "sm_80": 39, "sm_89": 49, "sm_100": 49, "sm_103": 6, "sm_110": 6,
        "sm_120": 49,
    },
    "portable grouped": {
        "sm_90a": 257, "gfx942": 249, "gfx950": 222, "sm_80": 18, "sm_89": 27, "sm_100": 30, "sm_103": 4, "sm_110": 4,
        "sm_120": 30,
    },
    "portable grouped sources": {
        "sm_90a": 55, "gfx942": 78, "gfx950": 73, "sm_80": 4, "sm_89": 4, "sm_100": 1, "sm_103": 1, "sm_110": 1,
        "sm_120": 4,
    },
    "one tile": {"sm_90a": 994},
    "hopper gemm": {"sm_90a": 826},
    "hopper grouped": {"sm_90a": 380},
    "hopper grouped sources": {"sm_90a": 158},
    "hopper attention": {"sm_90a": 153},
    "hopper realign": {"sm_90a": 10},
    "hopper strips": {"sm_90a": 100},
    "cdna gemm": {"gfx942": 150, "gfx950": 159},
    "cdna attention": {"gfx942": 90, "gfx950": 121},
    "trace": {"sm_90a": 22},
}  # fmt: skip
#: What a Triton that does not know an architecture says of it.
UNKNOWN = {("3.6.0", "sm_110"): "Value 'sm_110a' is not defined for option 'gpu-name'"}
#: Of AMD's instructions in a sample, those that are compared with no oracle alone (`tests/tools/emulator/executed`:
#: ``elementwise``, ``moves``, ``folding``), but executed in kernels whose results are.
NOT_ALONE = {
    "buffer_load_ubyte", "buffer_load_ushort", "global_store_dwordx4", "s_addk_i32", "s_andn2_saveexec_b64",
    "s_bitset1_b32", "s_cbranch_execnz", "s_cbranch_vccz", "s_memrealtime", "s_mulk_i32", "s_or_saveexec_b64",
    "s_orn2_b64", "s_setprio", "s_sleep", "v_accvgpr_read_b32", "v_accvgpr_write_b32", "v_bitop3_b16",
    "v_cmp_ne_u16_sdwa", "v_cndmask_b32_sdwa", "v_fma_mixhi_f16", "v_lshlrev_b16_sdwa",
    "v_mfma_scale_f32_16x16x128_f8f6f4", "v_permlane16_swap_b32", "v_subrev_co_u32",
}  # fmt: skip
EMULATED = Path(__file__).parents[2] / "benchmarks" / "results" / "amd" / "emulated.json"
#: Cases of a sample, and how many rules each has at least.
SAMPLES = {
    "portable gemm": (42, 3),
    "portable attention": (18, 3),
    "portable grouped": (32, 3),
    "portable grouped sources": (19, 5),
    "one tile": (5, 5),
    "hopper gemm": (27, 22),
    "hopper grouped": (9, 5),
    "hopper grouped sources": (6, 8),
    "hopper attention": (6, 16),
    "hopper realign": (3, 8),
    "hopper strips": (3, 5),
    "cdna gemm": (9, 17),
    "cdna attention": (3, 24),
    "trace": (5, 5),
}
#: Of Hopper's GEMM by tile, both ways round.
TILES = {
    "cooperative 128x256": 42, "cooperative 128x224": 28, "cooperative 128x192": 80, "cooperative 128x160": 34,
    "cooperative 128x128": 48, "cooperative 128x96": 34, "cooperative 256x192": 16, "cooperative 256x160": 16,
    "cooperative 256x128": 32, "cooperative 256x96": 23, "ping_pong 128x128": 17, "ping_pong 64x256": 35,
    "cooperative 128x64": 42, "ping_pong 64x128": 94, "single 64x128": 34, "single 64x64": 38, "single 64x32": 34,
    "single 64x16": 34, "cooperative 128x32": 42, "cooperative 128x16": 42, "paired 256x256": 14, "paired 512x192": 20,
    "triple 192x192": 8, "triple 192x160": 19,
}  # fmt: skip


def rows(gate: str, *arguments: str, cache: Path, python: str = sys.executable, seconds: float = 850) -> list[dict]:
    """What a gate prints."""
    return gate_rows(python, GATES, gate, *arguments, cache=cache, seconds=seconds)


def bare(mnemonics: Iterable[str]) -> set[str]:
    """Instructions without their encodings, which have the same operands."""
    return {re.sub("_e(32|64)$", "", mnemonic) for mnemonic in mnemonics}


def check(found: list[dict], count: int) -> None:
    assert len(found) == len({(one["arch"], one["name"]) for one in found}) == count
    broken = [one for one in found if one["faults"]]
    assert not broken, f"{len(broken)} of {count}, such as {broken[:3]}"
    assert unknown_of({(one["arch"], *form) for one in found for form in one["instructions"]}) == {}


@pytest.mark.parametrize("gate", SAMPLES)
def test_a_sample_compiles_as_it_should(gate, tmp_path):
    count, rules = SAMPLES[gate]
    found = rows(gate, "quick", "--processes", processes(), cache=tmp_path)
    check(found, count)
    assert min(one["rules"] for one in found) == rules
    (shown,) = json.loads(EMULATED.read_text(encoding="utf-8"))["mnemonics"]
    compiled = {mnemonic for one in found for mnemonic, _ in one["instructions"]}
    assert compiled <= {*shown["executed"], *shown["compared"]}
    assert bare(compiled) - bare(shown["compared"]) <= NOT_ALONE


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", TRITONS)
@pytest.mark.parametrize(("gate", "arch"), [(gate, arch) for gate, counts in COUNTS.items() for arch in counts])
def test_everything_compiles_as_it_should(gate, arch, version, tmp_path):
    how = {"cache": tmp_path, "python": triton(version), "seconds": 3500}
    part, names = Part(version, gate, arch), ["all"]
    if gate != "trace" and (version, arch) not in UNKNOWN:
        every = named(part, how["python"], tmp_path)
        assert len(every) == COUNTS[gate][arch]
        names = left_of(every, Held().of(part))
    found = rows(gate, *names, "--arch", arch, "--processes", processes(), **how) if names else []
    if (version, arch) in UNKNOWN:
        assert len(found) == COUNTS[gate][arch]
        assert all(UNKNOWN[version, arch] in one["faults"]["error"][0] for one in found)
        return
    check(found, COUNTS[gate][arch] if names == ["all"] else len(names))
    assert {one["triton"] for one in found} <= {version}


@pytest.mark.parametrize("gate", COUNTS)
def test_no_case_has_dropped_out(gate, tmp_path):
    named = rows(gate, "names", cache=tmp_path, seconds=850)
    assert Counter(one["arch"] for one in named) == COUNTS[gate]
    if gate == "hopper gemm":
        assert Counter(" ".join(one["name"].split()[:2]) for one in named) == TILES


def test_the_assembler_is_heard_of_a_kernel_that_is_in_the_cache(tmp_path):
    for _ in range(2):
        check(rows("portable attention", "bfloat16 128 128x32 worst: the list", "--arch", "sm_80", cache=tmp_path), 1)


def test_an_instruction_that_the_emulator_does_not_know_is_named():
    known = {("gfx942", "v_add_u32_e32", "v0, s1, v2"), ("gfx950", "s_waitcnt", "vmcnt(0)")}
    unknown = {
        ("gfx950", "v_dot2_f32_f16", "v0, v1, v2, v3"), ("gfx942", "v_add_f32_e64", "v0, v1, v2 mul:2"),
        ("gfx942", "v_mfma_f32_4x4x4_16b_f16", "v[0:3], v[4:5], v[6:7], v[0:3]"),
        ("gfx942", "v_mov_b32_e32", "v0, foo"),
    }  # fmt: skip
    assert unknown_of(known) == {}
    assert unknown_of(known | unknown).keys() == {mnemonic for _, mnemonic, _ in unknown}


def test_parts_are_counted_behind_a_barrier(tmp_path):
    check(rows("portable gemm", "bfloat16 64x64 worst nt", "--arch", "sm_90a", cache=tmp_path), 1)


def test_waves_do_not_read_counters_for_themselves(tmp_path):
    check(rows("portable gemm", "bfloat16 64x64 stealing nt", cache=tmp_path), 3)


# Rules ----------------------------------------------------------------------------------------------------------------


def test_a_rule_wants_a_value_or_one_of_several():
    rules = {"a value": (3, 3), "a range": (2, range(3)), "one of two": (5, frozenset((5, 7)))}
    wrong = {"a value": (2, 3), "a range": (3, range(3)), "one of two": (6, frozenset((5, 7)))}
    assert engine.faults(rules) == {}
    assert engine.faults(rules | {"a value": wrong["a value"]}) == {"a value": [2, "3"]}
    assert list(engine.faults(wrong)) == list(wrong)


@pytest.mark.parametrize(("has", "kept"), [(999, False), (1000, True), (2024, True), (2025, False)])
def test_a_kernel_has_a_little_more_shared_memory_than_its_stages(has, kept):
    kernel = SimpleNamespace(metadata=SimpleNamespace(shared=has))
    assert engine.is_kept(*engine.shared_memory(kernel, "gfx942", 1000)) == kept
    kernel = SimpleNamespace(metadata=SimpleNamespace(shared=65537))
    assert not engine.is_kept(*engine.shared_memory(kernel, "gfx942", 65000))


def test_a_known_fault_is_no_others():
    assert known("40-64 256x64 staged gathered") == ("a full drain", "what waits leave of the other operand")
    assert known("64-64 256x64 staged gathered") == known("40-64 256x64 staged paged") == ()
    assert release("3.10.0+git") > release("3.9.0")


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
    assert rescales_lazily(ptx.replace(*change)) is right


# Seeded faults --------------------------------------------------------------------------------------------------------

HOPPER_GEMM = ("hopper gemm", "cooperative 128x256 bfloat16 plain nt")
HOPPER_ATTENTION = ("hopper attention", "64-64 full ordered 3x128")
CDNA_GEMM = ("cdna gemm", "gfx942 128x128 direct bfloat16 plain nt")
#: Gate and case, what is changed in it (see `gates.engine.Seed`), and the rules that are broken.
SEEDS = {
    "fewer registers": (HOPPER_GEMM, {"change": {"MATH_REGISTERS": 120}}, {"registers"}),
    "a stage more": (HOPPER_GEMM, {"change": {"STAGES": 5}}, {"shared memory", "barriers"}),
    "spills": (("hopper gemm", "single 64x64 bfloat16 worst nt"), {"options": {"maxnreg": 64}}, {"spills"}),
    "no turns": (
        HOPPER_GEMM, {"mutant": "no turns"},
        {"barriers", "barriers that are not used", "barriers whose place something else takes"},
    ),
    "stores in another layout": (HOPPER_GEMM, {"mutant": "scattered"}, {"matrix stores"}),
    "attention: a load warp with fewer registers": (
        HOPPER_ATTENTION, {"change": {"LOAD_REGISTERS": 24}}, {"registers"}
    ),
    "attention: a stage less": (HOPPER_ATTENTION, {"change": {"STAGES": 3}}, {"shared memory"}),
    "attention: no turns": (
        HOPPER_ATTENTION, {"change": {"ORDERED": False}}, {"loops over key blocks", "barriers of a key block"}
    ),
    "attention: spills": (HOPPER_ATTENTION, {"change": {"MATH_REGISTERS": 96}}, {"spills"}),
    # Two stages: each step waits for every copy. Another depth: other waits, and another size of shared memory.
    "CDNA: two stages": (
        CDNA_GEMM, {"change": {"STAGES": 2}}, {"a full drain", "what waits leave in flight", "shared memory"}
    ),
    "CDNA: through registers": (
        CDNA_GEMM, {"change": {"DIRECT": False}}, {"copies past the registers", "barriers"}
    ),
    "CDNA: another instruction": (
        CDNA_GEMM, {"change": {"SHAPE": [32, 32, 8], "STRIP": 64, "STRIP_M": 64}}, {"instructions of the matrix units"}
    ),
    "Blackwell: spills": (
        ("portable gemm", "sm_100 bfloat16 128x128 worst nt"), {"options": {"maxnreg": 80}}, {"spills: bytes"}
    ),
    "Ada: one sum of all products": (
        ("portable gemm", "sm_89 float8 precise 128x128 worst nt"), {"change": {"PROMOTED": False}},
        {"sums that the kernel adds to its accumulator"},
    ),
    # 128 x 256 with 4 warps does not fit the registers.
    "portable: spills": (
        ("portable gemm", "sm_90a bfloat16 128x256 worst nn"), {"options": {"num_warps": 4}}, {"spills: bytes"}
    ),
    "portable: a lane has half of a pair's elements": (
        ("portable attention", "sm_90a pair of 128 columns bfloat16"), {"options": {"num_warps": 8}},
        {"accesses of 16 bytes"},
    ),
}  # fmt: skip


def seeded(gate: str, case: str, cache: Path, python: str = sys.executable, **seed: Any) -> dict[str, list]:
    """The faults of a case that is changed so."""
    words = [f"--{what}={text if isinstance(text, str) else json.dumps(text)}" for what, text in seed.items()]
    (found,) = rows(gate, case, *words, cache=cache, python=python)
    return found["faults"]


@pytest.mark.parametrize("name", SEEDS)
def test_a_gate_sees_a_fault(name, tmp_path):
    case, seed, broken = SEEDS[name]
    assert broken <= seeded(*case, tmp_path, **seed).keys()


@pytest.mark.parametrize(
    ("version", "name"),
    [
        *(
            pytest.param(version, f"cooperative 128x256 bfloat16 {how} nt", marks=marks)
            for version, marks in (("", ()), *((version, pytest.mark.slow) for version in TRITONS))
            for how in ("worst", "ordered")
        ),
        pytest.param("3.9.0", "ping_pong 64x128 bfloat16 stealing nt", marks=pytest.mark.slow),
    ],
)
def test_fewer_registers_spill_where_they_cannot_be_forced(version, name, tmp_path):
    """By stream_k, at a gate, with shared queues: `tilestream.plan.policy.hopper.no_registers`, docs/design.md."""
    python = triton(version) if version else sys.executable
    found = seeded("hopper gemm", name, tmp_path, python, change={"LOAD_REGISTERS": 24, "MATH_REGISTERS": 240})
    assert found.keys() == {"spills", "registers"}
    (_, stack, _), _ = found["spills"]
    assert 0 < stack <= 80
