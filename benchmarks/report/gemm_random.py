"""The page on GEMM of random problems."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.core.records import Data, Row, records
from benchmarks.gemm.draw import CLASSES, ROWS, SHARES
from benchmarks.report import gemm_losses
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cell, columns, geomean, incomplete, table, verdict

NOTES = Notes("gemm_random")
#: How many of a board's problems are shown with their plans and the reasons: the worst.
SHOWN = 20


def page(results: Path) -> list[str]:
    def found(name: str) -> list[Data]:
        rows = records(results, f"gemm_{name}_*")
        for data in rows if name == "random" else ():
            of_device = (one for one in records(results, "gemm_counters_board") if one["folder"] == data["folder"])
            data["counters"] = next(of_device, None)
        return rows

    parts = NOTES.page(SECTIONS, found)
    return parts if len(parts) > 1 else [*parts, NOTES("none")]


def picture(data: Data) -> str:
    return f"{data['stem']}_{data['folder']}.png"


def by_class(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by class, which may share rows; without the classes that have none."""
    found = {name: [row for row in rows if name in row["classes"]] for name in CLASSES}
    return {name: rows for name, rows in found.items() if rows}


def board(data: Data) -> list[str]:
    """One seed on one device."""
    rows = data["rows"]
    hosts = [row["host_us"] for row in rows if {"ours", "torch"} <= set(row.get("host_us", ()))]
    host = {name: statistics.median(us[name] for us in hosts) if hosts else float("nan") for name in ("ours", "torch")}
    worst = sorted(rows, key=lambda row: row["ratio"])[:SHOWN]
    head = ["class", "problems", "geometric mean", "quartiles", "worst", "won / even / lost"]
    return [
        NOTES.of(data, "random", seed=data["seed"], flush=data["flush"], host=host, empty=data["empty_us"]["graph"]),
        *incomplete(data),
        table(head, [_of(name, some) for name, some in {"all": rows, **by_class(rows)}.items()]),
        f"![Ratio to torch's calls by operations, {data['device']}](../images/{picture(data)})",
        NOTES("worst", count=len(worst)),
        columns(worst, {
            "problem": "{shape}", "ratio": "{ratio:.3f}", "torch, us": "{us[torch]:.1f}", "ours, us": "{us[ours]:.1f}",
            "expected, us": "{expected_us:.1f}", "plan": "{plan}", "why": "{why}",
        }),
        *readings(rows, data.get("counters")),
    ]  # fmt: skip


def readings(rows: Sequence[Row], counters: Data | None) -> list[str]:
    """What the hardware counted in a board's ``rows``; empty where none of them was counted."""
    shapes = {row["shape"] for row in rows}
    found = [] if counters is None else [row for row in counters["rows"] if row["shape"] in shapes]
    if counters is None or not found:
        return []
    said = NOTES("counters of the worst", device=counters["device"], commit=counters["commit"], date=counters["date"])
    return [said, gemm_losses.readings(found, "problem", "torch")]


def _of(name: str, rows: Sequence[Row]) -> list[str]:
    """A class in a line."""
    ratios = sorted(row["ratio"] for row in rows)
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    outcomes = [verdict(row["ratio"], row["band"]) for row in rows]
    counts = " / ".join(str(outcomes.count(one)) for one in ("won", "even", "lost"))
    what = f"**{name}**: {CLASSES[name]}" if name in CLASSES else f"**{name}**"
    return [what, str(len(rows)), f"{geomean(ratios):.3f}", f"{low:.3f} to {high:.3f}", f"{ratios[0]:.3f}", counts]


def sweep(data: Data) -> list[str]:
    """What the plan's choices reach of the best of the candidates: those of then, and of the models of today."""
    from benchmarks.gemm import fit  # imports torch

    device, lines, names = fit.device_of(data), [], dict.fromkeys((*ROWS.values(), *SHARES))
    kinds = {"all": data["rows"]} | {kind: [row for row in data["rows"] if row["kind"] == kind] for kind in names}
    for name, rows in kinds.items():
        if rows:
            today = [] if device is None else fit.shares(fit.constants_of(device), fit.sweeps([{**data, "rows": rows}]))
            told = [row["of_best"] for row in rows], list(today)
            figures = [cell(of(shares) if shares else None) for shares in told for of in (geomean, min)]
            lines.append([name, str(len(rows)), *figures])
    plans = sum(len(row["plans"]) for row in data["rows"])
    small = ", small problems" * ("_small_" in data["stem"])
    which = "Chosen problems" if data["stem"].endswith("shapes") else f"Seed {data['seed']} of the sweeps{small}"
    return [
        NOTES.of(data, "sweep", which=which, plans=plans),
        *incomplete(data),
        table(["problems", "count", "best / plan, geometric mean", "worst", "best / today's choice", "worst"], lines),
    ]


SECTIONS = {"random": board, "sweep": sweep}
