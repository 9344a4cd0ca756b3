"""The page on GEMM while other kernels hold SMs, a dry run on the CPU, and the pictures of docs/scheduling.md."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.report import contention, schedule_pictures

from tilestream.trace import faults
from tilestream_tools.sweep.record import Point, Sweep

ROOT = Path(__file__).parents[2]
ABOUT = {
    "device": "NVIDIA H100 80GB HBM3", "units": 132, "torch": "2.11.0", "triton": "3.6.0", "commit": "abc",
    "date": "2026-11-21",
}  # fmt: skip


def point(implementation: str, rate: float, taken: int = 0, tiles: int = 0, **more: object) -> Point:
    left = 132 - taken
    made = Point(
        "8192x8192x8192", "", "bfloat16", "neighbour", taken, left, 132, implementation, 1, 1100.0 / rate * 1e-3,
        1e-3, 1e-3, 9, rate, "", 1e-3, {"tiles": tiles} if tiles else {},
    )  # fmt: skip
    return replace(made, **more)


def page(section, sweep: Sweep) -> str:
    return "\n\n".join(section(sweep))


def row(text: str, first: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_beside_a_neighbour() -> None:
    points = [
        point("torch", 760), point("static", 780, tiles=2048), point("dynamic", 770, tiles=2048),
        point("torch", 540, 33), point("static", 460, 33, 2048), point("dynamic", 570, 33, 2048),
        point("torch", 500, 66), point("static", 400, 66, 2048), point("dynamic", 390, 66, 2048),
    ]  # fmt: skip
    text = page(contention.held, Sweep(ABOUT, points, [{"shape": "s", "taken": 4, "way": "quack", "why": "a|b"}]))
    # Of proportion: beside static's 780, the better idle one; of whole waves: 16 waves on 132, 21 on 99.
    assert row(text, "33") == [
        "33", "540", "460", "570", f"{570 / 540:.3f}", f"{570 / (780 * 0.75):.3f}", f"{570 / (770 * 16 / 21):.3f}",
    ]  # fmt: skip
    assert row(text, "0")[-2:] == [f"{770 / 780:.3f}", "1.000"]
    assert f"dynamic is {(570 / 540 * 390 / 500) ** 0.5:.3f} x torch" in text
    assert "Refused: s, 4 taken, quack (a/b)." in text
    assert "quack-dynamic" not in text


def test_what_a_queue_costs() -> None:
    points = [point("torch", 700), point("static", 750, tiles=512), point("dynamic", 735, tiles=512)]
    text = page(contention.idle, Sweep({**ABOUT, "missing": ["1x2x3"]}, points))
    assert row(text, "8192x8192x8192")[1:] == ["512", "700", "750", "735", "0.980"]
    assert "Geometric mean of dynamic / static: 0.980" in text
    assert "Not measured, for want of time: 1x2x3." in text


def test_what_stream_k_gains() -> None:
    tiles = 132 + 66  # one full wave, and a half
    points = [
        point("torch", 500), point("static", 400, tiles=tiles), point("dynamic", 390, tiles=tiles),
        point("stream_k", 480, tiles=tiles),
    ]  # fmt: skip
    text = page(contention.split, Sweep(ABOUT, points))
    assert row(text, "8192x8192x8192")[1] == "1.50"
    assert row(text, "8192x8192x8192")[-3:] == ["+20.0%", "+33.3%", "0.60"]


def test_green_contexts_and_collectives() -> None:
    green = [point(way, rate, 36, by="green") for way, rate in (("dynamic", 500), ("told", 510), ("torch", 480))]
    assert row(page(contention.green, Sweep(ABOUT, green)), "8192x8192x8192")[1:] == [
        "96", "480", "510", "500", f"{500 / 510:.3f}", f"{500 / 480:.3f}",
    ]  # fmt: skip
    beside = [point("dynamic", 500, 16, seconds=2.1e-3, more={"comm": 1e-3, "matmul": 1.5e-3, "floor": 2e-3})]
    text = page(contention.nccl, Sweep({**ABOUT, "world": 2, "collective": "all_reduce", "megabytes": 256}, beside))
    assert row(text, "8192x8192x8192")[1:] == ["16", "dynamic", "1.000", "1.500", "2.100", "1.050"]
    assert "all-reduce of 256 MiB" in text
    assert "Both become possible at once" in text
    under_way = {**ABOUT, "world": 2, "collective": "all_reduce", "megabytes": 256, "head_start_us": 20.0}
    assert "The matmul comes 20 us after the collective" in page(contention.nccl, Sweep(under_way, beside))


def test_several_queues() -> None:
    points = [point("dynamic", 700 + count, taken, queues=count) for taken in (0, 8) for count in (1, 8)]
    text = page(contention.queues, Sweep(ABOUT, points))
    assert "| M x N x K | SMs held | dynamic | dynamic, 8 queues |" in text
    assert [line.split("|")[3:5] for line in text.splitlines()[-2:]] == [[" 701 ", " 708 "]] * 2


def test_records_are_found_and_drawn(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert contention.page(results) == [contention.NOTES("page")]
    points = [point(way, rate, taken) for way, rate in (("torch", 700), ("dynamic", 710)) for taken in (0, 8)]
    for device in ("h100", "h200"):
        (results / device).mkdir(parents=True)
        Sweep({**ABOUT, "device": device}, points).write(results / device / "neighbours_held.json")
    text = "\n".join(contention.page(results))
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# When other kernels hold SMs", "## Beside a neighbour", "### h100", "### h200",
    ]  # fmt: skip
    contention.plots(results, tmp_path / "images")
    assert (tmp_path / "images" / "neighbours.png").stat().st_size > 5000


@pytest.mark.slow
def test_a_dry_run_writes_records_that_can_be_rendered(results: Path) -> None:
    names = "held,idle,split,queues,nccl,together"
    run = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "run.py", "contention", names, results, "--dry"],
        capture_output=True, text=True, timeout=110, check=False,
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
