"""The PTX of pairs of CTAs: what is rewritten, what is left alone, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from tilestream.launch.hopper.multicast import for_pairs, rewritten

#: As Triton 3.6 writes it, and 3.7 and 3.9 do: the space that a copy's destination is said to be in.
SPACES = ("cluster", "cta")
PTX = """
	@%p2 mbarrier.arrive.shared::cta.b64 _, [%r1];
$L__tmp7:
	@%p1 cp.async.bulk.tensor.2d.shared::SPACE.global.mbarrier::complete_tx::bytes [%r2], [%rd1, {%r3, %r4}], [%r5];
	// begin inline asm
	// multicast begins
 mov.b32 %r6, %r7;
	// end inline asm
$L__tmp8:
	elect.sync 	%r8|%p3, -1;
	@%p3 cp.async.bulk.tensor.3d.shared::SPACE.global.mbarrier::complete_tx::bytes [%r9], [%rd2, {%r3, %r4}], [%r5];
	@%p3 cp.async.bulk.tensor.3d.shared::SPACE.global.mbarrier::complete_tx::bytes [%r10], [%rd2, {%r3, %r4}], [%r5];
	// multicast ends
 mov.b32 %r11, %r7;
	@%p12 mbarrier.arrive.shared::cta.b64 _, [%r12], 2;
	@%p12 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r13], 49152;
"""
COPY = "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"


@pytest.mark.parametrize("space", SPACES)
def test_copies_between_the_marks_and_arrivals_that_count_for_two_are_rewritten(space):
    before = PTX.replace("SPACE", space)
    made = for_pairs(before)
    for place in ("%r9", "%r10"):
        wanted = f"{{ .reg .b16 both; mov.b16 both, 3; @%p3 {COPY} [{place}], [%rd2, {{%r3, %r4}}], [%r5], both; }}"
        assert re.sub(r"@%p3\s+", "@%p3 ", made).count(wanted) == 1
    assert "mapa.shared::cluster.u32 there, %r12, other;" in made
    assert re.search(r"@%p12 mbarrier\.arrive\.shared::cta\.b64 _, \[%r12\];", made)
    assert re.search(r"@%p12 mbarrier\.arrive\.release\.cluster\.shared::cluster\.b64 _, \[there\];", made)
    # All else is as it was: each line that is none of the three, and the two marks.
    kept = [
        line
        for line in before.splitlines()
        if "tensor.3d" not in line and "], 2;" not in line and "// mult" not in line
    ]
    assert [line for line in made.splitlines() if line in kept] == kept


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("// multicast begins", "// nothing"),
        ("// multicast ends", "// nothing"),
        ("tensor.3d", "tensor.im2col.3d"),
        ("], 2;", "];"),
        ("$L__tmp8:", "$L__BB0_8:"),
        ("elect.sync 	%r8|%p3, -1;", "@%p3 bra $L__BB0_9;"),
        ("mbarrier::complete_tx::bytes", "mbarrier::complete_tx::bytes.L2::cache_hint"),
    ],
)
def test_what_is_compiled_otherwise_is_refused(old, new, space):
    with pytest.raises(
        NotImplementedError, match=r"Triton 3\.6, 3\.7 and 3\.9 compile it otherwise; take another variant"
    ):
        for_pairs(PTX.replace("SPACE", space).replace(old, new))


def test_the_text_lies_in_tritons_cache_by_what_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = [SimpleNamespace(asm={"ptx": PTX.replace("SPACE", space)}) for space in SPACES]
    options = [rewritten(kernel) for kernel in (*kernels, kernels[0])]
    paths = [one["ir_override"] for one in options]
    assert paths[0] == paths[2] != paths[1]
    assert [path.read_text() for path in tmp_path.glob("tilestream/*.ptx") if str(path) == paths[0]] == [
        for_pairs(kernels[0].asm["ptx"])
    ]
    assert all(path.endswith(".ptx") for path in paths), "by which Triton knows the stage"


@pytest.mark.parametrize("other", ["", "// cut", None], ids=["empty", "other", "longer"])
def test_a_text_in_the_cache_that_is_another_is_written_anew(other, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = SimpleNamespace(asm={"ptx": PTX.replace("SPACE", "cta")})
    path, right = Path(rewritten(kernel)["ir_override"]), for_pairs(kernel.asm["ptx"])
    path.write_text(right + "// more" if other is None else other)
    assert rewritten(kernel) == {"ir_override": str(path)}
    assert path.read_text() == right
    written = path.stat().st_ino
    rewritten(kernel)
    assert path.stat().st_ino == written, "what is right is left alone"
