"""The page on grouped matmuls: layers of mixtures of experts, by skew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.core.records import Data, Row, records
from benchmarks.report.notes import Notes
from benchmarks.report.tables import columns, geomean, incomplete, of, table, verdict

NOTES = Notes("grouped")


def page(results: Path) -> list[str]:
    parts = NOTES.page(SECTIONS, lambda name: records(results, f"gemm_{name}"))
    return parts if len(parts) > 1 else [*parts, NOTES("none")]


def by_kind(data: Data) -> dict[str, list[Row]]:
    """Rows by what is computed, in the record's order."""
    return {kind: [row for row in data["rows"] if row["kind"] == kind] for kind in _names(data["rows"], "kind")}


def section(data: Data, names: Sequence[str]) -> list[str]:
    """A record: means by kind and skew, then a table of each kind; ``names`` are the ways that it timed."""
    fields = {
        "layer": "{layer}", "rows x N x K": "{shape}", "skew": "{skew}", "largest group": "{largest_group}",
        **of("us", names, ".0f", ", us"), "ours, TFLOP/s": "{tflops[ours]:.0f}", "torch / ours": "{ratio:.3f}",
        "host, ours / torch, us": "{host_us[ours]:.0f} / {host_us[torch]:.0f}", "plan": "{plan}",
    }  # fmt: skip
    if not any("largest_group" in row for row in data["rows"]):
        del fields["largest group"]
    parts = [NOTES.of(data, str(data["name"]).removeprefix("gemm_")), *incomplete(data), means(data)]
    for kind, rows in by_kind(data).items():
        parts += [f"**{kind.capitalize()}**", columns(rows, fields)]
    return parts


def means(data: Data) -> str:
    """Kinds and skews, and how often torch is ahead."""
    lines = []
    for kind, rows in by_kind(data).items():
        skews = {"all": rows} | {skew: [row for row in rows if row["skew"] == skew] for skew in _names(rows, "skew")}
        for skew, some in skews.items():
            outcomes = [verdict(row["ratio"], row["band"]) for row in some]
            counts = " / ".join(str(outcomes.count(one)) for one in ("won", "even", "lost"))
            ratios = [row["ratio"] for row in some]
            lines.append([kind, skew, str(len(some)), f"{geomean(ratios):.3f}", f"{min(ratios):.3f}", counts])
    return table(["", "skew", "layers", "geometric mean", "worst", "won / even / lost"], lines)


def _names(rows: Iterable[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


SECTIONS: dict[str, Callable[[Data], list[str]]] = {
    "grouped": lambda data: section(data, ("torch", "loop", "ours")),
    "experts": lambda data: section(data, ("torch", "ours")),
}
