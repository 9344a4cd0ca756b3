"""The page on matmuls and collectives: calls by both clocks, replays, Llama blocks, mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.core.records import Data, Row, records
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cell, cells, device_of, geomean, incomplete, table, versions

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
    floor
        Ways that are parts of a call, compute and transfer, each alone: no call takes less than the longer one.
    """

    title: str
    ours: Sequence[str]
    peers: Sequence[str]
    what: Callable[[Row], str]
    group: Callable[[Row], str]
    floor: Sequence[str] = ()


#: A target of calls whose parts overlap: so many times the longer part, and so many microseconds.
TIMES, SPARE = 1.10, 40.0


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
        lambda row: str(row["skew"]), ("experts", "rows"),
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
    beside = by_floor(rows, kind) if kind.floor else []
    return [said, *incomplete(data), *earlier, _means(rows, kind), _rows(rows, kind, clocks), *beside]


def above(row: Row, clock: str, own: str, kind: Kind) -> float | None:
    """A call's time by the longer one of its parts and what is allowed beside it; None where one was not timed."""
    us = row[clock]
    there = own in us and all(name in us for name in kind.floor)
    return us[own] / (max(us[name] for name in kind.floor) + SPARE) if there else None


def is_late(row: Row, clock: str, own: str, kind: Kind, of: str = "") -> bool:
    """Whether a call, by its clock or by that of ``of``, takes longer than the target that its parts set."""
    us = row[clock]
    return bool(row[of or clock][own] > TIMES * max(us[name] for name in kind.floor) + SPARE)


def by_floor(rows: list[Row], kind: Kind) -> list[str]:
    """Calls by the longer one of their parts: means, where the target is missed, and rows."""
    columns = [(clock, own) for clock in CLOCKS for own in kind.ours]
    heads = ["", *(f"{own}, {CLOCKS[clock]}" for clock, own in columns)]

    def late(some: list[Row], clock: str, own: str, of: str = "") -> str:
        there = [row for row in some if above(row, clock, own, kind) is not None]
        return f"{sum(is_late(row, clock, own, kind, of) for row in there)} of {len(there)}"

    def mean(some: list[Row], clock: str, own: str) -> str:
        found = [x for row in some if (x := above(row, clock, own, kind)) is not None]
        return f"{geomean(found):.3f} ({max(found):.3f})" if found else "-"

    means = []
    for group in dict.fromkeys(map(kind.group, rows)):
        some = [row for row in rows if kind.group(row) == group]
        means.append([f"{group}, {len(some)} rows", *(mean(some, *column) for column in columns)])
    means.append(["target missed", *(late(rows, *column) for column in columns)])
    lines = [[kind.what(row), *(cell(above(row, *column, kind)) for column in columns)] for row in rows]
    called, ahead = CLOCKS
    own, models = kind.ours[0], dict.fromkeys(str(row["of"]) for row in rows)
    where = [f"{late([row for row in rows if row['of'] == name], ahead, own)} of {name}" for name in models]
    said = NOTES(
        "ranks floor", parts=", ".join(kind.floor), times=TIMES, spare=SPARE, own=own, called=late(rows, called, own),
        ahead=late(rows, ahead, own), host=late(rows, called, own, "host us"), where=", ".join(where),
    )  # fmt: skip
    return [said, table(heads, means), table(heads, lines)]


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
