"""The page on the CPU backend, and on what a process's first call does without a GPU."""

from __future__ import annotations

from pathlib import Path

from benchmarks.core.records import Data, records
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cells, table, versions, where

NOTES = Notes("cpu")


def page(results: Path) -> list[str]:
    """The parts of the page."""
    parts = [NOTES("page")]
    for name, section in SECTIONS.items():
        parts += [part for data in records(results, name) if data["folder"] == "cpu" for part in section(data)]
    return parts


def matmul(data: Data) -> list[str]:
    """Everything arrived."""
    kinds = list(data["rows"][0]["ratio"])
    rows = [
        ["x".join(map(str, row["shape"])), *cells(row["ms"], ["torch.mm"], ".2f"), *cells(row["ratio"], kinds)]
        for row in data["rows"]
    ]
    head = ["M x N x K", "torch.mm, ms", *(f"{kind}, ratio" for kind in kinds)]
    return [NOTES("matmul", where=where(data)), table(head, rows)]


def stream(data: Data) -> list[str]:
    """Input from a disk."""
    ways = ("read", "multiply", "in turn", "streamed")
    rows = [
        [
            str(row["shape"][1]), *cells(row["ms"], ways, ".0f"), f"{row['speedup']:.2f}", f"{row['hidden']:.0%}",
            f"{row['of_bound']:.3f}",
        ]
        for row in data["rows"]
    ]  # fmt: skip
    m, _, k = data["rows"][0]["shape"]
    head = ["N", *(f"{way}, ms" for way in ways), "in turn / streamed", "hidden", "of the bound"]
    said = NOTES("stream", m=m, k=k, size=data["bytes"] / 2**20, where=where(data))
    return [said, table(head, rows), NOTES("stream plot")]


def first_call(data: Data) -> list[str]:
    """The Python part of a first call."""
    before = data["before"]["seconds"]
    rows = [[row["step"], row["whose"], f"{before[row['step']]:.2f}", f"{row['seconds']:.2f}"] for row in data["rows"]]
    total = f"{sum(before.values()):.2f}", f"{sum(row['seconds'] for row in data['rows']):.2f}"
    call = data["rows"][-1]
    said = NOTES("first_call", **data, versions=versions(data), then=before[call["step"]], now=call["seconds"])
    return [said, table(["step", "whose", "before, s", "now, s"], [*rows, ["all", "", *total]])]


SECTIONS = {"matmul": matmul, "stream": stream, "first_call": first_call}
