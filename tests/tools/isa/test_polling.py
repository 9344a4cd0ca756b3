"""What `polling_faults` asks of a loop that waits for a chunk, on a loop made up for it."""

from __future__ import annotations

import pytest
from loops import text

from polling import polling_faults
from tilestream_tools.isa import amdgcn

#: One lane of the wave looks, and hands round what it saw.
FIRST_LANE = [
    "s_and_saveexec_b64 s[20:21], s[22:23]",
    "v_mbcnt_lo_u32_b32 v2, exec_lo, 0",
    "v_mbcnt_hi_u32_b32 v2, exec_hi, v2",
    "v_cmp_eq_u32_e32 vcc, 0, v2",
    "s_and_saveexec_b64 s[24:25], vcc",
]
LOOK = ["global_load_dword v2, v3, s[22:23] sc0 sc1", "s_waitcnt vmcnt(0)", "buffer_inv sc0 sc1"]
ALL_LANES = ["s_or_b64 exec, exec, s[24:25]", "s_or_b64 exec, exec, s[20:21]"]
REST = ["s_memrealtime s[30:31]", "s_sleep 32"]


def faults(lines: list[str]) -> list[str]:
    return polling_faults(amdgcn.parse(text(lines)))


@pytest.mark.parametrize("look", ["global_load_dword v2, v3, s[22:23]", "global_atomic_add v2, v3, v4, s[22:23]"])
def test_a_loop_as_it_should_be(look):
    # Triton 3.9 looks by an atomic.
    assert not faults([*FIRST_LANE, f"{look} sc0 sc1", *LOOK[1:], *ALL_LANES, *REST])


#: The worker's first thread looks: its mask is made before the loop, in registers that were used before.
FIRST_THREAD = ["s_and_saveexec_b64 s[20:21], s[22:23]", "s_and_saveexec_b64 s[24:25], s[0:1]"]


@pytest.mark.parametrize(
    ("before", "inside", "right"),
    [
        (["v_cmp_eq_u32_e64 s[0:1], 0, v0"], [], True),
        (["s_load_dwordx2 s[0:1], s[4:5], 0x130", "v_cmp_eq_u32_e64 s[0:1], 0, v0"], [], True),
        (["v_cmp_eq_u32_e64 s[0:1], 0, v0", "s_mov_b64 s[0:1], -1"], [], False),
        (["v_cmp_eq_u32_e64 s[0:1], 0, v0"], ["s_mov_b64 s[0:1], -1"], False),
        ([], [], False),
    ],
)
def test_the_mask_of_the_first_thread(before, inside, right):
    loop = text([*FIRST_THREAD, *LOOK, *ALL_LANES, *REST, *inside])
    head, rest = loop.split(".LBB", 1)
    made = head + "".join(f"\t{line}\n" for line in before) + ".LBB" + rest
    assert polling_faults(amdgcn.parse(made)) == ([] if right else ["many lanes: global_load_dword"])


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ([*LOOK, *REST], ["many lanes: global_load_dword"]),
        ([*FIRST_LANE, *ALL_LANES, *LOOK, *REST], ["many lanes: global_load_dword"]),
        ([*FIRST_LANE, *LOOK[:2], *ALL_LANES, *REST], ["no acquire behind the look: s_waitcnt vmcnt(0); "]),
        ([*FIRST_LANE, LOOK[0], LOOK[2], *ALL_LANES, *REST], ["no acquire behind the look: buffer_inv sc0 sc1; "]),
        (
            [*FIRST_LANE, "global_load_dword v2, v3, s[22:23] sc1", *LOOK[1:], *ALL_LANES, *REST],
            ["0 looks at the system's scope"],
        ),
        ([*FIRST_LANE, *LOOK, *LOOK, *ALL_LANES, *REST], ["2 looks at the system's scope"]),
        ([*FIRST_LANE, *LOOK, *ALL_LANES, REST[1]], ["no time in the loop"]),
        ([*FIRST_LANE, *LOOK, *ALL_LANES, REST[0]], ["no polling loop"]),
    ],
)
def test_what_is_missing_is_told(lines, fault):
    found = faults(lines)
    assert len(found) == len(fault)
    assert all(one.startswith(said) for one, said in zip(found, fault, strict=True)), found
