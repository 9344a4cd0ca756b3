"""Barriers whose place something else takes, as PTX has it."""

import pytest

from tilestream.isa import sass

MADE = """
	add.s32 	%r169, %r172, 212992;
	// begin inline asm
	@%p28 mbarrier.init.shared::cta.b64 [%r169], 1;
	add.s32 	%r170, %r172, 213000;
	@%p28 mbarrier.init.shared::cta.b64 [%r170], 2;
	add.s32 	%r83, %r76, 212992;
	add.s32 	%r84, %r76, 213016;
	@%p28 mbarrier.arrive.shared::cta.b64 _, [%r169];
"""


@pytest.mark.parametrize(
    ("more", "places"),
    [
        ("", []),
        ("	@%p23 st.shared.b64 [ %r83 + 0 ], %rd34;", [212992]),
        ("	@%p23 st.shared.b64 [ %r84 + 0 ], %rd34;", []),
        ("	ld.shared.b64 	%rd37, [global_smem+213000];", [213000]),
        ("	ld.shared.v2.b32 	{%r1, %r2}, [global_smem+212992];", [212992]),
        ("	ld.shared.b64 	%rd37, [global_smem+213008];", []),
    ],
)
def test_a_place_is_reported(more, places):
    assert sass.reused_barriers(MADE + more) == places
