"""Matmuls and collectives: the words on a loss, floors, and timelines as torch's profiler records them."""

from __future__ import annotations

import pytest
from benchmarks.distributed import floors, moe_timeline, ranks
from benchmarks.distributed import timelines as recorded
from benchmarks.report import distributed

from tilestream.trace import LaunchTrace, Span


def test_the_words_of_a_loss_have_the_figures_of_its_row() -> None:
    row = {"op": "all_gather_matmul", "m": 8192, "n": 1024, "k": 8192, "ms": {"copies push": 0.3154, "nccl": 0.25}}
    text = distributed.why({"world": 4}, row)
    assert "take 0.315 ms pushed and - pulled, NCCL's 0.250" in text
    assert distributed.why({"world": 3}, row) == "Not looked into."
    for part in (part for part in distributed.NOTES.parts if part.startswith("why ")):
        _, world, op, shape = part.split()
        m, n, k = map(int, shape.split("x"))
        row = {"op": op, "m": m, "n": n, "k": k, "ms": {}}
        assert "Not looked" not in distributed.why({"world": int(world)}, row)


def test_the_floor_of_a_gather_is_of_the_shortest_of_each() -> None:
    ms = {
        "mm": 0.62, "ours mm": 0.6, "nccl": 0.5, "copies push": 0.43, "handshake push": 0.03, "copies pull": 0.45,
        "handshake pull": 0.02, "nccl + mm": 1.1, "torch native": 0.9, "ours": 0.7,
    }  # fmt: skip
    row = {"m": 132 * 128, "n": 512, "ms": ms}
    floor = floors.floor_of(row)
    assert floor == (0.6, pytest.approx(0.4), pytest.approx(0.3), 0.02)
    assert floor.total == pytest.approx(0.72)  # 0.4 and a tile are longer than the matmul
    assert floors.judged(row).win is None
    assert floors.judged(row).why == "floor above ours"
    found = floors.judged({**row, "ms": {**ms, "ours": 0.81}})
    assert (found.best, found.win, found.why) == (0.9, pytest.approx(0.5), "")
    assert found.ratio == pytest.approx(0.9 / 0.81)
    lost = floors.judged({**row, "ms": {**ms, "ours": 0.99}})
    assert lost.win == pytest.approx(-0.5), "a loss is a share, too"
    assert floors.judged({**row, "ms": {**ms, "torch fused": 0.715}}).why == "floor above best"
    assert floors.judged({"m": 1, "n": 1, "ms": {"mm": 1.0, "nccl": 1.0, "ours": 1.0}}) is None


def test_the_floor_of_a_sum_has_its_own_handshake() -> None:
    ms = {"mm": 0.6, "nccl": 0.3, "nccl + mm": 0.9, "ours": 0.7}
    row = {"m": 132 * 128, "n": 1024, "ms": ms}
    assert floors.floor_of(row).handshake is None
    assert floors.judged(row).floor == pytest.approx(0.6)
    measured = {**row, "ms": {**ms, "handshake": 0.05, "copies": 0.25}}
    assert floors.floor_of(measured).transfer == pytest.approx(0.2)
    assert floors.judged(measured).floor == pytest.approx(0.65)
    assert floors.judged(measured).win == pytest.approx(0.2 / 0.25)


def test_a_blocks_activities_are_sorted_into_lanes() -> None:
    """Names and streams are as torch's profiler has them."""
    activity = ranks.Activity
    found = [
        activity("spin_kernel", 7, -90e3, -20e3, 0), activity("ncclDevKernel_AllReduce", 9, -20e3, -1e3, 0),
        activity("Memcpy DtoD", 7, 0, 30e3, 1 << 26), activity("Memcpy PtoP", 20, 10e3, 200e3, 1 << 26),
        activity("gemm", 7, 30e3, 400e3, 0), activity("gemm", 7, 400e3, 700e3, 0),
        activity("silu_kernel", 7, 700e3, 720e3, 0), activity("mul_kernel", 7, 720e3, 740e3, 0),
        activity("gemm", 7, 740e3, 1100e3, 0), activity("Memcpy PtoP", 22, 900e3, 1150e3, 1 << 25),
        activity("add_parts", 7, 1150e3, 1200e3, 0), activity("Memcpy HtoD", 7, 1, 2, 64),
    ]  # fmt: skip
    lanes = recorded.lanes(found, 0)
    assert {lane: len(of) for lane, of in lanes.items()} == {
        "gather: w1, w3": 2, "w2, and publish": 1, "silu, sum": 3, "own rows": 1, "rows of others": 1,
        "sums of others": 1,
    }  # fmt: skip
    assert recorded.end_of(lanes) == 1200e3
    assert recorded.microseconds(lanes["own rows"][0], 0) == [0, 30]


def test_what_is_no_block_is_said_aloud() -> None:
    with pytest.raises(RuntimeError, match=r"rank 3: 1 matmuls and 0 copies of rows; a block has 3, and some. Kernels"):
        recorded.lanes([ranks.Activity("gemm", 7, 0, 1, 0)], 3)


def test_a_mixtures_activities_are_sorted_into_lanes() -> None:
    """The own rows' products lie between the first two waits; the results are pushed beside the next products."""
    names = [
        ("sort", 7), ("begin_call", 7), ("push_rows", 9), ("take_rows", 7), ("gemm", 7), ("gemm", 7), ("take_rows", 7),
        ("push_results", 9), ("gemm", 7), ("gemm", 7), ("push_results", 9), ("take_results", 7), ("end_call", 7),
        ("add_results", 7), ("to_dtype", 7),
    ]  # fmt: skip
    found = [ranks.Activity(name, stream, 10 * i, 10 * i + 9, 0) for i, (name, stream) in enumerate(names)]
    lanes = moe_timeline.lanes(found, 0, 2)
    assert {lane: [one.name for one in of] for lane, of in lanes.items()} == {
        "sort, add": ["sort", "begin_call", "end_call", "add_results", "to_dtype"], "push rows": ["push_rows"],
        "wait": ["take_rows", "take_rows", "take_results"], "own rows": ["gemm"] * 2, "rows of others": ["gemm"] * 2,
        "push results": ["push_results"] * 2,
    }  # fmt: skip
    said = "rank 1: 1 kernels push rows, 2 results, and 2 wait for rows; of a fused call over 4 ranks 1, 4 and 4"
    with pytest.raises(RuntimeError, match=said):
        moe_timeline.lanes(found, 1, 4)


def event(kind: str, stream: int, begin: float, length: float, size: int = 0) -> dict[str, object]:
    """As torch's profiler writes it: microseconds."""
    more = {"stream": stream} | ({"bytes": size} if kind == "gpu_memcpy" else {})
    return {"cat": kind, "name": kind, "ts": begin, "dur": length, "args": more}


def test_arrivals_of_a_gather_are_laid_over_its_launch() -> None:
    """Rank 1 of three, two chunks a shard: copies end at moments that say whose they are; its kernel begins at 100."""

    def rank(kernel: float, *pushes: dict[str, object]) -> object:
        own, other = event("gpu_memcpy", 7, 104, 4, 128), event("gpu_memcpy", 9, 0, 1, 32)
        kernels = [event("kernel", 7, kernel, 90), event("kernel", 7, 90, 3), event("kernel", 7, -900, 800)]
        met = {**event("kernel", 8, -100, 1), "name": "ncclDevKernel_AllReduce"}
        events = [*kernels, met, *pushes, own, other, {"cat": "cpu_op", "ts": 0}]
        found = ranks.activities({"baseTimeNanoseconds": 1e9, "traceEvents": events})
        return recorded.behind_meeting(found)

    # Two chunks each to the rank before and to the one before that, on a stream that is not the kernel's.
    found = [
        rank(80, *(event("gpu_memcpy", 20, 110 + 10 * i, 5, 64) for i in range(4))),
        rank(100),
        rank(99, *(event("gpu_memcpy", 21, 106 + 12 * i, 5, 64) for i in range(4))),
    ]
    launch = LaunchTrace("matmul", "rank 1 of 3: a plan", 1, 1, 5.0)
    moments = (("wait", 5.0, 5.00002), ("tile", 5.00002, 5.00009))
    launch.by_worker[0] = [Span(0, *moment, 0, 0, 0, 0, 1) for moment in moments]
    launch.end = 5.00009
    recorded.laid_over(launch, found, rank=1, size=64, parts=2)
    # Of the own shard, copied in one piece, both chunks are there at once; rank 0's came last, behind rank 2's own.
    microseconds = [round(1e6 * (when - 5.0), 3) for when in launch.arrivals[0]]
    assert microseconds == [35, 45, 8, 8, 11, 23]
    assert round(1e6 * (launch.started[0] - 5.0), 3) == 4
