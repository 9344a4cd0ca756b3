"""The sections of docs/performance.md on matmuls and collectives: ``gpu_all_gather_x*.json``, and a call's timeline."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import exp, log
from pathlib import Path
from typing import Any

from render_gemm import table
from render_timeline import Lanes, Timelines
from tilestream.trace import LaunchTrace

PEERS = ("nccl + mm", "torch fused", "torch native")
NAMES = {"all_gather_matmul": "All-gather, then matmul", "matmul_reduce_scatter": "Matmul, then reduce-scatter"}


def sections(folder: Path) -> list[str]:
    """Those of the records in ``folder``."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("gpu_all_gather_x*.json"))]
    tables = [
        text for data in records for op in NAMES if (text := one(data, op, [x for x in data["rows"] if x["op"] == op]))
    ]
    return tables + TIMELINES.sections(folder) + LANES.sections(folder)


def timeline(launch: LaunchTrace, record: str) -> tuple[str, str, str]:
    """Of a call: what its transfer and its tiles had of each other's time."""
    there = [when for when in launch.arrivals[0] if when is not None]
    begin, end, spent = launch.begin, launch.end, (launch.end - launch.begin) * launch.workers
    head, _, plan = launch.label.partition(": ")
    text = (
        f"{plan}; {launch.tiles_done} tiles in {1e3 * (end - begin):.3f} ms, as traced ({record}). The last rows came "
        f"{1e3 * (max(there) - begin):.3f} ms after the kernel began; its workers spent "
        f"{launch.waited / spent:.1%} of their time at the gate. *Reading*: when which rank's rows were on their way "
        "(`benchmarks/gather_timeline.py`)."
    )
    way = {"_push_": "rows are pushed, ", "_pull_": "rows are pulled, "}  # by the record's name
    how = next((text for part, text in way.items() if part in record), "")
    title = f"All-gather, then matmul, the timeline of a call: {how}{head}"
    return title, text, "A row a worker, a bar a tile; above, the ranks' rows as they came"


#: Of `gather_timeline`.
TIMELINES = Timelines("gpu_trace_gather", "gather", 230, timeline)
#: Of `mlp_timeline`.
LANES = Lanes("gpu_mlp_timeline", "mlp")


def mean(ratios: Iterable[float]) -> float:
    """Geometric."""
    logs = [log(ratio) for ratio in ratios]
    return exp(sum(logs) / len(logs))


def way(form: str) -> str:
    """Which way, where it says so, and in how many chunks: of ``fused 2``, and of ``fused pull 2``."""
    *ways, chunks = form.split()[1:]
    return "".join([*(f" {way}," for way in ways), f" in {chunks}"])


def one(data: dict[str, Any], op: str, rows: list[dict[str, Any]]) -> str:
    """An op in a record."""
    if not rows:
        return ""
    cells = []
    for row in rows:
        ms = row["ms"]
        fused = {name: ms[name] for name in ms if name.startswith("fused ")}
        fastest = min(fused, key=fused.__getitem__) if fused else ""
        cells.append([
            f"{row['m']}x{row['n']}x{row['k']}", f"{min(ms['mm'], ms['ours mm']):.3f}", f"{ms['nccl']:.3f}",
            *(f"{ms[name]:.3f}" if name in ms else "-" for name in PEERS),
            f"{fused[fastest]:.3f}{way(fastest)}" if fused else "-",
            f"{row['decided']}, {ms['ours']:.3f}", f"{row['best'] / ms['ours']:.3f}",
            f"{row['best'] / min(fused.values()):.3f}" if fused else "-",
            "-" if row.get("win") is None or row["best"] <= row["floor"] else f"{row['win']:.2f}",
        ])  # fmt: skip
    ratios = mean(row["best"] / row["ms"]["ours"] for row in rows)
    versions = f"{data['dtype']}, torch {data['torch']}, Triton {data['triton']}, commit `{data['commit']}`"
    about = (
        "M x N x K of a rank's matmul; milliseconds, the slowest rank's median, handshakes included "
        f"({versions}, {data['date']}). *Alone*: the faster of torch's matmul and ours. *Best*: of NCCL and torch.mm, "
        "one after the other, and torch's own fused ops. *By itself*: what the op took by the table that was in force "
        "then; from each record the table is made anew. *Won*: the share of the way from the best to the floor: "
        "the longer of matmul and collective, and a handshake. "
        f"Geometric mean of best / by itself: {ratios:.3f}."
    )
    head = [
        "M x N x K", "matmul alone", "NCCL alone", "NCCL + mm", "torch fused", "torch native", "ours, fused, chunks",
        "ours, by itself", "best / by itself", "best / fused", "won",
    ]  # fmt: skip
    title = f"## {NAMES[op]}, {data['world']} x {data['device'].removeprefix('NVIDIA ')}"
    note = [data["note"]] if data.get("note") else []
    return "\n\n".join([title, about, *note, table(head, cells)])
