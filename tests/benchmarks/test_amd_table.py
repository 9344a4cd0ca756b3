"""The page on AMD: its tables are the record's, and it says that nothing was run on a GPU."""

from __future__ import annotations

import json

import pytest
from benchmarks.amd import table as amd

from tilestream.core.gpu_specs import named
from tilestream.plan.policy.cdna_attention import TILES
from tilestream.plan.policy.portable import CDNA


@pytest.fixture
def data() -> dict:
    return json.loads(amd.RECORD.read_text(encoding="utf-8"))


def test_the_tables_are_made_from_the_record(data, monkeypatch, tmp_path):
    text = amd.PAGE.read_text(encoding="utf-8")
    assert amd.page(text, data) == text, "run benchmarks/run.py amd table render"
    changed = tmp_path / "amd.md"
    changed.write_text(text.replace("| 708 |", "| 807 |"))
    assert amd.main(["render", "--check"]) == 0
    monkeypatch.setattr(amd, "PAGE", changed)
    assert amd.main(["render", "--check"]) == 1
    assert amd.main(["render"]) == 0
    assert changed.read_text() == text


def test_the_page_says_that_nothing_was_run_on_a_gpu(data):
    assert amd.PAGE.read_text().splitlines()[0] == "# AMD: executed on an emulator, not on a GPU"
    assert data["run"] is False
    assert "**not run**" in amd.ours(data)


def test_what_was_executed_is_right_on_both_architectures():
    record = json.loads(amd.EMULATED.read_text(encoding="utf-8"))
    assert {row["arch"] for row in record["rows"]} == {"gfx942", "gfx950"}
    assert all(row["right"] == row["orders"] == 9 and row["instructions"] for row in record["rows"])
    assert all(row["found"] + len(row["missed"]) == row["tried"] for row in record["faults"])


def test_the_plans_efficiencies_are_the_records(data):
    """`tests/tools/isa` compiles again; here the record stands for it."""
    kinds = {"bfloat16": "16-bit", "float8_e4m3fn": "8-bit", "float8_e4m3fnuz": "8-bit", "float32": "float32"}
    seen = 0
    for row in data["rows"]:
        if row["kernel"] != "portable-gemm":
            continue
        tile = next(t for t in CDNA[row["arch"]][kinds[row["dtype"]]] if list(t[:3]) == row["tile"])
        assert row["cycles"]["share"] == pytest.approx(tile.efficiency, abs=0.01)
        assert row["stages"] == tile.stages
        assert not any(row["spilled"].values())
        seen += 1
    assert seen >= 9


def test_attentions_efficiencies_are_the_records(data):
    rows = [row for row in data["rows"] if row["kernel"] == "cdna-attention"]
    assert {(row["arch"], row["k"]) for row in rows} == {(arch, k) for arch in TILES for k in (64, 128, 256)}
    for row in rows:
        shape = (32 * row["warps"], row["tile"][1], row["stages"])
        tile = next(t for t in TILES[row["arch"]] if (t.rows, t.block, t.stages) == shape and t.columns >= row["k"])
        assert row["cycles"]["share"] == pytest.approx(tile.efficiency, abs=0.01)
        assert not row["spilled"]["private_segment_fixed_size"]


def asked_and_told(data) -> tuple[set, set]:
    """What a record is made of now, and what this one was made of; of other kernels than the portable one no tiles."""
    pytest.importorskip("triton", exc_type=ImportError)
    asked = {(name, q.arch, q.dtype, q.tile) for name, q in amd.questions()}
    told = {
        (r["kernel"], r["arch"], r["dtype"], tuple(r["tile"][:2]) if r["kernel"] == "portable-gemm" else None)
        for r in data["rows"]
    }
    return asked, told


def test_what_is_told_of_a_kernel_is_what_would_be_asked_now(data):
    asked, told = asked_and_told(data)
    known = {row[0] for row in told}
    assert "portable-gemm" in known
    assert {row for row in asked if row[0] in known} == told, "run benchmarks/run.py amd table record"


@pytest.mark.slow
def test_every_kernel_that_has_amd_is_in_the_record(data):
    asked, told = asked_and_told(data)
    assert asked == told, "run benchmarks/run.py amd table record, then render"


def test_no_peer_is_above_the_peak():
    for one in amd.load(amd.PUBLISHED)["rows"]:
        device = named(one["device"])
        assert one["tflops"] * 1e12 < device.peak(one["dtype"], device.workers)
        assert one["source"]


def test_a_page_without_the_marks(data):
    with pytest.raises(ValueError, match=r"amd\.md has no lines <!-- executed"):
        amd.page("# a page", data)
