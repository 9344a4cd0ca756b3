"""PTX: where barriers are made, who uses them, whose place something else takes; whether one lane looks at a signal."""

import pytest

from tilestream_tools.isa import sass

MADE = """
	mov.b32 	%r172, global_smem;
	add.s32 	%r169, %r172, 212992;
	// begin inline asm
	@%p28 mbarrier.init.shared::cta.b64 [%r169], 1;
	add.s32 	%r170, %r172, 213000;
	@%p28 mbarrier.init.shared::cta.b64 [%r170], 2;
	mov.b32 	%r76, global_smem;
	add.s32 	%r83, %r76, 212992;
	add.s32 	%r84, %r76, 213016;
	mov.b32 	%r85, %r83;
	add.s32 	%r86, %r76, 212984;
	shl.b32 	%r90, %r1, 3;
	add.s32 	%r91, %r76, %r90;
	add.s32 	%r92, %r91, 212992;
	mad.lo.s32 	%r93, %r1, 8, %r76;
	@%p1 mov.b32 	%r94, %r83;
	mov.b32 	%r95, %r83;
	mov.b32 	%r95, %r84;
	add.s32 	%r96, %r95, 8;
"""
#: What those barriers are for.
USED = """
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r92], %r7;
	@%p28 mbarrier.arrive.shared::cta.b64 _, [%r169];
	@%p28 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r170], 512;
	mbarrier.try_wait.parity.shared::cta.b64 complete, [%r170], %r7;
"""


def test_barriers_are_told_with_their_arrivals():
    assert sass.made_barriers(MADE) == [(sass.Place(212992, False), 1), (sass.Place(213000, False), 2)]


@pytest.mark.parametrize(
    ("more", "places"),
    [
        ("", []),
        (USED, []),
        ("	@%p23 st.shared.b64 [ %r83 + 0 ], %rd34;", [212992]),
        ("	@%p23 st.shared.b64 [ %r84 + 0 ], %rd34;", []),
        ("	st.shared.b64 [ %r85 + 0 ], %rd34;", [212992]),
        ("	ld.shared.b64 	%rd37, [global_smem+213000];", [213000]),
        ("	ld.shared.v2.b32 	{%r1, %r2}, [global_smem+212992];", [212992]),
        ("	ld.shared.b64 	%rd37, [global_smem+213008];", []),
        # Its second word, and what begins before it.
        ("	st.shared.b32 	[%r83+4], %r1;", [212992]),
        ("	st.shared.b32 	[%r172+213004], %r1;", [213000]),
        ("	st.shared.b16 	[global_smem+212998], %rs1;", [212992]),
        ("	st.shared.b64 	[%r86], %rd1;", []),
        ("	st.shared.v2.b32 	[%r86], {%r1, %r2};", []),
        ("	st.shared.v4.b32 	[%r86], {%r1, %r2, %r3, %r4};", [212992]),
        ("	st.shared.v2.b64 	[%r86+8], {%rd1, %rd2};", [212992, 213000]),
        ("	st.shared.b32 	[%r84+-12], %r1;", [213000]),
        # Whatever it is.
        ("	atom.shared.add.u32 	%r1, [%r83], 1;", [212992]),
        ("	atom.relaxed.shared::cta.cas.b64 	%rd1, [%r170], %rd2, %rd3;", [213000]),
        ("	red.shared.add.u32 	[%r170], 1;", [213000]),
        ("	ld.volatile.shared.u32 	%r1, [%r83];", [212992]),
        ("	stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r86], {%r1, %r2, %r3, %r4};", [212992]),
        ("	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r83];", [212992, 213000]),
        ("	cp.async.cg.shared.global [%r86], [%rd1], 16;", [212992]),
        ("	cp.async.ca.shared.global [%r86], [%rd1], 8;", []),
        # At an index: what begins there.
        ("	st.shared.b64 	[%r92], %rd1;", [212992]),
        ("	st.shared.b32 	[%r91+213000], %r1;", [213000]),
        ("	st.shared.b32 	[%r93+213000], %r1;", [213000]),
        ("	ld.shared.b8 	%rs1, [%r91+212996];", []),
        # Of which nothing is known: written twice, on a condition, by something else; or not in shared memory.
        ("	st.shared.b32 	[%r94], %r1;", []),
        ("	st.shared.b32 	[%r96], %r1;", []),
        ("	st.shared.b32 	[%r99], %r1;", []),
        ("	st.global.b32 	[%r83], %r1;", []),
        ("	ld.shared.b32 	%r1, [212992];", []),
    ],
)
def test_a_place_is_reported(more, places):
    assert sass.reused_barriers(MADE + more) == places


@pytest.mark.parametrize("at", ["[global_smem]", "[%r300]", "[%r300+0]", "[ %r300 + 4 ]"])
def test_the_first_place_there_is(at):
    made = "\nmov.b32 %r300, global_smem;\nmbarrier.init.shared::cta.b64 [%r300], 1;\n"
    assert sass.made_barriers(made) == [(sass.Place(0, False), 1)]
    assert sass.reused_barriers(f"{made}st.shared.b32 {at}, %r1;") == [0]


def test_barriers_of_which_no_place_can_be_told_are_not_passed_over():
    assert sass.reused_barriers("st.shared.b32 [%r1], %r2;") == []
    for ptx in (MADE.replace("mbarrier.init", "mbarrier.begin"), MADE.replace("global_smem", "elsewhere")):
        with pytest.raises(ValueError, match="no place where one is made can be read"):
            sass.reused_barriers(ptx)


@pytest.mark.parametrize(
    ("ptx", "sizes", "idle"),
    [
        (MADE + USED, [2], []),
        (MADE + USED, [1, 1], []),
        (MADE + USED, [1], []),
        (MADE, [1, 1], [0, 1]),
        (MADE + USED.replace("[%r92]", "[%r91]"), [1, 1], [0]),
        (MADE + USED.replace("_, [%r169]", "_, [%r170]"), [1, 1], [0]),
        (MADE + USED.replace("complete, [%r170]", "complete, [%r171]"), [1, 1], [1]),
        (MADE + USED.replace("_, [%r170]", "_, [%r169]"), [1, 1], [1]),
        (MADE + USED, [1, 1, 2], [2]),
        (MADE.replace("[%r170], 2", "[%r171], 2") + USED, [1, 1], [1]),
        (MADE + "@%p1 mbarrier.init.shared::cta.b64 [%r84], 1;\n" + USED, [2], [1]),
    ],
)
def test_unused_barriers_are_found(ptx, sizes, idle):
    assert sass.idle_barriers(ptx, sizes) == idle


# Looks at signals -----------------------------------------------------------------------------------------------------

LANE = """
mov.u32 %r1, %tid.x;
and.b32 %r18, %r1, 31;
setp.eq.b32 %p83, %r18, 0;
setp.ne.b32 %p84, %r20, 0;
and.pred %p85, %p84, %p83;
and.b32 %r19, %r1, 7;
setp.eq.b32 %p86, %r19, 0;
elect.sync _|%p87, -1;
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("@%p83 ld.global.sys.acquire.b32 %r81, [ %rd74 + 0 ];", (1, 0)),
        ("@%p83 ld.acquire.sys.global.b32 %r81, [ %rd74 + 0 ];", (1, 0)),
        ("@%p85 atom.global.sys.acquire.add.u32 %r81, [ %rd74 ], 0;", (1, 0)),
        ("@%p87 ld.global.sys.acquire.b32 %r81, [ %rd74 + 0 ];", (1, 0)),
        ("ld.global.sys.acquire.b32 %r81, [ %rd74 + 0 ];", (0, 1)),
        ("@%p84 ld.global.sys.acquire.b32 %r81, [ %rd74 + 0 ];", (0, 1)),
        ("@%p86 ld.global.sys.acquire.b32 %r81, [ %rd74 + 0 ];", (0, 1)),
        ("@%p83 ld.global.gpu.acquire.b32 %r81, [ %rd74 + 0 ];", (0, 0)),
        ("@%p83 ld.global.sys.relaxed.b32 %r81, [ %rd74 + 0 ];", (0, 0)),
    ],
)
def test_polls_are_found(line, found):
    assert sass.looks(LANE + line) == found


def test_each_is_counted():
    one, all_ = "@%p83 ld.global.sys.acquire.b32 %r81, [ %rd74 ];", "ld.global.sys.acquire.b32 %r81, [ %rd74 ];"
    assert sass.looks("\n".join([LANE, one, all_, one])) == (2, 1)
