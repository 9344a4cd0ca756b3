"""The page on grouped matmuls: layers of mixtures of experts, by skew."""

from __future__ import annotations

import collections
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.core.records import Data, Row, records
from benchmarks.gemm.grouped import LAYERS, sizes
from benchmarks.report.notes import Notes
from benchmarks.report.tables import cell, columns, geomean, incomplete, of, table, verdict

NOTES = Notes("grouped")
#: What share of its rate a product is to keep when its load is uneven.
ENOUGH = 0.95
#: The name of each row's fastest peer.
BEST = "best"


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
    parts += beside_peers(data) + skewed(data)
    for kind, rows in by_kind(data).items():
        parts += [f"**{kind.capitalize()}**", columns(rows, _fields(rows, names))]
    return parts


def _fields(rows: list[Row], names: Sequence[str]) -> dict[str, str]:
    """The columns that rows of a kind have."""
    peers = list(dict.fromkeys(name for row in rows for name in row.get("peers", {})))
    fields = {
        "layer": "{layer}", "rows x N x K": "{shape}", "skew": "{skew}", "largest group": "{largest_group}",
        **of("us", [*names, *peers], ".0f", ", us"), "ours, TFLOP/s": "{tflops[ours]:.0f}",
        "torch / ours": "{ratio:.3f}", **{f"{peer} / ours": f"{{peers[{peer}][ratio]:.3f}}" for peer in peers},
        "host, ours / torch, us": "{host_us[ours]:.0f} / {host_us[torch]:.0f}", "plan": "{plan}",
    }  # fmt: skip
    if not any("largest_group" in row for row in rows):
        del fields["largest group"]
    return fields


def means(data: Data, peer: str = "") -> str:
    """Kinds and skews, and how often torch is ahead; or ``peer``; or ``best``, the fastest peer of each row."""
    lines = []
    for kind, every in by_kind(data).items():
        rows = [(row["skew"], *found) for row in every if (found := _ratio(row, peer)) is not None]
        skews = {"all": rows} | {
            skew: [row for row in rows if row[0] == skew] for skew in dict.fromkeys(r[0] for r in rows)
        }
        for skew, some in skews.items() if rows else ():
            outcomes = [verdict(ratio, band) for _, ratio, band in some]
            counts = " / ".join(str(outcomes.count(one)) for one in ("won", "even", "lost"))
            ratios = [ratio for _, ratio, _ in some]
            lines.append([kind, skew, str(len(some)), f"{geomean(ratios):.3f}", f"{min(ratios):.3f}", counts])
    return table(["", "skew", "layers", "geometric mean", "worst", "won / even / lost"], lines)


def _ratio(row: Row, peer: str) -> tuple[float, Sequence[float]] | None:
    """A peer's time by ours with its quartiles; torch's if no peer is named, the fastest peer's if it is `BEST`."""
    if not peer:
        return row["ratio"], row["band"]
    peers = row.get("peers", {})
    if peer == BEST:
        peer = min(peers, key=lambda name: peers[name]["ratio"], default="")
    return (peers[peer]["ratio"], peers[peer]["band"]) if peer in peers else None


def beside_peers(data: Data) -> list[str]:
    """The means of each peer's time by ours, and where it was left out; nothing of a run without peers."""
    versions = data.get("peers", {})
    if not versions:
        return []
    rows = [row for row in data["rows"] if row["kind"] == "product"]
    parts = [NOTES("peers")]
    for peer, version in versions.items():
        parts += [NOTES(f"peer {peer}", version=version)]
        parts += [means(data, peer)] if any(peer in row.get("peers", {}) for row in rows) else []
        left = [row for row in rows if peer in row.get("refused", {})]
        reasons = [f"- {row['layer']}, {row['skew']}: {' '.join(row['refused'][peer].split())}" for row in left]
        parts += [NOTES("left out", peer=peer), "\n".join(reasons)] if left else []
        chosen = collections.Counter(
            row["peers"][peer]["config"] for row in rows if row.get("peers", {}).get(peer, {}).get("config")
        )
        if chosen:
            said = ", ".join(f"{name} ({count})" for name, count in chosen.most_common())
            parts += [NOTES("configurations", configs=said)]
    if len(versions) > 1:
        parts += [NOTES("best peer"), means(data, BEST)]
    absent = [f"- {peer}: {' '.join(why.split())}" for peer, why in data.get("absent", {}).items()]
    return parts + ([NOTES("absent peers"), "\n".join(absent)] if absent else [])


def skewed(data: Data) -> list[str]:
    """Of products, the rate of an uneven load by that of a uniform one, ours and torch's."""
    layers: dict[str, dict[str, dict[str, float]]] = {}
    full: dict[str, dict[str, float | None]] = {}
    for row in data["rows"]:
        if row["kind"] == "product":
            layers.setdefault(row["layer"], {})[row["skew"]] = row["tflops"]
            full.setdefault(row["layer"], {})[row["skew"]] = filled(row)
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
         f"{kept(skews, 'torch'):.3f}", *(cell(full[name][skew], ".2f") for skew in ("uniform", "zipf"))]
        for name, skews in both.items()
    ]  # fmt: skip
    heads = [
        "layer", "ours, uniform, TFLOP/s", "ours, Zipf, TFLOP/s", "Zipf / uniform", "torch's Zipf / uniform",
        "filled, uniform", "filled, Zipf",
    ]  # fmt: skip
    return [said, table(heads, lines)]


def filled(row: Row) -> float | None:
    """The share of the tiles' rows that hold rows, by the plan's tile and the sizes of the row's skew."""
    layer = next((one for one in LAYERS if one.name == row["layer"]), None)
    tile = re.search(r"(\d+)x\d+ tiles", row["plan"])
    if layer is None or tile is None:
        return None
    height = int(tile[1])
    return layer.rows / sum(-(-size // height) * height for size in sizes(layer.rows, layer.experts, row["skew"]))


def _names(rows: Iterable[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def sources(data: Data) -> list[str]:
    """Rows by source: what the Hopper kernel gains over the portable one, and what sources cost beside sorted rows."""
    rows = data["rows"]
    lines = []
    for how in ("", ", signalled"):
        found = [(row[f"ratio{how}"], row[f"band{how}"]) for row in rows if f"ratio{how}" in row]
        if found:
            outcomes, ratios = [verdict(ratio, band) for ratio, band in found], [ratio for ratio, _ in found]
            counts = " / ".join(str(outcomes.count(one)) for one in ("won", "even", "lost"))
            beside = geomean([row["us"]["sorted"] / row["us"][f"hopper{how}"] for row in rows])
            name = how.removeprefix(", ") or "all there"
            lines.append([name, f"{geomean(ratios):.3f}", f"{min(ratios):.3f}", counts, f"{beside:.3f}"])
    heads = ["", "geometric mean", "worst", "won / even / lost", "sorted / Hopper"]
    fields = {
        "layer": "{layer}", "rows x N x K": "{shape}", "skew": "{skew}",
        **of("us", list(rows[0]["us"]) if rows else [], ".0f", ", us"),
        "portable / Hopper": "{ratio:.3f}", "signalled": "{ratio, signalled:.3f}", "plan": "{plans[hopper]}",
    }  # fmt: skip
    return [NOTES.of(data, "grouped_sources"), *incomplete(data), table(heads, lines), columns(rows, fields)]


SECTIONS: dict[str, Callable[[Data], list[str]]] = {
    "grouped": lambda data: section(data, ("torch", "loop", "ours")),
    "experts": lambda data: section(data, ("torch", "ours")),
    "grouped_sources": sources,
}
