"""The page on grouped matmuls: layers of mixtures of experts, by skew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.core.records import Data, Row, records
from benchmarks.report.notes import Notes
from benchmarks.report.tables import columns, geomean, incomplete, of, table, verdict

NOTES = Notes("grouped")
#: The peer that a run has where it can be imported.
PEER = "DeepGEMM"
#: What share of its rate a product is to keep when its load is uneven.
ENOUGH = 0.95


def page(results: Path) -> list[str]:
    parts = NOTES.page(SECTIONS, lambda name: records(results, f"gemm_{name}"))
    return parts if len(parts) > 1 else [*parts, NOTES("none")]


def by_kind(data: Data) -> dict[str, list[Row]]:
    """Rows by what is computed, in the record's order."""
    return {kind: [row for row in data["rows"] if row["kind"] == kind] for kind in _names(data["rows"], "kind")}


def section(data: Data, names: Sequence[str]) -> list[str]:
    """A record: means by kind and skew, what skew costs, then a table of each kind; ``names`` are the ways it timed."""
    seeds = {row["skew"]: row["seed"] for row in data["rows"] if "seed" in row}
    said = ", ".join(f"{seed} ({skew})" for skew, seed in seeds.items())
    name = str(data["name"]).removeprefix("gemm_")
    parts = [NOTES.of(data, name, seeds=f" Seeds: {said}." if said else ""), *incomplete(data), means(data)]
    parts += beside_deepgemm(data) + skewed(data)
    for kind, rows in by_kind(data).items():
        parts += [f"**{kind.capitalize()}**", columns(rows, _fields(rows, names))]
    return parts


def _fields(rows: list[Row], names: Sequence[str]) -> dict[str, str]:
    """The columns that rows of a kind have."""
    peer = any(PEER in row["us"] for row in rows)
    fields = {
        "layer": "{layer}", "rows x N x K": "{shape}", "skew": "{skew}", "largest group": "{largest_group}",
        **of("us", [*names, *([PEER] if peer else [])], ".0f", ", us"), "ours, TFLOP/s": "{tflops[ours]:.0f}",
        "torch / ours": "{ratio:.3f}", f"{PEER} / ours": "{to_deepgemm:.3f}",
        "host, ours / torch, us": "{host_us[ours]:.0f} / {host_us[torch]:.0f}", "plan": "{plan}",
    }  # fmt: skip
    if not any("largest_group" in row for row in rows):
        del fields["largest group"]
    if not peer:
        del fields[f"{PEER} / ours"]
    return fields


def means(data: Data, ratio: str = "ratio", band: str = "band") -> str:
    """Kinds and skews, and how often torch is ahead; or DeepGEMM, by the names of its ratio and its band."""
    lines = []
    for kind, every in by_kind(data).items():
        rows = [row for row in every if ratio in row]
        skews = {"all": rows} | {skew: [row for row in rows if row["skew"] == skew] for skew in _names(rows, "skew")}
        for skew, some in skews.items() if rows else ():
            outcomes = [verdict(row[ratio], row[band]) for row in some]
            counts = " / ".join(str(outcomes.count(one)) for one in ("won", "even", "lost"))
            ratios = [row[ratio] for row in some]
            lines.append([kind, skew, str(len(some)), f"{geomean(ratios):.3f}", f"{min(ratios):.3f}", counts])
    return table(["", "skew", "layers", "geometric mean", "worst", "won / even / lost"], lines)


def beside_deepgemm(data: Data) -> list[str]:
    """The means of DeepGEMM's time by ours, and where it was left out; nothing of a run without it."""
    version = data.get("peers", {}).get(PEER)
    if version is None:
        return []
    rows = [row for row in data["rows"] if "to_deepgemm" in row]
    parts = [NOTES("deepgemm", version=version)]
    parts += [means(data, "to_deepgemm", "deepgemm_band")] if rows else []
    left = [row for row in data["rows"] if PEER in row.get("refused", {})]
    reasons = [f"- {row['layer']}, {row['skew']}: {' '.join(row['refused'][PEER].split())}" for row in left]
    return parts + ([NOTES("deepgemm left out"), "\n".join(reasons)] if left else [])


def skewed(data: Data) -> list[str]:
    """Of products, the rate of an uneven load by that of a uniform one, ours and torch's."""
    layers: dict[str, dict[str, dict[str, float]]] = {}
    for row in data["rows"]:
        if row["kind"] == "product":
            layers.setdefault(row["layer"], {})[row["skew"]] = row["tflops"]
    both = {name: skews for name, skews in layers.items() if {"uniform", "zipf"} <= set(skews)}
    if not both:
        return []

    def kept(skews: dict[str, dict[str, float]], way: str) -> float:
        return skews["zipf"][way] / skews["uniform"][way]

    ours = {name: kept(skews, "ours") for name, skews in both.items()}
    worst = min(ours, key=ours.__getitem__)
    enough = sum(one >= ENOUGH for one in ours.values())
    few = [one for name, one in ours.items() if "decode" in name]
    many = [one for name, one in ours.items() if "decode" not in name]
    means = [f"{geomean(some):.3f} {of}" for some, of in ((many, "with many rows"), (few, "of *decode*")) if some]
    said = NOTES(
        "skewed", means=", ".join(means), worst=ours[worst], layer=worst, kept=enough, count=len(ours), enough=ENOUGH
    )  # fmt: skip
    lines = [
        [name, *(f"{skews[skew]['ours']:.0f}" for skew in ("uniform", "zipf")), f"{ours[name]:.3f}",
         f"{kept(skews, 'torch'):.3f}"]
        for name, skews in both.items()
    ]  # fmt: skip
    heads = ["layer", "ours, uniform, TFLOP/s", "ours, Zipf, TFLOP/s", "Zipf / uniform", "torch's Zipf / uniform"]
    return [said, table(heads, lines)]


def _names(rows: Iterable[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


SECTIONS: dict[str, Callable[[Data], list[str]]] = {
    "grouped": lambda data: section(data, ("torch", "loop", "ours")),
    "experts": lambda data: section(data, ("torch", "ours")),
}
