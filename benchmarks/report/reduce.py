"""The sections of docs/performance.md on all-reduces of few rows and on MLP blocks across GPUs. For `render_ranks`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.distributed.dispatch_table import by_library, decided, shape_of, taken
from benchmarks.gemm.shapes import geomean
from benchmarks.report.gemm import table

#: Columns of the all-reduce's table, by what a record calls them.
FORMS = {
    "mm": "matmul alone", "nccl": "NCCL alone", "nccl + mm": "NCCL + mm", "torch one shot + mm": "torch, one shot",
    "torch two shot + mm": "torch, two shots", "fused 1": "ours, fused", "nccl + ours": "ours, NCCL",
}  # fmt: skip
_PEERS = ("nccl + mm", "torch one shot + mm", "torch two shot + mm")

Record = dict[str, Any]


def sections(folder: Path) -> list[str]:
    """Those of the records in ``folder``."""
    found = [reduced(data) for data in records(folder, "gpu_all_reduce_x*.json") if data["rows"]]
    blocks = [data for data in records(folder, "gpu_mlp_x*.json") if data["rows"]]
    return found + [block(data, _timeline(folder, data["world"])) for data in blocks]


def records(folder: Path, names: str) -> list[Record]:
    """Those of such names."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob(names))]


def _timeline(folder: Path, world: int) -> Record | None:
    return next(iter(records(folder, f"gpu_mlp_timeline_x{world}_*.json")), None)


def versions(data: Record) -> str:
    """On what a record was made, and when."""
    return f"{data['dtype']}, torch {data['torch']}, Triton {data['triton']}, commit `{data['commit']}`, {data['date']}"


def reduced(data: Record) -> str:
    """An all-reduce of few rows behind a matmul."""
    rows = [row for row in data["rows"] if {"nccl + mm", "nccl + ours"} <= set(row["ms"])]
    cells = []
    for row in rows:
        ms, host, made = row["ms"], row["host ms"], taken(row["op"], row["ms"])
        unfused = f"NCCL, {'mm' if by_library(row['op'], ms) else 'ours'}"
        cells.append([
            shape_of(row), *(f"{1e3 * ms[name]:.1f}" if name in ms else "-" for name in FORMS),
            "fused" if decided(ms).fused else unfused, f"{ms['nccl + mm'] / made:.3f}",
            f"{min(ms[name] for name in _PEERS if name in ms) / made:.3f}",
            " / ".join(f"{host[name]:.2f}" if name in host else "-" for name in ("nccl + mm", "fused 1")),
        ])  # fmt: skip
    head = [
        "M x N x K", *FORMS.values(), "the table", "NCCL + mm / the table", "best / the table",
        "host, ms: NCCL + mm / fused",
    ]  # fmt: skip
    means = [
        geomean(
            min(row["ms"][name] for name in peers if name in row["ms"]) / taken(row["op"], row["ms"]) for row in rows
        )
        for peers in (("nccl + mm",), _PEERS)
    ]
    text = (
        "M x N x K of a rank's matmul; microseconds with the matmul, the slowest rank's median "
        f"({versions(data)}). *Fused*: in one shot; *ours, NCCL*: our matmul, then the group's all-reduce. *The "
        "table*: what it says that is made of this record; *NCCL, mm*: torch's matmul, where that is the faster. "
        "*Best*: of NCCL + mm and torch's, whose kernels spin at barriers without a bound. Geometric means: NCCL + mm "
        f"/ the table {means[0]:.3f}, best / the table {means[1]:.3f}. GPU time, with the host ahead, as above."
    )
    return "\n\n".join([
        f"## Matmul, then all-reduce, {data['world']} x {data['device'].removeprefix('NVIDIA ')}", text,
        table(head, cells), _slower(rows),
    ])  # fmt: skip


def _slower(rows: list[Record]) -> str:
    """What is lost, and why as far as the record shows."""
    if not (two := [row for row in rows if row["ms"].get("torch two shot + mm", 9e9) < taken(row["op"], row["ms"])]):
        return "No row is behind."
    most = max(taken(row["op"], row["ms"]) / row["ms"]["torch two shot + mm"] for row in two) - 1
    return (
        f"torch's two shots are ahead in {len(two)} of {len(rows)} rows, by up to {most:.0%}: each rank adds a part of "
        "the rows and gathers the others', where one shot reads all of every peer's. Next: our form in two shots, with "
        "the stream's handshake between them, which is bounded."
    )


def shortened(site: str) -> str:
    """A line of `async_tp`'s report, without where the model's rates are from."""
    return site if ": left in " in site else site.split(" (")[0]


def block(data: Record, timeline: Record | None) -> str:
    """An MLP block: NCCL, torch's async TP, and ours, of one compiled graph."""
    cells = []
    for row in data["rows"]:
        for what, ms in row["ms"].items():
            cells.append([
                f"{what}, {row['tokens']} tokens", *(f"{ms[name]:.3f}" for name in ("nccl", "torch", "ours")),
                f"{ms['nccl'] / ms['ours']:.3f}", f"{ms['torch'] / ms['ours']:.3f}",
            ])  # fmt: skip
    text = (
        "Llama-3-70B's block in torch's parallel styles, compiled, milliseconds, the slowest rank's median, L2 "
        f"flushed, the host ahead ({versions(data)}). *NCCL*: as the compiler leaves it; *async TP*: its pass on "
        "torch's fused ops; *ours*: the same pass on ours."
    )
    head = ["", "NCCL", "async TP, torch's", "async TP, ours", "NCCL / ours", "torch's / ours"]
    parts = [
        f"## An MLP block, {data['world']} x {data['device'].removeprefix('NVIDIA ')}", text, table(head, cells),
        " ".join(_of_block(data["rows"][-1], timeline)),
    ]  # fmt: skip
    sites = "\n".join(f"- {shortened(site)}" for site in data["rows"][-1]["sites"])
    told = "What the compiler fused, what was decided of it, and what it left, in the words of that commit:"
    return "\n\n".join([*parts, f"{told}\n\n{sites}"])


def _of_block(row: Record, timeline: Record | None) -> list[str]:
    """Why there is no more to win, from the block's timeline, and the next idea."""
    ms = row["ms"]["forward"]
    said = []
    if ms["ours"] > ms["torch"]:
        said.append(f"**Behind** torch's async TP by {ms['ours'] / ms['torch'] - 1:.1%} forward.")
    if timeline is not None:
        last = max(timeline["rows"], key=lambda one: one["spans"][-1][1] if one["spans"] else 0.0)["rank"]
        mine = {one["lane"]: one["spans"] for one in timeline["rows"] if one["rank"] == last}
        lengths = {lane: sum(end - begin for begin, end in spans) / 1e3 for lane, spans in mine.items()}
        matmuls = lengths["gather: w1, w3"] + lengths["w2, and publish"]
        between = lengths["silu, sum"]
        said.append(
            f"Of the eager block's {timeline['ms']:.3f} ms (its timeline is below) the three matmuls of the last rank, "
            f"{last}, are {matmuls:.3f} and kernels between and behind them {between:.3f}: a better overlap could "
            f"still win {timeline['ms'] - matmuls - between:.3f} ms."
        )
        said.append(
            f"The compiled block on the same ops takes {ms['ours'] - timeline['ms']:+.3f} ms against it, with L2 "
            "flushed and a batch of two sequences, whose rows are gathered along dimension 1; which of these it is, "
            "the records do not say. Next: a timeline of the compiled block, ours and torch's."
        )
    both = row["ms"].get("forward and backward")
    if both:
        gathers, sums = (sum(f"fused_{op}" in site for site in row["sites"]) for op in ("all_gather", "matmul_reduce"))
        said.append(
            f"With the backward pass NCCL / ours is {both['nccl'] / both['ours']:.3f}, torch's / ours "
            f"{both['torch'] / both['ours']:.3f}: the compiler's pass fused {gathers} gathers and {sums} sum in all, "
            "and leaves the sum of the input's gradient, of two matmuls, to NCCL in either. Next: that sum, with its "
            "two matmuls, as one op."
        )
    return said
