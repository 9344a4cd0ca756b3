"""The page on matmuls and collectives: calls by both clocks, replays, Llama blocks, mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.core.records import Data, Row, records
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cells, device_of, geomean, incomplete, table, versions

NOTES = Notes("distributed")
#: Clocks: a program's, and with the host far ahead.
CLOCKS = {"wall us": "as called", "gpu us": "host ahead"}


class Kind(NamedTuple):
    """A kind of record.

    Attributes
    ----------
    title
        Of its part of the page.
    ours, peers
        Ways: what is compared, with the least of the others that are there.
    what
        The name of a row; `group`: by what its means are.
    """

    title: str
    ours: Sequence[str]
    peers: Sequence[str]
    what: Callable[[Row], str]
    group: Callable[[Row], str]


def _shape(row: Row) -> str:
    return f"{row['m']}x{row['n']}x{row['k']}"


def _layer(row: Row) -> str:
    return f"{row['of']}, {row['tokens']} tokens, {row['skew']}"


def _block(row: Row) -> str:
    return f"{row['model']}, {row['tokens']} tokens"


def _prefill(row: Row) -> str:
    return "prefill" if row["prefill"] else "decode"


KINDS = {
    "calls": Kind(
        "Eager calls", ("ours", "ours invariant"), ("nccl + mm", "torch fused"), _shape, lambda row: str(row["op"])
    ),
    "captured": Kind("Replays", ("ours",), ("nccl + mm", "torch fused"), _shape, lambda row: str(row["op"])),
    "served": Kind(
        "A Llama block", ("ours eager", "ours compiled"), ("nccl eager", "nccl compiled"), _block, _prefill
    ),
    "served_captured": Kind("A Llama block, replayed", ("ours captured",), ("nccl captured",), _block, _prefill),
    "moe": Kind(
        "A mixture of experts", ("ours", "ours captured", "ours unfused"), ("nccl + grouped",), _layer,
        lambda row: str(row["skew"]),
    ),
}  # fmt: skip


def ratio(row: Row, clock: str, own: str, peers: Sequence[str]) -> float | None:
    """The best peer's time / ours; None where there is no peer, or no such way."""
    us = row[clock]
    others = [us[name] for name in peers if name in us]
    return min(others) / us[own] if own in us and others else None


def as_called(data: Data) -> dict[str, float]:
    """Of a record of eager calls, by op and shape: the best peer's time of a call, the host included, by ours."""
    ratios = {f"{row['op']} {_shape(row)}": ratio(row, "wall us", "ours", KINDS["calls"].peers) for row in data["rows"]}
    return {name: found for name, found in ratios.items() if found is not None}


def sections(results: Path) -> list[str]:
    """The parts that have records."""
    parts = []
    for name, kind in KINDS.items():
        parts += [part for data in records(results, f"{name}_x*") for part in section(data, name, kind)]
    return parts


def section(data: Data, name: str, kind: Kind) -> list[str]:
    """A record: means by group, and a row each."""
    rows, clocks = data["rows"], list(CLOCKS)
    said = NOTES(
        f"ranks {name}", title=kind.title, device=device_of(data), dtype=data["dtype"], versions=versions(data)
    )  # fmt: skip
    earlier = [NOTES("ranks earlier")] if any("commit" in row for row in rows) else []
    return [said, *incomplete(data), *earlier, _means(rows, kind), _rows(rows, kind, clocks)]


def _means(rows: list[Row], kind: Kind) -> str:
    heads = ["", *(f"best / {own}, {said}" for own in kind.ours for said in CLOCKS.values())]
    lines = []
    for group in dict.fromkeys(map(kind.group, rows)):
        of_group = [row for row in rows if kind.group(row) == group]
        line = [f"{group}, {len(of_group)} rows"]
        for own in kind.ours:
            for clock in CLOCKS:
                found = [x for row in of_group if (x := ratio(row, clock, own, kind.peers)) is not None]
                line.append(f"{geomean(found):.3f} ({min(found):.3f})" if found else "-")
        lines.append(line)
    return table(heads, lines)


def _rows(rows: list[Row], kind: Kind, clocks: list[str]) -> str:
    ways = list(dict.fromkeys(name for row in rows for name in row[clocks[0]]))
    heads = [
        "", *(f"{way}, {said}" for said in CLOCKS.values() for way in ways),
        *(f"best / {own}, as called" for own in kind.ours), *(["host: ours"] if "host us" in rows[0] else []),
    ]  # fmt: skip
    lines = []
    for row in rows:
        of_commit = f" (`{row['commit']}`)" if "commit" in row else ""
        line = [(f"{row['op']} {kind.what(row)}" if "m" in row else kind.what(row)) + of_commit]
        line += [text for clock in clocks for text in cells(row[clock], ways, ".1f")]
        found = [ratio(row, clocks[0], own, kind.peers) for own in kind.ours]
        line += ["-" if one is None else f"{one:.3f}" for one in found]
        if "host us" in rows[0]:
            line += cells(row["host us"], kind.ours[:1], ".1f")
        lines.append(line)
    return table(heads, lines)
