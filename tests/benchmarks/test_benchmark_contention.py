"""GEMM while other kernels hold SMs: a dry run on the CPU, and the pictures of docs/scheduling.md."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.report import contention, schedule_pictures

from tilestream.trace import faults

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_dry_run_writes_records_that_can_be_rendered(results: Path) -> None:
    names = "held,idle,split,queues,nccl,together"
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "run.py", "contention", names, results, "--dry"],
        capture_output=True, text=True, timeout=850, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    assert "\n".join(contention.page(results)).count("\n### ") == 6
    assert len(list(results.rglob("*.csv"))) == 6


# The pictures of docs/scheduling.md ---------------------------------------------------------------------------------


@pytest.mark.parametrize("held", [0, 2, 7])
@pytest.mark.parametrize("kind", ["static", "dynamic", "stream_k"])
def test_what_is_drawn_is_a_whole_launch(kind: str, held: int) -> None:
    schedule = schedule_pictures.schedule_of(kind)
    launch = schedule_pictures.simulate(schedule, held=held)
    assert not faults(launch, schedule)
    begun = sum(spans[0].begin == 0 for spans in launch.by_worker if spans)
    assert begun == 8 - held, "one worker an SM at a time"


def test_what_the_page_says_of_the_pictures() -> None:
    ms = {
        (kind, held): round(1e3 * schedule_pictures.simulate(schedule_pictures.schedule_of(kind), held=held).end, 2)
        for kind in ("static", "dynamic", "stream_k") for held in (0, 2)
    }  # fmt: skip
    page = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
    assert f"{ms['static', 2]:.2f} instead of {ms['static', 0]:.2f}" in page
    assert f"six workers do all tiles: {ms['dynamic', 2]:.2f}" in page
    assert ms["dynamic", 0] == ms["static", 0] > ms["stream_k", 0]
    assert ms["dynamic", 2] > ms["stream_k", 2]
