"""The sections of docs/performance.md on matmuls and collectives: ``gpu_all_gather_x*.json``, and timelines.

All-reduces and MLP blocks are `render_reduce`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.distributed.dispatch_table import Decided, decided, shape_of, taken
from benchmarks.distributed.floors import PEERS, Judged, floor_of, judged
from benchmarks.gemm.shapes import geomean
from benchmarks.report import llama as render_llama
from benchmarks.report import reduce as render_reduce
from benchmarks.report.distributed_why import why
from benchmarks.report.gemm import table
from benchmarks.report.timelines import Lanes, Timelines
from tilestream.trace import LaunchTrace

#: Means are told of shapes with so many rows and columns, and of all: the others are a few rows, or a transfer alone.
LARGE = 2048
Found = list[tuple[dict[str, Any], Judged]]
NAMES = {"all_gather_matmul": "All-gather, then matmul", "matmul_reduce_scatter": "Matmul, then reduce-scatter"}


def sections(folder: Path) -> list[str]:
    """Those of the records in ``folder``."""
    records = render_reduce.records(folder, "gpu_all_gather_x*.json")
    tables = [
        text for data in records for op in NAMES if (text := one(data, op, [x for x in data["rows"] if x["op"] == op]))
    ]
    tables += render_reduce.sections(folder) + render_llama.sections(folder)
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


def way(form: str) -> str:
    """Which way, where it says so, and in how many chunks: of ``fused 2``, and of ``fused pull 2``."""
    *ways, chunks = form.split()[1:]
    return "".join([*(f" {way}," for way in ways), f" in {chunks}"])


def named(form: Decided, op: str) -> str:
    """A form in words."""
    if not form.fused:
        return "NCCL and our matmul"
    how = f"{form.way}ed " if op == "all_gather_matmul" else ""
    return f"fused, {how}in {form.chunks} chunk{'s' * (form.chunks > 1)}"


def one(data: dict[str, Any], op: str, rows: list[dict[str, Any]]) -> str:
    """An op in a record."""
    found = [(row, told) for row in rows if (told := judged(row)) is not None]
    if not found:
        return ""
    commit, date = (rows[0].get(name, data[name]) for name in ("commit", "date"))
    versions = f"{data['dtype']}, torch {data['torch']}, Triton {data['triton']}, commit `{commit}`, {date}"
    about = (
        "M x N x K of a rank's matmul; milliseconds, the slowest rank's median, handshakes included "
        f"({versions}). *Alone*: the faster of torch's matmul and ours. *Best*: of NCCL and torch.mm, "
        "one after the other, and torch's own fused ops. *By itself*: what the op took by the table that was in force "
        "then; from each record the table is made anew. *Won*: the share of the way from the best to the floor, "
        "`max(matmul, transfer + one tile) + one handshake`; none where the floor lies above the best, or above ours."
    )
    head = [
        "M x N x K", "matmul alone", "NCCL alone", "NCCL + mm", "torch fused", "torch native", "ours, fused, chunks",
        "ours, by itself", "best / by itself", "best / fused", "won", "host: NCCL + mm / ours",
    ]  # fmt: skip
    parts = [f"## {NAMES[op]}, {data['world']} x {data['device'].removeprefix('NVIDIA ')}", about]
    parts += [data["note"]] if data.get("note") else []
    parts += [table(head, [_cells(row, told) for row, told in found]), _means(found)]
    if all("host ms" in row for row, _ in found):
        parts.append(_host(found))
    return "\n\n".join([*parts, *lost(data, op, found)])


def _cells(row: dict[str, Any], told: Judged) -> list[str]:
    ms, host = row["ms"], row.get("host ms", {})
    fused = {name: ms[name] for name in ms if name.startswith("fused ")}
    fastest = min(fused, key=fused.__getitem__) if fused else ""
    return [
        shape_of(row), f"{min(ms['mm'], ms['ours mm']):.3f}", f"{ms['nccl']:.3f}",
        *(f"{ms[name]:.3f}" if name in ms else "-" for name in PEERS),
        f"{fused[fastest]:.3f}{way(fastest)}" if fused else "-",
        f"{row['decided']}, {ms['ours']:.3f}", f"{told.ratio:.3f}",
        f"{told.best / fused[fastest]:.3f}" if fused else "-", told.why or f"{told.win:.2f}",
        " / ".join(f"{host[name]:.2f}" if name in host else "-" for name in ("nccl + mm", "ours")),
    ]  # fmt: skip


def _means(found: Found) -> str:
    """Geometric means over the large shapes and over all, and what share of the way was won."""
    large = [min(row["m"], row["n"]) >= LARGE for row, _ in found]

    def of(ratio: Callable[[dict[str, Any], Judged], float]) -> str:
        ratios = [ratio(row, told) for row, told in found]
        those = [x for x, is_large in zip(ratios, large, strict=True) if is_large]
        first = f"{geomean(those):.3f} over the {len(those)} with {LARGE} rows and columns or more, " if those else ""
        return f"{first}{geomean(ratios):.3f} over all {len(ratios)}"

    text = (
        f"Geometric means: best / by itself {of(lambda _, told: told.ratio)}; best / what the table says that is made "
        f"of this record {of(lambda row, told: told.best / taken(row['op'], row['ms']))}."
    )
    wins = [told.win for _, told in found if told.win is not None]
    if wins:
        both = f"{mean(wins):.2f} in the mean, {median(wins):.2f} the median"
        text += f" Won, of {len(wins)} shapes that have a share: {both}."
    if any(floor_of(row).handshake is None for row, _ in found):
        text += (
            " No handshake was measured of this op: the floor is too low by it, and more was won than the column says."
        )
    return text


def _host(found: Found) -> str:
    """What issuing calls costs the host."""

    def span(name: str) -> str:
        of = [row["host ms"][name] for row, _ in found if name in row["host ms"]]
        return f"{min(of):.2f} to {max(of):.2f} ms"

    behind = sum(row["host ms"]["ours"] > row["ms"]["ours"] for row, _ in found)
    text = (
        "All of these are GPU time with the host ahead: a call is issued before the GPU comes to it. An eager call of "
        f"ours costs the host {span('ours')}, NCCL + mm {span('nccl + mm')} (the last column)"
    )
    if not behind:
        return f"{text}: a program that runs ahead of its GPU does not see it."
    many = "every shape" if behind == len(found) else f"{behind} of the {len(found)} shapes"
    alone = (
        f" Our matmul alone costs the host {span('ours mm')}, behind a gate {span('gated 1')}."
        if all("gated 1" in row["host ms"] for row, _ in found)
        else ""
    )
    return (
        f"{text}; ours is more than its GPU time in {many}. A program that does not run ahead of its GPU pays the "
        f"host's time, and there NCCL and torch.mm may be the faster.{alone} Next: count what a call asks of the "
        "driver, and issue it from fewer calls of Python."
    )


def lost(data: dict[str, Any], op: str, found: Found) -> list[str]:
    """The shapes that are behind the best, by itself, and why as far as the record shows."""
    behind = sorted(((row, told) for row, told in found if told.ratio < 1), key=lambda one: one[1].ratio)
    if not behind:
        return ["No shape is behind the best."]
    lines = []
    for row, told in behind:
        now = decided(row["ms"])
        then = Decided(row["decided"] == "fused", row["chunks"], row.get("way") or now.way)
        same = then == now or not (then.fused or now.fused)
        what = "the same form, on trial," if same else f"{named(now, op)}, which the table takes since,"
        took = taken(row["op"], row["ms"])
        text = f"{named(then, op)}, {told.ratio:.3f}; {what} took {took:.3f} ms, {told.best / took:.3f}"
        lines.append(f"- {shape_of(row)}: {text}. {why(data, row)}")
    return ["**Behind the best**, by itself:", "\n".join(lines)]
