"""The emulator's machine on small programs: what it computes, and that each of its checks finds what it is for."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from tilestream_tools.emulator import Fault, Machine, Memory, decode
from tilestream_tools.emulator.machine import Grid

Host = Callable[[int, Machine], None]
HEAD = """.amdgcn_target "amdgcn-amd-amdhsa--gfx950"
kernel:
{}
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel kernel
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_kernarg_size 16
\t.end_amdhsa_kernel
"""
#: s9: the workgroup's number; s[2:3]: the words' address; v1: a lane's offset in them; v2: its number, of all waves'.
BEGIN = """s_mov_b32 s9, s2
s_load_dwordx2 s[2:3], s[0:1], 0x0
v_mov_b32_e32 v2, v0
v_lshlrev_b32_e32 v1, 2, v0
s_waitcnt lgkmcnt(0)"""
#: Wave 0 goes on; others leave at .Lend, which the text has to have.
WAVE_0_ONLY = """v_readfirstlane_b32 s4, v0
s_cmp_lg_u32 s4, 0
s_cbranch_scc1 .Lend"""


def run(
    text: str, waves: int = 1, groups: int = 1, words: int = 512, dies: int = 1, host: Host | None = None, **how
) -> np.ndarray:
    """The words that a program leaves, which were 0, 1, 2, ... before it. ``host`` gets their address, too."""
    lines = "\n".join(line if line.endswith(":") else f"\t{line}" for line in text.splitlines())
    program = decode(HEAD.format(lines))
    assert program.unknown == {}
    memory, begin = Memory(), np.arange(words, dtype=np.uint32)
    at = memory.allocate(begin, "the words")
    arguments = memory.allocate(np.array([at, 0], np.uint64), "the arguments")
    grid = Grid(groups, waves, 4096, arguments, 0, 0, program.user_registers, dies)
    Machine(memory, host=host and functools.partial(host, at), **how).execute(program.steps, grid)
    return memory.read(at, begin)


def refused(text: str, match: str, **how) -> None:
    """Under every landing."""
    for landing in ("early", "late", "random"):
        with pytest.raises(Fault, match=match):
            run(text, landing=landing, **how)


@pytest.mark.parametrize("landing", ["early", "late", "random"])
def test_lanes_add_what_they_load(landing):
    found = run(f"""{BEGIN}
global_load_dword v3, v1, s[2:3]
s_waitcnt vmcnt(0)
v_add_u32_e32 v3, v3, v2
global_store_dword v1, v3, s[2:3]""", waves=2, landing=landing)  # fmt: skip
    assert found[:128].tolist() == [2 * i for i in range(128)]
    assert found[128:].tolist() == list(range(128, 512))


@pytest.mark.parametrize(
    ("product", "bits"),
    [
        ("v_mul_f32_e32 v3, v4, v5", 0x80000000),  # -1.0 * 0.0
        ("v_fma_f32 v3, v4, v5, neg(0)", 0x80000000),
        ("v_fma_f32 v3, v4, v5, 0", 0x00000000),
        ("v_fma_mixlo_f16 v3, v4, v5, neg(0)", 0x00008000),
        ("v_fma_mixhi_f16 v3, v4, v5, neg(0)", 0x80000000),
        ("v_fma_mixlo_f16 v3, v4, v5, 0", 0x00000000),
        ("v_fma_mix_f32 v3, v4, v5, neg(1.0)", 0xBF800000),
        ("v_add_f16_e64 v3, v5, neg(1.0)", 0x0000BC00),
    ],
)
def test_a_constant_may_be_negated(product, bits):
    """The sign of a zero shows that a product is added to -0.0, as Triton 3.9 has it."""
    found = run(f"""{BEGIN}
v_mov_b32_e32 v3, 0
v_mov_b32_e32 v4, -1.0
v_mov_b32_e32 v5, 0
{product}
global_store_dword v1, v3, s[2:3]""")
    assert set(found[:64]) == {bits}


def test_a_mixed_sum_is_rounded_to_float32_and_then_to_float16():
    found = run(f"""{BEGIN}
v_mov_b32_e32 v3, 0
v_mov_b32_e32 v4, 1.0
v_mov_b32_e32 v5, 0x3f801000
v_mov_b32_e32 v6, 0x30800000
v_fma_mixlo_f16 v3, v4, v5, v6
global_store_dword v1, v3, s[2:3]""")
    assert set(found[:64]) == {0x3C00}, "1 + 2^-11 + 2^-30 becomes 1 + 2^-11, which lies between two, and then 1"


@pytest.mark.parametrize("line", ["s_mov_b32 s4, neg(1)", "v_cndmask_b32_e64 v3, v4, v5, -vcc"])
def test_scalar_operands_have_no_sign(line):
    assert decode(HEAD.format(f"\t{line}")).unknown


def test_a_register_is_not_used_before_a_wait_covers_its_load():
    refused(f"{BEGIN}\nglobal_load_dword v3, v1, s[2:3]\nv_add_u32_e32 v3, v3, v2", "v3 is used before a wait")
    two = "global_load_dword v3, v1, s[2:3]\nglobal_load_dword v4, v1, s[2:3]\ns_waitcnt vmcnt(1)\n"
    run(f"{BEGIN}\n{two}v_add_u32_e32 v3, v3, v2")
    refused(f"{BEGIN}\n{two}v_add_u32_e32 v4, v4, v2", "v4 is used before a wait")


def test_scalar_loads_land_in_any_order():
    two = "s_load_dword s4, s[0:1], 0x0\ns_load_dword s5, s[0:1], 0x4\n"
    refused(f"{BEGIN}\n{two}s_waitcnt lgkmcnt(1)\ns_add_u32 s4, s4, 1", "s4 is used before a wait")
    run(f"{BEGIN}\n{two}s_waitcnt lgkmcnt(0)\ns_add_u32 s4, s4, 1")


def test_a_register_that_an_address_still_needs_may_be_written_anew_by_a_later_load():
    run(f"{BEGIN}\nglobal_load_dword v3, v1, s[2:3]\nglobal_load_dword v3, v1, s[2:3] offset:4\ns_waitcnt vmcnt(0)")


@pytest.mark.parametrize(("offset", "kind"), [("offset:1536", "load"), ("offset:-4", "load"), ("offset:1540", "store")])
def test_an_address_of_no_tensor(offset, kind):
    access = f"global_{kind}_dword " + ("v3, v1, s[2:3]" if kind == "load" else "v1, v3, s[2:3]")
    refused(f"{BEGIN}\n{access} {offset}", "are of no tensor", words=383)


#: Each wave writes its dwords of LDS and reads those of the next, which it has zeroed; between the two comes what is
#: told.
EXCHANGE = BEGIN + """
v_xor_b32_e32 v3, 0x100, v1
v_mov_b32_e32 v4, 0
ds_write_b32 v3, v4
s_waitcnt lgkmcnt(0)
s_barrier
ds_write_b32 v1, v2
{}
ds_read_b32 v4, v3
s_waitcnt lgkmcnt(0)
global_store_dword v1, v4, s[2:3]"""  # fmt: skip


def test_waves_exchange_by_lds():
    found = run(EXCHANGE.format("s_waitcnt lgkmcnt(0)\ns_barrier"), waves=2)
    assert found[:128].tolist() == [*range(64, 128), *range(64)]


@pytest.mark.parametrize("between", ["", "s_barrier", "s_waitcnt lgkmcnt(0)"])
def test_a_race_in_lds(between):
    refused(EXCHANGE.format(between), "race: reads LDS|race: writes LDS", waves=2)


def test_lds_is_overwritten_while_it_is_read():
    text = f"""{BEGIN}
ds_write_b32 v1, v2
s_waitcnt lgkmcnt(0)
s_barrier
v_xor_b32_e32 v3, 0x100, v1
ds_read_b32 v4, v3
{{}}s_barrier
ds_write_b32 v1, v1
s_waitcnt lgkmcnt(0)"""
    refused(text.format(""), "which wave . reads", waves=2)
    run(text.format("s_waitcnt lgkmcnt(0)\n"), waves=2)
    run(text.format(""), waves=2, lds_in_order=True)


def test_lds_that_nothing_has_written():
    refused(f"{BEGIN}\nds_write_b32 v1, v2\ns_waitcnt lgkmcnt(0)\nds_read_b32 v4, v1 offset:4", "nothing has written")


def test_lds_outside_and_not_aligned():
    refused(f"{BEGIN}\nds_write_b32 v1, v2 offset:4096", "LDS has 4096 bytes")
    refused(f"{BEGIN}\nds_write_b64 v1, v[2:3]", "not aligned")


def test_barriers_that_never_open_and_loops_that_never_end():
    text = f"{BEGIN}\n{WAVE_0_ONLY}\n.Lloop:\ns_branch .Lloop\n.Lend:\ns_barrier"
    refused(text, "no end after", waves=2, limit=5000)
    # A wave that has ended is waited for by no barrier.
    run(f"{BEGIN}\n{WAVE_0_ONLY}\ns_barrier\n.Lend:\ns_nop 0", waves=2)


#: The first workgroup's wave stores 77 to word 0 and counts in word 64; the second, whose caches have the line of word
#: 0, waits for the count, and copies word 0 to word 128. What is told makes the store seen.
PUBLISH = BEGIN + """
s_mov_b64 exec, 1
v_mov_b32_e32 v5, 0
v_mov_b32_e32 v6, 1
global_load_dword v7, v5, s[2:3] offset:4
s_waitcnt vmcnt(0)
s_cmp_eq_u32 s9, 0
s_cbranch_scc0 .Lreader
v_mov_b32_e32 v8, 0x4d
global_store_dword v5, v8, s[2:3]
{release}
global_atomic_add v5, v6, s[2:3] offset:256
s_branch .Lend
.Lreader:
s_sleep 1
global_load_dword v9, v5, s[2:3] offset:256 {poll}
s_waitcnt vmcnt(0)
v_readfirstlane_b32 s5, v9
s_cmp_eq_u32 s5, 64
s_cbranch_scc1 .Lreader
{acquire}
global_load_dword v10, v5, s[2:3]
s_waitcnt vmcnt(0)
global_store_dword v5, v10, s[2:3] offset:512
.Lend:
s_nop 0"""  # fmt: skip


RELEASE, ACQUIRE = "buffer_wbl2 sc1\ns_waitcnt vmcnt(0)", "buffer_inv sc1"
NO_ORDER = "has written, with no release and acquire between"


@pytest.mark.parametrize("dies", [1, 2])
@pytest.mark.parametrize("landing", ["early", "late", "random"])
def test_a_store_is_seen_by_another_workgroup_after_a_release_and_an_acquire(landing, dies):
    text = PUBLISH.format(release=RELEASE, acquire=ACQUIRE, poll="sc1")
    found = run(text, groups=2, dies=dies, landing=landing)
    assert (found[0], found[128]) == (77, 77)


@pytest.mark.parametrize("dies", [1, 2])
@pytest.mark.parametrize(("release", "acquire"), [
    ("s_waitcnt vmcnt(0)", ACQUIRE),
    ("buffer_wbl2 sc1", ACQUIRE),  # no wait covers it
    ("buffer_wbl2 sc0\ns_waitcnt vmcnt(0)", ACQUIRE),
    (RELEASE, "s_nop 0"),
    (RELEASE, "buffer_inv sc0"),
])  # fmt: skip
def test_a_hand_over_with_a_part_of_it_missing_is_a_fault_in_every_order(release, acquire, dies):
    text = PUBLISH.format(release=release, acquire=acquire, poll="sc1")
    for seed in range(4):
        refused(text, NO_ORDER, groups=2, dies=dies, seed=seed)


def test_a_word_that_another_workgroup_writes_is_not_polled_through_caches():
    refused(PUBLISH.format(release=RELEASE, acquire=ACQUIRE, poll=""), NO_ORDER, groups=2, limit=20_000)


#: Wave 1 stores to a word that wave 0 reads: behind a barrier, before which comes what is told.
WITHIN = (
    BEGIN
    + """
s_mov_b64 exec, 1
v_readfirstlane_b32 s4, v0
v_mov_b32_e32 v5, 0
s_cmp_eq_u32 s4, 0
s_cbranch_scc1 .Lmeet
v_mov_b32_e32 v8, 0x4d
global_store_dword v5, v8, s[2:3]
.Lmeet:
{}
s_barrier
s_cmp_lg_u32 s4, 0
s_cbranch_scc1 .Lend
global_load_dword v9, v5, s[2:3]
s_waitcnt vmcnt(0)
global_store_dword v5, v9, s[2:3] offset:512
.Lend:
s_nop 0"""
)


def test_waves_of_a_workgroup_hand_over_by_a_wait_and_a_barrier():
    assert run(WITHIN.format("s_waitcnt vmcnt(0)"), waves=2)[128] == 77
    refused(WITHIN.format("s_nop 0"), NO_ORDER, waves=2)


@pytest.mark.parametrize(("poll", "acquire", "is_refused"), [
    ("sc0 sc1", "buffer_inv sc0 sc1", False), ("sc1", "buffer_inv sc0 sc1", True), ("sc0 sc1", ACQUIRE, True),
    ("sc0 sc1", "s_nop 0", True),
])  # fmt: skip
def test_what_a_host_writes_needs_the_systems_scope(poll, acquire, is_refused):
    """The host writes word 0, then word 64, while the kernel polls that."""

    def host(at: int, machine: Machine) -> None:
        if machine.executed > 500 and machine.memory.read(at, np.zeros(1, np.uint32))[0] == 0:
            machine.memory.write(at, np.array([77], np.uint32))
            machine.memory.write(at + 256, np.array([1], np.uint32))

    text = PUBLISH.format(release=RELEASE, acquire=acquire, poll=poll).replace(
        "s_cmp_eq_u32 s9, 0", "s_cmp_eq_u32 s9, 1"
    )
    for seed in range(3):
        if is_refused:
            refused(text, "what the host has written", host=host, seed=seed)
        else:
            assert run(text, host=host, seed=seed)[128] == 77


def test_what_one_seed_did_it_does_again():
    text = EXCHANGE.format("s_waitcnt lgkmcnt(0)\ns_barrier")
    assert run(text, waves=4, seed=3).tolist() == run(text, waves=4, seed=3).tolist()
