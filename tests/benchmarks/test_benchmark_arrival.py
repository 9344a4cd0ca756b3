"""Inputs that arrive: experts by both clocks; the timeline of a replay, from what torch's profiler saw of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.arrival import experts
from benchmarks.arrival.timeline import laid_over
from benchmarks.core import timing
from benchmarks.core.session import Session
from benchmarks.distributed.ranks import Activity
from benchmarks.report import arrival
from benchmarks.run import options

from tilestream.trace import LaunchTrace, Span, export

ROWS = 1 << 20


@pytest.fixture
def launch() -> LaunchTrace:
    """A replay of 90 us, whose first 20 are a wait for chunk 1."""
    made = LaunchTrace("matmul", "H200, 4 x 4 x 4, replayed: a plan", 1, 1, 5.0)
    made.by_worker[0] = [
        Span(0, "wait", 5.0, 5.00002, 0, 0, 0, 0, 1, 1), Span(0, "tile", 5.00002, 5.00009, 0, 0, 0, 0, 1, 1),
    ]  # fmt: skip
    made.end = 5.00009
    return made


def seen(*copies: tuple[float, float]) -> list[Activity]:
    """A kernel that begins at 100 us, a shorter one, copies of rows, a word, and the log on its way back."""
    found = [Activity("gemm", 7, 100e3, 190e3, 0), Activity("fill", 7, 0, 200e3, 0)]
    found += [Activity("Memcpy HtoD (Pinned -> Device)", 7, 1e3 * begin, 1e3 * end, ROWS) for begin, end in copies]
    found += [Activity("Memcpy HtoD (Pinned -> Device)", 7, 101e3, 102e3, 4)]
    found += [Activity("Memcpy DtoH (Device -> Pinned)", 7, 190e3, 195e3, ROWS)]
    return sorted(found, key=lambda one: one.begin)


def test_chunks_come_in_the_pivots_order(launch: LaunchTrace) -> None:
    laid_over(launch, seen((104, 110), (110, 120), (120, 135)), count=3, pivot=1)
    assert [round(1e6 * (when - 5.0), 3) for when in launch.arrivals[0]] == [35, 10, 20]
    assert round(1e6 * (launch.started[0] - 5.0), 3) == 4


def test_a_dry_run_of_experts_times_every_way_by_both_clocks(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "CASES", [(8, 16), (32, 16)])
    session = Session(options("arrival", "experts", str(results), "--dry", "--rounds", "1", "--seconds", "300"))
    experts.experts(session)
    (record,) = session._records.values()
    assert session.bad == 0
    assert record.data["failures"] == record.data["missing"] == []
    ways = {"copy", "multiply", "by hand", "by hand, ends known", "restarted", "streamed"}
    for row in record.rows:
        assert set(row["ms"]) == ways
        assert set(row["gpu_ms"]) == ways - {"by hand"}, "its host waits for the GPU, and cannot be ahead"
        assert set(row["errors"]) == ways - {"copy"}
        assert min(*row["ms"].values(), *row["gpu_ms"].values()) > 0
    text = "\n".join(arrival.page(results))
    (line,) = [line for line in text.splitlines() if line.startswith("| 8 | 127 |")]
    assert line.count(" : ") == 9, "every figure by both clocks"
    assert " : - | " in line


def test_a_call_as_called_is_one_of_many() -> None:
    """Nothing waits for the GPU inside a sample, and its end is a part of it."""
    done: list[str] = []
    functions = {name: lambda name=name: done.append(name) for name in ("a", "b")}
    found = timing.as_called(functions, rounds=2, many=3, synchronize=lambda: done.append("|"))
    assert set(found) == {"a", "b"}
    samples = "".join(done).strip("|").split("||")  # one before, and one that it ends with
    assert sorted(samples) == ["aaa"] * 3 + ["bbb"] * 3


def test_copies_that_are_not_seen_are_said_aloud(launch: LaunchTrace) -> None:
    with pytest.raises(RuntimeError, match=r"2 copies of rows to the GPU; there are 3 chunks\. Seen: \['Memcpy DtoH"):
        laid_over(launch, seen((104, 110), (110, 120)), count=3, pivot=0)


def test_the_timeline_of_a_replay_is_drawn_and_described(launch: LaunchTrace, tmp_path: Path) -> None:
    laid_over(launch, seen((104, 110), (110, 120), (120, 135)), count=3, pivot=1)
    (tmp_path / "h200").mkdir()
    export(launch, tmp_path / "h200" / "trace_captured_stream.json.gz")
    (text,) = arrival.CAPTURED.sections(tmp_path)
    assert text.startswith("## The timeline of a replay, H200, 4 x 4 x 4, replayed\n")
    assert "in 3 chunks" in " ".join(text.split())
    assert "1 tiles in 0.090 ms" in text
    assert "The last rows came 0.035 ms after" in " ".join(text.split())
    assert "spent 22.2% of their time" in " ".join(text.split())
    arrival.CAPTURED.plots(tmp_path, tmp_path / "images")
    assert (tmp_path / "images" / "captured_stream_h200.png").stat().st_size > 1000
