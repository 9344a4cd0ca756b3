"""The page on attention: records of `attention` as tables, a timeline as a picture."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean

from benchmarks.core.records import Data, Row, records
from benchmarks.report.notes import Notes
from benchmarks.report.tables import by_clocks, cell, cells, geomean, mask, table, where
from benchmarks.report.timelines import Timelines
from tilestream.trace import LaunchTrace

NOTES = Notes("attention")
#: Peers in a row; all other implementations are ours.
PEERS = {"cudnn": "cuDNN", "fa4": "FA4"}
#: The record of models, and ours in it.
MODELS = "attention_transformers"
OURS = "tilestream"
#: A column of keys that arrive: both together, by the longer of copy and attention.
OVER = "over the larger"
#: The columns of a table of 8 bits.
NARROW = {"cudnn": "cuDNN, bfloat16", "hopper": "Hopper", "portable": "portable"}
#: Ratios below this are explained.
EXPLAINED = 0.98
#: Classes of rows that are behind, by their part of the notes; the first class that has a row explains it.
BEHIND: dict[str, Callable[[Row], bool]] = {
    "few keys": lambda row: row["length"] <= 1024,
    "head dim 64": lambda row: row["dim"] == 64,
    "head dim 128": lambda row: row["dim"] == 128,
    "others": lambda row: True,
}


def page(results: Path) -> list[str]:
    found = records(results, "attention*")
    parts = NOTES.page(SECTIONS, lambda _: found)
    parts += [f"{lacks[0]} ({where(data)})" for data in found if (lacks := _missing(data)) and data["stem"] != MODELS]
    return parts + TIMELINES.sections(results)


def _missing(data: Data) -> list[str]:
    missing = data.get("missing")
    return [f"Not measured, for want of time: {', '.join(missing)}"] if missing else []


def dense_calls(data: Data) -> list[Row]:
    """A record's rows of dense calls of `ts.attention`."""
    return [row for row in data["rows"] if row["name"].startswith("D") and "ts" in row["tflops"]]


def rows_of(data: Data, what: str) -> list[Row]:
    """A record's rows of a section."""
    return [row for row in data["rows"] if row["name"].startswith(f"{what} ")]


# Beside the faster peer -----------------------------------------------------------------------------------------------


def best(row: Row) -> tuple[str, float]:
    """The fastest of ours."""
    return max(((name, x) for name, x in row["tflops"].items() if name not in PEERS), key=lambda one: one[1])


def peer(row: Row) -> tuple[str, float]:
    """The fastest peer."""
    return max(((name, x) for name, x in row["tflops"].items() if name in PEERS), key=lambda one: one[1])


def ratio(row: Row) -> float:
    """Ours by the fastest peer."""
    return best(row)[1] / peer(row)[1]


def dense(data: Data) -> list[str]:
    made = beside_peers(data, "dense", [row for row in data["rows"] if row["name"].startswith("D")])
    plotted = made and data["stem"] == "attention"
    return [*made, NOTES("dense plot", **data)] if plotted else made


def variants(data: Data) -> list[str]:
    return beside_peers(data, "variants", rows_of(data, "variants"))


def beside_peers(data: Data, part: str, rows: list[Row]) -> list[str]:
    """Means, every row, and what is behind."""
    if not rows:
        return []
    ratios = list(map(ratio, rows))
    return [
        NOTES.of(data, part, mean=geomean(ratios), worst=min(ratios)),
        by_width(rows),
        compared(rows),
        *behind(rows),
    ]


def compared(rows: list[Row]) -> str:
    """A table of ours beside the fastest peer."""
    made = []
    for row in rows:
        (name, ours), (other, theirs) = best(row), peer(row)
        many = f", heads {row['heads']}:{row['heads_kv']}" if row["heads_kv"] else ""
        made.append(
            [f"D {row['dim']}, {mask(row)}, S {row['length']}{many}", f"{theirs:.0f} ({PEERS[other]})", f"{ours:.0f}",
             f"{ratio(row):.3f}", "" if name == "ts" else name]
        )  # fmt: skip
    return table(["", "peer", "ours", "ratio", "our tile"], made)


def by_width(rows: list[Row]) -> str:
    """Geometric means of ours by each peer, by head dim and mask."""
    peers = [name for name in PEERS if any(name in row["tflops"] for row in rows)]
    groups: dict[str, list[Row]] = {}
    for dim in dict.fromkeys(row["dim"] for row in rows):
        groups[f"D {dim}"] = [row for row in rows if row["dim"] == dim]
        for causal in (True, False):
            name = f"D {dim}, {'causal' if causal else 'non-causal'}"
            groups[name] = [row for row in groups[f"D {dim}"] if row["causal"] == causal]
    groups["all"] = rows
    made = []
    for name, some in groups.items():
        means = [_mean(best(row)[1] / row["tflops"][one] for row in some if one in row["tflops"]) for one in peers]
        fastest = list(map(ratio, some))
        made.append([name, *means, _mean(fastest), f"{min(fastest):.3f}" if fastest else "-"])
    head = ["geometric mean of ours by", *(PEERS[name] for name in peers), "the faster peer", "the worst of these"]
    return table(head, made)


def _mean(ratios: Iterable[float]) -> str:
    found = list(ratios)
    return f"{geomean(found):.3f}" if found else "-"


def behind(rows: list[Row]) -> list[str]:
    """The rows below `EXPLAINED`, class by class, and why."""
    lines, left = [], [row for row in rows if ratio(row) < EXPLAINED]
    for what, holds in BEHIND.items():
        found, left = [row for row in left if holds(row)], [row for row in left if not holds(row)]
        if found:
            worst = min(found, key=ratio)
            lines.append(
                f"- {what}: {len(found)} of {sum(map(holds, rows))}, down to {ratio(worst):.3f} (D {worst['dim']}, "
                f"{mask(worst)}, S {worst['length']}, {PEERS[peer(worst)[0]]}): {NOTES.line(f'behind {what}', {})}."
            )
    return [NOTES("behind", explained=EXPLAINED), "\n".join(lines)] if lines else []


# The other sections ---------------------------------------------------------------------------------------------------


def heads(data: Data) -> list[str]:
    """Query heads that share keys, beside as many that each have their own: sharing for nothing would be 1."""
    rows = rows_of(data, "heads")
    if not rows:
        return []
    own = {(row["causal"], row["length"]): row["tflops"] for row in rows if row["heads_kv"] == row["heads"]}
    made, ratios = [], []
    for row in rows:
        beside = own.get((row["causal"], row["length"]))
        if row["heads_kv"] == row["heads"] or beside is None:
            continue
        both = {one: row["tflops"][one] / beside[one] for one in row["tflops"] if one in beside}
        ratios.append(both["ts"])
        name = f"{mask(row)}, S {row['length']}, {row['heads']}:{row['heads_kv']}"
        made.append([name, *cells(both, ("ts", "cudnn"))])
    sharing = [NOTES("sharing", mean=geomean(ratios), least=min(ratios)),
               table(["shared / own", "ours", "cuDNN"], made)] if made else []  # fmt: skip
    return [NOTES.of(data, "heads"), compared(rows), *sharing]


def host(data: Data) -> list[str]:
    found = [row["us"] for row in data["rows"] if row["name"] == "host"]
    return [part for us in found for part in (NOTES.of(data, "host"), table(list(us), [cells(us, us, ".1f")]))]


def lists(data: Data) -> list[str]:
    """A mix of lengths, packed and in pages, beside a dense call that has about as many operations a token."""
    parts = []
    for row in (row for row in data["rows"] if "lengths" in row):
        lengths, rates = row["lengths"], row["tflops"]
        about = {"count": len(lengths), "low": min(lengths), "high": max(lengths), "what": row["name"].split(", ")[1]}
        same = sum(x * x for x in lengths) / sum(lengths)
        near = min(rows_of(data, "lists dense"), key=lambda one: abs(one["length"] - same), default=None)
        rows = [cells(rates, rates, ".0f")]
        if near is None:
            parts += [NOTES("lists alone", device=data["device"], where=where(data), **about), table(list(rates), rows)]
            continue
        rate = near["tflops"]["ts"]
        rows.append([f"{own / rate:.3f}" for own in rates.values()])
        parts += [NOTES.of(data, "lists", rate=rate, length=near["length"], **about), table(list(rates), rows)]
    return parts


def _shown(row: Row, what: str) -> str:
    """A row's name without its section; records say *full* of calls without a causal mask."""
    return re.sub(r"\bfull\b", "non-causal", row["name"].removeprefix(f"{what} "))


def fp8(data: Data) -> list[str]:
    rows = []
    for row in rows_of(data, "fp8"):
        rates = row["tflops"]
        over = rates["hopper"] / rates["cudnn"] if {"hopper", "cudnn"} <= set(rates) else None
        rows.append([_shown(row, "fp8"), *cells(rates, NARROW, ".0f", ""), cell(over, without="")])
    return [NOTES.of(data, "fp8"), table(["", *NARROW.values(), "Hopper / cuDNN"], rows)] if rows else []


def listed(what: str, key: str = "tflops", form: str = ".0f") -> Callable[[Data], list[str]]:
    """A section whose rows are shown as they are: a column an implementation."""

    def section(data: Data) -> list[str]:
        rows = rows_of(data, what)
        if not rows:
            return []
        names = list(dict.fromkeys(name for row in (rows if key == "tflops" else rows[:1]) for name in row[key]))
        more = ["shares"] if "shares" in rows[0] else []
        made = [
            [_shown(row, what), *cells(row[key], names, form, ""), *(str(row[one]) for one in more)] for row in rows
        ]
        whole = " whole" if data["stem"].endswith("whole") else ""
        return [NOTES.of(data, f"{what}{whole}"), table(["", *names, *more], made)]

    return section


def arriving(data: Data) -> list[str]:
    """Keys that arrive, by both clocks; records of before have the GPU's alone."""
    rows = rows_of(data, "arrival")
    if not rows:
        return []
    ways = list(dict.fromkeys(way for row in rows for way in row["ms"] if way != OVER))
    made = []
    for row in rows:
        clocks = [row[clock] for clock in ("ms", "gpu_ms") if clock in row]
        over = row["over_larger"].values() if "over_larger" in row else [row["ms"].get(OVER)]
        made.append([_shown(row, "arrival"), *(by_clocks((ms.get(way) for ms in clocks), "") for way in ways),
                     by_clocks(over, "")])  # fmt: skip
    whole = " whole" if data["stem"].endswith("whole") else ""
    return [NOTES.of(data, f"arrival{whole}"), table(["", *ways, OVER], made)]


def transformers(data: Data) -> list[str]:
    """Models by both clocks: ours beside eager, and beside the fastest of the other attentions."""
    rows = [row for row in data["rows"] if "model" in row]
    if not rows:
        return []
    refused = {f"{row['model']} has no {name}" for row in rows for name in row["refused"] if name != "eager"}
    note = f" Refused by transformers: {', '.join(sorted(refused))}." if refused else ""
    worst = max(error for row in rows for error in row["errors"].values())
    return [
        NOTES.of(data, "transformers", layers=data["layers"], note=note, worst=worst),
        *(part for clock in ("ms", "gpu_ms") for part in by_clock(rows, clock)),
        *_missing(data),
    ]


def by_clock(rows: list[Row], clock: str) -> list[str]:
    """A table of models by one clock, and the mean of what ours takes less."""
    names = list(dict.fromkeys(name for row in rows for name in row[clock] if name != OURS))
    made, ratios = [], []
    for row in rows:
        ms = row[clock]
        if OURS not in ms:
            continue
        best = min((ms[name] for name in names if name in ms), default=None)
        both = None if best is None else best / ms[OURS]
        ratios += [] if both is None else [both]
        made.append([row["name"], *cells(ms, (*names, OURS), ".2f", ""), cell(both, without="")])
    if not ratios:
        return []
    head = ["", *names, "ours", "best other / ours"]
    return [
        NOTES(f"transformers {clock}", count=len(ratios), mean=geomean(ratios), least=min(ratios)),
        table(head, made),
    ]


def sizes(data: Data) -> list[str]:
    found = sizes_of(data)
    if not found:
        return []
    lost = [1 - min(rates.values()) / max(rates.values()) for rates in found.values()]
    note = f" {data['note']}" if "note" in data else ""
    return [
        NOTES.of(data, "sizes", timed=sum(map(len, found.values())), shapes=len(found), least=min(lost),
             most=max(lost), note=note, picture=f"attention_sizes_{data['folder']}.png")
    ]  # fmt: skip


def sizes_of(data: Data) -> dict[tuple[int, int], dict[int, float]]:
    """Of each width and length: rates by the number of heads, by cuDNN's of the same run; of several runs the mean."""
    found: dict[tuple[int, int], dict[int, list[float]]] = {}
    for row in rows_of(data, "sizes"):
        shape = found.setdefault((row["dim"], row["length"]), {})
        for name, rate in row["tflops"].items():
            if name.endswith(" heads"):
                shape.setdefault(int(name.partition(" ")[0]), []).append(rate / row["tflops"]["cudnn"])
    return {at: {size: fmean(rates) for size, rates in sorted(shape.items())} for at, shape in found.items()}


# The timeline ---------------------------------------------------------------------------------------------------------


def evenness(launch: LaunchTrace) -> tuple[float, float, int, int, float]:
    """How even a launch is.

    Returns
    -------
    (busy, first, least, most, longest)
        Shares of the launch: of its workers' time, what they spend at tiles; when the first worker ends its last tile;
        the longest tile. ``least`` and ``most`` are the tiles of a worker.
    """
    length = launch.end - launch.begin
    tiles = [[span for span in own if span.kind == "tile"] for own in launch.by_worker]
    spent = [span.end - span.begin for own in tiles for span in own]
    first = min((max(span.end for span in own) - launch.begin for own in tiles if own), default=0.0)
    counts = [len(own) for own in tiles]
    return sum(spent) / (length * launch.workers), first / length, min(counts), max(counts), max(spent) / length


def timeline(launch: LaunchTrace, record: str, picture: str) -> str:
    """Of a call: how even its workers are."""
    busy, first, least, most, longest = evenness(launch)
    head, _, plan = launch.label.partition(": ")
    return NOTES(
        "timeline", head=head, plan=plan, tiles=launch.tiles_done, ms=1e3 * (launch.end - launch.begin), record=record,
        busy=busy, first=first, least=least, most=most, longest=longest, picture=picture,
    )  # fmt: skip


#: Of the section `timeline`.
TIMELINES = Timelines("trace_attention", "attention_timeline", 140, timeline)
SECTIONS: dict[str, Callable[[Data], list[str]]] = {
    "dense": dense, "heads": heads, "host": host, "split": listed("split", "us", ""),
    "arrival": arriving, "neighbour": listed("neighbour", "share", ""), "lists": lists, "fp8": fp8,
    "groups": listed("groups"), "sizes": sizes, "variants": variants, "blocks": listed("blocks"),
    "transformers": transformers,
}  # fmt: skip
