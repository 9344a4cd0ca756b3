"""Benchmarks across GPUs, run dry: two ranks of the CPU, small extents, every way that needs no GPU."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from benchmarks.core.paths import command
from benchmarks.distributed import all_gather, calls
from benchmarks.distributed.ranks import small
from benchmarks.run import options

from tilestream.trace import export, load

pytestmark = pytest.mark.timeout(600)  # processes that import torch, several of them one after the other
#: Sections, their records, and ways that are measured without a GPU.
SECTIONS = {
    "moe": ("moe_x2", {"ours", "ours captured", "ours unfused", "nccl + grouped"}),
}
SLOW = {
    "served_captured": ("served_captured_x2", {"ours captured", "nccl captured"}),
    "calls": ("calls_x2", {"ours", "ours unfused", "nccl + mm"}),
    "served": ("served_x2", {"ours eager", "ours compiled", "nccl eager", "nccl compiled"}),
    "captured": ("captured_x2", {"ours", "ours unfused", "nccl + mm"}),
    "gather": ("all_gather_x2", {"ours", "nccl + mm", "nccl + ours", "mm", "ours mm"}),
    "all_reduce": ("all_reduce_x2", {"ours", "nccl + mm", "nccl + ours"}),
}


def run(section: str, results: Path, *more: str) -> str:
    """Run a section dry, one round, in processes of its own."""
    words = command("distributed", section, str(results), "--dry", "--rounds", "1", *more)
    named = {**os.environ, "COMMIT": "a test's"}  # the checkout may have changes that come and go
    found = subprocess.run(words, capture_output=True, text=True, check=False, env=named)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


def recorded(results: Path, name: str) -> dict:
    return json.loads((results / "no_gpu" / f"{name}.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("section", [*SECTIONS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_section_measures_each_way_and_goes_on_where_it_was_cut_off(section, tmp_path):
    name, ways = (SECTIONS | SLOW)[section]
    run(section, tmp_path)
    data = recorded(tmp_path, name)
    assert data["world"] == 2
    assert not data["missing"]
    assert all("torch" in text for text in data["failures"]), data["failures"]
    for row in data["rows"]:
        times = row.get("wall us") or row["ms"]
        assert ways <= set(times)
        assert all(ms > 0 for ms in times.values())
    first, *rest = data["rows"]
    (tmp_path / "no_gpu" / f"{name}.json").write_text(json.dumps(data | {"rows": rest}), encoding="utf-8")
    run(section, tmp_path, "--resume", str(tmp_path))
    again = recorded(tmp_path, name)
    assert [row["item"] for row in again["rows"]] == [row["item"] for row in (*rest, first)]
    assert again["rows"][:-1] == rest, "they are not measured again"


def test_the_time_is_over_on_all_ranks_together(tmp_path):
    run("moe", tmp_path, "--seconds", "0")
    data = recorded(tmp_path, "moe_x2")
    assert data["rows"] == []
    assert data["missing"] == ["dry 16 uniform", "dry 16 Zipf"]


def test_extents_of_a_dry_run():
    from benchmarks.core.session import Session

    dry = Session(options("distributed", "calls", "nowhere", "--dry"))
    for shapes in (calls.ROWS, calls.CAPTURED, [("", *shape) for shape in all_gather.gathers(2)]):
        for extent in (extent for shape in shapes for extent in shape[1:]):
            assert small(dry, extent) % 8 == 0
            assert 8 <= small(dry, extent) <= 480


def test_the_timeline_of_a_captured_call_is_drawn(tmp_path):
    """Run dry: an eager call, whose trace is a record as that of a replay is."""
    from benchmarks.report import distributed

    run("captured_timeline", tmp_path, "--shapes", "8192x4096x4096")
    path = tmp_path / "no_gpu" / "trace_captured_gather_x2.json.gz"
    (launch,) = load(path)
    assert launch.tiles_done == launch.tiles > 0
    assert launch.label.startswith("rank 0 of 2 x CPU, 128 x 64 x 64, replayed: ")
    launch.arrivals[0] = (launch.begin, None)
    export(launch, path)
    (text,) = distributed.CAPTURED.sections(tmp_path)
    assert text.startswith("## The timeline of a captured gather, rank 0 of 2 x CPU, 128 x 64 x 64, replayed")
    assert f"{launch.tiles} tiles" in text
    assert "captured_gather_x2_no_gpu.png" in text
    distributed.CAPTURED.plots(tmp_path, tmp_path / "images")
    assert (tmp_path / "images" / "captured_gather_x2_no_gpu.png").stat().st_size > 1000
    assert not distributed.TIMELINES.sections(tmp_path)
