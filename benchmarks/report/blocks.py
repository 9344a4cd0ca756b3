"""The page on matmuls and collectives, the rest: all-reduces of few rows, MLP blocks, a Llama."""

from __future__ import annotations

from pathlib import Path

from benchmarks.core.records import Data, Row, records
from benchmarks.distributed.dispatch_table import by_library, decided, shape_of, taken
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cells, device_of, geomean, table, versions

NOTES = Notes("distributed")
#: Columns of the all-reduce's table, by what a record calls them.
FORMS = {
    "mm": "matmul alone", "nccl": "NCCL alone", "nccl + mm": "NCCL + mm", "torch one shot + mm": "torch, one shot",
    "torch two shot + mm": "torch, two shots", "fused 1": "ours, fused", "nccl + ours": "ours, NCCL",
}  # fmt: skip
_PEERS = ("nccl + mm", "torch one shot + mm", "torch two shot + mm")
#: The rows of a Llama's record.
MODELS = {"blocks": "two blocks", "whole": "two blocks, embedding and head"}


def sections(results: Path) -> list[str]:
    parts = []
    for name, section in (("all_reduce", all_reduce), ("mlp", mlp), ("llama", llama)):
        made = [part for data in records(results, f"{name}_x*") for part in section(data, results)]
        parts += [NOTES(name), *made] if made else []
    return parts


def head(data: Data, part: str, **figures: object) -> str:
    return NOTES(part, device=device_of(data), dtype=data["dtype"], versions=versions(data), **figures)


def all_reduce(data: Data, _: Path) -> list[str]:
    rows = [row for row in data["rows"] if {"nccl + mm", "nccl + ours"} <= set(row["ms"])]

    def over(row: Row, *peers: str) -> float:
        return min(row["ms"][name] for name in peers if name in row["ms"]) / taken(row["op"], row["ms"])

    lines = []
    for row in rows:
        ms, unfused = row["ms"], f"NCCL, {'mm' if by_library(row['op'], row['ms']) else 'ours'}"
        lines.append([
            shape_of(row), *cells({name: 1e3 * value for name, value in ms.items()}, FORMS, ".1f"),
            "fused" if decided(ms).fused else unfused, f"{over(row, 'nccl + mm'):.3f}", f"{over(row, *_PEERS):.3f}",
            " / ".join(cells(row["host ms"], ("nccl + mm", "fused 1"), ".2f")),
        ])  # fmt: skip
    heads = [
        "M x N x K", *FORMS.values(), "the table", "NCCL + mm / the table", "best / the table",
        "host, ms: NCCL + mm / fused",
    ]  # fmt: skip
    means = {
        "nccl": geomean(over(row, "nccl + mm") for row in rows), "best": geomean(over(row, *_PEERS) for row in rows)
    }  # fmt: skip
    two = [over(row, _PEERS[2]) for row in rows if _PEERS[2] in row["ms"] and over(row, _PEERS[2]) < 1]
    said = NOTES("all_reduce no loss")
    if two:
        said = NOTES("all_reduce behind", count=len(two), rows=len(rows), most=1 / min(two) - 1)
    return [head(data, "all_reduce record", **means), table(heads, lines), said]


def mlp(data: Data, results: Path) -> list[str]:
    """An MLP block: NCCL, torch's async TP, and ours, of one compiled graph."""
    lines = [
        [
            f"{what}, {row['tokens']} tokens", *cells(ms, ("nccl", "torch", "ours")), f"{ms['nccl'] / ms['ours']:.3f}",
            f"{ms['torch'] / ms['ours']:.3f}",
        ]
        for row in data["rows"]
        for what, ms in row["ms"].items()
    ]  # fmt: skip
    heads = ["", "NCCL", "async TP, torch's", "async TP, ours", "NCCL / ours", "torch's / ours"]
    timeline = next(iter(records(results, f"mlp_timeline_x{data['world']}")), None)
    sites = "\n".join(f"- {shortened(site)}" for site in data["rows"][-1]["sites"])
    said = " ".join(_of_block(data["rows"][-1], timeline))
    return [head(data, "mlp record"), table(heads, lines), said, NOTES("mlp sites"), sites]


def _of_block(row: Row, timeline: Data | None) -> list[str]:
    """Why there is no more to win, from the block's timeline, and the next idea."""
    ms, said = row["ms"]["forward"], []
    if ms["ours"] > ms["torch"]:
        said.append(NOTES("mlp behind", behind=ms["ours"] / ms["torch"] - 1))
    if timeline is not None:
        last = max(timeline["rows"], key=lambda one: one["spans"][-1][1] if one["spans"] else 0.0)["rank"]
        mine = {one["lane"]: one["spans"] for one in timeline["rows"] if one["rank"] == last}
        lengths = {lane: sum(end - begin for begin, end in spans) / 1e3 for lane, spans in mine.items()}
        matmuls, between = lengths["gather: w1, w3"] + lengths["w2, and publish"], lengths["silu, sum"]
        said.append(NOTES(
            "mlp timeline", ms=timeline["ms"], rank=last, matmuls=matmuls, between=between,
            left=timeline["ms"] - matmuls - between, more=ms["ours"] - timeline["ms"],
        ))  # fmt: skip
    both = row["ms"].get("forward and backward")
    if both:
        gathers, sums = (sum(f"fused_{op}" in site for site in row["sites"]) for op in ("all_gather", "matmul_reduce"))
        over = {name: both[name] / both["ours"] for name in ("nccl", "torch")}
        said.append(NOTES("mlp both", gathers=gathers, sums=sums, **over))
    return said


def shortened(site: str) -> str:
    """A line of `async_tp`'s report, without where the model's rates are from."""
    return site if ": left in " in site else site.split(" (")[0]


def llama(data: Data, _: Path) -> list[str]:
    """A Llama's losses as it is and on our ops, and what the handle reports."""
    lines, sites = [], []
    for row in data["rows"]:
        plain, ours = row["losses"]["plain"], row["losses"]["ours"]
        apart = max(abs(x - y) / abs(x) for x, y in zip(plain, ours, strict=True))
        lines.append([MODELS[row["model"]], f"{plain[0]:.4f}", f"{plain[-1]:.4f}", f"{ours[-1]:.4f}", f"{apart:.1e}"])
        for site in row["sites"]:
            what, how, why = shortened(site).split(": ", 2)
            sites.append([MODELS[row["model"]], f"`{what}`", how, why])
    steps = len(data["rows"][0]["losses"]["plain"])
    heads = ["", "first loss", f"after {steps} steps", "on our ops", "apart"]
    return [
        head(data, "llama record", steps=steps, world=data["world"]), table(heads, lines), NOTES("llama sites"),
        table(["", "op", "how", "why"], sites),
    ]  # fmt: skip
