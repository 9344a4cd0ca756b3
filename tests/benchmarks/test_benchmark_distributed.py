"""The page on matmuls and collectives: what a record says is what the page says; floors; timelines."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.distributed import floors, ranks
from benchmarks.distributed import timelines as recorded
from benchmarks.report import distributed, timelines

ABOUT = {
    "device": "NVIDIA H200", "world": 2, "dtype": "bfloat16", "torch": "2.11", "triton": "3.6.0", "commit": "abc",
    "date": "2026-01-01",
}  # fmt: skip
ROW = {
    "op": "matmul_reduce_scatter", "m": 8192, "n": 4096, "k": 2048, "decided": "fused", "chunks": 2,
    "ms": {
        "mm": 0.7, "ours mm": 0.6, "nccl": 0.3, "nccl + mm": 1.3, "torch fused": 1.2, "fused 1": 1.1, "fused 2": 1.0,
        "ours": 1.0, "nccl + ours": 1.25, "handshake": 0.2, "copies": 0.6,
    },
    "host ms": {"nccl + mm": 0.125, "ours": 0.75, "ours mm": 0.25},
}  # fmt: skip


def page(results: Path) -> str:
    """Without its head, each paragraph a line."""
    head, *parts = distributed.page(results)
    assert head == distributed.NOTES("page")
    return "\n".join(part if "|" in part or "\n- " in f"\n{part}" else " ".join(part.split()) for part in parts)


def cells(text: str, first: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {first} "))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row(results: Path, write) -> None:
    few = {**ROW, "m": 256, "ms": {**ROW["ms"], "torch fused": 0.5}}
    write("h200", "all_gather_x2", {**ABOUT, "rows": [ROW, few]})
    text = page(results)
    assert "### Reduce-scatter, 2 x H200 bfloat16 (torch 2.11" in text
    assert cells(text, "8192x4096x2048")[1:] == [
        "0.600", "0.300", "1.300", "1.200", "-", "1.000 in 2", "fused, 1.000", "1.200", "1.200", "0.50", "0.12 / 0.75",
    ]  # fmt: skip
    assert cells(text, "256x4096x2048")[-4:-1] == ["0.500", "0.500", "floor above best"]
    means = f"1.200 over the 1 with 2048 rows and columns or more, {(1.2 * 0.5) ** 0.5:.3f} over all 2;"
    assert f"best / by itself {means}" in text
    assert "Won, of 1 shapes that have a share: 0.50 in the mean, 0.50 the median." in text
    assert "costs the host 0.75 to 0.75 ms, NCCL + mm 0.12 to 0.12 ms (the last column): a program that runs" in text
    behind = (
        "- 256x4096x2048: fused, in 2 chunks, 0.500; the same form, on trial, took 1.000 ms, 0.500. Not looked into."
    )
    assert behind in text
    assert "- 8192x" not in text


def test_a_mean_of_the_large_shapes_and_of_all(results: Path, write) -> None:
    rows = [{**ROW, "m": 8192 + i} for i in range(6)]
    slow = {"ms": {**ROW["ms"], "ours": 1.5}, "host ms": {**ROW["host ms"], "ours": 9.0}}
    rows.append({**ROW, "commit": "def", "m": 2047, **slow})
    rows[0] |= {"commit": "of another day", "date": "2025-12-31"}
    write("h200", "all_gather_x2", {**ABOUT, "rows": rows})
    text = page(results)
    mean = (1.2**6 * 0.8) ** (1 / 7)
    of = "over the 6 with 2048 rows and columns or more"
    assert f"best / by itself 1.200 {of}, {mean:.3f} over all 7;" in text
    assert f"what the table made from this record says 1.200 {of}, 1.200 over all 7." in text
    assert "commit `of another day`, 2025-12-31" in text
    assert "ours is more than its GPU time in 1 of the 7 shapes" in text


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


def test_all_reduces(results: Path, write) -> None:
    ms = {
        "mm": 0.02, "nccl": 0.01, "nccl + mm": 0.04, "nccl + ours": 0.044, "fused 1": 0.032,
        "torch one shot + mm": 0.05, "torch two shot + mm": 0.03,
    }  # fmt: skip
    row = {"op": "matmul_all_reduce", "m": 64, "n": 8, "k": 4, "ms": ms, "host ms": {"nccl + mm": 0.1, "fused 1": 1.0}}
    few = {**row, "m": 1, "ms": {**ms, "fused 1": 0.05, "torch two shot + mm": 0.045}}
    own = {**few, "m": 2, "ms": {**few["ms"], "nccl + ours": 0.0401}}
    write("h200", "all_reduce_x4", {**ABOUT, "world": 4, "rows": [row, few, own]})
    text = page(results)
    assert "### All-reduce, 4 x H200 " in text
    assert cells(text, "64x8x4")[1:] == [
        "20.0", "10.0", "40.0", "50.0", "30.0", "32.0", "44.0", "fused", "1.250", "0.938", "0.10 / 1.00",
    ]  # fmt: skip
    assert cells(text, "1x8x4")[-4:-1] == ["NCCL, mm", "1.000", "1.000"]
    assert cells(text, "2x8x4")[-4:-1] == ["NCCL, ours", "0.998", "0.998"]
    assert "torch's two shots are ahead in 1 of 3 rows, by up to 7%" in text


def test_an_mlp_block(results: Path, write) -> None:
    forms = {"forward and backward": {"nccl": 12.0, "torch": 11.0, "ours": 10.0}}
    forms["forward"] = {"nccl": 4.5, "torch": 4.0, "ours": 4.1}
    row = {"tokens": 8192, "ms": forms, "sites": ["fused_all_gather_matmul [1] @ [2]: 1 call, fused (a table)"]}
    write("h200", "mlp_x4", {**ABOUT, "world": 4, "rows": [row]})
    text = page(results)
    assert "### The MLP block, 4 x H200 " in text
    assert cells(text, "forward,")[1:] == ["4.500", "4.000", "4.100", "1.098", "0.976"]
    assert "**Behind** torch's async TP by 2.5% forward. With the backward pass NCCL / ours is 1.200" in text
    assert "fused 1 gathers and 0 sum" in text
    assert text.endswith("- fused_all_gather_matmul [1] @ [2]: 1 call, fused")


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


def test_no_record(results: Path, write) -> None:
    assert page(results) == ""


def block() -> dict[str, object]:
    """A block's activities on a GPU, sorted into lanes: names and streams as torch's profiler has them."""
    activity = ranks.Activity
    found = [
        activity("spin_kernel", 7, -90e3, -20e3, 0), activity("ncclDevKernel_AllReduce", 9, -20e3, -1e3, 0),
        activity("Memcpy DtoD", 7, 0, 30e3, 1 << 26), activity("Memcpy PtoP", 20, 10e3, 200e3, 1 << 26),
        activity("gemm", 7, 30e3, 400e3, 0), activity("gemm", 7, 400e3, 700e3, 0),
        activity("silu_kernel", 7, 700e3, 720e3, 0), activity("mul_kernel", 7, 720e3, 740e3, 0),
        activity("gemm", 7, 740e3, 1100e3, 0), activity("Memcpy PtoP", 22, 900e3, 1150e3, 1 << 25),
        activity("add_parts", 7, 1150e3, 1200e3, 0), activity("Memcpy HtoD", 7, 1, 2, 64),
    ]  # fmt: skip
    return recorded.lanes(found, 0)


def test_the_timeline_of_a_block(results: Path, write) -> None:
    lanes = block()
    assert {lane: len(of) for lane, of in lanes.items()} == {
        "gather: w1, w3": 2, "w2, and publish": 1, "silu, sum": 3, "own rows": 1, "rows of others": 1,
        "sums of others": 1,
    }  # fmt: skip
    rows = [
        {"rank": rank, "lane": lane, "spans": [recorded._microseconds(one, 0) for one in of]}
        for rank in range(2) for lane, of in lanes.items()
    ]  # fmt: skip
    data = {**ABOUT, "tokens": 8192, "ms": recorded._end(lanes) / 1e6, "rows": rows}
    write("h200", "mlp_timeline_x2", data)
    text = page(results)
    assert "## The timeline of an MLP block, 2 x H200 " in text
    assert "its calls eager and not compiled, 8192 tokens, in 1.200 ms, as profiled" in text
    assert "Of rank 0's 0.440 ms of copies from its peers 84% lie beside a matmul" in text  # 170 + 200 of 440
    timelines.plot_lanes(results, results / "images")
    assert (results / "images" / "mlp_x2_h200.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_block_is_said_aloud() -> None:
    with pytest.raises(RuntimeError, match=r"rank 3: 1 matmuls and 0 copies of rows; a block has 3, and some. Kernels"):
        recorded.lanes([ranks.Activity("gemm", 7, 0, 1, 0)], 3)


def event(kind: str, stream: int, begin: float, length: float, size: int = 0) -> dict[str, object]:
    """As torch's profiler writes it: microseconds."""
    more = {"stream": stream} | ({"bytes": size} if kind == "gpu_memcpy" else {})
    return {"cat": kind, "name": kind, "ts": begin, "dur": length, "args": more}


def test_the_timeline_of_a_gather(results: Path, write) -> None:
    """Rank 1 of three, two chunks a shard: copies end at moments that say whose they are; its kernel begins at 100."""
    from tilestream.trace import LaunchTrace, Span, export

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
    (results / "h200").mkdir(parents=True)
    export(launch, results / "h200" / "trace_gather_x3.json.gz")
    text = page(results)
    assert "## The timeline of a gather, rank 1 of 3 " in text
    assert "The last rows came 0.045 ms after the kernel began" in text
    assert "22.2% of their time at the gate" in text
    distributed.TIMELINES.plots(results, results / "images")
    assert (results / "images" / "gather_x3_h200.png").stat().st_size > 5000


def test_a_llama(results: Path, write) -> None:
    losses = {"plain": [2.0, 1.0], "ours": [2.0, 1.01]}
    sites = [
        "fused_all_gather_matmul [2, 8] @ [8, 4], dim 1: 4 calls, fused: modelled: 1 ms (H200)",
        "reduce_scatter_tensor [4, 8], bfloat16: left in 1 place: no matmul makes what is scattered",
    ]
    row = {"model": "whole", "losses": losses, "sites": sites}
    write("h200", "llama_x2", {**ABOUT, "rows": [row]})
    text = page(results)
    assert "### The Llama, 2 x H200 " in text
    assert cells(text, "two blocks, embedding and head")[1:] == ["2.0000", "1.0000", "1.0100", "1.0e-02"]
    called, left = text.splitlines()[-2:]
    assert called.endswith("| `fused_all_gather_matmul [2, 8] @ [8, 4], dim 1` | 4 calls, fused | modelled: 1 ms |")
    assert left.endswith(
        "| `reduce_scatter_tensor [4, 8], bfloat16` | left in 1 place | no matmul makes what is scattered |"
    )
